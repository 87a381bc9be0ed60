"""Carries changes out in processes that may be killed on the way.

    python -m tests.act_trial FOLDER PORT

reads a `Trial` a line from its input, forks a process for it, and answers with a line: whether that
process was killed. Forking saves the second that importing everything takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec_exporter.act.actuator import lock_path, new_actuator
from specdec_exporter.act.change import Change
from specdec_exporter.act.lock import ControllerLock
from specdec_exporter.act.perform import Performer, Verdict
from specdec_exporter.act.ready import Server
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.store import Store

SERVER = Path(__file__).with_name("act_server.py")
VERIFY_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Trial:
    """One process: it makes a change, or goes on with the one that the store tells of."""

    kept: bool
    """What becomes of the new k."""
    key: str = ""
    from_k: int = 0
    to_k: int = 0
    """Without a key nothing new is begun."""
    killed_after: float | None = None
    """Seconds from its first record."""
    killed_at_record: int | None = None
    """Kills itself at this record, counted from 0."""
    killed_before_it: bool = True
    """Or just after it was made."""

    def to_line(self) -> str:
        return json.dumps(asdict(self))


def restart_command(folder: Path, port: int) -> tuple[str, ...]:
    return (sys.executable, "-S", "-I", str(SERVER), str(folder), str(port))


def settings(folder: Path, port: int) -> ActuatorSettings:
    return ActuatorSettings(
        kind="vllm-config",
        file=folder / "config.yaml",
        restart=restart_command(folder, port),
        restart_timeout=20,
        ready_timeout=20,
    )


def server(port: int) -> Server:
    return Server(f"http://127.0.0.1:{port}/metrics", "m", poll_seconds=0.005)


async def carry_out(
    trial: Trial, folder: Path, port: int, begun: Callable[[], object] = lambda: None
) -> None:
    """The process itself; `begun` is called at each record."""
    store = Store(folder / "state.db")
    records = 0

    def record(step: dict[str, Any]) -> None:
        nonlocal records
        fatal = records == trial.killed_at_record
        if fatal and trial.killed_before_it:
            os.kill(os.getpid(), signal.SIGKILL)
        store.put("change", {"m": step})
        store.log("change", time.time(), step)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        records += 1
        begun()

    async def verify(change: Change) -> Verdict:
        await asyncio.sleep(VERIFY_SECONDS)
        return Verdict(trial.kept, "as the test wants it")

    chosen = settings(folder, port)
    with ControllerLock(lock_path(chosen, folder)):
        performer = Performer(chosen, new_actuator(chosen), server(port), verify, 20, record)
        if trial.key:
            await performer.apply(
                Change(trial.key, "t", "m", trial.from_k, trial.to_k, "a test", time.time())
            )
        elif (saved := store.get("change", "m")) is not None:
            await performer.resume(saved)
    store.close()


def run(trial: Trial, folder: Path, port: int) -> bool:
    """Whether the process was killed before it was done."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(carry_out(trial, folder, port, lambda: os.write(told, b".")))
        except BaseException as error:  # noqa: BLE001 - nothing may run on in the fork
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    os.close(told)
    if trial.killed_after is not None and os.read(heard, 1):
        time.sleep(trial.killed_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(heard)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("a trial broke")
    return os.WIFSIGNALED(status)


def main(folder: Path, port: int) -> None:
    # What is imported, compiled and kept at the first use is so before the first fork.
    for there, back in ((2, 1), (1, 2)):
        asyncio.run(carry_out(Trial(True, "warm", there, back), folder, port))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(Trial(**json.loads(line)), folder, port)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
