"""The board of one target and model: does speculation pay, if not why, and what was done."""

from __future__ import annotations

from collections.abc import Sequence

from grafana import figures
from grafana.figures import (
    ANSWERS,
    DEFAULTS,
    FRONT_STEPS,
    GAIN_STEPS,
    GUIDE_GAIN,
    INTERVAL,
    LIMITS,
    WINDOW,
    Figures,
)
from grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    Line,
    PanelBuilder,
    Value,
    Words,
    band,
    graph,
    reference,
    tiles,
    timeline,
)

OF_TARGET = 'job=~"$job", target="$target"'
SELECTOR = f'{OF_TARGET}, model_name="$model_name"'
WINDOWED = f'{SELECTOR}, window=~"|{WINDOW}"'
"""With several windows served the gauges name theirs, with one they do not."""
ON = "job, instance, target, model_name"


def _gauge(name: str, more: str = "") -> str:
    return f"specdec_{name}{{{WINDOWED}{more}}}"


def _state(name: str) -> str:
    return f"specdec_{name}{{{SELECTOR}}}"


FIGURES = Figures(
    selector=SELECTOR,
    k=_state("num_speculative_tokens"),
    acceptance=_gauge("acceptance_ratio"),
    front=_gauge("front_acceptance_ratio"),
    front_stderr=_gauge("front_acceptance_ratio_stderr"),
    length=_gauge("mean_acceptance_length"),
    length_stderr=_gauge("mean_acceptance_length_stderr"),
    position=_gauge("position_acceptance_ratio"),
    position_0=_gauge("position_acceptance_ratio", ', position="0"'),
    reference_position=_state("reference_position_acceptance_ratio"),
    concurrency=_gauge("decode_concurrency"),
    drafts=_gauge("window_drafts"),
    draft_length=_gauge("mean_draft_length"),
    coverage=_gauge("draft_coverage_ratio"),
    on=ON,
    per_position_total="specdec_accepted_tokens_per_position_total",
    accepted_total="specdec_accepted_tokens_total",
    draft_tokens_total="specdec_draft_tokens_total",
    decode_tokens=("specdec_decode_tokens_total",),
    decode_seconds_total="specdec_decode_seconds_total",
)

FIRING: Words = {0: ("ok", GREY), 1: ("FIRING", RED)}


def panels() -> Sequence[tuple[str, Sequence[PanelBuilder]]]:
    """Rows by their headings."""
    return (
        ("", [_now()]),
        ("Does it pay?", [_tpot(), _gain(), _break_even()]),
        (
            "The drafter",
            [
                figures.acceptance(FIGURES),
                figures.length(FIGURES),
                figures.positions(FIGURES),
                figures.decay(FIGURES),
            ],
        ),
        ("What the rules say", [_rules(), _drift(), figures.evidence(FIGURES)]),
        ("k", [_k(), _speedup(), _tuner()]),
        (
            "Load and engines",
            [
                figures.concurrency(FIGURES),
                figures.throughput(FIGURES),
                figures.by_engine(FIGURES),
                figures.drafting(FIGURES),
                _scrapes(),
            ],
        ),
    )


def _now() -> PanelBuilder:
    gain = _gauge("tpot_gain_ratio", ', match="concurrency"')
    return tiles(
        "Now",
        f"The guide's numbers over the last {WINDOW}, with what it expects in brackets. A figure "
        "that is not here has no value now: without drafts there is no acceptance, without a "
        "baseline no gain, and a target that does not answer has none of them. Begin with the net "
        "gain: from 10 % all is well, below 0 lower k or switch speculation off, whatever "
        "acceptance says.",
        [
            Value(f"specdec_up{{{OF_TARGET}}}", "answers", words=ANSWERS),
            Value(gain, "net gain (10–15 %)", "percentunit", 1, GAIN_STEPS),
            Value(
                FIGURES.front,
                "front acceptance (34–36 %)",
                "percentunit",
                1,
                FRONT_STEPS,
            ),
            Value(FIGURES.length, "MAL (1.71 at k = 2)", "none", 2),
            Value(_gauge("tpot_seconds"), "TPOT", "s", 2),
            Value(FIGURES.k, "k", "none", 0),
            Value(
                f"sum (max by (rule) ({_firing()}))",
                "rules firing",
                "none",
                0,
                ((None, GREEN), (1.0, RED)),
            ),
        ],
    )


