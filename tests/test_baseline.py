"""The curve of a server without speculation: what it says, what it is made of, and what is refused."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.baseline import (
    Baseline,
    BaselineError,
    BaselinePoint,
    Conditions,
    Observed,
    choose,
    decode_intervals,
    learn,
    static,
)
from specdec_exporter.model import Counters, Point, Window
from specdec_exporter.parse import parse
from specdec_exporter.window import History

from tests.pages import H200, recording

MODEL = "gemma4-e4b-shape"


def baseline(*points: tuple[float, float], source: str = "measured", **changed: Any) -> Baseline:
    """Points of concurrency and milliseconds."""
    made = Baseline(
        source="measured",
        model_name="m",
        engine_version="0.24.0",
        taken_at=1000.0,
        points=tuple(BaselinePoint(c, ms / 1000, 0.0, 1000.0) for c, ms in points),
    )
    return replace(made, source=source, **changed)


H = baseline((1, 4.61), (8, 4.77), (32, 5.47))


def recorded(path: Path) -> list[tuple[float, Point]]:
    """The client's concurrency and the running totals at each scrape."""
    history, found = History(), []
    for row in recording(path):
        page = "".join(f"{line}\n" for line in row["m"]).encode()
        history.add(parse(page, t=row["t"], excerpt=True))
        (window,) = history.last_interval()
        found.append((row["conc"], window.tracks[0][-1]))
    return found


def track(
    steps: Iterable[tuple[float, float, float]], *, tokens: float = 1000.0, **more: float
) -> list[Point]:
    """Points from (seconds, concurrency, TPOT in ms) of intervals, busy all the time."""
    totals = Counters(
        generation_tokens=0.0, first_tokens=0.0, decode_seconds=0.0, decode_steps=0.0,
        **dict.fromkeys(more, 0.0),
    )  # fmt: skip
    points = [Point(0.0, totals)]
    for seconds, c, ms in steps:
        decoded = seconds * c / (ms / 1000) if c else 0.0
        first = decoded / 250
        totals = totals + Counters(
            generation_tokens=decoded + first,
            first_tokens=first,
            decode_seconds=seconds * c,
            decode_steps=decoded,
            **more,
        )
        points.append(Point(points[-1].t + seconds, totals))
    return points


def learned(*tracks: list[Point]) -> tuple[Baseline | None, list[str]]:
    made, left_out = learn(
        tracks, source="measured", model_name="m", engine_version="", taken_at=0.0
    )
    return made, [words for _, words in left_out]


# What a curve says


def test_between_its_points_a_curve_is_straight() -> None:
    assert H.tpot_seconds(8) == pytest.approx(0.00477)
    assert H.tpot_seconds(20) == pytest.approx((0.00477 + 0.00547) / 2)


def test_beyond_its_ends_a_curve_is_believed_for_a_quarter() -> None:
    assert H.tpot_seconds(0.75) == pytest.approx(0.00461)
    assert H.tpot_seconds(40) == pytest.approx(0.00547 + 8 * 0.0007 / 24)
    assert H.tpot_seconds(0.74) is H.tpot_seconds(40.1) is None


def test_a_fall_at_the_end_of_a_curve_is_not_carried_on() -> None:
    assert baseline((8, 5.0), (10, 4.0)).tpot_seconds(12) == pytest.approx(0.004)


def test_a_static_baseline_is_one_number_for_any_load() -> None:
    one = static("m", 0.005, 0.0)
    assert one.tpot_seconds(0.1) == one.tpot_seconds(1) == one.tpot_seconds(500) == 0.005
    assert one.concurrency_at(1000.0) == pytest.approx(5.0)
    assert one.capacity == math.inf


@given(st.floats(1.0, 39.9))
def test_the_concurrency_of_a_throughput_delivers_it(c: float) -> None:
    cost = H.tpot_seconds(c)
    assert cost is not None
    assert H.concurrency_at(c / cost) == pytest.approx(c, rel=1e-6)


