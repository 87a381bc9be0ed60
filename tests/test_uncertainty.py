from __future__ import annotations

import random
from itertools import pairwise

import pytest
from specdec_exporter.measure import Meter
from specdec_exporter.model import Counters, Point, Window
from specdec_exporter.simulator import Simulator, statistics_world
from specdec_exporter.uncertainty import (
    REFERENCE_SECONDS,
    DispersionReference,
    accepted_moments,
    window_inflation,
)

P0, P1 = 0.47, 0.24


def step(accepted: list[int]) -> Counters:
    return Counters(
        drafts=len(accepted),
        draft_tokens=2 * len(accepted),
        accepted_tokens=sum(accepted),
        accepted_per_position=(sum(j > 0 for j in accepted), sum(j > 1 for j in accepted)),
    )


def draws(chance: random.Random, n: int, shift: float = 0.0) -> list[int]:
    return [
        2 if u < P1 + shift else 1 if u < P0 + shift else 0
        for u in (chance.random() for _ in range(n))
    ]


def test_moments_follow_from_the_positions() -> None:
    accepted = draws(random.Random(1), 1000)
    mean = sum(accepted) / 1000
    variance = sum((j - mean) ** 2 for j in accepted) / 1000
    got = accepted_moments(step(accepted).accepted_per_position, 1000)
    assert got == (pytest.approx(mean), pytest.approx(variance))


def test_there_is_no_inflation_before_four_hours_of_past() -> None:
    reference = DispersionReference()
    chance = random.Random(2)
    for _ in range(int(REFERENCE_SECONDS / 5) - 1):
        reference.add(5.0, step(draws(chance, 20)))
    assert reference.inflation(60.0) is None
    reference.add(5.0, step(draws(chance, 20)))
    assert reference.inflation(60.0) is not None


def test_independent_drafts_are_not_inflated() -> None:
    reference = DispersionReference()
    chance = random.Random(3)
    for _ in range(int(REFERENCE_SECONDS / 5)):
        reference.add(5.0, step(draws(chance, 40)))
    # The longer the block, the fewer of them there are to be compared.
    for seconds, tolerance in ((5.0, 0.1), (60.0, 0.2), (300.0, 0.4)):
        assert reference.inflation(seconds) == pytest.approx(1.0, abs=tolerance)


def test_drafts_that_are_alike_for_a_minute_are_inflated_more_over_longer_windows() -> None:
    reference = DispersionReference()
    chance = random.Random(4)
    for i in range(int(REFERENCE_SECONDS / 5)):
        if i % 12 == 0:
            shift = chance.choice([-0.15, 0.15])
        reference.add(5.0, step(draws(chance, 40, shift)))
    short, long = reference.inflation(5.0), reference.inflation(300.0)
    # By hand: the shift moves E[J] by 0.3, so a block of m equal drafts has 1 + m·0.09/Var J.
    assert short == pytest.approx(1 + 40 * 0.09 / 0.69, rel=0.2)
    assert long == pytest.approx(1 + 480 * 0.09 / 0.69, rel=0.3)


def test_an_idle_past_says_nothing() -> None:
    reference = DispersionReference()
    for _ in range(int(REFERENCE_SECONDS / 5) + 1):
        reference.add(5.0, step([]))
    assert reference.inflation(300.0) is None


def test_a_drafter_that_never_misses_says_nothing() -> None:
    reference = DispersionReference()
    for _ in range(int(REFERENCE_SECONDS / 5) + 1):
        reference.add(5.0, step([2] * 10))
    assert reference.inflation(300.0) is None


def test_the_past_is_bounded_whatever_the_interval() -> None:
    reference = DispersionReference()
    for _ in range(40_000):
        reference.add(1.0, step([1, 0]))
    assert reference.seconds <= 6 * 3600 + 5
    assert len(reference._steps) <= 6 * 720 + 1


def window(steps: list[Counters]) -> Window:
    points, total = [Point(0.0, Counters(0, 0, 0, (0, 0), 0, 0, 0, 0))], Counters(0, 0, 0, (0, 0))
    for i, one in enumerate(steps, start=1):
        total = total + one
        points.append(Point(5.0 * i, total))
    return Window("m", "0", 300.0, (tuple(points),))


def test_a_windows_own_inflation_is_right_on_average_for_independent_drafts() -> None:
    chance = random.Random(5)
    values = [
        window_inflation(window([step(draws(chance, 50)) for _ in range(60)])) for _ in range(200)
    ]
    assert sum(values) / len(values) == pytest.approx(1.0, abs=0.12)


def test_a_windows_own_inflation_sees_a_slow_swing() -> None:
    chance = random.Random(6)
    swung = [step(draws(chance, 50, 0.2 if i < 30 else -0.2)) for i in range(60)]
    assert window_inflation(window(swung)) > 20


def test_engines_are_taken_together_in_a_windows_own_inflation() -> None:
    chance = random.Random(7)
    a, b = (window([step(draws(chance, 50)) for _ in range(60)]) for _ in range(2))
    both = Window("m", "all", 300.0, a.tracks + b.tracks)
    steps = zip(*(pairwise(track) for track in both.tracks), strict=True)
    summed = [
        (after_a.totals - before_a.totals) + (after_b.totals - before_b.totals)
        for (before_a, after_a), (before_b, after_b) in steps
    ]
    assert window_inflation(both) == pytest.approx(window_inflation(window(summed)))


def test_too_few_intervals_or_no_speculation_have_no_inflation_of_their_own() -> None:
    assert window_inflation(window([step([1, 0, 2])] * 3)) is None
    assert window_inflation(window([step([2, 2])] * 10)) is None
    bare = Counters(generation_tokens=1.0)
    plain = Window("m", "0", 300.0, (tuple(Point(float(t), bare) for t in range(9)),))
    assert window_inflation(plain) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "worlds", "windows"), [(500, 20, 50), (2_000, 20, 50), (20_000, 10, 100)]
)
def test_the_95_percent_interval_covers_and_the_binomial_one_does_not(
    drafts: int, worlds: int, windows: int
) -> None:
    seconds = drafts / 20.0
    interval = 10.0 if drafts == 20_000 else 5.0
    inside = binomial = 0
    for seed in range(worlds):
        simulator = Simulator(statistics_world(variance_inflation=13.0), seed=seed)
        meter = Meter([seconds], 13.0)
        begin = 600.0 + REFERENCE_SECONDS + 60.0
        ends = {begin + seconds * i for i in range(1, windows + 1)}
        t = 600.0
        while t <= max(ends):
            simulator.advance(t)
            meter.add(simulator.snapshot())
            if t in ends:
                (m,) = meter.measure()
                got = m.total
                assert got.overdispersion[0].source == "reference"
                miss = abs(got.acceptance_ratio - (P0 + P1) / 2)
                inside += miss <= 1.96 * got.acceptance_ratio_stderr
                binomial += miss <= 1.96 * got.acceptance_ratio_binomial_stderr
            t += interval
    total = worlds * windows
    print(f"{drafts} drafts: {inside / total:.3f} covered, binomial {binomial / total:.3f}")
    assert total == 1000
    assert 0.93 <= inside / total <= 0.985
    assert binomial / total < 0.75
