"""What tokens cost without speculation: the baseline curve, and how scrapes become one.

The curve is the time per output token of a server without speculation over the number of requests
in decode. Arithmetic only: it neither drives a server nor reads a file, and time is an argument.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from specdec_exporter.model import SCALARS, Counters, Point, Window
from specdec_exporter.uncertainty import Row, stderr_of_sum

Source = Literal["peer", "measured", "observed", "static"]
SOURCES: tuple[Source, ...] = get_args(Source)
"""Where a baseline can come from, best first."""
PEER_SECONDS = 900.0
"""A live server of the same model that has been idle or silent for so long is a peer no more."""
REACH = 0.25
"""How far beyond its ends, as a share of them, a curve is believed."""
_MIN_REQUESTS = 30
"""Fewer first tokens say too little of what requests are like."""
_MIN_INTERVALS = 5
_MIN_TOKENS = 200
_MOST_SCATTER = 0.1
"""Of a point's time: its standard error, which goes into that of every gain."""
_CLUSTER = 1.25
"""Intervals whose concurrency differs by less than this factor make one point of a curve."""
_MEDIAN_CHI_SQUARE = 0.455
"""Of the square of a normal variable of variance 1."""
_KEPT_PER_LEVEL = 60
_FORMAT = "specdec-exporter baseline"
_VERSION = 1


class BaselineError(Exception):
    """A stored baseline that cannot be used; the message is one line that says what is wrong."""


@dataclass(frozen=True, slots=True)
class BaselinePoint:
    """The cost of a token at one concurrency."""

    decode_concurrency: float
    tpot_seconds: float
    tpot_stderr: float
    decode_tokens: float
    """The evidence: tokens after the first ones that it was measured on."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What requests were like; None is not known, and then not compared."""

    context_tokens: float | None = None
    """Mean length that a token was decoded at: the prompt and half of the answer."""
    prefill_tokens_per_step: float | None = None
    """Prompt tokens computed for each decode step of a request, of which a server without
    speculation makes one a token: computed prompt tokens over decoded tokens, so that it can be
    compared whatever k and the load are. An engine's step carries as many for each request in it.
    """
    prefix_hit_ratio: float | None = None
    """Share of prompt tokens that a cache had."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """TPOT without speculation over decode concurrency, and what it was measured on.

    An empty `engine_version` is not known, and matches any.
    """

    source: Source
    model_name: str
    engine_version: str
    taken_at: float
    """Unix seconds."""
    points: tuple[BaselinePoint, ...]
    """At least one, in order of concurrency."""
    conditions: Conditions = Conditions()

    def tpot_seconds(self, c: float) -> float | None:
        """Seconds per token with c requests in decode on one engine, linear between the points.

        None outside: more than a quarter beyond the ends. A `static` baseline is one number for
        any load.
        """
        shares = self.shares(c)
        return None if shares is None else self.mix(shares)

    @property
    def reach(self) -> tuple[float, float]:
        """The concurrencies that it covers."""
        if self.source == "static":
            return 0.0, math.inf
        first, last = self.points[0].decode_concurrency, self.points[-1].decode_concurrency
        return first * (1 - REACH), last * (1 + REACH)

    def concurrency_at(self, throughput: float) -> float | None:
        """The requests in decode that bring so many tokens a second: c₀ with c₀ / TPOT₀(c₀) = X.

        The smallest where there are several, and not below 1: less is idle time. None where the
        curve does not get there.
        """
        if self.source == "static":
            return max(1.0, throughput * self.points[0].tpot_seconds)
        knots = self._knots()
        low, cost = knots[0]
        if throughput * cost < low:
            return 1.0 if low <= 1.0 else None
        for (c, cost), (next_c, next_cost) in pairwise(knots):
            if throughput <= next_c / next_cost:
                slope = (next_cost - cost) / (next_c - c)
                return max(1.0, throughput * (cost - slope * c) / (1.0 - throughput * slope))
        return None

    @property
    def capacity(self) -> float:
        """Most tokens a second on one engine within its reach."""
        if self.source == "static":
            return math.inf
        return max(c / cost for c, cost in self._knots())

    def _knots(self) -> list[tuple[float, float]]:
        low, high = self.reach
        at = [low, *(p.decode_concurrency for p in self.points), high]
        return [(c, self.mix(self.shares(c) or ())) for c in at]

    def to_json(self) -> str:
        """The form of a file."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **self.to_dict()}, indent=2)

    @staticmethod
    def from_json(text: str) -> Baseline:
        """What `to_json` wrote.

        Raises:
            BaselineError: it did not write this.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BaselineError("no baseline: the file is not JSON") from error
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise BaselineError("no baseline: make one with `specdec-exporter calibrate`")
        if value.get("version") != _VERSION:
            raise BaselineError(
                f"a baseline of format {value.get('version')!r}, and this release reads {_VERSION}"
            )
        return Baseline.from_dict(value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"points": [asdict(point) for point in self.points]}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Baseline:
        """The inverse of `to_dict`; further keys are ignored.

        Raises:
            BaselineError: a value is missing or makes no sense.
        """
        try:
            known = value["conditions"]
            baseline = Baseline(
                source=value["source"],
                model_name=_text(value["model_name"]),
                engine_version=_text(value["engine_version"]),
                taken_at=_number(value["taken_at"]),
                points=tuple(
                    BaselinePoint(**{name: _number(point[name]) for name in _POINT_FIELDS})
                    for point in value["points"]
                ),
                conditions=Conditions(
                    **{
                        name: None if known[name] is None else _number(known[name])
                        for name in _CONDITION_FIELDS
                    }
                ),
            )
        except KeyError as error:
            raise BaselineError(f"the baseline has no {error.args[0]}") from error
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BaselineError(f"the baseline has a value that is none ({error})") from error
        if baseline.source not in SOURCES:
            raise BaselineError(f"the baseline's source is none of {', '.join(SOURCES)}")
        at = [point.decode_concurrency for point in baseline.points]
        if not at or any(b <= a for a, b in pairwise([0.0, *at])):
            raise BaselineError("the baseline's points are not in order of concurrency")
        if any(point.tpot_seconds <= 0 for point in baseline.points):
            raise BaselineError("the baseline has a point without a time")
        return baseline

    def shares(self, c: float) -> Shares | None:
        """Which points make up the value at c, and each one's share."""
        low, high = self.reach
        if not low <= c <= high:
            return None
        points = self.points
        if len(points) == 1 or c <= points[0].decode_concurrency:
            return ((0, 1.0),)
        last = len(points) - 1
        upper = next((i for i in range(1, last) if c <= points[i].decode_concurrency), last)
        a, b = points[upper - 1], points[upper]
        share = (c - a.decode_concurrency) / (b.decode_concurrency - a.decode_concurrency)
        if share > 1.0 and b.tpot_seconds < a.tpot_seconds:
            share = 1.0  # more load makes no token cheaper: the fall is chance
        return ((upper - 1, 1.0 - share), (upper, share))

    def mix(self, shares: Shares) -> float:
        """The value that shares of points make, seconds a token."""
        return sum(share * self.points[i].tpot_seconds for i, share in shares)

    def slope(self, shares: Shares) -> float:
        """How the value changes with the concurrency there, seconds a token for each request."""
        if len(shares) == 1:
            return 0.0
        a, b = (self.points[i] for i, _ in shares)
        return (b.tpot_seconds - a.tpot_seconds) / (b.decode_concurrency - a.decode_concurrency)


