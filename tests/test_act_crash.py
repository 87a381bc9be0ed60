"""A change of k survives `kill -9` at any moment: the next process finishes it or takes it back.

Real processes change a real file under a server that reads it at start, and are killed on the way.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from specdec_exporter.act import vllm_config
from specdec_exporter.act.change import Phase, Progress, Step
from specdec_exporter.parse import parse
from specdec_exporter.store import Store

from tests import pages
from tests.act_trial import Trial, restart_command
from tests.real.vllm_bed import free_port

CONFIG = """\
# What this server runs with.
model: google/gemma  # the target
spec-method: mtp  # its own head
spec-tokens: 2
max-num-seqs: 8
"""
KS = (0, 1, 2, 3)
KILLS = 200


class Bed:
    """A server with its configuration and the process that makes changes, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._http = httpx.Client(trust_env=False, verify=False)
        (folder / "config.yaml").write_text(CONFIG)
        for k in KS:
            counted = pages.counters(per_position=tuple(47.0 / 2**i for i in range(k)))
            page = pages.page(counted).decode().splitlines(keepends=True)
            kept = [line for line in page if k or "spec_decode" not in line]
            (folder / f"page_{k}.prom").write_text("".join(kept))

    def __enter__(self) -> Self:
        subprocess.run(restart_command(self.folder, self.port), check=True)
        self._trials = subprocess.Popen(
            [sys.executable, "-m", "tests.act_trial", str(self.folder), str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        # Answered once everything is imported.
        self.run(Trial(kept=True))
        return self

    def __exit__(self, *exception: object) -> None:
        self._trials.communicate()
        self._http.close()
        with (self.folder / "restart.lock").open("w") as lock, suppress(OSError, ValueError):
            # A command that outlived its exporter may still wait to start a server.
            fcntl.flock(lock, fcntl.LOCK_EX)
            (self.folder / "closed").touch()
            os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)

    def run(self, trial: Trial) -> bool:
        """Whether the process was killed."""
        assert self._trials.stdin is not None
        assert self._trials.stdout is not None
        self._trials.stdin.write(trial.to_line() + "\n")
        self._trials.stdin.flush()
        answer = self._trials.stdout.readline()
        assert answer, "the process of the trials has ended"
        return answer == "true\n"

    def file_k(self) -> int:
        """The k of the file, which is whole."""
        text = (self.folder / "config.yaml").read_text()
        for part in ("# What", "model: google/gemma  # the target", "# its own head", "seqs: 8\n"):
            assert part in text
        return vllm_config.read_k(text)

    def served_k(self) -> int:
        """The k of the server; a restart that outlived its exporter may still be under way."""
        deadline = time.monotonic() + 60
        while True:
            try:
                page = self._http.get(f"http://127.0.0.1:{self.port}/metrics")
                return parse(page.content, t=0.0).engines[0].num_speculative_tokens
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the server is gone"
                time.sleep(0.01)

    def progress(self) -> Progress | None:
        """What the store says of the last change."""
        store = Store(self.folder / "state.db")
        saved: dict[str, Any] | None = store.get("change", "m")
        store.close()
        return None if saved is None else Progress.from_dict(saved)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Bed(tmp_path) as made:
        yield made


def check_after_the_kill(bed: Bed, trial: Trial) -> str:
    """The file is old or new, and the state says how far it got."""
    assert bed.file_k() in (trial.from_k, trial.to_k)
    progress = bed.progress()
    if progress is None or progress.change.key != trial.key:
        assert bed.file_k() == trial.from_k
        return "nothing"
    if progress.ended:
        assert bed.file_k() == progress.k_in_force
    where = "ended" if progress.ended else progress.begun or progress.phase
    return f"{'back: ' if progress.undoing else ''}{where}"


def check_after_the_next_start(bed: Bed, trial: Trial) -> Phase | None:
    """Server, file and journal agree, on one of the two."""
    progress = bed.progress()
    if progress is None or progress.change.key != trial.key:
        assert bed.served_k() == bed.file_k() == trial.from_k
        return None
    assert progress.phase in (Phase.VERIFIED, Phase.ROLLED_BACK), progress
    assert bed.served_k() == bed.file_k() == progress.k_in_force
    assert progress.k_in_force in (trial.from_k, trial.to_k)
    return progress.phase


def seconds(work: Callable[[], object]) -> float:
    """That some work takes."""
    begun = time.monotonic()
    work()
    return time.monotonic() - begun


@pytest.mark.slow
def test_killed_at_200_random_moments_a_change_is_finished_or_undone_by_the_next_start(
    bed: Bed,
) -> None:
    seed = random.randrange(10**9)
    chance = random.Random(seed)
    whole = statistics.median(
        seconds(lambda: bed.run(Trial(kept=False, key="undisturbed", from_k=2, to_k=1)))
        for _ in range(5)
    )
    found, ends, late = Counter[str](), Counter[Phase | None](), 0
    while found.total() < KILLS:
        old = bed.file_k()
        new = chance.choice([k for k in KS if k != old])
        kept = chance.random() < 0.5
        # A change that is kept takes a little more than half of the time of one that is not.
        after = chance.uniform(0, 0.6 * whole if kept else whole)
        trial = Trial(kept, f"change-{found.total()}-{late}", old, new, killed_after=after)
        bed.run(trial)
        where = check_after_the_kill(bed, trial)
        if where in ("ended", "back: ended"):
            late += 1
            assert late < KILLS, "the moments do not fall into the change"
            # A machine that others use is not always as fast.
            whole *= 0.9
            continue
        whole *= 1.02
        found[where] += 1
        if chance.random() < 0.3:
            bed.run(Trial(kept, killed_after=chance.uniform(0, 0.5 * whole)))
            check_after_the_kill(bed, trial)
        assert not bed.run(Trial(kept)), "the last process was not to be killed"
        ends[check_after_the_next_start(bed, trial)] += 1
    print(
        f"\nseed {seed}, a change takes {whole:.3f} s; killed at {dict(found)}; ended {dict(ends)}, {late} too late"
    )
    # The moments were spread over the change: otherwise nothing was proven.
    assert len(found) >= 4, found
    assert ends.keys() == {Phase.VERIFIED, Phase.ROLLED_BACK}


RECORDS = {True: 9, False: 15}
"""Of a change that is kept, and of one that is not: the plan, then two for each step."""


@pytest.mark.slow
def test_killed_at_each_record_a_change_is_finished_or_undone_by_the_next_start(bed: Bed) -> None:
    found = set()
    for kept, records in RECORDS.items():
        for number in range(records):
            for before in (True, False):
                old = bed.file_k()
                new = (old + 1) % len(KS)
                key = f"{kept}-{number}-{before}"
                trial = Trial(kept, key, old, new, None, number, before)
                assert bed.run(trial), "there are fewer records than that"
                found.add(check_after_the_kill(bed, trial))
                assert not bed.run(Trial(kept))
                check_after_the_next_start(bed, trial)
        key = f"{kept}-whole"
        old = bed.file_k()
        whole = Trial(kept, key, old, (old + 1) % len(KS), None, records)
        assert not bed.run(whole), "there are more records than that"
    every_step = {str(step) for step in Step} | {
        f"back: {step}" for step in Step if step != "verify"
    }
    assert every_step < found


def test_a_process_that_is_not_killed_leaves_nothing_to_do(bed: Bed) -> None:
    assert not bed.run(Trial(kept=True, key="a", from_k=2, to_k=1))
    assert bed.progress() is not None
    assert check_after_the_next_start(bed, Trial(True, "a", 2, 1)) is Phase.VERIFIED
    assert bed.served_k() == 1


def test_a_change_that_is_never_finished_is_undone_after_some_processes(bed: Bed) -> None:
    trial = Trial(True, "a", 2, 1, None, 7, False)
    assert bed.run(trial)
    for _ in range(3):
        assert bed.run(Trial(True, killed_at_record=1, killed_before_it=False))
    assert not bed.run(Trial(True))
    assert check_after_the_next_start(bed, trial) is Phase.ROLLED_BACK
    assert bed.served_k() == 2
