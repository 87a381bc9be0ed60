from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.drift import (
    BLOCK_SECONDS,
    DAY_SECONDS,
    LEARN_SECONDS,
    MONTH_SECONDS,
    Detector,
    Fingerprint,
    Incident,
    Learner,
    Reference,
    configured,
    draft_weight,
    reference_from,
    shape_of,
)
from specdec_exporter.parse import parse
from specdec_exporter.uncertainty import Interval, active_intervals
from specdec_exporter.window import History

DATA = Path(__file__).parent / "data"
GUIDE = (0.47, 0.24)
TWO = Fingerprint("m", 2)
MONDAY = 1_767_571_200.0
"""A midnight, UTC."""

Intervals = list[tuple[float, Interval]]


def recorded(name: str) -> tuple[float, Intervals]:
    """Time of the first scrape, and the intervals after it."""
    history, found, begin = History(), [], math.inf
    for line in (DATA / name).read_text().splitlines():
        scrape = json.loads(line)
        begin = min(begin, scrape["t"])
        history.add(parse("\n".join(scrape["m"]).encode() + b"\n", t=scrape["t"]))
        for window in history.last_interval():
            found += [(scrape["t"], interval) for interval in active_intervals(window)]
    return begin, found


def scrape(
    chance: random.Random, positions: Sequence[float], drafts: float, seconds: float
) -> Interval:
    """Independent drafts, all in all."""
    left, accepted, above = drafts, [], 1.0
    for position in positions:
        share = position / above if above > 0 else 0.0
        left = min(
            left, max(0.0, round(chance.gauss(left * share, math.sqrt(left * share * (1 - share)))))
        )
        accepted.append(left)
        above = position
    return Interval(seconds, drafts, tuple(accepted))


def traffic(
    chance: random.Random,
    begin: float,
    seconds: float,
    positions: Callable[[float], Sequence[float]] | Sequence[float] = GUIDE,
    *,
    rate: float = 20.0,
    step: float = 60.0,
) -> Iterator[tuple[float, Interval]]:
    for i in range(round(seconds / step)):
        t = begin + (i + 1) * step
        now = positions(t) if callable(positions) else positions
        yield t, scrape(chance, now, round(rate * step), step)


def feed(detector: Detector, intervals: Iterator[tuple[float, Interval]]) -> Incident | None:
    for t, interval in intervals:
        detector.add(t, interval)
    return detector.incident


def learned(chance: random.Random, days: float = 7.0, **world: Any) -> Reference:
    learner = Learner(13.0)
    for t, interval in traffic(chance, MONDAY, days * DAY_SECONDS, step=240.0, **world):
        learner.add(t, interval)
    reference = learner.reference(Fingerprint("m", len(interval.per_position)), t)
    assert reference is not None
    return reference


def guide(inflation: float = 13.0) -> Reference:
    return configured(TWO, GUIDE, taken_at=MONDAY, variance_inflation=inflation)


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


# Recordings


def test_a_learned_reference_without_a_day_in_it_is_watched_for_large_falls_only() -> None:
    flat = configured(TWO, (0.47, 0.24), taken_at=0.0, variance_inflation=13.0)
    assert not flat.is_provisional
    learned = replace(flat, source="learned")
    assert learned.is_provisional
    watched = Detector(learned)
    assert [chart.name for chart in watched.charts] == ["fast"]
    assert Detector.from_dict(learned, watched.to_dict()).charts == watched.charts
    for hour in range(24):
        # A daily cycle of 5 %: no fall, whatever the hour.
        share = 1.0 + 0.05 * math.cos(2 * math.pi * hour / 24)
        for minute in range(60):
            counts = (0.47 * share * 1200, 0.24 * share * 1200)
            watched.add(3600.0 * hour + 60.0 * minute, Interval(60.0, 1200.0, counts))
    assert watched.incident is None
    watched.add(90_000.0, Interval(600.0, 12_000.0, (0.2 * 12_000, 0.05 * 12_000)))
    assert watched.incident is not None


