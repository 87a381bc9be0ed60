"""Rules and boards that surely read vLLM wrongly are told, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.doctor.finding import Finding
from specdec_exporter.doctor.launch import Unreadable
from specdec_exporter.doctor.queries import query_findings, read_queries

ROOT = Path(__file__).parents[1]
ITL = "vllm:inter_token_latency_seconds"
MEAN = f"sum(rate({ITL}_sum[5m])) / sum(rate({ITL}_count[5m]))"
QUANTILE = f"histogram_quantile(0.99, sum by (le) (rate({ITL}_bucket[5m])))"
TPOT = (
    f"sum(rate({ITL}_sum[5m])) / (sum(rate(vllm:generation_tokens_total[5m])) "
    "- sum(rate(vllm:time_to_first_token_seconds_count[5m])))"
)
RATIO = (
    "rate(vllm:spec_decode_num_accepted_tokens_total[5m]) "
    "/ rate(vllm:spec_decode_num_draft_tokens_total[5m])"
)


def rule(expr: str, **names: str) -> str:
    return json.dumps({"groups": [{"name": "g", "rules": [{**names, "expr": expr}]}]})


def board(title: str, expr: str, legend: str = "__auto") -> str:
    target = {"expr": expr, "legendFormat": legend, "refId": "A"}
    panels = [{"type": "row", "panels": [{"title": title, "targets": [target]}]}]
    return json.dumps({"title": "vLLM", "panels": panels}, indent=1)


def of(text: str) -> list[Finding]:
    return query_findings(read_queries(text, "f"))


def checks(text: str) -> list[str]:
    return [finding.check for finding in of(text)]


@pytest.mark.parametrize(
    "text",
    [
        rule(MEAN, alert="VllmTpotHigh"),
        rule(f"{MEAN} > 0.05", alert="HighTimePerOutputToken"),
        rule(QUANTILE, record="vllm:tpot_seconds:p99"),
        rule(MEAN.replace("inter_token_latency", "time_per_output_token"), alert="TPOT"),
        board("Time per output token", MEAN),
        board("Time Per Output Token Latency", QUANTILE, "P99"),
        board("Latency", MEAN, "TPOT {{instance}}"),
        board("TPOT", MEAN, "{{instance}}"),
    ],
)
def test_a_step_time_that_is_called_tpot_is_told(text: str) -> None:
    assert checks(text) == ["step-time-as-tpot"]


@pytest.mark.parametrize(
    "text",
    [
        rule(MEAN, alert="VllmStepsSlow"),
        rule(TPOT, alert="VllmTpotHigh"),
        rule(TPOT, record="vllm:tpot_seconds:mean5m"),
        rule("specdec_tpot_seconds > 0.05", alert="TpotHigh"),
        board("Inter-token latency", MEAN),
        board("TPOT and what it is taken for", MEAN, "inter-token latency"),
        board("TPOT", TPOT),
        board("TPOT", f"rate({ITL}_sum[5m])"),
    ],
)
def test_a_step_time_by_its_own_name_and_a_true_tpot_are_not(text: str) -> None:
    assert checks(text) == []


def test_a_step_time_that_is_compared_with_a_tpot_is_told() -> None:
    assert checks(rule(f"{MEAN} > specdec_baseline_tpot_seconds", alert="Slower")) == [
        "step-time-as-tpot"
    ]


def test_a_recorded_step_time_is_one_under_its_new_name_too() -> None:
    def rules(used: str) -> str:
        recorded = {"record": "job:itl:mean5m", "expr": MEAN}
        alert = {"alert": "TpotHigh", "expr": f"{used} > 0.05"}
        return json.dumps({"groups": [{"rules": [recorded, alert]}]})

    assert checks(rules("job:itl:mean5m")) == ["step-time-as-tpot"]
    assert checks(rules("job:itl:mean5m_other")) == []


@pytest.mark.parametrize(
    "expr",
    [
        f"avg({RATIO})",
        f"avg by (model_name) ({RATIO})",
        f"1 - avg without (engine) ({RATIO}) > 0.5",
        'avg(rate(specdec_accepted_tokens_total{target=~"a(b/c"}[5m]) '
        "/ rate(specdec_drafts_total[5m]))",
    ],
)
def test_a_mean_of_ratios_is_told(expr: str) -> None:
    assert checks(rule(expr, alert="Acceptance")) == ["mean-of-ratios"]


@pytest.mark.parametrize(
    "expr",
    [
        RATIO,
        RATIO.replace("rate", "sum(rate").replace("[5m])", "[5m]))"),
        f"max({RATIO})",
        "avg(specdec_acceptance_ratio)",
        "avg(rate(vllm:spec_decode_num_drafts_total[5m])) / 2",
        f"avg(rate({ITL}_sum[5m]) / rate({ITL}_count[5m]))",
        "avg((",
    ],
)
def test_other_means_and_ratios_are_not(expr: str) -> None:
    assert checks(rule(expr, alert="Acceptance")) == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "alerts").glob("*.rules.yaml")), ids=lambda p: p.name
)
def test_the_rules_of_this_exporter_are_clean(path: Path) -> None:
    queries = read_queries(path.read_text(), path.name)
    assert len(queries) > 10
    assert query_findings(queries) == []


YAML = f"""\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
spec:
  groups:
    - name: vllm
      rules:
        - alert: TpotHigh
          expr: |
            # over all engines
            {MEAN} > 0.05
          annotations: {{expr: none, summary: TPOT}}
        - alert: Acceptance
          expr: avg({RATIO}) < 0.2
"""


def test_a_finding_says_on_which_line_the_expression_stands() -> None:
    assert [(f.check, f.where) for f in of(YAML)] == [
        ("step-time-as-tpot", "f:9"),
        ("mean-of-ratios", "f:13"),
    ]
    text = board("TPOT", QUANTILE.replace("0.99", "0.5"))
    (found,) = of(text)
    assert "expr" in text.splitlines()[int(found.where.partition(":")[2]) - 1]


@pytest.mark.parametrize("text", ["", "a: b\n", "[1]", "{", "a: [", "groups: []\n"])
def test_what_is_neither_rules_nor_board_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match=r"^f: "):
        read_queries(text, "f")


def test_every_document_of_a_manifest_is_read() -> None:
    manifest = f"kind: Service\n---\nkind: PrometheusRule\nspec: {rule(MEAN, record='tpot')}\n"
    assert checks(manifest) == ["step-time-as-tpot"]


def test_odd_boards_are_read_past() -> None:
    odd: list[Any] = [
        {"title": 1, "expr": MEAN, "legendFormat": 3, "record": []},
        {"expr": 2},
        None,
    ]
    assert checks(json.dumps({"panels": odd})) == []
    assert len(read_queries(json.dumps({"panels": odd}), "f")) == 1
    assert checks(json.dumps({"panels": [{"expr": ""}]})) == []
