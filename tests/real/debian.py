"""Prometheus, Alertmanager, Chromium and kubectl from Debian's or Ubuntu's archive, without root.

A program on PATH is taken as it is. Otherwise its package is fetched with `apt-get download`,
unpacked with `dpkg -x` into a cache folder and run from there: nothing is installed, no service is
enabled, and apt's own package lists stay as they are, for root too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "kubectl": "kubernetes-client",
    "chromium": "chromium",
}
"""The program, by Debian's name for it, and the package that has it."""

BESIDE = {"chromium": ["fonts-dejavu-core"]}
"""Packages that come with a program, as do all that it depends on and the machine lacks."""

RUN_FROM_FOLDER = """\
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/../..
for folder in "$root"/usr/lib/*-linux-gnu* "$root"/lib/*-linux-gnu*; do
  LD_LIBRARY_PATH="$folder:$folder/pulseaudio:$LD_LIBRARY_PATH"
done
export LD_LIBRARY_PATH
if [ ! -e /etc/fonts/fonts.conf ]; then
  export FONTCONFIG_PATH="$root/etc/fonts" XDG_DATA_HOME="$root/usr/share"
fi
exec "$root/usr/lib/chromium/chromium" "$@"
"""
"""Instead of the script in Debian's package, which looks in the places that packages are put in."""

UPSTREAM_NAMES = {"prometheus-alertmanager": "alertmanager"}

ASK_VERSION = {"kubectl": ["version", "--client"]}
"""Where it is not `--version`."""

FETCH_SECONDS = 240


class MissingProgramError(Exception):
    """A program that is not there; the message is one line that says how to get it."""


def cache() -> Path:
    """The folder that keeps what was fetched, for every checkout of one user."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "specdec-exporter" / "debian"


def find(program: str) -> Path | None:
    """The program on PATH or in the cache; fetches nothing."""
    for name in (program, UPSTREAM_NAMES.get(program, program)):
        if on_path := shutil.which(name):
            return Path(on_path)
    cached = cache() / PACKAGES[program] / "usr/bin" / program
    return cached if cached.exists() else None


def ensure(program: str) -> Path:
    """The program, fetched if need be.

    Raises:
        MissingProgramError: it could not be fetched or does not run here.
    """
    path = find(program) or _fetch(program)
    asked: list[str | Path] = [path, *ASK_VERSION.get(program, ["--version"])]
    try:
        subprocess.run(asked, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingProgramError(f"{path} does not run: {error}") from error
    return path


def _fetch(program: str) -> Path:
    package = PACKAGES[program]
    for tool in ("apt-get", "dpkg"):
        if not shutil.which(tool):
            raise MissingProgramError(
                f"not on PATH, and without {tool} it cannot be fetched: install it by hand"
            )
    home = cache()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=f".{package}-") as scratch:
        work = Path(scratch)
        # The system's lists may be absent or old, and only root may renew them: use own ones.
        state, archives = home / "lists", work / "archives"
        for folder in (state, archives):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        apt = [
            "apt-get",
            "--quiet=2",
            f"--option=Dir::State::Lists={state}",
            f"--option=Dir::Cache={archives}",
            "--option=Dir::Cache::Archives=",
            "--option=Acquire::Languages=none",
            "--option=Acquire::Retries=2",
            "--option=Acquire::http::Timeout=30",
            # Root's apt would fetch as the user _apt, who cannot write here.
            "--option=APT::Sandbox::User=root",
        ]
        # One source that fails is no reason to stop: the package may come from another.
        updated = _run([*apt, "update"], work)
        wanted = [package]
        if program in BESIDE:
            wanted = _lacking(apt, [package, *BESIDE[program]], work) or wanted
        downloaded = _run([*apt, "download", *wanted], work)
        found = sorted(work.glob(f"{package}_*.deb"))
        if not found:
            why = _last_line(downloaded) or _last_line(updated)
            raise MissingProgramError(f"apt-get could not fetch {package}: {why}")
        for archive in sorted(work.glob("*.deb")):
            unpacked = _run(["dpkg", "-x", str(archive), "unpacked"], work)
            if unpacked.returncode:
                raise MissingProgramError(
                    f"dpkg could not unpack {archive.name}: {_last_line(unpacked)}"
                )
        if program in BESIDE:
            (work / "unpacked/usr/bin" / program).write_text(RUN_FROM_FOLDER)
        # Renamed into place when complete: another run of the tests may be doing the same.
        try:
            (work / "unpacked").rename(home / package)
        except OSError:
            if not (home / package).is_dir():
                raise
    path = home / package / "usr/bin" / program
    if not path.exists():
        raise MissingProgramError(f"the package {package} has no {program}")
    return path


def _lacking(apt: list[str], packages: list[str], folder: Path) -> list[str]:
    """The packages, and of those that they depend on the ones that are not installed here."""
    plan = _run([*apt, "install", "--simulate", "--no-install-recommends", *packages], folder)
    # An installed one that would be renewed has its old version in brackets behind its name.
    return re.findall(r"^Inst (\S+) \(", plan.stdout, re.MULTILINE)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingProgramError(
            f"{command[0]} {command[-1]} took more than {FETCH_SECONDS} seconds"
        ) from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else ""


def main(programs: list[str]) -> int:
    """Fetches each program, says one line on each, and gives 1 if any is missing."""
    failed = 0
    for program in programs:
        if program not in PACKAGES:
            print(f"unknown program {program}; known: {', '.join(PACKAGES)}", file=sys.stderr)
            return 2
        try:
            print(f"{program}: {ensure(program)}")
        except MissingProgramError as error:
            print(f"{program}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
