"""The values that flow through the exporter: frozen, free of I/O, importing nothing of ours.

A scrape becomes a `Snapshot`; snapshots become a `Window` of increases; a window becomes a
`Derived`. What goes wrong on the way is a `ScrapeError` with one `Reason` out of a closed list.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import zip_longest


class Reason(StrEnum):
    """Why a scrape gave no snapshot; the values of `specdec_scrape_failures_total{reason}`."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"
    REDIRECT = "redirect"
    PROTOCOL = "protocol"
    ENCODING = "encoding"
    TOO_LARGE = "too_large"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    NOT_METRICS = "not_metrics"
    NO_SERIES = "no_series"
    MALFORMED = "malformed"
    BAD_VALUE = "bad_value"
    DUPLICATE_SERIES = "duplicate_series"
    MISSING_SERIES = "missing_series"
    CLOCK = "clock"
    OTHER_PROCESS = "other_process"
    INTERNAL = "internal"


class ScrapeError(Exception):
    """A scrape that gave no snapshot.

    `detail` is one line for a person on call: what was seen and what to do about it. It never
    carries a secret.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _add(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _subtract(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one engine, or increases of them.

    Counts but for `decode_seconds`, which is in seconds. None is a family that the server does not
    have. Without speculation the first three are None and `accepted_per_position` is empty.
    """

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_per_position: tuple[float, ...] = ()
    generation_tokens: float | None = None
    first_tokens: float | None = None
    decode_seconds: float | None = None
    decode_steps: float | None = None
    prompt_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    """Of the prompt tokens those that a cache had, so that they were not computed."""
    engine_steps: float | None = None
    """Steps of the engine, each for all requests in it; none pass while it is idle."""
    preemptions: float | None = None
    failed_requests: float | None = None
    """Requests that ended by an error or were aborted."""

    def __add__(self, other: Counters) -> Counters:
        """Sum of two; absent in one is absent in the sum, positions are padded with 0."""
        return Counters(
            **{name: _add(getattr(self, name), getattr(other, name)) for name in SCALARS},
            accepted_per_position=tuple(
                a + b
                for a, b in zip_longest(
                    self.accepted_per_position, other.accepted_per_position, fillvalue=0.0
                )
            ),
        )

    def __sub__(self, other: Counters) -> Counters:
        """Difference of two with the same number of positions; absent in one is absent.

        Raises:
            ValueError: the numbers of positions differ.
        """
        return Counters(
            **{name: _subtract(getattr(self, name), getattr(other, name)) for name in SCALARS},
            accepted_per_position=tuple(
                a - b
                for a, b in zip(
                    self.accepted_per_position, other.accepted_per_position, strict=True
                )
            ),
        )


EVEN_LENGTH = 0.95
"""Drafts that are shorter than this share of k on average vary in length."""

SCALARS = tuple(f.name for f in fields(Counters) if f.name != "accepted_per_position")
"""The names of the counters that are one number each."""

CIRCUMSTANCES = (
    "prompt_tokens", "cached_prompt_tokens", "engine_steps", "preemptions", "failed_requests",
)  # fmt: skip
"""Of these, the ones that no figure needs: where one is not known, a check is left out."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one scrape says of one engine: cumulative counters since the engine's start."""

    model_name: str
    engine: str
    counters: Counters
    extra_labels: tuple[tuple[str, str], ...] = ()
    """Other labels on the series (a proxy's, Ray's), sorted; they tell replicas apart."""

    @property
    def num_speculative_tokens(self) -> int:
        """Observed k: the number of `position` series; 0 without speculation."""
        return len(self.counters.accepted_per_position)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One parsed scrape of one target."""

    t: float
    """Time of the scrape, seconds; only differences of it matter."""
    engines: tuple[EngineSample, ...]
    process_start_time: float | None = None
    """The server's own start time in unix seconds, where it says so."""


