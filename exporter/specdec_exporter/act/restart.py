"""Runs the command that restarts the server: a list of arguments, no shell, within its time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.duration import format_duration

_TAIL_BYTES = 2000
_LINE_CHARACTERS = 200
_GRACE_SECONDS = 5.0
_CREDENTIAL = re.compile(
    r"(?i)((?:authorization|password|passwd|secret|token|api[-_]?key)[\"']?\s*[:=]\s*[\"']?"
    r"(?:(?:bearer|basic)\s+)?|(?:bearer|basic)\s+)[^\s\"',;]+"
)
_LOGIN = re.compile(r"://[^\s/@]+@")


async def run(command: Sequence[str], timeout: float) -> None:
    """Run a command to its end.

    It gets no input, and an environment without the exporter's own variables, which may hold
    secrets. It has a process group of its own, which is ended when the time is over or the caller
    is cancelled. It has to stand being run twice: whoever resumes a change runs it again.

    Args:
        command: and its arguments.
        timeout: seconds.

    Raises:
        Refused: there is no such command.
        ActError: it failed, with the end of what it printed, or took too long.
    """
    # A file and no pipe: a server that the command leaves running would die of a pipe whose reader
    # has gone.
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")},
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Refused(f"restart: {command[0]!r} cannot be run ({why})") from error
        try:
            async with asyncio.timeout(timeout):
                status = await process.wait()
        except TimeoutError:
            await _end(process)
            said = f"restart: {command[0]!r} did not end within {format_duration(timeout)}"
            raise ActError(said, _tail(output)) from None
        except asyncio.CancelledError:
            await _end(process)
            raise
        if status != 0:
            ended = f"status {status}" if status > 0 else f"signal {-status}"
            tail = _tail(output)
            last = (tail.splitlines() or ["it printed nothing"])[-1][:_LINE_CHARACTERS]
            raise ActError(f"restart: {command[0]!r} ended with {ended}: {last}", tail)


async def _end(process: asyncio.subprocess.Process) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
                return


def _tail(output: IO[bytes]) -> str:
    """The last lines of an output: printable, and without what looks like a credential."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    text = output.read().decode(errors="replace")
    text = "".join(c for c in text if c.isprintable() or c in "\n\t").strip()
    return _LOGIN.sub("://***@", _CREDENTIAL.sub(r"\1***", text))
