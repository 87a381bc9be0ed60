"""What k is decided on is what was measured."""

from __future__ import annotations

import pytest
from specdec_exporter.decide import Evidence
from specdec_exporter.evidence import MOST_LEVELS, evidence_of, load_mix, unanswered
from specdec_exporter.measure import Meter
from specdec_exporter.model import Counters, Point, Window
from specdec_exporter.simulator import SCENARIOS, Simulator

from tests.pages import counters, snapshot


def evidence(meter: Meter, verdicts: dict[str, str] | None = None) -> Evidence:
    (window,) = meter.recent(3600.0)
    return evidence_of(
        meter.measure()[0],
        meter.figures(window),
        window,
        server_start=7.0,
        verdicts=verdicts or {},
    )


def simulated(scenario: str, seconds: float) -> Meter:
    meter = Meter((300.0,), 13.0)
    simulator = Simulator(SCENARIOS[scenario], seed=3)
    for i in range(int(seconds / 5) + 1):
        simulator.advance(5.0 * i)
        meter.add(simulator.snapshot())
    return meter


def test_the_guides_case_is_the_evidence_of_the_guides_case() -> None:
    found = evidence(simulated("healthy", 900.0), {"position_decay": "inactive"})
    assert (found.observed_k, found.server_start) == (2, 7.0)
    assert found.verdicts == {"position_decay": "inactive"}
    assert found.inconclusive == ""
    assert found.hour is not None
    assert found.window is not None
    assert found.hour.ratios == pytest.approx((0.47, 0.24), abs=0.02)
    # An hour has more drafts than a window, and so is known better.
    assert found.hour.drafts > 2 * found.window.drafts
    assert found.hour.stderrs[0] < found.window.stderrs[0]
    assert found.tokens_per_step == pytest.approx(1.71, abs=0.03)
    assert found.decode_throughput == pytest.approx(
        found.decode_concurrency / found.tpot_seconds,  # type: ignore[operator]
        rel=0.03,
    )
    assert found.prefill_tokens_per_step is not None
    assert found.gain is None


def test_of_two_engines_the_concurrency_is_that_of_one_and_the_throughput_that_of_both() -> None:
    meter = simulated("two-engines", 400.0)
    found = evidence(meter)
    total = meter.measure()[0].total
    assert found.decode_concurrency == pytest.approx(total.decode_concurrency / 2)  # type: ignore[operator]
    assert found.decode_throughput == pytest.approx(
        total.decode_concurrency / total.tpot_seconds,  # type: ignore[operator]
        rel=0.03,
    )


def test_without_speculation_or_drafts_there_is_no_acceptance() -> None:
    found = evidence(simulated("no-speculation", 100.0))
    assert (found.observed_k, found.hour, found.window) == (0, None, None)
    assert found.step_seconds is not None


def test_drafts_of_varying_length_are_inconclusive_in_words() -> None:
    meter = Meter((300.0,), 13.0)
    meter.add(snapshot(0.0, counters(0, (0, 0, 0, 0))))
    meter.add(snapshot(5.0, counters(1000, (600, 400, 200, 100), draft_tokens=2500)))
    found = evidence(meter)
    assert found.inconclusive.startswith("drafts vary in length (2.50 of 4 tokens)")


def test_a_server_that_does_not_answer_has_no_k() -> None:
    found = unanswered(7.0, {"target_down": "firing"})
    assert found.observed_k is None
    assert found.stale


def track(*concurrencies: float) -> tuple[Point, ...]:
    """One engine at a load for ten seconds each, at 5 ms a token."""
    busy = tokens = 0.0
    points = [Point(0.0, Counters(generation_tokens=0.0, first_tokens=0.0, decode_seconds=0.0))]
    for i, c in enumerate(concurrencies):
        busy += 10.0 * c
        tokens += 10.0 * c / 0.005
        points.append(
            Point(
                10.0 * (i + 1),
                Counters(generation_tokens=tokens, first_tokens=0.0, decode_seconds=busy),
            )
        )
    return tuple(points)


def test_the_load_mix_weighs_each_load_by_its_tokens_and_leaves_idle_time_out() -> None:
    window = Window("m", "0", 300.0, (track(1.0, 8.0, 0.0, 8.2, 30.0),))
    mix = load_mix(window)
    assert [round(c, 1) for c, _ in mix] == [1.0, 8.1, 30.0]
    assert [tokens for _, tokens in mix] == pytest.approx([2000.0, 32400.0, 60000.0])


def test_however_many_loads_there_were_the_mix_is_short() -> None:
    window = Window("m", "0", 3600.0, (track(*(1.05**i for i in range(200))),))
    mix = load_mix(window)
    assert len(mix) <= MOST_LEVELS + 1
    assert sum(tokens for _, tokens in mix) == pytest.approx(
        sum(2000.0 * 1.05**i for i in range(200))
    )


def test_an_idle_window_has_no_load() -> None:
    assert load_mix(Window("m", "0", 300.0, (track(0.0, 0.0),))) == ()
