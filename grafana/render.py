"""Draws a board with the answers of a Prometheus: a picture for the README, and no Grafana.

It reads a board's JSON and knows of Grafana's ways as much as these boards use: the grid, display
names, overrides, mappings, thresholds, merged tables. `draw` asks through a function, so it knows
nothing of HTTP either.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, pairwise
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.textpath import TextPath
from PIL import Image

from grafana.query import Ask, Choice, Json, Query, filled_in, panels, queries

_Point = TypeVar("_Point", bound=tuple[float, ...])
"""What begins with a time."""

WIDTH, UNIT, GAP, MARGIN, HEAD = 1280, 30, 8, 12, 62
"""Pixels: the width of a board, a unit of height, and what is between panels and around them."""
BACKGROUND, CARD, EDGE, INK, FAINT, GRID = (
    "#f4f5f5",
    "#ffffff",
    "#dcdfe3",
    "#22262b",
    "#6a717a",
    "#e9ebee",
)
COLORS = {
    "green": "#3f9142",
    "dark-yellow": "#a87900",
    "orange": "#d9660a",
    "red": "#cf2a3c",
    "blue": "#2f6fd0",
    "purple": "#8e44ad",
    "text": INK,
}
PALETTE = (
    "#2f6fd0",
    "#d9660a",
    "#3f9142",
    "#8e44ad",
    "#a87900",
    "#2a9d8f",
    "#c71585",
    "#7a7a7a",
    "#1b4f72",
)
DASHES: Mapping[str, Any] = {"solid": "-", "dash": (0, (5, 3)), "dot": (0, (1, 2))}
MOST_COLORS = 128
"""Of a picture, which keeps its file small."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series of a graph, with its name and what is set for it."""

    name: str
    labels: Mapping[str, str]
    values: Sequence[tuple[float, float]]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """What is asked, of when, and with what chosen."""

    ask: Ask
    choice: Choice
    start: float
    end: float
    step: float

    def series(self, panel: Json, query: Query) -> list[Series]:
        """The answer to one query, under the names that Grafana would show."""
        expr = filled_in(query.expr, self.choice, rate_seconds=120, step=self.step)
        found = []
        for labels, values in self.ask(
            expr, self.start, self.end, None if query.instant else self.step
        ):
            name = query.legend
            for label in {*labels, "engine", "k", "mode", "reason", "rule"}:
                name = name.replace(f"{{{{{label}}}}}", labels.get(label, ""))
            found.append(Series(name, labels, values, _settings(panel, name, query.ref)))
        return found


