"""Whether a drafter's acceptance has fallen from what it was: a frozen reference and a detector.

The reference says what acceptance was, at each time of day, and how far its sums stray by chance.
The detector adds up what is missing from it (one-sided CUSUM; Page 1954), so that a small fall is
found once enough is missing, and a large one at once. A reference that moved along would follow a
slow decline and miss it: this one changes only when it is replaced. Times are unix seconds and come
with the intervals; this module does arithmetic only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from operator import add, mul
from typing import Any, Literal, Self

from specdec_exporter.uncertainty import Interval, accepted_moments

DAY_SECONDS = 86400.0
MONTH_SECONDS = 30 * DAY_SECONDS
LEARN_SECONDS = 4 * 3600.0
"""The least time with drafts in it that a reference is learned from."""
FALSE_ALARMS_PER_MONTH = 0.5

_BIN_SECONDS = 240.0
_MOST_BINS = round(7 * DAY_SECONDS / _BIN_SECONDS)
_BLOCK_BINS = (1, 2, 4, 8, 15, 30)
BLOCK_SECONDS = tuple(bins * _BIN_SECONDS for bins in _BLOCK_BINS)
"""Lengths of the sums whose variances a reference holds."""
_RATES = 8
_MAX_SHARE = 12
"""A block is at most this fraction (one in twelve) of the past, or its variance is a guess."""
_CYCLE_DAYS = 2.0
"""A daily cycle is fitted to this many days or more: one day's slow change is no cycle yet."""
_CYCLE_PRIOR = 0.1
"""A cycle is expected to be about so large against the mean, where nothing has been seen."""
_MARGIN = 2.0
"""Standard errors of the reference that no fall can be told from."""
_SHAPE_PRIOR = 20.0
"""Accepted tokens as expected that are put to those seen, so that few of them say little."""

