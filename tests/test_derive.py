from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.derive import Assumption, derive
from specdec_exporter.model import Counters, Derived, Overdispersion, Point, Window
from specdec_exporter.window import combine

from tests.pages import counters

NOTHING = Counters(0, 0, 0, (), 0, 0, 0, 0)


def window(counted: Counters, seconds: float = 300.0, engine: str = "0") -> Window:
    zero = replace(
        NOTHING,
        drafts=None if counted.drafts is None else 0,
        draft_tokens=None if counted.draft_tokens is None else 0,
        accepted_tokens=None if counted.accepted_tokens is None else 0,
        accepted_per_position=(0.0,) * len(counted.accepted_per_position),
    )
    return Window("m", engine, 300.0, ((Point(0.0, zero), Point(seconds, counted)),))


def assumed(inflation: float) -> Assumption:
    return lambda _seconds, _span: Overdispersion("default", inflation)


def figures(counted: Counters, seconds: float = 300.0, inflation: float = 13.0) -> Derived:
    return derive(window(counted, seconds), assumed(inflation))


def test_the_guides_table_is_reproduced() -> None:
    got = figures(counters(100, (47, 24)))
    assert got.position_acceptance_ratio == (0.47, 0.24)
    assert got.mean_acceptance_length == pytest.approx(1.71)
    assert got.acceptance_ratio == pytest.approx(0.355)
    assert got.front_acceptance_ratio == pytest.approx(0.355)
    assert got.position_conditional_acceptance_ratio == (0.47, pytest.approx(24 / 47))
    assert got.num_speculative_tokens == 2


@pytest.mark.parametrize(
    ("positions", "overall"),
    [((26, 26), 0.26), ((26, 26, 1), 53 / 300), ((26, 26, 2, 1), 55 / 400)],
)
def test_front_acceptance_means_the_same_at_every_k(
    positions: tuple[float, ...], overall: float
) -> None:
    got = figures(counters(100, positions))
    assert got.front_acceptance_ratio == pytest.approx(0.26)
    assert got.acceptance_ratio == pytest.approx(overall)


def test_at_k_1_front_acceptance_is_that_of_position_0() -> None:
    got = figures(counters(100, (45,)))
    assert got.front_acceptance_ratio == got.acceptance_ratio == 0.45


def test_drafts_of_varying_length_bound_the_front_from_what_reached_position_1() -> None:
    # 100 drafts, 130 tokens: 30 of them had a second token, whose 20 acceptances are 2 in 3.
    got = figures(counters(100, (50, 20), draft_tokens=130))
    assert got.mean_draft_length == pytest.approx(1.3)
    assert got.front_acceptance_ratio == pytest.approx(70 / 130)


def test_drafts_emptied_by_a_grammar_do_not_break_the_front() -> None:
    got = figures(counters(100, (30, 10), draft_tokens=80))
    assert got.front_acceptance_ratio == pytest.approx(0.4)
    assert got.acceptance_ratio == pytest.approx(0.5)


def test_tpot_is_weighted_by_tokens_and_is_not_the_step_time() -> None:
    got = figures(counters(100, (47, 24), seconds=1.71))
    assert got.tokens_per_step == pytest.approx(1.71)
    assert got.step_seconds == pytest.approx(0.0171)
    assert got.tpot_seconds == pytest.approx(0.01)


def test_decode_concurrency_is_littles_law_summed_over_engines() -> None:
    one = window(counters(seconds=600.0), seconds=300.0)
    other = window(counters(seconds=300.0), seconds=150.0, engine="1")
    assert derive(one, assumed(13)).decode_concurrency == 2.0
    assert derive(combine((one, other)), assumed(13)).decode_concurrency == 4.0


def test_engines_are_summed_before_any_division() -> None:
    busy, idle = window(counters(900, (450, 90))), window(counters(100, (10, 0)), engine="1")
    got = derive(combine((busy, idle)), assumed(13))
    assert got.acceptance_ratio == pytest.approx(550 / 2000)
    assert got.engine == "all"


def test_padded_drafts_of_one_token_first_steps_are_taken_out() -> None:
    # As 20 requests of 8 tokens showed on vLLM 0.32: 120 drafts in 100 steps, so 20 of two
    # tokens each were placeholders, and 50 of 240 accepted are truly 50 of 200.
    got = figures(counters(120, (40, 10), steps=100))
    assert got.draft_coverage_ratio == pytest.approx(1.2)
    assert got.padded_drafts == 20
    assert got.drafts == 120
    assert got.acceptance_ratio == pytest.approx(50 / 200)
    assert got.mean_acceptance_length == pytest.approx(1.5)
    assert got.position_acceptance_ratio == (0.4, 0.1)


def test_fewer_drafts_than_steps_say_nothing_of_padding() -> None:
    got = figures(counters(80, (40, 10), steps=100))
    assert got.padded_drafts == 0
    assert got.draft_coverage_ratio == pytest.approx(0.8)
    assert got.acceptance_ratio == pytest.approx(50 / 160)


