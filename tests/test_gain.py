"""The net gain is what speculation saves at this load, against truth recorded, simulated and by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from specdec_exporter.baseline import Baseline, BaselinePoint, Conditions, learn, static
from specdec_exporter.gain import net_gain
from specdec_exporter.model import Counters, Point, Window
from specdec_exporter.parse import parse
from specdec_exporter.simulator import Change, Scenario, Simulator, Traffic
from specdec_exporter.window import History, combine

from tests.pages import H200, recording


def baseline(*points: tuple[float, float], **changed: Any) -> Baseline:
    """Points of concurrency and milliseconds."""
    curve = tuple(BaselinePoint(c, ms / 1000, 0.0, 1000.0) for c, ms in points)
    return replace(Baseline("measured", "m", "", 1000.0, curve), **changed)


H = baseline((1, 4.61), (8, 4.77), (32, 5.47))
NOTHING = Counters(None, None, None, (), 0.0, 0.0, 0.0, 0.0)


def counted(c: float, tpot: float, seconds: float, length: float = 1.7, **more: float) -> Counters:
    """The increase of a busy interval: requests in decode, seconds a token, tokens a step."""
    tokens = c * seconds / tpot
    first = tokens / 255
    return Counters(
        generation_tokens=tokens + first,
        first_tokens=first,
        decode_seconds=c * seconds,
        decode_steps=tokens / length,
        **more,
    )


def window(*increases: tuple[float, Counters]) -> Window:
    """One engine's window of (seconds, increase)."""
    known = {k for _, one in increases for k in ("prompt_tokens", "cached_prompt_tokens",
             "engine_steps", "preemptions", "failed_requests") if getattr(one, k) is not None}  # fmt: skip
    points = [Point(0.0, replace(NOTHING, **dict.fromkeys(known, 0.0)))]
    for seconds, one in increases:
        points.append(Point(points[-1].t + seconds, points[-1].totals + one))
    return Window("m", "0", 300.0, (tuple(points),))


def steady(c: float, tpot: float, n: int = 10, **more: float) -> Window:
    return window(*[(1.0, counted(c, tpot, 1.0, **more))] * n)


@lru_cache
def recorded(name: str) -> tuple[tuple[float, Point], ...]:
    """The client's concurrency and the running totals at each scrape of an H200."""
    history, found = History(), []
    for row in recording(H200 / f"series_{name}.jsonl"):
        page = "".join(f"{line}\n" for line in row["m"]).encode()
        history.add(parse(page, t=row["t"], excerpt=True))
        (one,) = history.last_interval()
        found.append((row["conc"], one.tracks[0][-1]))
    return tuple(found)


def between(points: Iterable[Point]) -> Window:
    return Window("gemma4-e4b-shape", "0", 300.0, (tuple(points),))


def phase(name: str, concurrency: int) -> Window:
    return between(point for conc, point in recorded(name) if conc == concurrency)


@lru_cache
def calibrated() -> Baseline:
    points = [point for _, point in recorded("k0")]
    made, _ = learn(
        [points],
        source="measured",
        model_name="gemma4-e4b-shape",
        engine_version="",
        taken_at=points[-1].t,
    )
    assert made is not None
    return made


# Against what the client of a real server saw


@pytest.mark.parametrize("name", ["k1", "k2", "k4"])
@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_the_gain_of_a_recorded_phase_is_that_of_the_clients_clock(
    name: str, concurrency: int
) -> None:
    tpot = {
        (row["name"], row["conc"]): row["client_tpot_token_weighted"]
        for row in recording(H200 / "results.jsonl")
    }
    truth = 1 - tpot[name, concurrency] / tpot["k0", concurrency]
    got = net_gain(phase(name, concurrency), calibrated())
    assert got.covered
    assert got.reason == ""
    assert got.tpot_gain_ratio == pytest.approx(truth, abs=0.02)
    # The recorded phases are ten seconds long, and some steps of them far slower than others.
    assert got.tpot_gain_ratio_stderr is not None
    assert 0 < got.tpot_gain_ratio_stderr < 0.25
    fair = got.tpot_gain_throughput_ratio
    assert fair is not None
    assert fair * truth > 0
    assert abs(fair) >= abs(got.tpot_gain_ratio)


def test_at_equal_throughput_one_token_gains_nine_percent_on_the_h200_at_32() -> None:
    got = net_gain(phase("k1", 32), calibrated())
    assert got.tpot_gain_throughput_ratio == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize("name", ["k1", "k2", "k4"])
