"""Carries a change of k out, step by step, each recorded before and after it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from specdec_exporter.act import restart
from specdec_exporter.act.actuator import Actuator
from specdec_exporter.act.change import Change, Progress, Step
from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.act.ready import Server
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.duration import format_duration

log = structlog.get_logger()

_PATIENCE_SECONDS = 30.0
"""A server that nobody has touched may be slow to answer, and is not restarted for that."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a new k under load."""

    kept: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Performer:
    """What a change is carried out with; one per deployment, while its lock is held."""

    settings: ActuatorSettings
    actuator: Actuator
    server: Server
    verify: Callable[[Change], Awaitable[Verdict]]
    """Watches the server under the new k and says whether to keep it."""
    verify_seconds: float
    """A verdict that is not there by then is against the new k."""
    record: Callable[[dict[str, Any]], None]
    """Keeps the last dictionary that it was given, whatever happens to the process afterwards.

    What it raises ends the change where it is: what cannot be recorded is not done.
    """

    async def apply(self, change: Change) -> Progress:
        """Bring a new k into force and keep it, or bring the old one back."""
        return await self._run(Progress(change))

    async def roll_back(self, change: Change, problem: str) -> Progress:
        """Bring the old k back after a change that had ended well."""
        return await self._run(Progress(change, disturbed=True).undo(problem))

    async def resume(self, saved: Mapping[str, Any]) -> Progress:
        """Finish or undo what an earlier process has left, given its last record.

        Raises:
            KeyError, TypeError, ValueError: the record is of another form.
        """
        return await self._run(Progress.from_dict(saved).resume())

    async def _run(self, progress: Progress) -> Progress:
        self.record(progress.to_dict())
        while (step := progress.next_step) is not None:
            if step is Step.RESTART and await self._runs_on(progress):
                progress = progress.spared()
                continue
            progress = progress.begin(applies_itself=self.settings.applies_itself)
            self.record(progress.to_dict())
            try:
                await self._do(step, progress)
                progress = progress.done()
            except ActError as error:
                progress = progress.failed(
                    str(error), output=error.output, untouched=isinstance(error, Refused)
                )
            except Exception as error:
                log.error("internal error", target=progress.change.target, exc_info=error)
                progress = progress.failed(f"{step}: {type(error).__name__}; please report the log")
            self.record(progress.to_dict())
        return progress

    async def _do(self, step: Step, progress: Progress) -> None:
        change = progress.change.reversed(progress.problem) if progress.undoing else progress.change
        match step:
            case Step.WRITE:
                await self.actuator.set_k(change)
            case Step.RESTART:
                if self.settings.restart:
                    await restart.run(self.settings.restart, self.settings.restart_timeout)
            case Step.READY:
                await self.server.wait_for(change.to_k, self.settings.ready_timeout)
            case Step.VERIFY:
                await self._verify(change)

    async def _runs_on(self, progress: Progress) -> bool:
        """Whether the old k, now written again, has never stopped being served."""
        if not progress.undoing or progress.disturbed:
            return False
        try:
            patience = min(_PATIENCE_SECONDS, self.settings.ready_timeout)
            await self.server.wait_for(progress.wanted_k, patience)
        except ActError:
            return False
        return True

    async def _verify(self, change: Change) -> None:
        try:
            async with asyncio.timeout(self.verify_seconds):
                verdict = await self.verify(change)
        except TimeoutError:
            raise ActError(f"no verdict within {format_duration(self.verify_seconds)}") from None
        if not verdict.kept:
            raise ActError(verdict.reason)