def test_without_drafts_acceptance_has_no_value_but_tpot_does() -> None:
    got = figures(counters(0, (0, 0), steps=50, seconds=1.0))
    assert got.acceptance_ratio is got.mean_acceptance_length is None
    assert got.front_acceptance_ratio is got.acceptance_ratio_stderr is None
    assert got.position_acceptance_ratio == (None, None)
    assert got.overdispersion == ()
    assert got.tpot_seconds == pytest.approx(0.02)


def test_an_idle_window_has_no_tpot_and_nobody_in_decode() -> None:
    got = figures(counters(0, (0, 0), first=0, seconds=0.0))
    assert got.tpot_seconds is got.step_seconds is got.tokens_per_step is None
    assert got.decode_concurrency == 0


def test_more_first_tokens_than_tokens_give_no_tpot() -> None:
    assert figures(replace(counters(), generation_tokens=5.0)).tpot_seconds is None


def test_tokens_without_decode_seconds_are_not_free() -> None:
    assert figures(replace(counters(), decode_seconds=0.0)).tpot_seconds is None


def test_without_speculation_there_is_a_tpot_and_k_is_0() -> None:
    plain = Counters(
        generation_tokens=110.0, first_tokens=10.0, decode_seconds=2.0, decode_steps=100.0
    )
    got = figures(plain)
    assert got.num_speculative_tokens == 0
    assert got.drafts is got.acceptance_ratio is got.front_acceptance_ratio is None
    assert got.position_acceptance_ratio == ()
    assert got.tpot_seconds == pytest.approx(0.02)
    assert got.tokens_per_step == 1.0


def test_a_window_without_span_has_no_concurrency() -> None:
    assert figures(counters(0), seconds=0.0).decode_concurrency is None


def test_counters_that_contradict_each_other_have_no_ratio() -> None:
    got = figures(replace(counters(100, (150, 24)), accepted_tokens=450.0))
    assert got.acceptance_ratio is got.mean_acceptance_length is None
    assert got.position_acceptance_ratio == (None, 0.24)
    assert got.front_acceptance_ratio == pytest.approx(174 / 200)


def test_the_variance_of_the_accepted_count_is_that_of_a_simulation_by_hand() -> None:
    # J is 0, 1, 2 with 53, 23, 24 of 100: its variance by definition.
    mean = 0.71
    variance = (53 * mean**2 + 23 * (1 - mean) ** 2 + 24 * (2 - mean) ** 2) / 100
    got = figures(counters(100, (47, 24)), inflation=4.0)
    assert got.mean_acceptance_length_stderr == pytest.approx(math.sqrt(4 * variance / 100))
    assert got.acceptance_ratio_stderr == pytest.approx(math.sqrt(4 * variance / 100) / 2)
    assert got.front_acceptance_ratio_stderr == pytest.approx(got.acceptance_ratio_stderr)
    assert got.position_acceptance_ratio_stderr[0] == pytest.approx(
        math.sqrt(4 * 0.47 * 0.53 / 100)
    )
    assert got.acceptance_ratio_binomial_stderr == pytest.approx(math.sqrt(0.355 * 0.645 / 200))
    assert got.overdispersion == (Overdispersion("default", 4.0),)


def test_absurdly_small_counters_have_no_infinite_figures() -> None:
    got = figures(counters(1e-317, (1e-317, 1e-317), draft_tokens=1e308))
    for value in (got.mean_draft_length, got.acceptance_ratio_stderr, got.tokens_per_step):
        assert value is None or math.isfinite(value)


counts = st.integers(0, 10_000)


@st.composite
def true_counters(draw: st.DrawFn) -> Counters:
    """Counters that a server could show: nested positions, drafts of up to k tokens."""
    k = draw(st.integers(1, 8))
    drafts = draw(counts)
    positions = tuple(accumulate([drafts, *(draw(counts) for _ in range(k))], min))[1:]
    drafted = [drafts, *(draw(st.integers(0, drafts)) for _ in range(k - 1))]
    reached = tuple(accumulate(drafted, min))
    accepted = tuple(min(a, r) for a, r in zip(positions, reached, strict=True))
    padded = draw(st.sampled_from([0, 0, 3]))
    steps = drafts + draw(counts)
    return Counters(
        drafts=drafts + padded + (steps - drafts if padded else 0),
        draft_tokens=sum(reached) + k * (padded + (steps - drafts if padded else 0)),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        generation_tokens=10 + steps + sum(accepted),
        first_tokens=10,
        decode_seconds=draw(st.floats(0, 1e6)),
        decode_steps=steps,
    )


