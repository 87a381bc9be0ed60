from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from specdec_exporter.measure import Meter
from specdec_exporter.model import Counters, Point, Window
from specdec_exporter.simulator import Simulator, statistics_world
from specdec_exporter.uncertainty import (
    REFERENCE_SECONDS,
    DispersionReference,
    Interval,
    Row,
    Span,
    accepted_moments,
    active_intervals,
    stderr_of_sum,
    window_inflations,
)

P0, P1 = 0.47, 0.24
J = (0, 2)


def step(accepted: list[int], seconds: float = 5.0, k: int = 2) -> Interval:
    per_position = tuple(float(sum(j > i for j in accepted)) for i in range(k))
    return Interval(seconds, float(len(accepted)), per_position)


def draws(chance: random.Random, n: int, shift: float = 0.0) -> list[int]:
    return [
        2 if u < P1 + shift else 1 if u < P0 + shift else 0
        for u in (chance.random() for _ in range(n))
    ]


def test_moments_follow_from_the_positions() -> None:
    accepted = draws(random.Random(1), 1000)
    mean = sum(accepted) / 1000
    variance = sum((j - mean) ** 2 for j in accepted) / 1000
    got = accepted_moments(step(accepted).per_position, 1000)
    assert got == (pytest.approx(mean), pytest.approx(variance))


def test_there_is_no_inflation_before_four_hours_of_past() -> None:
    reference = DispersionReference()
    chance = random.Random(2)
    for _ in range(int(REFERENCE_SECONDS / 5) - 1):
        reference.add(step(draws(chance, 20)))
    assert reference.inflation(60.0, J) is None
    reference.add(step(draws(chance, 20)))
    assert reference.inflation(60.0, J) is not None


def test_independent_drafts_are_not_inflated() -> None:
    reference = DispersionReference()
    chance = random.Random(3)
    for _ in range(int(REFERENCE_SECONDS / 5)):
        reference.add(step(draws(chance, 40)))
    # The longer the block, the fewer of them there are to be compared.
    for seconds, tolerance in ((5.0, 0.1), (60.0, 0.2), (300.0, 0.4)):
        assert reference.inflation(seconds, J) == pytest.approx(1.0, abs=tolerance)


def test_drafts_that_are_alike_for_a_minute_are_inflated_more_over_longer_windows() -> None:
    reference = DispersionReference()
    chance = random.Random(4)
    for i in range(int(REFERENCE_SECONDS / 5)):
        if i % 12 == 0:
            shift = chance.choice([-0.15, 0.15])
        reference.add(step(draws(chance, 40, shift)))
    short, long = reference.inflation(5.0, J), reference.inflation(300.0, J)
    # By hand: the shift moves E[J] by 0.3, so a block of m equal drafts has 1 + m·0.09/Var J.
    assert short == pytest.approx(1 + 40 * 0.09 / 0.69, rel=0.2)
    assert long == pytest.approx(1 + 480 * 0.09 / 0.69, rel=0.3)


def test_an_idle_past_says_nothing() -> None:
    reference = DispersionReference()
    for _ in range(int(REFERENCE_SECONDS / 5) + 1):
        reference.add(step([]))
    assert reference.inflation(300.0, J) is None


def test_a_drafter_that_never_misses_says_nothing() -> None:
    reference = DispersionReference()
    for _ in range(int(REFERENCE_SECONDS / 5) + 1):
        reference.add(step([2] * 10))
    assert reference.inflation(300.0, J) is None


def test_the_past_is_bounded_whatever_the_interval() -> None:
    reference = DispersionReference()
    for _ in range(40_000):
        reference.add(step([1, 0], seconds=1.0))
    assert reference.seconds <= 6 * 3600 + 5
    assert len(reference._steps) <= 6 * 720 + 1


def own(steps: list[Interval], span: Span = J) -> float:
    return window_inflations(steps, [span])[span]


def test_a_windows_own_inflation_is_right_on_average_for_independent_drafts() -> None:
    chance = random.Random(5)
    values = [own([step(draws(chance, 50)) for _ in range(60)]) for _ in range(200)]
    assert sum(values) / len(values) == pytest.approx(1.0, abs=0.12)


def test_a_windows_own_inflation_sees_a_slow_swing() -> None:
    chance = random.Random(6)
    swung = [step(draws(chance, 50, 0.2 if i < 30 else -0.2)) for i in range(60)]
    assert own(swung) > 20


