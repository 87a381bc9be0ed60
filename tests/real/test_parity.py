"""The judge and Prometheus agree on recorded servers and on every scenario of the simulator.

Both look at the same scrapes at the same times: the judge at figures measured by the exporter's code,
Prometheus at the series that the exporter would serve and at the server's own. Windows and waiting times
are shortened, since most recordings last a minute; one test runs at full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from specdec_exporter.config import Settings
from specdec_exporter.model import ScrapeError
from specdec_exporter.promql import SOURCES
from specdec_exporter.rules import rule_table
from specdec_exporter.simulator import SCENARIOS, Change, Restart, Scenario, Simulator

from tests.pages import SERIES, recording
from tests.real.parity import by_prometheus, differences
from tests.worlds import Played, play

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]

RULES = [rule.name for rule in rule_table(Settings())]


def shortened(window: float, wait: float, keep: float, every: float) -> Settings:
    return Settings(
        windows=(window,),
        rules={
            **{name: {"for": wait} for name in RULES},
            "keep_firing_for": keep,
            "evaluation_interval": every,
        },
    )


RECORDED = shortened(10.0, 3.0, 4.0, 1.0)
SIMULATED = shortened(60.0, 60.0, 120.0, 15.0)


def check(promtool: Path, folder: Path, played: Played, settings: Settings) -> set[str]:
    """What ever fires; a table of the differences is printed, and any is a failure."""
    lines: list[str] = []
    for source in SOURCES:
        found = by_prometheus(promtool, folder, played, source, settings)
        lines += differences(played, source, settings, found)
    fired = {alert for judged in played.judged for alert, _ in judged}
    print(
        f"{len(played.evaluations)} evaluations, fired: {', '.join(sorted(fired)) or 'nothing'}; "
        f"differences: {len(lines)}"
    )
    print("\n".join(lines))
    assert not lines
    return fired


def on_a_grid(path: Path) -> list[str | None]:
    """The recorded scrapes, the latest of each second; as none where a load had ended."""
    scrapes = {round(line["t"]): line["m"] for line in recording(path)}
    first, last = min(scrapes), max(scrapes)
    pages: list[str | None] = []
    for t in range(first, last + 1):
        lines = scrapes.get(t)
        pages.append(None if lines is None else "".join(f"{line}\n" for line in lines))
    return pages


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem.removeprefix("series_"))
def test_on_recorded_servers_they_agree(path: Path, promtool: Path, tmp_path: Path) -> None:
    played = play(on_a_grid(path), 1.0, RECORDED)
    fired = check(promtool, tmp_path, played, RECORDED)
    if path.stem == "series_k2_pos1_collapse":
        assert fired == {"SpecDecPositionDecay"}
    if path.stem == "series_draft-real-k4":
        assert {"SpecDecAcceptanceLow", "SpecDecDrafterMisaligned"} <= fired


def simulated(scenario: Scenario, seconds: float, step: float) -> Iterator[str | None]:
    simulator = Simulator(scenario, seed=1)
    for i in range(int(seconds / step) + 1):
        simulator.advance(i * step)
        try:
            yield simulator.page().decode()
        except ScrapeError:
            yield None


def stretched(scenario: Scenario, factor: float) -> Scenario:
    """What happens in it, later and for longer."""

    def later(event: Change | Restart) -> Change | Restart:
        if isinstance(event, Restart):
            return replace(event, at=event.at * factor)
        return replace(event, at=event.at * factor, over=event.over * factor)

    return replace(scenario, script=tuple(later(event) for event in scenario.script))


EXPECTED: dict[str, set[str]] = {
    "position-1-collapse": {"SpecDecPositionDecay"},
    "broken-drafter": {"SpecDecDrafterBroken", "SpecDecDrafterMisaligned", "SpecDecAcceptanceLow"},
    "drift": {"SpecDecAcceptanceLow"},
    "drafting-stalled": {"SpecDecDraftingStalled"},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_in_every_scenario_they_agree(name: str, promtool: Path, tmp_path: Path) -> None:
    scenario = stretched(SCENARIOS[name], 4.0)
    pages = list(simulated(scenario, 1200.0, 15.0))
    fired = check(promtool, tmp_path, play(pages, 15.0, SIMULATED), SIMULATED)
    assert fired - {"SpecDecLengthPlateau"} == EXPECTED.get(name, set())


@pytest.mark.parametrize("name", ["drift", "broken-drafter", "position-1-collapse", "restart"])
def test_at_full_length_they_agree(name: str, promtool: Path, tmp_path: Path) -> None:
    settings = Settings()
    pages: Sequence[str | None] = list(simulated(SCENARIOS[name], 2400.0, 15.0))
    fired = check(promtool, tmp_path, play(pages, 15.0, settings), settings)
    assert fired - {"SpecDecLengthPlateau"} == EXPECTED.get(name, set())
