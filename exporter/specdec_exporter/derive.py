"""A window to the figures that people watch: the arithmetic of docs/metrics.md and nothing else.

Sums come first and one division last, so several engines are one window like any other. What a
window cannot say is None, never 0 and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specdec_exporter.model import Counters, Derived, Overdispersion, Window
from specdec_exporter.uncertainty import (
    Interval,
    Span,
    accepted_moments,
    active_intervals,
    window_inflations,
)

_ROUNDING = 1e-9


def ratio(part: float | None, whole: float | None, *, most: float | None = None) -> float | None:
    """Divide part by whole, where that means something.

    None where either is absent, the whole is not positive, or the result is outside 0..most:
    counters that contradict each other have no ratio.
    """
    if part is None or whole is None or whole <= 0:
        return None
    value = part / whole
    if not 0 <= value < math.inf or (most is not None and value > most + _ROUNDING):
        return None
    return value if most is None else min(value, most)


def front_denominator(drafts: float, draft_tokens: float) -> float:
    """Drafted tokens at the first two positions, at most: D + min(D, T − D).

    At least T − D drafts reached position 1 when no draft has more than two tokens; with longer
    ones the bound is D itself.
    """
    return drafts + max(0.0, min(drafts, draft_tokens - drafts))


def padded_drafts(increase: Counters) -> float:
    """Placeholder drafts of one engine that were counted as rejected: D − N where positive.

    vLLM 0.32 pads one-token first steps with k of them. A real draft belongs to a decode step, so
    more drafts than steps (N) show them; fewer say nothing.
    """
    if increase.drafts is None or increase.decode_steps is None:
        return 0.0
    return max(0.0, increase.drafts - increase.decode_steps)


Assumption = Callable[[float, Span], Overdispersion]
"""The variance inflation to assume for a sum over so many seconds with drafts and a span."""


def derive(window: Window, assume: Assumption) -> Derived:
    """Derive a window's figures.

    Args:
        window: increases of one engine, or of several engines of one model.
        assume: the variance inflation to assume; the window's own is used where it is larger.

    Returns:
        Ratios 0 to 1, mean acceptance length 1 to k + 1, times in seconds.
    """
    increase = window.increase
    k = window.num_speculative_tokens
    # By engine, since one that drafts in few steps would hide another's padding.
    padded = [(padded_drafts(one), len(one.accepted_per_position)) for one in window.increases]
    drafts, tokens = increase.drafts, increase.draft_tokens
    if drafts is not None and tokens is not None:
        drafts -= sum(count for count, _ in padded)
        tokens -= sum(count * length for count, length in padded)
    accepted, positions = increase.accepted_tokens, increase.accepted_per_position
    generated = _difference(increase.generation_tokens, increase.first_tokens)
    tpot_known = generated is not None and generated > 0 and bool(increase.decode_seconds)

    stderr = _Stderr(drafts, positions, active_intervals(window), assume)
    acceptance = ratio(accepted, tokens, most=1.0)
    mal_excess = ratio(accepted, drafts, most=float(k))
    accepted_front = sum(positions[:2]) if k else None
    front_drafted = None if drafts is None or tokens is None else front_denominator(drafts, tokens)
    return Derived(
        model_name=window.model_name,
        engine=window.engine,
        window_seconds=window.seconds,
        covered_seconds=window.covered_seconds,
        num_speculative_tokens=k,
        drafts=increase.drafts,
        padded_drafts=sum(count for count, length in padded if length),
        acceptance_ratio=acceptance,
        acceptance_ratio_stderr=stderr.of(acceptance, (0, k), tokens),
        acceptance_ratio_binomial_stderr=_binomial(acceptance, tokens),
        front_acceptance_ratio=(front := ratio(accepted_front, front_drafted, most=1.0)),
        front_acceptance_ratio_stderr=stderr.of(front, (0, min(2, k)), front_drafted),
        mean_acceptance_length=None if mal_excess is None else 1.0 + mal_excess,
        mean_acceptance_length_stderr=stderr.of(mal_excess, (0, k), drafts),
        position_acceptance_ratio=(
            by_position := tuple(ratio(a, drafts, most=1.0) for a in positions)
        ),
        position_acceptance_ratio_stderr=tuple(
            stderr.of(p, (i, i + 1), drafts) for i, p in enumerate(by_position)
        ),
        position_conditional_acceptance_ratio=tuple(
            ratio(a, before, most=1.0)
            for a, before in zip(positions, (drafts, *positions), strict=False)
        ),
        mean_draft_length=ratio(tokens, drafts),
        draft_coverage_ratio=ratio(increase.drafts, increase.decode_steps),
        tokens_per_step=ratio(generated, increase.decode_steps),
        step_seconds=ratio(increase.decode_seconds, increase.decode_steps),
        tpot_seconds=ratio(increase.decode_seconds, generated) if tpot_known else None,
        decode_concurrency=decode_concurrency(window),
        overdispersion=stderr.overdispersion((0, k)) if acceptance is not None else (),
    )


def decode_concurrency(window: Window) -> float | None:
    """Mean requests in decode, summed over engines: ΔS / Δt (Little's law).

    An engine of which there is one scrape so far is left out.
    """
    total = None
    for track in window.tracks:
        seconds = track[-1].t - track[0].t
        busy = _difference(track[-1].totals.decode_seconds, track[0].totals.decode_seconds)
        if seconds > 0 and busy is not None:
            total = (total or 0.0) + busy / seconds
    return total


class _Stderr:
    """Standard errors of what a window's drafts accepted, inflated."""

    def __init__(
        self,
        drafts: float | None,
        positions: Sequence[float],
        intervals: Sequence[Interval],
        assume: Assumption,
    ) -> None:
        self._drafts = drafts or 0.0
        self._positions = positions
        self._active_seconds = sum(interval.seconds for interval in intervals)
        self._assume = assume
        k = len(positions)
        spans = {(0, k), (0, min(2, k)), *((i, i + 1) for i in range(k))}
        self._own = window_inflations(intervals, spans) if k else {}

    def overdispersion(self, span: Span) -> tuple[Overdispersion, ...]:
        """What is assumed of a span, and what the window itself shows where it shows any."""
        assumed = self._assume(self._active_seconds, span)
        own = self._own.get(span)
        return (assumed,) if own is None else (assumed, Overdispersion("window", own))

    def of(self, value: float | None, span: Span, denominator: float | None) -> float | None:
        """Of the accepted tokens in a span over a denominator. Draft lengths are taken as given."""
        if value is None or self._drafts <= 0:
            return None
        inflation = max(o.value for o in self.overdispersion(span))
        _, variance = accepted_moments(self._positions[slice(*span)], self._drafts)
        return ratio(math.sqrt(inflation * variance * self._drafts), denominator)


def _binomial(p: float | None, trials: float | None) -> float | None:
    return None if p is None or not trials else math.sqrt(p * (1 - p) / trials)


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