def test_a_windows_own_inflation_is_that_of_the_textbook() -> None:
    # Four intervals have one cosine: by hand, with residuals that sum to 0.
    steps = [Interval(5.0, 10.0, (float(a), 0.0)) for a in (8, 6, 4, 2)]
    residuals = [3.0, 1.0, -1.0, -3.0]
    wave = [math.cos(math.pi * u) for u in (1 / 8, 3 / 8, 5 / 8, 7 / 8)]
    power = 2 * sum(e * c for e, c in zip(residuals, wave, strict=True)) ** 2
    assert own(steps) == pytest.approx(power / (40 * 0.5 * 0.5))


def test_the_number_of_cosines_grows_slowly_and_is_bounded() -> None:
    # A single spike is in every cosine: its power averages to the same, whatever their number.
    # A wave of the tenth cosine is seen only by those that have ten.
    def wave(n: int, b: int) -> list[Interval]:
        return [
            Interval(5.0, 10.0, (5 + 4 * math.cos(math.pi * b * (i + 0.5) / n), 0.0))
            for i in range(n)
        ]

    assert own(wave(60, 6)) > 1 > own(wave(60, 7))
    assert own(wave(4000, 32)) > 1 > own(wave(4000, 33))


def test_too_few_intervals_or_no_variance_have_no_inflation_of_their_own() -> None:
    assert window_inflations([step([1, 0, 2])] * 3, [J]) == {}
    assert window_inflations([step([2, 2])] * 10, [J]) == {}


def points(*drafts: float, k: int = 2) -> tuple[Point, ...]:
    totals = [
        Counters(drafts=d, accepted_per_position=(d / 2,) + (d / 4,) * (k - 1)) for d in drafts
    ]
    return tuple(Point(5.0 * i, c) for i, c in enumerate(totals))


def test_intervals_of_several_engines_are_taken_together_by_their_time() -> None:
    a, b = points(0, 10, 10, 30), points(0, 2, 4, 4)
    both = active_intervals(Window("m", "all", 300.0, (a, b)))
    assert both == [
        Interval(5.0, 12, (6, 3)),
        Interval(5.0, 2, (1, 0.5)),
        Interval(5.0, 20, (10, 5)),
    ]


def test_engines_of_different_k_and_none_are_taken_together() -> None:
    plain = tuple(Point(5.0 * i, Counters(generation_tokens=1.0)) for i in range(2))
    tracks = (points(0, 8, k=1), points(0, 4, k=3), plain)
    assert active_intervals(Window("m", "all", 300.0, tracks)) == [Interval(5.0, 12, (6, 1, 1))]


def test_idle_time_is_no_past() -> None:
    reference = DispersionReference()
    chance = random.Random(8)
    for _ in range(int(REFERENCE_SECONDS)):
        reference.add(step([]))
    for _ in range(60):
        reference.add(step(draws(chance, 20)))
    assert reference.seconds == 300
    assert reference.inflation(60.0, J) is None


def test_an_outage_is_no_past() -> None:
    reference = DispersionReference()
    chance = random.Random(9)
    for _ in range(10):
        reference.add(step(draws(chance, 20)))
    reference.add(step(draws(chance, 20), seconds=REFERENCE_SECONDS))
    reference.add(step(draws(chance, 20)))
    assert reference.seconds == 55


def test_another_scrape_interval_is_no_outage_for_long() -> None:
    reference = DispersionReference()
    for seconds in (5.0, 60.0, 60.0, 60.0):
        reference.add(step([1, 0], seconds=seconds))
    assert reference.seconds == 125


def test_each_sum_has_an_inflation_of_its_own() -> None:
    # Requests differ in the first position only, and those that pass it fare alike.
    reference = DispersionReference()
    chance = random.Random(10)
    for i in range(int(REFERENCE_SECONDS / 5)):
        if i % 12 == 0:
            first = chance.choice([0.3, 0.7])
        reference.add(
            step([(1 + (chance.random() < 0.5)) * (chance.random() < first) for _ in range(40)])
        )
    whole, front, back = (reference.inflation(60.0, s) for s in (J, (0, 1), (1, 2)))
    # By hand: the between-request variance of the sum over its variance within a draft, times the
    # drafts that are alike; a block is half of one minute and half of the next on average.
    assert front == pytest.approx(1 + 2 / 3 * 480 * 0.2**2 / 0.25, rel=0.2)
    assert back == pytest.approx(1 + 2 / 3 * 480 * 0.1**2 / (0.25 * 0.75), rel=0.2)
    assert front > whole > back


