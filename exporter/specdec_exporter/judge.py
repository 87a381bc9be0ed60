"""The rules, evaluated: figures to verdicts, with the states that Prometheus's alerts have.

A condition that holds makes a rule pending, and firing once it has held for its time. One that
does not hold, for lack of evidence too, ends a pending rule at once, and a firing one after the
time that it keeps firing for. This module reads no clock: time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specdec_exporter import rules
from specdec_exporter.expression import Symbol, evaluate
from specdec_exporter.model import Measurement, RuleState, Verdict
from specdec_exporter.rules import Rule

DAY_SECONDS = 86400.0
_BUCKET_SECONDS = 3600.0

Facts = Mapping[str, float | None]
"""What is observed, by the name of the rule table's symbol; what is not known is None."""


@dataclass(frozen=True, slots=True)
class Alert:
    """How far one rule has come. Times are unix seconds."""

    active_since: float | None = None
    """Since when the condition has held."""
    firing: bool = False
    missing_since: float | None = None
    """Since when the condition of a firing rule has not held."""
    value: float | None = None
    severity: str = ""


def step(alert: Alert, met: bool, t: float, rule: Rule) -> Alert:
    """The next state of an alert, after an evaluation at `t` in which its condition held or not."""
    if met:
        since = t if alert.active_since is None else alert.active_since
        firing = alert.firing or t - since >= rule.wait_seconds
        return replace(alert, active_since=since, firing=firing, missing_since=None)
    if not alert.firing:
        return Alert()
    missing = t if alert.missing_since is None else alert.missing_since
    if t - missing >= rule.keep_firing_seconds:
        return Alert()
    return replace(alert, missing_since=missing)


def facts(measurement: Measurement) -> dict[str, float | None]:
    """What the rule table's symbols are worth in one window of one model."""
    derived, counted = measurement.total, measurement.increase
    positions = counted.accepted_per_position
    known: dict[Symbol, float | None] = {
        rules.K: float(derived.num_speculative_tokens),
        rules.DRAFTS: counted.drafts,
        rules.PADDED_DRAFTS: derived.padded_drafts,
        rules.DRAFT_TOKENS: counted.draft_tokens,
        rules.ACCEPTED_TOKENS: counted.accepted_tokens,
        rules.ACCEPTED_0: positions[0] if positions else None,
        rules.ACCEPTED_1: positions[1] if len(positions) > 1 else None,
        rules.ACCEPTED_LAST: positions[-1] if positions else None,
        rules.ACCEPTED_POSITIONS: sum(positions) if positions else None,
        rules.ACCEPTED_SQUARES: (
            sum((2 * i + 1) * a for i, a in enumerate(positions)) if positions else None
        ),
        rules.DECODE_STEPS: counted.decode_steps,
        rules.DECODE_CONCURRENCY: derived.decode_concurrency,
    }
    if (gain := measurement.gain) is not None:
        known |= {
            rules.COVERED: float(gain.covered),
            rules.GAIN: gain.tpot_gain_ratio,
            rules.GAIN_STDERR: gain.tpot_gain_ratio_stderr,
        }
    return {symbol.name: value for symbol, value in known.items()}


def drift_facts(score: float | None, positions: Sequence[float]) -> dict[str, float | None]:
    """What the symbols of drift are worth.

    Args:
        score: of the detector.
        positions: acceptance ratios of the reference; its front acceptance is the mean of the first
            two, or the only one.
    """
    front = positions[:2]
    return {
        rules.DRIFT_SCORE.name: score,
        rules.REFERENCE_FRONT.name: sum(front) / len(front) if front else None,
    }