def test_a_throughput_beyond_the_curve_has_no_concurrency() -> None:
    assert H.capacity == pytest.approx(40 / 0.0057033, rel=1e-3)
    assert H.concurrency_at(H.capacity * 1.001) is None
    # Less than one request is idle time; less than eight is unknown to a curve that begins there.
    assert H.concurrency_at(10.0) == 1.0
    assert baseline((8, 4.77), (32, 5.47)).concurrency_at(10.0) is None


# Which baseline is taken


def test_a_better_source_wins_and_of_one_source_the_newest() -> None:
    sources = ["static", "observed", "measured", "peer"]
    candidates = [baseline((1, 5), source=s, engine_version="") for s in sources]
    for left in (4, 3, 2, 1):
        chosen, refused = choose(candidates[:left], "m", "1", 1000.0)
        assert chosen is not None
        assert chosen.source == sources[left - 1]
        assert refused == ""
    older, newer = baseline((1, 5)), baseline((1, 6), taken_at=2000.0)
    assert choose([older, newer], "m", "0.24.0", 3000.0) == (newer, "")


def test_a_baseline_of_another_model_or_version_is_refused_in_words() -> None:
    other = baseline((1, 5), model_name="other")
    assert choose([other], "m", "0.24.0", 0.0) == (
        None,
        "measured baseline refused: it is of model 'other', and this one is 'm'",
    )
    old = baseline((1, 5))
    chosen, refused = choose([old, static("m", 0.005, 0.0)], "m", "0.32.0", 0.0)
    assert chosen is not None
    assert chosen.source == "static"
    assert refused == (
        "measured baseline refused: it is of version 0.24.0, and the server is 0.32.0; "
        "calibrate again"
    )


def test_an_unknown_version_is_not_another_one() -> None:
    old = baseline((1, 5))
    assert choose([old], "m", "", 0.0) == (old, "")


def test_a_peer_that_has_gone_quiet_is_a_peer_no_more() -> None:
    peer = baseline((1, 5), source="peer")
    assert choose([peer], "m", "0.24.0", 1900.0) == (peer, "")
    assert choose([peer], "m", "0.24.0", 1901.0) == (None, "peer baseline refused: it is 901 s old")
    assert choose([], "m", "", 0.0) == (None, "")


# Files


def test_a_file_holds_all_of_a_baseline() -> None:
    made = replace(H, conditions=Conditions(240.0, 0.5, None))
    assert Baseline.from_json(made.to_json()) == made


def changed(**values: Any) -> str:
    return json.dumps(json.loads(H.to_json()) | values)


