"""Bytes of a metrics page to a `Snapshot`: the only place that knows an engine's metric names.

A cheap filter on bytes keeps the dozen lines that matter, and prometheus_client's own parser reads
them. This module does no I/O, keeps nothing between pages and never guesses: a page is either
understood in full or refused with a reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specdec_exporter.model import Counters, EngineSample, Reason, ScrapeError, Snapshot

_PROCESS_START = "process_start_time_seconds"
_MOST = 1e15
"""No server counts so far, and much beyond it floating-point numbers no longer count by ones."""
_MOST_LINES = 10_000
"""Some hundred engines; more would hold up the other targets for long."""
_DIGITS = b"0123456789.eE+-"
"""What a number is written with; anything else (NaN, a comment) the official parser reads."""
_POSITION = re.compile(r"[0-9]{1,2}")
_LOOKS_LIKE_METRICS = re.compile(rb"^(#|[A-Za-z_:][A-Za-z0-9_:]*(\{.*\})?\s+[-+0-9.a-zA-Z]+)", re.M)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The names under which one kind of server shows the counters of the model."""

    namespace: str
    drafts: str
    draft_tokens: str
    accepted_tokens: str
    accepted_per_position: str
    generation_tokens: str
    first_tokens: str
    decode_histograms: tuple[str, ...]
    """Histograms of one observation per request and decode step, best first: where a server shows
    several they hold the same observations, so only the first is read."""
    prompt_tokens: str
    cached_prompt_tokens: str
    engine_steps: str
    preemptions: str
    finished_requests: str
    """Has a label `finished_reason`."""
    failures: tuple[str, ...]
    """The values of it that are failures."""
    no_series_hint: str

    @property
    def names(self) -> tuple[str, ...]:
        """Every series name that is read, in no order that matters."""
        return (
            self.drafts,
            self.draft_tokens,
            self.accepted_tokens,
            self.accepted_per_position,
            self.generation_tokens,
            self.first_tokens,
            *(f"{name}_sum" for name in self.decode_histograms),
            *(f"{name}_count" for name in self.decode_histograms),
            *self.circumstances,
        )

    @property
    def circumstances(self) -> tuple[str, ...]:
        """Of the names those that a page, and an engine on it, can be without."""
        return (
            self.prompt_tokens,
            self.cached_prompt_tokens,
            self.engine_steps,
            self.preemptions,
            self.finished_requests,
        )


VLLM = Adapter(
    namespace="vllm:",
    drafts="vllm:spec_decode_num_drafts_total",
    draft_tokens="vllm:spec_decode_num_draft_tokens_total",
    accepted_tokens="vllm:spec_decode_num_accepted_tokens_total",
    accepted_per_position="vllm:spec_decode_num_accepted_tokens_per_pos_total",
    generation_tokens="vllm:generation_tokens_total",
    first_tokens="vllm:time_to_first_token_seconds_count",
    decode_histograms=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    prompt_tokens="vllm:prompt_tokens_total",
    cached_prompt_tokens="vllm:prompt_tokens_cached_total",
    engine_steps="vllm:iteration_tokens_total_count",
    preemptions="vllm:num_preemptions_total",
    finished_requests="vllm:request_success_total",
    failures=("abort", "error"),
    no_series_hint="is the server running with --disable-log-stats, or is this another port?",
)


