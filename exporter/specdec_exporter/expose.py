"""What is served to Prometheus: the only place with our metric names and HELP texts.

It turns statuses into metric families and knows nothing of where they come from. Run as a program
it prints the reference of all families, which is docs/metrics.md.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from specdec_exporter.duration import format_duration
from specdec_exporter.model import (
    Derived,
    EngineTotals,
    ExporterStatus,
    Gain,
    RuleState,
    TargetStatus,
    TunerStatus,
)

Sample = tuple[tuple[str, ...], float | None]
"""Label values after `target`, and the value; None is a sample that is left out."""


class Section(StrEnum):
    """Groups of families in the reference."""

    COUNTERS = "Counters"
    WINDOWED = "Figures of the window"
    STATE = "State"
    AUTOTUNE = "The choice of k"
    HEALTH = "Health of the scrapes"
    EXPORTER = "The exporter itself"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family of a target: its name, text and how to read it off a status."""

    name: str
    section: Section
    help: str
    formula: str
    labels: tuple[str, ...]
    samples: Callable[[TargetStatus], Iterable[Sample]]

    @property
    def is_counter(self) -> bool:
        """Counters alone end in `_total`."""
        return self.name.endswith("_total")

    @property
    def is_windowed(self) -> bool:
        """Whether its figures are those of a window."""
        return self.section is Section.WINDOWED


def _counter(
    name: str, upstream: str, help_: str, formula: str, read: Callable[[EngineTotals], float | None]
) -> Family:
    return Family(
        name=f"specdec_{name}",
        section=Section.COUNTERS,
        help=f"{help_} {upstream}".strip(),
        formula=formula,
        labels=("model_name", "engine"),
        samples=lambda status: (
            ((totals.model_name, totals.engine), read(totals)) for totals in status.totals
        ),
    )


def _windowed(
    name: str, upstream: str, help_: str, formula: str, read: Callable[[Derived], float | None]
) -> Family:
    return _windowed_by(name, upstream, help_, formula, (), lambda d: [((), read(d))])


def _windowed_by(
    name: str,
    upstream: str,
    help_: str,
    formula: str,
    labels: tuple[str, ...],
    read: Callable[[Derived], Iterable[Sample]],
) -> Family:
    return Family(
        name=f"specdec_{name}",
        section=Section.WINDOWED,
        help=f"{help_} {upstream}".strip(),
        formula=formula,
        labels=("model_name", *labels, "window"),
        samples=lambda status: (
            ((m.total.model_name, *values, format_duration(m.total.window_seconds)), value)
            for m in status.measurements
            for values, value in read(m.total)
        ),
    )


def _gain_by(
    name: str,
    help_: str,
    formula: str,
    labels: tuple[str, ...],
    read: Callable[[Gain], Iterable[Sample]],
) -> Family:
    return Family(
        name=f"specdec_{name}",
        section=Section.WINDOWED,
        help=f"{help_} {_S}",
        formula=formula,
        labels=("model_name", *labels, "window"),
        samples=lambda status: (
            ((m.total.model_name, *values, format_duration(m.total.window_seconds)), value)
            for m in status.measurements
            if m.gain is not None
            for values, value in read(m.gain)
        ),
    )


def _by_position(values: Iterable[float | None]) -> Iterator[Sample]:
    return (((str(i),), value) for i, value in enumerate(values))


_D = "vllm:spec_decode_num_drafts_total"
_T = "vllm:spec_decode_num_draft_tokens_total"
_A = "vllm:spec_decode_num_accepted_tokens_total"
_AI = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_G = "vllm:generation_tokens_total"
_F = "vllm:time_to_first_token_seconds_count"
_S = "vllm:inter_token_latency_seconds_sum"
_N = "vllm:inter_token_latency_seconds_count"