def test_beyond_what_was_measured_there_is_no_value_but_words(name: str) -> None:
    got = net_gain(phase(name, 128), calibrated())
    assert not got.covered
    assert got.tpot_gain_ratio is got.tpot_gain_throughput_ratio is None
    assert got.baseline_tpot_seconds is got.break_even_length is None
    assert got.reason.startswith("not covered: 12")
    assert " requests in decode, and the baseline reaches from 0.8 to 39.1" in got.reason


def test_above_its_capacity_the_baseline_could_not_carry_the_load() -> None:
    assert (
        "the baseline could not carry this load: 1"
        in net_gain(phase("k1", 128), calibrated()).reason
    )
    # At 32 requests it is known what a token would cost, but no baseline delivers so many of them.
    got = net_gain(steady(32, 0.004), H)
    assert got.covered
    assert got.tpot_gain_ratio == pytest.approx(1 - 4 / 5.47)
    assert got.tpot_gain_throughput_ratio is got.tpot_gain_throughput_ratio_stderr is None
    assert got.reason == (
        "the baseline could not carry this load: 8000 tokens a second, and it reaches 7013"
    )


def test_a_baseline_against_itself_gains_nothing_over_phases_and_idle_time() -> None:
    points = [point for conc, point in recorded("k0") if conc != 128]
    worst = max(
        abs(net_gain(between(points[i:j]), calibrated()).tpot_gain_ratio or 0.0)
        for i in range(len(points))
        for j in range(i + 11, len(points) + 1)
    )
    print(f"at most {100 * worst:.2f} points")
    assert worst < 0.015


SECOND = recording(H200 / "second_starts.jsonl")


@pytest.mark.parametrize(
    ("k", "arrivals", "gain"),
    [
        (2, 4, 0.152),
        (2, 12, -0.663),
        (2, 24, 0.007),
        (1, 4, 0.020),
        (1, 12, 0.036),
        (1, 24, -0.152),
        (4, 4, -0.332),
        (4, 12, -0.459),
    ],
)
def test_the_gain_at_equal_throughput_is_what_a_fixed_arrival_rate_shows(
    k: int, arrivals: int, gain: float
) -> None:
    plain = sorted((row["conc"], 1000 * row["tpot_live"]) for row in SECOND if row["k"] == 0)
    (row,) = (r for r in SECOND if (r["k"], r["mode"], r["load"]) == (k, "open", arrivals))
    got = net_gain(
        window((row["dt"], counted(row["conc"], row["conc"] / row["throughput"], row["dt"]))),
        baseline(*plain),
    )
    assert got.tpot_gain_throughput_ratio == pytest.approx(gain, abs=0.01)


# By hand


def test_one_loads_gain_is_one_quotient() -> None:
    got = net_gain(steady(8, 0.0043, length=1.5), H)
    assert got.baseline_tpot_seconds == pytest.approx(0.00477)
    assert got.tpot_gain_ratio == pytest.approx(1 - 4.3 / 4.77)
    assert got.break_even_length == pytest.approx(1.5 * 4.3 / 4.77)
    assert (got.source, got.baseline_taken_at) == ("measured", 1000.0)
    # c₀ / TPOT₀(c₀) = 8 / 4.3 ms, on the line from 8 to 32.
    throughput, slope = 8 / 0.0043, 0.0007 / 24
    c0 = throughput * (0.00477 - 8 * slope) / (1 - throughput * slope)
    assert got.tpot_gain_throughput_ratio == pytest.approx(1 - 8 / c0)


def test_each_interval_is_compared_at_its_own_load() -> None:
    # A minute at one request and a second at 32: a mean of 1.5 would give a baseline of 4.62.
    mixed = window((60.0, counted(1, 0.0046, 60.0)), (1.0, counted(32, 0.0054, 1.0)))
    got = net_gain(mixed, H)
    few, many = 60 / 0.0046, 32 / 0.0054
    assert got.baseline_tpot_seconds == pytest.approx(
        (few * 0.00461 + many * 0.00547) / (few + many)
    )


def test_engines_count_each_at_its_own_load() -> None:
    a, b = steady(1, 0.004), replace(steady(32, 0.005), engine="1")
    got = net_gain(combine((a, b)), H)
    one, other = 1 / 0.004, 32 / 0.005
    assert got.baseline_tpot_seconds == pytest.approx(
        (one * 0.00461 + other * 0.00547) / (one + other)
    )


