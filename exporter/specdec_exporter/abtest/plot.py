"""Plots as inline SVG: plain shapes with classes, coloured by the page's own style sheet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to places on the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value stands."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from low to high, both ends included where they are round."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def round_numbers(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis that hold all values and are round."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    inner = ticks(low, high)
    step = inner[1] - inner[0] if len(inner) > 1 else high - low
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def short(value: float) -> str:
    """A number on an axis."""
    return f"{value:.6g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def element(tag: str, _text: str | None = None, **attributes: object) -> Markup:
    """One element; `_` at the end of an attribute's name is left out, elsewhere it is a dash."""
    told = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _attribute(value))
        for name, value in attributes.items()
    )
    # The tag is written in the code, never data.
    if _text is None:
        return Markup(f"<{tag}{told}/>")
    return Markup(f"<{tag}{told}>{escape(_text)}</{tag}>")


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def dot(x: float, y: float, r: float, class_: str, title: str | None = None) -> Markup:
    """A dot, and what it is when pointed at."""
    return element(
        "circle",
        None if title is None else element("title", title),
        cx=x,
        cy=y,
        r=r,
        class_=class_,
    )


def text(x: float, y: float, words: str, class_: str = "") -> Markup:
    """Words with their baseline at y."""
    return element("text", words, x=x, y=y, class_=class_)


def svg(width: float, height: float, title: str, parts: Iterable[Markup]) -> Markup:
    """A whole plot."""
    body = Markup("\n").join(parts)
    head = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">\n').format(
        _attribute(width), _attribute(height), title
    )
    return head + body + Markup("\n</svg>")


def line_plot(
    title: str,
    unit: str,
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    marks: Sequence[tuple[int, str]] = (),
    from_zero: bool = False,
) -> Markup:
    """Medians by name joined by a line, with each value as a dot.

    Args:
        title: above the plot.
        unit: of the values.
        names: along the axis, evenly spaced.
        values: of each name.
        marks: indices of names, and what is to be said of them.
        from_zero: whether the axis begins at 0.
    """
    width, height, left, right, top, bottom = 420.0, 280.0, 52.0, 16.0, 52.0, 44.0
    known = [value for group in values for value in group]
    if not known:
        return svg(width, height, title, [text(left, top, "no values", "soft")])
    low, high = round_numbers(0.0 if from_zero else min(known), max(known))
    y = Scale(low, high, height - bottom, top)
    step = (width - left - right) / len(names)
    xs = [left + step * (i + 0.5) for i in range(len(names))]
    parts = [text(0, 16, title, "title"), text(0, 34, unit, "soft")]
    for tick in ticks(low, high, 5):
        parts += [
            line(left, y(tick), width - right, y(tick), "grid"),
            text(left - 8, y(tick) + 4, short(tick), "end soft"),
        ]
    for i, words in marks:
        parts += [
            line(xs[i], top - 6, xs[i], height - bottom, "mark"),
            text(xs[i], top - 10, words, "middle good"),
        ]
    points = " ".join(
        f"{x:.1f},{y(statistics.median(group)):.1f}"
        for x, group in zip(xs, values, strict=True)
        if group
    )
    parts.append(element("polyline", points=points, class_="joined"))
    for x, name, group in zip(xs, names, values, strict=True):
        parts.append(text(x, height - bottom + 20, name, "middle"))
        parts += [dot(x, y(value), 4, "b", f"{name}: {value:.4g} {unit}") for value in group]
    return svg(width, height, title, parts)


def _attribute(value: object) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
