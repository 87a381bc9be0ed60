"""How a panel of these boards looks: lines, reference lines and bands, tiles, tables and timelines.

A panel is made of queries and of one description, which says what it shows and what to do. Nothing
here knows a metric. Reference lines are series of their own, with their meaning in the legend, so
that a board can be read without colours; they are dashed or dotted where measured lines are solid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardRangeMapOptions,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Panel,
    RangeMap,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PanelBuilder = Builder[Panel]

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
LAST = "lastNotNull"

GREEN, YELLOW, ORANGE, RED, GREY = "green", "dark-yellow", "orange", "red", "#8e8e8e"
BLUE, PURPLE, TEAL = "blue", "purple", "#2a9d8f"

Steps = Sequence[tuple[float | None, str]]
"""From which value on a colour is used; the first from None, which is from below."""

Words = Mapping[float | tuple[float, float | None], tuple[str, str]]
"""What a value, or a range of them, is called, and the colour that goes with it."""


@dataclass(frozen=True, slots=True)
class Line:
    """A query of a graph, and how its series are drawn.

    Args:
        expr: PromQL.
        legend: may name labels, as in `engine {{engine}}`.
        color: none leaves it to Grafana, which tells the series of one query apart.
        style: `solid`, `dash` or `dot`.
        width: of the line, pixels.
        step: whether the value holds until the next one.
        down_to: the legend of the line that the area under this one ends at.
        hidden: whether the legend leaves it out.
    """

    expr: str
    legend: str
    color: str | None = None
    style: str = "solid"
    width: int = 2
    step: bool = False
    down_to: str | None = None
    hidden: bool = False

    @property
    def is_templated(self) -> bool:
        """Whether its name is only known from the labels."""
        return "{{" in self.legend


def reference(expr: str, legend: str, color: str = GREY, style: str = "dash") -> Line:
    """What measured lines are held against."""
    return Line(expr, legend, color, style, width=1)


def band(low: str, high: str, legend: str, color: str) -> tuple[Line, Line]:
    """An area between two expressions, with one entry in the legend."""
    end = f"{legend} (lower end)"
    return (
        Line(low, end, color, "dot", width=1, hidden=True),
        Line(high, legend, color, "dot", width=1, down_to=end),
    )


def graph(
    title: str,
    description: str,
    lines: Sequence[Line],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    decimals: int | None = None,
    low: float | None = None,
    high: float | None = None,
    stacked: bool = False,
    empty: str = "no drafts",
) -> PanelBuilder:
    """A graph over time. A gap is a time at which there was nothing to measure."""
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .unit(unit)
        .no_value(empty)
        .span_nulls(False)
        .show_points(VisibilityMode.AUTO)
        .line_width(2)
        .fill_opacity(0)
        .legend(legend.placement(LegendPlacement.BOTTOM).calcs([]))
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
    )
    if decimals is not None:
        panel = panel.decimals(decimals)
    if low is not None:
        panel = panel.axis_soft_min(low)
    if high is not None:
        panel = panel.axis_soft_max(high)
    if stacked:
        together = common.StackingConfig().mode(StackingMode.NORMAL).group("A")
        panel = panel.fill_opacity(15).stacking(together)
    for i, line in enumerate(lines):
        panel = panel.with_target(_query(line.expr, line.legend, i))
        properties = _drawn(line)
        if line.is_templated:
            panel = panel.override_by_query(_ref(i), properties)
        else:
            panel = panel.override_by_name(line.legend, properties)
    return panel


def _drawn(line: Line) -> list[DynamicConfigValue]:
    found: dict[str, object] = {"custom.lineWidth": line.width}
    if line.color is not None:
        found["color"] = {"mode": "fixed", "fixedColor": line.color}
    if line.style == "dash":
        found["custom.lineStyle"] = {"fill": "dash", "dash": [8, 6]}
    if line.style == "dot":
        found["custom.lineStyle"] = {"fill": "dot", "dash": [2, 4]}
    if line.step:
        found["custom.lineInterpolation"] = LineInterpolation.STEP_AFTER.value
    if line.down_to is not None:
        found["custom.fillBelowTo"] = line.down_to
        found["custom.fillOpacity"] = 15
    if line.hidden:
        found["custom.hideFrom"] = {"legend": True, "tooltip": False, "viz": False}
    if line.style != "solid":
        found["custom.showPoints"] = VisibilityMode.NEVER.value
    return _properties(found)


@dataclass(frozen=True, slots=True)
class Value:
    """One figure of now: a tile of a row of tiles, or a column of a table.

    Args:
        expr: PromQL, asked for now.
        name: of the tile or the column.
        unit: Grafana's.
        decimals: shown.
        steps: colours by the value.
        words: what values mean, with a colour each; a pair is a range.
        empty: shown where there is no value.
        width: of a column, pixels.
    """

    expr: str
    name: str
    unit: str = "short"
    decimals: int | None = None
    steps: Steps = ()
    words: Words | None = None
    empty: str = "–"
    width: int | None = None

    @property
    def properties(self) -> list[DynamicConfigValue]:
        """As Grafana takes them."""
        found: dict[str, object] = {"unit": self.unit, "noValue": self.empty}
        if self.decimals is not None:
            found["decimals"] = self.decimals
        if self.steps:
            found["thresholds"] = {
                "mode": "absolute",
                "steps": [{"value": at, "color": color} for at, color in self.steps],
            }
            found["color"] = {"mode": "thresholds"}
        if self.words:
            found["mappings"] = [mapping.to_json() for mapping in mappings(self.words)]
        return _properties(found)


def mappings(
    words: Words,
) -> list[ValueMapping]:
    """Texts and colours for values, or for ranges of them."""
    made: list[ValueMapping] = []
    for i, (value, (text, color)) in enumerate(words.items()):
        result = ValueMappingResult(text=text, color=color, index=i)
        if isinstance(value, tuple):
            made.append(RangeMap(DashboardRangeMapOptions(value[0], value[1], result)))
        else:
            made.append(ValueMap({f"{value:g}": result}))
    return made


def tiles(
    title: str, description: str, values: Sequence[Value], *, width: int = 24, height: int = 4
) -> PanelBuilder:
    """Figures of now side by side; one that has no value now has no tile."""
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .no_value("no drafts, and no answer")
        .reduce_options(common.ReduceDataOptions().calcs([LAST]).values(False))
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .text_mode(BigValueTextMode.VALUE_AND_NAME)
        .orientation(VizOrientation.VERTICAL)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("text"))
    )
    for i, value in enumerate(values):
        panel = panel.with_target(_query(value.expr, value.name, i, instant=True))
        if "{{" in value.name:
            panel = panel.override_by_query(_ref(i), value.properties)
        else:
            panel = panel.override_by_name(value.name, value.properties)
    return panel


def grid(
    title: str,
    description: str,
    keys: Mapping[str, tuple[str, int]],
    values: Sequence[Value],
    *,
    sort: Sequence[tuple[str, bool]],
    link: tuple[str, str] | None = None,
    width: int = 24,
    height: int = 10,
    empty: str,
) -> PanelBuilder:
    """A table with a row for each combination of labels.

    Args:
        title: of the panel.
        description: of the panel.
        keys: the labels that every query gives, with the names and widths of their columns.
        values: the other columns.
        sort: names of columns, and whether the largest comes first; the first counts most.
        link: title and URL, for the cells of the first key.
        width: of the panel, of 24.
        height: of the panel.
        empty: what is said where there is no row.
    """
    names = {f"Value #{_ref(i)}": value.name for i, value in enumerate(values)}
    if len(values) == 1:
        names["Value"] = values[0].name
    labels = {label: name for label, (name, _) in keys.items()}
    order = [*keys, *(f"Value #{_ref(i)}" for i in range(len(values)))]
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .no_value(empty)
        .show_header(True)
        .filterable(False)
        .sort_by(
            [
                common.TableSortByFieldState().display_name(name).desc(descending)
                for name, descending in sort
            ]
        )
        .transformations(
            [
                DataTransformerConfig(id_val="merge", options={}),
                DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {"Time": True},
                        "indexByName": {name: i for i, name in enumerate(order)},
                        "renameByName": {**labels, **names},
                    },
                ),
            ]
        )
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("text"))
    )
    for i, value in enumerate(values):
        panel = panel.with_target(_query(value.expr, "", i, instant=True, as_table=True))
        properties = value.properties
        if value.steps or value.words:
            properties += _properties({"custom.cellOptions": {"type": "color-text"}})
        if value.width is not None:
            properties += _properties({"custom.width": value.width})
        panel = panel.override_by_name(value.name, properties)
    for label, (name, pixels) in keys.items():
        key: dict[str, object] = {"custom.width": pixels}
        if link is not None and label == next(iter(keys)):
            key["links"] = [{"title": link[0], "url": link[1], "targetBlank": False}]
        panel = panel.override_by_name(name, _properties(key))
    return panel


def bars(
    title: str,
    description: str,
    label: str,
    values: Sequence[tuple[str, str, str]],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    high: float,
    empty: str,
) -> PanelBuilder:
    """Bars of now, grouped by a label.

    Args:
        title: of the panel.
        description: of the panel.
        label: what the groups are called by.
        values: expression, name and colour of the bar that it is in each group.
        unit: Grafana's.
        width: of the panel, of 24.
        height: of the panel.
        high: where the axis ends, unless a bar is longer.
        empty: what is said where there are no bars.
    """
    panel = (
        barchart.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .unit(unit)
        .decimals(0)
        .no_value(empty)
        .axis_soft_min(0)
        .axis_soft_max(high)
        .x_field(label)
        .show_value(VisibilityMode.ALWAYS)
        .fill_opacity(70)
        .group_width(0.8)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.NONE))
        .transformations(
            [
                DataTransformerConfig(id_val="merge", options={}),
                DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": {"Time": True},
                        "indexByName": {label: 0},
                        "renameByName": {
                            f"Value #{_ref(i)}": name for i, (_, name, _) in enumerate(values)
                        },
                    },
                ),
                DataTransformerConfig(
                    id_val="sortBy", options={"fields": {}, "sort": [{"field": label}]}
                ),
            ]
        )
    )
    for i, (expr, name, color) in enumerate(values):
        panel = panel.with_target(_query(expr, "", i, instant=True, as_table=True))
        panel = panel.override_by_name(
            name, _properties({"color": {"mode": "fixed", "fixedColor": color}})
        )
    return panel


def timeline(
    title: str,
    description: str,
    expr: str,
    legend: str,
    words: Words,
    *,
    width: int = 24,
    height: int = 10,
    empty: str,
) -> PanelBuilder:
    """States over time, each with its word in it."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(description)
        .datasource(DATASOURCE)
        .span(width)
        .height(height)
        .no_value(empty)
        .mappings(mappings(words))
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .thresholds(
            dashboard.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(value=None, color=GREY)])
        )
        .merge_values(True)
        .show_value(VisibilityMode.AUTO)
        .row_height(0.8)
        .fill_opacity(70)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.SINGLE))
        .with_target(_query(expr, legend, 0))
    )


def _query(
    expr: str, legend: str, i: int, *, instant: bool = False, as_table: bool = False
) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).ref_id(_ref(i)).datasource(DATASOURCE)
    query = query.instant() if instant else query.range()
    if as_table:
        query = query.format(PromQueryFormat.TABLE)
    return query.legend_format(legend) if legend else query


def _ref(i: int) -> str:
    """The letter that a query goes by."""
    return chr(ord("A") + i)


def _properties(found: Mapping[str, object]) -> list[DynamicConfigValue]:
    return [DynamicConfigValue(name, value) for name, value in found.items()]
