"""The rule table as Prometheus rules: recording rules for what it observes, and the alerts.

There are two sources. `exporter` is this exporter's counters. `vllm` is the server's own series,
for fleets that run no exporter; what those cannot express is left out there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from specdec_exporter import rules
from specdec_exporter.duration import format_duration
from specdec_exporter.expression import Expression, Quantity, Symbol, render
from specdec_exporter.rules import Rule, RuleSettings, rule_table
from specdec_exporter.thresholds import Thresholds

DAY = "1d"
MEMORY = "1m"
"""How long the server's positions stay known after a scrape; in the judge it is some intervals."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A symbol that has a recording rule of its own: the end of its name, and what it records."""

    operation: str
    expression: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where Prometheus finds what the rules observe."""

    name: str
    level: str
    """First part of the recorded names: the label that tells servers apart."""
    subject: str
    """Whom a description speaks of, as a template."""
    symbols: Mapping[Symbol, Recorded | str]
    """Recorded, or selected as it is; what is not here cannot be known from this source."""


def _source(
    *,
    name: str,
    level: str,
    subject: str,
    window: str,
    drafts: str,
    draft_tokens: str,
    accepted: str,
    per_position: str,
    steps: str,
    decode_seconds: str,
    k: Recorded | str,
    more: Mapping[Symbol, Recorded | str],
) -> Source:
    """Both sources count the same things under other names."""

    def increase(series: str) -> Recorded:
        total = f"sum without (engine) (increase({series}[{window}]))"
        return Recorded(f"increase{window}", total)

    def position(selector: str) -> str:
        return f"sum without (engine, position) ({selector})"

    def at(i: int) -> str:
        return f'increase({per_position}{{position="{i}"}}[{window}])'

    observed_k = k if isinstance(k, str) else f"{level}:specdec_{rules.K.name}:{k.operation}"
    squares = " or ".join(f"{2 * i + 1} * {at(i)}" if i else at(i) for i in range(rules.POSITIONS))
    padded = f"increase({drafts}[{window}]) - increase({steps}[{window}])"
    last = (
        f"increase({per_position}[{window}]) and ignoring (engine) "
        f'count_values without (engine) ("position", {observed_k} - 1)'
    )
    drafting = f"{level}:specdec_{rules.DRAFTING_CONCURRENCY.name}:mean{window}"
    operation = f"increase{window}"
    return Source(
        name=name,
        level=level,
        subject=subject,
        symbols={
            rules.K: k,
            rules.DRAFTS: increase(drafts),
            rules.DRAFT_TOKENS: increase(draft_tokens),
            rules.ACCEPTED_TOKENS: increase(accepted),
            rules.DECODE_STEPS: increase(steps),
            rules.PADDED_DRAFTS: Recorded(
                operation, f"sum without (engine) (clamp_min({padded}, 0))"
            ),
            rules.ACCEPTED_0: Recorded(operation, position(at(0))),
            rules.ACCEPTED_1: Recorded(operation, position(at(1))),
            rules.ACCEPTED_LAST: Recorded(operation, position(last)),
            rules.ACCEPTED_POSITIONS: Recorded(
                operation, position(f"increase({per_position}[{window}])")
            ),
            rules.ACCEPTED_SQUARES: Recorded(operation, position(squares)),
            rules.DECODE_CONCURRENCY: Recorded(
                f"rate{window}", f"sum without (engine) (rate({decode_seconds}[{window}]))"
            ),
            rules.GREATEST_DRAFTING_CONCURRENCY: f"max_over_time({drafting}[{DAY}])",
            **more,
        },
    )


def exporter_source(thresholds: Thresholds, window_seconds: float) -> Source:
    """Over the counters of this exporter; gauges for what is known to it alone."""
    window = format_duration(window_seconds)
    # With several windows served the gauges name theirs, with one they do not.
    of_window = f'window=~"|{window}"'

    def gain(operation: str, family: str) -> Recorded:
        selector = f'{family}{{match="concurrency", {of_window}}}'
        return Recorded(f"{operation}{window}", f"max without (match, window) ({selector})")

    reference = 'specdec_reference_position_acceptance_ratio{position=~"0|1"}'
    grace = format_duration(thresholds.target_down.grace)
    return _source(
        name="exporter",
        level="target",
        subject="{{ $labels.target }}",
        window=window,
        drafts="specdec_drafts_total",
        draft_tokens="specdec_draft_tokens_total",
        accepted="specdec_accepted_tokens_total",
        per_position="specdec_accepted_tokens_per_position_total",
        steps="specdec_decode_steps_total",
        decode_seconds="specdec_decode_seconds_total",
        k="specdec_num_speculative_tokens",
        more={
            rules.REFERENCE_FRONT: f"avg without (position) ({reference})",
            rules.DRIFT_SCORE: "specdec_drift_score",
            rules.LAST_POSITION_GAIN: "specdec_last_position_gain_ratio",
            rules.LAST_POSITION_GAIN_STDERR: "specdec_last_position_gain_ratio_stderr",
            rules.COVERED: Recorded(
                f"max{window}",
                f"max without (window) (specdec_baseline_covered{{{of_window}}})",
            ),
            rules.GAIN: gain("max", "specdec_tpot_gain_ratio"),
            rules.GAIN_STDERR: gain("max", "specdec_tpot_gain_ratio_stderr"),
            rules.UP: "specdec_up",
            rules.EXPECTED_UP: (
                f"(specdec_last_scrape_success_timestamp_seconds or specdec_up offset {grace})"
            ),
        },
    )


def vllm_source(window_seconds: float) -> Source:
    """Over vLLM's own series alone."""
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    # One lost scrape, which is not rare on a busy server, must not end what is pending.
    shown = f"last_over_time({per_position}[{MEMORY}])"
    return _source(
        name="vllm",
        level="instance",
        subject="{{ $labels.instance }}",
        window=format_duration(window_seconds),
        drafts="vllm:spec_decode_num_drafts_total",
        draft_tokens="vllm:spec_decode_num_draft_tokens_total",
        accepted="vllm:spec_decode_num_accepted_tokens_total",
        per_position=per_position,
        steps="vllm:inter_token_latency_seconds_count",
        decode_seconds="vllm:inter_token_latency_seconds_sum",
        k=Recorded("count", f"max without (engine) (count without (position) ({shown}))"),
        more={},
    )


