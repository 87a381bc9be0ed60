"""What a draft position costs here, and the speed that each k promises.

The step time of an engine is modelled as a_k(c) + b·u, with c requests in decode and u prompt
tokens computed in the step. It is kept by server start, because starts of one server differ: how
much is the standard error of what the next start will cost. Arithmetic only; nothing here knows a
clock, and every value is frozen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

LEVEL_RATIO = 1.25
"""Concurrencies within about this factor of each other make one level."""
REACH = 0.25
"""How far beyond its ends, as a share of them, a curve is believed."""
STARTS_KEPT = 6
"""Server starts that are remembered at each k; the oldest go first."""
MEMORY_SECONDS = 3600.0
"""A level's mean is over about so much time, so that it follows what changes."""
_WEIGHT_SECONDS = 600.0
"""A start that ran for longer says no more of the next one."""
_LEAST_T = 2.0
"""Standard errors that b must be above 0 to be believed."""
_ROUNDS = 1
_KNOWN_STEP_STDERR = 0.01
"""Relative, of a curve that was measured in the start that is running, and of k = 0, whose starts
differ by so much."""


class BaselineCurve(Protocol):
    """What is needed of a baseline."""

    def tpot_seconds(self, c: float) -> float | None:
        """Seconds per token without speculation, c requests in decode; None where not known."""
        ...


class CostAssumptions(Protocol):
    """What is assumed where nothing has been measured; read from the settings."""

    @property
    def start_spread(self) -> float:
        """Relative standard deviation between starts, before several have been seen."""
        ...

    @property
    def assumed_position_cost(self) -> float:
        """Of a step without speculation, for each draft token."""
        ...

    @property
    def assumed_cost_stderr(self) -> float:
        """Relative standard error of a step time that nobody has measured."""
        ...


class Sample(NamedTuple):
    """One steady stretch of measuring."""

    k: int
    start: float
    """Unix seconds at which the server started: what tells starts apart."""
    seconds: float
    decode_concurrency: float
    """Of one engine."""
    step_seconds: float
    prefill_tokens_per_step: float | None = None
    """Prompt tokens computed in a step of the engine; None where not known."""