Shares = tuple[tuple[int, float], ...]
_POINT_FIELDS = tuple(BaselinePoint.__dataclass_fields__)
_CONDITION_FIELDS = tuple(Conditions.__dataclass_fields__)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, str | bool) or not 0 <= number < math.inf:
        raise ValueError(f"{value!r:.40} is no number from 0 on")
    return number


def static(model_name: str, tpot_seconds: float, taken_at: float) -> Baseline:
    """A baseline of one number that somebody knows; it holds for any load and version."""
    return Baseline("static", model_name, "", taken_at, (BaselinePoint(1.0, tpot_seconds, 0, 0),))


def choose(
    candidates: Iterable[Baseline], model_name: str, engine_version: str, now: float
) -> tuple[Baseline | None, str]:
    """The best baseline that is of this model and version, and why others were refused.

    The better source wins, of one source the newest. An unknown version on either side is taken
    for the same; words say each refusal and are empty where there was none.
    """
    usable, refused = [], []
    for one in sorted(candidates, key=lambda b: (SOURCES.index(b.source), -b.taken_at)):
        if one.model_name != model_name:
            refused.append(
                f"{one.source} baseline refused: it is of model {one.model_name!r}, "
                f"and this one is {model_name!r}"
            )
        elif one.engine_version and engine_version and one.engine_version != engine_version:
            refused.append(
                f"{one.source} baseline refused: it is of version {one.engine_version}, and the "
                f"server is {engine_version}; calibrate again"
            )
        elif one.source == "peer" and now - one.taken_at > PEER_SECONDS:
            refused.append(f"peer baseline refused: it is {now - one.taken_at:.0f} s old")
        else:
            usable.append(one)
    return (usable[0] if usable else None), "; ".join(refused)