def parse(
    page: bytes,
    *,
    t: float,
    metric_prefix: str = "",
    excerpt: bool = False,
    adapter: Adapter = VLLM,
) -> Snapshot:
    """Read one page of metrics in Prometheus' text format.

    Args:
        page: the whole page, decompressed.
        t: time of the scrape in seconds, taken over as it is.
        metric_prefix: what a proxy put in front of every name, such as `ray_`.
        excerpt: the page is a recording that holds chosen series only, so a family that is not
            there was not recorded. A whole page without one was cut off, and is refused.
        adapter: the server's names.

    Raises:
        ScrapeError: the page cannot be trusted; `reason` says why.
    """
    if not page.strip():
        raise ScrapeError(Reason.EMPTY, "the page is empty; is this the metrics address?")
    if not page.endswith(b"\n"):
        if not _LOOKS_LIKE_METRICS.search(page):
            raise _not_metrics(page)
        raise ScrapeError(
            Reason.TRUNCATED, "the page ends in the middle of a line; the transfer was cut off"
        )
    wanted = {metric_prefix + name: name for name in adapter.names}
    lines = _lines(page, (*wanted, _PROCESS_START))
    if len(lines) > _MOST_LINES:
        raise ScrapeError(
            Reason.TOO_LARGE,
            f"{len(lines)} series of engines on one page, over {_MOST_LINES}; scrape each server",
        )
    samples = _read(lines)

    engines: Mapping[_EngineKey, _Series] = defaultdict(_Series)
    process_starts: list[float] = []
    for sample in samples:
        if sample.name == _PROCESS_START:
            process_starts.append(_checked(sample))
        elif (name := wanted.get(sample.name)) is not None:
            _collect(engines, name, sample, adapter)
    # Circumstances under labels of their own are of no engine.
    engines = {key: series for key, series in engines.items() if series.of_engine}
    if not engines:
        raise _no_series(page, metric_prefix, adapter)
    return Snapshot(
        t=t,
        engines=tuple(
            _engine_sample(key, engines[key], adapter, excerpt) for key in sorted(engines)
        ),
        # Several start times mean an aggregated page: no single process to speak of.
        process_start_time=process_starts[0] if len(process_starts) == 1 else None,
    )


_EngineKey = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Series:
    values: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)
    failures: dict[str, float] = field(default_factory=dict)
    of_engine: bool = False
    """Whether it has more than circumstances."""


def _lines(page: bytes, names: Iterable[str]) -> list[bytes]:
    """The lines that begin with one of the names."""
    starts = tuple(name.encode() for name in names)
    shortest = min(map(len, starts))
    # Most lines differ early, and one look into a set is cheaper than a dozen comparisons.
    heads = {start[:shortest] for start in starts}
    return [
        line for line in page.split(b"\n") if line[:shortest] in heads and line.startswith(starts)
    ]


def _read(lines: Iterable[bytes]) -> list[Sample]:
    """Samples of lines by the official parser, which reads each series' name and labels once."""
    try:
        samples = []
        for line in lines:
            series, _, value = line.rpartition(b" ")
            if series.endswith(b"}") and value.strip(_DIGITS) == b"":
                samples += [s._replace(value=float(value)) for s in _series(series)]
            else:
                samples += _official(line)
        return samples
    except (ValueError, IndexError, KeyError) as error:
        raise ScrapeError(
            Reason.MALFORMED, f"a line is not in Prometheus' text format ({_short(error)})"
        ) from error


def _collect(
    engines: Mapping[_EngineKey, _Series], name: str, sample: Sample, adapter: Adapter
) -> None:
    value = _checked(sample)
    labels = dict(sample.labels)
    finished = labels.pop("finished_reason", "") if name == adapter.finished_requests else None
    if finished is not None and finished not in adapter.failures:
        return
    model_name = labels.pop("model_name", "")
    engine = labels.pop("engine", "0")
    position = labels.pop("position", None) if name == adapter.accepted_per_position else None
    series = engines[model_name, engine, tuple(sorted(labels.items()))]
    if name == adapter.accepted_per_position:
        if position is None or not _POSITION.fullmatch(position):
            raise ScrapeError(
                Reason.MALFORMED,
                f"{sample.name} has position={(position or '')[:20]!r}; expected 0 to 99",
            )
        duplicate = int(position) in series.positions
        series.positions[int(position)] = value
    elif finished is not None:
        duplicate = finished in series.failures
        series.failures[finished] = value
    else:
        duplicate = name in series.values
        series.values[name] = value
    series.of_engine |= name not in adapter.circumstances
    if duplicate:
        raise ScrapeError(
            Reason.DUPLICATE_SERIES,
            f"{sample.name} of engine {engine!r} stands twice on the page; "
            "scrape each server itself, not a merged page",
        )


