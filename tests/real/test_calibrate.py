"""The net gain against a calibrated baseline is what a client's own clock says.

A server without speculation is loaded, then one with each k in the same way, while their pages are
recorded. The client's gain is a quotient of its own times; the exporter's comes from the recorded
pages alone, those without speculation made into a baseline. `calibrate` then drives the first
server itself, and must find the same curve.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.baseline import Baseline

from tests.real.conftest import Start
from tests.real.vllm_bed import MODEL_NAME, VllmServer, code_prompts, run_load

pytestmark = [pytest.mark.vllm, pytest.mark.clock, pytest.mark.slow]

COMMAND = Path(sys.executable).with_name("specdec-exporter")
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
DEPTHS = (2, 4)
DRAFT_MODEL = {"method": "draft_model", "model": "llama-draft"}
CONCURRENCY = 4
MAX_TOKENS = 96
REQUESTS = 40
TOLERANCE = 0.05
"""Points of gain. On a machine with nothing else to do the two agree within 0.02."""
ATTEMPTS = 3


DRIVEN_TOLERANCE = 0.1
"""Of the time per token in two loads, one after the other, with whatever else the machine does."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The gain of one k: by the client's clock, and what the exporter says."""

    client: float
    replayed: dict[str, Any]

    @property
    def error(self) -> float:
        gain: float | None = self.replayed["tpot_gain_ratio"]
        return math.inf if gain is None else abs(gain - self.client)


def specdec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, env=ENVIRON, timeout=300
    )


def client_tpot(server: VllmServer, seed: int) -> float:
    prompts = code_prompts(REQUESTS, seed=seed)
    return run_load(
        server.url, prompts, concurrency=CONCURRENCY, max_tokens=MAX_TOKENS
    ).tpot_seconds


def recorded_tpot(server: VllmServer, folder: Path, seed: int) -> float:
    """The client's, with a page of the server every half second in the folder."""
    ended = threading.Event()

    def record() -> None:
        last = False
        while not last:
            last = ended.wait(0.5)
            page, t = server.metrics(), time.time()
            (folder / f"{t:.3f}.prom").write_text(f"# scraped_at {t}\n{page}")

    recorder = threading.Thread(target=record)
    recorder.start()
    try:
        return client_tpot(server, seed)
    finally:
        ended.set()
        recorder.join()


class UnsteadyError(Exception):
    """Other work on the machine left nothing steady to make a baseline of."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one round of servers showed."""

    gains: dict[int, Compared]
    recorded: Baseline
    driven: Baseline | None
    """None where other work on the machine left nothing steady."""

    @property
    def driven_error(self) -> float:
        """How far the two curves are apart at the load of the clients."""
        if self.driven is None:
            return math.inf
        theirs = self.driven.tpot_seconds(CONCURRENCY)
        ours = self.recorded.tpot_seconds(CONCURRENCY)
        return math.inf if theirs is None or ours is None else abs(theirs / ours - 1)

    @property
    def error(self) -> float:
        """The largest error, in units of what is tolerated."""
        worst = max(one.error for one in self.gains.values())
        return max(worst / TOLERANCE, self.driven_error / DRIVEN_TOLERANCE)


def attempt(start: Start, folder: Path, seed: int) -> Attempt:
    prompts, file, driven = folder / "prompts.txt", folder / "a.json", folder / "b.json"
    prompts.write_text("\n".join(p.replace("\n", " ") for p in code_prompts(400, seed=seed)))
    (folder / "plain").mkdir()
    with start("llama-target", None) as server:
        client_tpot(server, seed)  # the first requests of a server are slow
        plain = recorded_tpot(server, folder / "plain", seed + 1)
        specdec(
            *("calibrate", "--url", server.url, "--concurrency", f"1,{CONCURRENCY}"),
            *("--duration", "12s", "--prompts", prompts, "--max-tokens", str(MAX_TOKENS)),
            *("--out", driven),
        )
    made = specdec("calibrate", "--from-series", folder / "plain", "--out", file)
    if made.returncode != 0:
        raise UnsteadyError(made.stderr)
    found = {}
    for k in DEPTHS:
        pages = folder / f"k{k}"
        pages.mkdir()
        with start("llama-target", {**DRAFT_MODEL, "num_speculative_tokens": k}) as server:
            refused = specdec("calibrate", "--url", server.url, "--out", folder / "no.json")
            assert refused.returncode == 1
            assert f"speculates (k = {k})" in refused.stderr
            client_tpot(server, seed)
            speculating = recorded_tpot(server, pages, seed + 1)
        replayed = specdec("replay", pages, "--baseline", file, "--format", "json")
        found[k] = Compared(1 - speculating / plain, json.loads(replayed.stdout.splitlines()[-1]))
    result = Attempt(
        found,
        Baseline.from_json(file.read_text()),
        Baseline.from_json(driven.read_text()) if driven.exists() else None,
    )
    print(f"\nplain {plain}, driven curve off by {result.driven_error:.3f}")
    for k, one in found.items():
        gain, reason = (one.replayed[name] for name in ("tpot_gain_ratio", "gain_reason"))
        print(f"k = {k}: client {one.client:+.3f}, exporter {gain} {reason}")
    return result


@pytest.fixture(scope="module")
def best(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    """Where the two disagree another round, two at most: other work on the machine slows one of them
    now and then, and a wrong formula is wrong every time."""
    rounds: list[Attempt] = []
    told = ""
    for n in range(ATTEMPTS):
        try:
            rounds.append(attempt(start, tmp_path_factory.mktemp("calibrate"), 10 * n))
        except UnsteadyError as unsteady:
            told = str(unsteady)
            continue
        if rounds[-1].error <= 1:
            break
    if not rounds:
        pytest.fail(f"the machine is too busy to measure on: {told}")
    return min(rounds, key=lambda one: one.error)


@pytest.mark.parametrize("k", DEPTHS)
def test_the_gain_is_that_of_the_clients_clock(best: Attempt, k: int) -> None:
    one = best.gains[k]
    gain = one.replayed["tpot_gain_ratio"]
    assert gain == pytest.approx(one.client, abs=TOLERANCE)
    if abs(one.client) > TOLERANCE:
        assert (gain > 0) == (one.client > 0)


@pytest.mark.parametrize("k", DEPTHS)
def test_the_baseline_covers_the_same_load_and_is_of_this_server(best: Attempt, k: int) -> None:
    replayed = best.gains[k].replayed
    assert replayed["model_name"] == MODEL_NAME
    assert replayed["baseline_covered"] is True
    assert replayed["gain_reason"] == ""
    assert replayed["tpot_gain_ratio_stderr"] > 0
    # Speculation pays where a step brings more tokens than it costs steps.
    assert (replayed["tokens_per_step"] > replayed["break_even_length"]) == (
        replayed["tpot_gain_ratio"] > 0
    )


def test_a_driven_server_shows_the_curve_that_was_recorded(best: Attempt) -> None:
    assert best.driven_error <= DRIVEN_TOLERANCE
    assert best.driven is not None
    assert best.driven.model_name == MODEL_NAME
    assert best.driven.engine_version.startswith("0.32")
