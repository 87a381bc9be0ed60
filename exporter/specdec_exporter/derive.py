"""A window to the figures that people watch: the arithmetic of docs/metrics.md and nothing else.

Sums come first and one division last, so several engines are one window like any other. What a
window cannot say is None, never 0 and never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec_exporter.model import Counters, Derived, Overdispersion, Window
from specdec_exporter.uncertainty import accepted_moments, window_inflation

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
    """Placeholder drafts that were counted as rejected: D − N where that is positive.

    vLLM 0.32 pads one-token first steps with k of them. A real draft belongs to a decode step, so
    more drafts than steps (N) show them; fewer say nothing.
    """
    if increase.drafts is None or increase.decode_steps is None:
        return 0.0
    return max(0.0, increase.drafts - increase.decode_steps)


def derive(window: Window, overdispersion: Overdispersion) -> Derived:
    """Derive a window's figures.

    Args:
        window: increases of one engine, or of several engines of one model.
        overdispersion: variance inflation to assume for a window of this length; the window's own
            is used instead where it is larger.

    Returns:
        Ratios 0 to 1, mean acceptance length 1 to k + 1, times in seconds.
    """
    increase = window.increase
    k = window.num_speculative_tokens
    padded = padded_drafts(increase) if k else 0.0
    drafts, tokens = increase.drafts, increase.draft_tokens
    if drafts is not None and tokens is not None:
        drafts, tokens = drafts - padded, tokens - k * padded
    accepted, positions = increase.accepted_tokens, increase.accepted_per_position
    generated = _difference(increase.generation_tokens, increase.first_tokens)
    tpot_known = generated is not None and generated > 0 and bool(increase.decode_seconds)

    inflations = [overdispersion]
    if (own := window_inflation(window)) is not None:
        inflations.append(Overdispersion("window", own))
    stderr = _Stderr(drafts, positions, max(o.value for o in inflations))
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
        padded_drafts=padded,
        acceptance_ratio=acceptance,
        acceptance_ratio_stderr=stderr.of_ratio(acceptance, k, tokens),
        acceptance_ratio_binomial_stderr=_binomial(acceptance, tokens),
        front_acceptance_ratio=(front := ratio(accepted_front, front_drafted, most=1.0)),
        front_acceptance_ratio_stderr=stderr.of_ratio(front, 2, front_drafted),
        mean_acceptance_length=None if mal_excess is None else 1.0 + mal_excess,
        mean_acceptance_length_stderr=stderr.of_ratio(mal_excess, k, drafts),
        position_acceptance_ratio=tuple(ratio(a, drafts, most=1.0) for a in positions),
        position_acceptance_ratio_stderr=tuple(stderr.of_position(i) for i in range(k)),
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
        overdispersion=tuple(inflations) if acceptance is not None else (),
    )


def decode_concurrency(window: Window) -> float | None:
    """Mean requests in decode, summed over engines: ΔS / Δt (Little's law)."""
    total = 0.0
    for track in window.tracks:
        seconds = track[-1].t - track[0].t
        busy = _difference(track[-1].totals.decode_seconds, track[0].totals.decode_seconds)
        if seconds <= 0 or busy is None:
            return None
        total += busy / seconds
    return total


class _Stderr:
    """Standard errors of sums of J over a window's drafts, inflated."""

    def __init__(self, drafts: float | None, positions: Sequence[float], inflation: float) -> None:
        self._drafts = drafts or 0.0
        self._positions = positions
        self._inflation = inflation

    def of_ratio(self, value: float | None, k: int, denominator: float | None) -> float | None:
        """Of Σ min(J, k) / denominator. Draft lengths are taken as given."""
        if value is None or denominator is None or self._drafts <= 0:
            return None
        _, variance = accepted_moments(self._positions[:k], self._drafts)
        return ratio(math.sqrt(self._inflation * variance * self._drafts), denominator)

    def of_position(self, i: int) -> float | None:
        """Of A_i / D. The inflation is that of J, which is no smaller than a position's own."""
        p = ratio(self._positions[i], self._drafts, most=1.0)
        return None if p is None else math.sqrt(self._inflation * p * (1 - p) / self._drafts)


def _binomial(p: float | None, trials: float | None) -> float | None:
    return None if p is None or not trials else math.sqrt(p * (1 - p) / trials)


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
