"""What k should be, and when to change it: one pure step from a state and evidence to a decision.

Google's Gemma 4 MTP serving guide speaks first, then the optimum of the cost model, and guard rails
hold both back. Deciding is not acting: whoever carries out a decision tells of it by `begin`. Time
is an argument; all values are frozen, and the state has a plain form that outlives the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from specdec_exporter.cost import (
    Acceptance,
    BaselineCurve,
    CostModel,
    Load,
    Prediction,
    Sample,
    extrapolate,
    predict,
)
from specdec_exporter.duration import format_duration
from specdec_exporter.tuner_settings import TunerSettings

DAY_SECONDS = 86400.0
FIRING = "firing"
K_FLAPPING = "k_flapping"
"""The info state of a workload that asks for another k again and again."""
ANOTHER_LOAD = 2.0
"""By this factor the requests in decode must differ to make another load."""


class Kind(StrEnum):
    """What is to be done."""

    HOLD = "hold"
    CHANGE = "change"
    VERIFY = "verify"
    """Nothing, while a change is under watch."""
    ROLLBACK = "rollback"
    PAUSE = "pause"
    """Nothing, until somebody resumes."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one model on one target at one time; None is not known."""

    observed_k: int | None
    """None while the server does not answer."""
    server_start: float
    """Unix seconds at which the server started, or anything else that tells its starts apart."""
    stale: bool = False
    """The last good scrape is too long ago."""
    inconclusive: str = ""
    """Why the window says nothing, such as preemptions; empty when it does."""
    verdicts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """State of each rule by its name."""
    hour: Acceptance | None = None
    """Over the last hour, or since k changed."""
    window: Acceptance | None = None
    """Over the last window."""
    window_seconds: float = 300.0
    load: Load = ()
    """Concurrency of one engine and tokens decoded at it, over the last hour."""
    decode_concurrency: float | None = None
    """Of one engine, over the window; so are the rest."""
    step_seconds: float | None = None
    tokens_per_step: float | None = None
    prefill_tokens_per_step: float | None = None
    """Prompt tokens computed per step of the engine."""
    decode_throughput: float | None = None
    """Tokens a second of all engines."""
    gain: float | None = None
    """Net TPOT gain at equal concurrency; None unless covered."""
    gain_stderr: float | None = None

    @property
    def tpot_seconds(self) -> float | None:
        """Seconds per token."""
        if self.step_seconds is None or not self.tokens_per_step:
            return None
        return self.step_seconds / self.tokens_per_step