def test_a_real_drift_is_found_within_five_seconds_and_not_before_it_came() -> None:
    begin, intervals = recorded("vllm-0.32-cpu/series_draft-real-k4.jsonl")
    first = [(t, interval) for t, interval in intervals if t - begin < 15.01]
    reference = reference_from(
        first, Fingerprint("tiny", 4), source="recorded", taken_at=begin + 15, variance_inflation=13
    )
    assert reference.span_seconds == pytest.approx(15, abs=0.1)
    detector = Detector(reference)
    incident = feed(detector, iter(intervals[len(first) :]))
    assert incident is not None
    assert 21.0 < incident.detected_at - begin <= 26.01
    assert 20.0 <= incident.since - begin <= 22.0
    # Random words: position 0 from 0.58 to 0.22, and hardly ever a token after it.
    assert incident.shape == "even"
    assert incident.expected_mean_accepted_length == pytest.approx(2.34, abs=0.01)
    assert incident.observed_mean_accepted_length < 1.5


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_steady_recording_never_drifts_from_its_first_seconds_nor_from_the_rates_it_had(
    k: int,
) -> None:
    begin, intervals = recorded(f"vllm-0.24-h200/series_k{k}.jsonl")
    fingerprint = Fingerprint("gemma", k)
    references = [
        reference_from(
            [(t, i) for t, i in intervals if t - begin <= span],
            fingerprint,
            source="recorded",
            taken_at=begin + span,
            variance_inflation=13,
        )
        for span in (5, 15)
    ]
    references.append(
        configured(fingerprint, (0.47, 0.24, 0.12, 0.06), taken_at=0, variance_inflation=13)
    )
    for reference in references:
        detector, highest = Detector(reference), 0.0
        for t, interval in intervals:
            detector.add(t, interval)
            highest = max(highest, detector.score)
        assert detector.incident is None
        assert highest < 0.5


def test_a_recorded_collapse_of_position_1_is_found_with_its_tail() -> None:
    _, intervals = recorded("vllm-0.24-h200/series_k2_pos1_collapse.jsonl")
    incident = feed(Detector(guide()), iter(intervals))
    assert incident is not None
    assert (incident.shape, incident.chart) == ("tail", "medium")


# Detection


def evenly(fall: float) -> tuple[float, float]:
    """All conditional acceptances times 1 − fall."""
    return GUIDE[0] * (1 - fall), GUIDE[1] * (1 - fall) ** 2


@pytest.mark.parametrize(
    ("positions", "shape"),
    [
        ((0.40, 0.40 * 0.24 / 0.47), "front"),
        ((0.40, 0.24), "front"),
        ((0.47, 0.19), "tail"),
        (evenly(0.08), "even"),
        (evenly(0.5), "even"),
        ((0.009, 0.003), "front"),
    ],
)
def test_a_drift_has_the_shape_of_the_conditional_acceptances_that_fell(
    positions: tuple[float, float], shape: str
) -> None:
    chance = random.Random(1)
    incident = feed(Detector(guide()), traffic(chance, MONDAY, DAY_SECONDS, positions))
    assert incident is not None
    assert incident.shape == shape
    assert incident.expected_positions == pytest.approx(GUIDE)
    assert incident.observed_positions == pytest.approx(positions, abs=0.03)
    assert incident.observed_mean_accepted_length == pytest.approx(1 + sum(positions), abs=0.04)


def test_with_one_position_every_fall_is_of_the_front() -> None:
    assert shape_of((0.47,), (0.3,), 1e4) == "front"


def test_a_fall_of_position_0_that_the_deeper_ones_make_up_for_is_found_by_its_own_chart() -> None:
    positions = (0.40, 0.30)
    incident = feed(Detector(guide()), traffic(random.Random(2), MONDAY, DAY_SECONDS, positions))
    assert incident is not None
    assert (incident.chart, incident.shape) == ("first", "front")


def test_a_collapse_is_found_by_the_chart_for_large_falls_in_a_minute() -> None:
    chance = random.Random(3)
    incident = feed(Detector(guide()), traffic(chance, MONDAY, 600, (0.01, 0.0), step=5.0))
    assert incident is not None
    assert incident.chart == "fast"
    assert incident.detected_at - MONDAY <= 60


