from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from specdec_exporter.config import Settings
from specdec_exporter.expose import FAMILIES
from specdec_exporter.parse import VLLM
from specdec_exporter.promql import SOURCES, inexpressible, rule_file
from specdec_exporter.rules import rule_table

ALERTS = Path(__file__).parents[1] / "alerts"


def text(source: str, settings: Settings | None = None, **more: bool) -> str:
    settings = settings or Settings()
    window = settings.windows[0]
    return rule_file(settings, SOURCES[source](settings.rules, window), window, **more)


@cache
def group(source: str, settings: Settings | None = None) -> dict[str, Any]:
    (found,) = YAML(typ="safe").load(text(source, settings))["groups"]
    one: dict[str, Any] = found
    return one


def alerts(source: str, settings: Settings | None = None) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in group(source, settings)["rules"] if "alert" in rule}


def records(source: str, settings: Settings | None = None) -> dict[str, str]:
    rules = group(source, settings)["rules"]
    return {rule["record"]: rule["expr"] for rule in rules if "record" in rule}


@pytest.mark.parametrize(
    ("source", "file"), [("exporter", "specdec.rules.yaml"), ("vllm", "fleet.rules.yaml")]
)
def test_the_committed_files_are_what_the_code_renders(source: str, file: str) -> None:
    assert (ALERTS / file).read_text() == text(source), "run make docs"


@pytest.mark.parametrize("source", SOURCES)
def test_each_recording_rule_stands_on_earlier_ones(source: str) -> None:
    known: set[str] = set()
    for rule in group(source)["rules"]:
        used = set(re.findall(r"\b(?:target|instance):\w+:\w+", rule["expr"]))
        assert used <= known, rule
        known |= {rule.get("record")}


@pytest.mark.parametrize("source", SOURCES)
def test_rules_aggregate_without_labels_and_never_by_some(source: str) -> None:
    """What the user's Prometheus adds to a series is still there in the alert."""
    assert not re.search(r"\bby\b", "".join(rule["expr"] for rule in group(source)["rules"]))
    assert "without (engine" in text(source)


def test_the_exporters_rules_stand_on_what_the_exporter_serves() -> None:
    served = {family.name for family in FAMILIES} | {
        "specdec_exporter_config_last_reload_successful"
    }
    used = set(re.findall(r"(?<![:\w])specdec_\w+", text("exporter")))
    assert used <= served


def test_the_servers_rules_stand_on_what_the_server_serves() -> None:
    used = set(re.findall(r"\bvllm:\w+", text("vllm")))
    assert used <= set(VLLM.names)
    assert not re.search(r"(?<![:\w])specdec_", text("vllm"))


def test_what_the_servers_series_cannot_express_is_left_out_and_named() -> None:
    settings = Settings()
    missing = inexpressible(settings, SOURCES["vllm"](settings.rules, 300.0), 300.0)
    assert missing == ["target_down", "net_gain_negative", "net_gain_low", "drafter_drift"]
    assert f"# Not expressible from these series: {', '.join(missing)}.\n" in text("vllm")
    assert inexpressible(settings, SOURCES["exporter"](settings.rules, 300.0), 300.0) == []
    assert "Not expressible" not in text("exporter")
    names = {rule.alert for rule in rule_table(settings) if rule.name not in missing}
    assert alerts("vllm").keys() == names
    of_the_exporter = {"SpecDecExporterDown", "SpecDecConfigReloadFailed"}
    assert alerts("exporter").keys() == {r.alert for r in rule_table(settings)} | of_the_exporter


def test_both_sources_say_the_same_under_other_names() -> None:
    def plain(expression: str) -> str:
        expression = re.sub(r"\b(target|instance):", "", expression)
        return expression.replace(
            "specdec_num_speculative_tokens:count", "specdec_num_speculative_tokens"
        )

    exporter, vllm = alerts("exporter"), alerts("vllm")
    differ = ("SpecDecDrafterMisaligned", "SpecDecLengthPlateau")
    same = [name for name in vllm if name not in differ]
    assert len(same) == 6
    for name in same:
        assert plain(exporter[name]["expr"]) == plain(vllm[name]["expr"])
    # The exporter knows of a gain, which takes the warning back.
    assert vllm["SpecDecDrafterMisaligned"]["labels"] == {"severity": "warning"}
    # And of what the last position costs.
    cost = (
        " or specdec_last_position_gain_ratio + 1.645 * specdec_last_position_gain_ratio_stderr < 0"
    )
    both = plain(exporter["SpecDecLengthPlateau"]["expr"])
    assert both.count(cost) == 1
    tokens = both.replace(cost, "").replace("(", "").replace(")", "")
    assert tokens == plain(vllm["SpecDecLengthPlateau"]["expr"])


