"""Scenarios: what a simulated server is, what it is asked to do, and what happens to it when.

Values only. A scenario must not know how it is simulated or served. Times are seconds since the
start of the simulation, durations seconds, lengths tokens.

The defaults are the case of Google's Gemma 4 MTP serving guide: positions accepted at 0.47 and 0.24
with k = 2 give a mean acceptance length of 1.71, and a step that costs 1.47 times a step without
speculation makes that 14 % less time per output token. With k = 1 a step costs 1.35 times as much,
which at the guide's 1.45 tokens per step is 7 % less.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from specdec_exporter.simulator.acceptance import (
    MAX_SPREAD,
    drafts_per_request,
    solve_spread,
    solve_stop,
)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The drafter's acceptance, and how it differs between requests and over time."""

    rates: tuple[float, ...] = (0.47, 0.24, 0.12, 0.06)
    """Mean over drafts of each position's acceptance. A k beyond them goes on with the last ratio.

    The first two are the guide's; the deeper two are those that a run on an H200 went on with
    (tests/data/vllm-0.24-h200).
    """
    variance_inflation: float = 8.0
    """Of accepted tokens over windows much longer than a request; 1 makes all requests alike.

    Recorded traffic shows 4 (one kind of prompt) to 13 (mixed prompts).
    """
    daily_logits: float = 0.0
    """Amplitude of a daily cycle, in logits of conditional acceptance: 0.1 moves E[J] by 7 %."""
    wander_logits: float = 0.0
    """Standard deviation of a slow random wander, in the same unit."""
    wander_seconds: float = 7200.0
    """Time over which the wander forgets (Ornstein-Uhlenbeck)."""


def extended_rates(rates: tuple[float, ...], k: int) -> tuple[float, ...]:
    """The first k rates; where there are fewer, each next one falls by the last ratio again."""
    result = list(rates[:k])
    while len(result) < k:
        before = result[-2] if len(result) > 1 else 1.0
        result.append(result[-1] * (result[-1] / before if before > 0.0 else 0.0))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who asks, and for how much."""

    requests_per_second: float = 6.0
    """Poisson arrivals; the mean of the day where there is a daily cycle."""
    clients: int = 0
    """Clients that each always have one request open (a closed loop), besides the arrivals."""
    prompt_tokens: float = 300.0
    """Mean of a geometric law."""
    output_tokens: float = 256.0
    """Mean, the first token included; the rest is geometric. At least 2."""
    prefix_hit_ratio: float = 0.0
    """Share of prompt tokens found in the prefix cache."""
    daily_amplitude: float = 0.0
    """Of the arrivals, 0..1 of their mean; quietest a quarter of a day after the start."""

    @property
    def stop(self) -> float:
        """Probability that a request ends after a token that is not its first."""
        return 1.0 / (self.output_tokens - 1.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one engine step: base(c) · ratio(k, c) + prefill tokens · seconds each.

    c is the number of requests in decode. The base is piecewise linear through `base` and goes on
    with its last slope; its default is TPOT without speculation on one H200 at 1, 8 and 32
    (tests/data/vllm-0.24-h200).
    """

    base: tuple[tuple[float, float], ...] = ((1.0, 0.00461), (8.0, 0.00477), (32.0, 0.00547))
    """Pairs of c, increasing, and seconds."""
    drafter_start: float = 0.23
    """What any k > 0 adds to the ratio: with `per_draft_token` the guide's 1.47 at k = 2, and at
    k = 1 the 1.35 that makes 1.45 tokens per step its −7 %."""
    per_draft_token: float = 0.12
    """What each drafted token adds to the ratio."""
    knee: float = 16.0
    """Above this c verification is bound by arithmetic: what k adds to the ratio grows with c."""
    seconds_per_prefill_token: float = 1e-5

    def base_seconds(self, concurrency: float) -> float:
        """A step without speculation and without prefill, at a concurrency ≥ 0."""
        points = self.base
        c = max(concurrency, points[0][0])
        if len(points) == 1:
            return points[0][1]
        upper = next((i for i in range(1, len(points)) if c <= points[i][0]), len(points) - 1)
        (c0, t0), (c1, t1) = points[upper - 1], points[upper]
        return t0 + (t1 - t0) * (c - c0) / (c1 - c0)

    def ratio(self, k: int, concurrency: float) -> float:
        """A step with k draft tokens over a step without speculation, both without prefill."""
        if k == 0:
            return 1.0
        added = self.drafter_start + self.per_draft_token * k
        return 1.0 + added * max(1.0, concurrency / self.knee)

    def seconds(self, k: int, concurrency: float, prefill_tokens: float = 0.0) -> float:
        """A whole step."""
        return (
            self.base_seconds(concurrency) * self.ratio(k, concurrency)
            + prefill_tokens * self.seconds_per_prefill_token
        )


