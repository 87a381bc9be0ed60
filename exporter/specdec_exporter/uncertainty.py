"""How far a window's acceptance can be from the workload's: variance inflation.

Within one draft the variance of the accepted count J follows exactly from the positions. Across
drafts J is alike within a request, and requests outlive scrapes, so the variance of a window's sum
is a multiple of that: the inflation, or overdispersion. It is estimated in two ways, from the
target's own past and from the window itself. This module does arithmetic only.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from specdec_exporter.model import Counters, Window

REFERENCE_SECONDS = 4 * 3600.0
"""The least past that an inflation is taken from."""
_KEPT_SECONDS = 6 * 3600.0
_STEP_SECONDS = 5.0
_REFRESH_STEPS = 60
_MAX_SHARE = 12
"""A block is at most this fraction (one in twelve) of the past, or its variance is a guess."""


def accepted_moments(per_position: Sequence[float], drafts: float) -> tuple[float, float]:
    """Mean and variance of the accepted count J of one draft, from counts by position.

    E[J] = Σ p_i and E[J²] = Σ (2i + 1) p_i with p_i the share of drafts accepted at position i,
    since J² = Σ_{i<J} (2i + 1). Exact, whatever the dependence between positions.
    """
    mean = sum(per_position) / drafts
    square = sum((2 * i + 1) * count for i, count in enumerate(per_position)) / drafts
    return mean, max(0.0, square - mean * mean)


class DispersionReference:
    """The accepted counts of a target's last hours, and the inflation that they show.

    Holds at most six hours of one entry per five seconds. Give it the increases of each scrape
    interval; start a new one when k changes.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float, float]] = deque()
        self._open: tuple[float, Counters] | None = None
        self._kept_seconds = 0.0
        self._added = 0
        self._cache: dict[int, float] = {}

    def add(self, seconds: float, increase: Counters) -> None:
        """Take in what was counted in one scrape interval of `seconds`."""
        if self._open is not None:
            seconds, increase = self._open[0] + seconds, self._open[1] + increase
        self._open = (seconds, increase)
        # Scrapes jitter by milliseconds, and half a step is as good a boundary.
        if seconds < _STEP_SECONDS * 0.9:
            return
        self._open = None
        square = sum((2 * i + 1) * count for i, count in enumerate(increase.accepted_per_position))
        step = (seconds, increase.drafts or 0.0, sum(increase.accepted_per_position), square)
        self._steps.append(step)
        self._kept_seconds += seconds
        while self._kept_seconds - self._steps[0][0] > _KEPT_SECONDS:
            self._kept_seconds -= self._steps.popleft()[0]
        self._added += 1
        if self._added % _REFRESH_STEPS == 0:
            self._cache.clear()

    @property
    def seconds(self) -> float:
        """The past that it holds."""
        return self._kept_seconds

    def inflation(self, window_seconds: float) -> float | None:
        """Variance inflation of a sum over `window_seconds`; at least 1.

        None until there are four hours of past with drafts in them. The sums over all overlapping
        blocks of that length are compared with what independent drafts would give.
        """
        if self._kept_seconds < REFERENCE_SECONDS:
            return None
        n = len(self._steps)
        width = round(window_seconds * n / self._kept_seconds)
        width = max(1, min(width, n // _MAX_SHARE))
        if width not in self._cache:
            value = _block_inflation(list(self._steps), width)
            if value is None:
                return None
            self._cache[width] = value
        return self._cache[width]


def _block_inflation(steps: list[tuple[float, float, float, float]], width: int) -> float | None:
    drafts = sum(d for _, d, _, _ in steps)
    accepted = sum(j for _, _, j, _ in steps)
    square = sum(q for _, _, _, q in steps)
    if drafts <= 0:
        return None
    mean = accepted / drafts
    variance = square / drafts - mean * mean
    if variance <= 0:
        return None
    residuals = list(accumulate((j - mean * d for _, d, j, _ in steps), initial=0.0))
    volumes = list(accumulate((d for _, d, _, _ in steps), initial=0.0))
    ends = range(width, len(residuals))
    observed = sum((residuals[i] - residuals[i - width]) ** 2 for i in ends)
    independent = variance * sum(volumes[i] - volumes[i - width] for i in ends)
    # The mean was fitted to the same past, which takes this share out of every block's variance.
    fitted = 1.0 - width / len(steps)
    return max(1.0, observed / independent / fitted)


def window_inflation(window: Window) -> float | None:
    """Variance inflation by the window's own fluctuation, for windows of four intervals and more.

    The residuals of the scrape intervals are projected on the first B cosines of the window and the
    squares averaged (equal-weighted cosine estimator; Müller 2004, Lazarus, Lewis, Stock and Watson
    2018, who choose B = 0.41 n^(2/3) for n intervals). Time runs in drafts, so that busy and quiet
    intervals weigh as they should. None where nothing can be said.
    """
    if not window.num_speculative_tokens:
        return None
    drafts: dict[float, float] = defaultdict(float)
    accepted: dict[float, float] = defaultdict(float)
    for track in window.tracks:
        sums = [(p.t, p.totals.drafts or 0.0, sum(p.totals.accepted_per_position)) for p in track]
        for (_, d0, j0), (t, d1, j1) in pairwise(sums):
            drafts[t] += d1 - d0
            accepted[t] += j1 - j0
    series = [(drafts[t], accepted[t]) for t in sorted(drafts) if drafts[t] > 0]
    if len(series) < 4:
        return None
    increase = window.increase
    total = sum(d for d, _ in series)
    mean, variance = accepted_moments(increase.accepted_per_position, total)
    if variance <= 0:
        return None
    residuals = [j - mean * d for d, j in series]
    ends = list(accumulate(d for d, _ in series))
    middles = [(end - d / 2) / total for end, (d, _) in zip(ends, series, strict=True)]
    count = max(1, int(0.41 * len(series) ** (2 / 3)))
    power = 0.0
    for b in range(1, count + 1):
        angle = math.pi * b
        projection = sum(map(mul, residuals, [math.cos(angle * u) for u in middles]))
        power += 2 * projection * projection
    return power / count / (total * variance)