@dataclass(frozen=True, slots=True)
class Point:
    """Running totals of one engine at the time of a scrape; they never fall."""

    t: float
    totals: Counters


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What one engine has counted since the exporter first saw it, over its restarts."""

    model_name: str
    engine: str
    counters: Counters
    decode_tokens: float
    """Generated tokens less first tokens."""
    restarts: int


@dataclass(frozen=True, slots=True)
class Window:
    """The scrapes of one model's engine, or of several engines, over one span of time.

    `tracks` has one run of points for each engine (or replica) in it, in time order, all of one k.
    """

    model_name: str
    engine: str
    seconds: float
    """The span that was asked for."""
    tracks: tuple[tuple[Point, ...], ...]

    @property
    def covered_seconds(self) -> float:
        """The span that it has scrapes for: less than asked early on, more after missed scrapes."""
        return max(track[-1].t - track[0].t for track in self.tracks)

    @property
    def num_speculative_tokens(self) -> int:
        """Observed k; the largest where engines differ, 0 without speculation."""
        return max(len(track[-1].totals.accepted_per_position) for track in self.tracks)

    @property
    def increases(self) -> tuple[Counters, ...]:
        """What was counted in it, by track."""
        return tuple(track[-1].totals - track[0].totals for track in self.tracks)

    @property
    def increase(self) -> Counters:
        """What was counted in it, summed over its engines.

        Beside engines that speculate, one that does not has drafted nothing.
        """
        increases = self.increases
        if any(one.accepted_per_position for one in increases):
            increases = tuple(
                one
                if one.accepted_per_position
                else replace(one, drafts=0.0, draft_tokens=0.0, accepted_tokens=0.0)
                for one in increases
            )
        return sum(increases[1:], increases[0])


@dataclass(frozen=True, slots=True)
class Derived:
    """What a window says, by the formulas of docs/metrics.md; None is "cannot be known from this".

    Ratios are 0 to 1, times are seconds. Standard errors carry the variance inflation; the
    `binomial_stderr` beside them does not, and is too small wherever drafts of a request are alike.
    """

    model_name: str
    engine: str
    window_seconds: float
    covered_seconds: float
    num_speculative_tokens: int
    drafts: float | None
    padded_drafts: float
    """Lower bound of drafts that were only placeholders on one-token first steps."""
    acceptance_ratio: float | None
    acceptance_ratio_stderr: float | None
    acceptance_ratio_binomial_stderr: float | None
    front_acceptance_ratio: float | None
    front_acceptance_ratio_stderr: float | None
    mean_acceptance_length: float | None
    mean_acceptance_length_stderr: float | None
    position_acceptance_ratio: tuple[float | None, ...]
    position_acceptance_ratio_stderr: tuple[float | None, ...]
    position_conditional_acceptance_ratio: tuple[float | None, ...]
    mean_draft_length: float | None
    draft_coverage_ratio: float | None
    tokens_per_step: float | None
    step_seconds: float | None
    tpot_seconds: float | None
    decode_concurrency: float | None
    overdispersion: tuple[Overdispersion, ...]
    """Of the accepted count; what was assumed first, then the window's own where it has one."""


@dataclass(frozen=True, slots=True)
class Overdispersion:
    """How many times larger the variance of accepted tokens is than for independent drafts."""

    source: str
    """`default` (a setting), `reference` (the target's own past) or `window` (this window)."""
    value: float


