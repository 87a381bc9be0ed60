"""What is in deploy/ fits together, and fits the exporter; what programs say of it is in tests/real."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from packaging.requirements import Requirement
from ruamel.yaml import YAML
from specdec_exporter import __version__
from specdec_exporter.app import host_allowed
from specdec_exporter.config import Settings, listen_address, load

from tests.real.vllm_bed import free_port

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
KUBERNETES = DEPLOY / "kubernetes"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
BESIDE = KUBERNETES / "beside-vllm" / "container.yaml"
DASHBOARDS = ROOT / "grafana" / "dashboards"
SETTINGS = [
    DEPLOY / "compose" / "specdec.yaml",
    DEPLOY / "systemd" / "config.yaml",
    KUBERNETES / "base" / "config.yaml",
    KUBERNETES / "autotune" / "config.example.yaml",
]
MANIFESTS = sorted(
    path
    for path in KUBERNETES.rglob("*.yaml")
    if path.name != "kustomization.yaml" and path not in SETTINGS and path != BESIDE
)
BY_THE_OPERATOR = {"PodMonitor", "PrometheusRule"}
SCRAPED = {"specdec-exporter": "scrape"}
COMMAND = Path(sys.executable).with_name("specdec-exporter")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(path))


def document(path: Path) -> dict[str, Any]:
    (only,) = documents(path)
    return only


def beside() -> dict[str, Any]:
    """vLLM's Deployment of the example with what the component puts into it."""
    (vllm,) = [
        d for d in documents(KUBERNETES / "example" / "vllm.yaml") if d["kind"] == "Deployment"
    ]
    template, patch = vllm["spec"]["template"], document(BESIDE)["spec"]["template"]
    template["metadata"]["labels"] |= patch["metadata"]["labels"]
    for part in patch["spec"]:
        template["spec"][part] = patch["spec"][part] + template["spec"][part]
    return vllm


def manifests() -> list[dict[str, Any]]:
    return [beside(), *(d for path in MANIFESTS for d in documents(path))]


def pods() -> list[dict[str, Any]]:
    """The templates of pods that an exporter runs in."""
    found = [d["spec"]["template"] for d in manifests() if d["kind"] == "Deployment"]
    return [pod for pod in found if SCRAPED.items() <= pod["metadata"]["labels"].items()]


def exporter(pod: dict[str, Any]) -> dict[str, Any]:
    (one,) = [c for c in pod["spec"]["containers"] if c["name"] == "specdec-exporter"]
    container: dict[str, Any] = one
    return container


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(word, rest) for word, rest in lines]


def variables() -> dict[str, str]:
    ((_, env),) = [i for i in instructions() if i[0] == "ENV"]
    return dict(pair.split("=", 1) for pair in env.replace('"', "").split())


