"""What the exporter says of a real vLLM is what its counters say, and what its clients see.

Each server gets one load of streamed completions while `specdec-exporter serve` watches it. What the
server's page, the exporter's page and the client's clock said is kept, and the tests compare the
three. The server's page is read with prometheus_client's parser, not with ours.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.real.conftest import Start
from tests.real.load import Load, Prompt, run_load
from tests.real.vllm_bed import (
    VllmServer,
    code_prompts,
    free_port,
    french_prompts,
    get,
    random_token_prompts,
    random_word_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.slow]

SYNTHETIC_RATES = (0.47, 0.24)
"""The acceptance that Google's Gemma 4 guide reports at k = 2."""

COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "specdec_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total": "specdec_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "specdec_accepted_tokens_total",
    "vllm:inter_token_latency_seconds_sum": "specdec_decode_seconds_total",
    "vllm:inter_token_latency_seconds_count": "specdec_decode_steps_total",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
SPECULATION_GAUGES = (
    "specdec_acceptance_ratio",
    "specdec_front_acceptance_ratio",
    "specdec_mean_acceptance_length",
    "specdec_position_acceptance_ratio",
    "specdec_mean_draft_length",
    "specdec_draft_coverage_ratio",
)

PREFIX_BLOCK = 128
"""Tokens of one block of the prefix cache on a CPU."""

SETTLED_SECONDS = 90.0
CLOCK_TOLERANCE = 0.05
"""Of the client's TPOT. The two agree within 0.01 on a machine with nothing else to do. A client that
has to wait for a core takes tokens for later than they were, by up to 0.06 on two cores with four
times the work that they can do."""
ATTEMPTS = 3


