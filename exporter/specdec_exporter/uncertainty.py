"""How far a window's acceptance can be from the workload's: variance inflation.

Within one draft the variance of the accepted count J follows exactly from the positions. Across
drafts J is alike within a request, and requests outlive scrapes, so the variance of a window's sum
is a multiple of that: the inflation, or overdispersion. It is estimated in two ways, from the
target's own past and from the window itself, and for each sum that a figure is made of, since
positions differ in how much requests differ. Sums of seconds, which no law of positions binds, have
their error from the window alone. This module does arithmetic only.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import add, mul, sub
from typing import NamedTuple

from specdec_exporter.model import Window

REFERENCE_SECONDS = 4 * 3600.0
"""The least past, of time with drafts in it, that an inflation is taken from."""
_KEPT_SECONDS = 6 * 3600.0
_STEP_SECONDS = 5.0
_REFRESH_STEPS = 60
_MAX_SHARE = 12
"""A block is at most this fraction (one in twelve) of the past, or its variance is a guess."""
_GAP = 3.0
"""An interval so many times as long as the one before it is a gap in the scrapes."""
_MAX_COSINES = 32

Span = tuple[int, int]
"""Positions from the first up to but not the second: `(0, k)` is J, `(i, i + 1)` is position i."""


class Interval(NamedTuple):
    """What was counted between two scrapes."""

    seconds: float
    drafts: float
    per_position: tuple[float, ...]


def accepted_moments(per_position: Sequence[float], drafts: float) -> tuple[float, float]:
    """Mean and variance of the accepted count J of one draft, from counts by position.

    E[J] = Σ p_i and E[J²] = Σ (2i + 1) p_i with p_i the share of drafts accepted at position i,
    since J² = Σ_{i<J} (2i + 1). Exact, whatever the dependence between positions; and for the
    positions of any span, since what is accepted in it is nested as well.
    """
    mean = sum(per_position) / drafts
    square = sum((2 * i + 1) * count for i, count in enumerate(per_position)) / drafts
    return mean, max(0.0, square - mean * mean)


def active_intervals(window: Window) -> list[Interval]:
    """The scrape intervals of a window with drafts in them, engines together, in time order."""
    merged: dict[float, Interval] = {}
    for track in window.tracks:
        for before, after in pairwise(track):
            old, new = before.totals, after.totals
            drafts = (new.drafts or 0.0) - (old.drafts or 0.0)
            if drafts > 0:
                accepted = tuple(map(sub, new.accepted_per_position, old.accepted_per_position))
                one = Interval(after.t - before.t, drafts, accepted)
                other = merged.get(after.t)
                merged[after.t] = one if other is None else _together(one, other)
    return [merged[t] for t in sorted(merged)]


def _together(a: Interval, b: Interval) -> Interval:
    long, short = sorted((a.per_position, b.per_position), key=len, reverse=True)
    padded = short + (0.0,) * (len(long) - len(short))
    return Interval(max(a.seconds, b.seconds), a.drafts + b.drafts, tuple(map(add, long, padded)))


class DispersionReference:
    """What was accepted in a target's last hours, and the inflation that it shows.

    Holds at most six hours of one entry per five seconds, of time with drafts in it: an idle night
    or an outage says nothing. Start a new one when k changes.
    """

    def __init__(self) -> None:
        self._steps: deque[Interval] = deque()
        self._open: Interval | None = None
        self._usual = math.inf
        self._kept_seconds = 0.0
        self._added = 0
        self._past: _Past | None = None

    def add(self, interval: Interval) -> None:
        """Take in one scrape interval; one without drafts, or with a gap in it, is left out."""
        usual, self._usual = self._usual, interval.seconds
        if interval.drafts <= 0 or interval.seconds > _GAP * usual:
            return
        if self._open is not None:
            seconds = self._open.seconds + interval.seconds
            interval = _together(self._open, interval)._replace(seconds=seconds)
        self._open = interval
        # Scrapes jitter by milliseconds, and a bit early is as good a boundary.
        if interval.seconds < _STEP_SECONDS * 0.9:
            return
        self._open = None
        self._steps.append(interval)
        self._kept_seconds += interval.seconds
        while self._kept_seconds - self._steps[0].seconds > _KEPT_SECONDS:
            self._kept_seconds -= self._steps.popleft().seconds
        self._added += 1
        if self._added % _REFRESH_STEPS == 0:
            self._past = None

    @property
    def seconds(self) -> float:
        """The past that it holds, of time with drafts in it."""
        return self._kept_seconds

    def inflation(self, active_seconds: float, span: Span) -> float | None:
        """Variance inflation of the sum over so many seconds with drafts; at least 1.

        None until there are four hours of past. The sums over all overlapping blocks of that length
        are compared with what independent drafts would give. A length beyond a twelfth of the past
        is answered with that of a twelfth.
        """
        if self._kept_seconds < REFERENCE_SECONDS:
            return None
        n = len(self._steps)
        width = max(1, min(round(active_seconds * n / self._kept_seconds), n // _MAX_SHARE))
        if self._past is None:
            self._past = _Past(self._steps)
        return self._past.inflation(width, span)


class _Columns:
    """Scrape intervals by column: their drafts, and what was accepted at each position."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        _, drafts, per_position = zip(*intervals, strict=True)
        self.drafts: tuple[float, ...] = drafts
        self.total = sum(drafts)
        self._accepted = list(zip(*per_position, strict=True))

    def residuals(self, span: Span) -> tuple[float, list[float]]:
        """Variance within a draft, and what each interval accepted beyond the mean."""
        columns = self._accepted[slice(*span)]
        mean, variance = accepted_moments([sum(column) for column in columns], self.total)
        accepted = columns[0] if len(columns) == 1 else map(sum, zip(*columns, strict=True))
        return variance, [a - mean * d for a, d in zip(accepted, self.drafts, strict=True)]