POINT = {"decode_concurrency": 1, "tpot_seconds": 0.005, "tpot_stderr": 0, "decode_tokens": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "calibrate"),
        ("{}", "calibrate"),
        (changed(version=2), "format 2, and this release reads 1"),
        (changed(source="guess"), "source is none of peer, measured, observed, static"),
        (changed(model_name=3), "3 is no text"),
        (changed(taken_at="now"), "none"),
        (changed(taken_at=None), "none"),
        (changed(points=[]), "not in order"),
        (changed(points=7), "none"),
        (changed(points=[{}]), "no decode_concurrency"),
        (changed(points=[POINT, POINT]), "not in order"),
        (changed(points=[POINT | {"decode_concurrency": 0}]), "not in order"),
        (changed(points=[POINT | {"tpot_seconds": 0}]), "without a time"),
        (changed(points=[POINT | {"tpot_seconds": math.nan}]), "nan is no number"),
        (changed(points=[POINT | {"tpot_stderr": -1}]), "-1 is no number"),
        (changed(points=[POINT | {"tpot_seconds": True}]), "True is no number"),
        (changed(points=[POINT | {"tpot_seconds": "1"}]), "'1' is no number"),
        (changed(conditions=None), "none"),
        (changed(conditions={}), "no context_tokens"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(BaselineError) as caught:
        Baseline.from_json(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# What an interval says


def test_idle_time_within_an_interval_does_not_thin_a_burst_where_steps_are_counted() -> None:
    # 32 requests for 1 s of 5 s, at 5 ms a step.
    counted = Counters(None, None, None, (), 6432.0, 32.0, 32.0, 6400.0, engine_steps=200.0)
    nothing = Counters(None, None, None, (), 0.0, 0.0, 0.0, 0.0, engine_steps=0.0)
    (burst,) = decode_intervals([Point(0, nothing), Point(5, counted)])
    assert burst.concurrency == 32
    unknown = [
        Point(p.t, replace(p.totals, engine_steps=None))
        for p in (Point(0, nothing), Point(5, counted))
    ]
    (thinned,) = decode_intervals(unknown)
    assert thinned.concurrency == pytest.approx(32 / 5)


def test_steps_that_each_of_several_front_ends_counts_are_no_measure() -> None:
    even = track([(1, 8, 5)] * 10, engine_steps=400.0)
    assert {round(i.concurrency, 9) for i in decode_intervals(even)} == {8.0}


def test_where_steps_are_counted_it_does_not_matter_when_a_page_was_made() -> None:
    jitter = [
        Point(p.t + (0.4 if n % 2 else 0.0), p.totals)
        for n, p in enumerate(track([(1, 8, 5)] * 10, engine_steps=200.0))
    ]
    assert {round(i.concurrency, 9) for i in decode_intervals(jitter)} == {8.0}


def test_less_than_one_request_is_one_request_and_idle_time() -> None:
    (one,) = decode_intervals(track([(5, 0.2, 5)]))
    assert one.concurrency == 1
    assert decode_intervals(track([(5, 0, 5)])) == []


def test_without_decode_times_there_are_no_intervals() -> None:
    points = [Point(t, Counters(generation_tokens=t)) for t in (0.0, 5.0)]
    assert decode_intervals(points) == []


def test_tokens_of_chance_arrivals_meet_more_requests_than_there_are_on_average() -> None:
    # Requests come by chance and stay for 1.25 s on average; a token each every 5 ms.
    chance, tick, duration, now = random.Random(1), 0.05, 1.25, 6
    steps, met, all_requests = [], 0, 0
    for _ in range(300):
        in_decode = 0
        for _ in range(200):
            now += sum(chance.random() < tick * 6 / duration / 10 for _ in range(10))
            now -= sum(chance.random() < tick / duration for _ in range(now))
            in_decode += now
            met += now * now
        all_requests += in_decode
        steps.append((200 * tick, in_decode / 200, 5.0))
    found = decode_intervals(track(steps))
    mean = sum(i.concurrency * i.decode_tokens for i in found) / sum(i.decode_tokens for i in found)
    assert met / all_requests > all_requests / 60_000 + 0.9
    assert mean == pytest.approx(met / all_requests, abs=0.2)
    even = decode_intervals(track([(10.0, 6.0, 5.0)] * 300))
    assert {round(i.concurrency, 9) for i in even} == {6.0}


# What a curve is made of


def test_a_recording_makes_a_point_of_each_steady_phase_and_says_which_is_left_out() -> None:
    points = [point for _, point in recorded(H200 / "series_k0.jsonl")]
    made, (left_out,) = learned(points)
    assert made is not None
    assert [p.decode_concurrency for p in made.points] == pytest.approx([1, 7.9, 31.3], rel=0.01)
    truth = {
        row["conc"]: row["client_tpot_token_weighted"]
        for row in recording(H200 / "results.jsonl")
        if row["name"] == "k0"
    }
    assert [p.tpot_seconds for p in made.points] == pytest.approx(list(truth.values()), rel=0.005)
    # 128 at a time begin 40 s after the first scrape.
    assert left_out.startswith("left out 38.8 s to 52.4 s (15.9 to 127.6 in decode)")
    assert made.conditions.context_tokens == pytest.approx(128 + 128 / 2 * 1.7, rel=0.2)
    assert made.conditions.prefill_tokens_per_step == pytest.approx(0.5 * (1 - 0.2), rel=0.2)
    assert made.conditions.prefix_hit_ratio == pytest.approx(0.2, abs=0.05)


def test_the_error_of_a_point_is_that_of_its_mean() -> None:
    chance = random.Random(2)
    errors, claimed = [], []
    for _ in range(100):
        made, _ = learned(track((1, 8, chance.gauss(5, 0.1)) for _ in range(20)))
        assert made is not None
        (point,) = made.points
        errors.append(point.tpot_seconds - 0.005)
        claimed.append(point.tpot_stderr)
    # By hand: 0.1 ms over the root of twenty; a factor for so few of them is in the claim.
    assert math.sqrt(sum(e**2 for e in errors) / 100) == pytest.approx(0.0001 / 20**0.5, rel=0.25)
    inside = sum(abs(e) <= 1.96 * c for e, c in zip(errors, claimed, strict=True))
    assert inside >= 90


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([(1, 8, 5)] * 4, "unsteady load"),
        ([(0.004, 8, 5)] * 5, "times scatter, or are of too few tokens"),
        ([(1, c, 5) for c in (1, 30, 2, 60, 4, 90, 1, 45)], "unsteady load"),
        (
            [(1, 8, ms) for ms in (3, 9, 3, 3, 9, 9, 3, 9)],
            "times scatter, or are of too few tokens",
        ),
        ([], ""),
    ],
    ids=["few intervals", "few tokens", "jumps", "times that scatter", "nothing"],
)
def test_an_unsteady_load_makes_no_curve(steps: list[tuple[float, float, float]], why: str) -> None:
    made, left_out = learned(track(steps))
    assert made is None
    assert [words.partition("): ")[2] for words in left_out] == ([why] if why else [])


