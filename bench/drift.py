"""How often drift detectors alarm for nothing, and how soon they find what is there: `make bench-drift`.

Worlds of traffic are drawn scrape by scrape: requests with geometric numbers of drafts, alike in
acceptance within a request by the law of the simulator, in a daily cycle of load and one of
acceptance, with a slow wander or without. Each detector learns from the first days of a world. Its
false alarms are counted on days without a change, and those of the peers are brought to the same
number by their thresholds; then every change is made at a random time of day.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from river.drift import ADWIN, PageHinkley
from ruamel.yaml import YAML
from scipy.signal import lfilter
from specdec_exporter.drift import Detector, Fingerprint, Learner, Reference
from specdec_exporter.simulator import Simulator, statistics_world
from specdec_exporter.simulator.acceptance import acceptance_law, solve_spread, solve_stop
from specdec_exporter.uncertainty import Interval

Array = NDArray[np.float64]
DAY = 86400.0
BUDGET = 0.5
BLOCK_SECONDS = 240.0
PRE_SECONDS = 6 * 3600.0

HELP = """\
A scenario file (YAML or JSON) is a list of worlds, or a mapping with `worlds` and `changes`. Left
out, a value is the one shown, and `changes` are the five of the table.

  worlds:
    - name: my world
      positions: [0.47, 0.24]       # acceptance of position 0, 1, ... per draft
      drafts_per_second: 20
      variance_inflation: 13        # of sums over times much longer than a request
      drafts_per_request: 150
      request_seconds: 60
      load_cycle: 0.5               # amplitude of the daily cycle, of the mean
      acceptance_cycle: 0.05
      wander: 0.0                   # sd of a slow random wander of acceptance, of the mean
      wander_seconds: 7200
      scrape_seconds: 5
      learn_days: 7
  changes:
    - name: position 0 falls
      positions: [0.40, 0.24]       # what the positions become
      over_seconds: 0               # in how long
      watch_seconds: 86400          # how long it is waited for
"""


@dataclass(frozen=True)
class World:
    name: str
    positions: tuple[float, ...] = (0.47, 0.24)
    drafts_per_second: float = 20.0
    variance_inflation: float = 13.0
    drafts_per_request: float = 150.0
    request_seconds: float = 60.0
    load_cycle: float = 0.5
    acceptance_cycle: float = 0.05
    wander: float = 0.0
    wander_seconds: float = 7200.0
    scrape_seconds: float = 5.0
    learn_days: float = 7.0

    @property
    def k(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Change:
    name: str
    positions: tuple[float, ...]
    over_seconds: float = 0.0
    watch_seconds: float = DAY


def evenly(positions: Sequence[float], share: float) -> tuple[float, ...]:
    """All conditional acceptances times one factor, so that their mean length is times `share`."""
    (factor,) = _factors(np.asarray(positions), np.asarray([share]))
    return tuple(p * factor ** (i + 1) for i, p in enumerate(positions))


def _factors(positions: Array, shares: Array) -> Array:
    factors = shares.copy()
    powers = np.arange(1, len(positions) + 1)
    for _ in range(8):
        value = (positions * factors[:, None] ** powers).sum(1) - shares * positions.sum()
        slope = (positions * powers * factors[:, None] ** (powers - 1)).sum(1)
        factors -= value / slope
    return factors


GUIDE = (0.47, 0.24)
WORLDS = tuple(
    World(f"{rate:g}/s{', wander' if wander else ''}", drafts_per_second=rate, wander=wander)
    for wander in (0.0, 0.02)
    for rate in (2.0, 20.0, 200.0)
)
CHANGES = (
    Change("35 → 25 %", evenly(GUIDE, 25 / 35)),
    Change("35 → 31.5 %", evenly(GUIDE, 0.9)),
    Change("position 0 47 → 40 %", (0.40, 0.24)),
    Change("ramp −10 % in 6 h", evenly(GUIDE, 0.9), over_seconds=6 * 3600.0),
    Change("collapse", evenly(GUIDE, 0.02), watch_seconds=6 * 3600.0),
)
GOALS: dict[str, tuple[float, ...]] = {
    "20/s": (15 * 60, 75 * 60, 45 * 60, 6.5 * 3600, 3 * 60),
    "200/s": (2 * 60, 8 * 60, 6 * 60, 4 * 3600, 30),
    "20/s, wander": (25 * 60, 4 * 3600, 2.5 * 3600, 10 * 3600, 5 * 60),
    "200/s, wander": (25 * 60, 4 * 3600, 2.5 * 3600, 10 * 3600, 5 * 60),
}


@dataclass(frozen=True)
class Traffic:
    """Counts by scrape; times are ends, seconds since a midnight."""

    t: Array
    drafts: Array
    accepted: Array
    """Shape (k, scrapes)."""
    seconds: float

    def blocks(self, seconds: float) -> Traffic:
        """The same by longer steps, whole ones only."""
        width = round(seconds / self.seconds)
        n = len(self.t) // width
        accepted = self.accepted[:, : n * width].reshape(len(self.accepted), n, width).sum(2)
        drafts = self.drafts[: n * width].reshape(n, width).sum(1)
        return Traffic(self.t[width - 1 :: width][:n], drafts, accepted, width * self.seconds)


@dataclass(frozen=True)
class Plan:
    """Traffic whose acceptance is still open: what each scrape's drafts would have accepted."""

    t: Array
    drafts: NDArray[np.int64]
    positions: Array
    """Mean acceptance by position of the requests drafting then, shape (k, scrapes)."""