class Page:
    """A metrics page, by sample name and labels."""

    def __init__(self, text: str) -> None:
        families: list[Metric] = list(text_string_to_metric_families(text))
        self._samples = [sample for family in families for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[float]:
        """The values of the samples of this name that have these labels, among others."""
        return [
            s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        """The value of the only such sample."""
        (value,) = self.all(name, **labels)
        return value

    def labels(self, name: str, label: str) -> list[str]:
        """The values of one label of this name's samples, in order of appearance."""
        return list(dict.fromkeys(s.labels[label] for s in self._samples if s.name == name))


@dataclass(frozen=True, slots=True)
class Run:
    """One load: both pages before and after it, and what the client saw."""

    server_before: Page
    server_after: Page
    exporter_before: Page
    exporter_after: Page
    load: Load

    def increase(self, name: str, **labels: str) -> float:
        """Of a counter of the server, summed over its series."""
        after = self.server_after.all(name, **labels)
        before = self.server_before.all(name, **labels)
        assert len(after) == len(before) > 0, name
        return sum(after) - sum(before)

    def counted(self, name: str, **labels: str) -> float:
        """The increase of a counter of the exporter, summed over its series."""
        after = self.exporter_after.all(name, **labels)
        before = self.exporter_before.all(name, **labels)
        assert len(after) == len(before) > 0, name
        return sum(after) - sum(before)

    def figure(self, name: str, **labels: str) -> float:
        """A gauge of the exporter after the load."""
        return self.exporter_after.one(name, **labels)

    @property
    def clock_error(self) -> float:
        """How far the exporter's TPOT is from the client's."""
        return abs(self.figure("specdec_tpot_seconds") / self.load.tpot_seconds - 1)

    @property
    def engines(self) -> list[str]:
        return self.server_after.labels("vllm:generation_tokens_total", "engine")

    @property
    def positions(self) -> list[str]:
        return self.server_after.labels(PER_POSITION, "position")


class Exporter:
    """`specdec-exporter serve` for one target, alive inside a `with` block."""

    def __init__(self, target: str, log: Path) -> None:
        self._log = log
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}/metrics"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    Path(sys.executable).with_name("specdec-exporter"),
                    *("serve", "--target", target, "--listen", address, "--interval", "1s"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Settings of the person who runs the tests are not for this exporter.
                env={k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)

    def page_scraped_after(self, moment: float) -> Page:
        """The first page that rests on a scrape later than this unix time."""
        return wait_for(
            self._page,
            lambda page: any(
                t > moment for t in page.all("specdec_last_scrape_success_timestamp_seconds")
            ),
        )

    def _page(self) -> Page:
        assert self._process.poll() is None, f"the exporter ended:\n{self._log.read_text()}"
        try:
            return Page(get(self._url))
        except httpx.TransportError:  # it does not listen yet
            return Page("")


def wait_for(read: Callable[[], Page], satisfied: Callable[[Page], bool]) -> Page:
    """The first page that satisfies a condition."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while not satisfied(page := read()):
        assert time.monotonic() < deadline, f"not within {SETTLED_SECONDS:.0f} s"
        time.sleep(0.1)
    return page


def observe(
    server: VllmServer, prompts: Sequence[Prompt], max_tokens: int, concurrency: int = 8
) -> Run:
    """Load a server while a fresh exporter watches it, and keep what everybody said."""

    def finished(page: Page) -> float:
        return sum(page.all("vllm:request_success_total"))

    with Exporter(server.url, server.log.with_name("exporter.log")) as exporter:
        exporter_before = exporter.page_scraped_after(0.0)
        server_before = Page(server.metrics())
        load = run_load(server.url, prompts, concurrency=concurrency, max_tokens=max_tokens)
        # vLLM counts a request shortly after the client has got its last token.
        server_after = wait_for(
            lambda: Page(server.metrics()),
            lambda page: finished(page) == finished(server_before) + len(prompts),
        )
        exporter_after = exporter.page_scraped_after(time.time())
    return Run(server_before, server_after, exporter_before, exporter_after, load)


def observe_timed(
    server: VllmServer,
    make_prompts: Callable[..., list[str]],
    count: int,
    max_tokens: int = 96,
    concurrency: int = 8,
) -> Run:
    """Observe a load; where the client's clock disagrees, another one like it, two times at most.

    A machine that is busy with other things can hold the client up once or twice. A wrong formula
    is wrong every time.
    """
    runs = []
    for seed in range(ATTEMPTS):
        runs.append(observe(server, make_prompts(count, seed=seed), max_tokens, concurrency))
        if runs[-1].clock_error <= CLOCK_TOLERANCE:
            break
    return min(runs, key=lambda run: run.clock_error)


DRAFT_MODEL = {"method": "draft_model", "model": "llama-draft", "num_speculative_tokens": 4}


@pytest.fixture(scope="session")
def gemma_mtp(start: Start) -> Run:
    speculative = {
        "method": "mtp",
        "model": "gemma4-tiny-assistant",
        "num_speculative_tokens": len(SYNTHETIC_RATES),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": SYNTHETIC_RATES,
    }
    with start("gemma4-tiny", speculative) as server:
        return observe_timed(server, code_prompts, 36)


@pytest.fixture(scope="session")
def draft_model(start: Start) -> dict[str, Run]:
    # With one token more than a block of the prefix cache, a prompt that comes again has one token
    # left to compute.
    prompts = random_token_prompts(20, tokens=PREFIX_BLOCK + 1)
    with start("llama-target", DRAFT_MODEL) as server:
        return {
            "code": observe_timed(server, code_prompts, 24),
            # On long answers to anything else, these models find their way back to code.
            "prose": observe_timed(server, french_prompts, 20, max_tokens=64),
            "random words": observe_timed(server, random_word_prompts, 20, max_tokens=64),
            "first time": observe(server, prompts, max_tokens=8),
            "second time": observe(server, prompts, max_tokens=8),
        }


@pytest.fixture(scope="session")
def code(draft_model: dict[str, Run]) -> Run:
    return draft_model["code"]


@pytest.fixture(scope="session")
def prose(draft_model: dict[str, Run]) -> Run:
    return draft_model["prose"]


@pytest.fixture(scope="session")
def random_words(draft_model: dict[str, Run]) -> Run:
    return draft_model["random words"]


@pytest.fixture(scope="session")
def first_time(draft_model: dict[str, Run]) -> Run:
    return draft_model["first time"]


@pytest.fixture(scope="session")
def second_time(draft_model: dict[str, Run]) -> Run:
    return draft_model["second time"]


NGRAM_K = 2


@pytest.fixture(scope="session")
def ngram(start: Start) -> Run:
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": NGRAM_K,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    with start("llama-target", speculative) as server:
        return observe_timed(server, code_prompts, 16)


@pytest.fixture(scope="session")
def no_speculation(start: Start) -> Run:
    with start("llama-target", None) as server:
        return observe_timed(server, code_prompts, 16)


@pytest.fixture(scope="session")
def two_engines(start: Start) -> Run:
    with start("llama-target", DRAFT_MODEL, "--data-parallel-size", "2") as server:
        # One request at a time: with both engines at work, two cores have none left for the rest.
        # An odd number of them: engines with as many drafts each have one mean, taken either way.
        return observe_timed(server, code_prompts, 15, max_tokens=96, concurrency=1)


TIMED = ("gemma_mtp", "code", "prose", "random_words", "ngram", "two_engines", "no_speculation")
SPECULATING = (
    *("gemma_mtp", "code", "prose", "random_words", "first_time", "second_time"),
    *("ngram", "two_engines"),
)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The run that a parameter names."""
    found: Run = request.getfixturevalue(request.param)
    return found


every_run = pytest.mark.parametrize("run", [*SPECULATING, "no_speculation"], indirect=True)
every_timed_run = pytest.mark.parametrize("run", TIMED, indirect=True)
every_speculating_run = pytest.mark.parametrize("run", SPECULATING, indirect=True)


@every_run
def test_the_target_is_up(run: Run) -> None:
    assert run.figure("specdec_up") == 1


@every_speculating_run
def test_counters_are_those_of_the_server_by_engine(run: Run) -> None:
    for engine in run.engines:
        for theirs, ours in COUNTERS.items():
            counted = run.counted(ours, model_name="tiny", engine=engine)
            assert counted == pytest.approx(run.increase(theirs, engine=engine), rel=1e-9), ours
            assert counted > 0
        for position in run.positions:
            at = {"engine": engine, "position": position}
            ours = "specdec_accepted_tokens_per_position_total"
            assert run.counted(ours, **at) == run.increase(PER_POSITION, **at)


@every_run
def test_tokens_are_those_that_the_client_got(run: Run) -> None:
    first_tokens = len(run.load.completions)
    assert run.counted("specdec_decode_tokens_total") == run.load.tokens - first_tokens


@every_speculating_run
def test_acceptance_figures_are_quotients_of_the_counters(run: Run) -> None:
    steps = run.increase("vllm:inter_token_latency_seconds_count")
    drafts = run.increase("vllm:spec_decode_num_drafts_total")
    # vLLM 0.32 counts padding as rejected drafts of k tokens, of which N tells the number.
    padded = max(0.0, drafts - steps)
    real = drafts - padded
    drafted = run.increase("vllm:spec_decode_num_draft_tokens_total") - padded * len(run.positions)
    accepted = run.increase("vllm:spec_decode_num_accepted_tokens_total")
    at = [run.increase(PER_POSITION, position=position) for position in run.positions]
    assert run.figure("specdec_window_drafts") == drafts
    assert run.figure("specdec_num_speculative_tokens") == len(run.positions)
    for name, expected in {
        "specdec_acceptance_ratio": accepted / drafted,
        "specdec_front_acceptance_ratio": (at[0] + at[1]) / (real + min(real, drafted - real)),
        "specdec_mean_acceptance_length": 1 + accepted / real,
        "specdec_mean_draft_length": drafted / real,
        "specdec_draft_coverage_ratio": drafts / steps,
    }.items():
        assert run.figure(name) == pytest.approx(expected, rel=1e-9), name
    for position, count in zip(run.positions, at, strict=True):
        figure = run.figure("specdec_position_acceptance_ratio", position=position)
        assert figure == pytest.approx(count / real, rel=1e-9)


@every_run
def test_times_are_quotients_of_the_counters(run: Run) -> None:
    seconds = run.increase("vllm:inter_token_latency_seconds_sum")
    steps = run.increase("vllm:inter_token_latency_seconds_count")
    first_tokens = run.increase("vllm:time_to_first_token_seconds_count")
    tokens = run.increase("vllm:generation_tokens_total") - first_tokens
    for name, expected in {
        "specdec_tpot_seconds": seconds / tokens,
        "specdec_step_seconds": seconds / steps,
        "specdec_tokens_per_step": tokens / steps,
    }.items():
        assert run.figure(name) == pytest.approx(expected, rel=1e-9), name


@every_timed_run
def test_tpot_is_what_the_clients_clock_says(run: Run) -> None:
    tpot = run.figure("specdec_tpot_seconds")
    print(f"TPOT {1000 * tpot:.3f} ms, client's clock {1000 * run.load.tpot_seconds:.3f} ms")
    # Two engines and two API servers pass their tokens on through more processes than there are
    # cores, and in bursts.
    tolerance = CLOCK_TOLERANCE if len(run.engines) == 1 else 3 * CLOCK_TOLERANCE
    assert tpot == pytest.approx(run.load.tpot_seconds, rel=tolerance)


@every_run
def test_a_step_gives_no_more_tokens_than_a_chunk_of_the_streams_carries(run: Run) -> None:
    # Mostly the two are equal, but a server that falls behind sends several steps as one chunk.
    assert run.figure("specdec_tokens_per_step") <= run.load.tokens_per_chunk * (1 + 1e-9)


def test_gemma_4_with_its_assistant_shows_the_rates_that_it_was_given(gemma_mtp: Run) -> None:
    drafts = gemma_mtp.figure("specdec_window_drafts")
    p0, p1 = SYNTHETIC_RATES
    for position, rate in enumerate(SYNTHETIC_RATES):
        figure = gemma_mtp.figure("specdec_position_acceptance_ratio", position=str(position))
        # Drawn anew for every draft, so the binomial error is the true one here.
        assert figure == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / drafts))
    error = math.sqrt((p0 + 3 * p1 - (p0 + p1) ** 2) / drafts)
    mal = gemma_mtp.figure("specdec_mean_acceptance_length")
    assert mal == pytest.approx(1 + p0 + p1, abs=4 * error)
    assert error < 0.02, "too few drafts to tell"


