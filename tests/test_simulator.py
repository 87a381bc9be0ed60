from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from specdec_exporter.model import Counters, Reason, ScrapeError
from specdec_exporter.simulator import (
    SCENARIOS,
    Acceptance,
    Change,
    Restart,
    Scenario,
    Simulator,
    StepTime,
    Traffic,
    Truth,
    statistics_world,
)

HEALTHY = SCENARIOS["healthy"]


def with_traffic(scenario: Scenario, **changes: Any) -> Scenario:
    return replace(scenario, traffic=replace(scenario.traffic, **changes))


def counters(simulator: Simulator) -> Counters:
    (sample,) = simulator.snapshot().engines
    return sample.counters


def increase(simulator: Simulator, begin: float, end: float) -> Counters:
    """What one engine counts between two times."""
    simulator.advance(begin)
    before = counters(simulator)
    simulator.advance(end)
    return counters(simulator) - before


def number(value: float | None) -> float:
    assert value is not None
    return value


def positions(counted: Counters) -> tuple[float, ...]:
    return tuple(a / number(counted.drafts) for a in counted.accepted_per_position)


def tpot(counted: Counters) -> float:
    tokens = number(counted.generation_tokens) - number(counted.first_tokens)
    return number(counted.decode_seconds) / tokens


def truth_between(simulator: Simulator, begin: float, end: float) -> Truth:
    simulator.advance(begin)
    before = simulator.truth()
    simulator.advance(end)
    return simulator.truth() - before


@pytest.mark.parametrize("clients", [1, 4, 8])
def test_the_guides_case_gives_its_mal_and_its_tpot_gains(clients: int) -> None:
    def run(k: int, rates: tuple[float, ...]) -> Counters:
        scenario = replace(HEALTHY, k=k, acceptance=replace(HEALTHY.acceptance, rates=rates))
        scenario = with_traffic(scenario, requests_per_second=0.0, clients=clients)
        return increase(Simulator(scenario, 3), 10.0, 2400.0 / clients)

    without, one, two = run(0, (0.47,)), run(1, (0.45,)), run(2, (0.47, 0.24))
    assert positions(two) == pytest.approx((0.47, 0.24), abs=0.01)
    assert 1 + number(two.accepted_tokens) / number(two.drafts) == pytest.approx(1.71, abs=0.015)
    assert tpot(two) / tpot(without) - 1 == pytest.approx(-0.14, abs=0.01)
    assert 1 + number(one.accepted_tokens) / number(one.drafts) == pytest.approx(1.45, abs=0.01)
    assert tpot(one) / tpot(without) - 1 == pytest.approx(-0.07, abs=0.01)


def test_a_step_costs_what_the_guide_says_and_a_baseline_step_what_was_measured() -> None:
    model = StepTime()
    measured = {1: 0.00461, 8: 0.00477, 32: 0.00547}
    assert {c: model.seconds(0, c) for c in measured} == pytest.approx(measured)
    assert model.ratio(2, 8) == pytest.approx(1.47)
    assert model.ratio(1, 8) / 1.45 - 1 == pytest.approx(-0.07, abs=0.002)
    assert model.seconds(2, 8, 1000) - model.seconds(2, 8) == pytest.approx(0.01)
    assert model.base_seconds(0) == model.base_seconds(1)
    for increasing in (
        [model.ratio(k, 8) for k in range(9)],
        [model.seconds(2, c) for c in (1, 4, 8, 20, 32, 64, 128)],
        [model.ratio(2, c) for c in (16, 17, 32)],
    ):
        assert all(a < b for a, b in pairwise(increasing))


def test_at_the_guides_acceptance_k_2_is_the_best() -> None:
    gains = {}
    for k in range(6):
        scenario = with_traffic(replace(HEALTHY, k=k), requests_per_second=0.0, clients=8)
        gains[k] = truth_between(Simulator(scenario, 1), 5.0, 125.0).gain
    assert max(gains, key=lambda k: gains[k]) == 2
    assert gains[0] == pytest.approx(0.0, abs=1e-9)