def _firing() -> str:
    """Those on the model, and the one on the target itself, which names no model."""
    return f'specdec_rule_firing{{{SELECTOR}}} or specdec_rule_firing{{{OF_TARGET}, model_name=""}}'


def _tpot() -> PanelBuilder:
    return graph(
        "TPOT against the baseline",
        "Time per output token after the first, weighted by tokens; what the same tokens would "
        "have cost without speculation at the same concurrency; and the time of a decode step, "
        "which is what vLLM calls inter-token latency: it is no TPOT under speculation. TPOT over "
        "the baseline: speculation costs time here. No baseline: give the target one, see "
        "docs/baselines.md.",
        [
            Line(_gauge("step_seconds"), "step (vLLM's inter-token latency)", GREY, width=1),
            reference(
                f"max without (source) ({_gauge('baseline_tpot_seconds')})",
                "baseline, without speculation",
                ORANGE,
            ),
            Line(_gauge("tpot_seconds"), "TPOT", BLUE),
        ],
        unit="s",
        low=0,
        width=8,
        empty="no traffic",
    )


def _gain() -> PanelBuilder:
    gain = _gauge("tpot_gain_ratio", ', match="concurrency"')
    stderr = _gauge("tpot_gain_ratio_stderr", ', match="concurrency"')
    at_throughput = _gauge("tpot_gain_ratio", ', match="throughput"')
    low, high = (f"{value:g} + 0 * ({FIGURES.k} > 0)" for value in GUIDE_GAIN)
    return graph(
        "Net TPOT gain",
        "How much less a token costs than without speculation, at equal load. This alone decides "
        "whether speculation pays. The guide says to hold 10–15 %. Under 10 %: review k and the "
        "load at which speculation is on. Under 0: lower k or switch it off. At equal throughput "
        "it reads larger, with the same sign: that is what a fixed arrival rate feels. No line: "
        f"no baseline, or one that does not know this load. {DEFAULTS}",
        [
            *band(
                f"{gain} - {INTERVAL} * {stderr}",
                f"{gain} + {INTERVAL} * {stderr}",
                "95 % interval",
                BLUE,
            ),
            *band(low, high, "guide 10–15 %", GREEN),
            reference(
                f"{LIMITS.net_gain_negative.below:g} * ({FIGURES.k} > 0)", "loses below 0", RED
            ),
            Line(
                at_throughput,
                "at equal throughput",
                TEAL,
                width=1,
            ),
            Line(gain, "net gain", BLUE),
        ],
        unit="percentunit",
        decimals=0,
        low=-0.1,
        high=0.2,
        width=8,
        empty="no baseline for this load, or no traffic",
    )


def _break_even() -> PanelBuilder:
    return graph(
        "Tokens per step against break-even",
        "A step with drafts takes longer than one without; it pays once it brings more tokens than "
        "the break-even length (step time over baseline). The distance between the lines is the "
        "gain. Break-even rising: steps got dearer, by load or by k. Tokens per step falling: the "
        "drafter got worse, or steps have no draft. It is a little under MAL, since steps without "
        "a draft count here.",
        [
            reference(_gauge("break_even_length"), "break-even length", ORANGE),
            Line(_gauge("tokens_per_step"), "tokens per step", BLUE),
        ],
        unit="none",
        decimals=2,
        low=1,
        width=8,
        empty="no traffic",
    )


def _rules() -> PanelBuilder:
    return timeline(
        "Rules",
        "Which rules of the exporter fire, and since when. A rule that has no meaning here (no "
        "baseline, speculation off) has no bar. Stronger rules inhibit the alerts of weaker ones, "
        "so read from the strongest: target_down, drafter_broken, drafter_misaligned, "
        "acceptance_low. What to do is in the runbook of each, docs/runbooks.",
        _firing(),
        "{{rule}}",
        FIRING,
        height=11,
        empty="no rule has a meaning here",
    )


