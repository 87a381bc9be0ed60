"""The page for people: one card per target, worst first, rendered once per pulse.

It is given what was seen and gives HTML. The page, its later updates and what stands there without
a script are the same markup, made here and nowhere else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from specdec_exporter.duration import format_duration, rough_duration
from specdec_exporter.figures import (
    GUIDE_POSITIONS,
    Figure,
    figures,
    limits,
    percent,
    plus_minus,
)
from specdec_exporter.history import Seen, Watched
from specdec_exporter.model import (
    SEVERITIES,
    DriftStatus,
    Measurement,
    RuleState,
    TargetStatus,
    TunerStatus,
    Verdict,
)
from specdec_exporter.trends import Trends, trends
from specdec_exporter.words import Headline, headline

FEW = 20
"""So many cards are shown whole; of more, those in trouble are."""
MOST_OPEN = 2
"""Cards that are shown whole where there are many."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Acceptance of one position, and what it is compared with."""

    position: int
    value: float
    plus_minus: str
    reference: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Shown:
    """One model of a target, ready to be shown."""

    measurement: Measurement
    says: Headline
    figures: tuple[Figure, ...]

    @property
    def nothing(self) -> str:
        """Why there is none of the four numbers; empty where there is one, or more than one why."""
        whys = {one.absent for one in self.figures}
        return whys.pop() if len(whys) == 1 else ""


@dataclass(frozen=True)
class Card:
    """One target, ready to be shown."""

    id: str
    watched: Watched
    says: Headline
    models: tuple[Shown, ...]
    """As the settings' first window has them."""
    find: str
    """What the filter looks in."""

    @property
    def status(self) -> TargetStatus:
        """Of the target."""
        return self.watched.status

    @property
    def loud(self) -> tuple[Verdict, ...]:
        """What fires or is about to, the worst first."""
        loud = [v for v in self.status.verdicts if v.state in (RuleState.FIRING, RuleState.PENDING)]
        return tuple(
            sorted(
                loud,
                key=lambda v: (
                    v.state is not RuleState.FIRING,
                    v.inhibited_by is not None,
                    SEVERITIES.index(v.severity),
                ),
            )
        )

    @property
    def rank(self) -> tuple[int, bool, str]:
        """Sorts cards, the worst first and then by name."""
        critical = any(v.state is RuleState.FIRING and v.severity == "critical" for v in self.loud)
        return -self.says.trouble, not critical, self.status.name.casefold()


def card(watched: Watched) -> Card:
    """What is to be shown of a target."""
    status = watched.status
    shown: dict[str, Shown] = {}
    for measurement in status.measurements:
        model_name = measurement.total.model_name
        if model_name not in shown:
            limit = limits(status.verdicts, model_name)
            shown[model_name] = Shown(
                measurement, headline(status, measurement), figures(measurement, limit)
            )
    models = tuple(sorted(shown.values(), key=lambda one: -one.says.trouble))
    says = models[0].says if models else headline(status, None)
    words = [status.name, status.url, says.text, *shown]
    words += [f"{name}={value}" for name, value in status.labels]
    words += [v.rule for v in status.verdicts if v.state is RuleState.FIRING]
    return Card(
        id=f"t{_digest(status.name)}",
        watched=watched,
        says=says,
        models=models,
        find=" ".join(words).casefold(),
    )


def bars(measurement: Measurement, drift: Sequence[DriftStatus]) -> tuple[Bar, ...]:
    """The positions of a model beside its own reference, or the guide's where it has none."""
    derived = measurement.total
    own: tuple[float, ...] = next(
        (
            d.reference_position_acceptance_ratio
            for d in drift
            if d.model_name == derived.model_name
            and d.num_speculative_tokens == derived.num_speculative_tokens
        ),
        (),
    )
    compared = own or GUIDE_POSITIONS
    return tuple(
        Bar(
            position=i,
            value=p,
            plus_minus=plus_minus(stderr),
            reference=compared[i] if i < len(compared) else None,
            source="its reference" if own else "guide",
        )
        for i, (p, stderr) in enumerate(
            zip(
                derived.position_acceptance_ratio,
                derived.position_acceptance_ratio_stderr,
                strict=True,
            )
        )
        if p is not None
    )