@given(true_counters())
def test_ratios_are_ratios_and_mal_is_between_1_and_k_plus_1(counted: Counters) -> None:
    got = figures(counted)
    k = len(counted.accepted_per_position)
    for value in (
        got.acceptance_ratio,
        got.front_acceptance_ratio,
        *got.position_acceptance_ratio,
        *got.position_conditional_acceptance_ratio,
    ):
        assert value is None or 0 <= value <= 1
    assert got.mean_acceptance_length is None or 1 <= got.mean_acceptance_length <= k + 1
    if counted.drafts > got.padded_drafts and counted.draft_tokens > k * got.padded_drafts:
        assert got.acceptance_ratio is not None
        assert got.mean_acceptance_length is not None


@given(true_counters())
def test_mal_is_one_and_the_sum_of_the_positions(counted: Counters) -> None:
    got = figures(counted)
    if got.mean_acceptance_length is not None:
        assert got.mean_acceptance_length == pytest.approx(1 + sum(got.position_acceptance_ratio))


@given(true_counters())
def test_standard_errors_are_there_when_the_ratios_are(counted: Counters) -> None:
    got = figures(counted)
    assert (got.acceptance_ratio is None) == (got.acceptance_ratio_stderr is None)
    assert (got.mean_acceptance_length is None) == (got.mean_acceptance_length_stderr is None)
    for value in (got.acceptance_ratio_stderr, got.front_acceptance_ratio_stderr):
        assert value is None or (value >= 0 and math.isfinite(value))


def test_padding_is_that_of_each_engine() -> None:
    # The second engine drafts in half of its steps; summed, there are no more drafts than steps.
    padded, sparse = counters(120, (40, 10), steps=100), counters(50, (20, 5), steps=100)
    one, other = window(padded), window(sparse, engine="1")
    got = derive(combine((one, other)), assumed(13))
    assert got.padded_drafts == 20
    assert got.acceptance_ratio == pytest.approx(75 / 300)


def test_an_engine_without_speculation_does_not_take_the_others_figures_away() -> None:
    plain = Counters(
        generation_tokens=110.0, first_tokens=10.0, decode_seconds=2.0, decode_steps=100.0
    )
    one, other = window(counters(100, (47, 24), seconds=1.0)), window(plain, engine="1")
    got = derive(combine((one, other)), assumed(13))
    assert got.acceptance_ratio == pytest.approx(0.355)
    assert got.mean_acceptance_length == pytest.approx(1.71)
    assert got.draft_coverage_ratio == 0.5
    assert got.tpot_seconds == pytest.approx(3.0 / 271)


def test_an_engine_scraped_once_leaves_the_concurrency_of_the_others() -> None:
    new = window(counters(0), seconds=0.0, engine="1")
    got = derive(combine((window(counters(seconds=600.0)), new)), assumed(13))
    assert got.decode_concurrency == 2.0


def swinging(n: int = 40) -> Window:
    """Half a window at 0.6 and half at 0.3: far more than independent drafts would do."""
    points, total = [Point(0.0, counters(0, (0, 0)))], counters(0, (0, 0))
    for i in range(n):
        total = total + counters(100, (60, 30) if i < n / 2 else (30, 15))
        points.append(Point(5.0 * (i + 1), total))
    return Window("m", "0", 300.0, (tuple(points),))


def test_the_larger_of_the_assumed_and_the_windows_own_inflation_is_in_force() -> None:
    wide, narrow = derive(swinging(), assumed(1000.0)), derive(swinging(), assumed(1.0))
    (_, own) = narrow.overdispersion
    assert own.source == "window"
    assert 10 < own.value < 1000
    assert wide.acceptance_ratio_stderr == pytest.approx(
        narrow.acceptance_ratio_stderr * math.sqrt(1000 / own.value)
    )


def test_what_is_assumed_is_asked_for_the_time_with_drafts_and_for_each_sum() -> None:
    asked = set()

    def assume(seconds: float, span: tuple[int, int]) -> Overdispersion:
        asked.add((seconds, span))
        return Overdispersion("reference", 10.0 + span[0] + 100 * span[1])

    busy = (Point(0.0, counters(0, (0, 0, 0))), Point(5.0, counters(100, (47, 24, 12))))
    idle = Point(300.0, counters(100, (47, 24, 12)))
    got = derive(Window("m", "0", 300.0, ((*busy, idle),)), assume)
    assert asked == {(5.0, span) for span in ((0, 3), (0, 2), (0, 1), (1, 2), (2, 3))}
    # J and its front have variances of their own at k = 3.
    square = 0.47 + 3 * 0.24
    front = (square - 0.71**2) * 210.0
    whole = (square + 5 * 0.12 - 0.83**2) * 310.0
    assert got.front_acceptance_ratio_stderr == pytest.approx(math.sqrt(front * 100) / 200)
    assert got.acceptance_ratio_stderr == pytest.approx(math.sqrt(whole * 100) / 300)
    assert got.position_acceptance_ratio_stderr[1] == pytest.approx(
        math.sqrt(211.0 * 0.24 * 0.76 / 100)
    )
