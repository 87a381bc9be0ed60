"""Drift detectors: their false alarms, and how soon they find what is there. `make bench-drift`.

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
from specdec_exporter.drift import Chart, Detector, Fingerprint, Learner, Reference
from specdec_exporter.simulator import Simulator, statistics_world
from specdec_exporter.simulator.acceptance import acceptance_law, solve_spread, solve_stop
from specdec_exporter.uncertainty import Interval

Array = NDArray[np.floating[Any]]
DAY = 86400.0
BLOCK_SECONDS = 240.0
QUIET_HOURS = 3.0

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
    """The factor of each conditional acceptance for each share of the mean length."""
    grid = np.linspace(0.0, 2.0, 20001)
    lengths = (positions * grid[:, None] ** np.arange(1, len(positions) + 1)).sum(1)
    return np.interp(shares, lengths / positions.sum(), grid)


GUIDE = (0.47, 0.24)
WORLDS = tuple(
    World(f"{rate:g}/s{', wander' if wander else ''}", drafts_per_second=rate, wander=wander)
    for wander in (0.0, 0.02)
    for rate in (2.0, 20.0, 200.0)
)
CHANGES = (
    Change("35 → 25 %", evenly(GUIDE, 25 / 35), watch_seconds=DAY / 2),
    Change("35 → 31.5 %", evenly(GUIDE, 0.9)),
    Change("position 0 47 → 40 %", (0.40, 0.24)),
    Change("ramp −10 % in 6 h", evenly(GUIDE, 0.9), over_seconds=6 * 3600.0),
    Change("collapse", evenly(GUIDE, 0.02), watch_seconds=2 * 3600.0),
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

    def part(self, begin: int, end: int | None = None) -> Traffic:
        """Some of its scrapes."""
        those = slice(begin, end)
        return Traffic(self.t[those], self.drafts[those], self.accepted[:, those], self.seconds)

    def __add__(self, later: Traffic) -> Traffic:
        return Traffic(
            np.concatenate((self.t, later.t)),
            np.concatenate((self.drafts, later.drafts)),
            np.concatenate((self.accepted, later.accepted), axis=1),
            self.seconds,
        )

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

    def part(self, begin: int, end: int | None = None) -> Plan:
        """Some of its scrapes."""
        those = slice(begin, end)
        return Plan(self.t[those], self.drafts[those], self.positions[:, those])


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
        return Plan(t, drafts, means * np.cumprod(np.tile(factors, (w.k, 1)), axis=0))

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
    for t, seconds, drafts, *accepted in zip(
        rows.t, busy, rows.drafts, *rows.accepted, strict=True
    ):
        counts = tuple(map(float, accepted))
        # Dated so that its middle is in its block however short it is.
        middle = float(t) - BLOCK_SECONDS / 2 + float(seconds) / 2
        learner.add(middle, Interval(float(seconds), float(drafts), counts))
    reference = learner.reference(Fingerprint("bench", k), float(traffic.t[-1]))
    if reference is None:
        raise SystemExit("error: too few days or drafts to learn from; give learn_days more")
    return reference


def expectations(reference: Reference, t: Array) -> tuple[Array, ...]:
    """`Reference.expected` for many times at once."""
    mean, first = reference.mean_accepted, reference.position_acceptance_ratio[0]
    if not reference.accepted_cycle:
        return np.full_like(t, mean), np.full_like(t, first)
    angle = 2 * np.pi * (t % DAY) / DAY
    cosine, sine = np.cos(angle), np.sin(angle)
    waves = cosine, sine, 2 * cosine * cosine - 1, 2 * sine * cosine
    return tuple(
        value + cycle[0] + sum(c * wave for c, wave in zip(cycle[1:], waves, strict=True))
        for value, cycle in (
            (mean, reference.accepted_cycle),
            (first, reference.first_cycle),
        )
    )


Score = Callable[[Traffic], Array]
"""A detector's score by scrape, begun anew; 1 and above is an alarm."""


