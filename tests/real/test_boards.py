"""A real Prometheus answers every question of the boards, with figures where there are some.

It holds an hour and a half of a simulated fleet in which things go wrong, and recorded servers.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from PIL import Image
from specdec_exporter.simulator.simulator import EPOCH

from grafana.dashboards import FOLDER
from grafana.query import Ask, Choice, Json, Query, Row, filled_in, panels, queries
from grafana.render import draw
from tests.real.boards_bed import (
    FLEET,
    NOW,
    RECORDED,
    RECORDED_NOW,
    SMALL,
    STEP,
    asker,
    fed,
)
from tests.real.prometheus_bed import Prometheus

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]

BOARDS: Mapping[str, Json] = {
    name: json.loads((FOLDER / f"specdec-{name}.json").read_text())
    for name in ("fleet", "target", "raw")
}
ALL = {"job": ".*", "target": ".*", "model_name": ".*", "engine": ".*"}
GUIDE_STEP = 60.0
"""Of queries over the whole time."""

DEEP = {f"{i - 1} → {i}": "no server here drafts that deep" for i in range(4, 8)}
RIGHTLY_EMPTY: Mapping[str, Mapping[tuple[str, str], str]] = {
    "fleet": {},
    "target": {
        **{("Decay from position to position", line): why for line, why in DEEP.items()},
        ("Tuner", "changes begun"): "no tuner here may change k",
        ("Tuner", "changes failed"): "no tuner here may change k",
        ("Tuner", "changes taken back"): "no tuner here may change k",
    },
    "raw": {("Decay from position to position", line): why for line, why in DEEP.items()},
}
"""Panels and lines that have nothing to show of any of these servers, and why."""

NEEDS_MORE_THAN_A_MINUTE = {
    "Net TPOT gain": "nobody gave the recorded servers a baseline",
    "Drift score": "nor a reference",
    "Predicted speed-up by k": "nor a tuner",
    "k, and the k advised": "",
    "Tuner": "nor a tuner",
    "Alerts": "they are calm",
}
"""Panels that lack a line, or all, where a recorded server has run for a minute."""

OF_DRAFTS = {
    "Acceptance": ("acceptance A / T", "front acceptance", "front, 95 % interval"),
    "Mean acceptance length (MAL)": ("MAL", "95 % interval"),
    "Acceptance by position, now": ("A",),
    "Decay from position to position": ("position 0", "0 → 1"),
    "Acceptance by engine": ("engine {{engine}}",),
    "TPOT against the baseline": ("TPOT", "step (vLLM's inter-token latency)"),
    "TPOT and step time": ("TPOT", "step (vLLM's inter-token latency)"),
    "Net TPOT gain": ("net gain", "at equal throughput", "95 % interval"),
    "Tokens per step against break-even": ("break-even length", "tokens per step"),
    "Tokens per decode step": ("tokens per step",),
    "Drafts: full length, every step": ("mean draft length / k", "drafts per decode step"),
}
"""What has no value where nobody asks anything."""


@pytest.fixture(scope="module")
def server(
    prometheus_binary: Path, promtool: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with fed(prometheus_binary, promtool, tmp_path_factory.mktemp("boards")) as prometheus:
        yield prometheus


@pytest.fixture(scope="module")
def ask(server: Prometheus) -> Ask:
    return asker(server)


def on(board: str, target: str, model_name: str | None = None) -> Choice:
    """What to choose on a board to see a target."""
    if board == "fleet":
        return ALL
    instance = f"{target}:8000" if board == "raw" else target
    return {**ALL, "target": instance, "model_name": model_name or FLEET[target].model_name}


def answers(ask: Ask, query: Query, choice: Choice, t: float | None = None) -> list[Row]:
    """At a time, or else as the board asks: now, or over all of it."""
    if t is None and not query.instant:
        expr = filled_in(query.expr, choice, rate_seconds=4 * STEP, step=GUIDE_STEP)
        return list(ask(expr, EPOCH, NOW, GUIDE_STEP))
    expr = filled_in(query.expr, choice, rate_seconds=4 * STEP, step=STEP)
    return list(ask(expr, EPOCH, NOW if t is None else t, None))


def called(query: Query) -> str:
    return query.legend or query.ref


@pytest.mark.parametrize("board", BOARDS)
def test_every_query_has_an_answer_but_those_that_are_rightly_empty(board: str, ask: Ask) -> None:
    empty = set()
    count = 0
    for panel in panels(BOARDS[board]):
        for query in queries(panel):
            count += 1
            if not any(answers(ask, query, on(board, target)) for target in FLEET):
                empty.add((query.panel, called(query)))
    print(f"{board}: {count} queries, of which {len(empty)} are rightly empty")
    assert empty == RIGHTLY_EMPTY[board].keys()


@pytest.mark.parametrize("board", BOARDS)
def test_no_value_is_no_number(board: str, ask: Ask) -> None:
    for target in FLEET:
        for panel in panels(BOARDS[board]):
            for query in queries(panel):
                for labels, values in answers(ask, query, on(board, target)):
                    bad = [t - EPOCH for t, value in values if not math.isfinite(value)]
                    assert not bad, (query.panel, query.expr, labels, bad)


@pytest.mark.parametrize("board", ["target", "raw"])
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_server_has_its_figures(name: str, board: str, ask: Ask) -> None:
    choice = on(board, name, "gemma4-e4b-shape")
    for panel in panels(BOARDS[board]):
        found = [answers(ask, query, choice, RECORDED_NOW) for query in queries(panel)]
        if panel["title"] not in NEEDS_MORE_THAN_A_MINUTE:
            assert any(found), panel["title"]
        for rows in found:
            assert all(math.isfinite(value) for _, values in rows for _, value in values)


@pytest.mark.parametrize("board", ["target", "raw"])
def test_where_nobody_asks_anything_there_is_no_figure_and_no_zero(board: str, ask: Ask) -> None:
    looked_at = set()
    for panel in panels(BOARDS[board]):
        for query in queries(panel):
            if called(query) in OF_DRAFTS.get(query.panel, ()):
                looked_at.add(query.panel)
                assert answers(ask, query, on(board, "night-1"), EPOCH + 3000.0), query
                assert not answers(ask, query, on(board, "night-1"), NOW), query
    assert len(looked_at) >= 7


def test_a_server_that_is_away_stays_on_the_board_of_the_fleet(ask: Ask) -> None:
    (panel,) = [p for p in panels(BOARDS["fleet"]) if p["title"] == "Targets, the worst first"]
    columns = {
        one["matcher"]["options"]: i for i, one in enumerate(panel["fieldConfig"]["overrides"])
    }
    asked = list(queries(panel))
    away = {
        name: {
            labels["target"]: values[-1][1]
            for labels, values in answers(ask, asked[columns[name]], ALL)
        }
        for name in ("Trouble", "Answers", "Front acceptance")
    }
    assert away["Answers"].pop("away-1") == 0
    assert set(away["Answers"].values()) == {1}
    assert "away-1" not in away["Front acceptance"]
    assert away["Trouble"]["away-1"] == 10


def test_the_worst_comes_first(ask: Ask) -> None:
    (panel,) = [p for p in panels(BOARDS["fleet"]) if p["title"] == "Targets, the worst first"]
    trouble, *_ = queries(panel)
    found = {labels["target"]: values[-1][1] for labels, values in answers(ask, trouble, ALL)}
    assert found.keys() == FLEET.keys()
    # Broken, misaligned and low: each weighs what its severity says.
    assert found["broken-1"] >= 120
    assert 20 <= found["prose-1"] < 100
    assert found["chat-2"] == 0
    assert max(found, key=found.__getitem__) == "broken-1"
    by = [(one["displayName"], one.get("desc", False)) for one in panel["options"]["sortBy"]]
    assert by == [("Trouble", True), ("Net gain", False)]


def test_several_targets_can_be_chosen(ask: Ask) -> None:
    choice = {**ALL, "target": ["chat-1", "code-1"]}
    for panel in panels(BOARDS["fleet"]):
        for query in queries(panel):
            for labels, _ in answers(ask, query, choice):
                assert labels.get("target", "chat-1") in choice["target"], query


def test_an_engine_can_be_chosen(ask: Ask) -> None:
    (panel,) = [p for p in panels(BOARDS["target"]) if p["title"] == "Acceptance by engine"]
    (query,) = queries(panel)
    both = answers(ask, query, on("target", "code-1"))
    assert {labels["engine"] for labels, _ in both} == {"0", "1"}
    one = answers(ask, query, {**on("target", "code-1"), "engine": ["1"]})
    assert [labels["engine"] for labels, _ in one] == ["1"]


@pytest.mark.parametrize("board", BOARDS)
def test_a_change_of_k_is_one_mark_where_it_happened(board: str, ask: Ask) -> None:
    (mark,) = BOARDS[board]["annotations"]["list"]
    choices = [ALL] if board == "fleet" else [on(board, target) for target in FLEET]
    found = [
        (labels, t)
        for choice in choices
        for labels, values in ask(filled_in(mark["expr"], choice, step=STEP), EPOCH, NOW, STEP)
        for t, _ in values
    ]
    ((labels, t),) = found
    assert labels["k"] == "1"
    assert labels.get("target", labels["instance"].removesuffix(":8000")) == "chat-1"
    # The server is away for a minute, and is seen at the next scrape.
    assert 4260.0 <= t - EPOCH <= 4260.0 + 2 * STEP


@pytest.mark.parametrize("board", ["target", "raw"])
def test_a_position_that_a_smaller_k_has_no_more_is_gone_and_not_zero(board: str, ask: Ask) -> None:
    (panel,) = [p for p in panels(BOARDS[board]) if p["title"] == "Decay from position to position"]
    (query,) = [query for query in queries(panel) if query.legend == "0 → 1"]
    assert answers(ask, query, on(board, "chat-1"), EPOCH + 4100.0)
    assert not answers(ask, query, on(board, "chat-1"), NOW)


def test_both_sources_say_the_same_of_a_server(ask: Ask) -> None:
    compared = 0
    for title, legends in OF_DRAFTS.items():
        for legend in legends:
            pair = []
            for board in ("target", "raw"):
                for panel in panels(BOARDS[board]):
                    for query in queries(panel):
                        if (query.panel, called(query)) == (title, legend):
                            rows = answers(ask, query, on(board, "chat-2"), NOW)
                            pair.append([values[-1][1] for _, values in rows])
            if len(pair) == 2 and all(pair):
                compared += 1
                print(title, legend, pair)
                assert pair[0] == pytest.approx(pair[1], rel=0.03)
    assert compared >= 7


@pytest.mark.parametrize("board", BOARDS)
def test_every_variable_has_values(board: str, server: Prometheus) -> None:
    choice = on(board, "code-1")
    for one in BOARDS[board]["templating"]["list"]:
        if one["type"] == "query":
            query = filled_in(one["query"]["query"], choice)
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
            values = server.api(
                f"label/{label}/values",
                **{"match[]": series, "start": f"{EPOCH:.0f}", "end": f"{NOW:.0f}"},
            )
            chosen = choice[one["name"]]
            assert values
            assert chosen == ".*" or chosen in values


@pytest.mark.parametrize("board", BOARDS)
def test_a_board_can_be_drawn_from_the_answers(board: str, ask: Ask) -> None:
    png = draw(BOARDS[board], ask, on(board, "chat-1", SMALL), EPOCH, NOW, scale=0.5)
    assert Image.open(io.BytesIO(png)).width == 640
