"""Several k side by side: where drafting deeper stops to add tokens, and where it stops to pay.

The two need not be the same k. A server differs from start to start, in step time above all, so
each figure has the spread between starts beside it. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec_exporter.abtest.counters import server_figures
from specdec_exporter.abtest.record import Request, Run
from specdec_exporter.abtest.stats import median, ratio
from specdec_exporter.baseline import Conditions, conditions, prefill_tokens_per_engine_step
from specdec_exporter.model import Counters
from specdec_exporter.swept import FORMAT, VERSION

LEAST_TOKENS = 0.05
"""A position that adds fewer tokens to a draft than this adds nothing."""


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of the server at one k showed. Times in seconds."""

    k: int
    start: int
    """From 1."""
    concurrency: int
    """Requests in flight."""
    requests: int
    valid: int
    observed_k: int | None
    mean_acceptance_length: float | None
    acceptance_ratio: float | None
    position_acceptance_ratio: tuple[float | None, ...]
    tpot_seconds: float | None
    """By the server's counters; by the clients' clock where there are none."""
    client_tpot_seconds: float | None
    step_seconds: float | None
    tokens_per_step: float | None
    decode_concurrency: float | None
    """Mean requests in decode, by the server's counters."""
    prefix_hit_ratio: float | None
    other_requests: int | None
    started: float | None = None
    """Of the measuring, unix seconds: what tells starts of the server apart."""
    engine_version: str = ""
    """As the server says it; empty where it does not."""
    engines: int = 1
    measured_seconds: float = 0.0
    decode_tokens: float = 0.0
    """The evidence: tokens after the first ones."""
    engine_prefill_tokens_per_step: float | None = None
    """Prompt tokens computed in a step of the engine."""
    context_tokens: float | None = None
    """Mean length that a token was decoded at."""
    prefill_tokens_per_token: float | None = None
    """Prompt tokens computed for each token decoded."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several starts."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Depth:
    """All starts at one k."""

    k: int
    starts: tuple[Start, ...]
    mean_acceptance_length: Spread | None
    acceptance_ratio: Spread | None
    tpot_seconds: Spread | None
    step_seconds: Spread | None
    tokens_per_step: Spread | None
    gain: Spread | None
    """1 − TPOT / TPOT at k = 0 of the same round; None where k = 0 was not tried."""
    marginal_tokens: float | None
    """What each position beyond the k before it adds to the mean acceptance length."""

    @property
    def requests(self) -> int:
        """Over all starts."""
        return sum(start.requests for start in self.starts)

    @property
    def valid(self) -> int:
        """Valid requests over all starts."""
        return sum(start.valid for start in self.starts)

    def values(self, name: str) -> list[float]:
        """A figure of each start that has it."""
        found = (getattr(start, name) for start in self.starts)
        return [value for value in found if value is not None]


@dataclass(frozen=True, slots=True)
class Sweep:
    """All of it."""

    model: str | None
    concurrency: int
    depths: tuple[Depth, ...]
    """By k."""
    stops_growing_at: int | None
    """The k beyond which another position adds fewer than `LEAST_TOKENS`; None where the deepest
    that was tried still adds more."""
    fastest: int | None
    """The k of the least median TPOT."""
    not_worse: tuple[int, ...]
    """Other k of which some start was as fast as some start of the fastest."""
    warnings: tuple[str, ...]

    @property
    def starts(self) -> int:
        """Of the server at each k, at most."""
        return max(len(depth.starts) for depth in self.depths)

    def verdicts(self) -> list[tuple[str, str, str]]:
        """A heading, a value and a remark for each thing there is to say."""
        deepest = self.depths[-1].k
        told = []
        if self.stops_growing_at is None:
            told.append(("MAL stops growing", f"beyond {deepest}", "deeper than was tried"))
        else:
            remark = f"another position adds fewer than {LEAST_TOKENS} tokens"
            told.append(("MAL stops growing", f"k = {self.stops_growing_at}", remark))
        if self.fastest is not None:
            remark = "least median time per output token"
            if self.not_worse:
                others = ", ".join(map(str, self.not_worse))
                remark += f"; not told apart from k = {others}: their starts overlap"
            elif self.starts == 1:
                remark += "; one start each, so how far starts differ is not known"
            told.append(("Fastest", f"k = {self.fastest}", remark))
        return told

    def to_dict(self) -> dict[str, Any]:
        """Plain values, the starts one by one; what has no value is None."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def start_figures(run: Run, k: int, start: int) -> Start:
    """What a run against one start of the server shows.

    Args:
        run: all of it; workloads are summed before anything is divided.
        k: that the server was started with.
        start: which start at this k.
    """
    requests = run.requests
    counted = server_figures(run.spans)
    derived = counted.derived if counted else None
    by_clients = client_tpot(requests)
    server_tpot = derived.tpot_seconds if derived else None
    first = run.sessions[0]
    known = conditions(counted.increase) if counted else Conditions()
    return Start(
        k=k,
        start=start,
        concurrency=first.concurrency or 1,
        requests=len(requests),
        valid=sum(request.valid for request in requests),
        observed_k=derived.num_speculative_tokens if derived else None,
        mean_acceptance_length=derived.mean_acceptance_length if derived else None,
        acceptance_ratio=derived.acceptance_ratio if derived else None,
        position_acceptance_ratio=derived.position_acceptance_ratio if derived else (),
        tpot_seconds=by_clients if server_tpot is None else server_tpot,
        client_tpot_seconds=by_clients,
        step_seconds=derived.step_seconds if derived else None,
        tokens_per_step=derived.tokens_per_step if derived else None,
        decode_concurrency=derived.decode_concurrency if derived else None,
        prefix_hit_ratio=counted.prefix_hit_ratio if counted else None,
        other_requests=counted.other_requests if counted else None,
        started=first.started,
        engine_version=(first.server or {}).get("version", ""),
        engines=counted.engines if counted else 1,
        measured_seconds=derived.covered_seconds if derived else 0.0,
        decode_tokens=_decode_tokens(counted.increase) if counted else 0.0,
        engine_prefill_tokens_per_step=(
            prefill_tokens_per_engine_step(counted.increase) if counted else None
        ),
        context_tokens=known.context_tokens,
        prefill_tokens_per_token=known.prefill_tokens_per_step,
    )