def test_the_beginning_of_a_drift_is_told_from_when_it_was_found() -> None:
    chance = random.Random(4)
    detector = Detector(guide())
    assert feed(detector, traffic(chance, MONDAY, 6 * 3600)) is None
    change = MONDAY + 6 * 3600
    incident = feed(detector, traffic(chance, change, 6 * 3600, evenly(0.2)))
    assert incident is not None
    assert abs(incident.since - change) < 300 < incident.detected_at - change


def test_a_slow_decline_from_3_07_to_2_8_over_hours_is_found_before_it_ends() -> None:
    # https://github.com/vllm-project/vllm/issues/41838: cured by a restart, seen by nobody for long.
    k = 4
    start = (0.75, 0.56, 0.43, 0.33)
    assert 1 + sum(start) == pytest.approx(3.07)

    def decline(t: float) -> tuple[float, ...]:
        share = 1 - (0.27 / 2.07) * min(1.0, max(0.0, (t - begin) / (6 * 3600)))
        return tuple(p * share for p in start)

    chance = random.Random(5)
    reference = learned(chance, positions=start)
    detector = Detector(reference)
    begin = MONDAY + 8 * DAY_SECONDS
    assert feed(detector, traffic(chance, begin - DAY_SECONDS, DAY_SECONDS, start)) is None
    incident = feed(detector, traffic(chance, begin, 6 * 3600, decline))
    assert incident is not None
    assert len(incident.observed_positions) == k
    # And not at once, as noise would be.
    assert incident.detected_at - begin > 1800


def daily(size: float) -> Callable[[float], tuple[float, ...]]:
    def positions(t: float) -> tuple[float, ...]:
        angle = 2 * math.pi * t / DAY_SECONDS
        share = 1 + size * (math.sin(angle) + 0.4 * math.cos(2 * angle))
        return tuple(p * share for p in GUIDE)

    return positions


def test_a_day_like_the_learned_ones_is_no_drift_and_only_the_learned_cycle_makes_it_so() -> None:
    chance = random.Random(6)
    reference = learned(chance, positions=daily(0.08))
    peak = MONDAY + DAY_SECONDS / 4
    want = daily(0.08)(peak)
    assert reference.expected(peak) == pytest.approx((sum(want), want[0]), rel=0.01)
    week = list(traffic(chance, MONDAY + 7 * DAY_SECONDS, 7 * DAY_SECONDS, daily(0.08)))
    assert feed(Detector(reference), iter(week)) is None
    flat = replace(reference, source="recorded", accepted_cycle=(), first_cycle=())
    assert feed(Detector(flat), iter(week)) is not None


def test_a_drift_is_told_from_the_time_of_day_that_it_comes_at() -> None:
    chance = random.Random(7)
    reference = learned(chance, positions=daily(0.08))
    # Where it is 4.8 % above the mean, a fall of 12 % is one of 8 % from the mean.
    begin = MONDAY + 8 * DAY_SECONDS + DAY_SECONDS / 4 - 3600
    usual = daily(0.08)
    incident = feed(
        Detector(reference),
        traffic(chance, begin, 7200, lambda t: [0.88 * p for p in usual(t)]),
    )
    assert incident is not None
    assert incident.expected_mean_accepted_length > 1 + 1.04 * sum(GUIDE)
    assert sum(incident.expected_positions) == pytest.approx(
        incident.expected_mean_accepted_length - 1
    )


def test_idle_time_says_nothing() -> None:
    chance = random.Random(8)
    detector = Detector(guide())
    feed(detector, traffic(chance, MONDAY, 600, evenly(0.1)))
    before = detector.to_dict()
    assert detector.score > 0
    for i in range(1000):
        detector.add(MONDAY + 600 + i * 60, Interval(60.0, 0.0, (0.0, 0.0)))
    assert detector.to_dict() == before


def test_what_has_another_k_says_nothing() -> None:
    detector = Detector(guide())
    for per_position in ((), (0.0,)):
        detector.add(MONDAY, Interval(5.0, 1e6, per_position))
    assert detector.score == 0
    assert detector.incident is None