SOURCES: Mapping[str, Callable[[Thresholds, float], Source]] = {
    "exporter": exporter_source,
    "vllm": lambda _, window_seconds: vllm_source(window_seconds),
}


class _Selector:
    """PromQL of symbols and quantities, and the recording rules that they turn out to need."""

    def __init__(self, source: Source, window: str) -> None:
        self._source = source
        self._window = window
        self.records: dict[str, str] = {}
        """Recording rules in an order in which each stands on earlier ones."""

    def __call__(self, of: Symbol | Quantity) -> str | None:
        if isinstance(of, Quantity):
            definition = render(of.definition, self)
            if definition is None:
                return None
            window = self._window if of.windowed else ""
            return self._record(of.name, f"{of.operation}{window}", definition)
        if of is rules.GREATEST_DRAFTING_CONCURRENCY:
            self(rules.DRAFTING_CONCURRENCY)
        if of is rules.ACCEPTED_LAST:
            self(rules.K)
        symbol = self._source.symbols.get(of)
        if isinstance(symbol, Recorded):
            return self._record(of.name, symbol.operation, symbol.expression)
        return symbol

    def _record(self, name: str, operation: str, expression: str) -> str:
        recorded = f"{self._source.level}:specdec_{name}:{operation}"
        self.records.setdefault(recorded, expression)
        return recorded


def rule_group(settings: RuleSettings, source: Source, window_seconds: float) -> dict[str, Any]:
    """The group of recording rules and alerts of one source, as plain values."""
    select = _Selector(source, format_duration(window_seconds))
    for quantity in (rules.ACCEPTANCE, rules.MAL, rules.FRONT, rules.POSITION_0, rules.POSITION_1):
        select(quantity)
    alerts = [
        alert
        for rule in rule_table(settings)
        for alert in _alerts(rule, select, source, settings.rules)
    ]
    if source.name == "exporter":
        alerts += _exporter_alerts(settings.rules)
    records = [
        {"record": name, "expr": _folded(expression)} for name, expression in select.records.items()
    ]
    return {
        "name": f"specdec-{source.name}",
        "interval": format_duration(settings.rules.evaluation_interval),
        "rules": records + alerts,
    }