def _decode_tokens(increase: Counters) -> float:
    return max(0.0, (increase.generation_tokens or 0.0) - (increase.first_tokens or 0.0))


def client_tpot(requests: Iterable[Request]) -> float | None:
    """Seconds per token after the first by the clients' clock, every token weighing the same."""
    seconds, tokens = 0.0, 0
    for r in requests:
        if r.output_speed and r.end_seconds is not None and r.first_output_seconds is not None:
            seconds += r.end_seconds - r.first_output_seconds
            tokens += (r.completion_tokens or 1) - 1
    return ratio(float(tokens), seconds)


def summarise(starts: Sequence[Start], model: str | None = None) -> Sweep:
    """The figures of all starts by k.

    Args:
        starts: at least one, in any order.
        model: that was served.
    """
    ks = sorted({start.k for start in starts})
    by_k = {k: sorted((s for s in starts if s.k == k), key=lambda s: s.start) for k in ks}
    baseline = {s.start: s.tpot_seconds for s in by_k.get(0, ())}
    depths: list[Depth] = []
    # Without drafts a step gives one token.
    last_k, last_length = 0, 1.0
    for k in ks:
        length = spread(s.mean_acceptance_length for s in by_k[k])
        marginal = None
        if k > last_k and length is not None:
            marginal = (length.median - last_length) / (k - last_k)
            last_k, last_length = k, length.median
        gains = (
            None if (r := ratio(baseline.get(s.start), s.tpot_seconds)) is None else 1 - r
            for s in by_k[k]
        )
        depths.append(
            Depth(
                k=k,
                starts=tuple(by_k[k]),
                mean_acceptance_length=length,
                acceptance_ratio=spread(s.acceptance_ratio for s in by_k[k]),
                tpot_seconds=spread(s.tpot_seconds for s in by_k[k]),
                step_seconds=spread(s.step_seconds for s in by_k[k]),
                tokens_per_step=spread(s.tokens_per_step for s in by_k[k]),
                gain=None if k == 0 else spread(gains),
                marginal_tokens=marginal,
            )
        )
    timed = [(d.tpot_seconds, d.k) for d in depths if d.tpot_seconds is not None]
    best = min(timed, key=lambda t: (t[0].median, t[1])) if timed else None
    return Sweep(
        model=model,
        concurrency=starts[0].concurrency,
        depths=tuple(depths),
        stops_growing_at=_stops_growing_at(depths),
        fastest=best[1] if best else None,
        not_worse=tuple(
            k for tpot, k in timed if best and k != best[1] and tpot.low <= best[0].high
        ),
        warnings=tuple(_warnings(starts)),
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, least and largest of what is known."""
    known = [value for value in values if value is not None]
    middle = median(known)
    return None if middle is None else Spread(middle, min(known), max(known))


def _stops_growing_at(depths: Sequence[Depth]) -> int | None:
    last = 0
    for depth in depths:
        if depth.marginal_tokens is not None:
            if depth.marginal_tokens < LEAST_TOKENS:
                return last
            last = depth.k
    return None


def _warnings(starts: Iterable[Start]) -> Iterable[str]:
    for s in starts:
        name = f"k = {s.k}, start {s.start}"
        if s.observed_k is None:
            yield f"{name}: the server showed no counters, so times are by the clients' clock"
        elif s.observed_k != s.k:
            yield f"{name}: the server runs k = {s.observed_k}; does the command use it?"
        if s.other_requests:
            yield f"{name}: at least {s.other_requests} other requests meanwhile"
        if s.valid < s.requests:
            yield f"{name}: {s.requests - s.valid} of {s.requests} answers are not valid"
