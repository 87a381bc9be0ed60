"""The house is in order: locked requirements, one version, and a set-up that explains itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.real import debian

ROOT = Path(__file__).resolve().parents[1]
RUNTIME, DEV = "requirements.lock", "requirements-dev.lock"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def locked(lock: str) -> dict[str, tuple[str, int]]:
    """The version of each distribution in a lock, and the number of hashes it is held to."""
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement = Requirement(line.split("--hash")[0])
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found[canonicalize_name(requirement.name)] = pin.version, line.count("--hash=sha256:")
    return found


@pytest.mark.parametrize("lock", [RUNTIME, DEV])
def test_a_lock_holds_every_distribution_to_its_hashes_and_names_no_address(lock: str) -> None:
    assert all(hashes > 0 for _, hashes in locked(lock).values())
    assert not re.search(r"://|--(extra-)?index-url|--find-links", (ROOT / lock).read_text())


@pytest.mark.parametrize("lock", [RUNTIME, DEV])
def test_a_lock_satisfies_every_dependency_of_the_project(lock: str) -> None:
    wanted = list(project()["project"]["dependencies"])
    if lock == DEV:
        wanted += project()["dependency-groups"]["dev"] + project()["build-system"]["requires"]
    pins = locked(lock)
    for requirement in map(Requirement, wanted):
        version, _ = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} but {version}: make lock"


def test_the_tests_run_with_the_versions_that_users_get() -> None:
    assert locked(RUNTIME).items() <= locked(DEV).items()


def test_the_installed_package_brings_no_numpy_torch_or_pandas() -> None:
    assert locked(RUNTIME).keys().isdisjoint({"numpy", "torch", "pandas", "scipy"})


def test_the_version_is_the_newest_of_the_changelog() -> None:
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == project()["project"]["version"]


def test_the_wheel_holds_the_package_with_its_templates_and_licence_and_nothing_else(
    tmp_path: Path,
) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "exporter" / "specdec_exporter"
    sources = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == sources
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_continuous_integration_runs_nothing_that_readme_does_not_name() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in script if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec make test"]
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_no_file_names_a_package_registry_or_a_folder_of_the_one_who_wrote_it() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    registry = (
        r"pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org|download\.pytorch\.org"
    )
    unwanted = re.compile(rf"{registry}|/(home|Users)/\w+/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {hit[0]}" for hit in unwanted.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("python", "advice"),
    [
        ("exit 1", "older than 3.11"),
        ("case $2 in *ensurepip*) exit 1;; esac", "apt install python3-venv"),
    ],
    ids=["too old", "without the venv module"],
)
def test_make_says_in_one_line_what_is_wrong_with_the_python(
    python: str, advice: str, tmp_path: Path
) -> None:
    fake = tmp_path / "python3"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    made = subprocess.run(
        ["make", "lint", f"PYTHON3={fake}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    error, make = made.stderr.splitlines()
    assert error.startswith("error: ")
    assert advice in error
    assert make.startswith("make: ***")
    assert not (tmp_path / "venv").exists()


def test_a_machine_without_apt_is_told_to_install_prometheus_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert debian.main(["prometheus"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "prometheus: not on PATH, and without apt-get it cannot be fetched: install it by hand"
    ]


def test_a_program_on_path_is_taken_before_any_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "alertmanager").write_text("#!/bin/sh\n")
    (tmp_path / "alertmanager").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert debian.ensure("prometheus-alertmanager") == tmp_path / "alertmanager"