class DecodeInterval(NamedTuple):
    """What one engine decoded between two scrapes."""

    t: float
    """The later one's time."""
    seconds: float
    concurrency: float
    """Requests in decode on the engine, as its tokens met them; at least 1."""
    decode_seconds: float
    decode_tokens: float
    increase: Counters


def decode_intervals(track: Sequence[Point]) -> list[DecodeInterval]:
    """The scrape intervals of one engine, idle ones left out.

    The mean of requests in decode is ΔN over the steps that the engine counted: none pass while it
    is idle, so they tell a burst within an interval from a steady trickle, and when a page was made
    does not matter. Where steps are not counted, or several front ends count each of them, it is
    ΔS / Δt (Little's law). What a token meets is more than the mean (`_crowding`).
    """
    counted = _steps_are_counted(track)
    found = []
    for before, after in pairwise(track):
        one = after.totals - before.totals
        if one.decode_seconds is None or one.generation_tokens is None or one.first_tokens is None:
            continue
        tokens = one.generation_tokens - one.first_tokens
        if one.decode_seconds <= 0 and tokens == 0:
            continue
        seconds = after.t - before.t
        mean = one.decode_seconds / seconds
        if counted and one.engine_steps and one.decode_steps:
            mean = one.decode_steps / one.engine_steps
        found.append(
            DecodeInterval(after.t, seconds, max(1.0, mean), one.decode_seconds, tokens, one)
        )
    crowding = _crowding(found)
    return [one._replace(concurrency=one.concurrency + crowding) for one in found]


def _steps_are_counted(track: Sequence[Point]) -> bool:
    """Whether steps account for the requests that have been in decode over all of a track."""
    whole = track[-1].totals - track[0].totals
    if not whole.engine_steps or not whole.decode_steps or not whole.decode_seconds:
        return False
    in_decode = whole.decode_seconds / (track[-1].t - track[0].t)
    return in_decode <= _CLUSTER * max(1.0, whole.decode_steps / whole.engine_steps)


def _adjoin(a: DecodeInterval, b: DecodeInterval) -> bool:
    return abs(b.t - b.seconds - a.t) < 1e-3


def _crowding(intervals: Sequence[DecodeInterval]) -> float:
    """How many more requests a token is decoded with than there are on average, at most 1.

    More tokens are decoded while there are more requests, so a token meets σ² / c above the mean c,
    for a variance σ² within the interval; that is 1 for arrivals by chance (Poisson) and intervals
    much longer than a request, and 0 where the same number is always open. Of a number of requests
    that forgets itself over the mean decode time D of a request, interval means differ from the
    next by a variance that falls with x = Δt / D in a known way, from which σ² follows.
    """
    pairs = [(a, b) for a, b in pairwise(intervals) if _adjoin(a, b)]
    first_tokens = sum(i.increase.first_tokens or 0.0 for i in intervals)
    seconds = sum(i.decode_seconds for i in intervals)
    if len(pairs) < _MIN_INTERVALS or seconds <= 0:
        return 0.0
    # For intervals much shorter than a request the result is independent of x.
    x = max(0.01, sum(b.seconds for _, b in pairs) / len(pairs) * first_tokens / seconds)
    mean_share = 2 * (x - 1 + math.exp(-x)) / x**2
    neighbour_share = (-math.expm1(-x) / x) ** 2
    # In units of what chance arrivals have, c. The median, since a change of load is no chance.
    steps = (
        (b.concurrency - a.concurrency) ** 2 / (a.concurrency + b.concurrency) for a, b in pairs
    )
    variance = median(steps) / _MEDIAN_CHI_SQUARE / (mean_share - neighbour_share)
    return min(1.0, variance * (1 - mean_share))


def conditions(counted: Counters) -> Conditions:
    """What the requests of an increase were like; unknown of fewer than thirty."""
    generated, first = counted.generation_tokens, counted.first_tokens
    prompt, cached = counted.prompt_tokens, counted.cached_prompt_tokens
    if generated is None or first is None or first < _MIN_REQUESTS or generated <= first:
        return Conditions()
    if prompt is None or prompt <= 0:
        return Conditions()
    computed = None if cached is None else max(0.0, prompt - cached)
    return Conditions(
        context_tokens=(prompt + generated / 2) / first,
        prefill_tokens_per_step=None if computed is None else computed / (generated - first),
        prefix_hit_ratio=None if cached is None else min(1.0, cached / prompt),
    )


