"""The cost model: step times by k, concurrency and start, and the speed that follows from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.cost import (
    MEMORY_SECONDS,
    STARTS_KEPT,
    Acceptance,
    CostModel,
    Sample,
    extrapolate,
    last_position_gain,
    predict,
)
from specdec_exporter.tuner_settings import TunerSettings

SETTINGS = TunerSettings()
GUIDE = Acceptance((0.47, 0.24, 0.12, 0.06), (0.0,) * 4, 1e6)
H200 = {
    # k: step milliseconds at 1, 8 and 32 requests in decode, as recorded
    0: (4.61, 4.77, 5.47),
    1: (5.71, 6.28, 7.39),
    2: (7.40, 8.45, 9.27),
    4: (13.62, 13.16, 14.14),
}


def model(steps: dict[int, tuple[float, ...]] = H200, start: float = 1.0) -> CostModel:
    costs = CostModel()
    for k, by_load in steps.items():
        for c, ms in zip((1.0, 8.0, 32.0), by_load, strict=True):
            costs = costs.observe(Sample(k, start, 300.0, c, ms / 1000))
    return costs


def seconds(costs: CostModel, k: int, c: float, **kwargs: float) -> float:
    step = costs.step(k, c, SETTINGS, **kwargs)  # type: ignore[arg-type]
    assert step is not None
    return step.seconds


# Acceptance that was not seen


def test_an_unseen_position_1_is_the_square_of_position_0() -> None:
    ratios, _ = extrapolate(Acceptance((0.6,), (0.0,)), 2)
    assert ratios == pytest.approx((0.6, 0.36))


def test_deeper_positions_go_on_as_the_last_two_did() -> None:
    ratios, _ = extrapolate(Acceptance((0.8, 0.6), (0.0, 0.0)), 4)
    assert ratios == pytest.approx((0.8, 0.6, 0.45, 0.3375))


def test_what_was_seen_is_kept_as_it_is_and_cut_to_k() -> None:
    assert extrapolate(GUIDE, 2)[0] == GUIDE.ratios[:2]


def test_a_tail_seen_earlier_is_taken_before_the_formula() -> None:
    ratios, _ = extrapolate(Acceptance((0.47,), (0.0,)), 3, conditional=(0.2,))
    assert ratios == pytest.approx((0.47, 0.094, 0.094 * 0.2))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 16), st.floats(0.001, 0.1))
def test_extrapolated_positions_are_ratios_that_never_rise_and_are_less_sure_the_deeper(
    seen: list[float], k: int, stderr: float
) -> None:
    seen.sort(reverse=True)
    ratios, stderrs = extrapolate(Acceptance(tuple(seen), (stderr,) * len(seen)), k)
    assert len(ratios) == k
    assert all(0 <= b <= a <= 1 for a, b in pairwise(ratios))
    relative = [e / p for p, e in zip(ratios, stderrs, strict=True) if p > 1e-6]
    assert all(b > a for a, b in pairwise(relative[len(seen) - 1 :]))


# Step times


def test_a_step_time_is_interpolated_between_loads_and_between_ks() -> None:
    costs = model()
    assert seconds(costs, 1, 8.0) == pytest.approx(0.00628)
    assert 0.00628 < seconds(costs, 1, 20.0) < 0.00739
    assert seconds(costs, 3, 8.0) == pytest.approx((0.00845 + 0.01316) / 2)


def test_beyond_the_deepest_k_each_token_costs_what_the_last_ones_did() -> None:
    costs = model()
    step = costs.step(5, 8.0, SETTINGS)
    assert step is not None
    assert step.seconds == pytest.approx(0.01316 + (0.01316 - 0.00845) / 2)
    assert step.extrapolated


def test_beyond_the_measured_load_a_curve_follows_the_k_that_was_measured_there() -> None:
    costs = CostModel()
    for c, ms in ((1.0, 4.0), (8.0, 5.0), (32.0, 8.0)):
        costs = costs.observe(Sample(1, 1.0, 300.0, c, ms / 1000))
    costs = costs.observe(Sample(2, 2.0, 300.0, 8.0, 0.006))
    step = costs.step(2, 32.0, SETTINGS)
    assert step is not None
    assert step.seconds == pytest.approx(0.006 * 8 / 5)
    assert step.extrapolated


def test_a_fall_at_the_end_of_a_curve_does_not_go_on() -> None:
    costs = CostModel().observe(Sample(1, 1.0, 300.0, 8.0, 0.006))
    costs = costs.observe(Sample(1, 1.0, 300.0, 32.0, 0.005))
    assert seconds(costs, 1, 320.0) == pytest.approx(0.005)


def test_with_one_k_measured_another_is_assumed_by_the_guides_cost() -> None:
    costs = CostModel().observe(Sample(2, 1.0, 300.0, 8.0, 0.00147))
    assert seconds(costs, 0, 8.0) == pytest.approx(0.00147 / (1 + 2 * 0.235))
    assert seconds(costs, 1, 8.0) == pytest.approx(0.00147 * 1.235 / 1.47)
    dearer = TunerSettings(assumed_position_cost=0.5)
    step = costs.step(1, 8.0, dearer)
    assert step is not None
    assert step.seconds == pytest.approx(0.00147 * 1.5 / 2.0)


def test_what_nobody_measured_is_less_sure_by_the_assumed_error() -> None:
    costs = CostModel().observe(Sample(2, 1.0, 300.0, 8.0, 0.00147))
    sure, unsure = (costs.step(1, 8.0, TunerSettings(assumed_cost_stderr=e)) for e in (0.0, 0.5))
    assert sure is not None
    assert unsure is not None
    assert unsure.stderr == pytest.approx(math.hypot(sure.stderr, 0.5))


def test_a_model_without_measurements_knows_no_step_time_and_predicts_nothing() -> None:
    assert CostModel().step(1, 8.0, SETTINGS) is None
    assert predict(CostModel(), extrapolate(GUIDE, 2), [(8.0, 1.0)], (1, 2), SETTINGS) == ()
    assert predict(model(), extrapolate(GUIDE, 2), [], (1, 2), SETTINGS) == ()


def test_a_baseline_stands_in_for_k_0_until_it_is_measured() -> None:
    class Curve:
        def tpot_seconds(self, c: float) -> float | None:
            return 0.004 if c < 64 else None

    costs = CostModel().observe(Sample(1, 1.0, 300.0, 8.0, 0.006))
    step = costs.step(0, 8.0, SETTINGS, baseline=Curve())
    assert step is not None
    assert (step.seconds, step.extrapolated) == (0.004, False)
    beyond = costs.step(0, 100.0, SETTINGS, baseline=Curve())
    assert beyond is not None
    assert beyond.extrapolated
    measured = costs.observe(Sample(0, 2.0, 300.0, 8.0, 0.005))
    assert measured.step(0, 8.0, SETTINGS, baseline=Curve())[0] == pytest.approx(0.005)  # type: ignore[index]


# Starts


def test_a_running_start_has_its_own_step_time_and_the_next_one_the_mean() -> None:
    costs = model({1: (6.0, 6.0, 6.0)}, start=1.0)
    for c in (1.0, 8.0, 32.0):
        costs = costs.observe(Sample(1, 2.0, 300.0, c, 0.0072))
    assert seconds(costs, 1, 8.0, start=2.0) == pytest.approx(0.0072)
    assert seconds(costs, 1, 8.0, start=1.0) == pytest.approx(0.006)
    assert seconds(costs, 1, 8.0) == pytest.approx(math.sqrt(0.006 * 0.0072))


def test_starts_seen_at_different_loads_make_no_step_in_the_curve() -> None:
    costs = CostModel()
    for c in (1.0, 4.0, 8.0):
        costs = costs.observe(Sample(1, 1.0, 300.0, c, 0.006))
    for c in (8.0, 16.0, 32.0):
        costs = costs.observe(Sample(1, 2.0, 300.0, c, 0.009))
    assert seconds(costs, 1, 1.0) == pytest.approx(seconds(costs, 1, 32.0), rel=0.02)


def test_the_spread_between_starts_is_what_was_seen_and_widens_the_error_of_the_next_start() -> (
    None
):
    def after(*factors: float) -> CostModel:
        costs = CostModel()
        for n, factor in enumerate(factors):
            costs = costs.observe(Sample(1, float(n), 300.0, 8.0, 0.006 * factor))
        return costs

    assert after(1.0).spread(0.13) == pytest.approx(0.13)
    assert after(1, 1, 1, 1, 1).spread(0.13) == pytest.approx(0.13 / math.sqrt(5))
    assert after(0.8, 1.2, 0.8, 1.2).spread(0.13) > 0.15
    calm, wild = (after(*f).step(1, 8.0, SETTINGS) for f in ((1.0, 1.0, 1.0), (0.8, 1.2, 1.0)))
    assert calm is not None
    assert wild is not None
    assert wild.stderr > 1.5 * calm.stderr


def test_starts_without_speculation_say_nothing_of_the_spread() -> None:
    costs = CostModel().observe(Sample(0, 1.0, 300.0, 8.0, 0.004))
    costs = costs.observe(Sample(0, 2.0, 300.0, 8.0, 0.008))
    assert costs.spread(0.13) == pytest.approx(0.13)


def test_only_the_latest_starts_and_the_latest_time_are_remembered() -> None:
    costs = CostModel()
    for start in range(3 * STARTS_KEPT):
        costs = costs.observe(Sample(1, float(start), 300.0, 8.0, 0.006))
    assert {cell.start for cell in costs.cells} == {
        float(start) for start in range(2 * STARTS_KEPT, 3 * STARTS_KEPT)
    }
    for _ in range(int(5 * MEMORY_SECONDS / 300)):
        costs = costs.observe(Sample(1, 99.0, 300.0, 8.0, 0.006))
    for _ in range(int(2 * MEMORY_SECONDS / 300)):
        costs = costs.observe(Sample(1, 99.0, 300.0, 8.0, 0.008))
    assert seconds(costs, 1, 8.0, start=99.0) > 0.0075
    assert costs.measured_seconds(1, 99.0) <= MEMORY_SECONDS


# Prefill


def with_prefill(b: float, *, noise: float = 0.0) -> CostModel:
    costs = CostModel()
    for n, u in enumerate((5.0, 40.0, 10.0, 80.0, 20.0, 60.0)):
        step = 0.006 + b * u + noise * (-1) ** n
        costs = costs.observe(Sample(1, 1.0, 300.0, 8.0, step, u))
    return costs


def test_the_cost_of_prefill_is_told_from_windows_that_differ_in_it() -> None:
    costs = with_prefill(2e-5)
    assert costs.prefill_seconds_per_token == pytest.approx(2e-5)
    assert seconds(costs, 1, 8.0) == pytest.approx(0.006)


def test_a_cost_of_prefill_that_could_be_chance_or_is_negative_is_none() -> None:
    assert with_prefill(1e-6, noise=0.001).prefill_seconds_per_token == 0
    assert with_prefill(-2e-5).prefill_seconds_per_token == 0
    assert model().prefill_seconds_per_token == 0


def test_prefill_takes_from_the_speedup_since_fewer_steps_carry_more_of_it() -> None:
    costs = with_prefill(2e-5).observe(Sample(0, 2.0, 300.0, 8.0, 0.005))
    without, with_it = (
        predict(
            costs, extrapolate(GUIDE, 1), [(8.0, 1.0)], (1,), SETTINGS,
            prefill_tokens_per_token=per_token,
        )[0].speedup
        for per_token in (0.0, 0.5)
    )  # fmt: skip
    b = 2e-5 * 0.5 * 8
    assert without == pytest.approx(1.47 * 0.005 / 0.006)
    assert with_it == pytest.approx(1.47 * (0.005 + b) / (0.006 + 1.47 * b))
    assert with_it < without


# Predictions


def test_the_speedup_is_tokens_per_step_over_the_relative_step_time_weighed_by_load() -> None:
    costs = model()
    (one,) = predict(costs, extrapolate(GUIDE, 2), [(1.0, 30.0), (32.0, 10.0)], (2,), SETTINGS)
    expected = 0.75 * 1.71 * 4.61 / 7.40 + 0.25 * 1.71 * 5.47 / 9.27
    assert one.speedup == pytest.approx(expected, rel=1e-6)


def test_on_the_h200_one_draft_token_is_best_at_the_guides_acceptance() -> None:
    for c in (1.0, 8.0, 32.0):
        predictions = predict(model(), extrapolate(GUIDE, 5), [(c, 1.0)], range(6), SETTINGS)
        assert max(predictions, key=lambda p: p.speedup).k == 1


def test_no_speculation_is_a_speedup_of_exactly_1() -> None:
    (off,) = predict(model(), extrapolate(GUIDE, 1), [(8.0, 1.0)], (0,), SETTINGS)
    assert (off.speedup, off.stderr, off.extrapolated) == (1.0, 0.0, False)


def test_steps_without_a_draft_bring_one_token() -> None:
    full, half = (
        predict(model(), extrapolate(GUIDE, 2), [(8.0, 1.0)], (2,), SETTINGS, coverage=coverage)[
            0
        ].speedup
        for coverage in (1.0, 0.5)
    )
    assert half / full == pytest.approx((1 + 0.5 * 0.71) / 1.71)


def test_the_error_has_a_part_from_acceptance_and_one_from_starts() -> None:
    def stderr(of_positions: float, spread: float) -> float:
        acceptance = extrapolate(Acceptance((0.47,), (of_positions,)), 1)
        settings = TunerSettings(start_spread=spread)
        return predict(model(), acceptance, [(8.0, 1.0)], (1,), settings)[0].stderr

    assert stderr(0.0, 0.0) < stderr(0.05, 0.0)
    assert stderr(0.0, 0.0) < stderr(0.0, 0.13)


def test_the_last_position_gains_what_k_is_faster_than_one_less() -> None:
    near = predict(model(), extrapolate(GUIDE, 4), [(8.0, 1.0)], range(5), SETTINGS)
    by_k = {p.k: p for p in near}
    found = last_position_gain(near, 2)
    assert found is not None
    gain, stderr = found
    # On the H200 a second draft token costs more than the guide's 0.24 tokens are worth.
    assert gain == pytest.approx(by_k[2].speedup / by_k[1].speedup - 1)
    assert gain < 0
    assert stderr > max(by_k[1].speed_stderr, by_k[2].speed_stderr)
    # One that is nearly always accepted is worth it.
    sure = predict(
        model(), extrapolate(Acceptance((0.95, 0.9), (0.0, 0.0)), 2), [(8.0, 1.0)], (1, 2), SETTINGS
    )
    found = last_position_gain(sure, 2)
    assert found is not None
    assert found[0] > 0


def test_the_last_position_is_not_judged_by_assumed_costs_nor_where_it_is_the_first() -> None:
    near = predict(model(), extrapolate(GUIDE, 4), [(8.0, 1.0)], range(5), SETTINGS)
    assert last_position_gain(near, 0) is None
    assert last_position_gain(near, 1) is None
    assert last_position_gain((), 2) is None
    assert last_position_gain([p for p in near if p.k != 1], 2) is None
    for guessed in (1, 2):
        guess = [replace(p, extrapolated=p.extrapolated or p.k == guessed) for p in near]
        assert last_position_gain(guess, 2) is None


# Keeping it


def test_a_model_survives_json() -> None:
    costs = with_prefill(2e-5).observe(Sample(0, 2.0, 300.0, 8.0, 0.005))
    assert CostModel.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    "broken",
    [{}, {"cells": [{}]}, {"cells": None}, {"cells": [{**model().to_dict()["cells"][0], "step_seconds": 0}]}],
)  # fmt: skip
def test_what_is_no_model_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostModel.from_dict(broken)