def test_a_stretch_with_preemptions_is_left_out() -> None:
    made, left_out = learned(track([(1, 8, 5)] * 20, preemptions=1.0))
    assert made is None
    assert left_out == ["left out 0.0 s to 20.0 s (8.0 to 8.0 in decode): unsteady load"]


def test_like_loads_make_one_point_and_what_lies_beside_none() -> None:
    made, _ = learned(track([(1, c, 5) for c in (8, 8.1, 8.2, 9, 8, 9.2, 9.1, 8) * 4]))
    assert made is not None
    assert len(made.points) == 1
    made, _ = learned(track([(1, 8, 5)] * 10), track([(1, 16, 6)] * 10))
    assert made is not None
    assert [p.decode_concurrency for p in made.points] == [8, 16]


def test_bursts_with_idle_time_between_are_not_steady_where_steps_are_not_counted() -> None:
    bursts = track([(5, 6, 5), (5, 0, 5)] * 20)
    assert learned(bursts)[0] is None
    counted = [
        Point(p.t, replace(p.totals, engine_steps=(p.totals.decode_steps or 0.0) / 30))
        for p in bursts
    ]
    made, _ = learned(counted)
    assert made is not None
    assert made.points[0].decode_concurrency == pytest.approx(30)


def test_a_server_that_speculates_is_no_baseline() -> None:
    points = [point for _, point in recorded(H200 / "series_k2.jsonl")]
    with pytest.raises(BaselineError, match="speculates"):
        learned(points)


def test_a_load_that_wanders_makes_the_curve_that_it_wandered_on() -> None:
    chance, c = random.Random(3), 6.0
    steps = []
    for _ in range(600):
        c = min(40.0, max(1.0, c + chance.gauss(0, 0.5 * c**0.5)))
        steps.append((5.0, c, 4.6 + 0.03 * c))
    made, _ = learned(track(steps))
    assert made is not None
    assert len(made.points) >= 5
    for point in made.points:
        expected = 4.6 + 0.03 * point.decode_concurrency
        assert 1000 * point.tpot_seconds == pytest.approx(expected, rel=0.01)