def charts(reference: Reference) -> tuple[Chart, ...]:
    """What the product's detector keeps in front of a reference."""
    detector = Detector(reference)
    counts = tuple(p * reference.drafts_per_second for p in reference.position_acceptance_ratio)
    detector.add(0.0, Interval(1.0, reference.drafts_per_second, counts))
    return tuple(detector.charts)


def ours(reference: Reference, thresholds: Sequence[float] | None = None) -> Score:
    """The product's detector, for a whole series at once; `check` compares it with the real one.

    Args:
        reference: what was learned.
        thresholds: of its charts, in place of those that follow from the reference.
    """
    kept = charts(reference)
    if thresholds is None:
        thresholds = [chart.threshold for chart in kept]

    def score(traffic: Traffic) -> Array:
        mean, first = expectations(reference, traffic.t)
        scores = []
        for chart, threshold in zip(kept, thresholds, strict=True):
            due, got = (
                (first, traffic.accepted[0])
                if chart.position_0
                else (mean, traffic.accepted.sum(0))
            )
            # Scrapes without drafts are left out, as the detector does.
            rates = np.maximum(traffic.drafts, 1.0) / traffic.seconds
            relative = 1.0 - chart.lasting + chart.lasting * rates / (chart.usual_rate or 1.0)
            weights = 1.0 / np.sqrt(rates * relative)
            missing = np.cumsum(weights * (traffic.drafts * due * (1 - chart.allowance) - got))
            scores.append((missing - np.minimum(np.minimum.accumulate(missing), 0.0)) / threshold)
        highest: Array = np.maximum.reduce(scores)
        return highest

    return score


ALIKE = "this detector, threshold by trial"

State = tuple[int, float, float, float]
"""Of PageHinkley: values seen, their mean, its sum, and the largest sum."""


class PageHinkleyPeer:
    """river's PageHinkley for drops, for any threshold; `check` compares it with river's own."""

    def __init__(self, delta: float, alpha: float) -> None:
        self.delta, self.alpha = delta, alpha

    def __call__(self, values: Array, state: State | None = None) -> tuple[Array, State]:
        """The statistic that is held against the threshold, and the state to go on from."""
        n, mean, total, top = state or (0, 0.0, 0.0, -1.0)
        counts = n + np.arange(1, len(values) + 1)
        means = (n * mean + np.cumsum(values)) / counts
        sums = lfilter(
            [1.0], [1.0, -self.alpha], values - means + self.delta, zi=[self.alpha * total]
        )[0]
        tops = np.maximum(top, np.maximum.accumulate(sums))
        return tops - sums, (int(counts[-1]), means[-1], sums[-1], tops[-1])


def ratios(traffic: Traffic, reference: Reference | None) -> tuple[Array, NDArray[np.bool_]]:
    """A / T of the scrapes with drafts, less the reference's daily cycle, and which these are."""
    busy = traffic.drafts > 0
    values = traffic.accepted.sum(0)[busy] / traffic.drafts[busy]
    if reference is not None:
        values = values - expectations(reference, traffic.t[busy])[0] + reference.mean_accepted
    return values / len(traffic.accepted), busy


def fixed(traffic: Traffic) -> Array:
    """The guide's rule: acceptance under 25 % in a window of 5 minutes, for 10 minutes."""
    window, hold = (round(minutes * 60 / traffic.seconds) for minutes in (5, 10))
    drafts = lfilter(np.ones(window), [1.0], traffic.drafts)
    accepted = lfilter(np.ones(window), [1.0], traffic.accepted.sum(0))
    low = accepted < 0.25 * len(traffic.accepted) * drafts
    last_fine = np.maximum.accumulate(np.where(low, -1, np.arange(len(low))))
    return np.where(np.arange(len(low)) - last_fine > hold, 1.0, 0.0)


def adwin_alarms(
    learned: Array, values: Array, delta: float, *, first_only: bool = False
) -> list[int]:
    """Where river's ADWIN, having seen `learned`, finds a drop."""
    detector = ADWIN(delta=delta, clock=1)
    for value in learned.tolist():
        detector.update(value)
    alarms = []
    before = detector.estimation
    for i, value in enumerate(values.tolist()):
        detector.update(value)
        if detector.drift_detected:
            if detector.estimation < before:
                alarms.append(i)
                if first_only:
                    break
            before = detector.estimation
        elif i % 64 == 0:
            before = detector.estimation
    return alarms


