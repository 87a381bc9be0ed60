"""How a drafter's acceptance differs between requests: the exact law that the simulator draws from.

Pure arithmetic. It knows neither time nor a batch; it must not draw random numbers.

A request has a quality z out of `LEVELS` equally spaced quantiles of a normal distribution.
Position i is accepted, given that position i − 1 was, with probability σ(a_i + spread · z + shift).
The a_i are solved so that the mean over *drafts* of position i is exactly `rates[i]` at shift 0. A
request of high quality needs fewer drafts for the same text, so requests arrive with other weights
than drafts have: a level's share of arrivals is its share of drafts times the chance that a draft
is a request's last.

The length of a request after its first token is geometric: it ends after any token with probability
`stop`. Given the quality, its drafts then form a chain that ends after each draft with probability
1 − E[(1 − stop)^(1 + J)], J being the accepted tokens, and all moments below are finite sums.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import NormalDist

LEVELS = 33
"""Distinct qualities. More change no mean, only the shape of the tails."""

MAX_SPREAD = 8.0
"""Above it nearly every request accepts all or nothing: the variance inflation stops growing."""


@dataclass(frozen=True, slots=True)
class Level:
    """The acceptance of all requests of one quality."""

    positions: tuple[float, ...]
    """Probability that a draft has at least i + 1 accepted tokens, for i = 0..k−1."""
    cumulative: tuple[float, ...]
    """Probability of at most j accepted tokens, for j = 0..k; the last is 1."""
    yields: bytes
    """1 + accepted tokens for each of 256 equal parts of 0..1; 0 where a part holds a bound of
    `cumulative`, so that most drafts cost a byte of randomness and none is rounded."""


@dataclass(frozen=True, slots=True)
class AcceptanceLaw:
    """The law of acceptance over requests, for one k."""

    levels: tuple[Level, ...]
    arrival_weights: tuple[float, ...]
    """Cumulative shares of the levels among arriving requests; the last is 1."""
    positions: tuple[float, ...]
    """Mean over drafts of the acceptance of each position."""
    variance_inflation: float
    """Variance of accepted tokens summed over windows much longer than a request, over what it
    would be if drafts were independent; 1 where requests are all alike."""

    @property
    def mean_accepted(self) -> float:
        """Mean accepted tokens per draft, E[J]."""
        return sum(self.positions)


def acceptance_law(
    rates: tuple[float, ...], spread: float, stop: float, shift: float = 0.0
) -> AcceptanceLaw:
    """The law with the given mean acceptance of each position.

    Args:
        rates: mean over drafts of each position, 0..1 and not increasing; k of them, k ≥ 1.
        spread: standard deviation between requests of the logit of conditional acceptance.
        stop: probability that a request ends after a token, in (0, 1].
        shift: added to all logits, as by a daily cycle; the means move away from `rates`.

    Raises:
        ValueError: rates that are not probabilities of nested events.
    """
    if not rates or any(not 0.0 <= p <= 1.0 for p in rates):
        raise ValueError(f"rates must be probabilities, got {rates}")
    if any(b > a for a, b in pairwise(rates)):
        raise ValueError(f"a deeper position cannot be accepted more often, got {rates}")
    return _law(tuple(rates), spread, stop, round(shift, 3))


@lru_cache(maxsize=256)
def solve_spread(rates: tuple[float, ...], stop: float, variance_inflation: float) -> float:
    """The spread that gives a variance inflation; `MAX_SPREAD` where none reaches it.

    Args:
        rates: as in `acceptance_law`.
        stop: as in `acceptance_law`.
        variance_inflation: ≥ 1; the guide's rates over 150 drafts reach about 200.

    Raises:
        ValueError: a variance inflation below 1.
    """
    if variance_inflation < 1.0:
        raise ValueError(f"variance inflation is at least 1, got {variance_inflation}")

    def excess(spread: float) -> float:
        return acceptance_law(rates, spread, stop).variance_inflation - variance_inflation

    if excess(MAX_SPREAD) <= 0.0:
        return MAX_SPREAD
    return _bisect(excess, 0.0, MAX_SPREAD, steps=30)


def drafts_per_request(rates: tuple[float, ...], stop: float) -> float:
    """Mean drafts of a request, 1 / (1 − E[(1 − stop)^(1 + J)]): it depends on the means alone."""
    accepted = _accepted_distribution(rates)
    return 1.0 / (1.0 - sum(p * (1.0 - stop) ** (1 + j) for j, p in enumerate(accepted)))


def solve_stop(rates: tuple[float, ...], mean_drafts: float) -> float:
    """The end probability per token at which requests have `mean_drafts` drafts on average.

    Raises:
        ValueError: a mean of at most 1.
    """
    if mean_drafts <= 1.0:
        raise ValueError(f"mean drafts must exceed 1, got {mean_drafts}")
    return _bisect(lambda stop: mean_drafts - drafts_per_request(rates, stop), 1e-9, 1.0)


@lru_cache(maxsize=256)
def _law(rates: tuple[float, ...], spread: float, stop: float, shift: float) -> AcceptanceLaw:
    logits = _position_logits(rates, spread)
    levels = []
    for z in _QUALITIES:
        positions = tuple(
            accumulate((_sigmoid(a + spread * z + shift) for a in logits), lambda x, y: x * y)
        )
        cumulative = (*(1.0 - p for p in positions), 1.0)
        levels.append(Level(positions, cumulative, _yields(cumulative)))
    means = tuple(
        sum(column) / LEVELS for column in zip(*(v.positions for v in levels), strict=True)
    )
    mean = sum(means)
    second_moment = sum((2 * i + 1) * p for i, p in enumerate(means))
    variance = second_moment - mean * mean
    ends = []
    cross = 0.0
    for level in levels:
        distribution = _accepted_distribution(level.positions)
        survival = [(1.0 - stop) ** (1 + j) for j in range(len(distribution))]
        end = 1.0 - sum(p * s for p, s in zip(distribution, survival, strict=True))
        excess = sum(level.positions) - mean
        # The sum R of J − E[J] over a request obeys R = X + [the request goes on] · R', so that
        # E[R²] = (E[X²] + 2 E[X; goes on] · E[R]) / P(ends) and E[R] = E[X] / P(ends).
        excess_surviving = sum(
            p * s * (j - mean) for j, (p, s) in enumerate(zip(distribution, survival, strict=True))
        )
        cross += 2.0 * excess_surviving * excess / end
        ends.append(end)
    total = sum(ends)
    return AcceptanceLaw(
        levels=tuple(levels),
        arrival_weights=(*(w / total for w in accumulate(ends[:-1])), 1.0),
        positions=means,
        variance_inflation=1.0 + cross / LEVELS / variance if variance > 0.0 else 1.0,
    )


@lru_cache(maxsize=256)
def _position_logits(rates: tuple[float, ...], spread: float) -> tuple[float, ...]:
    """The a_i that give each position its mean."""
    logits = []
    before = [1.0] * LEVELS
    offsets = [spread * z for z in _QUALITIES]
    for rate in rates:

        def excess(a: float, before: Sequence[float] = before, rate: float = rate) -> float:
            reached = sum(b * _sigmoid(a + o) for b, o in zip(before, offsets, strict=True))
            return reached / LEVELS - rate

        a = _bisect(excess, -60.0, 60.0)
        logits.append(a)
        before = [b * _sigmoid(a + o) for b, o in zip(before, offsets, strict=True)]
    return tuple(logits)


def _accepted_distribution(positions: Sequence[float]) -> list[float]:
    """P(J = j) for j = 0..k from the nested positions."""
    return [a - b for a, b in zip((1.0, *positions), (*positions, 0.0), strict=True)]


def _yields(cumulative: tuple[float, ...]) -> bytes:
    parts = ((part / 256, (part + 1) / 256) for part in range(256))
    ends = ((bisect_right(cumulative, low), bisect_left(cumulative, high)) for low, high in parts)
    return bytes(1 + first if first == last else 0 for first, last in ends)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _bisect(function: Callable[[float], float], low: float, high: float, steps: int = 60) -> float:
    """The zero of an increasing function."""
    for _ in range(steps):
        middle = (low + high) / 2
        if function(middle) < 0.0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


_QUALITIES = tuple(NormalDist().inv_cdf((i + 0.5) / LEVELS) for i in range(LEVELS))