def _drift() -> PanelBuilder:
    return graph(
        "Drift score",
        "How full the fullest chart against the frozen reference is; at 1 it is drift, and stays "
        "so until it is acknowledged. Rising for hours: a slow decline, which no fixed limit sees. "
        "Compare workload and images with those of the reference; acknowledge, or take a new "
        "reference if this is the new normal (docs/drift.md).",
        [
            reference(f"1 + 0 * ({FIGURES.k} > 0)", "drift from 1", RED),
            Line(_state("drift_score"), "drift score", PURPLE),
        ],
        unit="none",
        decimals=2,
        low=0,
        high=1.1,
        empty="no reference yet",
    )


def _k() -> PanelBuilder:
    return graph(
        "k, and the k advised",
        "Speculative tokens per draft as the server runs them (0 is off), and what the cost model "
        "and the guide's advice ask for. Each change is a mark on all graphs of this board. Where "
        "the two differ for long, the reason is on the exporter's page and in `specdec-exporter "
        "recommend`.",
        [
            Line(_state("recommended_speculative_tokens"), "advised", ORANGE, "dash", step=True),
            Line(FIGURES.k, "k in force", BLUE, step=True),
        ],
        unit="none",
        decimals=0,
        low=0,
        width=8,
        empty="target does not answer",
    )


def _speedup() -> PanelBuilder:
    return graph(
        "Predicted speed-up by k",
        "Tokens a second at a k against no speculation, by the cost model over the last hour's "
        "load; of the k in force and those beside it. Under 1 it is a loss. It is a prediction: "
        "the tuner verifies every change by what is measured afterwards, and so should you.",
        [
            reference(f"1 + 0 * ({FIGURES.k} >= 0)", "no speculation", GREY),
            Line(_state("predicted_speedup_ratio"), "k = {{k}}"),
        ],
        unit="none",
        decimals=2,
        width=8,
        empty="no cost known yet",
    )


def _tuner() -> PanelBuilder:
    def count(name: str, tile: str) -> Value:
        return Value(_state(f"autotune_{name}_total"), tile, "none", 0)

    last = _state("autotune_last_change_timestamp_seconds")
    return tiles(
        "Tuner",
        "Its mode (off, recommend, apply, paused), when k last changed, and how many changes it "
        "began, failed to carry out, and took back since the exporter started; what never happened "
        "has no tile. Changes taken back: the prediction was wrong here, read `specdec-exporter "
        "history`. To stop it at once: POST /api/v1/autotune/pause.",
        [
            Value(_state("autotune_mode"), "mode {{mode}}", words={1: ("in force", BLUE)}),
            Value(f"{last} * 1000", "last change", "dateTimeFromNow"),
            count("actuations", "changes begun"),
            count("actuation_failures", "changes failed"),
            count("rollbacks", "changes taken back"),
        ],
        width=8,
        height=8,
    )


def _scrapes() -> PanelBuilder:
    selector = f"{OF_TARGET}"
    return graph(
        "Scrapes and restarts",
        "Time of a scrape, and per second the scrapes that failed, by reason, and the restarts of "
        "the server. Failures and a line that ends: see whether the server runs and its /metrics "
        "can be reached from the exporter. Restarts reset the windows, and may change k.",
        [
            Line(f"specdec_scrape_duration_seconds{{{selector}}}", "duration, seconds", BLUE),
            Line(
                f"rate(specdec_scrape_failures_total{{{selector}}}[$__rate_interval]) > 0",
                "failed, {{reason}}",
                RED,
                "dash",
            ),
            Line(
                f'rate(specdec_target_restarts_total{{{SELECTOR}, engine=~"$engine"}}'
                "[$__rate_interval]) > 0",
                "restarts, engine {{engine}}",
                PURPLE,
                "dot",
            ),
        ],
        unit="none",
        low=0,
        empty="no scrapes",
    )
