"""Medians, their ratios, and how far both can be trusted. Arithmetic only; chance is an argument.

The interval is the percentile bootstrap of B. Efron ("Bootstrap Methods: Another Look at the
Jackknife", 1979), by prompt: repeats of a prompt are drawn anew among themselves, on each side
apart. It tells how well the ratio is known for these prompts. Other prompts would have another
ratio; of that the range of the ratios by prompt gives an idea, and no interval does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

RESAMPLES = 1000
CONFIDENCE = 0.95

Groups = Mapping[str, Sequence[float]]
"""Values by prompt. Infinite is "never came"."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The medians of two sides, and the second over the first."""

    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    """Of the 95 % interval of the ratio; None where nothing was repeated."""
    high: float | None


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing or where it is infinite."""
    return _finite(statistics.median(values)) if values else None


def ratio(a: float | None, b: float | None) -> float | None:
    """Of the second to the first; None where either is unknown or the first is not positive."""
    return None if a is None or b is None or a <= 0 else b / a


def ratio_of_medians(a: Groups, b: Groups, chance: Random, resamples: int = RESAMPLES) -> Ratio:
    """The ratio of the medians over all values of each side, with its bootstrap interval.

    Args:
        a: values of the first side, by prompt.
        b: of the second.
        chance: where the resampling draws from.
        resamples: how often it draws.
    """
    median_a, median_b = median(_all(a)), median(_all(b))
    value = ratio(median_a, median_b)
    low = high = None
    if value is not None and any(len(group) > 1 for side in (a, b) for group in side.values()):
        drawn = sorted(
            math.inf if r is None else r
            for r in (
                ratio(median(_draw(a, chance)), median(_draw(b, chance))) for _ in range(resamples)
            )
        )
        tail = (1 - CONFIDENCE) / 2
        low, high = _finite(quantile(drawn, tail)), _finite(quantile(drawn, 1 - tail))
    return Ratio(median_a, median_b, value, low, high)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between the two nearest by linear interpolation."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    rest = place - below
    if rest == 0:
        return ordered[below]
    return (1 - rest) * ordered[below] + rest * ordered[below + 1]


def _all(groups: Groups) -> list[float]:
    return [value for group in groups.values() for value in group]


def _draw(groups: Groups, chance: Random) -> list[float]:
    return [
        value for group in groups.values() if group for value in chance.choices(group, k=len(group))
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