Shape = Literal["front", "tail", "even"]
Variances = tuple[float, ...]
"""Of sums over each of `BLOCK_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a reference holds for; anything else has another acceptance."""

    model_name: str
    num_speculative_tokens: int
    engine_version: str = ""
    revision: str = ""
    """Set by the user, to tell apart what the server does not show, such as drafter weights."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Acceptance as it was, frozen. Ratios are per draft; variances are per draft, of sums.

    Where nothing was measured (`drafts` is 0) the ratios are taken as exact.
    """

    fingerprint: Fingerprint
    source: str
    """`configured`, `learned` or `recorded`."""
    taken_at: float
    """Unix seconds."""
    position_acceptance_ratio: tuple[float, ...]
    """Mean over drafts, of position 0 first; there may be fewer than k."""
    accepted_variance: Variances
    """Per draft at the mean rate, of sums of accepted tokens weighed by the root of the rate."""
    first_variance: Variances
    """The same of position 0 alone."""
    accepted_cycle: tuple[float, ...] = ()
    """Added to the mean of J: a constant, then cosine and sine of once and twice a day (UTC)."""
    first_cycle: tuple[float, ...] = ()
    """The same for position 0."""
    lasting_share: float = 0.0
    """What sums of accepted tokens over an hour or two have of their variance and sums over four
    minutes have not: what all drafts of a time have in common, if requests are over much sooner."""
    lasting_variance: Variances = ()
    """As `accepted_variance`, of sums weighed by that as well; empty where that share is 0."""
    drafts: float = 0.0
    """Drafts that it was measured on."""
    span_seconds: float = 0.0
    """Time with drafts in it that it was measured over."""
    rates: tuple[float, ...] = ()
    """Mean drafts per second of each eighth of that time, the quietest first."""

    @property
    def is_provisional(self) -> bool:
        """Learned of so short a time that it does not know the day.

        A daily cycle of ± 5 % would pass for a small fall every day, but not for a large one.
        """
        return self.source == "learned" and not self.accepted_cycle

    @property
    def drafts_per_second(self) -> float:
        """Mean over the time that it was measured over; 0 where nothing was measured."""
        return sum(self.rates) / len(self.rates) if self.rates else 0.0

    @property
    def mean_accepted(self) -> float:
        """E[J], accepted tokens per draft at the positions it knows."""
        return sum(self.position_acceptance_ratio)

    @property
    def margin(self) -> float:
        """Two standard errors of E[J], as a share of it: a smaller fall is not told from chance."""
        return _MARGIN * self.error_of(self.mean_accepted, self.accepted_variance)

    def error_of(self, mean: float, variances: Variances) -> float:
        """Standard error of a mean of it, as a share of that mean; 0 where nothing was measured."""
        if self.drafts <= 0.0:
            return 0.0
        fitted = max(1, len(self.accepted_cycle))
        return math.sqrt(variances[-1] * fitted / self.drafts) / mean

    def expected(self, unix_time: float) -> tuple[float, float]:
        """Mean of J, accepted tokens per draft, and acceptance of position 0 at that time."""
        mean, first = self.mean_accepted, self.position_acceptance_ratio[0]
        if self.accepted_cycle:
            waves = _waves(unix_time)
            mean += sum(map(mul, self.accepted_cycle, waves))
            first += sum(map(mul, self.first_cycle, waves))
        return mean, first

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, also after a way through JSON.

        Raises:
            KeyError, TypeError: names that are missing or unknown.
            ValueError: numbers that no reference has.
        """
        made = _with_tuples(values) | {"fingerprint": Fingerprint(**values["fingerprint"])}
        for name in ("accepted_variance", "first_variance"):
            # An earlier version held fewer; the longest stands for all that are longer.
            made[name] += made[name][-1:] * (len(BLOCK_SECONDS) - len(made[name]))
        reference = cls(**made)
        reference._check()
        return reference

    def _check(self) -> None:
        share = self.lasting_share
        variances = [self.accepted_variance, self.first_variance]
        variances += [self.lasting_variance] if share else []
        if not (
            _are_acceptances(self.position_acceptance_ratio)
            and all(len(those) == len(BLOCK_SECONDS) for those in variances)
            and all(0.0 < v < math.inf for those in variances for v in those)
            and 0.0 <= share <= (1.0 if self.rates and self.span_seconds > 0.0 else 0.0)
        ):
            raise ValueError("ratios, variances or shares that cannot be those of a reference")


def _are_acceptances(ratios: Sequence[float]) -> bool:
    """Whether they can be those of positions: of nested events, the first not impossible."""
    nested = all(1.0 >= a >= b >= 0.0 for a, b in pairwise((*ratios, 0.0)))
    return nested and sum(ratios[:1]) > 0.0


def configured(
    fingerprint: Fingerprint,
    positions: Sequence[float],
    *,
    taken_at: float,
    variance_inflation: float,
) -> Reference:
    """A reference as stated, such as the guide's 0.47 and 0.24.

    Deeper positions than those given are left out of the comparison, and given ones deeper than k
    are dropped: nobody has said what the deeper ones should be, and a guess would raise alarms or
    hide them.

    Args:
        fingerprint: what it is for.
        positions: acceptance of position 0, 1, …; within 0..1 and not increasing.
        taken_at: unix seconds.
        variance_inflation: of sums over independent drafts (see `uncertainty`).

    Raises:
        ValueError: no positions, k = 0, or ratios that are not those of nested events.
    """
    kept = tuple(positions[: fingerprint.num_speculative_tokens])
    if not _are_acceptances(kept):
        raise ValueError(
            f"a reference needs acceptance ratios in 0..1 that do not increase, got {positions}"
        )
    accepted, first = (variance_inflation * v for v in _variances(kept))
    return Reference(
        fingerprint,
        "configured",
        taken_at,
        kept,
        (accepted,) * len(BLOCK_SECONDS),
        (first,) * len(BLOCK_SECONDS),
    )


def reference_from(
    intervals: Iterable[tuple[float, Interval]],
    fingerprint: Fingerprint,
    *,
    source: str,
    taken_at: float,
    variance_inflation: float,
) -> Reference:
    """A reference from a span, however short.

    Of blocks that the span holds less than twelve of (48 minutes for the shortest, a day for the
    longest) the variance is not known, and the given inflation stands in.

    Args:
        intervals: unix seconds of its end, and the interval; in time order.
        fingerprint: what it is for; intervals of another k are left out.
        source: `learned` or `recorded`.
        taken_at: unix seconds.
        variance_inflation: of sums over independent drafts (see `uncertainty`).

    Raises:
        ValueError: no drafts of that k in the span, or none of them accepted.
    """
    learner = Learner(variance_inflation)
    for unix_time, interval in intervals:
        if len(interval.per_position) == fingerprint.num_speculative_tokens:
            learner.add(unix_time, interval)
    return learner.fit(fingerprint, source=source, taken_at=taken_at)


@dataclass(slots=True)
class _Bin:
    """Four minutes or less of time with drafts."""

    index: int
    seconds: float
    drafts: float
    accepted: tuple[float, ...]


class Learner:
    """The last seven days with drafts of one target, in steps of four minutes.

    Args:
        variance_inflation: assumed where the past is too short to show its own.
    """

    def __init__(self, variance_inflation: float) -> None:
        self._variance_inflation = variance_inflation
        self._bins: deque[_Bin] = deque(maxlen=_MOST_BINS)

    def add(self, unix_time: float, interval: Interval) -> None:
        """Take in one scrape interval that ended then; another k than before begins anew."""
        if interval.drafts <= 0.0 or not interval.per_position:
            return
        if self._bins and len(self._bins[-1].accepted) != len(interval.per_position):
            self._bins.clear()
        index = int((unix_time - interval.seconds / 2) // _BIN_SECONDS)
        if self._bins and index <= self._bins[-1].index:
            last = self._bins[-1]
            last.seconds += interval.seconds
            last.drafts += interval.drafts
            last.accepted = tuple(map(add, last.accepted, interval.per_position))
        else:
            seconds, drafts, per_position = interval
            self._bins.append(_Bin(index, seconds, drafts, per_position))

    @property
    def seconds(self) -> float:
        """Time with drafts in it that it holds."""
        return sum(one.seconds for one in self._bins)

    def reference(self, fingerprint: Fingerprint, now: float) -> Reference | None:
        """A reference from all that it holds, dated `now`; None before four hours of drafting.

        Flat where less than two days are between the first and the last, and with a daily cycle
        after. None as well where k is another, or nothing was accepted.
        """
        if self.seconds < LEARN_SECONDS:
            return None
        try:
            return self.fit(fingerprint, source="learned", taken_at=now)
        except ValueError:
            return None

    def fit(self, fingerprint: Fingerprint, *, source: str, taken_at: float) -> Reference:
        """The same from however little it holds.

        Raises:
            ValueError: it holds no drafts of that k, or none of them accepted.
        """
        bins = list(self._bins)
        k = fingerprint.num_speculative_tokens
        if not bins or len(bins[0].accepted) != k or not any(one.accepted[0] for one in bins):
            raise ValueError(f"nothing was accepted at k = {k}, so there is nothing to refer to")
        seconds, total = self.seconds, sum(one.drafts for one in bins)
        ratios = tuple(sum(a) / total for a in zip(*(one.accepted for one in bins), strict=True))
        days = (bins[-1].index - bins[0].index) * _BIN_SECONDS / DAY_SECONDS
        waves = (
            [_waves((b.index + 0.5) * _BIN_SECONDS) for b in bins] if days >= _CYCLE_DAYS else []
        )
        sums = [sum(one.accepted) for one in bins], [one.accepted[0] for one in bins]
        (accepted_cycle, accepted, share, lasting), (first_cycle, first, _, _) = (
            _fit(bins, counts, waves, self._variance_inflation * variance)
            for counts, variance in zip(sums, _variances(ratios), strict=True)
        )
        ranked = sorted(bins, key=lambda one: one.drafts / one.seconds)
        parts = min(_RATES, len(ranked))
        eighths = [
            ranked[i * len(ranked) // parts : (i + 1) * len(ranked) // parts] for i in range(parts)
        ]
        return Reference(
            fingerprint,
            source,
            taken_at,
            ratios,
            accepted_variance=accepted,
            first_variance=first,
            accepted_cycle=accepted_cycle,
            first_cycle=first_cycle,
            lasting_share=share,
            lasting_variance=lasting,
            drafts=total,
            span_seconds=seconds,
            rates=tuple(
                sum(one.drafts for one in part) / sum(one.seconds for one in part)
                for part in eighths
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return {"bins": [[b.index, b.seconds, b.drafts, *b.accepted] for b in self._bins]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], variance_inflation: float) -> Self:
        """What `to_dict` gave, also after a way through JSON."""
        learner = cls(variance_inflation)
        for index, seconds, drafts, *accepted in values["bins"]:
            learner._bins.append(_Bin(index, seconds, drafts, tuple(accepted)))
        return learner


@dataclass(frozen=True, slots=True)
class Incident:
    """A drift that was found, with what was seen of it until then. Times are unix seconds."""

    since: float
    """When it began, as far as can be told: the last time that nothing was missing."""
    detected_at: float
    shape: Shape
    """`front`: the first token is accepted less often, so drafter and target disagree from the
    start. `tail`: only what follows an accepted token is. `even`: both."""
    chart: str
    """`slow`, `medium` and `fast` watch the mean accepted length, `first` watches position 0."""
    expected_mean_accepted_length: float
    observed_mean_accepted_length: float
    expected_positions: tuple[float, ...]
    observed_positions: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, also after a way through JSON."""
        return cls(**_with_tuples(values))


