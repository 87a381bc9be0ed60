"""The boards as JSON: `python -m grafana.dashboards` writes grafana/dashboards/*.json.

They are generated, so that three boards look alike and no expression is written twice. The data
source is a variable, so a file can be imported, provisioned or put into a ConfigMap as it is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from grafana import fleet, raw, target
from grafana.panels import DATASOURCE, PanelBuilder

FOLDER = Path(__file__).parent / "dashboards"
VARIABLE_QUERY = "PrometheusVariableQueryEditor-VariableQuery"
"""What Grafana's own editor calls the query of a variable."""
MEMORY = "1h"
"""A server that was silent for longer may come back with another k without a mark."""


class _Marks(AnnotationQuery):
    """A query whose series are marks; the SDK has no field for their texts."""

    text: str

    def to_json(self) -> dict[str, object]:
        """With the text, and the tags that are the series' labels."""
        return {
            **super().to_json(),
            "step": "15s",
            "titleFormat": "k changed",
            "textFormat": self.text,
            "tagKeys": "",
        }


class _MarksBuilder(Builder[AnnotationQuery]):
    def __init__(self, k: str, on: str, text: str) -> None:
        self._made = _Marks(
            name="Changes of k",
            datasource=DATASOURCE,
            icon_color="purple",
            expr=changes_of_k(k, on),
        )
        self._made.text = text

    def build(self) -> AnnotationQuery:
        """The annotation."""
        return self._made


def changes_of_k(k: str, on: str) -> str:
    """PromQL that has a series, with a label `k`, at the first step at which k is another one.

    The value of an annotation is not shown, and one of 0 makes no mark: so k becomes a label. What
    was before may be a while ago, since a server that changes its k is away meanwhile.
    """
    before = f"last_over_time({k}[{MEMORY}] offset $__interval)"
    now = f'count_values without () ("k", {k})'
    return (
        f'{now} and on ({on}) {before} unless on ({on}, k) count_values without () ("k", {before})'
    )


@dataclass(frozen=True, slots=True)
class Board:
    """One board: its name, what it is for, what can be chosen on it, and where it leads."""

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[PanelBuilder]]]
    variables: Sequence[Builder[VariableModel]]
    links: Sequence[tuple[str, str]]
    marks: _MarksBuilder

    def build(self) -> Dashboard:
        """As Grafana takes it."""
        board = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags(["specdec", "speculative-decoding", "vllm"])
            .time("now-6h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .editable()
            .variables([_datasource(), *self.variables])
            .annotation(self.marks)
        )
        for title, url in self.links:
            link = dashboard.DashboardLink(title).type(DashboardLinkType.LINK).icon("dashboard")
            board = board.link(link.url(url).keep_time(True).tooltip(f"Open the board {title}"))
        for heading, panels in self.rows:
            if heading:
                board = board.with_row(dashboard.Row(heading))
            for panel in panels:
                board = board.with_panel(panel)
        made = board.build()
        for number, one in enumerate(made.panels or (), start=1):
            one.id_val = number
        return made


def _datasource() -> Builder[VariableModel]:
    return (
        dashboard.DatasourceVariable("datasource")
        .label("Data source")
        .description("The Prometheus that has the series")
        .type("prometheus")
    )


def _choice(
    name: str, label: str, description: str, query: str, *, several: bool = True
) -> Builder[VariableModel]:
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"qryType": 1, "query": query, "refId": VARIABLE_QUERY})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NATURAL_ASC)
        .multi(several)
        .include_all(several)
    )
    if not several:
        return variable
    everything = VariableOption(selected=True, text=["All"], value=["$__all"])
    # So that all is all, and no list of names that grows with the fleet.
    return variable.all_value(".*").current(everything)


def _choices(
    first: str, target_label: str, of_models: str, engines: str, *, several: bool
) -> Sequence[Builder[VariableModel]]:
    """Job, target, model and engine, each of what the ones before leave.

    Args:
        first: a series that every target has.
        target_label: of it, and what the board calls a target.
        of_models: a series that every model has.
        engines: a series that every engine has.
        several: whether more than one target and model can be chosen.
    """
    equals = "=~" if several else "="
    of_target = f'job=~"$job", {target_label}{equals}"$target"'
    of_model = f'{of_target}, model_name{equals}"$model_name"'
    return (
        _choice("job", "Job", "Prometheus's scrape jobs", f"label_values({first}, job)"),
        _choice(
            "target",
            "Target",
            "The server, by the name that it is watched under",
            f'label_values({first}{{job=~"$job"}}, {target_label})',
            several=several,
        ),
        _choice(
            "model_name",
            "Model",
            "As the server calls it",
            f"label_values({of_models}{{{of_target}}}, model_name)",
            several=several,
        ),
        _choice(
            "engine",
            "Engine",
            "Of data parallelism; for what is counted by engine. Figures of a window are of all",
            f"label_values({engines}{{{of_model}}}, engine)",
        ),
    )


_OF_EXPORTER = ("specdec_up", "target", "specdec_decode_steps_total", "specdec_decode_steps_total")
_K_OF_VLLM = "instance:specdec_num_speculative_tokens:count"
_OF_VLLM = (_K_OF_VLLM, "instance", _K_OF_VLLM, "vllm:inter_token_latency_seconds_count")
_FLEET = ("Fleet", "/d/specdec-fleet?${datasource:queryparam}")
_TARGET = ("Target", "/d/specdec-target?${datasource:queryparam}")
_RAW = ("Raw vLLM", "/d/specdec-raw?${datasource:queryparam}")


def _also(link: tuple[str, str], *variables: str) -> tuple[str, str]:
    """A link that takes the choice of more variables along."""
    title, url = link
    return title, url + "".join(f"&${{{name}:queryparam}}" for name in variables)


def boards() -> dict[str, Board]:
    """All boards by the names of their files."""
    return {
        "specdec-fleet.json": Board(
            uid="specdec-fleet",
            title="Speculative decoding / Fleet",
            description="All targets of specdec-exporter, the worst first: which one needs a look.",
            rows=fleet.panels(),
            variables=_choices(*_OF_EXPORTER, several=True),
            links=(_also(_TARGET, "job"), _RAW),
            marks=_MarksBuilder(
                f"specdec_num_speculative_tokens{{{fleet.SELECTOR}}}",
                target.ON,
                "k is now {{k}} on {{target}}, {{model_name}}",
            ),
        ),
        "specdec-target.json": Board(
            uid="specdec-target",
            title="Speculative decoding / Target",
            description="One target of specdec-exporter: does speculation pay, if not why, and k.",
            rows=target.panels(),
            variables=_choices(*_OF_EXPORTER, several=False),
            links=(_also(_FLEET, "job"), _also(_RAW, "model_name")),
            marks=_MarksBuilder(target.FIGURES.k, target.ON, "k is now {{k}}"),
        ),
        "specdec-raw.json": Board(
            uid="specdec-raw",
            title="Speculative decoding / Raw vLLM",
            description="vLLM servers by their own series, without the exporter. "
            "Needs the recording rules of alerts/fleet.rules.yaml.",
            rows=raw.panels(),
            variables=_choices(*_OF_VLLM, several=False),
            links=(_FLEET, _also(_TARGET, "model_name")),
            marks=_MarksBuilder(raw.FIGURES.k, raw.ON, "k is now {{k}}"),
        ),
    }


def written(board: Board) -> str:
    """The text of a board's file."""
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name, board in boards().items():
        (FOLDER / name).write_text(written(board), encoding="utf-8")


if __name__ == "__main__":
    main()
