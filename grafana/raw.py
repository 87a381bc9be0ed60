"""The board over vLLM's own series: what can be known of servers without an exporter.

It stands on the recording rules of `alerts/fleet.rules.yaml`, and on the server's counters.
"""

from __future__ import annotations

from collections.abc import Sequence

from grafana import figures
from grafana.figures import FRONT_STEPS, TROUBLE, WEIGHTS, WINDOW, Figures
from grafana.panels import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    Line,
    PanelBuilder,
    Value,
    graph,
    grid,
    reference,
    timeline,
)

OF_JOB = 'job=~"$job"'
OF_SERVER = f'{OF_JOB}, instance="$target"'
SELECTOR = f'{OF_SERVER}, model_name="$model_name"'
ON = "job, instance, model_name"
RECORDED = "instance:specdec_"


def _recorded(name: str, selector: str = SELECTOR) -> str:
    return f"{RECORDED}{name}{{{selector}}}"


def _ratio(name: str, selector: str = SELECTOR) -> str:
    """Without drafts a recorded ratio is 0 / 0, which is no figure."""
    return f"({_recorded(name, selector)} >= 0)"


def _increase(series: str, selector: str = SELECTOR) -> str:
    """As the recording rules count."""
    return f"sum without (engine) (increase(vllm:{series}{{{selector}}}[{WINDOW}]))"


FIGURES = Figures(
    selector=SELECTOR,
    k=_recorded("num_speculative_tokens:count"),
    acceptance=_ratio("acceptance:ratio5m"),
    front=_ratio("front_acceptance:ratio5m"),
    front_stderr=_ratio("front_acceptance:stderr5m"),
    length=_ratio("acceptance_length:mean5m"),
    length_stderr=None,
    position=f"{_increase('spec_decode_num_accepted_tokens_per_pos_total')} / on ({ON}) "
    f"group_left () ({_recorded('verified_drafts:increase5m')} > 0)",
    position_0=_ratio("position_0_acceptance:ratio5m"),
    reference_position=None,
    concurrency=_recorded("decode_concurrency:rate5m"),
    drafts=_recorded("drafts:increase5m"),
    draft_length=_ratio("draft_length:mean5m"),
    coverage=f"{_recorded('drafts:increase5m')} / ({_recorded('decode_steps:increase5m')} > 0)",
    on=ON,
    per_position_total="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    accepted_total="vllm:spec_decode_num_accepted_tokens_total",
    draft_tokens_total="vllm:spec_decode_num_draft_tokens_total",
    decode_tokens=("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"),
    decode_seconds_total="vllm:inter_token_latency_seconds_sum",
)


def _decode_tokens(selector: str) -> str:
    """Generated tokens but for the first of each request, where there are any."""
    generated = _increase("generation_tokens_total", selector)
    first = _increase("time_to_first_token_seconds_count", selector)
    return f"({generated} - {first} > 0)"


def _steps() -> str:
    """Counted here and now, as the seconds and tokens are that it divides."""
    return f"({_increase('inter_token_latency_seconds_count')} > 0)"


def _tpot(selector: str) -> str:
    seconds = _increase("inter_token_latency_seconds_sum", selector)
    return f"{seconds} / {_decode_tokens(selector)}"


def panels() -> Sequence[tuple[str, Sequence[PanelBuilder]]]:
    """Rows by their headings."""
    return (
        ("", [_servers()]),
        (
            "The drafter",
            [
                figures.acceptance(FIGURES),
                figures.length(FIGURES),
                figures.positions(FIGURES),
                figures.decay(FIGURES),
            ],
        ),
        ("Cost and load", [_time(), _per_step(), figures.concurrency(FIGURES)]),
        (
            "What the rules say",
            [
                _alerts(),
                _k(),
                figures.evidence(FIGURES, width=8),
                figures.drafting(FIGURES, width=8),
            ],
        ),
        ("Engines", [figures.by_engine(FIGURES, width=12), figures.throughput(FIGURES, width=12)]),
    )