def test_an_incident_survives_recovery_until_it_is_acknowledged() -> None:
    chance = random.Random(9)
    detector = Detector(guide())
    incident = feed(detector, traffic(chance, MONDAY, 3600, evenly(0.4)))
    assert incident is not None
    feed(detector, traffic(chance, MONDAY + 3600, 2 * DAY_SECONDS))
    assert detector.incident == incident
    assert detector.score >= 1
    detector.acknowledge()
    assert (detector.incident, detector.score) == (None, 0)
    assert feed(detector, traffic(chance, MONDAY + 3 * DAY_SECONDS, DAY_SECONDS)) is None
    # The reference is the same, so what is still wrong is found again.
    assert feed(detector, traffic(chance, MONDAY + 4 * DAY_SECONDS, 3600, evenly(0.4))) is not None


def test_a_restart_loses_nothing() -> None:
    chance = random.Random(10)
    intervals = list(traffic(chance, MONDAY, 3600, evenly(0.2)))
    straight = Detector(guide())
    feed(straight, iter(intervals))
    assert straight.incident is not None
    restarted = Detector(guide())
    for t, interval in intervals:
        restarted.add(t, interval)
        reference = Reference.from_dict(through_json(restarted.reference.to_dict()))
        restarted = Detector.from_dict(reference, through_json(restarted.to_dict()))
    assert restarted.reference == straight.reference
    assert restarted.to_dict() == straight.to_dict()
    assert restarted.incident == straight.incident
    assert restarted.score == straight.score


def test_what_an_earlier_version_kept_is_gone_on_with() -> None:
    values = replace(guide(), accepted_variance=(7.0, 8.0), first_variance=(3.0,)).to_dict()
    del values["lasting_share"], values["lasting_variance"]
    reference = Reference.from_dict(through_json(values))
    assert reference.accepted_variance == (7.0, *[8.0] * (len(BLOCK_SECONDS) - 1))
    assert reference.first_variance == (3.0,) * len(BLOCK_SECONDS)
    detector = Detector(reference)
    detector.add(MONDAY, Interval(5.0, 100.0, (40.0, 20.0)))
    kept = detector.to_dict()
    del kept["charts"]["medium"]
    went_on = Detector.from_dict(reference, through_json(kept))
    assert [chart.missing > 0 for chart in went_on.charts] == [True, False, True, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"accepted_variance": []},
        {"accepted_variance": [0.0] * 6},
        {"first_variance": [3.0] * 7},
        {"first_variance": [math.nan] * 6},
        {"position_acceptance_ratio": [0.0, 0.0]},
        {"position_acceptance_ratio": [0.2, 0.4]},
        {"position_acceptance_ratio": []},
        {"lasting_share": 0.5},
    ],
)
def test_a_reference_that_cannot_be_is_refused_before_it_is_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be those of a reference"):
        Reference.from_dict(through_json(guide().to_dict()) | wrong)


def test_a_detector_that_has_seen_nothing_can_be_kept_too() -> None:
    detector = Detector.from_dict(guide(), through_json(Detector(guide()).to_dict()))
    assert (detector.score, detector.incident) == (0, None)


def test_the_threshold_solves_the_run_length_formula() -> None:
    rates = (5.0, 20.0)
    detector = Detector(replace(guide(), rates=rates), false_alarms_per_month=2.0)
    detector.add(MONDAY, Interval(1.0, 10.0, (4.7, 2.4)))
    for chart in detector.charts:
        alarms = 0.0
        for rate in rates:
            drift, v = chart.fall * chart.mean * math.sqrt(rate), chart.variances[0]
            x = 2 * drift * chart.threshold / v
            alarms += 2 * drift**2 / v / (math.exp(x) - x - 1) / len(rates)
        assert alarms * MONTH_SECONDS == pytest.approx(2.0 * chart.share, rel=1e-3)


def test_the_threshold_is_for_sums_as_long_as_it_takes_to_reach_it() -> None:
    def threshold(fall: float, variances: tuple[float, ...]) -> float:
        reference = replace(guide(), rates=(20.0,), accepted_variance=variances)
        detector = Detector(reference)
        detector.add(MONDAY, Interval(1.0, 20.0, (9.4, 4.8)))
        (found,) = [c.threshold for c in detector.charts[:3] if c.fall == fall]
        return found

    level = guide().accepted_variance
    assert len(level) == len(BLOCK_SECONDS)
    # What strays for an hour matters to the chart that takes its time, and not to the fast one.
    more = (*level[:-2], 1.5 * level[-2], 1.5 * level[-1])
    assert threshold(0.04, more) > 1.2 * threshold(0.04, level)
    assert threshold(0.15, more) == threshold(0.15, level)
    # And what does not last for sixteen minutes the other way about.
    more = (1.5 * level[0], 1.2 * level[1], *level[2:])
    assert threshold(0.04, more) == threshold(0.04, level)
    assert threshold(0.15, more) > 1.2 * threshold(0.15, level)


