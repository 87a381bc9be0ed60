"""What the programs that read the files in deploy/ say of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
from ruamel.yaml import YAML

from tests.real.conftest import program

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUSTOMIZATIONS = ["base", "autotune", "monitoring", "example"]
UNITS = ["specdec-exporter.service", "vllm-restart.service", "vllm-restart.path"]
MOST_EXPOSED = 1.5
"""Of 10, by systemd's own reckoning."""


def run(
    *command: str | Path, check: bool = True, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def present(name: str) -> Path:
    """A program that belongs to the system and cannot be fetched."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}")
    return Path(path)


@pytest.mark.parametrize("name", ["prometheus.yml", "file-sd.yml", "kubernetes.yml"])
def test_promtool_takes_each_way_to_scrape(name: str, promtool: Path, tmp_path: Path) -> None:
    # Each says to copy the rules beside it.
    shutil.copytree(DEPLOY / "prometheus", tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "alerts" / "specdec.rules.yaml", tmp_path)
    done = run(promtool, "check", "config", tmp_path / name, check=False)
    if "field kubernetes_sd_configs not found" in done.stderr + done.stdout:
        # Debian builds Prometheus without the discovery of Kubernetes; the rest can be looked at.
        text = (tmp_path / name).read_text()
        static = re.sub(
            r"    kubernetes_sd_configs:\n(      .*\n)+",
            "    static_configs:\n      - targets: []\n",
            text,
        )
        (tmp_path / name).write_text(static)
        done = run(promtool, "check", "config", tmp_path / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_promtool_takes_the_configuration_of_compose(promtool: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "alerts" / "specdec.rules.yaml", tmp_path)
    text = (DEPLOY / "compose" / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/", ""))
    done = run(promtool, "check", "config", tmp_path / "prometheus.yml")
    assert "1 rule files found" in done.stdout


def built(name: str) -> str:
    kubectl = program("kubectl")
    version = run(kubectl, "version", "--client", check=False).stdout
    if 'Minor:"20"' in version:
        pytest.skip("this kubectl has a kustomize from before there were components")
    return run(kubectl, "kustomize", DEPLOY / "kubernetes" / name).stdout


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kubectl_builds_what_the_schemas_of_kubernetes_take(name: str) -> None:
    documents = list(YAML(typ="safe").load_all(built(name)))
    kinds = [document["kind"] for document in documents]
    assert len(kinds) > 3
    for document in documents:
        if document["kind"] not in ("PodMonitor", "PrometheusRule"):
            kubernetes_validate.validate(document, "1.30", strict=True)


def test_kubectl_puts_the_exporter_beside_vllm_and_nowhere_else() -> None:
    documents = list(YAML(typ="safe").load_all(built("example")))
    (pod,) = [d["spec"]["template"] for d in documents if d["kind"] == "Deployment"]
    assert {c["name"] for c in pod["spec"]["containers"]} == {"vllm", "specdec-exporter"}
    assert pod["metadata"]["labels"]["specdec-exporter"] == "scrape"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "vllm"


def test_what_changes_k_takes_its_settings_from_a_secret_and_selects_pods_of_its_own() -> None:
    autotune, base = (
        {d["kind"]: d for d in YAML(typ="safe").load_all(built(name))}
        for name in ("autotune", "base")
    )
    assert "ConfigMap" not in autotune
    volumes = autotune["Deployment"]["spec"]["template"]["spec"]["volumes"]
    (config,) = [volume for volume in volumes if volume["name"] == "config"]
    assert config.keys() == {"name", "secret"}
    selectors = [d["Deployment"]["spec"]["selector"]["matchLabels"] for d in (autotune, base)]
    assert selectors[0] != selectors[1]
    claims = {d["PersistentVolumeClaim"]["metadata"]["name"] for d in (autotune, base)}
    assert len(claims) == 2


def units(folder: Path) -> list[Path]:
    """The units, with commands that are on this machine."""
    for name in UNITS:
        text = (DEPLOY / "systemd" / name).read_text()
        (folder / name).write_text(
            text.replace("/opt/specdec-exporter/bin/specdec-exporter", "/bin/true")
        )
    (folder / "specdec-exporter.service.d").mkdir()
    shutil.copy(DEPLOY / "systemd" / "autotune.conf", folder / "specdec-exporter.service.d")
    return [folder / name for name in UNITS]


def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    analyze = present("systemd-analyze")
    done = run(analyze, "verify", *units(tmp_path))
    assert done.stdout + done.stderr == ""


def test_systemd_reckons_the_unit_hardly_exposed(tmp_path: Path) -> None:
    analyze = present("systemd-analyze")
    service = units(tmp_path)[0]
    done = run(analyze, "security", "--offline=true", "--no-pager", service)
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) <= MOST_EXPOSED


def test_compose_takes_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    compose: list[str | Path]
    if path := shutil.which("docker-compose"):
        compose = [path]
    else:
        compose = [present("docker"), "compose"]
        if run(*compose, "version", check=False).returncode:
            pytest.skip("this docker has no compose")
    monkeypatch.setenv("GRAFANA_PASSWORD", "secret")
    file = DEPLOY / "compose" / "compose.yaml"
    assert "exporter" in run(*compose, "--file", file, "config").stdout