def _tuner_families() -> tuple[Family, ...]:
    def state(
        name: str, help_: str, read: Callable[[TunerStatus], float | None], formula: str = ""
    ) -> Family:
        return Family(
            name=f"specdec_{name}",
            section=Section.AUTOTUNE,
            help=help_,
            formula=formula,
            labels=("model_name",),
            samples=lambda status: (((t.model_name,), read(t)) for t in status.tuner),
        )

    return (
        state(
            "recommended_speculative_tokens",
            "The k that the cost model and the guide's advice ask for here.",
            lambda t: t.recommended_k,
        ),
        Family(
            name="specdec_predicted_speedup_ratio",
            section=Section.AUTOTUNE,
            help="Tokens a second at a k against no speculation; of the k in force and beside it.",
            formula="Σ w_c (1 + Σ p̂_i) / R(k, c)",
            labels=("model_name", "k"),
            samples=lambda status: (
                ((t.model_name, str(p.k)), p.speedup)
                for t in status.tuner
                for p in t.predictions
                if t.observed_k is not None and abs(p.k - t.observed_k) <= 1
            ),
        ),
        state(
            "last_position_gain_ratio",
            "Speed at the k in force over one less, less 1; only where both were measured, k ≥ 2.",
            lambda t: t.last_position_gain_ratio,
            "speedup(k) / speedup(k − 1) − 1",
        ),
        state(
            "last_position_gain_ratio_stderr",
            "Standard error of specdec_last_position_gain_ratio.",
            lambda t: t.last_position_gain_ratio_stderr,
        ),
        Family(
            name="specdec_autotune_mode",
            section=Section.AUTOTUNE,
            help="1, with the tuner's mode: off, recommend, apply, or paused.",
            formula="",
            labels=("model_name", "mode"),
            samples=lambda status: (
                ((t.model_name, "paused" if t.paused else t.mode), 1.0) for t in status.tuner
            ),
        ),
        Family(
            name="specdec_autotune_decisions_total",
            section=Section.AUTOTUNE,
            help="Decisions that differed from the one before, by kind.",
            formula="",
            labels=("model_name", "decision"),
            samples=lambda status: (
                ((t.model_name, kind), float(n)) for t in status.tuner for kind, n in t.decisions
            ),
        ),
        state(
            "autotune_actuations_total",
            "Changes of k that were begun.",
            lambda t: float(t.actuations) or None,
        ),
        state(
            "autotune_actuation_failures_total",
            "Changes of k that could not be carried out.",
            lambda t: float(t.actuation_failures) or None,
        ),
        state(
            "autotune_rollbacks_total",
            "Changes of k that were taken back.",
            lambda t: float(t.rollbacks) or None,
        ),
        state(
            "autotune_last_change_timestamp_seconds",
            "Unix time of the last change of k, by whomever.",
            lambda t: t.last_change,
        ),
    )


def _k(status: TargetStatus) -> Iterator[Sample]:
    seen: dict[str, int] = {}
    for m in status.measurements:
        seen[m.total.model_name] = m.total.num_speculative_tokens
    return (((model_name,), k) for model_name, k in seen.items())