def test_more_traffic_than_the_reference_had_raises_the_thresholds() -> None:
    reference = replace(guide(), rates=(10.0, 30.0))
    thresholds = []
    for rate in (5.0, 20.0, 31.0, 80.0):
        detector = Detector(reference)
        detector.add(MONDAY, Interval(1.0, rate, (0.47 * rate, 0.24 * rate)))
        thresholds.append(detector.charts[0].threshold / math.sqrt(max(20.0, rate)))
    assert thresholds[0] == thresholds[1]
    # Four times the drafts have twice the weight, and are told from chance sooner.
    detector = Detector(replace(guide(), rates=(40.0, 120.0)))
    detector.add(MONDAY, Interval(1.0, 80.0, (37.6, 19.2)))
    assert detector.charts[0].threshold < 2.0 * thresholds[0] * math.sqrt(20.0)


def test_a_scrape_of_four_times_the_drafts_has_twice_the_weight() -> None:
    missing = []
    for drafts in (100.0, 400.0):
        detector = Detector(guide())
        detector.add(MONDAY, Interval(5.0, drafts, (0.0, 0.0)))
        missing.append([chart.missing for chart in detector.charts])
    assert missing[1] == pytest.approx([2.0 * one for one in missing[0]])


def test_where_drafts_of_a_time_stray_together_every_scrape_has_the_same_weight() -> None:
    reference = replace(guide(), drafts=5e6, span_seconds=1e5, rates=(50.0,), lasting_share=1.0)
    reference = replace(reference, lasting_variance=reference.accepted_variance)
    missing = []
    for drafts in (100.0, 400.0):
        detector = Detector(reference)
        detector.add(MONDAY, Interval(5.0, drafts, (0.0, 0.0)))
        missing.append([chart.missing for chart in detector.charts])
    assert draft_weight(50.0, 0.3, 50.0) == draft_weight(50.0, 0.0, 0.0) == 1 / math.sqrt(50.0)
    # What is found in minutes cannot have wandered, and weighs as ever.
    ratios = [b / a for a, b in zip(*missing, strict=True)]
    assert ratios == pytest.approx([1.0, 1.0, 2.0, 2.0])


@pytest.mark.parametrize(("wander", "fall"), [(0.0, 0.04), (0.02, 0.05)])
def test_a_reference_knows_whether_acceptance_wanders_and_the_detector_minds_it(
    wander: float, fall: float
) -> None:
    chance, level = random.Random(31), 0.0
    keep = math.exp(-240.0 / 7200.0)

    def wandering(_: float) -> list[float]:
        nonlocal level
        level = keep * level + chance.gauss(0.0, wander * math.sqrt(1 - keep * keep))
        return [p * (1 + level) for p in GUIDE]

    reference = learned(chance, 7.0, positions=wandering)
    assert (reference.lasting_share > 0.5) is bool(wander)
    assert Detector(reference).charts[0].fall == fall


