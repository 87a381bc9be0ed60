"""A ratio of medians is what it says, and its interval holds the truth as often as it says."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.abtest.stats import CONFIDENCE, median, quantile, ratio, ratio_of_medians

POSITIVE = st.floats(0.1, 1000)
GROUPS = st.dictionaries(
    st.sampled_from("xyz"), st.lists(POSITIVE, min_size=1, max_size=6), min_size=1
)


def pooled(groups: dict[str, list[float]]) -> list[float]:
    return [value for group in groups.values() for value in group]


@given(GROUPS, GROUPS)
def test_the_ratio_is_of_the_medians_over_all_values_and_lies_in_its_interval(
    a: dict[str, list[float]], b: dict[str, list[float]]
) -> None:
    found = ratio_of_medians(a, b, Random(1), 200)
    assert found.a == statistics.median(pooled(a))
    assert found.b == statistics.median(pooled(b))
    assert found.ratio == pytest.approx(found.b / found.a)
    if found.low is not None:
        assert found.high is not None
        assert found.low <= found.high
        least = min(pooled(b)) / max(pooled(a))
        most = max(pooled(b)) / min(pooled(a))
        assert least * (1 - 1e-9) <= found.low <= found.high <= most * (1 + 1e-9)


@given(GROUPS, GROUPS, st.integers(0, 9))
def test_the_same_chance_gives_the_same_interval(
    a: dict[str, list[float]], b: dict[str, list[float]], seed: int
) -> None:
    assert ratio_of_medians(a, b, Random(seed), 50) == ratio_of_medians(a, b, Random(seed), 50)


def test_values_that_do_not_differ_have_an_interval_of_no_width() -> None:
    found = ratio_of_medians({"p": [2.0] * 5}, {"p": [3.0] * 5}, Random(1))
    assert (found.low, found.ratio, found.high) == (1.5, 1.5, 1.5)


def test_what_was_not_repeated_has_no_interval() -> None:
    found = ratio_of_medians({"p": [2.0], "q": [4.0]}, {"p": [3.0], "q": [5.0]}, Random(1))
    assert found.ratio == pytest.approx(4 / 3)
    assert (found.low, found.high) == (None, None)


def test_prompts_keep_their_share_in_every_draw() -> None:
    """Drawn from one heap, two very unlike prompts would swamp what little repeats differ."""
    a = {"short": [1.0] * 10, "long": [100.0] * 11}
    found = ratio_of_medians(a, a, Random(1))
    assert (found.low, found.high) == (1.0, 1.0)


def test_requests_that_never_came_push_the_median_and_half_of_them_leave_none() -> None:
    assert median([1.0, 2.0, math.inf]) == 2.0
    assert median([1.0, math.inf, math.inf]) is None
    assert median([]) is None
    assert ratio_of_medians({"p": [1.0, 2.0]}, {"p": [math.inf, math.inf]}, Random(1)).ratio is None


def test_half_of_a_side_at_zero_has_no_ratio() -> None:
    assert ratio(0.0, 5.0) is None
    assert ratio(None, 5.0) is None
    assert ratio(5.0, None) is None
    assert ratio(5.0, 0.0) == 0.0


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.25) == 1.25
    assert quantile([1.0, math.inf], 0.0) == 1.0
    assert quantile([1.0, 2.0, math.inf], 0.75) == math.inf


@pytest.mark.slow
def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    """Three prompts of different speed, 20 repeats each, as in a study of this kind."""
    chance = Random(7)
    speeds = {"p": 90.0, "q": 100.0, "r": 115.0}
    gain, runs = 1.9, 300

    def side(factor: float) -> dict[str, list[float]]:
        return {
            prompt: [factor * speed * math.exp(chance.gauss(0, 0.05)) for _ in range(20)]
            for prompt, speed in speeds.items()
        }

    held = 0
    for _ in range(runs):
        found = ratio_of_medians(side(1.0), side(gain), chance, 200)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= gain <= found.high
    share = held / runs
    print(f"held the true ratio in {100 * share:.1f} % of {runs} runs")
    error = math.sqrt(CONFIDENCE * (1 - CONFIDENCE) / runs)
    # The bootstrap of a median is a little wide, since a sample's values have gaps.
    assert CONFIDENCE - 4 * error < share <= 1.0
    assert share < 0.995, "so wide that it says nothing"
