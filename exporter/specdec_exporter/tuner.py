"""Watches k on one target: decides at every evaluation, and carries out what may be carried out.

Deciding is `decide`'s and acting is `act`'s; here they are put together, with a memory and an audit
log that outlive the process. In the mode `recommend` everything is decided and nothing is changed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from specdec_exporter.act.actuator import lock_path, new_actuator
from specdec_exporter.act.change import Change, Phase, Progress
from specdec_exporter.act.errors import ActError
from specdec_exporter.act.lock import ControllerLock
from specdec_exporter.act.perform import Performer, Verdict
from specdec_exporter.act.ready import Server
from specdec_exporter.config import Target
from specdec_exporter.cost import BaselineCurve, last_position_gain
from specdec_exporter.decide import (
    K_FLAPPING,
    Block,
    Decision,
    Evidence,
    Kind,
    TunerState,
    begin,
    decide,
    resume,
)
from specdec_exporter.model import PredictedSpeedup, RuleState, TargetStatus, TunerStatus
from specdec_exporter.model import Verdict as ModelVerdict
from specdec_exporter.store import Store, StoreError
from specdec_exporter.swept import Swept
from specdec_exporter.tuner_settings import TunerSettings

KEEP_VERDICTS_SECONDS = 4 * 3600.0
"""An alert from outside that is not repeated for so long is forgotten; Alertmanager repeats."""

log = structlog.get_logger()


class Refusal(Exception):
    """A request that cannot be met; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class _External:
    """A rule that fires elsewhere, by an alert that was sent here."""

    firing: bool
    at: float


