"""The board of all targets: which one needs a look, and since when."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_exporter.config import Settings
from specdec_exporter.rules import rule_table

from grafana.figures import (
    ANSWERS,
    DEFAULTS,
    FRONT_STEPS,
    GAIN_STEPS,
    GUIDE_ACCEPTANCE,
    GUIDE_GAIN,
    LIMITS,
    TROUBLE,
    WEIGHTS,
    WINDOW,
)
from grafana.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Line,
    PanelBuilder,
    Value,
    band,
    graph,
    grid,
    reference,
    tiles,
)

OF_TARGET = 'job=~"$job", target=~"$target"'
SELECTOR = f'{OF_TARGET}, model_name=~"$model_name"'
WINDOWED = f'{SELECTOR}, window=~"|{WINDOW}"'
"""With several windows served the gauges name theirs, with one they do not."""
BY = "by (target, model_name)"
ON = "on (job, instance, target)"


def panels() -> Sequence[tuple[str, Sequence[PanelBuilder]]]:
    """Rows by their headings."""
    return (
        ("", [_now(), _targets()]),
        ("What hurts", [_firing_list(), _gains()]),
        ("Why", [_acceptances(), _drifts(), _throughput()]),
    )


def _gauge(name: str, more: str = "") -> str:
    return f"specdec_{name}{{{WINDOWED}{more}}}"


def _models() -> str:
    """Every model of every target that has ever answered: counters outlive an outage."""
    total = f"specdec_decode_steps_total{{{SELECTOR}}}"
    return f"max by (job, instance, target, model_name) ({total})"


def _of_models(on_target: str) -> str:
    """What is known of a target, for each of its models; one that never answered has none."""
    nameless = f"{on_target} unless {ON} specdec_decode_steps_total"
    return (
        f"0 * {_models()} + {ON} group_left (rule) {on_target} "
        f'or label_replace({nameless}, "model_name", "(never answered)", "", "")'
    )


def _rules(severity: str) -> str:
    """Names of the rules on models of a severity, as a regular expression."""
    names = [
        rule.name
        for rule in rule_table(Settings())
        if rule.severity.usual == severity and not rule.on_target
    ]
    return "|".join(sorted(names))


def _down() -> str:
    return _of_models(f'specdec_rule_firing{{{OF_TARGET}, rule="target_down"}}')


def _firing() -> str:
    """1 for every rule that fires, whichever exporter says so, and 0 for the others."""
    on_models = f'specdec_rule_firing{{{SELECTOR}, rule!="target_down"}}'
    return f"max by (target, model_name, rule) ({on_models} or {_down()})"


def _weighed() -> str:
    parts = [
        f'{weight} * specdec_rule_firing{{{SELECTOR}, rule=~"{_rules(severity)}"}}'
        for severity, weight in WEIGHTS.items()
    ]
    parts.append(f"{WEIGHTS['warning']} * ({_down()})")
    return f"max by (target, model_name, rule) ({' or '.join(parts)})"


def _now() -> PanelBuilder:
    def count(severity: str, color: str) -> Value:
        rules = _rules(severity) + ("|target_down" if severity == "warning" else "")
        firing = f'specdec_rule_firing{{{OF_TARGET}, rule=~"{rules}"}}'
        worst = f"max by (target, model_name, rule) ({firing})"
        return Value(
            f"sum ({worst})", f"{severity} rules firing", "none", 0, ((None, GREEN), (1.0, color))
        )

    up = f"max by (target) (specdec_up{{{OF_TARGET}}})"
    on = "on (job, instance, target, model_name)"
    rate = f"sum without (engine) (rate(specdec_decode_tokens_total{{{SELECTOR}}}[{WINDOW}]))"
    gain = _gauge("tpot_gain_ratio", ', match="concurrency"')
    cost = f"{_gauge('baseline_tpot_seconds')} * {on} {rate}"
    return tiles(
        "The fleet now",
        "How many targets answer and how many do not, how many rules fire, and the net gain of all "
        "tokens together: the decode time that speculation saves, over what it would have been, on "
        "targets whose baseline knows their load. Any rule that fires is in the table below.",
        [
            Value(f"sum ({up})", "targets answer", "none", 0),
            Value(
                f"count ({up} == 0) or 0 * count ({up})",
                "do not answer",
                "none",
                0,
                ((None, GREEN), (1.0, RED)),
            ),
            count("critical", RED),
            count("warning", ORANGE),
            count("info", BLUE),
            Value(
                f"sum ({gain} * {on} ({cost})) / sum ({cost} and {on} {gain})",
                "net gain of all tokens",
                "percentunit",
                1,
                GAIN_STEPS,
            ),
        ],
    )


def _targets() -> PanelBuilder:
    k = f"specdec_num_speculative_tokens{{{SELECTOR}}}"
    up = f"specdec_up{{{OF_TARGET}}}"
    gain = _gauge("tpot_gain_ratio", ', match="concurrency"')
    return grid(
        "Targets, the worst first",
        "Every target and model, sorted by the rules that fire (a critical one weighs 100, a "
        "warning 10, an info 1), then by net gain. A click on a target opens its board. Front "
        "acceptance is that of the first two positions, comparable at any k. Without drafts, "
        "traffic or a baseline there is no value, which is not 0. *Watched by* counts exporters: "
        "from 2 on they are a pair, of which the worse figure is shown, or two targets of one "
        "name, which need names of their own.",
        {"target": ("Target", 150), "model_name": ("Model", 210)},
        [
            Value(f"sum {BY} ({_weighed()})", "Trouble", words=TROUBLE, width=90),
            Value(f"sum {BY} ({_firing()})", "Firing", "none", 0, width=65),
            Value(
                f"min {BY} ({gain})",
                "Net gain",
                "percentunit",
                1,
                GAIN_STEPS,
                empty="not known",
                width=90,
            ),
            Value(
                f"min {BY} ({_gauge('front_acceptance_ratio')})",
                "Front acceptance",
                "percentunit",
                1,
                FRONT_STEPS,
                empty="no drafts",
                width=135,
            ),
            Value(
                f"min {BY} ({_gauge('mean_acceptance_length')})",
                "MAL",
                "none",
                2,
                empty="no drafts",
                width=80,
            ),
            Value(f"max {BY} ({k})", "k", "none", 0, width=45),
            Value(
                f"max {BY} (specdec_recommended_speculative_tokens{{{SELECTOR}}})",
                "Advised k",
                "none",
                0,
                width=85,
            ),
            Value(f"max {BY} ({_gauge('tpot_seconds')})", "TPOT", "s", 2, empty="idle", width=90),
            Value(
                f"min {BY} ({_of_models(up)})",
                "Answers",
                words=ANSWERS,
                width=75,
            ),
            Value(f"count {BY} ({_models()})", "Watched by", "none", 0, width=95),
        ],
        sort=[("Trouble", True), ("Net gain", False)],
        link=(
            "Open the board of this target",
            "/d/specdec-target?${datasource:queryparam}&${job:queryparam}"
            "&var-target=${__data.fields.Target:percentencode}&var-model_name=${__data.fields.Model:percentencode}"
            "&${__url_time_range}",
        ),
        height=10,
        empty="no target: is the exporter scraped, and the right job chosen?",
    )


def _firing_list() -> PanelBuilder:
    return grid(
        "Rules that fire",
        "Each rule that fires now, on which target. What to do is in the runbook of the rule, "
        "docs/runbooks, and in one sentence on the exporter's page. Stronger rules inhibit the "
        "alerts of weaker ones: drafter_broken says more than acceptance_low on the same row.",
        {"target": ("Target", 140), "model_name": ("Model", 210), "rule": ("Rule", 175)},
        [Value(f"{_firing()} == 1", "State", words={1: ("FIRING", RED)}, width=80)],
        sort=[("Rule", False), ("Target", False)],
        width=12,
        height=9,
        empty="no rule fires",
    )


def _gains() -> PanelBuilder:
    gain = _gauge("tpot_gain_ratio", ', match="concurrency"')
    low, high = GUIDE_GAIN
    return graph(
        "Net TPOT gain by target",
        "How much less a token costs than without speculation, at equal load. The guide says to "
        "hold 10–15 %. All targets falling together: load or a new image. One alone: open its "
        f"board. Below 0: lower its k or switch speculation off. {DEFAULTS}",
        [
            *band(f"vector({low:g})", f"vector({high:g})", "guide 10–15 %", GREEN),
            reference("vector(0)", "loses below 0", RED),
            Line(f"min {BY} ({gain})", "{{target}} {{model_name}}"),
        ],
        unit="percentunit",
        decimals=0,
        height=9,
        empty="no baseline, or no traffic",
    )


def _acceptances() -> PanelBuilder:
    front = f"min {BY} ({_gauge('front_acceptance_ratio')})"
    low, high = GUIDE_ACCEPTANCE
    limit = LIMITS.acceptance_low.below
    return graph(
        "Front acceptance by target",
        "Acceptance of the first two positions, comparable at any k. The guide sees 34–36 % at "
        "k = 2; under 25 % (33 % at k = 1) the traffic has probably left what the drafter was "
        "trained on. A gap is a time without drafts. It explains a gain, and is no verdict by "
        f"itself. {DEFAULTS}",
        [
            *band(f"vector({low:g})", f"vector({high:g})", "guide 34–36 % (k = 2)", GREEN),
            reference(f"vector({limit:g})", "low below 25 % (k = 2)", ORANGE),
            Line(front, "{{target}} {{model_name}}"),
        ],
        unit="percentunit",
        decimals=0,
        low=0,
        width=8,
    )


def _drifts() -> PanelBuilder:
    return graph(
        "Drift score by target",
        "How full each target's fullest chart against its frozen reference is. At 1 it is drift, "
        "until it is acknowledged. Several rising together: a change of traffic or of images; one "
        "alone: open its board.",
        [
            reference("vector(1)", "drift from 1", RED),
            Line(
                f"max {BY} (specdec_drift_score{{{SELECTOR}}})",
                "{{target}} {{model_name}}",
            ),
        ],
        unit="none",
        decimals=2,
        low=0,
        high=1.1,
        width=8,
        empty="no references yet",
    )


def _throughput() -> PanelBuilder:
    total = f'specdec_decode_tokens_total{{{SELECTOR}, engine=~"$engine"}}'
    return graph(
        "Decode throughput by target",
        "Tokens a second after the first of each request, of the engines chosen above, stacked: "
        "who carries the load, and what a loss on a target is worth. Idle is 0. A target that "
        "drops out while others rise has lost its traffic, not its speed.",
        [Line(f"sum {BY} (rate({total}[$__rate_interval]))", "{{target}} {{model_name}}")],
        unit="short",
        low=0,
        width=8,
        stacked=True,
        empty="no figures",
    )