@dataclass(slots=True)
class _Model:
    """What is remembered of one model on the target."""

    alerts: dict[str, Alert] = field(default_factory=dict)
    greatest_concurrency: dict[int, float] = field(default_factory=dict)
    """At which there were drafts, by the hour."""

    def remember(self, observed: Facts, t: float) -> float | None:
        """Note the concurrency if there are drafts; returns the greatest of the last day."""
        drafting = evaluate(rules.DRAFTING_CONCURRENCY, observed)
        if drafting is not None:
            hour = int(t // _BUCKET_SECONDS)
            known = self.greatest_concurrency.get(hour, drafting)
            self.greatest_concurrency[hour] = max(known, drafting)
        oldest = (t - DAY_SECONDS) // _BUCKET_SECONDS
        for hour in [hour for hour in self.greatest_concurrency if hour < oldest]:
            del self.greatest_concurrency[hour]
        return max(self.greatest_concurrency.values(), default=None)


class Judge:
    """Judges one target, and remembers how far each rule has come.

    Args:
        table: the rules.
        patience: seconds after the start for which a rule that was pending before it is not reset
            for want of evidence, since the windows begin anew.
    """

    def __init__(self, table: Sequence[Rule], patience: float = 0.0) -> None:
        self.table = tuple(table)
        self._patience = patience
        self._started: float | None = None
        self._target = _Model()
        self._models: dict[str, _Model] = {}

    def reconfigure(self, table: Sequence[Rule]) -> None:
        """Judge by other rules from now on; those of the same name go on from where they are."""
        self.table = tuple(table)

    def judge(
        self,
        measured: Iterable[tuple[str, Facts]],
        t: float,
        *,
        target: Facts | None = None,
    ) -> tuple[Verdict, ...]:
        """Evaluate all rules.

        Args:
            measured: the facts of each model that there are figures of, by `facts` and with what is
                known from elsewhere.
            t: time of the evaluation, unix seconds.
            target: facts of the target itself.

        Returns:
            Verdicts in the order of the table, on the target first, then by model.
        """
        self._started = t if self._started is None else self._started
        by_model: dict[str, Facts] = dict(measured)
        verdicts = []
        if target is not None:
            verdicts += self._judge(self._target, None, target, t)
        for model_name in sorted({*by_model, *self._models}):
            memory = self._models.setdefault(model_name, _Model())
            observed = dict(by_model.get(model_name, {}))
            greatest = memory.remember(observed, t)
            observed[rules.GREATEST_DRAFTING_CONCURRENCY.name] = greatest
            verdicts += self._judge(memory, model_name, observed, t)
            if model_name not in by_model and not _active(memory):
                del self._models[model_name]
        return _inhibit(verdicts, self.table)

    def _judge(
        self, memory: _Model, model_name: str | None, observed: Facts, t: float
    ) -> list[Verdict]:
        """Verdicts on a model, or on the target itself."""
        return [
            self._verdict(rule, memory, model_name or "", observed, t)
            for rule in self.table
            if rule.on_target == (model_name is None)
        ]

    def _verdict(
        self, rule: Rule, memory: _Model, model_name: str, observed: Facts, t: float
    ) -> Verdict:
        applies = rule.applies is None or evaluate(rule.applies, observed) is not None
        conclusive = rule.conclusive is None or evaluate(rule.conclusive, observed) is not None
        met = evaluate(rule.condition, observed) is not None
        before = memory.alerts.get(rule.name, Alert())
        # Just started, there is no evidence yet; nor is there any that the trouble is over.
        young = self._started is not None and t - self._started < self._patience
        alert = before if young and not conclusive else step(before, met, t, rule)
        value = evaluate(rule.value, observed)
        if met:
            relaxed = rule.severity.relaxed_when
            less = relaxed is not None and evaluate(relaxed, observed) is not None
            severity = rule.severity.relaxed if less and rule.severity.relaxed else None
            alert = replace(alert, value=value, severity=severity or rule.severity.usual)
        memory.alerts[rule.name] = alert
        if alert.firing:
            state = RuleState.FIRING
        elif alert.active_since is not None:
            state = RuleState.PENDING
        elif not applies:
            state = RuleState.INAPPLICABLE
        else:
            state = RuleState.INACTIVE if conclusive else RuleState.INCONCLUSIVE
        kept = alert.firing and not met
        return Verdict(
            rule=rule.name,
            model_name=model_name,
            state=state,
            since=alert.active_since,
            severity=alert.severity or rule.severity.usual,
            value=alert.value if kept else value,
            threshold=evaluate(rule.threshold, observed),
            stderr=None if rule.stderr is None else evaluate(rule.stderr, observed),
            drafts=observed.get(rules.DRAFTS.name),
            summary=rule.summary,
            advice=rule.advice,
            inhibited_by=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """What must outlive the process, as plain JSON values."""
        return {
            "target": _saved(self._target),
            "models": {name: _saved(memory) for name, memory in self._models.items()},
        }

    def restore(self, saved: Mapping[str, Any], pause: float = 0.0) -> None:
        """Go on from what `to_dict` gave; rules that are no longer in the table are forgotten.

        Args:
            saved: by an earlier process.
            pause: seconds in which nobody judged; a pending rule does not grow older in them.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is of another form; nothing was
                changed.
        """
        known = {rule.name for rule in self.table}
        target = _restored(saved["target"], known, pause)
        models = {name: _restored(memory, known, pause) for name, memory in saved["models"].items()}
        self._target, self._models = target, models


def _saved(memory: _Model) -> dict[str, Any]:
    return {
        "alerts": {
            name: asdict(alert) for name, alert in memory.alerts.items() if alert != Alert()
        },
        "greatest_concurrency": [*memory.greatest_concurrency.items()],
    }


def _restored(saved: Mapping[str, Any], known: Collection[str], pause: float) -> _Model:
    return _Model(
        alerts={
            name: _later(Alert(**alert), pause)
            for name, alert in saved["alerts"].items()
            if name in known
        },
        greatest_concurrency={int(h): float(c) for h, c in saved["greatest_concurrency"]},
    )


def _later(alert: Alert, pause: float) -> Alert:
    if alert.firing or alert.active_since is None:
        return alert
    return replace(alert, active_since=alert.active_since + pause)


def _active(memory: _Model) -> bool:
    return any(alert.active_since is not None for alert in memory.alerts.values())


def _inhibit(verdicts: Sequence[Verdict], table: Sequence[Rule]) -> tuple[Verdict, ...]:
    """Name, for each verdict that is not inactive, the strongest firing rule that outranks it."""
    stronger = {rule.name: rule.inhibited_by for rule in table}
    firing = {(v.model_name, v.rule) for v in verdicts if v.state is RuleState.FIRING}

    def inhibitor(verdict: Verdict) -> str | None:
        scopes = (verdict.model_name, "")
        return next(
            (
                name
                for name in stronger[verdict.rule]
                if any((scope, name) in firing for scope in scopes)
            ),
            None,
        )

    return tuple(
        replace(v, inhibited_by=inhibitor(v))
        if v.state in (RuleState.PENDING, RuleState.FIRING)
        else v
        for v in verdicts
    )
