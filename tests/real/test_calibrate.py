"""A real server without speculation becomes a baseline, and one with speculation is measured by it.

How far the gain agrees with the client's clock is printed: tiny models on a shared processor are too
unsteady between two starts of a server to hold it to a few points.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from specdec_exporter.baseline import Baseline

from tests.real.conftest import Start
from tests.real.vllm_bed import MODEL_NAME, VllmServer, code_prompts, run_load

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.slow]

COMMAND = Path(sys.executable).with_name("specdec-exporter")
ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
DRAFT_MODEL = {"method": "draft_model", "model": "llama-draft", "num_speculative_tokens": 2}
MAX_TOKENS = 96
REQUESTS = 16


def specdec(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, env=ENVIRON, timeout=300
    )


def loaded(server: VllmServer, folder: Path) -> float:
    """The client's TPOT of a load of one request at a time, whose pages are kept in the folder."""
    folder.mkdir()
    prompts = code_prompts(REQUESTS, seed=1)
    run_load(server.url, prompts[:4], concurrency=1, max_tokens=MAX_TOKENS)
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
        load = run_load(server.url, prompts, concurrency=1, max_tokens=MAX_TOKENS)
    finally:
        ended.set()
        recorder.join()
    return load.tpot_seconds


def test_a_real_server_is_recorded_as_a_baseline_and_one_that_speculates_is_refused(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "baseline.json"
    with start("llama-target", None) as server:
        plain = loaded(server, tmp_path / "plain")
    made = specdec("calibrate", "--from-series", tmp_path / "plain", "--out", file)
    with start("llama-target", DRAFT_MODEL) as server:
        refused = specdec("calibrate", "--url", server.url, "--out", tmp_path / "no.json")
        speculating = loaded(server, tmp_path / "k2")
    assert refused.returncode == 1
    assert "speculates (k = 2)" in refused.stderr
    if made.returncode != 0:
        # Refusing times that scatter is what calibrate is for; a busy machine shows them.
        assert "times scatter" in made.stderr
        return
    baseline = Baseline.from_json(file.read_text())
    assert baseline.model_name == MODEL_NAME
    assert baseline.source == "measured"
    replayed = specdec(
        "replay", tmp_path / "k2", "--baseline", file, "--window", "5s", "--format", "json"
    )
    gains = [
        (r["tpot_gain_ratio"], r["gain_reason"])
        for r in map(json.loads, replayed.stdout.splitlines())
    ]
    known = [gain for gain, _ in gains if gain is not None]
    print(f"\nclient {1 - speculating / plain:+.3f}, exporter by window {known}")
    assert all(reason for gain, reason in gains if gain is None)
    assert all(-3 < gain < 1 for gain in known)