@dataclass(frozen=True, slots=True)
class Change:
    """At `at`, what is not None takes a new value; `rates` reach theirs after `over` seconds."""

    at: float
    rates: tuple[float, ...] | None = None
    requests_per_second: float | None = None
    drafting: bool | None = None
    """False: the server goes on without a draft although k > 0."""
    over: float = 0.0


@dataclass(frozen=True, slots=True)
class Restart:
    """At `at` the server ends; after `down_seconds` a new one starts, with k and rates if given.

    Requests in it, and those that arrive while it is down, are lost.
    """

    at: float
    down_seconds: float = 10.0
    k: int | None = None
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A server, its traffic, and the script of what happens to them.

    Raises:
        ValueError: a value that cannot be simulated.
    """

    name: str
    description: str
    k: int = 2
    """Speculative tokens per draft; 0 is a server without speculation."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    traffic: Traffic = field(default_factory=Traffic)
    step_time: StepTime = field(default_factory=StepTime)
    script: tuple[Change | Restart, ...] = ()
    """In order of `at`."""
    engine_shares: tuple[float, ...] = (1.0,)
    """Each engine's share of the traffic. More than one stands for data parallelism: labels 0, 1, …
    and, as in a server of several processes, neither `process_*` nor `_created` series."""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    kv_cache_tokens: int = 131072
    """For the usage gauge alone: nothing is preempted."""
    model_name: str = "google/gemma-4-E4B-it"
    day_seconds: float = 86400.0
    """Length of the day of both daily cycles."""

    def __post_init__(self) -> None:
        """Refuse what cannot be simulated."""
        if self.k < 0:
            raise ValueError(f"k is at least 0, got {self.k}")
        if not self.acceptance.rates:
            raise ValueError("at least one rate is needed")
        if self.traffic.output_tokens <= 2.0 or self.traffic.prompt_tokens < 1.0:
            raise ValueError("mean output must exceed 2 tokens, and mean prompt be at least 1")
        if not 0.0 <= self.traffic.daily_amplitude <= 1.0:
            raise ValueError(f"daily amplitude is 0..1, got {self.traffic.daily_amplitude}")
        if any(b.at < a.at for a, b in pairwise(self.script)):
            raise ValueError("the script is not in order of time")
        if not self.engine_shares or min(self.engine_shares) <= 0.0:
            raise ValueError(f"engine shares must be positive, got {self.engine_shares}")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens <= self.max_num_seqs * (1 + self.k):
            raise ValueError("max_num_batched_tokens leaves no room for prefill")


