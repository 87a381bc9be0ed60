"""`bench` against a real vLLM: its clock beside that of `vllm bench serve`, and a sweep of k."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from rich.console import Console
from specdec_exporter.abtest.client import ask, new_client
from specdec_exporter.abtest.compare import compare
from specdec_exporter.abtest.prompts import PromptSet, body, parse, request_id
from specdec_exporter.abtest.run import Plan, read, run
from specdec_exporter.abtest.sweep_run import SweepPlan, sweep

from tests.real.conftest import Start
from tests.real.test_vllm import DRAFT_MODEL
from tests.real.vllm_bed import (
    MODEL_NAME,
    MODELS,
    VARIABLES,
    VllmServer,
    code_prompts,
    environment,
    free_port,
    random_word_prompts,
    serve_arguments,
)

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.slow]

TOKENS = 48
PROMPTS = 6
"""Of a turn."""
TURNS = 12
TOLERANCE = 0.03
"""Of the ratio of the two medians. A machine that is busy with other things moves single turns by half;
then there are more of them, and what is judged is the 95 % interval of the median turn."""

# `vllm bench serve` itself, turn by turn in one process: to start it takes longer than what is to be
# measured, and the machine changes meanwhile.
THEIRS = """
import asyncio, json, sys
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
answers, sys.stdout = sys.stdout, sys.stderr
print(file=answers, flush=True)
for line in sys.stdin:
    result = asyncio.run(main_async(parser.parse_args(json.loads(line))))
    assert not result["failed"], result["errors"]
    print(json.dumps(result), file=answers, flush=True)
