"""Where the lines and bars of small pictures run; the templates draw them as SVG.

Pictures stretch to whatever width they are given, so x and y are of a fixed box, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 240.0, 48.0
"""Of the box of a plot."""
_PADDING = 3.0

Points = Sequence[tuple[float, float | None]]
"""Time in seconds, and the value where it is known."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One or two lines over time, with what they are to be compared with."""

    paths: tuple[str, ...]
    """Of SVG; a line breaks where its value is not known."""
    band: tuple[float, float] | None
    """Top and height of what is as it should be."""
    limit: float | None
    """The y of the limit."""


def plot(
    lines: Sequence[Points],
    *,
    begin: float,
    end: float,
    gap: float,
    include: Sequence[float] = (),
    band: tuple[float, float] | None = None,
    limit: float | None = None,
) -> Plot | None:
    """The lines between two times; None where there is nothing to draw.

    Args:
        lines: to be drawn over each other.
        begin: time at the left edge.
        end: time at the right edge.
        gap: seconds between two points from which on no line joins them.
        include: values that must be in the picture beside those of the lines, band and limit.
        band: values that are as they should be, the lower one first.
        limit: a value not to be passed.
    """
    values = [value for line in lines for _, value in line if value is not None]
    if not values or end <= begin:
        return None
    shown: list[float] = [*values, *include, *(band or ()), *(() if limit is None else (limit,))]
    low, high = min(shown), max(shown)
    # A flat line runs through the middle, and noise in the last digit is no mountain.
    least = max(abs(low), abs(high)) / 20 or 1.0
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2

    def x(t: float) -> float:
        return WIDTH * (t - begin) / (end - begin)

    def y(value: float) -> float:
        return HEIGHT - _PADDING - (HEIGHT - 2 * _PADDING) * (value - low) / (high - low)

    def path(line: Points) -> str:
        parts: list[str] = []
        before: float | None = None
        for t, value in line:
            if value is None:
                before = None
                continue
            joined = before is not None and t - before <= gap
            # A point by itself is a line to where it is, which round ends make a dot.
            parts.append(
                f"L{x(t):.0f} {y(value):.1f}" if joined else f"M{x(t):.0f} {y(value):.1f}h0"
            )
            before = t
        return "".join(parts)

    return Plot(
        paths=tuple(path(line) for line in lines),
        band=None if band is None else (y(band[1]), y(band[0]) - y(band[1])),
        limit=None if limit is None else y(limit),
    )


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value on a scale, its interval, what it should be and its limit; percent of the width."""

    value: float
    interval: tuple[float, float]
    """Begin and width."""
    band: tuple[float, float] | None
    """Begin and width."""
    limit: float | None


def gauge(
    value: float,
    scale: tuple[float, float],
    *,
    half_width: float | None = None,
    band: tuple[float, float] | None = None,
    limit: float | None = None,
) -> Gauge:
    """A value on a scale; what lies beyond an end is drawn at that end."""

    def x(at: float) -> float:
        return 100 * min(max((at - scale[0]) / (scale[1] - scale[0]), 0.0), 1.0)

    def span(low: float, high: float) -> tuple[float, float]:
        return x(low), x(high) - x(low)

    half = half_width or 0.0
    return Gauge(
        value=x(value),
        interval=span(value - half, value + half),
        band=None if band is None else span(*band),
        limit=None if limit is None else x(limit),
    )