def _servers() -> PanelBuilder:
    by = "by (instance, model_name)"
    k = _recorded("num_speculative_tokens:count", OF_JOB)
    decoding = _recorded("decode_concurrency:rate5m", OF_JOB)
    alerts = f'ALERTS{{{OF_JOB}, alertname=~"SpecDec.+"'
    weighed = " or ".join(
        f'{weight} * {alerts}, alertstate="firing", severity="{severity}"}}'
        for severity, weight in WEIGHTS.items()
    )

    def all_of(name: str) -> str:
        return f"min {by} {_ratio(name, OF_JOB)}"

    return grid(
        "Servers, the worst first",
        "Every server, sorted by the alerts that fire (a critical one weighs 100, "
        "a warning 10, an info 1), then by front acceptance. A click on a server shows it below. "
        "There is no net gain here: vLLM's own series know no baseline; the exporter does. Values "
        "that are missing: no drafts in the window. A server that does not answer has no row.",
        {"instance": ("Server", 220), "model_name": ("Model", 270)},
        [
            Value(
                f"sum {by} ({weighed}) or 0 * max {by} ({decoding})",
                "Trouble",
                words=TROUBLE,
                width=110,
            ),
            Value(f'count {by} ({alerts}, alertstate="pending"}})', "Pending", "none", 0, width=90),
            Value(
                all_of("front_acceptance:ratio5m"),
                "Front acceptance",
                "percentunit",
                1,
                FRONT_STEPS,
                empty="no drafts",
                width=140,
            ),
            Value(
                all_of("acceptance_length:mean5m"), "MAL", "none", 2, empty="no drafts", width=90
            ),
            Value(f"max {by} ({k})", "k", "none", 0, width=60),
            Value(f"max {by} ({_tpot(OF_JOB)})", "TPOT", "s", 2, empty="idle", width=100),
            Value(
                f"max {by} ({decoding})",
                "In decode",
                "none",
                1,
                width=100,
            ),
        ],
        sort=[("Trouble", True), ("Front acceptance", False)],
        link=(
            "Show this server below",
            "/d/specdec-raw?${datasource:queryparam}&${job:queryparam}"
            "&var-target=${__data.fields.Server:percentencode}&var-model_name=${__data.fields.Model:percentencode}"
            "&${__url_time_range}",
        ),
        height=8,
        empty="no server, or alerts/fleet.rules.yaml is not loaded",
    )


def _time() -> PanelBuilder:
    seconds = _increase("inter_token_latency_seconds_sum")
    return graph(
        "TPOT and step time",
        "Time per output token after the first, weighted by tokens, and the time of a decode step, "
        "which is what vLLM calls inter-token latency: it is no TPOT under speculation. Compare "
        "TPOT with a server without speculation at the same number of requests in decode; without "
        "one nobody knows whether speculation pays. The exporter does this comparison.",
        [
            Line(f"{seconds} / {_steps()}", "step (vLLM's inter-token latency)", GREY, width=1),
            Line(_tpot(SELECTOR), "TPOT", BLUE),
        ],
        unit="s",
        low=0,
        width=8,
        empty="no traffic",
    )


def _per_step() -> PanelBuilder:
    return graph(
        "Tokens per decode step",
        "What a request gains in a decode step, steps without a draft included. 1 is what there is "
        "without speculation. Far under the mean acceptance length: many steps have no draft. "
        "Falling with acceptance: the drafter or the workload.",
        [
            reference(f"1 + 0 * {FIGURES.k}", "without speculation"),
            Line(f"{_decode_tokens(SELECTOR)} / {_steps()}", "tokens per step", BLUE),
        ],
        unit="none",
        decimals=2,
        low=0.9,
        width=8,
        empty="no traffic",
    )


def _alerts() -> PanelBuilder:
    def state(name: str) -> str:
        return f'ALERTS{{{SELECTOR}, alertname=~"SpecDec.+", alertstate="{name}"}}'

    return timeline(
        "Alerts",
        "What Prometheus has pending or firing for this server by alerts/fleet.rules.yaml; a gap "
        "is calm. What to do is in the runbook of each, docs/runbooks. The net gain, drift and "
        "whether the server answers are not known to these rules.",
        f"max by (alertname) (2 * {state('firing')} or {state('pending')})",
        "{{alertname}}",
        {1: ("pending", ORANGE), 2: ("FIRING", RED)},
        height=7,
        empty="calm: nothing is pending or firing",
    )


def _k() -> PanelBuilder:
    return graph(
        "k",
        "Speculative tokens per draft as the server runs them: the number of its position series. "
        "Each change is a mark on all graphs of this board. It changes only at a restart: an "
        "unexpected step is a new configuration or image.",
        [Line(FIGURES.k, "k in force", BLUE, step=True)],
        unit="none",
        decimals=0,
        low=0,
        width=8,
        empty="no speculation",
    )