@dataclass(frozen=True, slots=True)
class Gain:
    """How much less a token costs than without speculation, and how that is known.

    Gains are 1 − TPOT / baseline, negative where speculation costs; None is not known, and `reason`
    says why.
    """

    source: str
    """Of the baseline: `peer`, `measured`, `observed` or `static`."""
    baseline_tpot_seconds: float | None
    """What these tokens would have cost without speculation at the same concurrency."""
    covered: bool
    """Whether the baseline knows such a load."""
    tpot_gain_ratio: float | None
    """At equal concurrency."""
    tpot_gain_ratio_stderr: float | None
    """1.96 of it are half of the 95 % interval; so of the other."""
    tpot_gain_throughput_ratio: float | None
    """At equal throughput: against a server without speculation that is asked for as much."""
    tpot_gain_throughput_ratio_stderr: float | None
    break_even_length: float | None
    """Tokens per step at which speculation pays: step time over baseline."""
    inconclusive: bool
    """Whether preemptions or failures spoil what was counted."""
    reason: str
    """In words, why a value is missing; empty when all is well."""
    baseline_taken_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one model on one target over one window."""

    total: Derived
    """All engines together; with one engine, that engine."""
    engines: tuple[Derived, ...]
    increase: Counters
    """What was counted in the window, engines together."""
    gain: Gain | None = None
    """Of all engines together; None without a baseline."""
    engine_gains: tuple[Gain | None, ...] = ()
    """Of each engine."""
    baseline_refused: str = ""
    """Which baselines are not of this model or version, in words."""


class RuleState(StrEnum):
    """What a rule says of a target now."""

    INACTIVE = "inactive"
    PENDING = "pending"
    """Its condition holds, but not for long enough yet."""
    FIRING = "firing"
    INCONCLUSIVE = "inconclusive"
    """There is too little evidence to say anything."""
    INAPPLICABLE = "inapplicable"
    """It has no meaning here, such as a second position at k = 1."""


SEVERITIES = ("critical", "warning", "info")
"""Of a rule, the worst first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule says of one model on one target, or of the target itself."""

    rule: str
    model_name: str
    """Empty for a rule on the target itself."""
    state: RuleState
    since: float | None
    """Unix seconds since which the condition holds; None unless pending or firing."""
    severity: str
    """One of SEVERITIES."""
    value: float | None
    """What the rule looks at; of a firing rule, when its condition was last seen to hold."""
    threshold: float | None
    stderr: float | None
    drafts: float | None
    """Drafts in the window: how much evidence there is."""
    summary: str
    advice: str
    """What to do about it, in plain words."""
    inhibited_by: str | None
    """A firing rule that says the same and more."""


@dataclass(frozen=True, slots=True)
class DriftIncident:
    """A drift that was found. Times are unix seconds, lengths tokens, the target's own included."""

    since: float
    detected_at: float
    shape: str
    """`front`: the first token is accepted less often; `tail`: what follows it is; or `even`."""
    expected_mean_acceptance_length: float
    observed_mean_acceptance_length: float
    expected_positions: tuple[float, ...]
    observed_positions: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """What one model's acceptance is compared with, and what came of it."""

    model_name: str
    num_speculative_tokens: int
    engine_version: str
    revision: str
    learned_seconds: float | None
    """Time with drafts that a reference is being learned from; None once it is frozen."""
    reference_source: str | None
    """`configured`, `learned` or `recorded`; None while there is none."""
    reference_taken_at: float | None
    """Unix seconds."""
    reference_position_acceptance_ratio: tuple[float, ...]
    score: float | None
    """1 and above is drift, and stays so until it is acknowledged; None without a reference."""
    incident: DriftIncident | None


@dataclass(frozen=True, slots=True)
class PredictedSpeedup:
    """What one k promises at the load of the last hour."""

    k: int
    speedup: float
    """Tokens a second against no speculation."""
    stderr: float
    extrapolated: bool
    """Whether it stands on loads, positions or a k that were not measured here."""


@dataclass(frozen=True, slots=True)
class TunerStatus:
    """What the tuner makes of one model's k."""

    model_name: str
    mode: str
    """`off`, `recommend` or `apply`."""
    can_act: bool
    """Whether the target has an actuator."""
    paused: str
    """Why nothing is decided; empty when it is."""
    decision: str
    """`hold`, `change`, `verify`, `rollback` or `pause`."""
    reason: str
    observed_k: int | None
    recommended_k: int | None
    predictions: tuple[PredictedSpeedup, ...]
    last_position_gain_ratio: float | None
    """Speed at the observed k against one less, less 1; None unless both were measured, k ≥ 2."""
    last_position_gain_ratio_stderr: float | None
    info: tuple[str, ...]
    """`k_flapping`, or nothing."""
    phase: str | None
    """How far a change is that is under way."""
    problem: str
    """Why nothing can be changed here; empty when it can."""
    last_change: float | None
    """Unix seconds."""
    decisions: tuple[tuple[str, int], ...]
    """By kind, since the exporter started."""
    actuations: int
    actuation_failures: int
    rollbacks: int


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """All that is known of one target after a scrape of it; what is served reads this alone."""

    name: str
    url: str
    """Without user, password and query."""
    labels: tuple[tuple[str, str], ...]
    up: bool
    scrapes: int
    scrape_duration_seconds: float | None
    last_success: float | None
    """Unix seconds; None before the first success."""
    failures: tuple[tuple[str, int], ...]
    """Failed scrapes by reason, of reasons met."""
    last_error: str | None
    """Why the last scrape failed; None after a good one."""
    totals: tuple[EngineTotals, ...]
    measurements: tuple[Measurement, ...]
    """Empty once the target has not answered for three intervals."""
    verdicts: tuple[Verdict, ...] = ()
    """As of the last evaluation."""
    drift: tuple[DriftStatus, ...] = ()
    tuner: tuple[TunerStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class ExporterStatus:
    """The exporter itself, beside its targets."""

    version: str
    targets: tuple[TargetStatus, ...]
    window_label: bool
    """Whether several windows are served, so that each figure must name its own."""
    last_reload_successful: bool