@pytest.mark.parametrize(("interval", "counts_steps"), [(1.0, False), (1.0, True), (5.0, True)])
@pytest.mark.parametrize("offset", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(("name", "sign"), [("k1", 1), ("k4", -1)])
def test_a_burst_followed_by_idle_time_keeps_its_sign(
    interval: float, counts_steps: bool, offset: float, name: str, sign: int
) -> None:
    (tpot,) = (
        row["client_tpot_token_weighted"]
        for row in recording(H200 / "results.jsonl")
        if (row["name"], row["conc"]) == (name, 32)
    )
    busy = 255 * tpot  # 32 requests of 255 tokens, all at once
    scrapes = [offset * interval - interval + i * interval for i in range(int(22 / interval) + 2)]
    increases = []
    for begin, end in pairwise(scrapes):
        share = max(0.0, min(end, busy) - max(begin, 0.0))
        steps = {"engine_steps": share / tpot / 1.47} if counts_steps else {}
        increases.append((interval, counted(32, tpot, share, length=1.47, **steps)))
    got = net_gain(window(*increases), H)
    assert got.tpot_gain_ratio is not None
    assert got.tpot_gain_ratio * sign > 0
    if counts_steps:
        assert got.tpot_gain_ratio == pytest.approx(1 - tpot / 0.00547, abs=0.001)


def test_a_static_baseline_covers_any_load() -> None:
    got = net_gain(steady(500, 0.004), static("m", 0.005, 7.0))
    assert got.tpot_gain_ratio == pytest.approx(0.2)
    assert got.tpot_gain_throughput_ratio == pytest.approx(got.tpot_gain_ratio, rel=1e-12)
    assert (got.source, got.baseline_taken_at) == ("static", 7.0)


def test_few_tokens_at_a_load_beyond_the_curve_are_left_out() -> None:
    known, beyond = (10.0, counted(16, 0.0045, 10.0)), (0.1, counted(60, 0.0065, 0.1))
    got = net_gain(window(known, beyond), H)
    assert got.tpot_gain_ratio == pytest.approx(net_gain(window(known), H).tpot_gain_ratio)
    many = net_gain(window(known, (1.0, counted(60, 0.0065, 1.0))), H)
    assert many.tpot_gain_ratio is None
    assert many.reason.startswith("not covered: 60.0 requests in decode, and the baseline reaches")


def test_a_load_that_at_equal_throughput_is_too_low_for_the_curve_is_told() -> None:
    got = net_gain(steady(6.2, 0.006), baseline((8, 4.77), (32, 5.47)))
    assert got.covered
    assert got.tpot_gain_ratio == pytest.approx(1 - 6 / 4.77)
    assert got.tpot_gain_throughput_ratio is None
    assert got.reason == "at equal throughput the load is below the baseline's reach"


def test_nothing_decoded_is_no_gain() -> None:
    for empty in (window((5.0, NOTHING)), Window("m", "0", 5.0, ((Point(0.0, NOTHING),),))):
        got = net_gain(empty, H)
        assert (got.covered, got.tpot_gain_ratio, got.reason) == (
            False,
            None,
            "no tokens were decoded",
        )
    untimed = [(5.0, replace(counted(8, 0.005, 5.0), decode_seconds=0.0))] * 8
    assert net_gain(window(*untimed), H).reason == "no tokens were decoded"
    points = tuple(Point(t, Counters(generation_tokens=t)) for t in (0.0, 5.0))
    assert net_gain(Window("m", "0", 5.0, (points,)), H).tpot_gain_ratio is None


# Conditions


ALIKE = Conditions(context_tokens=228.0, prefill_tokens_per_step=100 / 255, prefix_hit_ratio=0.2)


def prompted(prompt: float, cached: float) -> Window:
    """Ten seconds of eight at a time, some 70 requests, of such prompts and 256 tokens out."""
    requests = 8 / 0.0045 / 255
    return steady(
        8, 0.0045, prompt_tokens=prompt * requests, cached_prompt_tokens=cached * requests
    )


def test_like_conditions_are_covered() -> None:
    got = net_gain(prompted(100, 0), replace(H, conditions=ALIKE))
    assert got.covered
    assert got.reason == ""
    assert net_gain(steady(8, 0.0045), replace(H, conditions=ALIKE)).covered
    assert net_gain(prompted(5000, 0), H).covered


@pytest.mark.parametrize(
    ("prompt", "cached", "words"),
    [
        (250, 130, "not covered: 378 tokens of context, and the baseline had 228"),
        (20, 0, "not covered: 148 tokens of context, and the baseline had 228"),
        (180, 0, "not covered: 0.706 prefill tokens per step, and the baseline had 0.392"),
        (200, 110, "not covered: 0.45 of prompts not cached, and the baseline had 0.8"),
    ],
)
def test_conditions_that_differ_by_half_are_not_covered(
    prompt: float, cached: float, words: str
) -> None:
    got = net_gain(prompted(prompt, cached), replace(H, conditions=ALIKE))
    assert not got.covered
    assert got.tpot_gain_ratio is None
    assert words in got.reason


def test_differences_too_small_to_matter_do_not_matter() -> None:
    none = Conditions(prefill_tokens_per_step=0.001, prefix_hit_ratio=0.95)
    assert net_gain(prompted(250, 230), replace(H, conditions=none)).covered


def test_what_few_requests_were_like_is_not_known() -> None:
    one_long = steady(1, 0.0045, n=2, prompt_tokens=4000.0, cached_prompt_tokens=0.0)
    assert net_gain(one_long, replace(H, conditions=ALIKE)).covered


def test_preemptions_above_one_percent_of_requests_are_inconclusive() -> None:
    few = net_gain(steady(8, 0.0045, preemptions=0.06), H)
    assert (few.inconclusive, few.reason) == (False, "")
    assert few.tpot_gain_ratio is not None
    many = net_gain(steady(8, 0.0045, preemptions=0.08), H)
    assert many.inconclusive
    assert many.covered
    assert many.tpot_gain_ratio is many.tpot_gain_throughput_ratio is None
    assert many.baseline_tpot_seconds == pytest.approx(0.00477)
    assert many.reason == "inconclusive: 1 preemptions of 70 requests"


def test_failed_requests_that_could_be_a_percent_of_the_tokens_are_inconclusive() -> None:
    assert not net_gain(steady(8, 0.0045, failed_requests=17.0), H).inconclusive
    got = net_gain(steady(8, 0.0045, failed_requests=18.0), H)
    assert got.inconclusive
    assert got.tpot_gain_ratio is None
    assert got.reason.startswith("inconclusive: 180 failed requests")


# Standard errors


def noisy(chance: random.Random, n: int, spread: float, memory: float, c: float = 8.0) -> Window:
    """Intervals whose TPOT scatters around 4.5 ms, each like the one before by so much."""
    state, found = chance.gauss(0, 1), []
    for _ in range(n):
        found.append((5.0, counted(c, 0.0045 * math.exp(spread * state), 5.0)))
        state = memory * state + math.sqrt(1 - memory**2) * chance.gauss(0, 1)
    return window(*found)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_the_interval_covers_the_mean_whatever_neighbours_have_in_common(memory: float) -> None:
    chance = random.Random(4)
    truth = 1 - 4.5 / 4.77
    inside = equal = 0
    for _ in range(400):
        got = net_gain(noisy(chance, 60, 0.05, memory), H)
        assert got.tpot_gain_ratio is not None
        assert got.tpot_gain_ratio_stderr is not None
        assert got.tpot_gain_throughput_ratio is not None
        assert got.tpot_gain_throughput_ratio_stderr is not None
        inside += abs(got.tpot_gain_ratio - truth) <= 1.96 * got.tpot_gain_ratio_stderr
        fair = net_gain(steady(8, 0.0045), H).tpot_gain_throughput_ratio
        equal += abs(got.tpot_gain_throughput_ratio - (fair or 0.0)) <= 1.96 * (
            got.tpot_gain_throughput_ratio_stderr
        )
    print(f"memory {memory}: {inside / 400:.3f} and {equal / 400:.3f}")
    assert 0.90 <= inside / 400 <= 0.98
    assert 0.90 <= equal / 400 <= 0.98


def test_the_baselines_own_error_is_part_of_the_error() -> None:
    curve = tuple(
        BaselinePoint(c, ms / 1000, 0.02 * ms / 1000, 1000.0) for c, ms in ((4, 5.0), (12, 5.0))
    )
    got = net_gain(steady(8, 0.0045), replace(H, points=curve))
    # By hand: half of each point, whose errors are independent.
    assert got.tpot_gain_ratio_stderr == pytest.approx(0.9 * 0.02 / math.sqrt(2))
    # A flat curve leads to the same point, a steep one to another: the error comes back larger.
    assert got.tpot_gain_throughput_ratio_stderr == pytest.approx(0.9 * 0.02 / math.sqrt(2))
    steep = net_gain(
        steady(8, 0.0045),
        replace(H, points=(replace(curve[0], tpot_seconds=0.004), curve[1])),
    )
    assert steep.tpot_gain_throughput_ratio_stderr is not None
    assert steep.tpot_gain_ratio_stderr is not None
    assert steep.tpot_gain_throughput_ratio_stderr > 1.2 * steep.tpot_gain_ratio_stderr


def test_of_fewer_than_four_intervals_the_error_is_unknown() -> None:
    assert net_gain(steady(8, 0.0045, n=3), H).tpot_gain_ratio_stderr is None
    assert net_gain(steady(8, 0.0045, n=4), H).tpot_gain_ratio_stderr is not None


# Against a simulated server, of which the truth is known

LOAD = Traffic(requests_per_second=6.0, daily_amplitude=0.8)


def scraped(simulator: Simulator, seconds: float, interval: float) -> list[Point]:
    history, found = History(), []
    for _ in range(round(seconds / interval) + 1):
        simulator.advance(simulator.now + interval)
        history.add(simulator.snapshot())
        (one,) = history.last_interval()
        found.append(one.tracks[0][-1])
    return found


@lru_cache
def simulated_baseline() -> Baseline:
    """What `calibrate` would make: a closed loop at each concurrency."""
    tracks = []
    for clients in (1, 2, 4, 8, 16, 32):
        load = replace(LOAD, requests_per_second=0.0, daily_amplitude=0.0, clients=clients)
        simulator = Simulator(Scenario("plain", "", k=0, traffic=load), seed=clients)
        simulator.advance(30.0)
        tracks.append(scraped(simulator, 60.0, 1.0))
    made, left_out = learn(
        tracks, source="measured", model_name="m", engine_version="", taken_at=0.0
    )
    assert made is not None
    assert left_out == ()
    return made


@pytest.mark.slow
def test_over_two_hundred_windows_of_a_drifting_load_the_gain_is_unbiased_and_covered() -> None:
    scenario = Scenario("drifting", "", k=2, traffic=LOAD, day_seconds=7200.0)
    simulator = Simulator(scenario, seed=1)
    history = History()
    simulator.advance(60.0)
    history.add(simulator.snapshot())
    before = simulator.truth()
    errors: list[float] = []
    inside = 0
    for _ in range(200):
        for _ in range(60):
            simulator.advance(simulator.now + 5.0)
            history.add(simulator.snapshot())
        after = simulator.truth()
        truth, before = after - before, after
        (one,) = history.windows(300.0)
        got = net_gain(one, simulated_baseline())
        assert got.tpot_gain_ratio is not None, got.reason
        assert got.tpot_gain_ratio_stderr is not None
        errors.append(got.tpot_gain_ratio - truth.gain)
        # The interval is for the workload, and what this window's drafts had by luck is its noise.
        increase = one.increase
        assert increase.accepted_tokens is not None
        assert increase.drafts is not None
        lucky = (1 + increase.accepted_tokens / increase.drafts) / (1 + sum(truth.positions))
        of_workload = 1 - (1 - truth.gain) * lucky
        inside += abs(got.tpot_gain_ratio - of_workload) <= 1.96 * got.tpot_gain_ratio_stderr
    bias = sum(errors) / len(errors)
    print(f"bias {100 * bias:+.3f} points, {inside / 200:.3f} covered")
    assert abs(bias) < 0.005
    assert 0.90 <= inside / 200 <= 0.98


@pytest.mark.parametrize(("interval", "tolerance"), [(1.0, 0.03), (5.0, 0.07)])
@pytest.mark.parametrize("seed", range(8))
def test_the_gain_of_a_burst_whose_requests_end_one_by_one_is_near_the_truth(
    seed: int, interval: float, tolerance: float
) -> None:
    scenario = Scenario(
        "burst",
        "",
        k=2,
        traffic=Traffic(requests_per_second=0.0),
        script=(Change(12.0, requests_per_second=3200.0), Change(12.01, requests_per_second=0.0)),
    )
    simulator = Simulator(scenario, seed=seed)
    points = scraped(simulator, 40.0, interval)
    # Some thirty requests are too few to say whether they are like those of the baseline.
    anything = replace(simulated_baseline(), conditions=Conditions())
    got = net_gain(Window("m", "0", 300.0, (tuple(points),)), anything)
    truth = simulator.truth().gain
    print(f"truth {truth:+.3f}, {got.tpot_gain_ratio:+.3f}")
    # Within five seconds the batch shrinks from thirty to one, and only its mean is known.
    assert got.tpot_gain_ratio == pytest.approx(truth, abs=tolerance)
    if interval == 1.0 or abs(truth) > 0.05:
        assert got.tpot_gain_ratio * truth > 0
