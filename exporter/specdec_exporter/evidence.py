"""What the choice of k is decided on, gathered from a target's windows. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping

from specdec_exporter.baseline import decode_intervals, prefill_tokens_per_engine_step
from specdec_exporter.cost import Acceptance
from specdec_exporter.decide import Evidence
from specdec_exporter.model import EVEN_LENGTH, Derived, Measurement, Window

HOUR_SECONDS = 3600.0
MOST_LEVELS = 24
"""Loads that the mix of an hour is told by; what is alike is put together."""
_LEVEL = 1.25


def evidence_of(
    now: Measurement,
    hour: Measurement,
    hour_window: Window,
    *,
    server_start: float,
    verdicts: Mapping[str, str],
) -> Evidence:
    """The evidence about one model.

    Args:
        now: figures of the served window.
        hour: figures of the last hour, or since k changed.
        hour_window: what `hour` was made of, engines together.
        server_start: what tells the server's starts apart, unix seconds.
        verdicts: state of each rule by its name.
    """
    derived, counted = now.total, now.increase
    engines = max(1, len(now.engines))
    tokens = None
    if counted.generation_tokens is not None and counted.first_tokens is not None:
        tokens = counted.generation_tokens - counted.first_tokens
    gain = now.gain if now.gain is not None and now.gain.covered else None
    concurrency = derived.decode_concurrency
    return Evidence(
        observed_k=derived.num_speculative_tokens,
        server_start=server_start,
        inconclusive=_doubt(now),
        verdicts=dict(verdicts),
        hour=_acceptance(hour.total),
        window=_acceptance(derived),
        window_seconds=derived.window_seconds,
        load=load_mix(hour_window),
        decode_concurrency=None if concurrency is None else concurrency / engines,
        step_seconds=derived.step_seconds,
        tokens_per_step=derived.tokens_per_step,
        prefill_tokens_per_step=prefill_tokens_per_engine_step(counted),
        decode_throughput=(
            None
            if tokens is None or not derived.covered_seconds
            else tokens / derived.covered_seconds
        ),
        gain=None if gain is None else gain.tpot_gain_ratio,
        gain_stderr=None if gain is None else gain.tpot_gain_ratio_stderr,
    )


def unanswered(server_start: float, verdicts: Mapping[str, str]) -> Evidence:
    """The evidence while the server does not answer."""
    return Evidence(observed_k=None, server_start=server_start, stale=True, verdicts=dict(verdicts))


def load_mix(window: Window) -> tuple[tuple[float, float], ...]:
    """Concurrency of one engine and tokens decoded at it, by levels a quarter apart."""
    levels: list[tuple[float, float]] = []
    intervals = sorted(
        (i.concurrency, i.decode_tokens)
        for track in window.tracks
        for i in decode_intervals(track)
        if i.decode_tokens > 0
    )
    ratio = _LEVEL
    if intervals:
        ratio = max(ratio, (intervals[-1][0] / intervals[0][0]) ** (1 / MOST_LEVELS))
    start = 0.0
    for concurrency, tokens in intervals:
        if levels and concurrency <= ratio * start:
            mean, total = levels[-1]
            total += tokens
            levels[-1] = mean + (concurrency - mean) * tokens / total, total
        else:
            start = concurrency
            levels.append((concurrency, tokens))
    return tuple(levels)


def _acceptance(derived: Derived) -> Acceptance | None:
    ratios = [p for p in derived.position_acceptance_ratio if p is not None]
    stderrs = [e for e in derived.position_acceptance_ratio_stderr if e is not None]
    if not ratios or len(stderrs) != len(ratios):
        return None
    return Acceptance(tuple(ratios), tuple(stderrs), derived.drafts or 0.0)


def _doubt(measurement: Measurement) -> str:
    """Why nothing follows from these figures, in words; empty where something does."""
    derived, gain = measurement.total, measurement.gain
    length, k = derived.mean_draft_length, derived.num_speculative_tokens
    if length is not None and length < EVEN_LENGTH * k:
        return f"drafts vary in length ({length:.2f} of {k} tokens), so positions are lower bounds"
    return gain.reason if gain is not None and gain.inconclusive else ""