def test_a_draft_model_is_good_at_code_worse_at_prose_and_bad_at_random_words(
    code: Run, prose: Run, random_words: Run
) -> None:
    assert 2.0 < code.figure("specdec_mean_acceptance_length") < 3.0
    assert 1.5 < prose.figure("specdec_mean_acceptance_length") < 2.0
    assert 1.1 < random_words.figure("specdec_mean_acceptance_length") < 1.5


def test_padding_after_prefix_hits_is_not_taken_for_rejected_drafts(
    first_time: Run, second_time: Run
) -> None:
    drafts, steps = "vllm:spec_decode_num_drafts_total", "vllm:inter_token_latency_seconds_count"
    assert first_time.increase(drafts) == first_time.increase(steps)
    assert second_time.increase(drafts) > second_time.increase(steps), "vLLM has padded nothing"
    # The same prompts have the same greedy answers, so nothing but the padding is different.
    truth = first_time.figure("specdec_mean_acceptance_length")
    assert second_time.figure("specdec_mean_acceptance_length") == pytest.approx(truth, rel=0.03)
    accepted = second_time.increase("vllm:spec_decode_num_accepted_tokens_total")
    assert 1 + accepted / second_time.increase(drafts) < 0.95 * truth
    assert second_time.figure("specdec_draft_coverage_ratio") > 1


