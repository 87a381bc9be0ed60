"""How much less a token costs with speculation than without, from a window and a baseline.

A window's baseline is summed over its scrape intervals and engines, each at its own concurrency and
weighed by its tokens, so that idle time and bursts do not blur it. Where the baseline does not know
such a load, or the counters are spoilt, there is no gain but a reason in words. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from specdec_exporter.baseline import (
    Baseline,
    Conditions,
    DecodeInterval,
    conditions,
    decode_intervals,
)
from specdec_exporter.model import Counters, Gain, Window
from specdec_exporter.uncertainty import Row, stderr_of_sum

MOST_CONDITIONS_RATIO = 1.5
"""Context, prefill and prefix hits may differ from the baseline's by so much."""
NEGLIGIBLE = 0.1
"""Prefix hits, and prefill tokens per step, that differ by less than this cannot matter."""
MOST_UNCOVERED = 0.05
"""Share of a window's tokens that may be decoded at loads which the curve does not reach."""
MOST_PREEMPTED = 0.01
"""Of first tokens. The stall of a preempted request counts as one long step."""
MOST_FAILED = 0.01
"""Failed requests over decoded tokens: they add first tokens without generated ones."""


def no_gain(baseline: Baseline) -> Gain:
    """Nothing is known."""
    return Gain(
        source=baseline.source,
        baseline_tpot_seconds=None,
        covered=False,
        tpot_gain_ratio=None,
        tpot_gain_ratio_stderr=None,
        tpot_gain_throughput_ratio=None,
        tpot_gain_throughput_ratio_stderr=None,
        break_even_length=None,
        inconclusive=False,
        reason="",
        baseline_taken_at=baseline.taken_at,
    )


def net_gain(window: Window, baseline: Baseline) -> Gain:
    """The net TPOT gain of a window against a baseline of the same model and version (`choose`).

    The baseline is Σ w·TPOT₀(c) / Σ w over scrape intervals and engines with the tokens w and the
    concurrency c of each. At equal throughput TPOT₀ is taken at c₀ instead, where
    c₀ / TPOT₀(c₀) is the interval's tokens per second; for one interval the gain is then 1 − c/c₀.

    Standard errors come from how the intervals differ from the mean gain, with what neighbours have
    in common (`stderr_of_sum`), and from the baseline's own. What differs between two starts of
    one server is in neither.
    """
    intervals = [i for track in window.tracks for i in decode_intervals(track)]
    increase = window.increase
    tokens = sum(i.decode_tokens for i in intervals)
    unknown = no_gain(baseline)
    if tokens <= 0 or sum(i.decode_seconds for i in intervals) <= 0:
        return replace(unknown, reason="no tokens were decoded")
    same_load = _at_equal_concurrency(intervals, baseline)
    reasons = [] if same_load else [_beyond(intervals, baseline)]
    reasons += _other_conditions(conditions(increase), baseline.conditions)
    covered = not reasons
    same_work = _at_equal_throughput(intervals, baseline, same_load) if same_load else None
    if same_work is None:
        reasons += _overload(intervals, baseline) or (
            ["at equal throughput the load is below the baseline's reach"] if same_load else []
        )
    spoilt = _spoilt(increase, tokens)
    reasons += spoilt
    gain = replace(unknown, covered=covered, inconclusive=bool(spoilt), reason="; ".join(reasons))
    if not covered or same_load is None:
        return gain
    steps = sum(i.increase.decode_steps or 0.0 for i in intervals)
    step_seconds = sum(i.decode_seconds for i in intervals) / steps if steps else None
    gain = replace(
        gain,
        baseline_tpot_seconds=same_load.baseline,
        break_even_length=None if step_seconds is None else step_seconds / same_load.baseline,
    )
    if spoilt:
        return gain
    return replace(
        gain,
        tpot_gain_ratio=1.0 - same_load.ratio,
        tpot_gain_ratio_stderr=same_load.stderr,
        tpot_gain_throughput_ratio=None if same_work is None else 1.0 - same_work.ratio,
        tpot_gain_throughput_ratio_stderr=None if same_work is None else same_work.stderr,
    )


class _Comparison(NamedTuple):
    ratio: float
    """TPOT over the baseline's."""
    stderr: float | None
    baseline: float
    """Seconds per token."""