def test_hadolint_finds_nothing_to_complain_of() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_what_builds_the_wheel_in_the_image_is_hatchling_with_all_it_needs(tmp_path: Path) -> None:
    (program,) = re.findall(r"awk '(.+?)'", DOCKERFILE.read_text())
    lock = subprocess.run(
        ["awk", program, ROOT / "requirements-dev.lock"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    taken = set(re.findall(r"^([a-z][a-z-]*)==", lock, re.M))
    needed, open_ = set(), {"hatchling"}
    while open_:
        name = open_.pop()
        needed.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_ |= {requirement.name} - needed
    assert taken == needed
    assert lock.count("--hash=sha256:") >= len(taken)


def test_the_image_runs_the_command_of_this_version_as_a_user_without_a_name() -> None:
    last = dict(instructions())
    assert last["USER"] == "65532:65532"
    assert last["ENTRYPOINT"] == '["specdec-exporter"]'
    assert f'image.version="{__version__}"' in last["LABEL"]
    for label in ("title", "description", "licenses"):
        assert f"org.opencontainers.image.{label}=" in last["LABEL"]


def test_what_the_image_is_made_of_is_let_through_to_it() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an exporter that runs with the image's variables and cannot write its state."""
    port = free_port()
    given = variables() | {"SPECDEC_LISTEN": f"0.0.0.0:{port}", "STATE_DIRECTORY": "/proc"}
    del given["PATH"]
    calm = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
    log = tmp_path_factory.mktemp("image") / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [COMMAND, "serve"],
            env=calm | given | {"SPECDEC_TARGETS": "http://127.0.0.1:9"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            for _ in range(600):
                if process.poll() is not None or answers(port):
                    break
                time.sleep(0.05)
            assert process.poll() is None, log.read_text()
            yield port
        finally:
            process.terminate()
            process.wait(timeout=60)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=30):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def health_check(port: int) -> int:
    command = dict(instructions())["HEALTHCHECK"].partition("CMD ")[2]
    words = ast.literal_eval(command)
    usual = str(listen_address(variables()["SPECDEC_LISTEN"])[1])
    assert usual in words[-1]
    words[0], words[-1] = sys.executable, words[-1].replace(usual, str(port))
    return subprocess.run(words, capture_output=True, timeout=120).returncode


def test_the_health_check_passes_on_an_exporter_that_cannot_write_its_state(running: int) -> None:
    assert health_check(running) == 0


def test_the_health_check_fails_where_nobody_answers() -> None:
    assert health_check(free_port()) != 0


@pytest.mark.parametrize("path", SETTINGS, ids=lambda p: p.parent.name)
def test_settings_are_good(path: Path) -> None:
    assert load(path, environ={}).targets


def settings_in(container: dict[str, Any]) -> Settings:
    """As the exporter reads them, for want of its file from the environment alone."""
    given = {e["name"]: e.get("value", "pod-1") for e in container["env"]}
    expanded = {
        name: re.sub(r"\$\((\w+)\)", lambda m: given[m[1]], value) for name, value in given.items()
    }
    return load(environ=expanded)


def test_in_a_container_the_exporter_listens_on_every_address_at_the_port_that_is_scraped() -> None:
    assert load(environ=variables()).listen == "0.0.0.0:19185"
    assert len(pods()) == 2
    for pod in pods():
        host, port = listen_address(settings_in(exporter(pod)).listen)
        assert host == "0.0.0.0"
        assert exporter(pod)["ports"] == [{"name": "specdec", "containerPort": port}]


def test_beside_vllm_the_target_is_called_after_the_pod() -> None:
    (target,) = settings_in(exporter(beside()["spec"]["template"])).targets
    assert (target.name, target.url) == ("pod-1", "http://127.0.0.1:8000/metrics")


@pytest.mark.parametrize("version", ["1.25", "1.30", kubernetes_validate.latest_version()])
def test_manifests_follow_the_schemas_of_kubernetes(version: str) -> None:
    checked = 0
    for manifest in manifests():
        if manifest["kind"] not in BY_THE_OPERATOR:
            kubernetes_validate.validate(manifest, version, strict=True)
            checked += 1
    assert checked > 8


def test_a_manifest_with_a_word_that_kubernetes_does_not_know_would_be_found() -> None:
    wrong = beside()
    exporter(wrong["spec"]["template"])["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_the_exporter_runs_without_root_rights_and_without_a_token_of_kubernetes() -> None:
    for pod in pods():
        security = pod["spec"].get("securityContext", {}) | exporter(pod)["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] == security["runAsGroup"] == 65532
        assert security["readOnlyRootFilesystem"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert exporter(pod)["resources"]["limits"].keys() == {"memory"}
    for manifest in manifests():
        if manifest["metadata"]["name"] == "specdec-exporter" and manifest["kind"] == "Deployment":
            assert manifest["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_beside_vllm_nothing_of_the_exporter_can_be_missing_or_fail_a_probe() -> None:
    pod = document(BESIDE)["spec"]["template"]["spec"]
    assert pod.keys() == {"containers", "volumes"}, "no init container, which vLLM would wait for"
    assert [set(volume) for volume in pod["volumes"]] == [{"name", "emptyDir"}]
    (container,) = pod["containers"]
    assert not {key for key in container if "Probe" in key or key in ("envFrom", "lifecycle")}
    sources = [e["valueFrom"] for e in container["env"] if "valueFrom" in e]
    assert all(source.keys() == {"fieldRef"} for source in sources)


def test_one_controller_of_a_state_is_replaced_and_never_doubled() -> None:
    deployment = document(KUBERNETES / "base" / "deployment.yaml")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})


def test_a_right_is_on_one_named_thing_and_the_exporter_has_none() -> None:
    kinds = [m["kind"] for m in manifests()]
    assert not {"ClusterRole", "ClusterRoleBinding"} & set(kinds)
    for role in (m for m in manifests() if m["kind"] == "Role"):
        for rule in role["rules"]:
            assert rule["resourceNames"]
            assert set(rule["verbs"]) <= {"get", "patch"}
            assert "*" not in rule["resources"] + rule["apiGroups"] + rule["resourceNames"]
    for binding in (m for m in manifests() if m["kind"] == "RoleBinding"):
        assert [s["name"] for s in binding["subjects"]] == ["specdec-receiver"]


def test_what_the_receiver_may_patch_are_the_things_of_the_example() -> None:
    named = {
        (m["kind"].lower() + "s", m["metadata"]["name"])
        for m in documents(KUBERNETES / "example" / "vllm.yaml")
    }
    (role,) = [m for m in manifests() if m["kind"] == "Role"]
    for rule in role["rules"]:
        assert {(r, n) for r in rule["resources"] for n in rule["resourceNames"]} <= named


def test_the_pod_monitor_finds_every_exporter() -> None:
    monitor = document(KUBERNETES / "monitoring" / "pod-monitor.yaml")
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    labels = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pod in pods():
        assert labels.items() <= pod["metadata"]["labels"].items()
        assert endpoint["port"] in [port["name"] for port in exporter(pod)["ports"]]


def test_the_discovery_of_prometheus_looks_for_the_same_pods_and_port() -> None:
    (job,) = document(DEPLOY / "prometheus" / "kubernetes.yml")["scrape_configs"]
    ((selector,),) = [d["selectors"] for d in job["kubernetes_sd_configs"]]
    assert selector["label"] == "specdec-exporter=scrape"
    kept = [r["regex"] for r in job["relabel_configs"] if r.get("action") == "keep"]
    assert kept == ["specdec"]


def test_the_prometheus_rule_is_what_the_command_prints() -> None:
    printed = subprocess.run(
        [COMMAND, "rules", "--format", "prometheusrule"], capture_output=True, text=True, check=True
    ).stdout
    assert (KUBERNETES / "monitoring" / "prometheus-rule.yaml").read_text() == printed, "make docs"


def test_every_file_that_a_kustomization_names_exists() -> None:
    for path in [*KUBERNETES.rglob("kustomization.yaml")]:
        kustomization = document(path)
        named = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
        named += [p["path"] for p in kustomization.get("patches", ()) if "path" in p]
        named += [f for g in kustomization.get("configMapGenerator", ()) for f in g["files"]]
        for name in named:
            place = path.parent / name
            assert place.is_file() or (place / "kustomization.yaml").is_file(), place


def test_every_dashboard_becomes_a_config_map_that_fits_into_kubernetes() -> None:
    generators = document(ROOT / "grafana" / "kustomization.yaml")["configMapGenerator"]
    listed = [file for generator in generators for file in generator["files"]]
    assert sorted(listed) == sorted(f"dashboards/{path.name}" for path in DASHBOARDS.glob("*.json"))
    # `kubectl apply` repeats an object in an annotation, which may have so much.
    assert all(path.stat().st_size < 250_000 for path in DASHBOARDS.glob("*.json"))


def services() -> dict[str, Any]:
    found: dict[str, Any] = document(COMPOSE)["services"]
    return found


def mounted() -> dict[str, Path]:
    """Where files of ours lie in the containers."""
    volumes = [v for service in services().values() for v in service["volumes"] if v[0] in ".$"]
    # ${NAME:-default} is its default.
    plain = [re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", volume) for volume in volumes]
    return {v.split(":")[1]: (COMPOSE.parent / v.split(":")[0]).resolve() for v in plain}


def test_every_image_is_of_a_version_and_ours_of_this_one() -> None:
    images = [service["image"] for service in services().values()]
    images += [
        container["image"]
        for manifest in manifests()
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    ]
    assert len(images) > 7
    for image in images:
        name, _, tag = image.partition(":")
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), image
        assert name != "specdec-exporter" or tag == __version__
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) == {"python:3.11-slim-bookworm"}


def against_the_schema_of_compose(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            Path(sys.executable).with_name("check-jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", path),
        ],
        capture_output=True,
        text=True,
    )


def test_compose_is_as_its_specification_says(tmp_path: Path) -> None:
    checked = against_the_schema_of_compose(COMPOSE)
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("    volumes:", "    volume:", 1))
    assert "'volume' was unexpected" in against_the_schema_of_compose(wrong).stdout


def test_every_file_that_compose_mounts_exists() -> None:
    missing = {str(path) for path in mounted().values() if not path.exists()}
    assert missing <= (set() if DASHBOARDS.exists() else {str(DASHBOARDS)})
    assert len(mounted()) > 6


def test_every_volume_of_compose_is_declared_and_used() -> None:
    named = {
        volume.split(":")[0]
        for service in services().values()
        for volume in service["volumes"]
        if re.match(r"[a-z]+:", volume)
    }
    assert named == document(COMPOSE)["volumes"].keys()


def test_compose_opens_ports_on_this_machine_only() -> None:
    ports = [port for service in services().values() for port in service["ports"]]
    assert len(ports) == 5
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)


