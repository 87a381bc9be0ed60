"""The sentence that a person on call reads first."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from specdec_exporter.config import Settings, Target
from specdec_exporter.loop import Monitor
from specdec_exporter.model import Gain, Reason, RuleState, ScrapeError, TargetStatus
from specdec_exporter.simulator import SCENARIOS, Simulator
from specdec_exporter.words import Headline, headline

TARGET = Target(name="m", url="http://127.0.0.1:8000")


@lru_cache
def status(scenario: str, seconds: float = 400.0, **target: object) -> TargetStatus:
    watched = TARGET.model_copy(update=target)
    monitor = Monitor(watched, Settings(targets=(watched,)))
    monitor.engine_version = ""
    simulator = Simulator(SCENARIOS[scenario], seed=1)
    for i in range(int(seconds / 5) + 1):
        simulator.advance(5.0 * i)
        monitor.observe(simulator.page(), t=5.0 * i, duration=0.0)
        if i % 3 == 0:
            monitor.judge(5.0 * i)
    return monitor.status


def said(of: TargetStatus) -> Headline:
    return headline(of, of.measurements[0] if of.measurements else None)


def with_gain(of: TargetStatus, gain: float | None, stderr: float = 0.01) -> TargetStatus:
    found = Gain(
        source="measured",
        baseline_tpot_seconds=0.005,
        covered=gain is not None,
        tpot_gain_ratio=gain,
        tpot_gain_ratio_stderr=stderr,
        tpot_gain_throughput_ratio=None,
        tpot_gain_throughput_ratio_stderr=None,
        break_even_length=None,
        inconclusive=False,
        reason="" if gain is not None else "not covered: 40.0 requests in decode",
        baseline_taken_at=0.0,
    )
    (measurement,) = of.measurements
    return replace(of, measurements=(replace(measurement, gain=found),))


@pytest.mark.parametrize(
    ("gain", "tone", "begins"),
    [
        (0.12, "good", "Speculation pays: 12 % faster at "),
        (-0.08, "bad", "Speculation costs: 8 % slower at "),
        (0.01, "unsure", "Speculation about breaks even: +1 % at "),
        (None, "unsure", "Drafting, mean acceptance length 1.7"),
    ],
)
def test_the_gain_decides_and_not_the_acceptance(
    gain: float | None, tone: str, begins: str
) -> None:
    found = said(with_gain(status("healthy"), gain))
    assert found.tone == tone
    assert found.text.startswith(begins)


def test_without_a_baseline_it_says_that_it_does_not_know() -> None:
    found = said(status("healthy"))
    assert found.tone == "unsure"
    assert "no baseline" in found.text


@pytest.mark.parametrize(
    ("scenario", "seconds", "tone", "begins"),
    [
        ("broken-drafter", 400.0, "bad", "Drafter broken: position 0 at "),
        ("position-1-collapse", 1200.0, "bad", "k too deep: position 1 at 10 %"),
        ("no-speculation", 100.0, "quiet", "Speculation is off"),
    ],
)
def test_what_fires_comes_before_the_figures(
    scenario: str, seconds: float, tone: str, begins: str
) -> None:
    found = said(status(scenario, seconds))
    assert (found.tone, found.text[: len(begins)]) == (tone, begins)


def test_a_hint_that_fires_does_not_hide_that_speculation_pays_but_a_warning_does() -> None:
    def with_firing(rule: str, gain: float | None) -> Headline:
        healthy = with_gain(status("healthy"), gain)
        verdicts = tuple(
            replace(v, state=RuleState.FIRING) if v.rule == rule else v for v in healthy.verdicts
        )
        return said(replace(healthy, verdicts=verdicts))

    plateau = "The last draft position adds next to nothing"
    assert with_firing("length_plateau", 0.12).text.startswith("Speculation pays: 12 % faster")
    assert with_firing("length_plateau", None).text.startswith(plateau)
    assert with_firing("acceptance_low", 0.12).text.startswith("Acceptance low: ")


def test_drift_says_its_shape_and_both_lengths() -> None:
    found = said(status("drift", 700.0, reference=(0.47, 0.24)))
    assert found.tone == "bad"
    assert found.text.startswith(("Drafter drifted (even; MAL 1.", "Drafter drifted (tail; MAL 1."))


def test_an_idle_target_is_quiet_and_a_new_one_has_nothing_to_say() -> None:
    healthy = status("healthy")
    (measurement,) = healthy.measurements
    idle = replace(measurement, total=replace(measurement.total, drafts=0.0))
    assert headline(healthy, idle) == Headline("quiet", "Idle: no drafts in the last 5m")
    new = Monitor(TARGET, Settings(targets=(TARGET,)))
    assert said(new.status) == Headline("quiet", "Not scraped yet")
    new.observe(ScrapeError(Reason.CONNECT, "refused"), t=0.0, duration=0.0)
    assert said(new.status) == Headline("bad", "Does not answer")


def test_trouble_is_sorted_by_how_soon_somebody_should_look() -> None:
    tones = ["bad", "unsure", "good", "quiet"]
    trouble = [Headline(tone, "").trouble for tone in tones]
    assert trouble == sorted(trouble, reverse=True)
    assert len(set(trouble)) == 4