def draw(
    board: Json, ask: Ask, choice: Choice, start: float, end: float, *, scale: float = 1.5
) -> bytes:
    """A PNG of a board.

    Args:
        board: as its file has it.
        ask: the queries' answers.
        choice: a value for each of the board's variables.
        start: of the time range, unix seconds.
        end: of the time range, unix seconds.
        scale: pixels of the picture for each of a screen 1280 wide.
    """
    mpl.rcParams["font.family"] = ["DejaVu Sans"]
    view = View(ask, choice, start, end, step=max(15.0, 15.0 * round((end - start) / 300 / 15)))
    units = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    height = HEAD + units * (UNIT + GAP) + MARGIN
    figure = Figure(figsize=(WIDTH / 100, height / 100), dpi=100 * scale, facecolor=BACKGROUND)
    sheet = _axes(figure, (0, 0, WIDTH, height), height)
    sheet.set_xlim(0, WIDTH)
    sheet.set_ylim(height, 0)
    sheet.axis("off")
    _head(sheet, board, view)
    marks = _marks(board, view)
    for panel in board["panels"]:
        if panel["type"] == "row":
            y = HEAD + panel["gridPos"]["y"] * (UNIT + GAP)
            heading = f"▾ {panel['title']}"
            sheet.text(MARGIN + 2, y + 20, heading, size=9.5, weight="bold", color=INK)
    for panel in panels(board):
        box = _box(panel["gridPos"])
        _card(sheet, box, panel["title"])
        _DRAWN[panel["type"]](figure, sheet, box, panel, view, marks, height)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", facecolor=BACKGROUND)
    picture = Image.open(drawn)
    small = picture.convert("RGB").quantize(MOST_COLORS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    small.save(out, "PNG", optimize=True)
    return out.getvalue()


Box = tuple[float, float, float, float]
"""Left, top, width and height, pixels."""


def _box(place: Mapping[str, int]) -> Box:
    column = (WIDTH - 2 * MARGIN + GAP) / 24
    return (
        MARGIN + place["x"] * column,
        HEAD + place["y"] * (UNIT + GAP),
        place["w"] * column - GAP,
        place["h"] * (UNIT + GAP) - GAP,
    )


def _axes(figure: Figure, box: Box, height: float) -> Axes:
    x, y, w, h = box
    return figure.add_axes((x / WIDTH, 1 - (y + h) / height, w / WIDTH, h / height))


def _card(sheet: Axes, box: Box, title: str) -> None:
    x, y, w, h = box
    sheet.add_patch(
        FancyBboxPatch(
            (x, y), w, h, boxstyle="round,pad=0,rounding_size=3", fc=CARD, ec=EDGE, lw=0.8
        )
    )
    sheet.text(x + 9, y + 17, title, size=8.2, weight="bold", color=INK)


def _head(sheet: Axes, board: Json, view: View) -> None:
    sheet.text(MARGIN + 2, 26, board["title"], size=12.5, weight="bold", color=INK)
    chosen = []
    for one in board["templating"]["list"]:
        value = view.choice.get(one["name"], "")
        text = value if isinstance(value, str) else ", ".join(value)
        chosen.append(f"{one['label']}: {'All' if text == '.*' else text or 'default'}")
    sheet.text(MARGIN + 2, 48, "    ".join(chosen), size=7.6, color=FAINT)
    times = [datetime.fromtimestamp(t, UTC).strftime("%H:%M") for t in (view.start, view.end)]
    sheet.text(
        WIDTH - MARGIN - 2,
        26,
        f"{times[0]} to {times[1]}",
        size=8.5,
        color=INK,
        ha="right",
    )
    sheet.text(
        WIDTH - MARGIN - 2,
        48,
        "drawn by grafana/render.py from Prometheus's answers; not a screenshot of Grafana",
        size=7.2,
        color=FAINT,
        ha="right",
        style="italic",
    )


def _settings(panel: Json, name: str, ref: str) -> dict[str, Any]:
    """Defaults, and what overrides them for this name or query."""
    defaults = panel["fieldConfig"]["defaults"]
    found = {key: value for key, value in defaults.items() if key != "custom"}
    found |= {f"custom.{key}": value for key, value in (defaults.get("custom") or {}).items()}
    for one in panel["fieldConfig"]["overrides"]:
        matcher, wanted = one["matcher"]["id"], one["matcher"]["options"]
        if (matcher, wanted) in (("byName", name), ("byFrameRefID", ref)):
            found |= {p["id"]: p.get("value") for p in one["properties"]}
    return found


def _color(named: str) -> str:
    return COLORS.get(named, named)


def _mapped(settings: Mapping[str, Any], value: float) -> tuple[str | None, str | None]:
    """Text and colour that a value's mappings give it."""
    for mapping in settings.get("mappings") or ():
        options = mapping["options"]
        if mapping["type"] == "value" and f"{value:g}" in options:
            result = options[f"{value:g}"]
        elif mapping["type"] == "range" and (
            (options["from"] is None or value >= options["from"])
            and (options["to"] is None or value <= options["to"])
        ):
            result = options["result"]
        else:
            continue
        return result.get("text"), _color(result["color"]) if result.get("color") else None
    return None, None


def _by_thresholds(settings: Mapping[str, Any], value: float) -> str:
    if (settings.get("color") or {}).get("mode") != "thresholds":
        return INK
    steps = settings["thresholds"]["steps"]
    reached = [s["color"] for s in steps if s.get("value") is None or value >= s["value"]]
    return _color(reached[-1])


def formatted(value: float, unit: str, decimals: int | None, now: float = 0.0) -> str:
    """A value as Grafana writes it in a unit."""
    if unit == "percentunit":
        return f"{100 * value:.{1 if decimals is None else decimals}f}%"
    if unit == "s":
        if value == 0:
            return "0"
        if abs(value) < 1:
            return f"{1000 * value:.{1 if decimals is None else decimals}f} ms"
        return f"{value:.{2 if decimals is None else decimals}f} s"
    if unit == "dateTimeFromNow":
        return f"{(now - value / 1000) / 60:.0f} min ago"
    if unit == "short" and abs(value) >= 1000:
        return f"{value / 1000:.{1 if decimals is None else decimals}f} K"
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:.4g}"