def test_sums_weighed_for_a_wander_stray_alike_by_night_and_by_day() -> None:
    chance, level = random.Random(33), 0.0
    keep = math.exp(-240.0 / 7200.0)
    learner, days = Learner(13.0), 7

    def rate(t: float) -> float:
        return 200.0 * (1 + 0.5 * math.sin(2 * math.pi * t / DAY_SECONDS))

    scrapes = []
    for i in range(round(days * DAY_SECONDS / 240.0)):
        t = MONDAY + (i + 1) * 240.0
        level = keep * level + chance.gauss(0.0, 0.02 * math.sqrt(1 - keep * keep))
        # Some bins are only partly filled: what matters is the rate while there are drafts.
        seconds = chance.choice((60.0, 240.0))
        positions = [p * (1 + level) for p in GUIDE]
        scrapes.append((t, scrape(chance, positions, round(rate(t) * seconds), seconds)))
        learner.add(*scrapes[-1])
    reference = learner.reference(TWO, t)
    assert reference is not None
    slow = Detector(reference).charts[0]
    assert slow.lasting > 0.8
    strays: dict[bool, list[float]] = {True: [], False: []}
    for block in (scrapes[i : i + 15] for i in range(0, len(scrapes), 15)):
        total = 0.0
        for t, (seconds, drafts, counts) in block:
            mean, _ = reference.expected(t)
            weight = draft_weight(drafts / seconds, slow.lasting, slow.usual_rate)
            total += weight * (drafts * mean - sum(counts))
        busy = rate(block[0][0]) > 200.0
        strays[busy].append(total**2 / sum(interval.seconds for _, interval in block))
    night, day = (sum(strays[busy]) / len(strays[busy]) for busy in (False, True))
    assert day / night == pytest.approx(1.0, abs=0.45)
    assert (day + night) / 2 == pytest.approx(slow.variances[4], rel=0.3)


def test_what_strays_for_longer_is_at_its_extremes_less_often() -> None:
    """By hand, of sums over T whose variance grows by one power of T throughout."""
    power, rate = 1.5, 200.0
    scale = 13.0 / BLOCK_SECONDS[0] ** (power - 1)
    variances = tuple(scale * t ** (power - 1) for t in BLOCK_SECONDS)
    detector = Detector(replace(guide(), rates=(rate,), accepted_variance=variances))
    detector.add(MONDAY, Interval(1.0, rate, (0.47 * rate, 0.24 * rate)))
    medium = detector.charts[1]
    drift = 0.07 * 0.71 * math.sqrt(rate)
    t = power / (2 - power) * medium.threshold / drift
    assert BLOCK_SECONDS[0] < t < BLOCK_SECONDS[-1]
    x = (medium.threshold + drift * t) ** 2 / (2 * scale * t**power)
    alarms = x ** (1 / power) / t / math.exp(x)
    assert alarms * MONTH_SECONDS == pytest.approx(0.5 * medium.share, rel=0.01)


def false_alarms(detector: Detector, intervals: Iterator[tuple[float, Interval]]) -> int:
    alarms = 0
    for t, interval in intervals:
        detector.add(t, interval)
        if detector.incident is not None:
            alarms += 1
            detector.acknowledge()
    return alarms


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow", "medium", "fast", "first"])
def test_of_independent_drafts_each_chart_raises_no_more_false_alarms_than_it_was_asked_for(
    name: str,
) -> None:
    # Asked for many, so that they can be counted. There are fewer of `fast`, which fills in a few
    # scrapes: what it has over the threshold then it would lack before.
    wanted = 100.0
    reference = replace(guide(1.0), rates=(1.0,))
    (share,) = [chart.share for chart in Detector(reference).charts if chart.name == name]
    detector = Detector(reference, wanted / share)
    detector.charts = [chart for chart in detector.charts if chart.name == name]
    month = traffic(random.Random(11), MONDAY, MONTH_SECONDS, rate=1.0, step=20.0)
    noise = 3 * math.sqrt(wanted)
    assert 0.5 * wanted - noise < false_alarms(detector, month) < 1.1 * wanted + noise


@pytest.mark.slow
def test_where_requests_outlive_scrapes_false_alarms_are_as_few_as_asked_for_in_all() -> None:
    # Acceptance that keeps for a minute, so that sums stray 13 times as much as by chance alone.
    chance = random.Random(12)
    state = 0.0
    within = 0.47 + 3 * 0.24 - 0.71**2

    def requests(t: float) -> list[float]:
        nonlocal state
        state = state * keep + chance.gauss(0.0, math.sqrt(1 - keep * keep))
        return [p * (1 + size * state) for p in GUIDE]

    keep, days, wanted = math.exp(-10 / 60), 15.0, 60.0
    size = math.sqrt(12 * within / (20 * 2 * 60)) / 0.71
    detector = Detector(replace(guide(), rates=(20.0,)), false_alarms_per_month=wanted)
    intervals = traffic(chance, MONDAY, days * DAY_SECONDS, requests, step=10.0)
    assert 0.3 < false_alarms(detector, intervals) * 30 / days / wanted < 2.0


