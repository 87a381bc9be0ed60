"""The first hour, as docs/first-hour.md tells it: an alert on the demo comes, and goes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real import monitor
from tests.real.conftest import program

pytestmark = [pytest.mark.prometheus, pytest.mark.slow, pytest.mark.waits]

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("specdec-exporter")
PATIENCE = 120.0


@contextlib.contextmanager
def started(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended as Ctrl-C ends it."""
    calm = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=calm | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)


def wait_for(words: str, log: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while words not in log.read_text():
        ended = [process.args for process in processes if process.poll() is not None]
        assert not ended, f"{ended} ended:\n{log.read_text()}"
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


def test_an_alert_on_the_demo_is_sent_as_firing_and_after_a_better_demo_as_resolved(
    tmp_path: Path,
) -> None:
    for name in ("prometheus", "prometheus-alertmanager"):
        program(name)
    try:
        monitor.refuse_taken_ports()
    except monitor.CannotRunError as taken:
        pytest.skip(str(taken))
    log, demo = tmp_path / "monitor.log", tmp_path / "demo.log"
    with started(log, sys.executable, "-m", "tests.real.monitor") as watching:
        with started(demo, COMMAND, "demo", "--scenario", "broken-drafter") as broken:
            wait_for("firing   SpecDecDrafterBroken demo", log, watching, broken)
        with started(demo, COMMAND, "demo") as healthy:
            wait_for("resolved SpecDecDrafterBroken demo", log, watching, healthy)
    assert watching.returncode == 0
