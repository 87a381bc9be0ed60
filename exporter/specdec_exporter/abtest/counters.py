"""The server's counters over a workload: acceptance, MAL and TPOT, and what else went on meanwhile.

The figures come from the exporter's own parsing, windows and formulas. Beside the counters of the
model, which `parse` knows, this module reads four families that tell whether two runs had equal
conditions; it is pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from specdec_exporter.abtest.record import Page, Request, Span
from specdec_exporter.config import DEFAULT_INFLATION
from specdec_exporter.derive import derive, ratio
from specdec_exporter.model import Counters as Increase
from specdec_exporter.model import Derived, Overdispersion, ScrapeError, Window
from specdec_exporter.parse import VLLM, parse
from specdec_exporter.window import History, combine

_HITS = "vllm:prefix_cache_hits_total"
_QUERIES = "vllm:prefix_cache_queries_total"
_RUNNING = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_FLAGS = "vllm:cache_config_info"
_NAMES = {*VLLM.names, "process_start_time_seconds", _HITS, _QUERIES, *_RUNNING, _FLAGS}
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_COMPUTED = (
    "engine",
    "num_gpu_blocks",
    "num_cpu_blocks",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
)
"""Labels that follow from the memory that is left over, which a drafter takes some of."""


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """What the server counted during the measured requests of one workload."""

    derived: Derived
    increase: Increase
    engines: int
    prefix_hit_ratio: float | None
    """Of the prompt tokens, those that were not computed."""
    other_requests: int
    """Requests that were not ours: a lower bound."""


def keep(page: bytes) -> tuple[str, ...]:
    """The lines of a metrics page that figures are made of."""
    lines = page.decode(errors="replace").splitlines()
    return tuple(
        line for line in lines if (name := _NAME.match(line)) is not None and name[0] in _NAMES
    )


def flags(lines: Iterable[str]) -> dict[str, str]:
    """The flags that a server shows on its metrics page."""
    for line in lines:
        if line.startswith(_FLAGS):
            (family,) = text_string_to_metric_families(line)
            labels = family.samples[0].labels
            return {k: v for k, v in labels.items() if k not in _COMPUTED and k[:1] != "_"}
    return {}


def running(lines: Iterable[str]) -> int:
    """Requests that the server works on or that wait."""
    return round(sum(_values(lines, _RUNNING)))


def generated(lines: Iterable[str]) -> float:
    """Tokens that were ever generated."""
    return sum(_values(lines, (VLLM.generation_tokens,)))


def server_figures(spans: Iterable[Span]) -> ServerFigures | None:
    """Of spans that belong together; None where no counters were had over any of them.

    A span that was broken off has no page at its end, and its requests are left out here.
    """
    pairs = [(s, s.before, s.after) for s in spans if s.before is not None and s.after is not None]
    windows, hits, queries, others = [], 0.0, 0.0, 0
    for span, before, after in pairs:
        try:
            window = _window(before, after)
        except ScrapeError:
            continue
        if window is None:
            continue
        windows.append(window)
        hits += _increase(before, after, _HITS)
        queries += _increase(before, after, _QUERIES)
        others += _others(window, span.requests, running(before.lines))
    if not windows:
        return None
    whole = combine(tuple(windows))
    derived = derive(whole, _assume)
    # One after another, not side by side as engines are.
    seconds = sum(window.covered_seconds for window in windows)
    increase = whole.increase
    busy = increase.decode_seconds or 0.0
    return ServerFigures(
        derived=replace(derived, covered_seconds=seconds, decode_concurrency=ratio(busy, seconds)),
        increase=increase,
        engines=max(len(window.tracks) for window in windows),
        prefix_hit_ratio=ratio(hits, queries),
        other_requests=others,
    )


def _window(before: Page, after: Page) -> Window | None:
    history = History(max_age=math.inf)
    for page in (before, after):
        text = "".join(f"{line}\n" for line in page.lines)
        history.add(parse(text.encode(), t=page.t, excerpt=True))
    windows = history.windows(after.t - before.t)
    if not windows or any(len(track) < 2 for window in windows for track in window.tracks):
        return None
    return combine(windows)


def _assume(active_seconds: float, span: tuple[int, int]) -> Overdispersion:
    return Overdispersion("default", DEFAULT_INFLATION)


def _others(window: Window, requests: Sequence[Request], before: int) -> int:
    first_tokens = window.increase.first_tokens or 0.0
    return before + max(0, round(first_tokens) - len(requests))


def _increase(before: Page, after: Page, name: str) -> float:
    old, new = (sum(_values(page.lines, (name,))) for page in (before, after))
    return new - old if new >= old else new


def _values(lines: Iterable[str], names: Sequence[str]) -> list[float]:
    wanted = [line for line in lines if (m := _NAME.match(line)) and m[0] in names]
    families = text_string_to_metric_families("\n".join(wanted))
    return [sample.value for family in families for sample in family.samples]