def test_the_true_baseline_is_the_tpot_of_the_same_server_without_speculation() -> None:
    scenario = with_traffic(HEALTHY, requests_per_second=0.0, clients=6)
    speculating = truth_between(Simulator(scenario, 1), 5.0, 305.0)
    without = increase(Simulator(replace(scenario, k=0), 2), 5.0, 305.0)
    assert speculating.baseline_tpot_seconds == pytest.approx(tpot(without), rel=0.003)
    assert speculating.gain == pytest.approx(
        1 - speculating.tpot_seconds / tpot(without), abs=0.003
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_counters_agree_with_each_other_at_every_scrape(name: str) -> None:
    simulator = Simulator(SCENARIOS[name], 7)
    before: dict[str, Counters] = {}
    for t in range(0, 300, 3):
        simulator.advance(t)
        if not simulator.up:
            before = {}
            continue
        for sample in simulator.snapshot().engines:
            c = sample.counters
            delivered = number(c.generation_tokens) - number(c.first_tokens)
            k = sample.num_speculative_tokens
            if k:
                accepted = number(c.accepted_tokens)
                assert c.draft_tokens == k * number(c.drafts)
                assert accepted == sum(c.accepted_per_position)
                assert sorted(c.accepted_per_position, reverse=True) == list(
                    c.accepted_per_position
                )
                assert c.accepted_per_position[0] <= number(c.drafts) <= number(c.decode_steps)
                # What is accepted past the end of a request is all that is not delivered.
                lost = number(c.decode_steps) + accepted - delivered
                assert 0 <= lost <= k * number(c.first_tokens)
            else:
                assert c.drafts is c.draft_tokens is c.accepted_tokens is None
                assert delivered == c.decode_steps
            if sample.engine in before:
                change = c - before[sample.engine]
                assert min(number(change.generation_tokens), number(change.decode_seconds)) >= 0
                assert number(change.decode_seconds) <= 3.1 * SCENARIOS[name].max_num_seqs
            before[sample.engine] = c


def test_tokens_accepted_past_the_end_of_a_request_are_not_delivered() -> None:
    short = with_traffic(HEALTHY, output_tokens=8.0)
    c = increase(Simulator(short, 1), 10.0, 110.0)
    yielded = number(c.decode_steps) + number(c.accepted_tokens)
    delivered = number(c.generation_tokens) - number(c.first_tokens)
    assert 0.01 < 1 - delivered / yielded < 0.1


@pytest.mark.parametrize("name", ["healthy", "drift", "k-change", "overload", "two-engines"])
def test_a_seed_gives_the_same_counters_whoever_looks_when(name: str) -> None:
    once, often, other = (Simulator(SCENARIOS[name], seed) for seed in (5, 5, 6))
    for t in range(1, 400):
        often.advance(t * 0.25)
        if often.up:
            often.snapshot()
    for simulator in (once, often, other):
        simulator.advance(100.0)
    for a, b, c in zip(*(s.snapshot().engines for s in (once, often, other)), strict=True):
        for one, two in zip(fields_of(a.counters), fields_of(b.counters), strict=True):
            assert one == pytest.approx(two, rel=1e-9)
        assert a.counters != c.counters
    assert once.truth().gain == pytest.approx(often.truth().gain, abs=1e-4)


def fields_of(c: Counters) -> Iterator[float]:
    yield from c.accepted_per_position
    yield from (number(c.generation_tokens), number(c.first_tokens), number(c.decode_steps))
    yield number(c.decode_seconds)


def test_the_same_requests_are_served_whatever_k_is() -> None:
    scenario = replace(HEALTHY, script=(Change(100.0, requests_per_second=0.0),))
    served = {}
    for k in (0, 1, 2, 4):
        simulator = Simulator(replace(scenario, k=k), 4)
        simulator.advance(200.0)
        c = counters(simulator)
        served[k] = c.generation_tokens, c.first_tokens
    assert len(set(served.values())) == 1
    assert number(served[0][1]) == pytest.approx(600, abs=75)


def test_under_equal_arrivals_speculation_that_pays_keeps_fewer_requests_in_flight() -> None:
    fast, slow = (increase(Simulator(replace(HEALTHY, k=k), 2), 10.0, 610.0) for k in (2, 0))
    assert number(fast.decode_seconds) < 0.9 * number(slow.decode_seconds)


def variance_inflations(
    scenario: Scenario, step: float, windows: tuple[int, ...], days: float, seed: int
) -> list[float]:
    """Of accepted tokens over windows of so many steps, against the means of the scenario."""
    rates = scenario.acceptance.rates
    mean = sum(rates)
    variance = sum((2 * i + 1) * p for i, p in enumerate(rates)) - mean**2
    simulator = Simulator(scenario, seed)
    scrapes = []
    for i in range(int(days * 86400 / step)):
        simulator.advance(600.0 + i * step)
        c = counters(simulator)
        scrapes.append((number(c.accepted_tokens) - mean * number(c.drafts), number(c.drafts)))
    inflations = []
    for window in windows:
        looks = scrapes[::window]
        squares = sum((b - a) ** 2 for (a, _), (b, _) in pairwise(looks))
        inflations.append(squares / (looks[-1][1] - looks[0][1]) / variance)
    return inflations


@pytest.mark.parametrize(("inflation", "days"), [(1.0, 0.5), (4.0, 1.5), (13.0, 2.0)])
def test_long_windows_show_the_variance_inflation_of_the_world(
    inflation: float, days: float
) -> None:
    # One request at a time: a window of five minutes is forty lives of a request.
    world = statistics_world(inflation, concurrency=1.0)
    (seen,) = variance_inflations(world, 300.0, (1,), days, seed=1)
    assert seen == pytest.approx(inflation, rel=0.15)


def test_the_variance_inflation_grows_with_the_window() -> None:
    scrape, minute, ten = variance_inflations(statistics_world(13.0), 5.0, (1, 12, 120), 0.5, 2)
    assert scrape < 2.0
    assert 4.0 < minute < 7.0 < ten


def test_the_statistics_world_is_unbiased_at_its_load() -> None:
    world = statistics_world(13.0, drafts_per_second=20.0, mean_drafts_per_request=150.0)
    simulator = Simulator(world, 3)
    seconds = 0.5 * 86400
    day = increase(simulator, 600.0, 600.0 + seconds)
    drafts = number(day.drafts)
    # Four standard errors; about √2 · √(drafts · lengths) for the number of drafts.
    assert drafts == pytest.approx(20.0 * seconds, abs=4 * math.sqrt(2 * drafts * 150))
    for p, rate in zip(positions(day), world.acceptance.rates, strict=True):
        assert p == pytest.approx(rate, abs=4 * math.sqrt(13 * rate * (1 - rate) / drafts))
    assert number(day.decode_seconds) / seconds == pytest.approx(8.0, rel=0.05)
    assert drafts / number(day.first_tokens) == pytest.approx(150.0, rel=0.05)


def test_a_day_of_scrapes_takes_seconds() -> None:
    simulator = Simulator(statistics_world(), 5)
    began = time.process_time()
    for i in range(86400 // 5):
        simulator.advance(5.0 * i)
        simulator.snapshot()
    # It takes 2 s; a processor that others use too counts up to three times as much.
    assert time.process_time() - began < 8.0


def test_a_variance_inflation_beyond_a_requests_length_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot inflate"):
        statistics_world(40.0, mean_drafts_per_request=10.0)


def test_position_1_collapses_at_a_minute_and_position_0_stays() -> None:
    simulator = Simulator(SCENARIOS["position-1-collapse"], 1)
    before = positions(increase(simulator, 0.0, 60.0))
    after = positions(increase(simulator, 60.0, 180.0))
    assert before == pytest.approx((0.47, 0.24), abs=0.02)
    assert after == pytest.approx((0.47, 0.10), abs=0.02)


def test_a_change_reaches_requests_that_are_already_in_the_batch() -> None:
    world = replace(statistics_world(1.0), script=(Change(1000.0, rates=(0.47, 0.10)),))
    after = positions(increase(Simulator(world, 1), 1000.0, 1030.0))
    assert after[1] < 0.16


def test_drift_goes_slowly_and_its_truth_is_known() -> None:
    simulator = Simulator(SCENARIOS["drift"], 1)
    spans = ((0, 60), (150, 210), (310, 370))
    seen = [truth_between(simulator, begin, end).positions[0] for begin, end in spans]
    assert seen == pytest.approx([0.47, 0.395, 0.32], abs=0.01)
    assert positions(increase(simulator, 370.0, 490.0)) == pytest.approx((0.32, 0.12), abs=0.02)


def test_a_broken_drafter_pays_for_every_step_and_gets_nothing() -> None:
    known = truth_between(Simulator(SCENARIOS["broken-drafter"], 1), 10.0, 130.0)
    assert known.positions[0] == pytest.approx(0.027)
    assert known.gain < -0.3


def test_overload_fills_the_batch_lengthens_the_queue_and_makes_speculation_lose() -> None:
    simulator = Simulator(SCENARIOS["overload"], 1)
    calm = truth_between(simulator, 10.0, 60.0)
    loaded = truth_between(simulator, 70.0, 180.0)
    page = simulator.page().decode()
    waiting = next(x for x in page.splitlines() if x.startswith("vllm:num_requests_waiting{"))
    assert re.search(rb"^vllm:num_requests_running\{.*\} 32\.0$", simulator.page(), re.M)
    assert float(waiting.split()[1]) > 300
    assert calm.gain > 0.1
    assert loaded.gain < 0.0
    assert truth_between(simulator, 400.0, 500.0).gain > 0.1


def test_a_restart_is_ten_seconds_of_nothing_and_then_counters_from_zero() -> None:
    simulator = Simulator(SCENARIOS["restart"], 1, epoch=1000.0)
    simulator.advance(59.9)
    before = simulator.snapshot()
    simulator.advance(60.0)
    assert not simulator.up
    for look in (simulator.snapshot, simulator.page):
        with pytest.raises(ScrapeError) as refused:
            look()
        assert refused.value.reason is Reason.CONNECT
    simulator.advance(70.0)
    assert counters(simulator).generation_tokens == 0
    simulator.advance(75.0)
    after = simulator.snapshot()
    assert (before.process_start_time, after.process_start_time) == (1000.0, 1070.0)
    assert 0 < number(after.engines[0].counters.drafts) < number(before.engines[0].counters.drafts)
    assert simulator.truth().drafts >= number(before.engines[0].counters.drafts)


def test_k_changes_by_a_restart_from_the_script_or_from_outside() -> None:
    simulator = Simulator(SCENARIOS["k-change"], 1)
    simulator.advance(50.0)
    assert simulator.snapshot().engines[0].num_speculative_tokens == 2
    simulator.advance(80.0)
    assert simulator.snapshot().engines[0].num_speculative_tokens == 1
    assert positions(increase(simulator, 80.0, 200.0)) == pytest.approx((0.45,), abs=0.01)
    simulator.restart(down_seconds=5.0, k=6)
    simulator.advance(204.0)
    assert not simulator.up
    simulator.advance(300.0)
    assert simulator.snapshot().engines[0].num_speculative_tokens == 6
    assert positions(increase(simulator, 300.0, 330.0))[0] == pytest.approx(0.45, abs=0.02)
    with pytest.raises(ValueError, match="at least 0"):
        simulator.restart(k=-1)


def test_two_engines_share_the_traffic_and_hide_the_start_of_the_process() -> None:
    simulator = Simulator(SCENARIOS["two-engines"], 1)
    simulator.advance(300.0)
    snapshot = simulator.snapshot()
    first, second = snapshot.engines
    assert (first.engine, second.engine) == ("0", "1")
    assert snapshot.process_start_time is None
    share = number(first.counters.first_tokens) / (
        number(first.counters.first_tokens) + number(second.counters.first_tokens)
    )
    assert share == pytest.approx(0.7, abs=0.03)
    assert simulator.truth().drafts == number(first.counters.drafts) + number(
        second.counters.drafts
    )


def test_an_idle_night_counts_nothing_and_the_morning_goes_on() -> None:
    simulator = Simulator(SCENARIOS["idle-night"], 1)
    night = increase(simulator, 75.0, 235.0)
    assert night.drafts == night.generation_tokens == night.decode_seconds == 0
    assert number(increase(simulator, 240.0, 300.0).drafts) > 10_000


def test_stalled_drafting_goes_on_token_by_token() -> None:
    stalled = increase(Simulator(SCENARIOS["drafting-stalled"], 1), 61.0, 121.0)
    assert stalled.drafts == 0
    assert len(stalled.accepted_per_position) == 2
    delivered = number(stalled.generation_tokens) - number(stalled.first_tokens)
    assert delivered == stalled.decode_steps


def test_load_and_acceptance_follow_the_day() -> None:
    day = replace(
        SCENARIOS["real-day"], acceptance=Acceptance(daily_logits=0.3), day_seconds=1200.0
    )
    simulator = Simulator(day, 1)
    quiet = truth_between(simulator, 250.0, 350.0)
    busy = truth_between(simulator, 850.0, 950.0)
    assert busy.decode_tokens > 4 * quiet.decode_tokens
    assert quiet.positions[0] - 0.47 == pytest.approx(0.07, abs=0.01)
    assert busy.positions[0] - 0.47 == pytest.approx(-0.07, abs=0.01)


def test_the_wander_is_as_wide_and_as_slow_as_it_says() -> None:
    world = statistics_world(1.0, drafts_per_second=0.1, wander_logits=0.2, wander_seconds=1800.0)
    simulator = Simulator(world, 1)
    values = []
    for i in range(1500):
        simulator.advance(600.0 * i)
        law = simulator.law
        assert law is not None
        p = law.positions[0]
        values.append(math.log(p / (1 - p)) - math.log(0.47 / 0.53))
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    lag = sum((a - mean) * (b - mean) for a, b in pairwise(values)) / len(values) / variance
    assert math.sqrt(variance) == pytest.approx(0.2, rel=0.1)
    assert lag == pytest.approx(math.exp(-600 / 1800), abs=0.08)


def test_long_prompts_are_prefilled_in_pieces_and_cached_ones_in_part() -> None:
    long = with_traffic(HEALTHY, prompt_tokens=20_000.0, requests_per_second=0.5)
    c = increase(Simulator(long, 1), 0.0, 120.0)
    assert number(c.first_tokens) == pytest.approx(60, abs=25)
    pages = {}
    for ratio in (0.0, 0.75):
        simulator = Simulator(with_traffic(HEALTHY, prefix_hit_ratio=ratio), 1)
        simulator.advance(60.0)
        values = dict(x.rsplit(" ", 1) for x in simulator.page().decode().splitlines())
        label = f'{{engine="0",model_name="{HEALTHY.model_name}"}}'
        pages[ratio] = float(values[f"vllm:prefix_cache_hits_total{label}"]) / float(
            values[f"vllm:prompt_tokens_total{label}"]
        )
    assert pages == pytest.approx({0.0: 0.0, 0.75: 0.75}, abs=0.01)


def test_prefill_inside_a_step_lengthens_it() -> None:
    heavy = with_traffic(HEALTHY, prompt_tokens=3000.0)
    light = with_traffic(HEALTHY, prompt_tokens=1.0)
    assert tpot(increase(Simulator(heavy, 1), 10.0, 130.0)) > 1.1 * tpot(
        increase(Simulator(light, 1), 10.0, 130.0)
    )


def test_the_names_are_their_keys_and_every_scenario_says_its_point_in_a_line() -> None:
    assert {
        "healthy", "position-1-collapse", "drift", "broken-drafter", "overload", "restart",
        "k-change", "two-engines", "no-speculation", "idle-night",
    } <= SCENARIOS.keys()  # fmt: skip
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert 20 < len(scenario.description) < 90
        assert "\n" not in scenario.description


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": -1},
        {"traffic": Traffic(output_tokens=1.0)},
        {"traffic": Traffic(daily_amplitude=1.5)},
        {"acceptance": Acceptance(rates=())},
        {"script": (Restart(60.0), Change(30.0))},
        {"engine_shares": ()},
        {"max_num_batched_tokens": 64},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_scenario_that_cannot_be_simulated_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Scenario("wrong", "Cannot be simulated", **wrong)
