"""The four numbers, with their bands, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from specdec_exporter.figures import Figure, figures, limits, plus_minus
from specdec_exporter.measure import Meter
from specdec_exporter.model import Gain, Measurement, RuleState, Verdict

from tests import pages

LIMITS = {"acceptance_low": 0.25, "position_decay": 0.15}


def measured(*positions: float, drafts: float = 10_000.0) -> Measurement:
    meter = Meter((300.0,), 13.0)
    accepted = tuple(drafts * p for p in positions)
    for n in (0, 1):
        meter.add(
            pages.snapshot(5.0 * n, pages.counters(drafts * n, tuple(n * a for a in accepted)))
        )
    (found,) = meter.measure()
    return found


def with_gain(gain: float | None, stderr: float | None = 0.01, reason: str = "") -> Measurement:
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
        reason=reason,
        baseline_taken_at=0.0,
    )
    return replace(measured(0.47, 0.24), gain=found)


def four(measurement: Measurement) -> tuple[Figure, ...]:
    return figures(measurement, LIMITS)


@pytest.mark.parametrize(
    ("positions", "value", "tone"),
    [
        ((0.47, 0.24), "35.5 %", "good"),
        ((0.40, 0.20), "30.0 %", "unsure"),
        ((0.30, 0.10), "20.0 %", "bad"),
        ((0.47,), "47.0 %", "good"),
        ((0.40,), "40.0 %", "unsure"),
        ((0.47, 0.24, 0.12, 0.06), "22.2 %", "good"),
    ],
)
def test_acceptance_is_judged_by_its_first_two_positions_at_any_k(
    positions: tuple[float, ...], value: str, tone: str
) -> None:
    acceptance, *_ = four(measured(*positions))
    assert (acceptance.value, acceptance.tone) == (value, tone)
    assert acceptance.judgement
    assert ("35.5 %" in acceptance.bands) == (len(positions) > 2)
    assert "alert below 25 %" in acceptance.bands


def test_the_length_is_beside_what_it_can_be_at_most() -> None:
    _, length, *_ = four(measured(0.47, 0.24))
    assert (length.value, length.plus_minus) == ("1.71", "0.06")
    assert "guide 1.71, of at most 3" in length.bands
    _, deep, *_ = four(measured(0.47, 0.24, 0.12, 0.06))
    assert "guide" not in deep.bands


def test_decay_is_bad_where_the_second_position_is_under_its_limit() -> None:
    assert four(measured(0.47, 0.24))[2].tone == "good"
    decayed = four(measured(0.47, 0.10))[2]
    assert (decayed.value, decayed.tone) == ("47.0 → 10.0 %", "bad")
    assert figures(measured(0.47, 0.10), {})[2].tone == "quiet"
    single = four(measured(0.47))[2]
    assert (single.name, single.value) == ("Position 0", "47.0 %")


@pytest.mark.parametrize(
    ("gain", "value", "tone"),
    [
        (0.12, "+12.0 %", "good"),
        (0.05, "+5.0 %", "unsure"),
        (0.01, "+1.0 %", "unsure"),
        (-0.08, "−8.0 %", "bad"),
    ],
)
def test_the_gain_is_judged_by_the_guide_and_its_own_error(
    gain: float, value: str, tone: str
) -> None:
    *_, figure = four(with_gain(gain))
    assert (figure.value, figure.tone) == (value, tone)
    assert ("told from 0" in figure.judgement) == (gain == 0.01)


def test_a_missing_gain_says_why() -> None:
    assert four(measured(0.47, 0.24))[3].absent == "no baseline: run specdec-exporter calibrate"
    assert four(with_gain(None, reason="not covered: 40.0"))[3].absent == "not covered: 40.0"
    assert "does not know" in four(with_gain(None))[3].absent
    refused = replace(measured(0.47, 0.24), baseline_refused="of another version")
    assert four(refused)[3].absent == "of another version"


def test_all_four_say_the_same_reason_where_nothing_is_drafted() -> None:
    idle = measured(0.47, 0.24)
    nothing = replace(
        idle.total,
        drafts=0.0,
        acceptance_ratio=None,
        mean_acceptance_length=None,
        position_acceptance_ratio=(None, None),
    )
    whys = {f.absent for f in four(replace(idle, total=nothing))}
    assert whys == {"no drafts in the last 5m"}
    off = replace(nothing, num_speculative_tokens=0, position_acceptance_ratio=())
    assert {f.absent for f in four(replace(idle, total=off))} == {"speculation is off"}
    unknown = replace(nothing, drafts=10.0)
    assert "counters" in four(replace(idle, total=unknown))[0].absent
    half = replace(idle.total, position_acceptance_ratio=(0.5, None))
    assert not four(replace(idle, total=half))[2].value


def test_half_an_interval_is_never_shown_as_nothing() -> None:
    assert plus_minus(0.01) == "2.0"
    assert plus_minus(1e-5) == "below 0.1"
    assert plus_minus(None) == ""


def test_limits_are_those_of_the_model() -> None:
    def verdict(rule: str, model_name: str, threshold: float | None) -> Verdict:
        return Verdict(
            rule,
            model_name,
            RuleState.INACTIVE,
            None,
            "info",
            None,
            threshold,
            None,
            None,
            "",
            "",
            None,
        )

    known = (verdict("a", "m", 0.2), verdict("b", "m", None), verdict("c", "other", 0.3))
    assert limits(known, "m") == {"a": 0.2}
