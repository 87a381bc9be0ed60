"""Alertmanager's own tool takes the example as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.real.conftest import program

pytestmark = pytest.mark.prometheus

EXAMPLE = Path(__file__).parents[2] / "alerts" / "alertmanager.example.yaml"


def amtool(*arguments: str) -> str:
    done = subprocess.run(
        [program("amtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_amtool_finds_nothing_to_complain_of() -> None:
    said = amtool("check-config", str(EXAMPLE))
    assert "SUCCESS" in said
    assert "5 inhibit rules" in said


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["alertname=SpecDecDrafterBroken", "severity=critical"], "specdec"),
        (["alertname=SpecDecLengthPlateau", "severity=info"], "specdec"),
        (["alertname=SpecDecExporterDown", "severity=warning"], "specdec"),
        (["alertname=SomethingElse", "severity=critical"], "nobody"),
    ],
)
def test_amtool_routes_our_alerts_and_no_others(labels: list[str], receiver: str) -> None:
    routed = amtool("config", "routes", "test", f"--config.file={EXAMPLE}", *labels)
    assert routed.strip() == receiver