class _Past:
    """Block sums of a past as it stood; what several lengths and spans ask for is summed once."""

    def __init__(self, steps: Iterable[Interval]) -> None:
        self._columns = _Columns(steps)
        self._volumes = list(accumulate(self._columns.drafts, initial=0.0))
        self._paths: dict[Span, tuple[float, list[float]]] = {}
        self._inflations: dict[tuple[int, Span], float | None] = {}

    def inflation(self, width: int, span: Span) -> float | None:
        if (width, span) not in self._inflations:
            self._inflations[width, span] = self._inflation(width, span)
        return self._inflations[width, span]

    def _inflation(self, width: int, span: Span) -> float | None:
        if span not in self._paths:
            variance, residuals = self._columns.residuals(span)
            self._paths[span] = variance, list(accumulate(residuals, initial=0.0))
        variance, path = self._paths[span]
        if variance <= 0:
            return None
        blocks = list(map(sub, path[width:], path))
        observed: float = sum(map(mul, blocks, blocks))
        independent = variance * (sum(self._volumes[width:]) - sum(self._volumes[:-width]))
        # The mean was fitted to the same past, which takes this share out of each variance.
        fitted = 1.0 - width / len(self._columns.drafts)
        return max(1.0, observed / independent / fitted)


def window_inflations(intervals: Sequence[Interval], spans: Iterable[Span]) -> dict[Span, float]:
    """Variance inflation by a window's own fluctuation, given four intervals with drafts or more.

    The residuals of the scrape intervals are projected on the first B cosines of the window and the
    squares averaged (equal-weighted cosine estimator; Müller 2004, Lazarus, Lewis, Stock and Watson
    2018, who choose B = 0.41 n^(2/3) for n intervals; here at most 32). Time runs in drafts, so
    that busy and quiet intervals weigh as they should. A span of which nothing can be said is left
    out.
    """
    if len(intervals) < 4:
        return {}
    columns = _Columns(intervals)
    total, drafts = columns.total, columns.drafts
    middles = [(end - d / 2) / total for end, d in zip(accumulate(drafts), drafts, strict=True)]
    count = max(1, min(_MAX_COSINES, int(0.41 * len(intervals) ** (2 / 3))))
    waves = [[math.cos(math.pi * b * u) for u in middles] for b in range(1, count + 1)]
    inflations = {}
    for span in spans:
        variance, residuals = columns.residuals(span)
        if variance > 0:
            power = sum(2 * sum(map(mul, residuals, wave)) ** 2 for wave in waves)
            inflations[span] = power / count / (total * variance)
    return inflations


class Row(NamedTuple):
    """One interval's part of a sum of seconds, of one engine."""

    t: float
    seconds: float
    """What was counted."""
    expected: float
    """What it is compared with: proportional to it but for chance."""


def stderr_of_sum(rows: Iterable[Row], ratio: float) -> float | None:
    """Standard error of the sum of what rows differ from their expectation times a ratio.

    The long-run variance by the cosines of `window_inflations`, in time that runs with what is
    expected. So few cosines leave it uncertain itself, and the factor from the normal to Student's
    distribution is in the result. Engines count together by time, since they share a machine. None
    of fewer than four times.
    """
    merged: dict[float, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for t, seconds, expected in rows:
        merged[t][0] += seconds - ratio * expected
        merged[t][1] += expected
    n = len(merged)
    if n < 4:
        return None
    residuals, expectations = zip(*(merged[t] for t in sorted(merged)), strict=True)
    total = sum(expectations)
    middles = [
        (end - e / 2) / total for end, e in zip(accumulate(expectations), expectations, strict=True)
    ]
    # Few intervals would have one or two cosines only, which say next to nothing.
    count = min(_MAX_COSINES, max(int(0.41 * n ** (2 / 3)), min(5, n // 2)))
    power = sum(
        2 * sum(map(mul, residuals, (math.cos(math.pi * b * u) for u in middles))) ** 2
        for b in range(1, count + 1)
    )
    return _student_factor(count) * math.sqrt(power / count)


def _student_factor(freedom: int) -> float:
    """The 97.5 % point of Student's distribution over that of the normal one.

    By the expansion in 1/ν (Abramowitz and Stegun 26.7.5); within 3 % from two degrees on.
    """
    z, n = 1.96, float(freedom)
    return 1.0 + (
        (z**2 + 1) / (4 * n)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * n**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * n**3)
    )