# References


def test_there_is_no_reference_before_four_hours_of_drafting() -> None:
    chance = random.Random(12)
    learner = Learner(13.0)
    for t, interval in traffic(chance, MONDAY, LEARN_SECONDS - 60):
        learner.add(t, interval)
        learner.add(t + 1, Interval(60.0, 0.0, (0.0, 0.0)))
        assert learner.reference(TWO, t) is None
    learner.add(t + 60, interval)
    reference = learner.reference(TWO, t + 60)
    assert reference is not None
    assert (reference.source, reference.taken_at) == ("learned", t + 60)
    assert reference.position_acceptance_ratio == pytest.approx(GUIDE, rel=0.03)
    assert reference.drafts_per_second == pytest.approx(20)


def test_a_reference_is_flat_until_there_are_two_days() -> None:
    chance = random.Random(13)
    assert learned(chance, 1.9, positions=daily(0.08)).accepted_cycle == ()
    assert len(learned(chance, 2.1, positions=daily(0.08)).accepted_cycle) == 5


def test_hours_that_were_never_seen_are_expected_to_be_near_the_mean() -> None:
    chance = random.Random(14)
    learner = Learner(13.0)
    for day in range(7):
        morning = MONDAY + day * DAY_SECONDS + 9 * 3600
        for t, interval in traffic(chance, morning, 6 * 3600, rate=2.0, step=240.0):
            learner.add(t, interval)
    reference = learner.reference(TWO, t)
    assert reference is not None
    for hour in range(24):
        mean, first = reference.expected(MONDAY + hour * 3600)
        assert mean == pytest.approx(sum(GUIDE), rel=0.15)
        assert first == pytest.approx(GUIDE[0], rel=0.15)