FAMILIES: tuple[Family, ...] = (
    _counter("drafts_total", _D, "Drafts verified.", "D", lambda e: e.counters.drafts),
    _counter("draft_tokens_total", _T, "Tokens drafted.", "T", lambda e: e.counters.draft_tokens),
    _counter(
        "accepted_tokens_total",
        _A,
        "Drafted tokens accepted.",
        "A",
        lambda e: e.counters.accepted_tokens,
    ),
    Family(
        name="specdec_accepted_tokens_per_position_total",
        section=Section.COUNTERS,
        help=f"Drafts accepted up to and including a position, counted from 0. {_AI}",
        formula="A_i",
        labels=("model_name", "engine", "position"),
        samples=lambda status: (
            ((totals.model_name, totals.engine, str(i)), value)
            for totals in status.totals
            for i, value in enumerate(totals.counters.accepted_per_position)
        ),
    ),
    _counter(
        "decode_seconds_total",
        _S,
        "Seconds in decode, summed over requests.",
        "S",
        lambda e: e.counters.decode_seconds,
    ),
    _counter(
        "decode_tokens_total",
        f"{_G} - {_F}",
        "Generated tokens but for the first of each request.",
        "G − F",
        lambda e: e.decode_tokens if e.counters.generation_tokens is not None else None,
    ),
    _counter(
        "decode_steps_total",
        _N,
        "Decode steps, summed over requests.",
        "N",
        lambda e: e.counters.decode_steps,
    ),
    _counter(
        "target_restarts_total",
        "process_start_time_seconds",
        "Restarts seen: a counter that fell, or a new process start time.",
        "",
        lambda e: float(e.restarts),
    ),
    _windowed(
        "acceptance_ratio",
        f"{_A} / {_T}",
        "Accepted share of the drafted tokens; falls with k by construction.",
        "A / T",
        lambda d: d.acceptance_ratio,
    ),
    _windowed(
        "acceptance_ratio_stderr",
        f"{_A} / {_T}",
        "Standard error of the acceptance ratio, overdispersion included.",
        "√(o · Var J / D) · D / T",
        lambda d: d.acceptance_ratio_stderr,
    ),
    _windowed(
        "front_acceptance_ratio",
        f"{_AI} / {_D}",
        "Acceptance of the first two positions, comparable at any k.",
        "(A_0 + A_1) / (D + min(D, T − D))",
        lambda d: d.front_acceptance_ratio,
    ),
    _windowed(
        "front_acceptance_ratio_stderr",
        f"{_AI} / {_D}",
        "Standard error of the front acceptance ratio, overdispersion included.",
        "as above, with min(J, 2) for J",
        lambda d: d.front_acceptance_ratio_stderr,
    ),
    _windowed(
        "mean_acceptance_length",
        f"1 + {_A} / {_D}",
        "Tokens per verified draft, the target's own included; 1 to k + 1.",
        "1 + A / D",
        lambda d: d.mean_acceptance_length,
    ),
    _windowed(
        "mean_acceptance_length_stderr",
        f"1 + {_A} / {_D}",
        "Standard error of the mean acceptance length, overdispersion included.",
        "√(o · Var J / D)",
        lambda d: d.mean_acceptance_length_stderr,
    ),
    _windowed_by(
        "position_acceptance_ratio",
        f"{_AI} / {_D}",
        "Share of drafts accepted up to and including a position; unconditional.",
        "A_i / D",
        ("position",),
        lambda d: _by_position(d.position_acceptance_ratio),
    ),
    _windowed_by(
        "position_acceptance_ratio_stderr",
        f"{_AI} / {_D}",
        "Standard error of a position's acceptance ratio, overdispersion included.",
        "√(o · p_i (1 − p_i) / D)",
        ("position",),
        lambda d: _by_position(d.position_acceptance_ratio_stderr),
    ),
    _windowed(
        "mean_draft_length",
        f"{_T} / {_D}",
        "Tokens per draft; under 0.95 k, deeper positions are lower bounds.",
        "T / D",
        lambda d: d.mean_draft_length,
    ),
    _windowed(
        "draft_coverage_ratio",
        f"{_D} / {_N}",
        "Drafts per decode step; above 1 the server counts padded drafts.",
        "D / N",
        lambda d: d.draft_coverage_ratio,
    ),
    _windowed(
        "tokens_per_step",
        f"({_G} - {_F}) / {_N}",
        "Tokens that a request gains in a decode step; steps without a draft count.",
        "(G − F) / N",
        lambda d: d.tokens_per_step,
    ),
    _windowed(
        "step_seconds",
        f"{_S} / {_N}",
        "Duration of a decode step, which is what vLLM's inter-token latency measures.",
        "S / N",
        lambda d: d.step_seconds,
    ),
    _windowed(
        "tpot_seconds",
        f"{_S} / ({_G} - {_F})",
        "Time per output token after the first, weighted by tokens, live.",
        "S / (G − F)",
        lambda d: d.tpot_seconds,
    ),
    _windowed(
        "decode_concurrency",
        _S,
        "Mean requests in decode, summed over engines (Little's law).",
        "ΔS / Δt",
        lambda d: d.decode_concurrency,
    ),
    _gain_by(
        "baseline_tpot_seconds",
        "What the window's tokens would have cost without speculation, at the same concurrency.",
        "Σ w · TPOT₀(c) / Σ w",
        ("source",),
        lambda g: [((g.source,), g.baseline_tpot_seconds)],
    ),
    _gain_by(
        "baseline_covered",
        "Whether the baseline knows such a load; without a baseline there is no series.",
        "",
        (),
        lambda g: [((), float(g.covered))],
    ),
    _gain_by(
        "tpot_gain_ratio",
        "How much less a token costs than without speculation, at equal load.",
        "1 − TPOT / baseline",
        ("match",),
        lambda g: [
            (("concurrency",), g.tpot_gain_ratio),
            (("throughput",), g.tpot_gain_throughput_ratio),
        ],
    ),
    _gain_by(
        "tpot_gain_ratio_stderr",
        "Standard error of the gain, that of the baseline included.",
        "",
        ("match",),
        lambda g: [
            (("concurrency",), g.tpot_gain_ratio_stderr),
            (("throughput",), g.tpot_gain_throughput_ratio_stderr),
        ],
    ),
    _gain_by(
        "break_even_length",
        "Tokens per step from which on speculation pays.",
        "step time / baseline",
        (),
        lambda g: [((), g.break_even_length)],
    ),
    _windowed(
        "window_drafts",
        _D,
        "Drafts in the window, padded ones included: how much evidence the ratios rest on.",
        "D",
        lambda d: d.drafts,
    ),
    _windowed(
        "window_covered_seconds",
        "",
        "Seconds of the window that there are scrapes for.",
        "",
        lambda d: d.covered_seconds,
    ),
    _windowed_by(
        "acceptance_overdispersion",
        _AI,
        "Variance of accepted tokens over that of independent drafts; the larger is in force.",
        "o",
        ("source",),
        lambda d: (((o.source,), o.value) for o in d.overdispersion),
    ),
    Family(
        name="specdec_num_speculative_tokens",
        section=Section.STATE,
        help=f"Observed k, the number of position series; 0 without speculation. {_AI}",
        formula="k",
        labels=("model_name",),
        samples=_k,
    ),
    Family(
        name="specdec_drift_score",
        section=Section.STATE,
        help="How full the fullest drift chart is; 1 is drift, and stays until acknowledged.",
        formula="max S / H",
        labels=("model_name",),
        samples=lambda status: (((d.model_name,), d.score) for d in status.drift),
    ),
    Family(
        name="specdec_reference_position_acceptance_ratio",
        section=Section.STATE,
        help=f"Acceptance of a position in the frozen reference. {_AI} / {_D}",
        formula="A_i / D",
        labels=("model_name", "position"),
        samples=lambda status: (
            ((d.model_name, str(i)), p)
            for d in status.drift
            for i, p in enumerate(d.reference_position_acceptance_ratio)
        ),
    ),
    Family(
        name="specdec_rule_firing",
        section=Section.STATE,
        help="Whether a rule fires; one that has no meaning here has no series.",
        formula="",
        labels=("model_name", "rule"),
        samples=lambda status: (
            ((v.model_name, v.rule), float(v.state is RuleState.FIRING))
            for v in status.verdicts
            if v.state is not RuleState.INAPPLICABLE
        ),
    ),
    *_tuner_families(),
    Family(
        name="specdec_target_info",
        section=Section.STATE,
        help="1, with the target's URL and the labels that its settings give it.",
        formula="",
        labels=(),
        samples=lambda _: (),
    ),
    Family(
        name="specdec_up",
        section=Section.HEALTH,
        help="Whether the last scrape of the target gave a page that could be read.",
        formula="",
        labels=(),
        samples=lambda status: [((), float(status.up))],
    ),
    Family(
        name="specdec_scrape_duration_seconds",
        section=Section.HEALTH,
        help="Duration of the last scrape.",
        formula="",
        labels=(),
        samples=lambda status: [((), status.scrape_duration_seconds)],
    ),
    Family(
        name="specdec_scrape_failures_total",
        section=Section.HEALTH,
        help="Scrapes that gave no figures, by reason; a reason never met has no series.",
        formula="",
        labels=("reason",),
        samples=lambda status: (((reason,), float(n)) for reason, n in status.failures),
    ),
    Family(
        name="specdec_last_scrape_success_timestamp_seconds",
        section=Section.HEALTH,
        help="Unix time at which the last good scrape began.",
        formula="",
        labels=(),
        samples=lambda status: [((), status.last_success)],
    ),
)