@dataclass(frozen=True, slots=True)
class Cell:
    """All samples of one k, one start and one level of concurrency: weighted means and moments."""

    k: int
    start: float
    level: int
    """The number of its level of concurrency."""
    seconds: float
    decode_concurrency: float
    step_seconds: float
    prefill_tokens_per_step: float
    """0 where not known."""
    samples: int = 1
    moments: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Weighted sums of squares about the means: prefill², prefill × step, step²."""


class Step(NamedTuple):
    """A step time."""

    seconds: float
    stderr: float
    """Relative."""
    extrapolated: bool


@dataclass(frozen=True)
class CostModel:
    """Step times by k, start and concurrency; `observe` gives the next one."""

    cells: tuple[Cell, ...] = ()

    def observe(self, sample: Sample) -> CostModel:
        """Take in one sample."""
        new = Cell(
            k=sample.k,
            start=sample.start,
            level=_level(sample.decode_concurrency),
            seconds=sample.seconds,
            decode_concurrency=sample.decode_concurrency,
            step_seconds=sample.step_seconds,
            prefill_tokens_per_step=sample.prefill_tokens_per_step or 0.0,
        )
        cells = [new]
        for cell in self.cells:
            if cell.k == new.k and cell.start == new.start and cell.level == new.level:
                cells[0] = _merge(cell, new)
            else:
                cells.append(cell)
        starts = sorted({cell.start for cell in cells if cell.k == new.k})
        kept = set(starts[-STARTS_KEPT:]) | {new.start}
        return CostModel(tuple(c for c in cells if c.k != new.k or c.start in kept))

    @property
    def measured(self) -> tuple[int, ...]:
        """Every k that has been measured, in order."""
        return tuple(self._curves)

    def starts(self, k: int) -> int:
        """In how many starts k has been measured."""
        return len(self._curves[k].effects) if k in self._curves else 0

    def measured_seconds(self, k: int, start: float) -> float:
        """How long k has been measured since that start."""
        return sum(c.seconds for c in self.cells if c.k == k and c.start == start)

    @cached_property
    def prefill_seconds_per_token(self) -> float:
        """b, by least squares within the cells; 0 where it cannot be told from nothing.

        Between cells k and the load differ too, so only what varies within one says anything.
        """
        uu, us, ss = (sum(cell.moments[i] for cell in self.cells) for i in range(3))
        freedom = sum(cell.samples - 1 for cell in self.cells) - 1
        if uu <= 0 or us <= 0 or freedom < 3:
            return 0.0
        b = us / uu
        stderr = math.sqrt(max(0.0, ss - b * us) / freedom / uu)
        return b if b > _LEAST_T * stderr else 0.0

    @cached_property
    def _curves(self) -> dict[int, _Curve]:
        b = self.prefill_seconds_per_token
        by_k: dict[int, list[Cell]] = {}
        for cell in sorted(self.cells, key=attrgetter("k", "start", "decode_concurrency")):
            by_k.setdefault(cell.k, []).append(cell)
        return {k: _fit(tuple(cells), b) for k, cells in by_k.items()}

    @cached_property
    def _scatter(self) -> tuple[float, int]:
        """Squares of what starts with speculation are off their mean by, and their freedom."""
        effects = [curve.effects for k, curve in self._curves.items() if k > 0]
        squares = sum(e * e for by_start in effects for e in by_start.values())
        return squares, sum(len(by_start) - 1 for by_start in effects)

    def spread(self, assumed: float) -> float:
        """Relative standard deviation of a step time between starts with speculation.

        The assumed one counts as much as one pair of starts.
        """
        squares, freedom = self._scatter
        return math.sqrt((assumed * assumed + squares) / (1 + freedom))

    def step(
        self,
        k: int,
        c: float,
        assume: CostAssumptions,
        *,
        start: float | None = None,
        baseline: BaselineCurve | None = None,
    ) -> Step | None:
        """The step time without prefill, c requests in decode on one engine.

        Args:
            k: draft tokens.
            c: concurrency.
            assume: what stands in for measurements.
            start: of the server, to have its own step time; None is of a start to come.
            baseline: in place of k = 0, where that has not been measured.

        Returns:
            Interpolated between the ks and concurrencies measured; None without any.
        """
        curves = self._curves
        if k in curves:
            curve = curves[k]
            seconds, extrapolated = self._at(k, c)
            if start in curve.effects:
                own = seconds * math.exp(curve.effects[start])
                return Step(own, _KNOWN_STEP_STDERR, extrapolated)
            spread = self.spread(assume.start_spread) if k else _KNOWN_STEP_STDERR
            stderr = spread * math.sqrt(1.0 + 1.0 / max(1, len(curve.effects)))
            return Step(seconds, _with_guess(stderr, extrapolated, assume), extrapolated)
        known = {k: self._at(k, c)[0] for k in curves}
        if baseline is not None and 0 not in known and (tpot := baseline.tpot_seconds(c)):
            known[0] = tpot
            if k == 0:
                return Step(tpot, _KNOWN_STEP_STDERR, extrapolated=False)
        if not known:
            return None
        spread = self.spread(assume.start_spread) * math.sqrt(2.0)
        return Step(_between_ks(k, known, assume), _with_guess(spread, True, assume), True)

    def _at(self, k: int, c: float) -> tuple[float, bool]:
        """A step time of k at c, and whether c is beyond what was measured at this k.

        Beyond, the curve follows that of the nearest k that has been measured there.
        """
        curve = self._curves[k]
        if curve.covers(c):
            return curve.at(c), False
        edge = min(max(c, curve.concurrencies[0]), curve.concurrencies[-1])
        others = sorted(
            (other for other in self._curves if other != k), key=lambda other: abs(other - k)
        )
        for other in others:
            near = self._curves[other]
            if near.covers(c) and near.covers(edge):
                return curve.at(edge) * near.at(c) / near.at(edge), True
        return curve.at(c), True

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"cells": [asdict(cell) for cell in self.cells]}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> CostModel:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is of another form.
        """
        cells = []
        for plain in value["cells"]:
            uu, us, ss = (float(m) for m in plain["moments"])
            cell = Cell(**{**plain, "moments": (uu, us, ss)})
            if not (cell.seconds > 0 and cell.decode_concurrency > 0 and cell.step_seconds > 0):
                raise ValueError("a step time that is none")
            cells.append(cell)
        return CostModel(tuple(cells))


def _level(c: float) -> int:
    return round(math.log(max(c, 1e-3)) / math.log(LEVEL_RATIO))


def _merge(old: Cell, new: Cell) -> Cell:
    # Older evidence is thinned out, its moments with it.
    keep = min(1.0, max(0.0, MEMORY_SECONDS - new.seconds) / old.seconds)
    weight = old.seconds * keep
    total = weight + new.seconds
    share = new.seconds / total
    du = new.prefill_tokens_per_step - old.prefill_tokens_per_step
    ds = new.step_seconds - old.step_seconds
    uu, us, ss = (m * keep for m in old.moments)
    cross = weight * share
    return Cell(
        k=new.k,
        start=new.start,
        level=new.level,
        seconds=total,
        decode_concurrency=old.decode_concurrency
        + share * (new.decode_concurrency - old.decode_concurrency),
        step_seconds=old.step_seconds + share * ds,
        prefill_tokens_per_step=old.prefill_tokens_per_step + share * du,
        samples=min(old.samples, 1000) + 1,
        moments=(uu + cross * du * du, us + cross * du * ds, ss + cross * ds * ds),
    )