# What is learnt on the way


def windows(points: list[Point], seconds: float = 300.0) -> Iterable[Window]:
    """As the exporter would see it: one at each scrape."""
    for i in range(2, len(points) + 1):
        kept = [p for p in points[:i] if p.t >= points[i - 1].t - seconds]
        yield Window("m", "0", seconds, (tuple(kept),))


def observed(points: list[Point]) -> Observed:
    made = Observed("m", "0.32.0")
    for window in windows(points):
        made.add(window, 1e9 + window.tracks[0][-1].t)
    return made


def test_what_was_seen_without_speculation_is_what_a_recording_of_it_makes() -> None:
    points = track([(5, 4, 4.7)] * 30 + [(5, 16, 5.2)] * 30)
    seen = observed(points).baseline()
    made, _ = learned(points)
    assert seen is not None
    assert made is not None
    assert seen.source == "observed"
    assert (seen.model_name, seen.engine_version) == ("m", "0.32.0")
    assert seen.taken_at == 1e9 + 300
    for a, b in zip(seen.points, made.points, strict=True):
        assert a.decode_concurrency == pytest.approx(b.decode_concurrency)
        assert a.tpot_seconds == pytest.approx(b.tpot_seconds)


def test_nothing_is_learnt_while_a_drafter_runs_whatever_it_does() -> None:
    idle_drafter = [
        Point(p.t, replace(p.totals, drafts=0.0, accepted_per_position=(0.0, 0.0)))
        for p in track([(5, 4, 5)] * 30)
    ]
    assert observed(idle_drafter).baseline() is None


def test_each_interval_is_learnt_once() -> None:
    points = track([(5, 4, 5)] * 30)
    seen = observed(points).baseline()
    assert seen is not None
    last = points[-2].totals
    assert seen.points[0].decode_tokens == pytest.approx(
        (last.generation_tokens or 0) - (last.first_tokens or 0)
    )


def test_what_is_kept_is_bounded_and_the_newest() -> None:
    seen = observed(track([(5, 4, 5)] * 200 + [(5, 4, 6)] * 62))
    assert sum(map(len, seen._levels.values())) == 60
    known = seen.baseline()
    assert known is not None
    assert known.points[0].tpot_seconds == pytest.approx(0.006)


def test_what_was_observed_outlives_the_process() -> None:
    seen = observed(track([(5, 4, 5)] * 30, prompt_tokens=3000.0))
    stored = json.loads(json.dumps(seen.to_dict()))
    assert Observed.from_dict(stored).baseline() == seen.baseline()


def test_tokens_that_failed_requests_made_negative_are_not_learnt() -> None:
    points = track([(5, 4, 5)] * 30)
    spoilt = replace(points[9].totals, first_tokens=1e6)
    points[9] = Point(points[9].t, spoilt)
    points[10:] = [Point(p.t, replace(p.totals, first_tokens=1e6)) for p in points[10:]]
    seen = observed(points)
    assert Observed.from_dict(seen.to_dict()).baseline() == seen.baseline() is not None


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"model_name": "m", "engine_version": "", "taken_at": 0, "intervals": 3},
        {"model_name": "m", "engine_version": "", "taken_at": 0, "intervals": [[1, 2, {}]]},
        {
            "model_name": "m",
            "engine_version": "",
            "taken_at": 0,
            "intervals": [[1, 1, 0, 1, 1, {}]],
        },
        {
            "model_name": "m",
            "engine_version": "",
            "taken_at": 0,
            "intervals": [[1, 1, 1, 1, 1, {"x": 1}]],
        },
    ],
)
def test_what_was_stored_badly_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(BaselineError, match="observed"):
        Observed.from_dict(broken)