def test_positions_decay(code: Run) -> None:
    ratios = [
        code.figure("specdec_position_acceptance_ratio", position=position)
        for position in ("0", "1", "2", "3")
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2 * ratios[3] > 0


def test_ngram_drafts_are_shorter_than_k_and_do_not_cover_every_step(ngram: Run) -> None:
    assert 1 <= ngram.figure("specdec_mean_draft_length") < NGRAM_K
    assert 0 < ngram.figure("specdec_draft_coverage_ratio") < 0.9


def test_without_speculation_k_is_0_and_there_is_no_figure_of_it(no_speculation: Run) -> None:
    assert no_speculation.figure("specdec_num_speculative_tokens") == 0
    for name in SPECULATION_GAUGES:
        assert no_speculation.exporter_after.all(name) == [], name
    assert no_speculation.figure("specdec_tokens_per_step") == 1


def test_two_engines_are_counted_apart_and_their_sums_divided(two_engines: Run) -> None:
    page = two_engines.exporter_after
    assert sorted(page.labels("specdec_drafts_total", "engine")) == ["0", "1"]
    accepted, drafts = (
        [two_engines.counted(name, engine=engine) for engine in ("0", "1")]
        for name in ("specdec_accepted_tokens_total", "specdec_drafts_total")
    )
    of_sums = 1 + sum(accepted) / sum(drafts)
    of_ratios = 1 + sum(a / d for a, d in zip(accepted, drafts, strict=True)) / 2
    assert two_engines.figure("specdec_mean_acceptance_length") == pytest.approx(of_sums, rel=1e-9)
    assert of_sums != pytest.approx(of_ratios, rel=1e-6), "these engines cannot tell the two apart"