_EXPORTER_FAMILIES = {
    "specdec_exporter_build_info": "1, with the versions of the exporter and of Python.",
    "specdec_exporter_config_last_reload_successful": "Whether the last reload of settings worked.",
}


class StatusCollector(Collector):
    """Makes fresh families of the status that `read` returns; does no I/O and keeps nothing."""

    def __init__(self, read: Callable[[], ExporterStatus]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Every family that has a sample now."""
        status = self._read()
        for family in FAMILIES:
            if family.name == "specdec_target_info":
                metric: Metric = _target_info(family, status)
            else:
                metric = _family(family, status)
            if metric.samples:
                yield metric
        build, reload = _EXPORTER_FAMILIES
        info = GaugeMetricFamily(
            build, _EXPORTER_FAMILIES[build], labels=("version", "python_version")
        )
        info.add_metric((status.version, platform.python_version()), 1.0)
        yield info
        yield GaugeMetricFamily(
            reload, _EXPORTER_FAMILIES[reload], value=float(status.last_reload_successful)
        )


def _family(family: Family, status: ExporterStatus) -> Metric:
    drop = 1 if family.is_windowed and not status.window_label else 0
    names = ("target", *family.labels[: len(family.labels) - drop])
    kind = CounterMetricFamily if family.is_counter else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily = kind(family.name, family.help, labels=names)
    for target in status.targets:
        for values, value in family.samples(target):
            if value is not None and math.isfinite(value):
                metric.add_metric((target.name, *values[: len(values) - drop]), value)
    return metric


def _target_info(family: Family, status: ExporterStatus) -> Metric:
    metric = Metric(family.name, family.help, "gauge")
    for target in status.targets:
        own = {"target": target.name, "url": target.url}
        metric.add_sample(family.name, {**dict(target.labels), **own}, 1.0)
    return metric


def registry(read: Callable[[], ExporterStatus]) -> CollectorRegistry:
    """A private registry with nothing in it but the exporter's own families."""
    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(StatusCollector(read))
    return collectors


def render(collectors: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page and its content type, in the text format or OpenMetrics, by the Accept header."""
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError):
        # A version that is no number; whoever sends it reads text as well.
        encoder, content_type = choose_encoder("")
    return encoder(collectors), content_type


def reference() -> Iterator[str]:
    """Lines of docs/metrics.md."""
    yield "# Metrics"
    yield ""
    yield "Generated by `make docs`. Every family but those of the exporter itself has the label"
    yield "`target` beside those named here; `window` is there only when several are configured."
    yield "HELP texts end with the server's own series. A sample without a value is left out:"
    yield "absent is not zero."
    for section in Section:
        families = [f for f in FAMILIES if f.section is section]
        yield ""
        yield f"## {section}"
        yield ""
        if section is Section.EXPORTER:
            yield "| family | type | meaning |"
            yield "|---|---|---|"
            for name, help_ in _EXPORTER_FAMILIES.items():
                yield f"| `{name}` | gauge | {help_} |"
            continue
        yield "| family | type | labels | formula | meaning |"
        yield "|---|---|---|---|---|"
        for f in families:
            labels = ", ".join(f"`{label}`" for label in f.labels)
            kind = "counter" if f.is_counter else "gauge"
            help_ = f.help.replace("|", "\\|")
            yield f"| `{f.name}` | {kind} | {labels} | {f.formula} | {help_} |"


if __name__ == "__main__":
    print("\n".join(reference()))