Trial = tuple[int, int]
"""A change that was made: its month and its repetition."""

DRAWS = 1000
SURE = 0.99
"""A peer ahead in fewer draws may be so by chance: a hundred cells are looked at."""


@dataclass
class Row:
    """One detector in one world."""

    name: str
    false_alarms: float
    delays: dict[str, dict[Trial, float]] = field(default_factory=dict)

    def add(self, trial: Trial, change: str, t: Array, alarm: NDArray[np.bool_], at: float) -> None:
        """Take in one change; one that was alarmed of before it came is left out."""
        if not alarm[t <= at].any():
            first = int(np.argmax(alarm))
            delay = float(t[first] - at) if alarm[first] else math.inf
            self.delays.setdefault(change, {})[trial] = delay

    def figures(self, change: str) -> tuple[float, float]:
        """Median and 95th percentile of the delay."""
        return figures(list(self.delays.get(change, {}).values()))


def figures(delays: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    ranked = sorted(delays) or [math.nan]
    return ranked[(len(ranked) - 1) // 2], ranked[math.ceil(0.95 * len(ranked)) - 1]


def leads(own: Row, peer: Row, change: str) -> tuple[float, float]:
    """How surely a peer finds a change sooner, by the median and by the 95th percentile.

    The share of draws in which its figure is the shorter one, of a thousand in which the months are
    drawn anew with replacement (paired bootstrap; changes of one month share its traffic and its
    reference). Changes that one of both was not given, or alarmed of too soon, are left out.
    """
    mine, theirs = own.delays.get(change, {}), peer.delays.get(change, {})
    months: dict[int, list[Trial]] = {}
    for trial in mine.keys() & theirs.keys():
        months.setdefault(trial[0], []).append(trial)
    if not months:
        return 0.0, 0.0
    drawn = np.random.default_rng(1).choice(sorted(months), (DRAWS, len(months)))
    sooner = np.zeros(2)
    for row in drawn.tolist():
        trials = [trial for month in row for trial in months[month]]
        pairs = zip(
            figures([theirs[t] for t in trials]), figures([mine[t] for t in trials]), strict=True
        )
        sooner += [a < b for a, b in pairs]
    median, late = (sooner / DRAWS).tolist()
    return median, late


@dataclass(frozen=True)
class Effort:
    months: int
    repeats: int
    adwin_months: int
    adwin_changes: int


FULL = Effort(months=24, repeats=6, adwin_months=8, adwin_changes=20)
QUICK = Effort(months=5, repeats=2, adwin_months=3, adwin_changes=5)


@dataclass
class Month:
    """A world that was learned from, and thirty days of it without a change."""

    sampler: Sampler
    learned: Traffic
    quiet: Traffic
    reference: Reference

    @classmethod
    def draw(cls, world: World, seed: Sequence[int]) -> Month:
        sampler = Sampler(world, seed)
        whole = sampler.draw(sampler.plan(0.0, (world.learn_days + 30) * DAY))
        n = round(world.learn_days * DAY / world.scrape_seconds)
        learned = whole.part(0, n)
        return cls(sampler, learned, whole.part(n), learn(learned))


def count_alarms(traffic: Traffic, score: Score) -> int:
    """Alarms of a detector that begins anew after each."""
    alarms, begin = 0, 0
    while begin < len(traffic.t):
        alarm = score(traffic.part(begin)) >= 1.0
        first = int(np.argmax(alarm))
        if not alarm[first]:
            break
        alarms += 1
        # An hour for whoever looks at it; for a rule that goes on firing, until it stops.
        begin += first + round(3600 / traffic.seconds)
    return alarms


def measure(world: World, changes: Sequence[Change], effort: Effort, seed: int) -> list[Row]:
    """All detectors in one world."""
    months = [Month.draw(world, (seed, i)) for i in range(effort.months)]
    scores = [ours(month.reference) for month in months]
    alarms = [count_alarms(m.quiet, score) for m, score in zip(months, scores, strict=True)]
    own = Row("this detector", float(np.mean(alarms)))
    # None in all these months is taken for one, which is kind to the peers.
    share = max(1, sum(n > 0 for n in alarms)) / effort.months
    guide = Row(
        "guide, 25 % for 10 min", float(np.mean([count_alarms(m.quiet, fixed) for m in months]))
    )
    # One threshold for all months, found by trial on them, is what the peers get.
    usual_thresholds = np.mean([[c.threshold for c in charts(m.reference)] for m in months], axis=0)
    by_trial = [ours(month.reference, usual_thresholds.tolist()) for month in months]
    tops = [float(score(m.quiet).max()) for m, score in zip(months, by_trial, strict=True)]
    limit, found = by_months(tops, share)
    alike = Row(ALIKE, found)
    rows = [own, alike, guide]
    level = sum(world.positions) / world.k
    hinkleys = []
    usual = PageHinkley()
    for delta, alpha, what in (
        (usual.delta, usual.alpha, "as it comes"),
        (0.05 * level, 1.0, "δ 5 %, α 1"),
    ):
        for cyclic in (False, True):
            peer = PageHinkleyPeer(delta, alpha)
            states, tops = [], []
            for month in months:
                season = month.reference if cyclic else None
                _, state = peer(ratios(month.learned, season)[0])
                states.append(state)
                tops.append(float(peer(ratios(month.quiet, season)[0], state)[0].max()))
            threshold, found = by_months(tops, share)
            row = Row(f"PageHinkley, {what}, {'deseasonalised' if cyclic else 'raw'}", found)
            rows.append(row)
            hinkleys.append((peer, cyclic, states, threshold, row))
    adwins = []
    coarse = 60.0 if world.drafts_per_second < 100 else 30.0
    for cyclic in (False, True):
        delta, found = calibrate_adwin(months[: effort.adwin_months], coarse, cyclic, share)
        row = Row(f"ADWIN, {'deseasonalised' if cyclic else 'raw'}", rate(found))
        rows.append(row)
        adwins.append((cyclic, delta, row))
    for i, month in enumerate(months):
        for repeat in range(effort.repeats):
            trial = i, repeat
            # The clock moves on to some hour, three of which are quiet.
            hour = float(np.random.default_rng((seed, i, repeat)).uniform(0, 24))
            at = world.learn_days * DAY + (hour + QUIET_HOURS) * 3600
            longest = max(change.watch_seconds for change in changes)
            plan = month.sampler.plan(at - QUIET_HOURS * 3600, at + longest)
            quiet = round(QUIET_HOURS * 3600 / world.scrape_seconds)
            before = month.sampler.draw(plan.part(0, quiet))
            for change in changes:
                end = quiet + round(change.watch_seconds / world.scrape_seconds)
                traffic = before + month.sampler.draw(plan.part(quiet, end), change, at)
                own.add(trial, change.name, traffic.t, scores[i](traffic) >= 1, at)
                alike.add(trial, change.name, traffic.t, by_trial[i](traffic) > limit, at)
                guide.add(trial, change.name, traffic.t, fixed(traffic) >= 1, at)
                for peer, cyclic, states, threshold, row in hinkleys:
                    values, busy = ratios(traffic, month.reference if cyclic else None)
                    statistic = peer(values, states[i])[0]
                    row.add(trial, change.name, traffic.t[busy], statistic > threshold, at)
                if repeat == 0 and i < effort.adwin_changes:
                    for cyclic, delta, row in adwins:
                        season = month.reference if cyclic else None
                        steps = traffic.blocks(coarse)
                        values, busy = ratios(steps, season)
                        alarm = np.zeros(len(values), dtype=bool)
                        past = ratios(month.learned.blocks(coarse), season)[0]
                        alarm[adwin_alarms(past, values, delta, first_only=True)] = True
                        row.add(trial, change.name, steps.t[busy], alarm, at)
    return rows


def by_months(tops: Sequence[float], share: float) -> tuple[float, float]:
    """What at most this share of the months' largest statistics is above, and its false alarms."""
    threshold = float(np.quantile(tops, 1 - share, method="lower"))
    return threshold, rate(float(np.mean([top > threshold for top in tops])))


def rate(share: float) -> float:
    """False alarms a month where this share of the months has one or more."""
    return -math.log1p(-share) + 0.0 if share < 1 else math.inf


def calibrate_adwin(
    months: Sequence[Month], seconds: float, cyclic: bool, share: float
) -> tuple[float, float]:
    """The largest of some δ at which no more than this share of the months has a false alarm."""
    series = []
    for month in months:
        season = month.reference if cyclic else None
        both = [ratios(part.blocks(seconds), season)[0] for part in (month.learned, month.quiet)]
        series.append((both[0], both[1]))
    low, high = -100.0, -1.0
    found = 0.0
    for _ in range(6):
        middle = (low + high) / 2
        alarmed = np.mean(
            [bool(adwin_alarms(*both, 10.0**middle, first_only=True)) for both in series]
        )
        if alarmed <= share:
            low, found = middle, float(alarmed)
        else:
            high = middle
    return 10.0**low, found


def span(seconds: float) -> str:
    if math.isnan(seconds) or math.isinf(seconds):
        return "never" if seconds > 0 else "?"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def table(world: World, changes: Sequence[Change], rows: Sequence[Row]) -> Iterator[str]:
    """Markdown, with what does not hold below it."""
    goals = GOALS.get(world.name) if changes is CHANGES else None
    yield f"### {world.name}\n"
    yield "| | false alarms in 30 days | " + " | ".join(c.name for c in changes) + " |"
    yield "|---" * (len(changes) + 2) + "|"
    if goals:
        cells = " | ".join(f"≤ {span(goal)}" for goal in goals)
        yield f"| goal, 95th percentile | ≤ 1 | {cells} |"
    for row in rows:
        cells = " | ".join(
            " / ".join(span(figure) for figure in row.figures(change.name)) for change in changes
        )
        yield f"| {row.name} | {row.false_alarms:.2f} | {cells} |"
    yield ""
    own, alike, _, *peers = rows
    for i, change in enumerate(changes):
        late = own.figures(change.name)[1]
        if goals and late > goals[i]:
            yield f"MISSED: {change.name}: {span(late)} for {span(goals[i])}"
        for row in peers:
            for sure, ours_, theirs, what in zip(
                leads(alike, row, change.name),
                alike.figures(change.name),
                row.figures(change.name),
                ("median", "p95"),
                strict=True,
            ):
                if theirs < ours_ or sure >= SURE:
                    word = "FASTER" if sure >= SURE else "ahead by chance"
                    yield (
                        f"{word}: {row.name}, {change.name}, {what}: {theirs:.0f} s for "
                        f"{ours_:.0f} s, sooner in {sure:.1%} of the draws"
                    )
    if goals and own.false_alarms > 1:
        yield f"MISSED: {own.false_alarms:.2f} false alarms"
    yield ""


def check(seed: int) -> Iterator[str]:
    """That the shortcuts taken here give what they stand for."""
    world = WORLDS[1]
    month = Month.draw(world, (seed, 99))
    at = (world.learn_days + 0.5) * DAY
    plan = month.sampler.plan(world.learn_days * DAY, at + 6 * 3600)
    for change in CHANGES:
        traffic = month.sampler.draw(plan, change, at)
        score = ours(month.reference)(traffic)
        detector = Detector(month.reference)
        for t, drafts, *accepted in zip(
            *(a.tolist() for a in (traffic.t, traffic.drafts, *traffic.accepted)), strict=True
        ):
            detector.add(t, Interval(traffic.seconds, drafts, tuple(accepted)))
        found = traffic.t[np.argmax(score >= 1)] if score.max() >= 1 else None
        got = detector.incident.detected_at if detector.incident else None
        if got != found:
            raise SystemExit(f"error: {change.name}: the detector says {got}, its copy {found}")
    yield "the copy of the detector alarms when the detector does"
    values = ratios(traffic, None)[0]
    river = PageHinkley(mode="down")
    statistic = PageHinkleyPeer(river.delta, river.alpha)(values)[0]
    threshold = float(statistic.max()) / 2
    river.threshold = threshold
    first = next(
        i for i, v in enumerate(values.tolist()) if river.update(v) or river.drift_detected
    )
    if first != int(np.argmax(statistic > threshold)):
        raise SystemExit("error: the copy of PageHinkley does not alarm when river's does")
    yield "the copy of PageHinkley alarms when river's does"
    yield from compare_with_simulator(seed)


def compare_with_simulator(seed: int, days: float = 1.0) -> Iterator[str]:
    """Acceptance and variance inflation by length of block, of the sampler and the simulator."""
    world = World("calm", load_cycle=0.0, acceptance_cycle=0.0)
    sampler = Sampler(world, (seed, 98))
    drawn = sampler.draw(sampler.plan(0.0, 10 * days * DAY))
    simulator = Simulator(statistics_world(), seed)
    simulator.advance(3600.0)
    n = round(days * DAY / world.scrape_seconds)
    totals = []
    for i in range(n + 1):
        simulator.advance(3600.0 + i * world.scrape_seconds)
        (engine,) = simulator.snapshot().engines
        totals.append((engine.counters.drafts or 0.0, *engine.counters.accepted_per_position))
    counts = np.diff(np.asarray(totals), axis=0).T
    simulated = Traffic(np.arange(n) * 5.0, counts[0], counts[1:], world.scrape_seconds)
    for name, traffic in (("sampler", drawn), ("simulator", simulated)):
        total = traffic.drafts.sum()
        positions = traffic.accepted.sum(1) / total
        square = ((2 * np.arange(len(positions)) + 1) * positions).sum()
        variance = square - positions.sum() ** 2
        parts = []
        for seconds in (15, 60, 240, 960):
            blocks = traffic.blocks(seconds)
            rest = blocks.accepted.sum(0) - positions.sum() * blocks.drafts
            parts.append(f"{seconds} s {(rest**2).sum() / blocks.drafts.sum() / variance:.1f}")
        yield (
            f"{name}: {total / len(traffic.t) / traffic.seconds:.1f} drafts/s, positions "
            + ", ".join(f"{p:.3f}" for p in positions)
            + ", variance inflation over "
            + ", ".join(parts)
        )


def load(path: Path) -> tuple[list[World], Sequence[Change]]:
    """Worlds and changes of a scenario file.

    Raises:
        SystemExit: it cannot be read or used; the message says why.
    """
    try:
        read = YAML(typ="safe", pure=True).load(path)
        values = read if isinstance(read, dict) else {"worlds": read}
        if unknown := values.keys() - {"worlds", "changes"}:
            raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
        worlds = [_made(World, one) for one in values["worlds"]]
        changes = [_made(Change, one) for one in values.get("changes", [])] or CHANGES
        if any(len(c.positions) != w.k for c in changes for w in worlds):
            raise ValueError("a change needs as many positions as each world has")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the user is told in one line
        raise SystemExit(f"error: {path}: {error}; see --help for what it may hold") from None
    return worlds, changes


def _made(kind: Any, values: dict[str, Any]) -> Any:
    known = {f.name for f in fields(kind)}
    if unknown := values.keys() - known:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.drift",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", type=Path, help="a file with worlds to try instead")
    parser.add_argument("--quick", action="store_true", help="few worlds: rough figures")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    worlds, changes = load(arguments.scenario) if arguments.scenario else (WORLDS, CHANGES)
    effort = QUICK if arguments.quick else FULL
    begin = time.monotonic()
    for line in check(arguments.seed):
        print(line)
    print(
        f"{effort.months} months of a world, each change {effort.months * effort.repeats} times; "
        f"ADWIN {effort.adwin_months} and {effort.adwin_changes}. "
        "Delays: median / 95th percentile.\n"
    )
    missed = False
    for world in worlds:
        for line in table(world, changes, measure(world, changes, effort, arguments.seed)):
            print(line, flush=True)
            missed = missed or line.startswith(("MISSED", "FASTER"))
    print(f"{(time.monotonic() - begin) / 60:.1f} min", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
