"""The boards are what the code makes, are sound as Grafana takes them, and speak of what there is."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from specdec_exporter.expose import FAMILIES
from specdec_exporter.simulator import SCENARIOS, Simulator

from grafana.dashboards import FOLDER, boards, written
from grafana.query import Json, filled_in, panels, queries

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(boards())
VARIABLES = ["datasource", "job", "target", "model_name", "engine"]
NOT_IN_THE_SDK = {"step", "titleFormat", "textFormat", "tagKeys"}
"""What an annotation says, which the SDK has no fields for."""


def board(name: str) -> Json:
    found: Json = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def every_panel() -> list[Any]:
    return [
        pytest.param(panel, id=f"{name.removesuffix('.json')}: {panel['title']}")
        for name in NAMES
        for panel in panels(board(name))
    ]


def strings(value: object) -> list[str]:
    """All texts in a value, however deep."""
    if isinstance(value, dict):
        return [text for one in value.values() for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def expressions(found: Json) -> list[str]:
    """Of panels, marks and variables."""
    asked = [query.expr for panel in panels(found) for query in queries(panel)]
    asked += [mark["expr"] for mark in found["annotations"]["list"]]
    return asked + [
        one["query"]["query"] for one in found["templating"]["list"] if one["type"] == "query"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_code_makes(name: str) -> None:
    text = written(boards()[name])
    assert text == written(boards()[name]), "it is not the same every time"
    assert (FOLDER / name).read_text(encoding="utf-8") == text, "run: make docs"


def test_there_are_no_other_files_of_boards() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_own_decoder_reads_all_of_it(name: str) -> None:
    register_default_plugins()
    found = board(name)
    again = json.loads(json.dumps(Dashboard.from_json(found), cls=JSONEncoder))
    for mark in found["annotations"]["list"]:
        assert mark.keys() >= NOT_IN_THE_SDK
        for key in NOT_IN_THE_SDK:
            del mark[key]
    assert again == found


@pytest.mark.parametrize("name", NAMES)
def test_a_board_can_be_imported_as_it_is(name: str) -> None:
    found = board(name)
    assert found["uid"] == name.removesuffix(".json")
    assert found.get("id") is None
    assert found["schemaVersion"] == 41  # Grafana 11.6
    assert (found["refresh"], found["time"]) == ("30s", {"from": "now-6h", "to": "now"})
    assert "specdec" in found["tags"]
    assert "__inputs" not in found


@pytest.mark.parametrize("name", NAMES)
def test_a_board_fits_into_a_config_map_and_the_annotation_that_kubectl_makes_of_it(
    name: str,
) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert len(json.dumps({"data": {name: text}}).encode()) < 200_000  # of 262,144


@pytest.mark.parametrize("name", NAMES)
def test_the_variables_are_those_named_and_each_is_used(name: str) -> None:
    found = board(name)
    assert [one["name"] for one in found["templating"]["list"]] == VARIABLES
    asked = [query.expr for panel in panels(found) for query in queries(panel)]
    for variable in VARIABLES[1:]:
        assert any(f"${variable}" in expr for expr in asked), variable


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_of_several_values_stands_behind_a_regular_expression(name: str) -> None:
    several = {
        one["name"]: one.get("multi", False)
        for one in board(name)["templating"]["list"]
        if one["type"] == "query"
    }
    for expr in expressions(board(name)):
        for operator, variable in re.findall(r'(=~|!~|!=|=)"\$(\w+)"', expr):
            assert operator == ("=~" if several[variable] else "="), expr


@pytest.mark.parametrize("name", NAMES)
def test_no_data_source_is_written_down(name: str) -> None:
    def sources(value: object) -> list[Json]:
        if isinstance(value, list):
            return [found for one in value for found in sources(one)]
        if not isinstance(value, dict):
            return []
        own = [value["datasource"]] if "datasource" in value else []
        return own + [found for one in value.values() for found in sources(one)]

    found = sources(board(name))
    assert len(found) > len(panels(board(name)))
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in found)


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_numbers_of_their_own_and_do_not_overlap(name: str) -> None:
    everything = board(name)["panels"]
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in everything]
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


@pytest.mark.parametrize("panel", every_panel())
def test_a_panel_says_what_it_means_and_what_to_do(panel: Json) -> None:
    assert len(panel["description"]) > 120
    assert panel["description"].count(".") >= 2
    assert panel["fieldConfig"]["defaults"]["noValue"]


@pytest.mark.parametrize("panel", every_panel())
def test_every_query_has_a_letter_of_its_own(panel: Json) -> None:
    letters = [query.ref for query in queries(panel)]
    assert letters
    assert len(set(letters)) == len(letters)
    assert all("instant" in one and "range" in one for one in panel["targets"])


@pytest.mark.parametrize("panel", every_panel())
def test_a_figure_has_its_unit_and_a_gap_is_not_bridged(panel: Json) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] in ("timeseries", "barchart"):
        assert defaults["unit"]
    if panel["type"] == "timeseries":
        assert defaults["custom"]["spanNulls"] is False
    if panel["type"] in ("stat", "table"):
        overridden = {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]}
        for query in queries(panel):
            assert {query.legend, query.ref} & overridden or panel["type"] == "table"


@pytest.mark.parametrize("panel", every_panel())
def test_colour_is_never_the_only_sign(panel: Json) -> None:
    """A state has a word; two lines of a panel differ in their names, and a limit in its stroke."""
    for text in ("mappings", "value"):
        for mapping in panel["fieldConfig"]["defaults"].get(text, []):
            results = mapping["options"]
            results = [results["result"]] if "result" in results else list(results.values())
            assert all(result["text"] for result in results)
    legends = [query.legend for query in queries(panel) if query.legend]
    assert len(set(legends)) == len(legends)
    if panel["type"] == "timeseries":
        styles = {
            one["matcher"]["options"]: {p["id"]: p.get("value") for p in one["properties"]}
            for one in panel["fieldConfig"]["overrides"]
        }
        for query in queries(panel):
            if re.search(r"guide|below|drift from|most possible", query.legend):
                assert "custom.lineStyle" in styles[query.legend], query.legend


@pytest.mark.parametrize("panel", every_panel())
def test_a_panel_can_be_read_at_1280_pixels(panel: Json) -> None:
    assert panel["gridPos"]["w"] >= 8
    columns = [
        p["value"]
        for one in panel["fieldConfig"]["overrides"]
        for p in one["properties"]
        if p["id"] == "custom.width"
    ]
    # A board is 1280 pixels less its margins and the scroll bar.
    assert sum(columns) <= (1280 - 48) * panel["gridPos"]["w"] / 24


@pytest.mark.parametrize("name", NAMES)
def test_no_two_panels_of_a_board_show_the_same(name: str) -> None:
    """A number of now and its course are two things; the same number twice is not."""
    shown: Counter[tuple[str, bool]] = Counter()
    for panel in panels(board(name)):
        own = {(query.expr, query.instant) for query in queries(panel)}
        assert len(own) == len(list(queries(panel))), panel["title"]
        shown.update(own)
    assert [asked for asked, count in shown.items() if count > 1 and "vector" not in asked[0]] == []
    titles = [panel["title"] for panel in panels(board(name))]
    assert len(set(titles)) == len(titles)


def metrics(expr: str) -> set[str]:
    """Names of series in an expression."""
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
    return set(re.findall(r"\b(?:specdec_|vllm:|instance:|ALERTS)[\w:]*", plain))


def test_every_metric_is_one_that_the_exporter_serves_or_vllm_has() -> None:
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    simulator.advance(60.0)
    page = simulator.page().decode() + "".join(
        path.read_text() for path in (ROOT / "tests" / "data").glob("*/*.prom")
    )
    known = {family.name for family in FAMILIES}
    known |= set(re.findall(r"^(vllm:\w+)", page, re.MULTILINE))
    rules = yaml.safe_load((ROOT / "alerts" / "fleet.rules.yaml").read_text())
    known |= {rule.get("record", "ALERTS") for group in rules["groups"] for rule in group["rules"]}
    for name in NAMES:
        for expr in expressions(board(name)):
            assert metrics(expr) or "vector(" in expr, expr
            assert metrics(expr) <= known, (name, metrics(expr) - known)


def test_the_exporters_boards_need_no_recording_rules() -> None:
    for name in ("specdec-fleet.json", "specdec-target.json"):
        for expr in expressions(board(name)):
            assert all(metric.startswith("specdec_") for metric in metrics(expr)), expr


def test_the_raw_board_needs_no_exporter() -> None:
    for expr in expressions(board("specdec-raw.json")):
        assert not any(metric.startswith("specdec_") for metric in metrics(expr)), expr


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_boards_that_there_are_with_variables_that_they_have(name: str) -> None:
    urls = [text for text in strings(board(name)) if text.startswith("/d/")]
    reached = set()
    for url in urls:
        uid, query = re.fullmatch(r"/d/([\w-]+)\?(.*)", url).groups()  # type: ignore[union-attr]
        reached.add(f"{uid}.json")
        assert "${datasource:queryparam}" in query
        named = re.findall(r"\$\{(\w+):queryparam\}|var-(\w+)=", query)
        assert {a or b for a, b in named} <= set(VARIABLES)
    assert reached | {name} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_windowed_gauge_is_asked_for_one_window_and_no_engine(name: str) -> None:
    windowed = {family.name for family in FAMILIES if family.is_windowed}
    for expr in expressions(board(name)):
        for metric, selector in re.findall(r"\b(specdec_\w+)\{([^}]*)\}", expr):
            assert ('window=~"|5m"' in selector) == (metric in windowed), expr
            if metric in windowed:
                assert "engine" not in selector


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_in_the_docs_is_small_and_called_a_drawing(name: str) -> None:
    picture = ROOT / "docs" / "boards" / name.replace(".json", ".png")
    assert 10_000 < picture.stat().st_size < 250_000
    text = (ROOT / "docs" / "grafana.md").read_text(encoding="utf-8")
    assert f"(boards/{picture.name})" in text
    assert "not screenshots of Grafana" in re.sub(r"\s+", " ", text)


def test_what_grafana_fills_in_is_filled_in() -> None:
    expr = 'rate(a{target=~"$target", engine=~"$engine"}[$__rate_interval]) offset $__interval'
    assert filled_in(expr, {"target": ["a", "b"], "engine": ".*"}) == (
        'rate(a{target=~"(a|b)", engine=~".*"}[60s]) offset 15s'
    )


def test_the_provisioned_folder_and_data_source_are_there() -> None:
    provisioning = ROOT / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "specdec.yaml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "specdec.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == "15s"
