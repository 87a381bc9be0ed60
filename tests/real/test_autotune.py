"""An evening on call, played with a real vLLM: traffic drifts, k is changed, and a bad k goes back.

The server reads its k from a YAML file and is started anew by a supervisor. The exporter watches it,
rewrites the file, has the server restarted, and verifies. TPOT is by the client's own clock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from tests.real.conftest import Start
from tests.real.load import run_load
from tests.real.vllm_bed import (
    BED,
    MODELS,
    code_prompts,
    environment,
    free_port,
    random_word_prompts,
    serve_arguments,
)

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.slow]

COMMAND = str(Path(sys.executable).with_name("specdec-exporter"))
TOKEN = "let me"
CONCURRENCY = 2
MAX_TOKENS = 96
RULES = {
    "evaluation_interval": "1s",
    "min_drafts": 50,
    "keep_firing_for": "5s",
    **{
        name: {"for": "3s"}
        for name in ("drafter_misaligned", "net_gain_negative", "position_decay", "acceptance_low")
    },
    "drafter_broken": {"for": "3s", "min_drafts": 200},
}
TUNER = {
    "mode": "apply",
    "cooldown": "5s",
    "settle": "6s",
    "min_drafts": 100,
    "verify_timeout": "120s",
    "ready_timeout": "120s",
    "changes_per_day": 20,
}


class Traffic:
    """A closed loop of clients in a thread, whose prompts can be changed at any time.

    Requests that fail while the server restarts are sent again.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.kind: Callable[..., list[str]] = code_prompts
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._loads: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        seed = 0
        while not self._stopped.is_set():
            seed += 1
            prompts = self.kind(2 * CONCURRENCY, seed=seed)
            try:
                load = run_load(self.url, prompts, concurrency=CONCURRENCY, max_tokens=MAX_TOKENS)
            except (OSError, httpx.HTTPError, IndexError, ValueError):
                time.sleep(0.5)
                continue
            with self._lock:
                self._loads.append((time.monotonic(), load.tpot_seconds))

    def rounds_since(self, since: float) -> list[float]:
        """TPOT of the rounds that ended after then, the first left out as it began before."""
        with self._lock:
            return [tpot for t, tpot in self._loads if t > since][1:]