"""


class BenchServe:
    """`vllm bench serve`, one request at a time, alive inside a `with` block."""

    def __init__(self, venv: Path, url: str, log: Path) -> None:
        self._url = url
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [venv / "bin" / "python", "-c", THEIRS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(),
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=120)
        self._log.close()

    def turn(self, prompts: Path, count: int) -> list[float]:
        """Seconds per output token of each request, as it counts them; checked to be what it says."""
        arguments = [
            *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", self._url, "--model", MODEL_NAME),
            *("--tokenizer", f"{MODELS}/llama-target", "--skip-chat-template"),
            *("--dataset-name", "custom", "--dataset-path", f"{prompts}", "--disable-shuffle"),
            *("--custom-output-len", f"{TOKENS}", "--num-prompts", f"{count}"),
            *("--max-concurrency", "1", "--temperature", "0", "--ignore-eos"),
            *("--save-detailed", "--disable-tqdm", "--percentile-metrics", "tpot"),
        ]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._answer())
        tpots = [
            sum(gaps) / (tokens - 1)
            for gaps, tokens in zip(result["itls"], result["output_lens"], strict=True)
        ]
        assert result["output_lens"] == [TOKENS] * count
        assert statistics.median(tpots) * 1000 == pytest.approx(result["median_tpot_ms"], rel=0.01)
        return tpots

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"vllm bench serve has ended:\n{Path(self._log.name).read_text()[-2000:]}"
        return line


def prompt_set(code: int, words: int, max_tokens: int) -> PromptSet:
    """Short enough for no block of the prefix cache to be full."""
    workloads = [
        {"name": name, "prompts": [{"id": f"p{i}", "user": t} for i, t in enumerate(texts)]}
        for name, texts in (
            ("code", code_prompts(code, characters=160)),
            ("words", random_word_prompts(words, words=12)),
        )
        if texts
    ]
    request = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    document = {"request": request, "expect": {"may_be_cut": True}, "workloads": workloads}
    return parse(json.dumps(document), "prompts")


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[VllmServer]:
    details = ("--per-request-spec-decode-metrics", "summary")
    with start("llama-target", DRAFT_MODEL, *details) as served:
        yield served


def plan(url: str, prompts: PromptSet, out: Path, repeat: int) -> Plan:
    return Plan(
        url=url,
        label="mtp",
        prompts=prompts,
        repeat=repeat,
        concurrency=1,
        out=out,
        seed=1,
        warmup=1,
    )


def test_acceptance_by_request_is_that_of_the_servers_counters(
    server: VllmServer, tmp_path: Path
) -> None:
    out = tmp_path / "mtp.jsonl"
    asyncio.run(run(plan(server.url, prompt_set(2, 2, 48), out, 2), Console(quiet=True)))
    measured = read(out)
    assert all(r.valid and r.completion_tokens == 48 for r in measured.requests)
    comparison = compare(measured, measured)
    assert [w for w in comparison.warnings if "at once" not in w] == []
    code, words = (workload.a for workload in comparison.workloads)
    for side in (code, words):
        assert side.requests == 4
        assert side.num_speculative_tokens == 4
        assert side.prefix_hit_ratio == 0
        assert side.mean_acceptance_length == pytest.approx(side.request_mean_acceptance_length)
        assert side.acceptance_ratio == pytest.approx(side.request_acceptance_ratio)
        print(f"MAL {side.mean_acceptance_length:.2f}, acceptance {side.acceptance_ratio:.3f}")


def test_time_per_token_is_that_of_vllm_bench_serve_in_turns(
    server: VllmServer, venv: Path, tmp_path: Path
) -> None:
    ((workload),) = prompt_set(PROMPTS, 0, TOKENS).workloads
    requests = [
        body(prompt, request_id(1, workload.name, prompt.id, 1), MODEL_NAME)
        for prompt in workload.prompts
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": r["messages"][0]["content"]}) + "\n" for r in requests)
    )

    async def our_turn() -> list[float]:
        found = []
        async with new_client(None) as client:
            for request in requests:
                reply = await ask(client, server.url, request)
                assert reply.failure is None
                assert reply.first_output_seconds is not None
                assert reply.end_seconds is not None
                assert reply.completion_tokens == TOKENS
                seconds = reply.end_seconds - reply.first_output_seconds
                found.append(seconds / (TOKENS - 1))
        return found

    ours: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    low, high = 0.0, math.inf
    with BenchServe(venv, server.url, tmp_path / "bench-serve.log") as bench_serve:
        bench_serve.turn(prompts, PROMPTS)
        while len(ratios) < TURNS and high - low > TOLERANCE:
            # Each goes first every other time: the second may profit from the first.
            first = len(ratios) % 2
            their_turn = bench_serve.turn(prompts, PROMPTS) if first else []
            our_tpots = asyncio.run(our_turn())
            their_turn = their_turn or bench_serve.turn(prompts, PROMPTS)
            ours += our_tpots
            theirs += their_turn
            ratios.append(statistics.median(our_tpots) / statistics.median(their_turn))
            if len(ratios) >= TURNS // 2:
                low, high = median_interval(ratios)
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(
        f"median TPOT {1000 * statistics.median(ours):.3f} ms, vllm bench serve "
        f"{1000 * statistics.median(theirs):.3f} ms: {ratio:.4f}; turns {low:.4f} to {high:.4f}"
    )
    assert low <= 1 + TOLERANCE
    assert high >= 1 - TOLERANCE


def median_interval(values: list[float]) -> tuple[float, float]:
    """Of the median, by ranks: 95 % of samples have it between these two."""
    ordered = sorted(values)
    low = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[low], ordered[-1 - low]


def test_a_sweep_serves_at_each_k_and_shows_what_deeper_drafts_add(
    venv: Path,
    tmp_path: Path,
) -> None:
    port = free_port()
    serve = [
        *("env", *(f"{name}={value}" for name, value in VARIABLES.items())),
        *(f"{venv}/bin/vllm", "serve", f"{MODELS}/llama-target", *serve_arguments(port)),
        "{speculative_config}",
    ]
    tried = SweepPlan(
        ks=(1, 3),
        starts=1,
        serve_command=" ".join(serve),
        speculative_config={"method": "draft_model", "model": f"{MODELS}/llama-draft"},
        folder=tmp_path,
        plan=plan(f"http://127.0.0.1:{port}", prompt_set(4, 0, 48), tmp_path, 2),
    )
    result = sweep(tried, Console(file=sys.stderr))
    one, three = (depth.starts[0] for depth in result.depths)
    assert (one.observed_k, three.observed_k) == (1, 3)
    assert one.valid == three.valid == 8
    assert one.mean_acceptance_length is not None
    assert three.mean_acceptance_length is not None
    assert 1.4 < one.mean_acceptance_length < three.mean_acceptance_length < 4
    assert result.depths[1].marginal_tokens == pytest.approx(
        (three.mean_acceptance_length - one.mean_acceptance_length) / 2
    )
    assert result.fastest in (1, 3)
    for start_ in (one, three):
        print(start_)
        assert start_.tpot_seconds == pytest.approx(
            (start_.step_seconds or 0) / (start_.tokens_per_step or 1)
        )