def _wide(text: str, size: float) -> float:
    """Pixels."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) / 0.72 if text else 0.0


def _nothing(sheet: Axes, box: Box, panel: Json) -> None:
    x, y, w, h = box
    text = panel["fieldConfig"]["defaults"]["noValue"]
    sheet.text(x + w / 2, y + h / 2 + 8, text, size=9, color=FAINT, ha="center", va="center")


def _marks(board: Json, view: View) -> list[tuple[float, str]]:
    found = []
    for mark in board["annotations"]["list"]:
        expr = filled_in(mark["expr"], view.choice, step=view.step)
        for labels, values in view.ask(expr, view.start, view.end, view.step):
            found += [(t, f"k is now {labels['k']}") for t, _ in values]
    return found


def _graph(
    figure: Figure,
    sheet: Axes,
    box: Box,
    panel: Json,
    view: View,
    marks: Sequence[tuple[float, str]],
    height: float,
) -> None:
    series = [one for query in queries(panel) for one in view.series(panel, query)]
    if not series:
        _nothing(sheet, box, panel)
        return
    x, y, w, h = box
    colors: dict[int, str] = {}
    palette = cycle(PALETTE)
    for one in series:
        fixed = (one.settings.get("color") or {}).get("fixedColor")
        colors[id(one)] = _color(fixed) if fixed else next(palette)
    shown = [one for one in series if not one.settings.get("custom.hideFrom", {}).get("legend")]
    entries = [(one, colors[id(one)]) for one in shown]
    below = _legend(sheet, (x, y, w, h), entries)
    axes = _axes(figure, (x + 46, y + 28, w - 66, h - 28 - 22 - below), height)
    _plain(axes)
    ground: dict[float, float] = {}
    by_name = {one.name: one for one in series}
    for one in series:
        settings, color = one.settings, colors[id(one)]
        stroke = DASHES[settings.get("custom.lineStyle", {}).get("fill", "solid")]
        values = list(one.values)
        if settings.get("custom.stacking", {}).get("mode") == "normal":
            values = [(t, v + ground.get(t, 0.0)) for t, v in values]
            axes.fill_between(
                [t for t, _ in values],
                [ground.get(t, 0.0) for t, _ in values],
                [v for _, v in values],
                color=color,
                alpha=0.15,
                lw=0,
            )
            ground |= dict(values)
        times, heights = _with_gaps(values, view.step)
        drawn = "steps-post" if settings.get("custom.lineInterpolation") == "stepAfter" else None
        axes.plot(
            times,
            heights,
            color=color,
            lw=0.75 * settings.get("custom.lineWidth", 2),
            ls=stroke,
            drawstyle=drawn or "default",
            marker="o" if len(values) == 1 else None,
            ms=3,
        )
        if (floor := by_name.get(settings.get("custom.fillBelowTo", ""))) is not None:
            low = dict(floor.values)
            both = [(t, low[t], v) for t, v in one.values if t in low]
            for part in _parts(both, view.step):
                at, bottom, top = ([point[i] for point in part] for i in range(3))
                axes.fill_between(at, bottom, top, color=color, alpha=0.14, lw=0)
    _scale(axes, panel, view, marks)


def _scale(axes: Axes, panel: Json, view: View, marks: Sequence[tuple[float, str]]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom") or {}
    axes.set_xlim(view.start, view.end)
    low, high = axes.get_ylim()
    low = min(low, custom.get("axisSoftMin", low)) if "axisSoftMin" in custom else low
    high = max(high, custom.get("axisSoftMax", high))
    if custom.get("axisSoftMin") == 0 and low > -0.05 * high:
        low = 0.0
    axes.set_ylim(low, high)
    axes.locator_params(axis="y", nbins=5)
    if custom.get("axisSoftMin") == 0 and defaults.get("decimals") == 0:
        axes.yaxis.get_major_locator().set_params(integer=defaults["unit"] == "none")  # type: ignore[call-arg]
    axes.yaxis.set_major_formatter(
        lambda value, _: formatted(value, defaults["unit"], defaults.get("decimals"))
    )
    every = 600.0 if view.end - view.start <= 7200 and axes.bbox.width > 700 else 1200.0
    ticks = [
        every * i for i in range(math.ceil(view.start / every), math.floor(view.end / every) + 1)
    ]
    axes.set_xticks(ticks, [datetime.fromtimestamp(t, UTC).strftime("%H:%M") for t in ticks])
    for t, text in marks:
        axes.axvline(t, color=COLORS["purple"], lw=0.9, ls=(0, (4, 3)))
        axes.text(
            t, 1.0, f" {text}", transform=axes.get_xaxis_transform(), size=6, va="top", ha="left"
        ).set_color(COLORS["purple"])


def _plain(axes: Axes) -> None:
    axes.set_facecolor(CARD)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.grid(color=GRID, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=6.8, colors=FAINT, pad=4)


def _parts(values: Sequence[_Point], step: float) -> list[list[_Point]]:
    """Runs without a gap."""
    found: list[list[_Point]] = [[values[0]]] if values else []
    for before, one in pairwise(values):
        if one[0] - before[0] > 1.5 * step:
            found.append([])
        found[-1].append(one)
    return found


def _with_gaps(
    values: Sequence[tuple[float, float]], step: float
) -> tuple[list[float], list[float]]:
    times: list[float] = []
    heights: list[float] = []
    for part in _parts(values, step):
        times += [*(t for t, _ in part), part[-1][0]]
        heights += [*(v for _, v in part), math.nan]
    return times, heights


def _legend(sheet: Axes, box: Box, entries: Sequence[tuple[Series, str]]) -> float:
    """Draw the names at the foot of a panel; returns how much room they take."""
    x, y, w, h = box
    size, line = 6.9, 15.0
    rows: list[list[tuple[Series, str, float]]] = [[]]
    used = 0.0
    for one, color in entries:
        needs = 30 + _wide(one.name, size)
        if used + needs > w - 20 and rows[-1]:
            rows.append([])
            used = 0.0
        rows[-1].append((one, color, used))
        used += needs
    for i, row in enumerate(rows):
        at = y + h - 10 - line * (len(rows) - 1 - i)
        for one, color, left in row:
            start = x + 12 + left
            dashes = DASHES[one.settings.get("custom.lineStyle", {}).get("fill", "solid")]
            if one.settings.get("custom.fillBelowTo"):
                sheet.add_patch(
                    Rectangle((start, at - 7), 14, 8, fc=color, alpha=0.55, ec=color, lw=0.5)
                )
            else:
                sheet.plot([start, start + 14], [at - 3, at - 3], color=color, lw=1.6, ls=dashes)
            sheet.text(start + 18, at, one.name, size=size, color=INK)
    return line * len(rows) + 2


def _tiles(
    figure: Figure,
    sheet: Axes,
    box: Box,
    panel: Json,
    view: View,
    marks: Sequence[tuple[float, str]],
    height: float,
) -> None:
    series = [one for query in queries(panel) for one in view.series(panel, query)]
    if not series:
        _nothing(sheet, box, panel)
        return
    x, y, w, h = box
    across = len(series) if w > 600 else 2
    down = math.ceil(len(series) / across)
    for i, one in enumerate(series):
        value = one.values[-1][1]
        text, color = _mapped(one.settings, value)
        unit, decimals = one.settings.get("unit", "none"), one.settings.get("decimals")
        text = text or formatted(value, unit, decimals, view.end)
        middle = x + w * (i % across + 0.5) / across
        centre = y + 26 + (h - 30) * (i // across + 0.5) / down
        size = 7.6 * min(1.0, (w / across - 10) / _wide(one.name, 7.6))
        sheet.text(middle, centre - 16, one.name, size=size, color=FAINT, ha="center")
        sheet.text(
            middle,
            centre + 16,
            text,
            size=17 if len(text) < 9 else 13,
            weight="bold",
            ha="center",
            color=color or _by_thresholds(one.settings, value),
        )


def _merged(panel: Json, view: View) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of a panel's table, after its transformations."""
    asked = list(queries(panel))
    rows: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for query in asked:
        for one in view.series(panel, query):
            key = tuple(sorted(one.labels.items()))
            row = rows.setdefault(key, dict(one.labels))
            row[f"Value #{query.ref}"] = one.values[-1][1]
    (organize,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
    names = organize["renameByName"]
    columns = [names.get(raw, raw) for raw in organize["indexByName"]]
    columns += [name for name in names.values() if name not in columns]
    made = [{names.get(raw, raw): value for raw, value in row.items()} for row in rows.values()]
    return columns, made


def _grid(
    figure: Figure,
    sheet: Axes,
    box: Box,
    panel: Json,
    view: View,
    marks: Sequence[tuple[float, str]],
    height: float,
) -> None:
    columns, rows = _merged(panel, view)
    if not rows:
        _nothing(sheet, box, panel)
        return
    for by in reversed(panel["options"]["sortBy"]):
        key = partial(_cell_of, by["displayName"])
        rows.sort(key=key, reverse=bool(by.get("desc")))
    x, y, w, h = box
    columns = [name for name in columns if any(name in row for row in rows)]
    settings = {name: _settings(panel, name, "") for name in columns}
    widths = [float(settings[name].get("custom.width") or 90) for name in columns]
    widths = [one * (w - 20) / sum(widths) for one in widths]
    at = y + 46
    left = x + 10
    for name, wide in zip(columns, widths, strict=True):
        sheet.text(left, at, name, size=7.4, weight="bold", color=FAINT)
        left += wide
    for i, row in enumerate(rows):
        at += 27
        if at > y + h - 8:
            sheet.text(x + 10, at - 19, f"{len(rows) - i} more below", size=7, color=FAINT)
            break
        sheet.plot([x + 8, x + w - 8], [at - 18, at - 18], color=GRID, lw=0.8)
        left = x + 10
        for name, wide in zip(columns, widths, strict=True):
            text, color = _cell(settings[name], row.get(name), view.end)
            if settings[name].get("links"):
                color = COLORS["blue"]
            strong = "bold" if color not in (INK, FAINT) else "normal"
            sheet.text(left, at, text, size=7.8, color=color, weight=strong)
            left += wide


def _cell_of(name: str, row: Mapping[str, Any]) -> Any:
    """To sort by; what is missing comes last."""
    return row.get(name, math.inf)


def _cell(settings: Mapping[str, Any], value: object, now: float) -> tuple[str, str]:
    if value is None:
        return settings.get("noValue", "–"), FAINT
    if not isinstance(value, float):
        return str(value), INK
    text, color = _mapped(settings, value)
    shown = formatted(value, settings.get("unit", "none"), settings.get("decimals"), now)
    return text or shown, color or _by_thresholds(settings, value)


def _bars(
    figure: Figure,
    sheet: Axes,
    box: Box,
    panel: Json,
    view: View,
    marks: Sequence[tuple[float, str]],
    height: float,
) -> None:
    columns, rows = _merged(panel, view)
    label, *names = columns
    rows.sort(key=lambda row: str(row[label]))
    names = [name for name in names if any(name in row for row in rows)]
    x, y, w, h = box
    series = [Series(name, {}, (), {"custom.fillBelowTo": "0"}) for name in names]
    colors = [_color(_settings(panel, name, "")["color"]["fixedColor"]) for name in names]
    below = _legend(sheet, box, list(zip(series, colors, strict=True)))
    axes = _axes(figure, (x + 46, y + 28, w - 58, h - 28 - 34 - below), height)
    _plain(axes)
    wide = 0.8 / len(names)
    defaults = panel["fieldConfig"]["defaults"]
    for i, row in enumerate(rows):
        for j, name in enumerate(names):
            if name in row:
                at = i - 0.4 + (j + 0.5) * wide
                axes.bar(at, row[name], 0.92 * wide, color=colors[j], alpha=0.75)
                text = formatted(row[name], defaults["unit"], defaults.get("decimals"))
                axes.text(at, row[name], text, size=7, ha="center", va="bottom", color=INK)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xticks(range(len(rows)), [str(row[label]) for row in rows])
    axes.set_xlabel(label, size=7, color=FAINT, labelpad=1)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, max(axes.get_ylim()[1], defaults["custom"].get("axisSoftMax", 0)))
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: formatted(value, defaults["unit"], 0))