def test_misalignment_that_gains_is_an_alert_of_its_own() -> None:
    both = [r for r in group("exporter")["rules"] if r.get("alert") == "SpecDecDrafterMisaligned"]
    assert [one["labels"]["severity"] for one in both] == ["warning", "info"]
    assert "unless target:specdec_tpot_gain:max5m >= 0" in both[0]["expr"]
    assert "and target:specdec_tpot_gain:max5m >= 0" in both[1]["expr"]


CHANGED = Settings(
    windows=(60.0, 300.0),
    variance_inflation=4.0,
    rules={
        "evaluation_interval": "30s",
        "keep_firing_for": "0s",
        "min_drafts": 321,
        "runbook_url": "https://example.org/",
        "acceptance_low": {"below": 0.31, "below_at_k1": 0.41, "for": "7m"},
        "drafter_drift": {"enabled": False},
        "target_down": {"grace": "45m", "for": "0s"},
    },
)


@pytest.mark.parametrize("source", SOURCES)
def test_settings_are_in_the_rules(source: str) -> None:
    changed = group(source, CHANGED)
    assert changed["interval"] == "30s"
    low = alerts(source, CHANGED)["SpecDecAcceptanceLow"]
    assert low["for"] == "7m"
    assert "keep_firing_for" not in low
    assert low["annotations"]["runbook_url"] == "https://example.org/SpecDecAcceptanceLow"
    assert ">= 321" in low["expr"]
    limits = records(source, CHANGED)
    level = {"exporter": "target", "vllm": "instance"}[source]
    assert "* 0.31 + " in limits[f"{level}:specdec_guide_acceptance:threshold"]
    assert "* 0.41" in limits[f"{level}:specdec_guide_acceptance:threshold"]
    assert "sqrt(4 * " in limits[f"{level}:specdec_front_acceptance:stderr1m"]
    assert not re.search(r"\[5m\]|:[a-z]+5m\b", text(source, CHANGED))
    assert "SpecDecDrafterDrift" not in text(source, CHANGED)


def test_the_grace_of_a_target_is_a_setting() -> None:
    down = alerts("exporter", CHANGED)["SpecDecTargetDown"]
    assert "specdec_up offset 45m" in down["expr"]
    assert "for" not in down
    assert "specdec_up offset 30m" in alerts("exporter")["SpecDecTargetDown"]["expr"]


def test_of_several_windows_the_first_one_is_judged() -> None:
    gain = records("exporter", CHANGED)["target:specdec_tpot_gain:max1m"]
    assert 'window=~"|1m"' in gain


@pytest.mark.parametrize("source", SOURCES)
def test_an_alert_says_whom_it_speaks_of_what_was_seen_and_where_to_read_on(source: str) -> None:
    subject = {"exporter": "{{ $labels.target }}", "vllm": "{{ $labels.instance }}"}[source]
    for rule in rule_table(Settings()):
        alert = alerts(source).get(rule.alert)
        if alert is None:
            continue
        said = alert["annotations"]
        assert said["summary"] == rule.summary
        assert said["description"].startswith(subject)
        assert said["description"].endswith(rule.advice)
        assert ("{{ $labels.model_name }}" in said["description"]) == (not rule.on_target)
        assert said["runbook_url"].endswith(f"/{rule.alert}")
        assert "{value}" not in said["description"]


@pytest.mark.parametrize("source", SOURCES)
def test_the_kubernetes_resource_holds_the_same_rules(source: str) -> None:
    resource = YAML(typ="safe").load(text(source, kubernetes=True))
    assert (resource["apiVersion"], resource["kind"]) == (
        "monitoring.coreos.com/v1",
        "PrometheusRule",
    )
    assert resource["metadata"]["name"] == f"specdec-{source}"
    assert resource["spec"]["groups"] == [group(source)]