def test_the_past_is_looked_at_again_every_five_minutes() -> None:
    reference = DispersionReference()
    chance = random.Random(11)
    for _ in range(int(REFERENCE_SECONDS / 5)):
        reference.add(step(draws(chance, 40)))
    calm = reference.inflation(60.0, J)
    for i in range(int(REFERENCE_SECONDS / 5)):
        reference.add(step(draws(chance, 40, 0.2 if i % 240 < 120 else -0.2)))
    assert reference.inflation(60.0, J) > 3 * calm


def test_a_block_that_is_a_large_part_of_the_past_is_corrected_for_the_fitted_mean() -> None:
    values = []
    for seed in range(40):
        reference = DispersionReference()
        chance = random.Random(seed)
        for _ in range(int(REFERENCE_SECONDS / 60)):
            # One entry a minute, with a mean that is drawn anew every five.
            reference.add(Interval(60.0, 100.0, (50 + chance.gauss(0, 5), 0.0)))
        values.append(reference.inflation(1200.0, J))
    # Independent steps whose sums have the binomial variance: 1, but for the floor at 1.
    assert sum(values) / len(values) == pytest.approx(1.16, abs=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [25, pytest.param(100, marks=pytest.mark.long)])
def test_the_95_percent_interval_covers_and_the_binomial_one_does_not(longest: int) -> None:
    # Of the longest windows, of a quarter of an hour each, fewer do where there are minutes only.
    worlds, drafts_per_second = 10, 20.0
    windows = {500 / drafts_per_second: 100, 2_000 / drafts_per_second: 100}
    windows[20_000 / drafts_per_second] = longest
    lengths = sorted(windows)
    inside, binomial, seen = Counter[float](), Counter[float](), Counter[float]()
    begin = 600.0 + REFERENCE_SECONDS + 100.0
    for seed in range(worlds):
        simulator = Simulator(statistics_world(variance_inflation=13.0), seed=seed)
        meter = Meter(lengths, 13.0)
        t = 600.0
        while t <= begin + max(n * x for x, n in windows.items()):
            simulator.advance(t)
            meter.add(simulator.snapshot())
            ending = {
                x for x, n in windows.items() if (t - begin) % x == 0 and x <= t - begin <= n * x
            }
            for got in (m.total for m in meter.measure()) if ending else ():
                if got.window_seconds in ending:
                    assert got.overdispersion[0].source == "reference"
                    miss = abs(got.acceptance_ratio - (P0 + P1) / 2)
                    seen[got.window_seconds] += 1
                    inside[got.window_seconds] += miss <= 1.96 * got.acceptance_ratio_stderr
                    binomial[got.window_seconds] += (
                        miss <= 1.96 * got.acceptance_ratio_binomial_stderr
                    )
            # The long windows need no more than this, and a simulated day is long.
            t += 5.0 if t < begin + windows[lengths[1]] * lengths[1] else 10.0
    assert seen == {x: worlds * n for x, n in windows.items()}
    for x in lengths:
        covered = inside[x] / seen[x]
        print(f"{x * drafts_per_second:.0f} drafts: {covered:.3f} covered, "
              f"binomial {binomial[x] / seen[x]:.3f}")  # fmt: skip
        assert 0.93 <= covered <= 0.985
        assert binomial[x] / seen[x] < 0.75


def test_the_error_of_a_sum_is_that_of_the_textbook() -> None:
    # Four intervals have two cosines; by hand, with Student's 4.30 for two degrees.
    rows = [Row(5.0 * i, 10.0 + e, 10.0) for i, e in enumerate((3.0, 1.0, -1.0, -3.0))]
    power = sum(
        2
        * sum(
            (r.seconds - 10) * math.cos(math.pi * b * u) for r, u in zip(rows, MIDDLES, strict=True)
        )
        ** 2
        for b in (1, 2)
    )
    assert stderr_of_sum(rows, 1.0) == pytest.approx(4.30 / 1.96 * math.sqrt(power / 2), rel=0.04)


MIDDLES = (1 / 8, 3 / 8, 5 / 8, 7 / 8)


def test_engines_of_one_time_are_one_interval_of_a_sum() -> None:
    chance = random.Random(11)
    rows = [Row(5.0 * i, chance.gauss(10, 1), 10.0) for i in range(20)]
    halves = [Row(r.t, r.seconds / 2, r.expected / 2) for r in rows for _ in range(2)]
    assert stderr_of_sum(halves, 1.0) == pytest.approx(stderr_of_sum(rows, 1.0))
    assert stderr_of_sum([*rows[:3], *rows[:3]], 1.0) is None
