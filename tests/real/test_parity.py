"""The judge and Prometheus agree on recorded servers and on every scenario of the simulator.

Both look at the same scrapes at the same times: the judge at figures measured by the exporter's code,
Prometheus at the series that the exporter would serve and at the server's own. Windows and waiting times
are shortened, since most recordings last a minute; one test runs at full length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from specdec_exporter.config import Settings
from specdec_exporter.model import ScrapeError
from specdec_exporter.promql import SOURCES
from specdec_exporter.rules import rule_table
from specdec_exporter.simulator import SCENARIOS, Change, Restart, Scenario, Simulator

from tests.pages import SERIES, recording
from tests.real.parity import by_prometheus, differences, expressible
from tests.worlds import Played, play

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]

RULES = [rule.name for rule in rule_table(Settings())]


def shortened(
    window: float, wait: float, keep: float, every: float, **more: dict[str, float]
) -> Settings:
    return Settings(
        windows=(window,),
        variance_inflation=1.0 if more else 13.0,
        rules={
            **{name: {"for": wait, **more.get(name, {})} for name in RULES},
            "keep_firing_for": keep,
            "evaluation_interval": every,
        },
    )


NERVOUS: dict[str, dict[str, float]] = {
    "acceptance_low": {"below": 0.355, "below_at_k1": 0.46},
    "drafter_misaligned": {"below": 0.345, "below_at_k1": 0.45},
    "drafter_broken": {"position_0_below": 0.46, "min_drafts": 900},
    "position_decay": {"position_0_from": 0.45, "position_1_below": 0.24},
    "length_plateau": {"last_position_below": 0.23},
    "acceptance_suspicious": {"above": 0.36},
}
"""Limits in the middle of the guide's healthy figures: noise crosses them all the time."""

RECORDED = shortened(10.0, 3.0, 4.0, 1.0)
RECORDED_NERVOUSLY = shortened(10.0, 1.0, 2.0, 1.0, **NERVOUS)
SIMULATED = shortened(60.0, 60.0, 120.0, 15.0)
SIMULATED_NERVOUSLY = shortened(60.0, 15.0, 15.0, 15.0, **NERVOUS)


def check(promtool: Path, folder: Path, played: Played, settings: Settings) -> set[str]:
    """What ever fires; a table of the differences is printed, and any is a failure."""
    lines: list[str] = []
    for source in SOURCES:
        found = by_prometheus(promtool, folder, played, source, settings)
        lines += differences(played, source, settings, found)
    fired = {alert for judged in played.judged for alert, _ in judged}
    changes = sum(a != b for a, b in pairwise(played.judged))
    print(
        f"{len(played.evaluations)} evaluations, {changes} changes, {len(lines)} differences; "
        f"fired: {', '.join(sorted(fired)) or 'nothing'}"
    )
    print("\n".join(lines))
    assert not lines
    return fired


def on_a_grid(path: Path) -> list[str]:
    """The recorded scrapes, the latest of each second; between two loads nothing is counted."""
    scrapes = {round(line["t"]): line["m"] for line in recording(path)}
    pages: list[str] = []
    for t in range(min(scrapes), max(scrapes) + 1):
        lines = scrapes.get(t)
        pages.append(pages[-1] if lines is None else "".join(f"{line}\n" for line in lines))
    return pages


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem.removeprefix("series_"))
def test_on_recorded_servers_they_agree(path: Path, promtool: Path, tmp_path: Path) -> None:
    fired = check(promtool, tmp_path, play(on_a_grid(path), 1.0, RECORDED), RECORDED)
    assert fired == FIRED.get(path.stem.removeprefix("series_"), set())


@pytest.mark.parametrize("name", ["k4", "draft-real-k4"])
def test_on_recorded_servers_they_agree_whatever_the_limits(
    name: str, promtool: Path, tmp_path: Path
) -> None:
    (path,) = [path for path in SERIES if path.stem == f"series_{name}"]
    settings = RECORDED_NERVOUSLY
    assert check(promtool, tmp_path, play(on_a_grid(path), 1.0, settings), settings)


FIRED = {
    "k2_pos1_collapse": {"SpecDecPositionDecay"},
    "draft-real-k4": {"SpecDecAcceptanceLow", "SpecDecDrafterMisaligned", "SpecDecLengthPlateau"},
}


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


@pytest.mark.parametrize("name", ["healthy", "restart", "two-engines"])
def test_where_limits_are_crossed_all_the_time_they_agree(
    name: str, promtool: Path, tmp_path: Path
) -> None:
    settings = SIMULATED_NERVOUSLY
    pages = list(simulated(stretched(SCENARIOS[name], 2.0), 900.0, 15.0))
    played = play(pages, 15.0, settings)
    check(promtool, tmp_path, played, settings)
    assert sum(a != b for a, b in pairwise(played.judged)) > 10


def test_after_a_change_of_k_they_may_differ_until_prometheus_has_a_window_of_one_k(
    promtool: Path, tmp_path: Path
) -> None:
    settings = SIMULATED_NERVOUSLY
    pages = list(simulated(stretched(SCENARIOS["k-change"], 2.0), 900.0, 15.0))
    played = play(pages, 15.0, settings)
    before = pages.index(None)
    # A window, and what the shortest waiting and keeping make of it.
    after = before + round((60.0 + 15.0 + 15.0) / 15.0) + 1
    for source in SOURCES:
        can = expressible(source, settings)
        found = by_prometheus(promtool, tmp_path, played, source, settings)
        pairs = [
            ({one for one in judged if one[0] in can}, prometheus)
            for judged, prometheus in zip(played.judged, found, strict=True)
        ]
        differ = [i for i, (judged, prometheus) in enumerate(pairs) if judged != prometheus]
        print(f"{source}: they differ at the evaluations {differ}, k changed at {before}")
        assert all(before <= i <= after for i in differ)
        assert any(judged for judged, _ in pairs[after:])


@pytest.mark.parametrize("name", ["drift", "broken-drafter", "restart"])
def test_at_full_length_they_agree(name: str, promtool: Path, tmp_path: Path) -> None:
    settings = Settings()
    pages: Sequence[str | None] = list(simulated(SCENARIOS[name], 2400.0, 15.0))
    fired = check(promtool, tmp_path, play(pages, 15.0, settings), settings)
    assert fired - {"SpecDecLengthPlateau"} == EXPECTED.get(name, set())