@dataclass
class Evening:
    """The exporter, what it is asked, and the story so far."""

    url: str
    file: Path
    log: Path
    story: list[str]

    @property
    def k(self) -> int:
        text = self.file.read_text()
        return int(text.partition("spec-tokens:")[2].split()[0]) if "spec-tokens:" in text else 0

    def status(self) -> dict[str, Any]:
        (target,) = httpx.get(f"{self.url}/api/v1/status", timeout=10).json()["targets"]
        found: dict[str, Any] = target
        return found

    def tuner(self) -> dict[str, Any]:
        entries = self.status()["tuner"]
        return entries[0] if entries else {"decision": "", "phase": None, "reason": ""}

    def audit(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = httpx.get(f"{self.url}/api/v1/audit", timeout=10).json()
        return entries

    def tell(self, line: str) -> None:
        self.story.append(line)
        print(line, flush=True)

    def until(self, what: str, condition: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                self.tell(f"  {what}")
                return
            time.sleep(0.25)
        told = json.dumps(self.status(), indent=1)
        raise AssertionError(f"not in time: {what}\n{told}\n{self.audit()}\n{self.log.read_text()}")

    def post(self, action: str) -> str:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{self.url}/api/v1/autotune/{action}", headers=headers, timeout=10)
        assert answer.status_code == 200, answer.text
        return answer.text.strip()

    def ended(self, outcome: str, count: int) -> bool:
        entries = [e for e in self.audit() if e["what"] == "ended"]
        return len(entries) >= count and entries[0]["outcome"] == outcome


@contextmanager
def supervised(venv: Path, folder: Path, port: int) -> Iterator[tuple[Path, int]]:
    """A vLLM that reads its settings from a file, and the process that starts it anew on SIGHUP."""
    file = folder / "vllm.yaml"
    file.write_text(
        f"# tuned by specdec-exporter\nmodel: {MODELS / 'llama-target'}\n"
        f"spec-method: draft_model\nspec-model: {MODELS / 'llama-draft'}\nspec-tokens: 4\n"
    )
    command = [str(venv / "bin" / "vllm"), "serve", "--config", str(file), *serve_arguments(port)]
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(BED / "supervise.py"), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    try:
        yield file, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def exporter(folder: Path, port: int, file: Path, pid: int, baseline: Path) -> Iterator[Evening]:
    listen = f"127.0.0.1:{free_port()}"
    settings = {
        "listen": listen,
        "interval": "1s",
        "windows": ["10s"],
        "admin_token": TOKEN,
        "state_file": str(folder / "state.db"),
        "rules": RULES,
        "tuner": TUNER,
        "targets": [
            {
                "name": "vllm",
                "url": f"http://127.0.0.1:{port}",
                "baseline": str(baseline),
                "actuator": {
                    "kind": "vllm-config",
                    "file": str(file),
                    "restart": ["kill", "-HUP", str(pid)],
                    "ready_url": f"http://127.0.0.1:{port}/health",
                    "ready_timeout": "120s",
                },
            }
        ],
    }
    # YAML takes JSON as it is.
    config = folder / "specdec.yaml"
    config.write_text(json.dumps(settings))
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
    log = folder / "exporter.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [COMMAND, "serve", "--config", str(config)], stderr=output, env=environ
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    httpx.get(f"http://{listen}/-/healthy", timeout=5)
                    break
                except httpx.TransportError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            yield Evening(f"http://{listen}", file, log, [])
        finally:
            process.terminate()


def calibrated(start: Start, folder: Path) -> Path:
    file, prompts = folder / "baseline.json", folder / "prompts.txt"
    lines = [p.replace("\n", " ") for p in random_word_prompts(200, seed=9)]
    prompts.write_text("\n".join(lines))
    with start("llama-target", None) as server:
        done = subprocess.run(
            [
                *(COMMAND, "calibrate", "--url", server.url, "--concurrency", "1,2"),
                *("--duration", "12s", "--max-tokens", str(MAX_TOKENS), "--prompts", str(prompts)),
                *("--out", str(file)),
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return file


def test_drifted_traffic_shrinks_k_on_a_real_server_and_a_bad_k_goes_back_by_itself(
    start: Start, venv: Path, tmp_path: Path
) -> None:
    baseline = calibrated(start, tmp_path)
    port = free_port()
    with (
        supervised(venv, tmp_path, port) as (file, pid),
        exporter(tmp_path, port, file, pid, baseline) as evening,
        Traffic(f"http://127.0.0.1:{port}") as traffic,
    ):
        evening.post("pause")
        evening.tell("Code prompts, k = 4 in the file, and the tuner is paused.")
        evening.until("the exporter sees k = 4", lambda: evening.tuner().get("observed_k") == 4)
        evening.tell("The prompts turn to random words.")
        traffic.kind = random_word_prompts
        turned = time.monotonic()
        evening.until("it was seen for a while", lambda: len(traffic.rounds_since(turned)) >= 3)
        assert evening.k == 4
        before = mean(traffic.rounds_since(turned))
        evening.tell("The tuner is resumed.")
        evening.post("resume")
        evening.until("k = 1 is in the file", lambda: evening.k == 1)
        evening.until("the change is verified", lambda: evening.ended("verified", 1))
        assert "tuned by specdec-exporter" in file.read_text()
        changed = time.monotonic()
        evening.until("it was seen for a while", lambda: len(traffic.rounds_since(changed)) >= 3)
        after = mean(traffic.rounds_since(changed))
        evening.tell(f"  TPOT by the client: {1000 * before:.2f} ms, then {1000 * after:.2f} ms")
        assert after < before
        evening.tell("Somebody asks for k = 4 over HTTP.")
        evening.tell(f"  {evening.post('apply?target=vllm&k=4')}")
        evening.until("k = 4 is in the file", lambda: evening.k == 4)
        evening.until("it is taken back", lambda: evening.ended("rolled-back", 2))
        evening.until("the server runs with k = 1", lambda: evening.tuner()["observed_k"] == 1)
        assert evening.k == 1
        for entry in reversed(evening.audit()):
            evening.tell(f"  audit: {entry['what']} {entry.get('outcome', '')} "
                         f"{entry.get('from_k')} → {entry.get('to_k')}: {entry.get('reason', '')}")  # fmt: skip
        (history,) = [
            subprocess.run(
                [COMMAND, "history", "--url", evening.url], capture_output=True, text=True
            ).stdout
        ]
        assert "asked for by" in history
