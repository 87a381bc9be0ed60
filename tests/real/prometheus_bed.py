"""A real Prometheus and Alertmanager for tests, and questions to their HTTP APIs.

Nothing here knows the exporter: a test compares what the two say.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.real.vllm_bed import HTTP, free_port

START_SECONDS = 30


@dataclass(frozen=True)
class Series:
    """One series as Prometheus stores it: its labels, and its samples as (unix seconds, value)."""

    labels: Mapping[str, str]
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def api(self, path: str, **arguments: str) -> Any:
        """The `data` of one answer of the HTTP API; an error of Prometheus is an error here."""
        answer = HTTP.get(f"{self.url}/api/v1/{path}", params=arguments)
        document = answer.json()
        assert document["status"] == "success", document
        return document["data"]

    def samples(self, selector: str, seconds: int, until: float) -> list[Series]:
        """The raw samples of all series of a selector in the seconds before `until`."""
        data = self.api("query", query=f"{selector}[{seconds}s]", time=f"{until:.3f}")
        return [
            Series(row["metric"], tuple((t, float(value)) for t, value in row["values"]))
            for row in data["result"]
        ]

    def wait_until_up(self, job: str, seconds: float = 120) -> None:
        """Return once Prometheus has scraped a job; its last complaint is the error otherwise."""
        deadline = time.monotonic() + seconds
        complaint = "not tried"
        while time.monotonic() < deadline:
            for target in self.api("targets", state="active")["activeTargets"]:
                if target["labels"]["job"] == job:
                    if target["health"] == "up":
                        return
                    complaint = target["lastError"] or complaint
            time.sleep(0.1)
        raise AssertionError(f"{job} was not up within {seconds} seconds: {complaint}")


@dataclass(frozen=True)
class Alertmanager:
    """A running Alertmanager."""

    url: str

    def alerts(self) -> list[dict[str, Any]]:
        """What it holds, inhibited or not."""
        found: list[dict[str, Any]] = (
            HTTP.get(f"{self.url}/api/v2/alerts").raise_for_status().json()
        )
        return found


@contextmanager
def running_alertmanager(
    binary: Path, folder: Path, config: Mapping[str, Any], address: str = ""
) -> Iterator[Alertmanager]:
    """An Alertmanager of its own, without peers."""
    # YAML takes JSON as it is.
    (folder / "alertmanager.yml").write_text(json.dumps(config))
    address = address or f"127.0.0.1:{free_port()}"
    arguments = [
        f"--config.file={folder / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ]
    program, home = _at_home(binary, folder)
    with _running(program, arguments, folder / "alertmanager.log", address, home):
        yield Alertmanager(f"http://{address}")


def _at_home(binary: Path, folder: Path) -> tuple[Path, Path]:
    """A program that finds its templates, and the folder to run it in.

    Debian's Alertmanager looks for them where its package would have put them. Where that was only
    unpacked, a copy of the program looks for them in its working directory: a path as long as the other.
    """
    installed = "/usr/share/prometheus/alertmanager"
    unpacked = binary.parents[2] / installed.lstrip("/")
    if Path(installed).exists() or not unpacked.exists():
        return binary, folder
    copy = folder / binary.name
    here = "./" * (len(installed) // 2)
    copy.write_bytes(binary.read_bytes().replace(installed.encode(), here.encode()))
    copy.chmod(0o755)
    return copy, unpacked


@contextmanager
def running(
    binary: Path,
    folder: Path,
    jobs: Mapping[str, str],
    scrape_interval: str = "1s",
    address: str = "",
    *,
    rule_files: Sequence[Path] = (),
    alertmanager: Alertmanager | None = None,
    more_arguments: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes, under the name of each job, the one URL given for it."""
    config: dict[str, Any] = {
        "global": {"scrape_interval": scrape_interval, "scrape_timeout": scrape_interval},
        "scrape_configs": [
            {
                "job_name": job,
                "metrics_path": httpx.URL(url).path,
                "static_configs": [{"targets": [httpx.URL(url).netloc.decode()]}],
            }
            for job, url in jobs.items()
        ],
        "rule_files": [str(path) for path in rule_files],
    }
    if alertmanager is not None:
        manager = httpx.URL(alertmanager.url).netloc.decode()
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]}
    # YAML takes JSON as it is.
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = address or f"127.0.0.1:{free_port()}"
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
        *more_arguments,
    ]
    with _running(binary, arguments, folder / "prometheus.log", address, folder):
        yield Prometheus(f"http://{address}")


@contextmanager
def _running(
    binary: Path, arguments: Sequence[str], log: Path, address: str, folder: Path
) -> Iterator[None]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [binary, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            _wait_until_ready(f"http://{address}/-/ready", process, log)
            yield
        finally:
            process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if HTTP.get(url).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{log.stem} did not start:\n{log.read_text()[-2000:]}")