def statistics_world(
    variance_inflation: float = 13.0,
    drafts_per_second: float = 20.0,
    mean_drafts_per_request: float = 150.0,
    *,
    rates: tuple[float, ...] = (0.47, 0.24),
    concurrency: float = 8.0,
    daily_logits: float = 0.0,
    wander_logits: float = 0.0,
    wander_seconds: float = 7200.0,
) -> Scenario:
    """A calm, endless world in which the noise of acceptance is known exactly.

    Requests arrive at drafts_per_second / mean_drafts_per_request, and one outlives many scrapes:
    its mean life is concurrency · mean_drafts_per_request / drafts_per_second, 60 s by default, so
    that the inflation seen in a window grows with the window until it is many lives long. Steps
    cost the same at any load.

    Args:
        variance_inflation: of accepted tokens per draft, over windows much longer than a request.
        drafts_per_second: mean, over all requests.
        mean_drafts_per_request: mean of the (nearly geometric) number of drafts.
        rates: mean over drafts of each position; there are k of them.
        concurrency: mean requests in decode.
        daily_logits: as in `Acceptance`; it and the wander add variance beyond the inflation.
        wander_logits: as in `Acceptance`.
        wander_seconds: as in `Acceptance`.

    Raises:
        ValueError: a variance inflation that requests of this length cannot have.
    """
    stop = solve_stop(rates, mean_drafts_per_request)
    if solve_spread(rates, stop, variance_inflation) >= MAX_SPREAD:
        raise ValueError(
            f"{mean_drafts_per_request} drafts per request cannot inflate by {variance_inflation}"
        )
    k = len(rates)
    step = StepTime(base=((1.0, 1.0),), knee=float("inf"), seconds_per_prefill_token=0.0)
    seconds = concurrency / drafts_per_second / step.ratio(k, concurrency)
    return Scenario(
        name="statistics-world",
        description="Known mean and known variance inflation, for tests of estimators",
        k=k,
        acceptance=Acceptance(
            rates, variance_inflation, daily_logits, wander_logits, wander_seconds
        ),
        traffic=Traffic(
            requests_per_second=drafts_per_second / drafts_per_request(rates, stop),
            prompt_tokens=100.0,
            output_tokens=1.0 + 1.0 / stop,
        ),
        step_time=replace(step, base=((1.0, seconds),)),
        max_num_seqs=1000,
    )


_SCENARIOS = (
    Scenario("healthy", "The guide's case at 0.47/0.24: MAL 1.71, 14 % less time per token"),
    Scenario(
        "position-1-collapse",
        "After 60 s position 1 falls from 0.24 to 0.10: the second draft token no longer pays",
        script=(Change(60.0, rates=(0.47, 0.10)),),
    ),
    Scenario(
        "drift",
        "From 60 s on traffic moves away from the drafter: 0.47/0.24 to 0.32/0.12 in four minutes",
        script=(Change(60.0, rates=(0.32, 0.12, 0.05, 0.02), over=240.0),),
    ),
    Scenario(
        "broken-drafter",
        "A drafter that never worked: position 0 at 0.027, every step pays for nothing",
        acceptance=Acceptance(rates=(0.027, 0.002, 0.0002, 0.0)),
    ),
    Scenario(
        "overload",
        "From 60 s to 180 s arrivals exceed the server: the queue grows, and speculation loses",
        script=(Change(60.0, requests_per_second=30.0), Change(180.0, requests_per_second=6.0)),
    ),
    Scenario(
        "restart",
        "At 60 s the server is gone for ten seconds, then counts from 0 again",
        script=(Restart(60.0),),
    ),
    Scenario(
        "k-change",
        "At 60 s a restart of ten seconds changes k from 2 to 1",
        script=(Restart(60.0, k=1, rates=(0.45,)),),
    ),
    Scenario(
        "two-engines",
        "Data parallelism with unequal engines: sums must come before ratios",
        traffic=Traffic(requests_per_second=12.0),
        engine_shares=(0.7, 0.3),
    ),
    Scenario("no-speculation", "The same server without a drafter: a baseline", k=0),
    Scenario(
        "idle-night",
        "From 60 s to 240 s nobody asks anything: no drafts, no values, no alerts",
        script=(Change(60.0, requests_per_second=0.0), Change(240.0, requests_per_second=6.0)),
    ),
    Scenario(
        "drafting-stalled",
        "After 60 s tokens flow without drafts although k is 2",
        script=(Change(60.0, drafting=False),),
    ),
    Scenario(
        "real-day",
        "A daily cycle of load and acceptance and a slow wander, one day long",
        acceptance=Acceptance(daily_logits=0.08, wander_logits=0.05),
        traffic=Traffic(daily_amplitude=0.8),
    ),
)

SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in _SCENARIOS}
"""The ready-made scenarios by name. Timed ones show their point within a few minutes."""