class Sampler:
    """Draws the traffic of a world."""

    def __init__(self, world: World, seed: Sequence[int]) -> None:
        self.world = world
        self._random = np.random.default_rng(seed)
        stop = solve_stop(world.positions, world.drafts_per_request)
        spread = solve_spread(world.positions, stop, world.variance_inflation)
        law = acceptance_law(world.positions, spread, stop)
        self._cumulative = np.asarray(law.arrival_weights)
        shares = np.diff(self._cumulative, prepend=0.0)
        # All qualities have the same share of drafts, so those that arrive seldom stay longer.
        self._end = np.minimum(1.0, shares * len(shares) / world.drafts_per_request)
        self._levels = np.asarray([level.positions for level in law.levels]).T
        self._load_phase, self._phase = self._random.uniform(0, 2 * math.pi, 2)

    def plan(self, begin: float, end: float) -> Plan:
        """The requests, and the acceptance of each scrape without any change."""
        w, r = self.world, self._random
        step, n = w.scrape_seconds, round((end - begin) / w.scrape_seconds)
        pace = w.drafts_per_request / w.request_seconds
        early = begin - 12 * w.request_seconds
        arrivals = w.drafts_per_second / w.drafts_per_request * (1 + w.load_cycle) * (end - early)
        start = r.uniform(early, end, r.poisson(arrivals))
        load = 1 + w.load_cycle * np.sin(2 * math.pi * start / DAY + self._load_phase)
        start = start[r.uniform(0, 1 + w.load_cycle, len(start)) < load]
        level = np.searchsorted(self._cumulative, r.uniform(0, 1, len(start)))
        stop = start + r.geometric(self._end[level]) / pace

        def active(weights: Array | None) -> Array:
            """Weighted seconds of activity in each scrape."""
            return since(start, weights) - since(stop, weights)

        def since(moments: Array, weights: Array | None) -> Array:
            at = np.clip((moments - begin) / step, 0.0, n + 1e-9)
            index = np.minimum(at.astype(np.int64), n)
            part = (index + 1 - at) * step
            first = np.bincount(index, part if weights is None else part * weights, n + 1)[:n]
            later = np.bincount(index, weights, n + 1)[:n]
            return first + step * (np.cumsum(later) - later)

        present = active(None)
        drafts = np.floor(present * pace + r.uniform(0, 1, n)).astype(np.int64)
        sums = np.stack([active(position[level]) for position in self._levels])
        means = np.divide(sums, present, out=np.zeros_like(sums), where=present > 1e-9)
        t = begin + step * np.arange(1, n + 1)
        shares = 1 + w.acceptance_cycle * np.sin(2 * math.pi * t / DAY + self._phase)
        if w.wander:
            keep = math.exp(-step / w.wander_seconds)
            noise = r.normal(0, w.wander * math.sqrt(1 - keep * keep), n)
            noise[0] = r.normal(0, w.wander)
            shares += lfilter([1.0], [1.0, -keep], noise)
        factors = _factors(np.asarray(w.positions), shares)
        return Plan(t, drafts, means * factors ** np.arange(1, w.k + 1)[:, None])

    def draw(self, plan: Plan, change: Change | None = None, at: float = 0.0) -> Traffic:
        """Accept or reject the drafts, from `at` on with a change."""
        positions = plan.positions
        if change is not None:
            done = np.clip((plan.t - at) / max(change.over_seconds, 1e-9), 0.0, 1.0)
            ratios = np.asarray(change.positions) / np.asarray(self.world.positions)
            positions = positions * (1 - done + ratios[:, None] * done)
        left, accepted, above = plan.drafts, [], np.ones(len(plan.t))
        for position in positions:
            here = np.clip(position, 0.0, above)
            chance = np.divide(here, above, out=np.zeros_like(here), where=above > 0)
            left = self._random.binomial(left, np.clip(chance, 0.0, 1.0))
            accepted.append(left.astype(np.float64))
            above = here
        return Traffic(
            plan.t, plan.drafts.astype(np.float64), np.stack(accepted), self.world.scrape_seconds
        )