def test_in_compose_the_exporter_reads_the_file_that_is_mounted_and_has_no_rights() -> None:
    service = services()["exporter"]
    file = mounted()[service["environment"]["SPECDEC_CONFIG"]]
    assert file in SETTINGS
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "no-new-privileges:true" in service["security_opt"]
    assert "state:/var/lib/specdec-exporter" in service["volumes"]


def test_in_compose_the_exporter_lets_prometheus_in_by_the_name_that_it_asks_by() -> None:
    prometheus = document(mounted()["/etc/prometheus/prometheus.yml"])
    allowed = load(SETTINGS[0], environ={}).allowed_hosts
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"]
    }
    assert jobs["specdec"] == ["exporter:19185"]
    assert host_allowed("exporter:19185", allowed)
    assert not host_allowed("exporter:19185", ())
    asked = [address.split(":")[0] for targets in jobs.values() for address in targets]
    assert set(asked) <= services().keys()


def test_in_compose_prometheus_and_grafana_find_what_is_mounted() -> None:
    prometheus = document(mounted()["/etc/prometheus/prometheus.yml"])
    assert [mounted()[name] for name in prometheus["rule_files"]] == [
        ROOT / "alerts" / "specdec.rules.yaml"
    ]
    (provider,) = document(mounted()["/etc/grafana/provisioning/dashboards/specdec.yaml"])[
        "providers"
    ]
    assert mounted()[provider["options"]["path"]] == DASHBOARDS


def unit(name: str) -> dict[str, str]:
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))


def test_the_unit_starts_the_command_with_the_file_that_lies_here_for_it() -> None:
    words = unit("specdec-exporter.service")["ExecStart"].split()
    assert Path(words[0]).name == "specdec-exporter"
    assert words[1:3] == ["serve", "--config"]
    assert f"# {words[3]}\n" in (DEPLOY / "systemd" / "config.yaml").read_text()
    assert words[0].startswith("/opt/specdec-exporter/")


def test_the_path_unit_watches_a_file_in_the_folder_that_the_drop_in_opens() -> None:
    watched = Path(unit("vllm-restart.path")["PathChanged"])
    assert str(watched.parent) == unit("autotune.conf")["ReadWritePaths"]


def test_the_map_names_every_folder() -> None:
    listed = set(re.findall(r"\]\(([\w-]+(?:/[\w-]+)*)/?\)", (DEPLOY / "README.md").read_text()))
    folders = {path.name for path in DEPLOY.iterdir() if path.is_dir()}
    folders |= {f"kubernetes/{path.name}" for path in KUBERNETES.iterdir() if path.is_dir()}
    assert folders - {"vllm"} <= listed
