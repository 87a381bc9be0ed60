"""The traffic that drift detectors are compared on is what it is said to be."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("numpy")
pytest.importorskip("river")

from bench.drift import (
    CHANGES,
    DAY,
    SURE,
    WORLDS,
    Row,
    Sampler,
    World,
    compare_with_simulator,
    evenly,
    leads,
    learn,
    load,
)


def test_drawn_traffic_has_the_acceptance_and_the_inflation_of_the_simulators_law() -> None:
    world = World("calm", load_cycle=0.0, acceptance_cycle=0.0)
    sampler = Sampler(world, (1,))
    traffic = sampler.draw(sampler.plan(0.0, 20 * DAY))
    drafts = traffic.drafts.sum()
    positions = traffic.accepted.sum(1) / drafts
    assert drafts / 20 / DAY == pytest.approx(20, rel=0.03)
    assert positions == pytest.approx((0.47, 0.24), rel=0.01)
    within = positions[0] + 3 * positions[1] - positions.sum() ** 2
    blocks = traffic.blocks(3600)
    rest = blocks.accepted.sum(0) - positions.sum() * blocks.drafts
    # A request lasts a minute, so an hour sees all but 3 % of it; 480 blocks tell 7 %.
    assert (rest**2).sum() / drafts / within == pytest.approx(13, rel=0.2)


def test_drawn_traffic_has_the_cycles_and_the_wander_that_it_was_given() -> None:
    world = World("cycle", load_cycle=0.5, acceptance_cycle=0.05)
    sampler = Sampler(world, (2,))
    traffic = sampler.draw(sampler.plan(0.0, 7 * DAY))
    reference = learn(traffic)
    means = [reference.expected(hour * 3600.0)[0] for hour in range(24)]
    assert max(means) / min(means) == pytest.approx(1.05 / 0.95, abs=0.02)
    hours = traffic.blocks(3600).drafts.reshape(7, 24).mean(0)
    assert hours.max() / hours.min() == pytest.approx(3.0, rel=0.15)


def test_a_change_has_the_size_that_its_name_says() -> None:
    for change, share in zip(CHANGES[:2], (25 / 35, 0.9), strict=True):
        assert sum(change.positions) == pytest.approx(0.71 * share, rel=1e-3)
    first, second = evenly((0.47, 0.24), 0.9)
    assert (first / 0.47) ** 2 == pytest.approx(second / 0.24)
    sampler = Sampler(WORLDS[1], (3,))
    plan = sampler.plan(0.0, DAY)
    changed = sampler.draw(plan, CHANGES[2], DAY / 2)
    n = len(changed.t) // 2
    before, after = (
        changed.accepted[0, part].sum() / changed.drafts[part].sum()
        for part in (slice(n), slice(n, None))
    )
    assert after / before == pytest.approx(40 / 47, rel=0.12)


def test_drawn_traffic_and_the_simulator_agree_over_short_times() -> None:
    figures = []
    for line in compare_with_simulator(seed=1, days=0.25):
        figures.append([float(part.split()[-1]) for part in line.rsplit("over ", 1)[1].split(", ")])
    for drawn, simulated in zip(*(row[:2] for row in figures), strict=True):
        assert drawn == pytest.approx(simulated, rel=0.25)


TRIALS = [(month, repeat) for month in range(24) for repeat in range(6)]


def fall(name: str, delays: dict[tuple[int, int], float]) -> Row:
    return Row(name, 0.0, {"fall": delays})


def test_a_peer_leads_where_it_is_quicker_in_the_same_months_however_much_these_differ() -> None:
    random = Random(4)
    months = [random.gammavariate(1.0, 3000.0) for _ in range(24)]
    delays = {trial: months[trial[0]] * random.gammavariate(400.0, 1 / 400) for trial in TRIALS}
    own = fall("own", delays)
    quick = fall("quick", {trial: 0.9 * delay for trial, delay in delays.items()})
    assert min(leads(own, quick, "fall")) >= SURE
    assert max(leads(quick, own, "fall")) == 0.0


def test_a_peer_that_is_quicker_in_some_months_leads_by_chance_only() -> None:
    random = Random(5)
    for _ in range(4):
        # In 14 of 24 months it is the quicker one, but every change of a month says the same.
        luck = [0.5] * 14 + [2.0] * 10
        delays = {trial: random.gammavariate(4.0, 300.0) for trial in TRIALS}
        other = {t: luck[t[0]] * random.gammavariate(4.0, 300.0) for t in TRIALS}
        assert max(leads(fall("own", delays), fall("peer", other), "fall")) < SURE


def test_nobody_leads_where_there_is_nothing_to_compare() -> None:
    own = fall("own", dict.fromkeys(TRIALS, 60.0))
    never = fall("never", dict.fromkeys(TRIALS, math.inf))
    for peer in (own, never, fall("elsewhere", {(99, 0): 1.0}), Row("idle", 0.0)):
        assert leads(own, peer, "fall") == (0.0, 0.0)
    assert leads(never, never, "fall") == (0.0, 0.0)


def test_a_scenario_file_is_read_and_a_wrong_one_is_named_with_its_fault(tmp_path: Path) -> None:
    path = tmp_path / "worlds.yaml"
    path.write_text(
        "worlds: [{name: mine, drafts_per_second: 5, wander: 0.01}]\n"
        "changes: [{name: worse, positions: [0.4, 0.2], over_seconds: 60}]\n"
    )
    (world,), (change,) = load(path)
    assert (world.drafts_per_second, world.wander, world.positions) == (5, 0.01, (0.47, 0.24))
    assert (change.positions, change.over_seconds) == ((0.4, 0.2), 60)
    path.write_text('[{"name": "mine"}]')
    assert load(path)[1] is CHANGES
    for wrong in ("[{name: a, drafts: 5}]", "wolds: []", "[{name: a, positions: [0.5]}]", "3"):
        path.write_text(wrong)
        with pytest.raises(SystemExit, match=r"error: .*worlds\.yaml: .*--help"):
            load(path)