def prefill_tokens_per_engine_step(counted: Counters) -> float | None:
    """Prompt tokens computed in a step of the engine; None where the server does not tell."""
    prompt, cached = counted.prompt_tokens, counted.cached_prompt_tokens
    if prompt is None or cached is None or not counted.engine_steps:
        return None
    return max(0.0, prompt - cached) / counted.engine_steps


def learn(
    tracks: Iterable[Sequence[Point]],
    *,
    source: Source,
    model_name: str,
    engine_version: str,
    taken_at: float,
) -> tuple[Baseline | None, tuple[tuple[int, str], ...]]:
    """The baseline that scrapes of a server without speculation make.

    A live peer's `Window.tracks` will do, or those of a recording. Only intervals of a steady load
    count, and a point needs five of them at like concurrency, 200 tokens, and times that agree.

    Returns:
        The baseline, None where nothing was steady, and what loads are not in it: the number of
        their track and words.

    Raises:
        BaselineError: an engine speculates.
    """
    judged = []
    for track in tracks:
        if any(speculates(point.totals) for point in track):
            raise BaselineError("the server speculates, and a baseline is without speculation")
        judged.append((track, _judge(decode_intervals(track))))
    curve = _curve([one for _, found in judged for one, steady in found if steady])
    left_out = tuple(
        (number, words)
        for number, (track, found) in enumerate(judged)
        for words in _left_out(track[0].t, found, curve)
    )
    if not curve:
        return None, left_out
    return _baseline(curve, source, model_name, engine_version, taken_at), left_out


def speculates(totals: Counters) -> bool:
    """Whether an engine has a drafter, whatever it does with it at the moment."""
    return totals.drafts is not None or bool(totals.accepted_per_position)


def _judge(intervals: Sequence[DecodeInterval]) -> list[tuple[DecodeInterval, bool]]:
    """Each interval, and whether its load is that of its neighbours, but for chance.

    One with a preemption in it is not steady. Requests come and go by chance, so their number
    changes by about its square root.
    """

    def alike(a: DecodeInterval | None, b: DecodeInterval | None) -> bool:
        if a is None or b is None:
            return True
        if not _adjoin(a, b) and not (a.increase.engine_steps and b.increase.engine_steps):
            return False  # idle between, which has thinned them where steps are not counted
        c = min(a.concurrency, b.concurrency)
        return abs(a.concurrency - b.concurrency) <= max((_CLUSTER - 1) * c, 2 * math.sqrt(c))

    before, after = [None, *intervals][:-1], [*intervals, None][1:]
    return [
        (one, _counts(one) and alike(a, one) and alike(one, b))
        for a, one, b in zip(before, intervals, after, strict=True)
    ]


def _counts(interval: DecodeInterval) -> bool:
    return interval.decode_tokens > 0 and not interval.increase.preemptions


def _curve(steady: Iterable[DecodeInterval]) -> list[tuple[BaselinePoint, list[DecodeInterval]]]:
    """Points and what each was made of, the loads with the most tokens first."""
    rest = sorted(steady, key=lambda i: i.concurrency)
    found: list[tuple[BaselinePoint, list[DecodeInterval]]] = []
    while rest:
        # The stretch of like concurrency with the most tokens in it.
        most, at, end, tokens = -1.0, (0, 0), 0, 0.0
        for start, first in enumerate(rest):
            while end < len(rest) and rest[end].concurrency <= _CLUSTER * first.concurrency:
                tokens += rest[end].decode_tokens
                end += 1
            if tokens > most:
                most, at = tokens, (start, end)
            tokens -= first.decode_tokens
        group = rest[slice(*at)]
        del rest[slice(*at)]
        point = _point(group)
        # What is left beside a denser stretch was parted from it by chance.
        if point is not None and not any(_near(point, other, _CLUSTER**0.5) for other, _ in found):
            found.append((point, group))
    return found


def _near(a: BaselinePoint, b: BaselinePoint, factor: float) -> bool:
    low, high = sorted((a.decode_concurrency, b.decode_concurrency))
    return high <= factor * low


def _point(group: Sequence[DecodeInterval]) -> BaselinePoint | None:
    """One point of intervals of like concurrency, where they say enough and agree."""
    seconds = sum(i.decode_seconds for i in group)
    tokens = sum(i.decode_tokens for i in group)
    if len(group) < _MIN_INTERVALS or tokens < _MIN_TOKENS or seconds <= 0:
        return None
    tpot = seconds / tokens
    error = stderr_of_sum((Row(i.t, i.decode_seconds, i.decode_tokens) for i in group), tpot)
    if error is None or error > _MOST_SCATTER * seconds:
        return None
    concurrency = sum(i.concurrency * i.decode_tokens for i in group) / tokens
    return BaselinePoint(concurrency, tpot, error / tokens, tokens)


