"""One change of k as a state machine: what is done, what was begun, and what comes next.

    planned → written → restarted → ready → verified
                 any step fails, or k does not prove itself:
    planned → written → restarted → ready → rolled-back        (undoing, with the old k)
                 that fails too, or nothing could be begun:
    failed

A value is recorded before each step, with the step in `begun`, and after it. Whatever a process
was doing when it ended, its last record says which steps are surely done, which one may be, and so
what the next process has to do. It knows no clock, no file and no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

MOST_RESUMPTIONS = 3
"""A change that outlives so many processes is undone: perhaps it is what ends them."""


class Step(StrEnum):
    """What is done on the way, in this order."""

    WRITE = "write"
    RESTART = "restart"
    READY = "ready"
    VERIFY = "verify"


class Phase(StrEnum):
    """How far a change is; the last three are ends."""

    PLANNED = "planned"
    WRITTEN = "written"
    RESTARTED = "restarted"
    READY = "ready"
    VERIFIED = "verified"
    ROLLED_BACK = "rolled-back"
    FAILED = "failed"


_NEXT = {
    Phase.PLANNED: Step.WRITE,
    Phase.WRITTEN: Step.RESTART,
    Phase.RESTARTED: Step.READY,
    Phase.READY: Step.VERIFY,
}
_REACHED = {
    Step.WRITE: Phase.WRITTEN,
    Step.RESTART: Phase.RESTARTED,
    Step.READY: Phase.READY,
    Step.VERIFY: Phase.VERIFIED,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A k to be set in the place of another."""

    key: str
    """Names this change and no other; whoever is asked twice under one key acts once."""
    target: str
    model_name: str
    from_k: int
    to_k: int
    reason: str
    time: float
    """When it was decided, unix seconds."""

    def __post_init__(self) -> None:
        if min(self.from_k, self.to_k) < 0 or self.from_k == self.to_k:
            raise ValueError(f"no change: k = {self.from_k} to {self.to_k}")

    def reversed(self, reason: str) -> Change:
        """The way back, under a key of its own."""
        return replace(
            self, key=f"{self.key}-undo", from_k=self.to_k, to_k=self.from_k, reason=reason
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a change is."""

    change: Change
    phase: Phase = Phase.PLANNED
    begun: Step | None = None
    """The step that was begun and is not known to be done."""
    undoing: bool = False
    """On the way back to the old k; `phase` then counts that way's steps."""
    disturbed: bool = False
    """Whether the server may have been restarted since."""
    resumptions: int = 0
    """Processes that ended on the way."""
    problem: str = ""
    """Why it was undone, and why that failed."""
    output: str = ""
    """The end of what the failing command printed."""

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase in (Phase.VERIFIED, Phase.ROLLED_BACK, Phase.FAILED)

    @property
    def next_step(self) -> Step | None:
        """What has to be done now; None at the end."""
        return _NEXT.get(self.phase)

    @property
    def wanted_k(self) -> int:
        """The k that is being brought into force."""
        return self.change.from_k if self.undoing else self.change.to_k

    @property
    def k_in_force(self) -> int | None:
        """The k that file and server have at a good end; None before it and after a failure.

        A failure that is not `undoing` has changed nothing; after any other somebody has to look.
        """
        ends = {Phase.VERIFIED: self.change.to_k, Phase.ROLLED_BACK: self.change.from_k}
        return ends.get(self.phase)

    def begin(self, *, applies_itself: bool) -> Progress:
        """The next step is about to be done.

        Args:
            applies_itself: a written k is taken up without a restart by us.
        """
        step = self.next_step
        disturbs = step is Step.RESTART or (step is Step.WRITE and applies_itself)
        return replace(self, begun=step, disturbed=self.disturbed or disturbs)

    def done(self) -> Progress:
        """The step that was begun is done."""
        assert self.begun is not None
        back = self.undoing and self.begun is Step.READY
        return replace(self, begun=None, phase=Phase.ROLLED_BACK if back else _REACHED[self.begun])

    def spared(self) -> Progress:
        """The next step is the restart, and is not needed."""
        return replace(self, phase=Phase.RESTARTED)

    def failed(self, problem: str, *, output: str = "", untouched: bool = False) -> Progress:
        """The step that was begun did not succeed.

        Args:
            problem: why, in one line.
            output: the end of what a command printed.
            untouched: the step surely changed nothing.
        """
        # An earlier process may have done what this one could not begin.
        untouched = untouched and not self.resumptions
        if self.undoing:
            why = f"{self.problem}; and the way back failed: {problem}"
            return replace(self, phase=Phase.FAILED, begun=None, problem=why, output=output)
        if untouched and self.begun is Step.WRITE:
            return replace(self, phase=Phase.FAILED, begun=None, problem=problem, output=output)
        disturbed = self.disturbed and not (untouched and self.begun is Step.RESTART)
        return replace(self, disturbed=disturbed, output=output).undo(problem)

    def undo(self, problem: str) -> Progress:
        """The old k has to come back."""
        return replace(self, phase=Phase.PLANNED, begun=None, undoing=True, problem=problem)

    def resume(self) -> Progress:
        """What another process goes on from.

        Where the server was surely not touched the change is taken back, since what it was decided
        on is of the past; where it may have been, one more restart is needed either way, so the
        change goes on.
        """
        if self.ended:
            return self
        again = replace(self, resumptions=self.resumptions + 1)
        if again.resumptions > 2 * MOST_RESUMPTIONS:
            why = f"{again.resumptions} processes ended on the way; somebody has to look"
            return replace(again, undoing=True, phase=Phase.FAILED, begun=None, problem=why)
        if self.undoing:
            return again
        if self.phase is Phase.PLANNED and self.begun is None:
            return replace(again, phase=Phase.ROLLED_BACK, problem="the exporter ended before it")
        if not self.disturbed:
            return again.undo("the exporter ended before the server was restarted")
        if again.resumptions > MOST_RESUMPTIONS:
            return again.undo(f"{again.resumptions} processes ended on the way")
        return again

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Progress:
        """The opposite of `to_dict`; further keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: it is of another form.
        """
        begun = saved["begun"]
        return cls(
            change=Change(**saved["change"]),
            phase=Phase(saved["phase"]),
            begun=None if begun is None else Step(begun),
            undoing=bool(saved["undoing"]),
            disturbed=bool(saved["disturbed"]),
            resumptions=int(saved["resumptions"]),
            problem=str(saved["problem"]),
            output=str(saved["output"]),
        )