class _Curve(NamedTuple):
    """The step time of one k over concurrency, and how far each start is from it (logarithms)."""

    concurrencies: tuple[float, ...]
    seconds: tuple[float, ...]
    effects: Mapping[float | None, float]

    def covers(self, c: float) -> bool:
        first, last = self.concurrencies[0], self.concurrencies[-1]
        return first * (1 - REACH) <= c <= last * (1 + REACH)

    def at(self, c: float) -> float:
        """Linear between the levels, level below them, and beyond them by the last slope."""
        x, y = self.concurrencies, self.seconds
        if len(x) == 1 or c <= x[0]:
            return y[0]
        i = min(bisect_left(x, c), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        if c > x[-1]:
            slope = max(0.0, slope)  # more load makes no step cheaper: the fall is chance
            return y[-1] + slope * (c - x[-1])
        return y[i - 1] + slope * (c - x[i - 1])


@lru_cache(maxsize=64)
def _fit(cells: tuple[Cell, ...], b: float) -> _Curve:
    """Levels and starts as a two-way table of logarithms, by alternating means.

    Starts have been seen at different loads; without this the curve would have a step where one
    start ends and another begins.
    """
    rows = [
        (
            cell.level,
            cell.start,
            math.log(max(cell.step_seconds - b * cell.prefill_tokens_per_step, 1e-9)),
            min(cell.seconds, _WEIGHT_SECONDS),
        )
        for cell in cells
    ]
    levels: dict[int, float] = {}
    effects: dict[float | None, float] = {}
    # Start by start, each placed by the levels that it shares with those before it.
    for start in dict.fromkeys(cell.start for cell in cells):
        own = [(level, y, w) for level, s, y, w in rows if s == start]
        shared = [(0, y - levels[level], w) for level, y, w in own if level in levels]
        effect = effects[start] = _means(shared).get(0, 0.0)
        levels = {level: y - effect for level, y, _ in own} | levels
    for _ in range(_ROUNDS if len(effects) > 1 else 0):
        levels = _means((level, y - effects[start], w) for level, start, y, w in rows)
        effects = _means((start, y - levels[level], w) for level, start, y, w in rows)
    # A start to come is like the mean of those that were.
    centre = sum(effects.values()) / len(effects)
    effects = {start: e - centre for start, e in effects.items()}
    levels = {level: y + centre for level, y in levels.items()}
    at = _means((cell.level, cell.decode_concurrency, cell.seconds) for cell in cells)
    order = sorted(levels, key=lambda level: at[level])
    return _Curve(
        tuple(at[level] for level in order),
        tuple(math.exp(levels[level]) for level in order),
        effects,
    )


def _means(rows: Iterable[tuple[Any, float, float]]) -> dict[Any, float]:
    sums: dict[Any, tuple[float, float]] = {}
    for key, value, weight in rows:
        total, weights = sums.get(key, (0.0, 0.0))
        sums[key] = total + value * weight, weights + weight
    return {key: total / weights for key, (total, weights) in sums.items()}


def _with_guess(stderr: float, guessed: bool, assume: CostAssumptions) -> float:
    return math.hypot(stderr, assume.assumed_cost_stderr) if guessed else stderr


def _between_ks(k: int, known: Mapping[int, float], assume: CostAssumptions) -> float:
    """A step time at a k that was not measured: linear in k, and by the assumed cost beyond one."""
    ks = sorted(known)
    for low, high in pairwise(ks):
        if low < k < high or (k > high == ks[-1]):
            slope = max(0.0, (known[high] - known[low]) / (high - low))
            return known[high] + slope * (k - high)
    nearest = ks[0] if k < ks[0] else ks[-1]
    cost = assume.assumed_position_cost
    return known[nearest] * (1 + cost * k) / (1 + cost * nearest)


EXTRAPOLATION_STDERR = 0.25
"""Relative, of an extrapolated position on top of what it is extrapolated from."""


class Acceptance(NamedTuple):
    """Position acceptance ratios, from position 0 on."""

    ratios: tuple[float, ...]
    stderrs: tuple[float, ...]
    drafts: float = 0.0


def extrapolate(
    seen: Acceptance, k: int, conditional: Sequence[float] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Position acceptance ratios of k positions, and their standard errors.

    What was not seen is p̂_1 = p_0² and p̂_j = p_(j−1)·(p_(j−1)/p_(j−2)).

    Args:
        seen: at least position 0.
        k: positions wanted.
        conditional: p_j/p_(j−1) of positions seen earlier, from j = 1 on; taken before any formula.
    """
    p, relative = list(seen.ratios[:k]), []
    for value, stderr in zip(p, seen.stderrs, strict=False):
        relative.append(stderr / value if value > 0 else 0.0)
    for j in range(len(p), k):
        ratio = p[-1] / p[-2] if j > 1 and p[-2] > 0 else p[-1]
        error = math.hypot(relative[-1], relative[-1] if j == 1 else relative[-2])
        if j <= len(conditional):
            ratio, error = conditional[j - 1], 0.0
        p.append(p[-1] * min(1.0, ratio))
        relative.append(math.hypot(relative[-1] + error, EXTRAPOLATION_STDERR))
    return tuple(p), tuple(a * b for a, b in zip(p, relative, strict=True))


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one k promises."""

    k: int
    speedup: float
    """Tokens a second against no speculation, at the given loads."""
    stderr: float
    speed_stderr: float
    """Relative, of the step time at this k and what its drafts bring: without the error of the step
    without speculation, which two ks share."""
    extrapolated: bool


Load = Sequence[tuple[float, float]]
"""Concurrency of an engine and the share of tokens decoded at it."""


def predict(
    costs: CostModel,
    acceptance: tuple[Sequence[float], Sequence[float]],
    load: Load,
    ks: Iterable[int],
    assume: CostAssumptions,
    *,
    running: tuple[int, float] | None = None,
    baseline: BaselineCurve | None = None,
    coverage: float = 1.0,
    prefill_tokens_per_token: float = 0.0,
) -> tuple[Prediction, ...]:
    """The speedup of each k: Σ_c w_c (1 + Σ_{i<k} p̂_i) / R(k, c), R = a_k/a_0 with prefill in both.

    Args:
        costs: what has been measured.
        acceptance: ratios and standard errors of at least as many positions as the deepest k.
        load: the mix; shares need not add up to 1.
        ks: which to predict.
        assume: what stands in for measurements.
        running: k and start of the server, whose own step time is used; others would be new starts.
        baseline: in place of k = 0, where that has not been measured.
        coverage: drafts per decode step; steps without a draft bring one token.
        prefill_tokens_per_token: prompt tokens computed for each decoded token of the engine.

    Returns:
        One for each k, in their order; empty where no step time at all is known, or no load.
    """
    ratios, stderrs = acceptance
    total = sum(weight for _, weight in load)
    if total <= 0:
        return ()
    b = costs.prefill_seconds_per_token * prefill_tokens_per_token
    withouts = [costs.step(0, c, assume, baseline=baseline) for c, _ in load]
    predictions = []
    for k in ks:
        length = 1.0 + coverage * sum(ratios[:k])
        start = running[1] if running and running[0] == k else None
        value = error = own_error = 0.0
        extrapolated = k > 0 and k not in costs.measured
        for (c, weight), without in zip(load, withouts, strict=True):
            step = costs.step(k, c, assume, start=start, baseline=baseline)
            if step is None or without is None:
                return ()
            prefill = b * max(1.0, c)
            saved = (without.seconds + prefill) / (step.seconds + prefill * length)
            speedup = length * saved * weight / total
            value += speedup
            # The same start, and the same guess, is behind all loads: errors add up.
            own_error += speedup * step.stderr
            error += speedup * (math.hypot(step.stderr, without.stderr) if k else 0.0)
            extrapolated |= step.extrapolated
        drafted = coverage * sum(stderrs[:k]) / length
        predictions.append(
            Prediction(
                k=k,
                speedup=value,
                stderr=math.hypot(error, drafted * value),
                speed_stderr=math.hypot(own_error / value, drafted),
                extrapolated=extrapolated,
            )
        )
    return tuple(predictions)


def last_position_gain(predictions: Iterable[Prediction], k: int) -> tuple[float, float] | None:
    """What the deepest of k positions brings to the speed beyond its cost, and its standard error.

    As a ratio, speedup(k) / speedup(k − 1) − 1. None where either stands on anything that was not
    measured, and below k = 2: the first position is all of speculation, which the net gain judges.
    """
    measured = {p.k: p for p in predictions if not p.extrapolated}
    if k < 2 or not {k - 1, k} <= measured.keys():
        return None
    here, without = measured[k], measured[k - 1]
    gain = here.speedup / without.speedup - 1.0
    return gain, math.hypot(here.speed_stderr, without.speed_stderr)