def _baseline(
    curve: Iterable[tuple[BaselinePoint, list[DecodeInterval]]],
    source: Source,
    model_name: str,
    engine_version: str,
    taken_at: float,
) -> Baseline:
    points, groups = zip(*curve, strict=True)
    increases = [interval.increase for group in groups for interval in group]
    return Baseline(
        source=source,
        model_name=model_name,
        engine_version=engine_version,
        taken_at=taken_at,
        points=tuple(sorted(points, key=lambda point: point.decode_concurrency)),
        conditions=conditions(sum(increases[1:], increases[0])),
    )


def _left_out(
    start: float,
    judged: Iterable[tuple[DecodeInterval, bool]],
    curve: Sequence[tuple[BaselinePoint, list[DecodeInterval]]],
) -> Iterator[str]:
    """The loads of a track that no point of a curve is near, in words."""
    steady = dict(judged)
    used = {interval for _, group in curve for interval in group}
    for is_used, run in groupby(steady, lambda one: one in used):
        stretch = list(run)
        levels = [one.concurrency for one in stretch]
        known = [point.decode_concurrency for point, _ in curve]
        if is_used or all(
            any(c <= _CLUSTER * k and k <= _CLUSTER * c for k in known) for c in levels
        ):
            continue
        begin, end = stretch[0].t - stretch[0].seconds - start, stretch[-1].t - start
        settled = sum(steady[one] for one in stretch) >= _MIN_INTERVALS
        yield (
            f"left out {begin:.1f} s to {end:.1f} s ({min(levels):.1f} to {max(levels):.1f} in "
            f"decode): {'times scatter, or are of too few tokens' if settled else 'unsteady load'}"
        )


class Observed:
    """The curve of one model on one target from what was seen of it without speculation.

    Holds the last sixty steady intervals of each level of concurrency, some thirty levels at most.
    Make a new one when the engine's version changes.
    """

    def __init__(self, model_name: str, engine_version: str) -> None:
        self.model_name = model_name
        self.engine_version = engine_version
        self._levels: dict[int, deque[DecodeInterval]] = {}
        self._seen = -math.inf
        self._taken_at = 0.0

    def add(self, window: Window, now: float) -> None:
        """Take in what is new in a window of all engines of the model that ends now, unix seconds.

        Call it once in a window's length at least. A window with speculation teaches nothing, nor
        does one of vLLM's batch-size schedule at k = 0, which still runs the drafter.
        """
        if any(speculates(track[-1].totals) for track in window.tracks):
            return
        # The last interval waits until it has a neighbour to be judged by.
        judged = [one for track in window.tracks for one in _judge(decode_intervals(track))[:-1]]
        for interval, steady in judged:
            if steady and interval.t > self._seen:
                level = round(math.log(interval.concurrency, _CLUSTER))
                kept = self._levels.setdefault(level, deque(maxlen=_KEPT_PER_LEVEL))
                kept.append(interval)
                self._taken_at = now
        self._seen = max([self._seen, *(interval.t for interval, _ in judged)])

    def baseline(self) -> Baseline | None:
        """What is known so far; None before anything is."""
        curve = _curve(interval for level in self._levels.values() for interval in level)
        if not curve:
            return None
        names = self.model_name, self.engine_version
        return _baseline(curve, "observed", *names, self._taken_at)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, to go on with after a restart."""
        return {
            "model_name": self.model_name,
            "engine_version": self.engine_version,
            "taken_at": self._taken_at,
            "intervals": [
                [one.t, one.seconds, one.concurrency, one.decode_seconds, one.decode_tokens,
                 {n: v for n in SCALARS if (v := getattr(one.increase, n)) is not None}]
                for level in self._levels.values()
                for one in level
            ],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Observed:
        """The inverse of `to_dict`.

        Raises:
            BaselineError: a value is missing or makes no sense.
        """
        try:
            made = cls(_text(value["model_name"]), _text(value["engine_version"]))
            made._taken_at = _number(value["taken_at"])
            for *numbers, increase in value["intervals"]:
                t, seconds, concurrency, decode_seconds, tokens = map(_number, numbers)
                known = dict.fromkeys(SCALARS) | {name: _number(v) for name, v in increase.items()}
                counted = Counters(**known)
                one = DecodeInterval(t, seconds, concurrency, decode_seconds, tokens, counted)
                level = round(math.log(concurrency, _CLUSTER))
                made._levels.setdefault(level, deque(maxlen=_KEPT_PER_LEVEL)).append(one)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise BaselineError(f"what was observed cannot be read ({error!r:.80})") from error
        return made