def _timeline(
    figure: Figure,
    sheet: Axes,
    box: Box,
    panel: Json,
    view: View,
    marks: Sequence[tuple[float, str]],
    height: float,
) -> None:
    (query,) = queries(panel)
    series = sorted(view.series(panel, query), key=lambda one: one.name)
    if not series:
        _nothing(sheet, box, panel)
        return
    x, y, w, h = box
    names = 8 + max(_wide(one.name, 6.8) for one in series)
    axes = _axes(figure, (x + 12 + names, y + 28, w - 24 - names, h - 50), height)
    _plain(axes)
    axes.grid(visible=False)
    for i, one in enumerate(series):
        for part in _parts(one.values, view.step):
            at = part[0][0]
            for j, (_, value) in enumerate(part):
                following = part[j + 1] if j + 1 < len(part) else None
                if following is not None and following[1] == value:
                    continue
                end = following[0] if following is not None else part[-1][0] + view.step
                text, color = _mapped(one.settings, value)
                axes.barh(i, end - at, 0.78, left=at, color=color, alpha=0.75, lw=0)
                if (end - at) / (view.end - view.start) > 0.03:
                    axes.text((at + end) / 2, i, text or "", size=6.6, ha="center", va="center")
                at = end
    axes.set_ylim(len(series) - 0.45, -0.55)
    axes.set_yticks(range(len(series)), [one.name for one in series])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_xlim(view.start, view.end)
    ticks = [600.0 * i for i in range(math.ceil(view.start / 600), math.floor(view.end / 600) + 1)]
    axes.set_xticks(ticks, [datetime.fromtimestamp(t, UTC).strftime("%H:%M") for t in ticks])


_DRAWN = {
    "timeseries": _graph,
    "stat": _tiles,
    "table": _grid,
    "barchart": _bars,
    "state-timeline": _timeline,
}