def _at_equal_concurrency(
    intervals: Sequence[DecodeInterval], baseline: Baseline
) -> _Comparison | None:
    """Decode seconds against the baseline's; None where too many tokens have no baseline."""
    rows = []
    weights = [0.0] * len(baseline.points)
    tokens = 0.0
    for interval in intervals:
        shares = baseline.shares(interval.concurrency)
        if shares is not None:
            tokens += interval.decode_tokens
            cost = interval.decode_tokens * baseline.mix(shares)
            rows.append(Row(interval.t, interval.decode_seconds, cost))
            for i, share in shares:
                weights[i] += share * interval.decode_tokens
    expected = sum(row.expected for row in rows)
    if expected <= 0 or tokens < (1 - MOST_UNCOVERED) * sum(i.decode_tokens for i in intervals):
        return None
    ratio = sum(row.seconds for row in rows) / expected
    chance = stderr_of_sum(rows, ratio)
    own = math.hypot(*(w * p.tpot_stderr for w, p in zip(weights, baseline.points, strict=True)))
    stderr = None if chance is None else math.hypot(chance, ratio * own) / expected
    return _Comparison(ratio, stderr, expected / tokens)


def _at_equal_throughput(
    intervals: Sequence[DecodeInterval], baseline: Baseline, same_load: _Comparison
) -> _Comparison | None:
    """Decode seconds against those of a baseline that delivers as much.

    Each interval's throughput is what the window's mean ratio gives at its load: single intervals
    differ by chance, which near the baseline's capacity would count for much.
    """
    expected = magnified = tokens = seconds = 0.0
    for interval in intervals:
        cost = baseline.tpot_seconds(interval.concurrency)
        if cost is None:
            continue
        c = baseline.concurrency_at(interval.concurrency / (same_load.ratio * cost))
        shares = None if c is None else baseline.shares(c)
        if c is None or shares is None:
            continue
        cost = baseline.mix(shares)
        tokens += interval.decode_tokens
        seconds += interval.decode_seconds
        expected += interval.decode_tokens * cost
        # c₀ = X·TPOT₀(c₀): an error in either moves c₀ along the curve, and so comes back larger.
        elasticity = c * baseline.slope(shares) / cost
        magnified += interval.decode_tokens * cost / max(0.1, 1.0 - elasticity)
    if expected <= 0 or tokens < (1 - MOST_UNCOVERED) * sum(i.decode_tokens for i in intervals):
        return None
    ratio = seconds / expected
    stderr = None
    if same_load.stderr is not None:
        stderr = same_load.stderr * ratio / same_load.ratio * magnified / expected
    return _Comparison(ratio, stderr, expected / tokens)


def _overload(intervals: Sequence[DecodeInterval], baseline: Baseline) -> list[str]:
    """That a baseline is not known to carry so much, in words."""
    busy = sum(i.decode_seconds / i.concurrency for i in intervals)
    throughput = sum(i.decode_tokens for i in intervals) / busy
    if throughput <= baseline.capacity:
        return []
    return [
        f"the baseline could not carry this load: {throughput:.0f} tokens a second, and it reaches "
        f"{baseline.capacity:.0f}"
    ]


def _beyond(intervals: Sequence[DecodeInterval], baseline: Baseline) -> str:
    low, high = baseline.reach
    outside = [i for i in intervals if not low <= i.concurrency <= high]
    tokens = sum(i.decode_tokens for i in outside)
    mean = sum(i.concurrency * i.decode_tokens for i in outside) / tokens if tokens else 0.0
    return (
        f"not covered: {mean:.1f} requests in decode, and the baseline reaches from {low:.1f} "
        f"to {high:.1f}"
    )


def _other_conditions(ours: Conditions, theirs: Conditions) -> list[str]:
    """What differs too much to compare, in words."""
    found = []
    for what, a, b, negligible in (
        ("tokens of context", ours.context_tokens, theirs.context_tokens, 0.0),
        (
            "prefill tokens per step",
            ours.prefill_tokens_per_step,
            theirs.prefill_tokens_per_step,
            NEGLIGIBLE,
        ),
        # What hits spare is as much as what they leave to be computed.
        (
            "of prompts not cached",
            _rest(ours.prefix_hit_ratio),
            _rest(theirs.prefix_hit_ratio),
            NEGLIGIBLE,
        ),
    ):
        if a is None or b is None or abs(a - b) <= negligible:
            continue
        if max(a, b) > MOST_CONDITIONS_RATIO * min(a, b):
            found.append(f"not covered: {a:.3g} {what}, and the baseline had {b:.3g}")
    return found


def _rest(ratio: float | None) -> float | None:
    return None if ratio is None else 1.0 - ratio


def _spoilt(increase: Counters, tokens: float) -> list[str]:
    """What makes the counted seconds or tokens doubtful, in words."""
    found = []
    preempted, first = increase.preemptions or 0.0, increase.first_tokens or 0.0
    if preempted > MOST_PREEMPTED * first:
        found.append(f"inconclusive: {preempted:.0f} preemptions of {first:.0f} requests")
    failed = increase.failed_requests or 0.0
    if failed > MOST_FAILED * tokens:
        found.append(
            f"inconclusive: {failed:.0f} failed requests can be wrong by as many "
            f"of {tokens:.0f} tokens"
        )
    return found
