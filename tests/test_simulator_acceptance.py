from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec_exporter.simulator.acceptance import (
    MAX_SPREAD,
    acceptance_law,
    drafts_per_request,
    solve_spread,
    solve_stop,
)

GUIDE = (0.47, 0.24)
STOP = solve_stop(GUIDE, 150.0)

nested_rates = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).map(
    lambda rates: tuple(sorted(rates, reverse=True))
)


@settings(max_examples=40)
@given(nested_rates, st.floats(0.0, MAX_SPREAD))
def test_the_mean_over_drafts_is_the_rate_of_each_position_at_any_spread(
    rates: tuple[float, ...], spread: float
) -> None:
    law = acceptance_law(rates, spread, STOP)
    assert law.positions == pytest.approx(rates, abs=1e-9)
    for level in law.levels:
        assert all(0.0 <= deeper <= nearer <= 1.0 for nearer, deeper in pairwise(level.positions))


@pytest.mark.parametrize("inflation", [1.5, 4.0, 8.0, 13.0, 40.0])
@pytest.mark.parametrize("rates", [(0.45,), GUIDE, (0.47, 0.1), (0.027, 0.002), (0.6, 0.5, 0.4)])
def test_the_spread_gives_the_variance_inflation_that_was_asked_for(
    inflation: float, rates: tuple[float, ...]
) -> None:
    spread = solve_spread(rates, STOP, inflation)
    law = acceptance_law(rates, spread, STOP)
    assert law.variance_inflation == pytest.approx(inflation, rel=1e-5)


def test_requests_that_are_all_alike_do_not_inflate() -> None:
    assert acceptance_law(GUIDE, 0.0, STOP).variance_inflation == pytest.approx(1.0)
    assert solve_spread(GUIDE, STOP, 1.0) == pytest.approx(0.0, abs=1e-6)


def test_the_exact_moments_are_those_of_requests_drawn_one_by_one() -> None:
    stop = solve_stop(GUIDE, 20.0)
    law = acceptance_law(GUIDE, solve_spread(GUIDE, stop, 4.0), stop)
    variance = 0.47 + 3 * 0.24 - 0.71**2
    random = Random(1)
    requests = 20_000
    drafts = reached = squares = 0.0
    for _ in range(requests):
        (level,) = random.choices(law.levels, cum_weights=law.arrival_weights)
        excess = 0.0
        while True:
            (accepted,) = random.choices(range(3), cum_weights=level.cumulative)
            drafts += 1
            reached += accepted > 1
            excess += accepted - 0.71
            if random.random() > (1.0 - stop) ** (1 + accepted):
                break
        squares += excess * excess
    assert drafts / requests == pytest.approx(20.0, rel=0.03)
    assert reached / drafts == pytest.approx(0.24, rel=0.02)
    assert squares / drafts / variance == pytest.approx(4.0, rel=0.06)


def test_requests_of_high_acceptance_arrive_more_often_than_they_draft() -> None:
    law = acceptance_law(GUIDE, 1.0, STOP)
    worst, best = law.arrival_weights[0], 1.0 - law.arrival_weights[-2]
    assert worst < 1.0 / len(law.levels) < best


def test_drafts_per_request_do_not_depend_on_how_requests_differ() -> None:
    assert drafts_per_request(GUIDE, STOP) == pytest.approx(150.0)
    assert pytest.approx(1.0 / (150.0 * 1.71), rel=0.01) == STOP


@pytest.mark.parametrize("rates", [(), (1.1,), (-0.1,), (0.3, 0.4)])
def test_rates_that_are_no_nested_probabilities_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"rates|position"):
        acceptance_law(rates, 0.0, STOP)


def test_numbers_that_no_request_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        solve_spread(GUIDE, STOP, 0.5)
    with pytest.raises(ValueError, match="exceed 1"):
        solve_stop(GUIDE, 1.0)