def _spans(variances: Variances) -> Iterator[tuple[float, float, float, float]]:
    """Shortest and longest T, and α and b of b · T^α, the variance of sums over such T.

    A power from one of `BLOCK_SECONDS` to the next, and variances that keep before and after.
    """
    yield 0.0, BLOCK_SECONDS[0], 1.0, variances[0]
    for (short, long), (v, w) in zip(pairwise(BLOCK_SECONDS), pairwise(variances), strict=True):
        α = min(max(1.0 + math.log(w / v) / math.log(long / short), 0.5), 1.9)
        yield short, long, α, v * short ** (1.0 - α)
    yield BLOCK_SECONDS[-1], math.inf, 1.0, variances[-1]


def draft_weight(rate: float, lasting: float, usual_rate: float) -> float:
    """What a draft counts in a chart: the inverse of how far a second's sum strays at that rate.

    Where requests differ, a sum over n drafts strays by √(a·n); where acceptance wanders, by n,
    since all drafts of a time stray together; by √(a·n + b·n²) where both do.

    Args:
        rate: drafts per second, above 0.
        lasting: b·n / (a + b·n) at the usual rate.
        usual_rate: drafts per second; not used where `lasting` is 0.
    """
    if not lasting:
        return 1.0 / math.sqrt(rate)
    return 1.0 / math.sqrt(rate * (1.0 - lasting + lasting * rate / usual_rate))