def inexpressible(settings: RuleSettings, source: Source, window_seconds: float) -> list[str]:
    """Names of the rules that a source cannot express."""
    select = _Selector(source, format_duration(window_seconds))
    return [rule.name for rule in rule_table(settings) if render(rule.condition, select) is None]


def _alerts(
    rule: Rule, select: _Selector, source: Source, thresholds: Thresholds
) -> Iterator[dict[str, Any]]:
    severity = rule.severity
    cases: list[tuple[str, Expression]] = [(severity.usual, rule.condition)]
    if severity.relaxed is not None and severity.relaxed_when is not None:
        cases = [(severity.usual, rule.condition.unless(severity.relaxed_when))]
        cases.append((severity.relaxed, rule.condition & severity.relaxed_when))
    for level, condition in cases:
        expression = render(condition, select)
        if expression is None:
            continue
        alert: dict[str, Any] = {"alert": rule.alert, "expr": _folded(expression)}
        if rule.wait_seconds:
            alert["for"] = format_duration(rule.wait_seconds)
        if rule.keep_firing_seconds:
            alert["keep_firing_for"] = format_duration(rule.keep_firing_seconds)
        value = "{{ $value | humanizePercentage }}" if rule.is_ratio else "{{ $value | humanize }}"
        model = "" if rule.name == "target_down" else ", model {{ $labels.model_name }}"
        description = f"{source.subject}{model}: {rule.meaning.format(value=value)} {rule.advice}"
        alert["labels"] = {"severity": level}
        alert["annotations"] = {
            "summary": rule.summary,
            "description": description,
            "runbook_url": f"{thresholds.runbook_url}{rule.alert}",
        }
        yield alert


def _exporter_alerts(thresholds: Thresholds) -> list[dict[str, Any]]:
    """What only somebody beside the exporter can see."""
    alerts = {
        "SpecDecExporterDown": (
            'up{job=~".*specdec.*"} == 0',
            "The exporter does not answer Prometheus.",
            "{{ $labels.instance }}: no rule over the exporter's series is evaluated meanwhile. "
            "Look at the exporter's log and at the scrape job.",
        ),
        "SpecDecConfigReloadFailed": (
            "specdec_exporter_config_last_reload_successful == 0",
            "The exporter could not read its new settings.",
            "{{ $labels.instance }}: the settings before are in force. Run specdec-exporter "
            "check-config on the file; the log names the mistake.",
        ),
    }
    return [
        {
            "alert": name,
            "expr": expression,
            "for": "5m",
            "labels": {"severity": "warning"},
            "annotations": {
                "summary": summary,
                "description": description,
                "runbook_url": f"{thresholds.runbook_url}{name}",
            },
        }
        for name, (expression, summary, description) in alerts.items()
    ]


def _folded(expression: str) -> str:
    """A long condition with a line for each of its parts."""
    if len(expression) <= 80:
        return expression
    depth, lines, start = 0, [], 0
    for i, c in enumerate(expression):
        depth += (c == "(") - (c == ")")
        if depth == 0 and any(expression.startswith(f" {w} ", i) for w in ("and", "or", "unless")):
            lines.append(expression[start:i])
            start = i + 1
    lines.append(expression[start:])
    return LiteralScalarString("\n".join(lines) + "\n") if len(lines) > 1 else expression


def rule_file(
    settings: RuleSettings, source: Source, window_seconds: float, *, kubernetes: bool = False
) -> str:
    """The rules of one source as YAML.

    Args:
        settings: thresholds and variance inflation.
        source: what the rules stand on.
        window_seconds: the window that they look at.
        kubernetes: as a PrometheusRule of the Prometheus operator, instead of a rule file.
    """
    document: dict[str, Any] = {"groups": [rule_group(settings, source, window_seconds)]}
    if kubernetes:
        document = {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": f"specdec-{source.name}"},
            "spec": document,
        }
    missing = inexpressible(settings, source, window_seconds)
    head = f"# Written by `specdec-exporter rules --source {source.name}`; do not edit.\n"
    if missing:
        head += f"# Not expressible from these series: {', '.join(missing)}.\n"
    yaml = YAML()
    yaml.width = 10_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(document, text)
    return head + text.getvalue()