def test_the_variance_of_a_reference_is_that_of_long_sums() -> None:
    independent = learned(random.Random(15), 2.0)
    within = 0.47 + 3 * 0.24 - 0.71**2
    assert independent.accepted_variance == pytest.approx([within] * 6, rel=0.3)
    assert independent.first_variance == pytest.approx([0.47 * 0.53] * 6, rel=0.3)
    # A shift that lasts for half an hour: by hand, blocks that long see all of it, shorter ones too.
    chance = random.Random(16)
    shifts: dict[int, float] = {}

    def shifted(t: float) -> list[float]:
        shift = shifts.setdefault(int((t - 1) // 1800), chance.choice([-0.05, 0.05]))
        return [p * (1 + shift) for p in GUIDE]

    of_shift = 20 * (0.05 * 0.71) ** 2
    found = learned(chance, 7.0, positions=shifted).accepted_variance
    for seconds, variance in zip(BLOCK_SECONDS, found, strict=True):
        short, long = sorted((seconds, 1800.0))
        assert variance == pytest.approx(
            within + of_shift * short * (1 - short / long / 3), rel=0.2
        )


def test_a_reference_knows_its_quiet_hours_and_its_busy_ones() -> None:
    chance = random.Random(21)
    learner = Learner(13.0)
    for hour in range(24):
        begin, rate = MONDAY + hour * 3600, 5.0 + hour
        for t, interval in traffic(chance, begin, 3600, rate=rate, step=240.0):
            learner.add(t, interval)
    reference = learner.reference(TWO, t)
    assert reference is not None
    assert reference.rates == pytest.approx([6 + 3 * i for i in range(8)], rel=0.01)
    assert reference.drafts_per_second == pytest.approx(16.5, rel=0.01)


def test_where_the_span_is_short_the_given_inflation_stands_in() -> None:
    chance = random.Random(17)

    def variances(seconds: float) -> tuple[float, ...]:
        intervals = traffic(chance, MONDAY, seconds)
        got = reference_from(intervals, TWO, source="recorded", taken_at=0, variance_inflation=50)
        return got.accepted_variance

    within = 0.47 + 3 * 0.24 - 0.71**2
    assert variances(15 * 60) == pytest.approx([50 * within] * 6, rel=0.1)
    found = variances(4 * 3600)
    assert max(found[:3]) < 5 * within
    assert found[3:] == pytest.approx([50 * within] * 3, rel=0.1)


def test_a_short_reference_that_is_off_by_its_own_error_raises_no_alarm() -> None:
    # 2,000 drafts whose inflation is 13 give E[J] to 9 %: the truth is well below what they showed.
    lucky = (Interval(100.0, 2000.0, (2000 * 0.51, 2000 * 0.26)),)
    reference = reference_from(
        [(MONDAY, lucky[0])], TWO, source="recorded", taken_at=MONDAY, variance_inflation=13
    )
    sure = replace(reference, drafts=1e9)
    day = list(traffic(random.Random(18), MONDAY, DAY_SECONDS))
    assert feed(Detector(reference), iter(day)) is None
    assert feed(Detector(sure), iter(day)) is not None


def test_a_configured_reference_has_the_positions_given_and_no_others() -> None:
    two = configured(TWO, (0.47, 0.24, 0.12), taken_at=1, variance_inflation=13)
    assert two.position_acceptance_ratio == GUIDE
    four = configured(Fingerprint("m", 4), GUIDE, taken_at=1, variance_inflation=13)
    assert four.position_acceptance_ratio == GUIDE
    # What nobody has said anything about is not compared.
    chance = random.Random(19)
    assert feed(Detector(four), traffic(chance, MONDAY, 3600, (0.47, 0.24, 0.0, 0.0))) is None
    incident = feed(Detector(four), traffic(chance, MONDAY, 3600, (0.3, 0.1, 0.1, 0.1)))
    assert incident is not None
    assert len(incident.observed_positions) == 2


@pytest.mark.parametrize("positions", [(), (0.0,), (1.2,), (0.3, 0.4), (0.3, -0.1), (math.nan,)])
def test_a_configured_reference_that_cannot_be_is_refused(positions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="acceptance ratios"):
        configured(TWO, positions, taken_at=0, variance_inflation=13)


def test_there_is_nothing_to_refer_to_without_drafts_of_that_k() -> None:
    one = [(MONDAY, Interval(5.0, 100.0, (47.0,)))]
    none_accepted = [(MONDAY, Interval(5.0, 100.0, (0.0, 0.0)))]
    for intervals in ([], one, none_accepted):
        with pytest.raises(ValueError, match="nothing was accepted at k = 2"):
            reference_from(intervals, TWO, source="recorded", taken_at=0, variance_inflation=13)


def test_learning_begins_anew_with_another_k() -> None:
    chance = random.Random(20)
    learner = Learner(13.0)
    for t, interval in traffic(chance, MONDAY, 2 * LEARN_SECONDS, (0.5,)):
        learner.add(t, interval)
    assert learner.reference(TWO, t) is None
    learner.add(t + 60, scrape(chance, GUIDE, 1200, 60.0))
    assert learner.seconds == 60


def test_learning_survives_a_restart_and_its_memory_is_bounded() -> None:
    chance = random.Random(21)
    learner = Learner(13.0)
    for i, (t, interval) in enumerate(traffic(chance, MONDAY, 9 * DAY_SECONDS, daily(0.05))):
        learner.add(t, interval)
        if i % 2000 == 1999:
            learner = Learner.from_dict(through_json(learner.to_dict()), 13.0)
    assert learner.seconds == pytest.approx(7 * DAY_SECONDS, rel=0.001)
    assert len(json.dumps(learner.to_dict())) < 200_000
    again = Learner.from_dict(through_json(learner.to_dict()), 13.0)
    assert again.reference(TWO, t) == learner.reference(TWO, t)


def test_a_clock_that_is_set_back_does_not_disorder_what_was_learned() -> None:
    chance = random.Random(22)
    learner = Learner(13.0)
    for t, interval in traffic(chance, MONDAY, 3600):
        learner.add(t, interval)
    learner.add(MONDAY, interval)
    indices = [row[0] for row in learner.to_dict()["bins"]]
    assert all(a < b for a, b in pairwise(indices))
    assert learner.seconds == 3660


def test_a_drafter_that_never_misses_can_be_referred_to() -> None:
    reference = configured(TWO, (1.0, 1.0), taken_at=0, variance_inflation=13)
    incident = feed(Detector(reference), traffic(random.Random(23), MONDAY, 60, (0.9, 0.8)))
    assert incident is not None