class Templates:
    """The templates, and what they may call."""

    def __init__(self) -> None:
        self.env = Environment(
            loader=PackageLoader("specdec_exporter"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.env.filters |= {
            "duration": format_duration,
            "rough": rough_duration,
            "moment": _moment,
            "number": _number,
            "percent": percent,
        }
        self.env.globals["bars"] = bars

    def render(self, name: str, **values: Any) -> Markup:
        """A template filled in."""
        return Markup(self.env.get_template(name).render(**values))


class Board:
    """All cards as of one pulse; each part is rendered when it is first asked for.

    Args:
        seen: the targets.
        audit: entries of the audit log, newest first.
        notice: something wrong with the exporter itself, or nothing.
        version: of the exporter.
        templates: that everything is rendered by.
        runbooks: address of each rule's page.
        every: seconds from one pulse to the next.
    """

    def __init__(
        self,
        seen: Seen,
        *,
        audit: Sequence[Mapping[str, Any]],
        notice: str,
        version: str,
        templates: Templates,
        runbooks: Mapping[str, str],
        every: float,
    ) -> None:
        self._seen = seen
        self._templates = templates
        self._runbooks = runbooks
        self._version = version
        self._every = every
        self._rows: dict[str, Markup] = {}
        self._bodies: dict[str, Markup] = {}
        self.notice = notice
        self.cards = tuple(sorted(map(card, seen.targets), key=lambda one: one.rank))
        self.audit = templates.render("audit.html", audit=audit)

    @property
    def summary(self) -> str:
        """How many targets somebody should look at, in one sentence."""
        count, bad = len(self.cards), sum(one.says.tone == "bad" for one in self.cards)
        if not count:
            return "No targets"
        of = "1 target" if count == 1 else f"{count} targets"
        if not bad:
            return f"None of {of} needs attention" if count > 1 else "The target needs no attention"
        return f"{bad} of {of} need{'s' if bad == 1 else ''} attention"

    def row(self, one: Card) -> Markup:
        """The line of a card that is always there."""
        if one.id not in self._rows:
            self._rows[one.id] = self._templates.render("row.html", card=one)
        return self._rows[one.id]

    def body(self, one: Card) -> Markup:
        """The rest of a card."""
        if one.id not in self._bodies:
            self._bodies[one.id] = self._templates.render(
                "body.html",
                card=one,
                now=self._seen.t,
                runbooks=self._runbooks,
                trends=self._trends(one),
                tuner=self._tuner(one),
            )
        return self._bodies[one.id]

    def _trends(self, one: Card) -> dict[str, Trends | None]:
        """Of every model that there is something of, also when it has gone silent."""
        return {
            model_name: trends(moments, self._seen.t, limits(one.status.verdicts, model_name))
            for model_name, moments in one.watched.history.items()
        }

    def _tuner(self, one: Card) -> dict[str, TunerStatus]:
        return {tuner.model_name: tuner for tuner in one.status.tuner}

    @cached_property
    def state(self) -> dict[str, Any]:
        """What a page needs to know to bring itself up to date, as plain JSON values."""
        return {
            "at": _moment(self._seen.t),
            "every": self._every,
            "summary": self.summary,
            "notice": self.notice,
            "audit": _digest(self.audit),
            "cards": [[one.id, _digest(self.row(one))] for one in self.cards],
        }

    def fragment(self, rows: Collection[str], whole: Collection[str], audit: bool) -> str:
        """The cards of these ids, without or with their bodies, and the audit log."""
        chosen = [(one, one.id in whole) for one in self.cards if one.id in {*rows, *whole}]
        return self._templates.render(
            "cards.html", board=self, chosen=chosen, audit=self.audit if audit else ""
        )

    def page(self, find: str = "", trouble: bool = False, target: str | None = None) -> str:
        """The whole page.

        Args:
            find: only cards with this in their name, model, labels or verdict.
            trouble: only those in trouble.
            target: only the one of this name, shown whole.
        """
        wanted = find.strip().casefold()
        chosen = [
            one
            for one in self.cards
            if wanted in one.find
            and (not trouble or one.says.tone == "bad")
            and (target is None or one.status.name == target)
        ]
        few = len(chosen) <= FEW
        return self._templates.render(
            "page.html",
            board=self,
            chosen=[
                (one, few or (one.says.tone == "bad" and i < MOST_OPEN))
                for i, one in enumerate(chosen)
            ],
            state=self.state,
            version=self._version,
            find=find,
            trouble=trouble,
            target=target,
            every=max(2, round(self._every)),
        )

    def digest(self, one: Card) -> str:
        """Changes when the line of a card does."""
        return _digest(self.row(one))


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


def _moment(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not known"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
