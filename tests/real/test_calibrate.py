"""A real server without speculation becomes a baseline, and two with speculation are measured by it.

All three are up, and loaded in turns of a few seconds: what makes the machine faster or slower meanwhile
meets them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from specdec_exporter.baseline import Baseline

from tests.real.conftest import Start
from tests.real.load import Completion, Load, run_load
from tests.real.vllm_bed import (
    MODEL_NAME,
    VllmServer,
    code_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.slow]

COMMAND = Path(sys.executable).with_name("specdec-exporter")
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
KS = (0, 2, 4)
CONCURRENCIES = (1, 4)
MAX_TOKENS = 192
ROUNDS = 5
WITHIN = 0.05


def specdec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, env=ENVIRON, timeout=300
    )


def draft_model(k: int) -> dict[str, str | int] | None:
    config: dict[str, str | int] = {
        "method": "draft_model",
        "model": "llama-draft",
        "num_speculative_tokens": k,
    }
    return config if k else None


def turn(server: VllmServer, prompts: Sequence[str], concurrency: int, folder: Path) -> Load:
    """A load of a few seconds, whose pages are kept in the folder from before it to after it."""
    folder.mkdir(exist_ok=True)
    ended = threading.Event()

    def record() -> None:
        page, t = server.metrics(), time.time()
        (folder / f"{t:.3f}.prom").write_text(f"# scraped_at {t}\n{page}")

    def keep_recording() -> None:
        while not ended.wait(0.5):
            record()

    record()
    recorder = threading.Thread(target=keep_recording)
    recorder.start()
    try:
        return run_load(server.url, prompts, concurrency=concurrency, max_tokens=MAX_TOKENS)
    finally:
        ended.set()
        recorder.join()
        record()


def test_the_gain_on_real_servers_is_that_of_the_clients_clock(
    start: Start, tmp_path: Path
) -> None:
    seen: dict[tuple[int, int], list[Completion]] = defaultdict(list)
    with ExitStack() as up:
        servers = {k: up.enter_context(start("llama-target", draft_model(k))) for k in KS}
        refused = specdec("calibrate", "--url", servers[2].url, "--out", tmp_path / "no.json")
        for server in servers.values():
            run_load(server.url, code_prompts(8, seed=9), concurrency=4, max_tokens=MAX_TOKENS)
        for concurrency in CONCURRENCIES:
            prompts = code_prompts(3 * concurrency, seed=concurrency)
            for number in range(ROUNDS):
                for k in KS if number % 2 else reversed(KS):
                    folder = tmp_path / f"k{k}-{concurrency}"
                    load = turn(servers[k], prompts, concurrency, folder)
                    seen[k, concurrency] += load.completions
    assert refused.returncode == 1
    assert "speculates (k = 2)" in refused.stderr

    file = tmp_path / "baseline.json"
    plain = [tmp_path / f"k0-{c}" for c in CONCURRENCIES]
    made = specdec("calibrate", "--from-series", *plain, "--out", file)
    assert made.returncode == 0, made.stderr
    baseline = Baseline.from_json(file.read_text())
    assert (baseline.model_name, baseline.source) == (MODEL_NAME, "measured")
    print()
    for k in KS[1:]:
        for concurrency in CONCURRENCIES:
            clients = Load(tuple(seen[k, concurrency])).tpot_seconds
            plain_clients = Load(tuple(seen[0, concurrency])).tpot_seconds
            clients_gain = 1 - clients / plain_clients
            replayed = specdec(
                *("replay", tmp_path / f"k{k}-{concurrency}", "--baseline", file),
                *("--window", "1h", "--format", "json"),
            )
            last = json.loads(replayed.stdout.splitlines()[-1])
            assert last["tpot_gain_ratio"] is not None, last["gain_reason"]
            print(
                f"k = {k} at {concurrency}: client {clients_gain:+.3f} "
                f"({1e3 * clients:.3f} of {1e3 * plain_clients:.3f} ms), "
                f"exporter {last['tpot_gain_ratio']:+.3f} ({1e3 * last['tpot_seconds']:.3f} of "
                f"{1e3 * last['baseline_tpot_seconds']:.3f} ms)"
            )
            assert last["tpot_gain_ratio"] == pytest.approx(clients_gain, abs=WITHIN)
            if abs(clients_gain) > WITHIN:
                assert last["tpot_gain_ratio"] * clients_gain > 0