class Tuner:
    """Decides about k on one target, and changes it where it may.

    Args:
        target: with its actuator, if it has one.
        settings: in force.
        store: of the state, the journal and the audit log.
        clock: gives unix seconds.
    """

    def __init__(
        self,
        target: Target,
        settings: TunerSettings,
        store: Store,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._target = target
        self._settings = settings
        self._store = store
        self._states: dict[str, TunerState] = {}
        self._decisions: dict[str, Decision] = {}
        self._evidence: dict[str, Evidence] = {}
        self._external: dict[tuple[str, str], _External] = {}
        """By model, empty for every one, and rule."""
        self._decided: Counter[tuple[str, str]] = Counter()
        """By model and kind of decision."""
        self._counts: Counter[tuple[str, str]] = Counter()
        """By model and what was done."""
        self._told: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._verdict: asyncio.Future[Verdict] | None = None
        self._progress: Progress | None = None
        self._lock: ControllerLock | None = None
        self._locked_out = ""
        self._paused = ""
        self._last_change: Change | None = None
        self._restore()

    # Settings and state

    def reconfigure(self, target: Target, settings: TunerSettings) -> None:
        """Go on under new settings; a change that is under way ends under the old ones."""
        if target.actuator != self._target.actuator and self._task is None:
            self._release()
        self._target, self._settings = target, settings

    def _restore(self) -> None:
        try:
            saved = dict(self._store.get("tuner", self._target.name) or {})
        except (StoreError, TypeError, ValueError) as error:
            log.warning("tuner begins anew", target=self._target.name, problem=repr(error))
            return
        for model, plain in saved.items():
            try:
                self._states[model] = TunerState.from_dict(plain)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("tuner begins anew", target=self._target.name, problem=repr(error))
                # Of a state in the form of another release a person's pause holds all the same.
                paused = plain.get("paused") if isinstance(plain, Mapping) else None
                if isinstance(paused, str):
                    self._states[model] = TunerState(paused=paused)

    def saved(self) -> dict[str, Any]:
        """The state by model, as plain JSON values."""
        return {model: state.to_dict() for model, state in self._states.items()}

    def teach(self, learned: Swept) -> None:
        """Take in what a sweep has measured, once."""
        state = self._states.get(learned.model_name, TunerState(paused=self._paused))
        self._states[learned.model_name] = replace(state, costs=learned.teach(state.costs))

    async def resume_change(self) -> None:
        """Finish or undo a change that an earlier process was in the middle of."""
        saved = self._store.get("changes", self._target.name)
        if saved is None or self._target.actuator is None:
            return
        try:
            if Progress.from_dict(saved).ended:
                return
            performer = self._performer(Progress.from_dict(saved).change.model_name)
        except (KeyError, TypeError, ValueError) as error:
            log.error("journal cannot be read", target=self._target.name, problem=repr(error))
            return
        except ActError as error:
            log.error("change left as it is", target=self._target.name, problem=str(error))
            return
        self._audit("resumed", saved["change"], outcome=str(saved["phase"]))
        self._run(performer.resume(saved), Progress.from_dict(saved).change)

    async def stop(self) -> None:
        """Stop where it is; the journal has what the next process needs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._release()

    # One evaluation

    def evaluate(
        self, evidence: Mapping[str, Evidence], now: float, baselines: Mapping[str, BaselineCurve]
    ) -> None:
        """Decide about each model, and begin what may be begun.

        Args:
            evidence: by model.
            now: unix seconds.
            baselines: TPOT without speculation, by model where it is known.
        """
        if evidence:
            # A server that was started with another model no longer has the one before it.
            for model in self._evidence.keys() - evidence.keys():
                del self._decisions[model], self._evidence[model]
        for model, seen in evidence.items():
            seen = replace(seen, verdicts={**seen.verdicts, **self._fresh_external(model, now)})
            before = self._states.get(model, TunerState(paused=self._paused))
            state, decision = decide(before, seen, now, self._settings, baselines.get(model))
            self._states[model] = state
            self._decisions[model], self._evidence[model] = decision, seen
            self._tell(model, decision, now)
            self._settle(before, state, decision)
            if decision.kind in (Kind.CHANGE, Kind.ROLLBACK):
                self._act(model, decision, seen, now)

    def _fresh_external(self, model: str, now: float) -> dict[str, str]:
        return {
            rule: "firing"
            for (of, rule), one in self._external.items()
            if of in ("", model) and one.firing and now - one.at < KEEP_VERDICTS_SECONDS
        }

    def _tell(self, model: str, decision: Decision, now: float) -> None:
        """Write down what is new: another kind of decision, or a pause."""
        told = f"{decision.kind} {decision.from_k} {decision.to_k}"
        if self._told.get(model) == told:
            return
        first, self._told[model] = model not in self._told, told
        self._decided[model, str(decision.kind)] += 1
        quiet = first and decision.kind is Kind.HOLD
        if decision.kind is not Kind.VERIFY and not quiet:
            self._audit(str(decision.kind), None, model=model, decision=decision, t=now)

    def _settle(self, before: TunerState, state: TunerState, decision: Decision) -> None:
        """Tell the change under way what became of it."""
        if self._verdict is None or self._verdict.done() or before.change is None:
            return
        if decision.kind is Kind.ROLLBACK:
            self._verdict.set_result(Verdict(kept=False, reason=decision.reason))
        elif state.change is None:
            self._verdict.set_result(Verdict(kept=True, reason=decision.reason))

    def _act(self, model: str, decision: Decision, evidence: Evidence, now: float) -> None:
        if self._settings.mode != "apply" or self._target.actuator is None:
            return
        if decision.kind is Kind.ROLLBACK:
            # The change under way was told, and takes itself back.
            if self._task is not None:
                self._states[model] = begin(self._states[model], decision, evidence, now)
                self._counts[model, "rollbacks"] += 1
            return
        if self._task is None:
            self._begin(model, decision, evidence, now)

    def _begin(self, model: str, decision: Decision, evidence: Evidence, now: float) -> None:
        assert decision.from_k is not None
        assert decision.to_k is not None
        change = Change(
            key=str(uuid.uuid4()),
            target=self._target.name,
            model_name=model,
            from_k=decision.from_k,
            to_k=decision.to_k,
            reason=decision.reason,
            time=now,
        )
        try:
            performer = self._performer(model)
        except ActError as error:
            if self._locked_out != str(error):
                log.error("cannot act", target=self._target.name, problem=str(error))
            self._locked_out = str(error)
            return
        self._locked_out = ""
        self._states[model] = begin(self._states[model], decision, evidence, now)
        self._audit("begun", None, model=model, decision=decision, t=now)
        self._run(performer.apply(change), change)

    def _performer(self, model: str) -> Performer:
        """What changes are made with, the lock held.

        Raises:
            ActError: another process holds the lock, or there is no actuator.
        """
        actuator = self._target.actuator
        if actuator is None:
            raise ActError(f"target {self._target.name} has no actuator")
        if self._lock is None:
            folder = self._store.path.parent if self._store.path else Path("/tmp")
            lock = ControllerLock(lock_path(actuator, folder))
            lock.acquire()
            self._lock = lock
        return Performer(
            settings=actuator,
            actuator=new_actuator(actuator),
            server=Server(
                metrics_url=self._target.url,
                model_name=model,
                metric_prefix=self._target.metric_prefix,
                ready_url=actuator.ready_url,
            ),
            verify=self._verify,
            verify_seconds=self._settings.verify_timeout + self._settings.ready_timeout,
            record=self._record,
        )

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _run(self, work: Coroutine[Any, Any, Progress], change: Change) -> None:
        self._last_change = change
        self._verdict = asyncio.get_running_loop().create_future()
        self._counts[change.model_name, "actuations"] += 1
        self._task = asyncio.create_task(self._carry_out(work, change))

    async def _carry_out(self, work: Coroutine[Any, Any, Progress], change: Change) -> None:
        try:
            self._finish(await work, change)
        except StoreError as error:
            log.error("change stopped", target=change.target, problem=str(error))
            self._pause(change.model_name, f"the state cannot be written: {error}")
        finally:
            self._task = self._verdict = None

    def _finish(self, progress: Progress, change: Change) -> None:
        model = change.model_name
        state = self._states.get(model, TunerState())
        log.info(
            "change of k ended",
            target=change.target,
            from_k=change.from_k,
            to_k=change.to_k,
            outcome=str(progress.phase),
            problem=progress.problem,
        )
        self._audit("ended", progress.to_dict()["change"], outcome=str(progress.phase),
                    problem=progress.problem, output=progress.output)  # fmt: skip
        if progress.phase is Phase.VERIFIED:
            return
        self._counts[model, "failures"] += progress.phase is Phase.FAILED
        if progress.phase is Phase.FAILED and progress.undoing:
            self._states[model] = replace(state, change=None)
            self._pause(model, f"{progress.problem}; look at the server, then resume")
            return
        if state.change is not None and not state.change.rollback:
            # It never came into force, so there is nothing to take back.
            block = Block(
                change.to_k, change.time + self._settings.block_for, progress.problem or "failed"
            )
            self._states[model] = replace(
                state, change=None, expected_k=change.from_k, blocks=(*state.blocks, block)
            )
            self._counts[model, "rollbacks"] += progress.phase is Phase.ROLLED_BACK

    async def _verify(self, _: Change) -> Verdict:
        assert self._verdict is not None
        return await self._verdict

    def _record(self, progress: dict[str, Any]) -> None:
        self._progress = Progress.from_dict(progress)
        self._store.put("changes", {self._target.name: progress})
        self._store.put("tuner", {self._target.name: self.saved()})

    # What people and other programs ask for

    def pause(self, who: str) -> None:
        """Hold everything at once, what is not known yet too, until somebody resumes."""
        self._paused = f"paused by {who}"
        for model in self._known_models():
            self._pause(model, f"paused by {who}")
        self._audit("paused", None, outcome=who)

    def _pause(self, model: str, why: str) -> None:
        self._states[model] = replace(self._states.get(model, TunerState()), paused=why)

    def resume(self, who: str) -> None:
        """Go on deciding."""
        self._paused = ""
        for model in self._known_models():
            state = self._states.get(model, TunerState())
            self._states[model] = replace(
                resume(state), change=state.change if self._task else None
            )
        self._audit("resumed", None, outcome=who)

    def apply(self, k: int | None, who: str, now: float) -> str:
        """Change k now: to what is recommended, or to a k that somebody wants to try.

        It is verified as any change is, and taken back if it makes things worse.

        Raises:
            Refusal: nothing may be changed here, or not now.
        """
        model, evidence = self._only_model()
        self._may_act(model)
        decision = self._decisions[model]
        to_k = decision.recommended_k if k is None else k
        if to_k is None:
            raise Refusal("there is no recommendation yet; name a k")
        if not 0 <= to_k <= self._settings.max_k:
            raise Refusal(f"k = {to_k} is not within 0 and max_k = {self._settings.max_k}")
        if evidence.observed_k is None or to_k == evidence.observed_k:
            raise Refusal(f"the server runs with k = {evidence.observed_k}")
        wish = replace(
            decision,
            kind=Kind.CHANGE,
            from_k=evidence.observed_k,
            to_k=to_k,
            reason=f"asked for by {who}",
            blocks=(),
        )
        self._begin(model, wish, evidence, now)
        if self._locked_out:
            raise Refusal(self._locked_out)
        return f"k {evidence.observed_k} to {to_k} has begun"

    def roll_back(self, who: str, now: float) -> str:
        """Take the last change back, or the one under way.

        Raises:
            Refusal: there is none.
        """
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(Verdict(kept=False, reason=f"taken back by {who}"))
            return "the change under way is taken back"
        if self._last_change is None:
            raise Refusal("no change was made since the exporter started")
        return self.apply(self._last_change.from_k, who, now)

    def _may_act(self, model: str) -> None:
        if self._settings.mode != "apply":
            raise Refusal(f"the tuner's mode is {self._settings.mode}; set tuner.mode to apply")
        if self._target.actuator is None:
            raise Refusal(f"target {self._target.name} has no actuator")
        if self._settings.paused or self._states.get(model, TunerState()).paused:
            raise Refusal("the tuner is paused; resume it first")
        if self._task is not None:
            raise Refusal("a change is under way")

    def _only_model(self) -> tuple[str, Evidence]:
        if len(self._evidence) != 1:
            raise Refusal(f"target {self._target.name} has {len(self._evidence)} models, not one")
        return next(iter(self._evidence.items()))

    def _known_models(self) -> list[str]:
        return sorted({*self._states, *self._evidence})

    def hear(self, rule: str, model_name: str, *, firing: bool, now: float) -> None:
        """Take in a rule's state from outside; the guard rails hold for it as for our own.

        Args:
            rule: its name.
            model_name: of whom it speaks; empty is every model.
            firing: or resolved.
            now: unix seconds.
        """
        self._external[model_name, rule] = _External(firing, now)
        self._audit("alert", None, outcome=f"{rule} {'firing' if firing else 'resolved'}", t=now)

    # What is shown

    def shown_in(self, status: TargetStatus) -> TargetStatus:
        """The target's status with what was decided about it."""
        verdicts = (*status.verdicts, *self.verdicts())
        return replace(status, tuner=self.statuses(), verdicts=verdicts)

    def statuses(self) -> tuple[TunerStatus, ...]:
        """Of every model that something was decided about."""
        return tuple(self._status(model, d) for model, d in sorted(self._decisions.items()))

    def verdicts(self) -> tuple[ModelVerdict, ...]:
        """Of a workload that flaps; there is none of one that does not."""
        return tuple(
            ModelVerdict(
                rule=K_FLAPPING,
                model_name=model,
                state=RuleState.FIRING,
                since=self._states[model].turns[0] if self._states[model].turns else None,
                severity="info",
                value=float(len(self._states[model].turns)),
                threshold=float(self._settings.flapping_turns),
                stderr=None,
                drafts=None,
                summary="The workload asks for another k again and again.",
                advice="Give the kinds of traffic servers of their own, or settle for the k that "
                "serves most of it.",
                inhibited_by=None,
            )
            for model, decision in sorted(self._decisions.items())
            if K_FLAPPING in decision.info
        )

    def _status(self, model: str, decision: Decision) -> TunerStatus:
        state = self._states.get(model, TunerState())
        running = self._task is not None and self._progress is not None
        last = last_position_gain(decision.predictions, decision.from_k or 0)
        return TunerStatus(
            model_name=model,
            mode=self._settings.mode,
            can_act=self._target.actuator is not None,
            paused="paused by the settings" if self._settings.paused else state.paused,
            decision=str(decision.kind),
            reason=decision.reason,
            observed_k=decision.from_k,
            recommended_k=decision.recommended_k,
            predictions=tuple(
                PredictedSpeedup(p.k, p.speedup, p.stderr, p.extrapolated)
                for p in decision.predictions
            ),
            last_position_gain_ratio=None if last is None else last[0],
            last_position_gain_ratio_stderr=None if last is None else last[1],
            info=decision.info,
            phase=str(self._progress.phase) if running and self._progress else None,
            problem=self._locked_out,
            last_change=state.last_change,
            decisions=tuple(
                (kind, n) for (of, kind), n in sorted(self._decided.items()) if of == model
            ),
            actuations=self._counts[model, "actuations"],
            actuation_failures=self._counts[model, "failures"],
            rollbacks=self._counts[model, "rollbacks"],
        )

    def _audit(
        self,
        what: str,
        change: Mapping[str, Any] | None,
        *,
        model: str = "",
        decision: Decision | None = None,
        t: float | None = None,
        **more: str,
    ) -> None:
        entry: dict[str, Any] = {"target": self._target.name, "what": what, **more}
        if decision is not None:
            entry |= {
                "model_name": model,
                "from_k": decision.from_k,
                "to_k": decision.to_k,
                "reason": decision.reason,
                "evidence": dict(decision.evidence),
            }
        if change is not None:
            entry |= {key: change[key] for key in ("model_name", "from_k", "to_k", "reason")}
        try:
            self._store.log("audit", self._clock() if t is None else t, entry)
        except StoreError as error:
            log.error("audit log not written", problem=str(error), **entry)
