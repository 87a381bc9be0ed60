"""Starts a server by a command of the user's, waits until it answers, and stops all of it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from specdec_exporter.abtest.errors import BenchError

PLACE = "{speculative_config}"
_START_SECONDS = 3600.0
"""Large models take long to load, longer where they are fetched first."""
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.25


def command(template: str, config: Mapping[str, Any], k: int) -> list[str]:
    """The command that serves at one k: `{speculative_config}` becomes vLLM's option, or nothing.

    Args:
        template: as one would type it into a shell; none is used.
        config: of speculation, without k.
        k: 0 is no speculation.

    Raises:
        BenchError: the template cannot be used.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise BenchError(f"--serve-command: {error}") from error
    if words.count(PLACE) != 1:
        raise BenchError(f"--serve-command: expected {PLACE} once, as a word of its own")
    told = json.dumps({**config, "num_speculative_tokens": k})
    option = ["--speculative-config", told] if k else []
    at = words.index(PLACE)
    return [*words[:at], *option, *words[at + 1 :]]


def _answers(url: str) -> bool:
    """Whether a server answers at the address, be it that it wants a key."""
    try:
        # A certificate is of no matter here, and to load the system's each time is work.
        response = httpx.get(f"{url}/v1/models", timeout=5.0, trust_env=False, verify=False)
    except httpx.HTTPError:
        return False
    return response.is_success or response.status_code == httpx.codes.UNAUTHORIZED


def _listens(url: str) -> bool:
    """Whether anything at all is at the address."""
    address = httpx.URL(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def serving(words: list[str], url: str, log: Path) -> Iterator[None]:
    """A server that answers at the address, and that is gone with all it has started afterwards.

    Raises:
        BenchError: something is there already, or it does not start.
    """
    if _listens(url):
        raise BenchError(f"something listens at {url} already; stop it, since two share a machine")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for us, and what it has started is one group.
                start_new_session=True,
            )
    except OSError as error:
        raise BenchError(f"cannot start {words[0]} ({error.strerror})") from error
    try:
        _wait(process, url, log)
        yield
    finally:
        _stop(process, url)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(url):
        if (status := process.poll()) is not None:
            raise BenchError(f"the server ended with status {status}: {_last_line(log)} ({log})")
        if time.monotonic() > deadline:
            raise BenchError(f"no server at {url} after {_START_SECONDS:.0f} s; see {log}")
        time.sleep(_POLL_SECONDS)


def _stop(process: subprocess.Popen[bytes], url: str) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None and not _alive(process.pid) and not _listens(url):
                return
            time.sleep(_POLL_SECONDS)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " ".join(lines[-1].split())[:200] if lines else "it said nothing"