@dataclass(frozen=True, slots=True)
class Side:
    """What a change is compared by, on one side of it."""

    gain: float | None = None
    gain_stderr: float | None = None
    tpot_seconds: float | None = None
    throughput: float | None = None
    decode_concurrency: float | None = None
    peak_concurrency: float | None = None
    position_0: float | None = None
    position_0_stderr: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of k that was begun here and is not done with."""

    from_k: int
    to_k: int
    at: float
    before: Side
    rollback: bool = False
    ready_at: float | None = None
    """Since when the server has answered with the new k."""
    seen_at: float | None = None
    """When it last did."""


@dataclass(frozen=True, slots=True)
class Block:
    """A k that is not to be tried for some time."""

    k: int
    until: float
    why: str
    deeper_too: bool = False
    position_0: float | None = None
    """The block ends as well when position 0 is no longer what it was here."""
    decode_concurrency: float | None = None
    """At which it was worse. The more requests there are, the more it costs to check drafts: the
    block of a deeper k than was left ends at much smaller loads, that of a smaller k at larger."""


@dataclass(frozen=True, slots=True)
class Tail:
    """How acceptance went on beyond position 0, when it was last seen deep enough."""

    position_0: float
    conditional: tuple[float, ...]
    """p_j / p_(j−1) from j = 1 on."""
    at: float


@dataclass(frozen=True, slots=True)
class TunerState:
    """What the tuner remembers between two evaluations, and over restarts."""

    costs: CostModel = field(default_factory=CostModel)
    expected_k: int | None = None
    server_start: float | None = None
    since: float | None = None
    """Since when the server has been seen at this k in this start."""
    change: Change | None = None
    changes: tuple[float, ...] = ()
    """When k was changed here, rollbacks too, over the last day."""
    last_change: float | None = None
    switched_off: float | None = None
    """When speculation was switched off here."""
    piles_up: bool = False
    """Whether requests were waiting for the server after the last change."""
    blocks: tuple[Block, ...] = ()
    tails: tuple[Tail, ...] = ()
    wanted: int | None = None
    """What the last window asks for."""
    turns: tuple[float, ...] = ()
    """When that changed."""
    paused: str = ""
    """Why somebody must say that it may go on; empty when nobody must."""
    learned_at: float | None = None
    recommended: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(replace(self, costs=CostModel())) | {"costs": self.costs.to_dict()}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> TunerState:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is of another form.
        """
        change = value["change"]
        return TunerState(
            **{
                **value,
                "costs": CostModel.from_dict(value["costs"]),
                "change": None
                if change is None
                else Change(**{**change, "before": Side(**change["before"])}),
                "changes": tuple(value["changes"]),
                "blocks": tuple(Block(**block) for block in value["blocks"]),
                "tails": tuple(
                    Tail(**{**tail, "conditional": tuple(tail["conditional"])})
                    for tail in value["tails"]
                ),
                "turns": tuple(value["turns"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why."""

    kind: Kind
    from_k: int | None
    to_k: int | None
    """The same as `from_k` where nothing is to change."""
    reason: str
    """A sentence for a person on call."""
    evidence: Mapping[str, Any]
    """The figures behind it, plain values."""
    recommended_k: int | None
    """What k should be, whether or not it may change now."""
    predictions: tuple[Prediction, ...] = ()
    info: tuple[str, ...] = ()
    """`k_flapping`, or nothing."""
    blocks: tuple[Block, ...] = ()
    """What is not to be tried again once this has begun."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def decide(
    state: TunerState,
    evidence: Evidence,
    now: float,
    settings: TunerSettings,
    baseline: BaselineCurve | None = None,
) -> tuple[TunerState, Decision]:
    """One evaluation.

    A decision to change or to roll back comes again at every evaluation until `begin` tells that
    somebody has begun to carry it out.

    Args:
        state: as the last evaluation, `begin` or `resume` left it.
        evidence: as of now.
        now: unix seconds.
        settings: in force.
        baseline: TPOT without speculation, where one is known.
    """
    state = _forget(state, now, settings)
    conclusive = not evidence.stale and evidence.observed_k is not None
    if conclusive:
        state = _follow(state, evidence, now, settings)
        state = _learn(state, evidence, now, settings)
    outlook = _look(state, evidence, now, settings, baseline)
    if conclusive and outlook.wanted_now is not None:
        turned = state.wanted is not None and outlook.wanted_now != state.wanted
        state = replace(
            state,
            wanted=outlook.wanted_now,
            turns=(*state.turns, now)[-64:] if turned else state.turns,
        )
    if outlook.k is not None:
        state = replace(state, recommended=outlook.k)
    return _decide(state, evidence, now, settings, outlook)


def begin(state: TunerState, decision: Decision, evidence: Evidence, now: float) -> TunerState:
    """The state once a change or a rollback has begun to be carried out."""
    from_k, to_k = decision.from_k, decision.to_k
    if decision.kind not in (Kind.CHANGE, Kind.ROLLBACK) or from_k is None or to_k is None:
        raise ValueError(f"nothing begins with a decision to {decision.kind}")
    return replace(
        state,
        change=Change(from_k, to_k, now, _side(evidence), decision.kind is Kind.ROLLBACK),
        changes=(*state.changes, now),
        last_change=now,
        blocks=(*state.blocks, *decision.blocks),
        switched_off=now if to_k == 0 else None,
    )


def resume(state: TunerState) -> TunerState:
    """The state once a person has said that the tuner may go on."""
    return replace(state, paused="", change=None)


def _forget(state: TunerState, now: float, settings: TunerSettings) -> TunerState:
    """Drop what is too old to matter."""
    return replace(
        state,
        changes=tuple(t for t in state.changes if now - t < DAY_SECONDS),
        turns=tuple(t for t in state.turns if now - t < settings.flapping_within),
        blocks=tuple(block for block in state.blocks if now < block.until),
        tails=tuple(tail for tail in state.tails if now - tail.at < settings.block_for),
    )


def _follow(
    state: TunerState, evidence: Evidence, now: float, settings: TunerSettings
) -> TunerState:
    """Note which k the server runs with, and whether somebody else has changed it."""
    k, change = evidence.observed_k, state.change
    if state.expected_k is None:
        return replace(state, expected_k=k, server_start=evidence.server_start, since=now)
    restarted = evidence.server_start != state.server_start
    if change is not None and k == change.to_k and (k != state.expected_k or restarted):
        ready = change.ready_at or now
        state = replace(state, change=replace(change, ready_at=ready, seen_at=now))
    elif change is not None and k == change.to_k and change.ready_at is not None:
        state = replace(state, change=replace(change, seen_at=now))
    elif k != state.expected_k:
        told = f"k was changed from {state.expected_k} to {k} by somebody else"
        paused = f"{told}; say when the tuner may go on" if settings.mode == "apply" else ""
        state = replace(state, change=None, last_change=now, switched_off=None, paused=paused)
    if k != state.expected_k or restarted:
        state = replace(state, expected_k=k, server_start=evidence.server_start, since=now)
    return state


def _learn(
    state: TunerState, evidence: Evidence, now: float, settings: TunerSettings
) -> TunerState:
    """Take in the step time, once a window, and how acceptance goes on beyond position 0."""
    k, c, step = evidence.observed_k, evidence.decode_concurrency, evidence.step_seconds
    if evidence.inconclusive or k is None or state.since is None:
        return state
    if now - state.since < settings.settle:
        return state
    due = state.learned_at is None or now - state.learned_at >= evidence.window_seconds
    if due and c and step:
        sample = Sample(
            k=k,
            start=evidence.server_start,
            seconds=evidence.window_seconds,
            decode_concurrency=c,
            step_seconds=step,
            prefill_tokens_per_step=evidence.prefill_tokens_per_step,
        )
        state = replace(state, costs=state.costs.observe(sample), learned_at=now)
    seen = evidence.hour
    if due and seen is not None and seen.drafts >= settings.min_drafts and len(seen.ratios) > 1:
        state = replace(state, tails=_with_tail(state.tails, seen.ratios, now, settings))
    return state


def _with_tail(
    tails: Sequence[Tail], ratios: Sequence[float], now: float, settings: TunerSettings
) -> tuple[Tail, ...]:
    seen = tuple(b / a if a > 0 else 0.0 for a, b in pairwise(ratios))
    within = settings.same_acceptance_within
    same = [tail for tail in tails if abs(tail.position_0 - ratios[0]) <= within]
    others = tuple(tail for tail in tails if tail not in same)
    longest = max((tail.conditional for tail in same), key=len, default=())
    return (*others, Tail(ratios[0], seen + longest[len(seen) :], now))


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What k should be, from what is known now."""

    k: int | None = None
    reason: str = ""
    predictions: tuple[Prediction, ...] = ()
    promise: float = 0.0
    """Speed gained by going there, less the allowance for error; as a ratio."""
    wanted_now: int | None = None


def _look(
    state: TunerState,
    evidence: Evidence,
    now: float,
    settings: TunerSettings,
    baseline: BaselineCurve | None,
) -> _Outlook:
    k, seen = evidence.observed_k, evidence.hour
    if not k:
        return _retry(state, now, settings) if k == 0 else _Outlook(reason="no data")
    if seen is None or not seen.ratios or seen.drafts < settings.min_drafts:
        drafts = 0.0 if seen is None else seen.drafts
        return _Outlook(reason=f"too few drafts in the last hour ({drafts:.0f})")
    deepest = max(k, *state.costs.measured, 1)
    cap = max(k, min(settings.max_k, deepest + settings.steps_above_measured))
    acceptance = extrapolate(seen, cap, _tail(state.tails, seen, settings))
    coverage = _coverage(evidence, acceptance[0][:k])
    predictions = predict(
        state.costs,
        acceptance,
        evidence.load,
        range(settings.floor, cap + 1),
        settings,
        running=_running(state, k, settings),
        baseline=baseline,
        coverage=coverage,
        prefill_tokens_per_token=_prefill(evidence),
    )
    advice = _guide(k, evidence, settings, predictions)
    # A block on what the guide advises is a measurement that says otherwise.
    if advice is not None and not _blocked(state.blocks, advice.k or 0, evidence, settings):
        return advice
    if not predictions:
        settled = format_duration(settings.settle)
        return _Outlook(
            reason=f"what a step costs here is not known yet; that takes {settled} or more at one k"
        )
    allowed = [p for p in predictions if not _blocked(state.blocks, p.k, evidence, settings)]
    trial = k > 1 and state.costs.starts(1) < settings.trial_starts
    # Who waits for the server pays for a change by minutes, and the others by the queue.
    least = settings.override_gain if state.piles_up else settings.min_gain
    best, promise = _best(predictions, allowed, k, settings, least, trial=trial)
    by_k = {p.k: p for p in predictions}
    wanted = _wanted_now(state.wanted, evidence, predictions, acceptance[0], coverage, settings)
    if best == k:
        reason = f"k = {k} is best here: {_shown(by_k[k])}"
    elif promise <= least:
        reason = (
            f"k = {best} has hardly been measured here and could be faster than k = {k}: "
            f"{_shown(by_k[best])}, and {_shown(by_k[k])}"
        )
    else:
        reason = (
            f"k = {best} promises {100 * (by_k[best].speedup / by_k[k].speedup - 1):.1f} % more "
            f"speed than k = {k} at this load: {_shown(by_k[best])}, and {_shown(by_k[k])}"
        )
    return _Outlook(best, reason, predictions, promise, wanted)


def _shown(prediction: Prediction) -> str:
    guess = ", extrapolated" if prediction.extrapolated else ""
    return (
        f"{prediction.speedup:.2f}x at k = {prediction.k} (± {1.96 * prediction.stderr:.2f}{guess})"
    )


def _running(state: TunerState, k: int, settings: TunerSettings) -> tuple[int, float] | None:
    """K and start of the server, once its own step time has been measured for long enough."""
    start = state.server_start
    if start is None or state.costs.measured_seconds(k, start) < settings.settle:
        return None
    return k, start


def _coverage(evidence: Evidence, ratios: Sequence[float]) -> float:
    """Drafts per decode step, from the tokens that a step brings and those that a draft brings."""
    accepted = sum(ratios)
    if evidence.tokens_per_step is None or accepted <= 0:
        return 1.0
    return min(1.0, max(0.0, (evidence.tokens_per_step - 1.0) / accepted))


def _prefill(evidence: Evidence) -> float:
    """Prompt tokens computed for each token decoded."""
    c, tokens = evidence.decode_concurrency, evidence.tokens_per_step
    if not evidence.prefill_tokens_per_step or not c or not tokens:
        return 0.0
    return evidence.prefill_tokens_per_step / (max(1.0, c) * tokens)


def _tail(tails: Sequence[Tail], seen: Acceptance, settings: TunerSettings) -> tuple[float, ...]:
    near = min(tails, key=lambda tail: abs(tail.position_0 - seen.ratios[0]), default=None)
    if near is None or not _same_front(near.position_0, seen, settings):
        return ()
    return near.conditional


def _same_front(position_0: float, seen: Acceptance, settings: TunerSettings) -> bool:
    noise = settings.verify_z * seen.stderrs[0]
    return abs(position_0 - seen.ratios[0]) <= max(settings.same_acceptance_within, noise)


def _guide(
    k: int,
    evidence: Evidence,
    settings: TunerSettings,
    predictions: Sequence[Prediction],
) -> _Outlook | None:
    """The guide's advice, where it asks for a smaller k than there is."""

    def firing(rule: str) -> bool:
        return evidence.verdicts.get(rule) == FIRING

    if firing("drafter_broken"):
        to_k, why = settings.floor, "the drafter is broken; mend it, k is not the remedy"
    elif firing("drafter_misaligned") and _loses(evidence, settings):
        to_k, why = (
            settings.floor,
            "the drafter is misaligned, and speculation costs more than it brings",
        )
    elif firing("position_decay"):
        to_k, why = 1, "position 1 is rarely accepted while position 0 is healthy"
    else:
        return None
    if to_k >= k:
        return None
    speed = {p.k: p.speedup for p in predictions}
    promise = speed[to_k] / speed[k] - 1.0 if to_k in speed and k in speed else 0.0
    wish = "off" if to_k == 0 else f"k = {to_k}"
    return _Outlook(to_k, f"{wish} by the guide: {why}", tuple(predictions), promise, to_k)


def _loses(evidence: Evidence, settings: TunerSettings) -> bool:
    if evidence.verdicts.get("net_gain_negative") == FIRING:
        return True
    if evidence.gain is None or evidence.gain_stderr is None:
        return False
    return evidence.gain + settings.verify_z * evidence.gain_stderr < 0


def _blocked(blocks: Sequence[Block], k: int, evidence: Evidence, settings: TunerSettings) -> bool:
    return any(
        (k == block.k or (block.deeper_too and k > block.k)) and _holds(block, evidence, settings)
        for block in blocks
    )


def _holds(block: Block, evidence: Evidence, settings: TunerSettings) -> bool:
    seen, load = evidence.hour, _mean_load(evidence)
    front = block.position_0
    if front is not None and seen is not None and not _same_front(front, seen, settings):
        return False
    if block.decode_concurrency is None or load is None:
        return True
    if block.deeper_too:
        return load > block.decode_concurrency / ANOTHER_LOAD
    return load < block.decode_concurrency * ANOTHER_LOAD


def _mean_load(evidence: Evidence) -> float | None:
    """Requests in decode over the hour, by tokens."""
    tokens = sum(weight for _, weight in evidence.load)
    return sum(c * weight for c, weight in evidence.load) / tokens if tokens > 0 else None


def _best(
    predictions: Sequence[Prediction],
    allowed: Sequence[Prediction],
    k: int,
    settings: TunerSettings,
    least: float,
    *,
    trial: bool,
) -> tuple[int, float]:
    """The k with the largest promise, and the promise; k itself where none exceeds the least.

    In a trial k = 1 needs no more than to look better, where no other does: it is the safe one, and
    if its cost is overrated only measuring can tell.
    """
    here = next(p for p in predictions if p.k == k)
    best, most = k, 0.0
    for there in allowed:
        gain = there.speedup / here.speedup - 1.0
        stderr = math.hypot(there.speed_stderr, here.speed_stderr)
        promise = gain - settings.stderr_multiple * stderr
        if there.k == k:
            continue
        if promise > max(least, most) or (trial and there.k == 1 and gain > 0):
            best, most = there.k, promise
    return best, most


def _wanted_now(
    before: int | None,
    evidence: Evidence,
    predictions: Sequence[Prediction],
    ratios: Sequence[float],
    coverage: float,
    settings: TunerSettings,
) -> int | None:
    """The k that the last window alone asks for; the one before it unless another is better."""
    window = evidence.window
    if window is None or not window.ratios or window.drafts <= 0:
        return before
    recent, _ = extrapolate(window, len(ratios))
    speed = {
        p.k: p.speedup * (1 + coverage * sum(recent[: p.k])) / (1 + coverage * sum(ratios[: p.k]))
        for p in predictions
    }
    best = max(speed, key=lambda k: speed[k])
    if before in speed and speed[best] <= speed[before] * (1 + settings.min_gain):
        return before
    return best


def _retry(state: TunerState, now: float, settings: TunerSettings) -> _Outlook:
    """Speculation is off, so nothing can be said of it but by trying."""
    off = state.switched_off
    if off is None:
        return _Outlook(0, "speculation is off, and was not switched off here")
    if now - off < settings.retry_off_after:
        return _Outlook(0, "speculation was switched off here, and will be tried again")
    return _Outlook(1, "speculation has been off for long enough to try it again", promise=0.0)


def _decide(
    state: TunerState,
    evidence: Evidence,
    now: float,
    settings: TunerSettings,
    outlook: _Outlook,
) -> tuple[TunerState, Decision]:
    flapping = len(state.turns) >= settings.flapping_turns
    k = evidence.observed_k

    def decision(
        kind: Kind,
        reason: str,
        *,
        from_k: int | None = k,
        to_k: int | None = k,
        blocks: tuple[Block, ...] = (),
    ) -> Decision:
        return Decision(
            kind=kind,
            from_k=from_k,
            to_k=to_k,
            reason=reason,
            evidence=_plain(evidence),
            recommended_k=state.recommended if outlook.k is None else outlook.k,
            predictions=outlook.predictions,
            info=(K_FLAPPING,) if flapping else (),
            blocks=blocks,
        )

    if settings.mode == "off":
        return state, decision(Kind.HOLD, "the tuner is off")
    if settings.paused:
        return state, decision(Kind.PAUSE, "paused by the settings")
    if state.paused:
        return state, decision(Kind.PAUSE, state.paused)
    if state.change is not None:
        return _watch(state, state.change, evidence, now, settings, decision)
    if (why := _hindrance(state, evidence, now, settings, outlook, flapping=flapping)) is not None:
        return state, decision(Kind.HOLD, why)
    return state, decision(Kind.CHANGE, outlook.reason, to_k=outlook.k)


def _hindrance(
    state: TunerState,
    evidence: Evidence,
    now: float,
    settings: TunerSettings,
    outlook: _Outlook,
    *,
    flapping: bool,
) -> str | None:
    """Why k stays; None if nothing speaks against a change."""
    k, to_k = evidence.observed_k, outlook.k
    if evidence.stale or k is None:
        return "no fresh figures of this server"
    if evidence.inconclusive:
        return f"inconclusive: {evidence.inconclusive}"
    if to_k is None or to_k == k:
        return outlook.reason
    if state.since is None or now - state.since < settings.settle:
        return "the server has just started"
    if state.last_change is not None and now - state.last_change < settings.cooldown:
        left = settings.cooldown - (now - state.last_change)
        return f"{outlook.reason}; the cooldown ends in {math.ceil(left / 60)} min"
    # One change is left for k = 1, or for the way back from any other.
    needed = 1 if to_k <= 1 else 2
    if settings.changes_per_day - len(state.changes) >= needed:
        return None
    if outlook.promise > settings.override_gain and not flapping:
        return None
    return f"{outlook.reason}; the changes of this day are used up"


class _Decide(Protocol):
    def __call__(
        self,
        kind: Kind,
        reason: str,
        *,
        from_k: int | None = ...,
        to_k: int | None = ...,
        blocks: tuple[Block, ...] = ...,
    ) -> Decision: ...


def _watch(
    state: TunerState,
    change: Change,
    evidence: Evidence,
    now: float,
    settings: TunerSettings,
    decision: _Decide,
) -> tuple[TunerState, Decision]:
    """A change that is under way, or under watch."""
    k, to_k = evidence.observed_k, change.to_k
    done = replace(state, change=None)

    def back(
        why: str,
        *,
        deeper_too: bool = False,
        position_0: float | None = None,
        load: float | None = None,
    ) -> Decision:
        block = Block(to_k, now + settings.block_for, why, deeper_too, position_0, load)
        return decision(Kind.ROLLBACK, why, from_k=to_k, to_k=change.from_k, blocks=(block,))

    if now - (change.seen_at or change.at) > settings.ready_timeout:
        late = f"the server was not ready with k = {to_k} in time"
        if change.rollback:
            paused = f"{late}, on the way back from another k; look at the server"
            return replace(done, paused=paused), decision(Kind.PAUSE, paused)
        if k == change.from_k and not evidence.stale:
            block = Block(to_k, now + settings.block_for, late)
            why = f"the server still runs with k = {k}; the change to {to_k} did not take"
            return replace(done, blocks=(*state.blocks, block)), decision(Kind.HOLD, why)
        return state, back(late)
    if change.ready_at is None or k is None or evidence.stale:
        return state, decision(Kind.VERIFY, f"waiting for the server with k = {to_k}")
    if change.rollback:
        return done, decision(Kind.HOLD, f"back at k = {to_k}")
    if now - change.ready_at >= settings.verify_timeout:
        return done, decision(Kind.HOLD, f"k = {to_k} stays, but could not be compared")
    if early := _too_early(change, evidence, now, settings):
        return state, decision(Kind.VERIFY, early)
    after = _side(evidence)
    state = replace(state, piles_up=_piled_up(change.before, after))
    done = replace(state, change=None)
    comparison = compare(change.before, after, settings)
    if comparison.cost is None:
        why = f"k = {to_k} cannot be compared yet: {comparison.why}"
        return state, decision(Kind.VERIFY, why)
    told = f"a token costs {100 * comparison.cost:+.1f} %"
    told += f" (± {196 * comparison.stderr:.1f}) at k = {to_k}"
    if comparison.cost <= settings.verify_z * comparison.stderr:
        return done, decision(Kind.HOLD, f"verified: {told}")
    spent = len(state.changes) >= settings.changes_per_day
    if spent and comparison.cost <= settings.override_gain:
        return done, decision(Kind.HOLD, f"{told}; it stays, the changes of this day are used up")
    # What does not pay deeper pays still less deeper yet. And k = 1 is where it is safe to go, so a
    # bad comparison of it counts for the workload that it was made with.
    return state, back(
        f"worse beyond noise: {told}, compared with k = {change.from_k}",
        deeper_too=to_k > change.from_k,
        position_0=evidence.hour.ratios[0] if to_k == 1 and evidence.hour else None,
        load=_mean_load(evidence),
    )


def _too_early(
    change: Change, evidence: Evidence, now: float, settings: TunerSettings
) -> str | None:
    if change.ready_at is not None and now - change.ready_at < settings.settle:
        return f"k = {change.to_k} has just begun"
    if evidence.inconclusive:
        return f"inconclusive: {evidence.inconclusive}"
    drafts = evidence.hour.drafts if evidence.hour else 0.0
    if change.to_k > 0 and drafts < settings.min_drafts:
        return f"too few drafts at k = {change.to_k} yet ({drafts:.0f})"
    return None


class Comparison(NamedTuple):
    """What a token costs after a change, against before it."""

    cost: float | None
    """Relative: 0.1 is 10 % more; None where the two cannot be compared."""
    stderr: float
    why: str


def compare(before: Side, after: Side, settings: TunerSettings) -> Comparison:
    """Compare the two sides of a change.

    By the net gain, each side against the baseline at its own concurrency; without a baseline by
    TPOT itself. The load must be alike, and so must position 0.
    """
    if not _same_load(before, after, settings.throughput_within):
        return Comparison(None, 0.0, "the load is another one")
    if before.position_0 is not None and after.position_0 is not None:
        noise = settings.verify_z * math.hypot(before.position_0_stderr, after.position_0_stderr)
        moved = abs(after.position_0 - before.position_0)
        if moved > max(settings.same_acceptance_within, noise):
            return Comparison(None, 0.0, "acceptance is another one")
    if before.gain is not None and after.gain is not None and max(before.gain, after.gain) < 1:
        errors = (before.gain_stderr or 0.0, after.gain_stderr or 0.0)
        stderr = math.hypot(errors[0] / (1 - before.gain), errors[1] / (1 - after.gain))
        return Comparison((1 - after.gain) / (1 - before.gain) - 1, stderr, "")
    if before.tpot_seconds and after.tpot_seconds:
        # Its own noise is not known; what would not be worth a change is not worth a rollback.
        stderr = settings.min_gain / max(settings.verify_z, 1.0)
        return Comparison(after.tpot_seconds / before.tpot_seconds - 1, stderr, "")
    return Comparison(None, 0.0, "there are no times of one side")


def _same_load(before: Side, after: Side, within: float) -> bool:
    """Whether throughput or the requests in decode are alike; a dearer token moves one of them.

    Where one grew and the other shrank it is the server that changed: requests pile up at a k that
    is too slow for them, and another load moves both the same way.
    """
    if not (before.throughput and before.decode_concurrency):
        return False
    if not (after.throughput and after.decode_concurrency):
        return False
    throughput = after.throughput / before.throughput - 1
    concurrency = after.decode_concurrency / before.decode_concurrency - 1
    return min(abs(throughput), abs(concurrency)) <= within or throughput * concurrency < 0


def _piled_up(before: Side, after: Side) -> bool:
    """Whether the server met a queue when it came back: arrivals had not waited for answers."""
    if before.peak_concurrency is None or after.peak_concurrency is None:
        return False
    return after.peak_concurrency > ANOTHER_LOAD * before.peak_concurrency


def _side(evidence: Evidence) -> Side:
    off = evidence.observed_k == 0
    front = None if off or evidence.window is None else evidence.window
    known = front is not None and bool(front.ratios)
    return Side(
        gain=0.0 if off else evidence.gain,
        gain_stderr=0.0 if off else evidence.gain_stderr,
        tpot_seconds=evidence.tpot_seconds,
        throughput=evidence.decode_throughput,
        decode_concurrency=evidence.decode_concurrency,
        peak_concurrency=max((c for c, _ in evidence.load), default=None),
        position_0=front.ratios[0] if front is not None and known else None,
        position_0_stderr=front.stderrs[0] if front is not None and known else 0.0,
    )


def _plain(evidence: Evidence) -> dict[str, Any]:
    return {
        "observed_k": evidence.observed_k,
        "position_acceptance_ratio": None if evidence.hour is None else [*evidence.hour.ratios],
        "drafts": None if evidence.hour is None else evidence.hour.drafts,
        "decode_concurrency": evidence.decode_concurrency,
        "step_seconds": evidence.step_seconds,
        "tokens_per_step": evidence.tokens_per_step,
        "prefill_tokens_per_step": evidence.prefill_tokens_per_step,
        "decode_throughput": evidence.decode_throughput,
        "tpot_gain_ratio": evidence.gain,
        "tpot_gain_ratio_stderr": evidence.gain_stderr,
        "firing": sorted(rule for rule, state in evidence.verdicts.items() if state == FIRING),
    }