@dataclass(slots=True)
class Chart:
    """One CUSUM of what is missing, in accepted tokens times `draft_weight`.

    So its sums stray alike at all rates, as far as that is known, and the quiet hours have their
    say.
    """

    name: str
    position_0: bool
    fall: float
    """The fall that is allowed for; twice of it is found fastest."""
    mean: float
    variances: Variances
    allowance: float
    """The fall, or more where the reference itself is no better known: √(fall² + (2 errors)²)."""
    lasting: float
    """Share of the variance that all drafts of a time have in common, at the usual rate."""
    usual_rate: float
    """Drafts per second."""
    share: float
    """Of the false alarms. Together they are more than 1: the charts mostly alarm together, and the
    formula of `set_threshold` counts more than there are where requests outlive scrapes."""
    threshold: float = math.inf
    missing: float = 0.0
    since: float | None = None
    drafts: float = 0.0
    expected: tuple[float, float] = (0.0, 0.0)
    accepted: list[float] = field(default_factory=list)

    def set_threshold(self, rates: Sequence[float], seconds_per_alarm: float) -> None:
        """Solve for this chart's share of one false alarm in so many seconds.

        Args:
            rates: drafts per second of equal shares of the time.
            seconds_per_alarm: of all charts.
        """
        low, high = 0.0, 1.0
        while self._alarms(rates, high) * seconds_per_alarm > self.share:
            low, high = high, 2.0 * high
        for _ in range(30):
            middle = (low + high) / 2.0
            often = self._alarms(rates, middle) * seconds_per_alarm > self.share
            low, high = (middle, high) if often else (low, middle)
        self.threshold = high

    def _alarms(self, rates: Sequence[float], threshold: float) -> float:
        """False alarms per second.

        A Brownian motion with the drift and variance of `missing` while all is well, reflected
        at 0, takes (e^x − x − 1) · variance / (2 drift²) to reach h, where x = 2 · drift · h /
        variance (Siegmund 1985; his correction for steps, which makes h smaller, is left out: sums
        of few intervals stray less than the variance says). If a sum reaches h in the time T, it
        has strayed by h + drift · T, and x is (h + drift · T)² / (2 · variance of such sums) at the
        T where that is least, h / drift; the factor behind e^x is T / x. Here the variance grows
        by another power α of T in each span. Then T is α · h / (2 − α) / drift, and what strays for
        longer comes to its extremes less often: the factor is T / x^(1/α), which lies between T / x
        and the T / x^(2/α − 1) of fractional Brownian motion, and so still counts too many alarms.
        """
        total, spans = 0.0, tuple(_spans(self.variances))
        for rate in rates:
            drift = self.fall * self.mean * rate * self._weight(rate)
            least, trials = 700.0, 0.0
            for shortest, longest, α, scale in spans:
                t = min(max(α / (2.0 - α) * threshold / drift, shortest), longest)
                x = (threshold + drift * t) ** 2 / (2.0 * scale * t**α)
                if x < least:
                    least, trials = x, x ** (1.0 / α) / t
            total += trials / (math.expm1(least) - least)
        return total / len(rates)

    def _weight(self, rate: float) -> float:
        return draft_weight(rate, self.lasting, self.usual_rate)

    def add(self, unix_time: float, interval: Interval, expected: tuple[float, float]) -> bool:
        """Take in an interval; True where too much is missing."""
        drafts, per_position = interval.drafts, interval.per_position
        mean, first = expected
        due, got = (first, per_position[0]) if self.position_0 else (mean, sum(per_position))
        weight = self._weight(drafts / interval.seconds)
        self.missing += weight * (drafts * due * (1.0 - self.allowance) - got)
        if self.missing <= 0.0:
            self.clear()
            return False
        if self.since is None:
            self.since = unix_time - interval.seconds
            self.accepted = [0.0] * len(per_position)
        self.drafts += drafts
        self.expected = self.expected[0] + drafts * mean, self.expected[1] + drafts * first
        self.accepted = list(map(add, self.accepted, per_position))
        return self.missing >= self.threshold

    def clear(self) -> None:
        """Begin anew with nothing missing."""
        self.missing = self.drafts = 0.0
        self.since, self.expected, self.accepted = None, (0.0, 0.0), []

    def to_dict(self) -> dict[str, Any]:
        """What changes, as plain values."""
        return {
            "missing": self.missing,
            "since": self.since,
            "drafts": self.drafts,
            "expected": list(self.expected),
            "accepted": self.accepted,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave."""
        self.missing, self.since = values["missing"], values["since"]
        self.drafts, self.accepted = values["drafts"], list(values["accepted"])
        self.expected = values["expected"][0], values["expected"][1]


class Detector:
    """Compares what a target accepts with its reference, one scrape interval after the other.

    Four charts: J and a small fall, a larger and a large one, position 0 and a small one; against a
    provisional reference the one for large falls alone. An incident latches: it stays, and nothing
    more is taken in, until acknowledged.

    Args:
        reference: what acceptance should be.
        false_alarms_per_month: to be expected in 30 days of drafting without any change.
    """

    def __init__(
        self, reference: Reference, false_alarms_per_month: float = FALSE_ALARMS_PER_MONTH
    ) -> None:
        self.reference = reference
        self.incident: Incident | None = None
        self._positions = len(reference.position_acceptance_ratio)
        # The smaller it is, the sooner a ramp is found; where acceptance wanders, it would be found
        # in the wandering. What is found in minutes cannot have wandered.
        small = 0.04 if reference.lasting_share < 0.5 else 0.05
        self.charts = [
            _chart("slow", reference, fall=small, share=0.8, lasting=reference.lasting_share),
            _chart("medium", reference, fall=0.07, share=0.5, lasting=reference.lasting_share),
            _chart("fast", reference, fall=0.15, share=0.25),
            _chart("first", reference, fall=0.05, share=0.15),
        ]
        if reference.is_provisional:
            # A day of ± 10 %, taken at its best hour, is no large fall either.
            self.charts = [_chart("fast", reference, fall=0.20, share=1.0)]
        self._seconds_per_alarm = MONTH_SECONDS / false_alarms_per_month
        self._drafts = self._seconds = 0.0
        self._octave: int | None = None

    @property
    def score(self) -> float:
        """The fullest chart against its threshold; 1 and above is drift, until acknowledged."""
        fullest = max(map(_fullness, self.charts))
        return fullest if self.incident is None else max(1.0, fullest)

    def add(self, unix_time: float, interval: Interval) -> None:
        """Take in one scrape interval that ended then.

        Ignored while an incident is latched, where there are no drafts, and where fewer positions
        are counted than the reference has: then k is another.
        """
        if self.incident is not None or interval.drafts <= 0.0:
            return
        if len(interval.per_position) != self._positions:
            if len(interval.per_position) < self._positions:
                return
            interval = interval._replace(per_position=interval.per_position[: self._positions])
        self._follow_rate(interval)
        expected = self.reference.expected(unix_time)
        full = [chart for chart in self.charts if chart.add(unix_time, interval, expected)]
        if full:
            self.incident = self._describe(max(full, key=_fullness), unix_time)

    def acknowledge(self) -> None:
        """End the incident, and begin anew with nothing missing."""
        self.incident = None
        for chart in self.charts:
            chart.clear()

    def to_dict(self) -> dict[str, Any]:
        """All but the reference, as plain values."""
        return {
            "incident": None if self.incident is None else self.incident.to_dict(),
            "drafts": self._drafts,
            "seconds": self._seconds,
            "charts": {chart.name: chart.to_dict() for chart in self.charts},
        }

    @classmethod
    def from_dict(
        cls,
        reference: Reference,
        values: Mapping[str, Any],
        false_alarms_per_month: float = FALSE_ALARMS_PER_MONTH,
    ) -> Self:
        """What `to_dict` gave, also after a way through JSON, with the same reference."""
        detector = cls(reference, false_alarms_per_month)
        detector._drafts, detector._seconds = values["drafts"], values["seconds"]
        detector._set_thresholds()
        for chart in detector.charts:
            # An earlier version may have had fewer.
            if chart.name in values["charts"]:
                chart.restore(values["charts"][chart.name])
        if values["incident"] is not None:
            detector.incident = Incident.from_dict(values["incident"])
        return detector

    def _follow_rate(self, interval: Interval) -> None:
        """Count drafts per second over about a day; the more there are, the higher the thresholds.

        A month of more drafts has more chances of a false alarm.
        """
        keep = max(0.0, 1.0 - interval.seconds / DAY_SECONDS)
        self._drafts = self._drafts * keep + interval.drafts
        self._seconds = self._seconds * keep + interval.seconds
        self._set_thresholds()

    def _set_thresholds(self) -> None:
        """Solve for the reference's rates, or for the power of two below what is seen if larger."""
        if self._seconds <= 0.0:
            return
        # By powers of two, since the thresholds grow with the logarithm only.
        octave = math.frexp(self._drafts / self._seconds)[1] - 1
        if octave != self._octave:
            self._octave = octave
            seen, usual = math.ldexp(1.0, octave), self.reference.drafts_per_second
            more = max(1.0, seen / usual) if usual else seen
            rates = [more * rate for rate in self.reference.rates or (1.0,)]
            for chart in self.charts:
                chart.set_threshold(rates, self._seconds_per_alarm)

    def _describe(self, chart: Chart, unix_time: float) -> Incident:
        mean, first = (value / chart.drafts for value in chart.expected)
        ratios = self.reference.position_acceptance_ratio
        # A time of day moves the deeper positions as it moves their sum.
        rest = (mean - first) / (sum(ratios) - ratios[0]) if sum(ratios[1:]) > 0.0 else 0.0
        expected = (first, *(rest * ratio for ratio in ratios[1:]))
        observed = tuple(count / chart.drafts for count in chart.accepted)
        assert chart.since is not None
        return Incident(
            since=chart.since,
            detected_at=unix_time,
            shape=shape_of(expected, observed, chart.drafts),
            chart=chart.name,
            expected_mean_accepted_length=1.0 + mean,
            observed_mean_accepted_length=1.0 + sum(observed),
            expected_positions=expected,
            observed_positions=observed,
        )


def shape_of(expected: Sequence[float], observed: Sequence[float], drafts: float) -> Shape:
    """Which conditional acceptance fell: of the first token, of what follows one, or both alike.

    Conditional, since every deeper position falls with the first: a tail that is as long as ever
    once the first token is accepted is no change of the tail. Compared are the logarithms of two
    falls: that of p_0, and that of Σ_{i ≥ 1} p_i / Σ_{i < k−1} p_i, the chance that one accepted
    token is followed by another. The one with two thirds of both together names the shape. At
    k = 1 it is always `front`.

    Args:
        expected: acceptance of each position by the reference, per draft.
        observed: the same as seen.
        drafts: how many were seen.
    """
    before = sum(expected[:-1])
    if before <= 0.0 or sum(expected[1:]) <= 0.0:
        return "front"
    usual = sum(expected[1:]) / before
    passed, followed = drafts * sum(observed[:-1]), drafts * sum(observed[1:])
    going_on = (followed + _SHAPE_PRIOR * usual) / (passed + _SHAPE_PRIOR)
    tail = max(0.0, math.log(usual / going_on))
    started = (drafts * observed[0] + _SHAPE_PRIOR * expected[0]) / (drafts + _SHAPE_PRIOR)
    front = max(0.0, math.log(expected[0] / started))
    if front >= 2.0 * tail:
        return "front"
    return "tail" if tail >= 2.0 * front else "even"


def _chart(
    name: str, reference: Reference, *, fall: float, share: float, lasting: float = 0.0
) -> Chart:
    position_0 = name == "first"
    mean, variances = reference.mean_accepted, reference.accepted_variance
    if position_0:
        mean, variances = reference.position_acceptance_ratio[0], reference.first_variance
    elif lasting:
        variances = reference.lasting_variance
    return Chart(
        name=name,
        position_0=position_0,
        fall=fall,
        mean=mean,
        variances=variances,
        allowance=math.hypot(fall, _MARGIN * reference.error_of(mean, variances)),
        lasting=lasting,
        usual_rate=reference.drafts / reference.span_seconds if lasting else 0.0,
        share=share,
    )


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _fullness(chart: Chart) -> float:
    return chart.missing / chart.threshold


def _variances(ratios: Sequence[float]) -> tuple[float, float]:
    """Of J, and of position 0, within independent drafts; above 0, as a threshold must be."""
    first = ratios[0]
    return max(accepted_moments(ratios, 1.0)[1], 1e-6), max(first * (1.0 - first), 1e-6)


def _waves(unix_time: float) -> tuple[float, ...]:
    """1, then cosine and sine of once and twice a day."""
    angle = 2.0 * math.pi * (unix_time % DAY_SECONDS) / DAY_SECONDS
    cosine, sine = math.cos(angle), math.sin(angle)
    return 1.0, cosine, sine, cosine * cosine - sine * sine, 2.0 * sine * cosine


def _fit(
    bins: Sequence[_Bin],
    counts: Sequence[float],
    waves: Sequence[tuple[float, ...]],
    assumed_variance: float,
) -> tuple[tuple[float, ...], Variances, float, Variances]:
    """The daily cycle of counts per draft, empty without waves, and the variances of their sums.

    The cycle is added to the mean over drafts. Least squares, weighed by the root of the rate, on
    waves less their own mean. A prior of the size `_CYCLE_PRIOR` keeps hours that nothing is known
    of near it. The variances are of sums weighed so too; then comes the share of them that lasts,
    and the variances of sums weighed by that, empty where it is 0.
    """
    usual = sum(counts) / sum(one.drafts for one in bins)
    seconds = [one.seconds for one in bins]
    rates = [one.drafts / one.seconds for one in bins]
    weights = [draft_weight(rate, 0.0, 0.0) for rate in rates]
    drafts = [w * one.drafts for w, one in zip(weights, bins, strict=True)]
    weighed = list(map(mul, weights, counts))
    total = sum(drafts)
    mean = sum(weighed) / total
    residuals = [count - mean * n for count, n in zip(weighed, drafts, strict=True)]
    cycle: tuple[float, ...] = ()
    if waves:
        columns = list(zip(*waves, strict=True))[1:]
        centres = [sum(map(mul, column, drafts)) / total for column in columns]
        centred = [[w - c for w in col] for col, c in zip(columns, centres, strict=True)]
        weighted = [list(map(mul, column, drafts)) for column in centred]
        matrix = [[sum(map(mul, a, b)) for b in centred] for a in weighted]
        prior = assumed_variance / (_CYCLE_PRIOR * mean) ** 2 * sum(seconds) / total
        for i in range(len(matrix)):
            matrix[i][i] += prior
        shares = _solve(matrix, [sum(map(mul, column, residuals)) for column in centred])
        cycle = (-sum(map(mul, shares, centres)), *shares)
        for i, (n, wave) in enumerate(zip(drafts, waves, strict=True)):
            residuals[i] -= n * sum(map(mul, cycle, wave))
        cycle = (cycle[0] + mean - usual, *shares)
    fitted = max(1, len(cycle))

    def variances(residuals: Sequence[float]) -> tuple[float | None, ...]:
        return tuple(_block_variance(seconds, residuals, width, fitted) for width in _BLOCK_BINS)

    def filled(found: Sequence[float | None]) -> Variances:
        return tuple(assumed_variance if v is None else v for v in found)

    found = variances(residuals)
    known = [v for v in found if v is not None]
    lasting = max(0.0, 1.0 - known[0] / known[-1]) if known else 0.0
    if not lasting:
        return cycle, filled(found), 0.0, ()
    level = sum(one.drafts for one in bins) / sum(seconds)
    weighed_anew = [
        residual * draft_weight(rate, lasting, level) / w
        for residual, rate, w in zip(residuals, rates, weights, strict=True)
    ]
    return cycle, filled(found), lasting, filled(variances(weighed_anew))


def _block_variance(
    seconds: Sequence[float], residuals: Sequence[float], width: int, fitted: int
) -> float | None:
    """Variance per second of the sums over all overlapping blocks of so many bins.

    None where the past is too short. What was fitted to the same past takes its share out of every
    block's variance.
    """
    if width * _MAX_SHARE > len(seconds):
        return None
    sums = list(accumulate(residuals, initial=0.0))
    times = list(accumulate(seconds, initial=0.0))
    squares = sum((b - a) ** 2 for a, b in zip(sums, sums[width:], strict=False))
    time = sum(b - a for a, b in zip(times, times[width:], strict=False))
    return max(squares / time / (1.0 - fitted * width / len(seconds)), 1e-6)


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution of a positive definite system, by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            row[:] = [a - share * b for a, b in zip(row, pivot, strict=True)]
    solution: list[float] = []
    for i in reversed(range(len(rows))):
        known = sum(map(mul, rows[i][i + 1 : -1], solution))
        solution.insert(0, (rows[i][-1] - known) / rows[i][i])
    return solution