def learn(traffic: Traffic) -> Reference:
    """The product's reference of what it learned from; it sums up by blocks of four minutes too."""
    k, rows = len(traffic.accepted), traffic.blocks(BLOCK_SECONDS)
    width = round(BLOCK_SECONDS / traffic.seconds)
    busy = (traffic.drafts[: len(rows.t) * width].reshape(-1, width) > 0).sum(1) * traffic.seconds
    learner = Learner(13.0)
    for t, seconds, drafts, *accepted in zip(rows.t, busy, rows.drafts, *rows.accepted, strict=True):
        counts = tuple(map(float, accepted))
        # Dated so that its middle is in its block however short it is.
        middle = float(t) - BLOCK_SECONDS / 2 + float(seconds) / 2
        learner.add(middle, Interval(float(seconds), float(drafts), counts))
    reference = learner.reference(Fingerprint("bench", k), float(traffic.t[-1]))
    if reference is None:
        raise SystemExit("error: too few days or drafts to learn from; give learn_days more")
    return reference


def expectations(reference: Reference, t: Array) -> tuple[Array, Array]:
    """`Reference.expected` for many times at once."""
    angle = 2 * np.pi * (t % DAY) / DAY
    waves = np.stack(
        [np.ones_like(t), np.cos(angle), np.sin(angle), np.cos(2 * angle), np.sin(2 * angle)]
    )
    mean = np.full_like(t, reference.mean_accepted)
    first = np.full_like(t, reference.position_acceptance_ratio[0])
    if reference.accepted_cycle:
        mean += np.asarray(reference.accepted_cycle) @ waves
        first += np.asarray(reference.first_cycle) @ waves
    return mean, first


Score = Callable[[Traffic], Array]
"""A detector's score by scrape, begun anew; 1 and above is an alarm."""


def ours(reference: Reference) -> Score:
    """The product's detector, for a whole series at once; `check` compares it with the real one."""
    detector = Detector(reference)
    counts = tuple(p * reference.drafts_per_second for p in reference.position_acceptance_ratio)
    detector.add(0.0, Interval(1.0, reference.drafts_per_second, counts))

    def score(traffic: Traffic) -> Array:
        mean, first = expectations(reference, traffic.t)
        scores = []
        for chart in detector.charts:
            due, got = (
                (first, traffic.accepted[0])
                if chart.position_0
                else (mean, traffic.accepted.sum(0))
            )
            missing = np.cumsum(traffic.drafts * due * (1 - chart.allowance) - got)
            scores.append(
                (missing - np.minimum(np.minimum.accumulate(missing), 0.0)) / chart.threshold
            )
        return np.maximum.reduce(scores)

    return score