@lru_cache(maxsize=8192)
def _series(name_and_labels: bytes) -> list[Sample]:
    return _official(name_and_labels + b" 0")


def _official(line: bytes) -> list[Sample]:
    families = text_string_to_metric_families(line.decode())
    return [sample for family in families for sample in family.samples]


def _checked(sample: Sample) -> float:
    if not 0 <= sample.value <= _MOST:
        raise ScrapeError(
            Reason.BAD_VALUE, f"{sample.name} is {sample.value}; expected 0 to {_MOST:g}"
        )
    return sample.value


def _engine_sample(
    key: _EngineKey, series: _Series, adapter: Adapter, excerpt: bool
) -> EngineSample:
    model_name, engine, extra_labels = key
    values, k = series.values, len(series.positions)
    if sorted(series.positions) != list(range(k)):
        raise _missing(engine, f"positions {sorted(series.positions)} have a gap")
    speculation = [adapter.drafts, adapter.draft_tokens, adapter.accepted_tokens]
    absent = [name for name in speculation if name not in values]
    if not k:
        absent.append(adapter.accepted_per_position)
    if absent and len(absent) <= len(speculation):
        raise _missing(engine, f"{absent[0]} is not there, though its companions are")
    histogram = next(
        (h for h in adapter.decode_histograms if {f"{h}_sum", f"{h}_count"} <= values.keys()),
        adapter.decode_histograms[0],
    )
    decode_seconds, decode_steps = f"{histogram}_sum", f"{histogram}_count"
    if not excerpt:
        for name in (adapter.generation_tokens, adapter.first_tokens, decode_seconds, decode_steps):
            if name not in values:
                raise _missing(engine, f"{name} is not on the page; was it cut off?")
    return EngineSample(
        model_name=model_name,
        engine=engine,
        counters=Counters(
            drafts=values.get(adapter.drafts),
            draft_tokens=values.get(adapter.draft_tokens),
            accepted_tokens=values.get(adapter.accepted_tokens),
            accepted_per_position=tuple(series.positions[i] for i in range(k)),
            generation_tokens=values.get(adapter.generation_tokens),
            first_tokens=values.get(adapter.first_tokens),
            decode_seconds=values.get(decode_seconds),
            decode_steps=values.get(decode_steps),
            prompt_tokens=values.get(adapter.prompt_tokens),
            cached_prompt_tokens=values.get(adapter.cached_prompt_tokens),
            engine_steps=values.get(adapter.engine_steps),
            preemptions=values.get(adapter.preemptions),
            failed_requests=sum(series.failures.values()) if series.failures else None,
        ),
        extra_labels=extra_labels,
    )


def _missing(engine: str, what: str) -> ScrapeError:
    return ScrapeError(Reason.MISSING_SERIES, f"engine {engine!r}: {what}")


def _no_series(page: bytes, metric_prefix: str, adapter: Adapter) -> ScrapeError:
    if page.lstrip().startswith(b"<") or not _LOOKS_LIKE_METRICS.search(page):
        return _not_metrics(page)
    namespace = adapter.namespace.encode()
    found = re.search(rb"^([A-Za-z_:][A-Za-z0-9_:]*)?" + re.escape(namespace), page, re.M)
    other = (found.group(1) or b"").decode() if found else metric_prefix
    if other != metric_prefix:
        return ScrapeError(
            Reason.NO_SERIES,
            f"names begin with {other + adapter.namespace!r}: set metric_prefix to {other!r}",
        )
    return ScrapeError(
        Reason.NO_SERIES,
        f"no {metric_prefix + adapter.namespace} series of an engine on the page; "
        f"{adapter.no_series_hint}",
    )


def _not_metrics(page: bytes) -> ScrapeError:
    start = page.lstrip()[:40].decode(errors="replace")
    return ScrapeError(
        Reason.NOT_METRICS, f"not a metrics page: it begins with {start!r}; check the URL's path"
    )


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
