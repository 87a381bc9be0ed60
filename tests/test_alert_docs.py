"""What is written for people about the alerts names things that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from specdec_exporter.config import Settings
from specdec_exporter.duration import format_duration
from specdec_exporter.expose import FAMILIES
from specdec_exporter.rules import rule_table

from tests.pages import PAGES

ROOT = Path(__file__).parents[1]
RUNBOOKS = ROOT / "docs" / "runbooks"
PAGE = ROOT / "docs" / "alerts.md"
EXAMPLE = ROOT / "alerts" / "alertmanager.example.yaml"
RULE_FILES = [ROOT / "alerts" / name for name in ("specdec.rules.yaml", "fleet.rules.yaml")]
TABLE = rule_table(Settings())
ALERTS = {rule.alert for rule in TABLE} | {"SpecDecExporterDown", "SpecDecConfigReloadFailed"}


def metric_names() -> set[str]:
    """Of the exporter, of vLLM as recorded, and of the rules."""
    rules = "".join(path.read_text() for path in RULE_FILES)
    pages = "".join(path.read_text() for path in PAGES)
    return (
        {family.name for family in FAMILIES}
        | set(re.findall(r"\b(?:target|instance):specdec_\w+:\w+", rules))
        | set(re.findall(r"(?<![:\w])specdec_\w+", rules))
        | set(re.findall(r"^vllm:\w+", pages, re.M))
    )


def named(text: str) -> set[str]:
    return set(re.findall(r"\b(?:target:|instance:)?specdec_\w+(?::\w+)?|\bvllm:\w+", text))


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    assert {path.stem for path in RUNBOOKS.glob("*.md")} == ALERTS


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_a_page_says_what_to_look_at_what_to_do_and_when_not_to_worry(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    assert text.startswith(f"# {alert}\n")
    places = [text.find(word) for word in ("**Look**", "**Do**", "**Do not worry**")]
    assert -1 not in places
    assert places == sorted(places)
    assert len(text.splitlines()) <= 40, "somebody reads this at night"


@pytest.mark.parametrize("path", [*sorted(RUNBOOKS.glob("*.md")), PAGE], ids=lambda p: p.stem)
def test_metrics_that_a_page_names_exist(path: Path) -> None:
    assert named(path.read_text()) - {"specdec_"} <= metric_names()


@pytest.mark.parametrize("path", [*sorted(RUNBOOKS.glob("*.md")), PAGE], ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_commands_and_settings_that_the_pages_name_exist() -> None:
    from specdec_exporter.cli import app

    known = {
        c.name or c.callback.__name__.replace("_", "-")
        for c in app.registered_commands
        if c.callback
    }
    texts = "".join(path.read_text() for path in [*RUNBOOKS.glob("*.md"), PAGE, EXAMPLE])
    assert set(re.findall(r"specdec-exporter ([a-z][a-z-]+)", texts)) <= known


def test_the_table_in_the_docs_is_that_of_the_rules() -> None:
    text = PAGE.read_text()
    for rule in TABLE:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| [{rule.alert}]")]
        wait = format_duration(rule.wait_seconds) if rule.wait_seconds else "at once"
        assert f"| {wait} |" in row
        assert f"| {rule.severity.usual}" in row
        assert (f"{rule.severity.relaxed} where" in row) == (rule.severity.relaxed is not None)


def example() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(EXAMPLE)
    return loaded


def matched(matchers: list[str]) -> set[str]:
    """The alerts that a matcher on `alertname` takes."""
    (matcher,) = matchers
    parts = re.fullmatch(r'alertname (=~?) "(.*)"', matcher)
    assert parts is not None, matcher
    pattern = parts[2] if parts[1] == "=~" else re.escape(parts[2])
    return {alert for alert in ALERTS if re.fullmatch(pattern, alert)}


def test_alertmanager_inhibits_what_the_rules_say() -> None:
    by_alert = {rule.name: rule.alert for rule in TABLE}
    on_target = {rule.alert for rule in TABLE if rule.on_target}
    pairs: set[tuple[str, str]] = set()
    for rule in example()["inhibit_rules"]:
        (stronger,) = matched(rule["source_matchers"])
        pairs |= {(stronger, weaker) for weaker in matched(rule["target_matchers"])}
        scope = ["job", "instance", "target"]
        # An alert on the target has no model, so it could not equal one that has.
        assert rule["equal"] == (scope if stronger in on_target else [*scope, "model_name"])
    assert pairs == {(by_alert[s], rule.alert) for rule in TABLE for s in rule.inhibited_by}


def test_every_alert_is_routed_to_a_receiver_that_sends_its_end_as_well() -> None:
    (route,) = example()["route"]["routes"]
    assert matched(route["matchers"]) == ALERTS
    (receiver,) = [r for r in example()["receivers"] if r["name"] == route["receiver"]]
    assert all(hook["send_resolved"] for hook in receiver["webhook_configs"])
    severities = {rule.severity.usual for rule in TABLE} | {
        rule.severity.relaxed for rule in TABLE if rule.severity.relaxed
    }
    assert severities == {"critical", "warning", "info"}
    routed = {m for r in route["routes"] for m in r["matchers"]}
    assert routed == {'severity = "critical"', 'severity = "info"'}
