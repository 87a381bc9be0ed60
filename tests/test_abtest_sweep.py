"""Where drafting deeper stops to add tokens and where it stops to pay, with the spread of starts."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from specdec_exporter.abtest import sweep_run
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.html import sweep_page
from specdec_exporter.abtest.plot import round_numbers, ticks
from specdec_exporter.abtest.prompts import parse
from specdec_exporter.abtest.record import Request, Run, Session, Span
from specdec_exporter.abtest.run import Plan
from specdec_exporter.abtest.serve import command, serving
from specdec_exporter.abtest.sweep import Start, client_tpot, start_figures, summarise
from specdec_exporter.abtest.sweep_run import SweepPlan, print_sweep, sweep

from tests.fake_openai import STEP_SECONDS, FakeServer, says
from tests.real.vllm_bed import free_port
from tests.test_abtest_compare import assert_stands_alone

ROOT = Path(__file__).resolve().parents[1]


def start(k: int, tpot: float, length: float | None = None, n: int = 1, **fields: Any) -> Start:
    return Start(
        **{
            "k": k,
            "start": n,
            "concurrency": 1,
            "requests": 10,
            "valid": 10,
            "observed_k": k,
            "mean_acceptance_length": length,
            "acceptance_ratio": None if length is None else (length - 1) / k,
            "position_acceptance_ratio": (),
            "tpot_seconds": tpot,
            "client_tpot_seconds": tpot,
            "step_seconds": tpot * (length or 1.0),
            "tokens_per_step": length or 1.0,
            "decode_concurrency": 1.0,
            "prefix_hit_ratio": 0.0,
            "other_requests": 0,
            **fields,
        }
    )


GUIDE = [start(0, 0.0047), start(1, 0.0039, 1.47), start(2, 0.0043, 1.71), start(4, 0.0073, 1.77)]
"""H200 at the guide's acceptance, one request at a time: deeper than 1 costs more than it adds."""


def test_the_k_where_mal_stops_growing_need_not_be_the_fastest() -> None:
    result = summarise(GUIDE)
    assert (result.stops_growing_at, result.fastest) == (2, 1)
    assert [d.marginal_tokens for d in result.depths] == pytest.approx([None, 0.47, 0.24, 0.03])
    gains = [d.gain and d.gain.median for d in result.depths]
    assert gains == pytest.approx([None, 1 - 39 / 47, 1 - 43 / 47, 1 - 73 / 47])


def test_marginal_tokens_are_by_position_where_k_were_left_out() -> None:
    result = summarise([start(2, 0.004, 1.8), start(6, 0.005, 2.2)])
    assert [d.marginal_tokens for d in result.depths] == pytest.approx([0.4, 0.1])
    assert result.stops_growing_at is None
    assert [d.gain for d in result.depths] == [None, None]


def test_a_drafter_that_never_works_stops_at_0_and_none_is_fastest() -> None:
    result = summarise([start(0, 0.004), start(2, 0.006, 1.05)])
    assert (result.stops_growing_at, result.fastest) == (0, 0)


def test_each_figure_has_the_spread_between_starts() -> None:
    starts = [
        *(start(0, tpot, n=n) for n, tpot in enumerate((0.0100, 0.0101, 0.0102), 1)),
        *(start(1, tpot, 1.5, n=n) for n, tpot in enumerate((0.0080, 0.0104, 0.0090), 1)),
    ]
    depth = summarise(starts).depths[1]
    assert depth.tpot_seconds is not None
    assert depth.gain is not None
    spread = depth.tpot_seconds
    assert (spread.median, spread.low, spread.high) == (0.0090, 0.0080, 0.0104)
    # Round by round: 1 − 80/100, 1 − 104/101, 1 − 90/102.
    gains = depth.gain.median, depth.gain.low, depth.gain.high
    assert gains == pytest.approx((1 - 90 / 102, 1 - 104 / 101, 0.2))


def test_k_whose_starts_overlap_are_not_told_apart() -> None:
    def of(slower: float) -> tuple[int, ...]:
        starts = [
            *(start(1, tpot, 1.5, n=n) for n, tpot in enumerate((0.008, 0.009, 0.010), 1)),
            *(start(2, tpot * slower, 1.7, n=n) for n, tpot in enumerate((0.008, 0.009, 0.010), 1)),
        ]
        result = summarise(starts)
        assert result.fastest == 1
        return result.not_worse

    assert of(1.2) == (2,)
    assert of(1.3) == ()


def test_what_makes_starts_unlike_is_told() -> None:
    starts = [
        replace(GUIDE[0], observed_k=None),
        replace(GUIDE[1], observed_k=2),
        replace(GUIDE[2], other_requests=3),
        replace(GUIDE[3], valid=9),
    ]
    assert [w.partition(": ")[2] for w in summarise(starts).warnings] == [
        "the server showed no counters, so times are by the clients' clock",
        "the server runs k = 2; does the command use it?",
        "at least 3 other requests meanwhile",
        "1 of 10 answers are not valid",
    ]


def test_the_clients_time_per_token_weighs_every_token_the_same() -> None:
    def request(seconds: float, tokens: int, **fields: Any) -> Request:
        return Request("w", "p", 1, 0.0, 1.0, 1.0 + seconds, 9, tokens, "stop", **fields)

    requests = [request(1.0, 101), request(9.0, 301), request(5.0, 10, failure="cut")]
    assert client_tpot(requests) == pytest.approx(10 / 400)
    assert client_tpot([]) is None


def test_without_counters_the_clients_clock_is_taken() -> None:
    requests = tuple(Request("w", "p", n, 0.0, 1.0, 2.0, 9, 101, "stop") for n in (1, 2))
    run = Run((Session("k2", concurrency=3),), (Span(0, "w", requests, None, None),), ())
    found = start_figures(run, 2, 1)
    assert found.tpot_seconds == found.client_tpot_seconds == pytest.approx(0.01)
    assert (found.concurrency, found.observed_k, found.mean_acceptance_length) == (3, None, None)


# How it is shown


def test_the_page_of_a_sweep_stands_alone_and_names_both_k() -> None:
    tags = assert_stands_alone(sweep_page(summarise(GUIDE, "a <b>model</b>")))
    assert "a <b>model</b>" in tags.text
    for words in ("stops growing", "fastest", "k = 2", "k = 1"):
        assert words in tags.text


def test_a_sweep_is_a_table_with_a_row_for_each_k(capsys: pytest.CaptureFixture[str]) -> None:
    print_sweep(summarise(GUIDE), Console(width=160))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()[1:5]]
    assert [row[0] for row in rows] == ["0", "1", "2", "4"]
    assert rows[1][1:5] == ["1.47", "0.47", "3.90", "17.0"]
    assert "MAL stops growing: k = 2 (" in printed
    assert "Fastest: k = 1 (least median time per output token; one start each" in printed


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(1, 9))
def test_an_axis_has_a_handful_of_round_numbers_and_holds_all_values(
    low: float, length: float, most: int
) -> None:
    high = low + length
    first, last = round_numbers(low, high)
    slack = 1e-6 * (abs(low) + length)
    assert first <= low + slack
    assert last >= high - slack
    found = ticks(first, last, most)
    assert len(found) <= most + 1
    assert found == sorted(found)


# Serving


def test_the_place_in_braces_becomes_the_option_and_nothing_at_0() -> None:
    template = "serve 'a model' {speculative_config} --port 8000"
    config = {"method": "mtp", "model": "some drafter"}
    assert command(template, config, 0) == ["serve", "a model", "--port", "8000"]
    *_, option, value, port, number = command(template, config, 2)
    assert (option, port, number) == ("--speculative-config", "--port", "8000")
    assert json.loads(value) == {**config, "num_speculative_tokens": 2}


@pytest.mark.parametrize("template", ["serve", "serve 'x", "serve --x={speculative_config}"])
def test_a_command_that_cannot_be_used_is_told(template: str) -> None:
    with pytest.raises(BenchError, match=r"^--serve-command: "):
        command(template, {}, 1)


def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('loading'); raise SystemExit('no such model')"]
    log = tmp_path / "log"
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(BenchError, match=r"ended with status 1: .*no such model"),
        serving(words, url, log),
    ):
        pytest.fail("it has started")
    with pytest.raises(BenchError, match="cannot start /no/such"), serving(["/no/such"], url, log):
        pytest.fail("it has started")


def test_nothing_is_started_beside_a_server_that_is_there(tmp_path: Path) -> None:
    with (
        FakeServer(says("x")) as server,
        pytest.raises(BenchError, match=r"something listens at .* already"),
        serving([sys.executable, "-c", "open('started', 'w')"], server.url, tmp_path / "log"),
    ):
        pytest.fail("it has started")


PROMPTS = parse("workloads: [{name: w, prompts: [{id: p, user: hello}]}]", "f.yaml")


def plan(folder: Path, **changed: Any) -> SweepPlan:
    port = free_port()
    one = Plan(
        url=f"http://127.0.0.1:{port}",
        label="",
        prompts=PROMPTS,
        repeat=3,
        concurrency=1,
        out=folder,
        seed=1,
        warmup=1,
    )
    usual: Mapping[str, Any] = {
        "ks": (0, 1, 2),
        "starts": 1,
        "serve_command": f"serve {{speculative_config}} --port {port}",
        "speculative_config": {},
        "folder": folder,
        "plan": one,
    }
    return SweepPlan(**{**usual, **changed})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The k of each server that was asked for, all of which run in this process."""
    ks: list[int] = []

    @contextlib.contextmanager
    def serving_here(words: list[str], url: str, log: Path) -> Iterator[None]:
        ks.append(json.loads(words[2])["num_speculative_tokens"] if len(words) > 3 else 0)
        with FakeServer(says("ok"), k=ks[-1], port=int(words[-1])):
            yield

    monkeypatch.setattr(sweep_run, "serving", serving_here)
    return ks


def test_a_server_is_there_until_the_end_and_then_gone(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    path = f"PYTHONPATH={ROOT}:{ROOT / 'exporter'}"
    words = ["env", path, sys.executable, "-m", "tests.fake_openai", "--port", str(port)]
    with serving(words, url, tmp_path / "log"):
        assert httpx.get(f"{url}/version", trust_env=False).json() == {"version": "0.32.0"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_sweep_serves_at_each_k_and_its_figures_are_the_servers(
    tmp_path: Path, served: list[int]
) -> None:
    tried = plan(tmp_path / "out")
    result = sweep(tried, Console(quiet=True))
    assert [d.k for d in result.depths] == [0, 1, 2]
    for depth in result.depths:
        (one,) = depth.starts
        assert (one.observed_k, one.requests, one.valid) == (depth.k, 3, 3)
        step = STEP_SECONDS * (1 + depth.k / 5)
        assert one.step_seconds == pytest.approx(step)
        assert one.tpot_seconds == pytest.approx(step / 2 if depth.k else step)
        assert one.mean_acceptance_length == (2.0 if depth.k else None)
    assert (result.stops_growing_at, result.fastest) == (1, 1)
    told = json.loads((tmp_path / "out" / "sweep.json").read_text())
    first = told["depths"][1]["starts"][0]
    for name in ("k", "start", "concurrency", "tpot_seconds", "step_seconds", "tokens_per_step"):
        assert isinstance(first[name], int | float), name
    assert_stands_alone((tmp_path / "out" / "sweep.html").read_text())

    # The second time nothing is left to be measured, so nothing is started.
    assert sweep(tried, Console(quiet=True)) == result
    assert served == [0, 1, 2]


def test_a_sweep_goes_in_rounds_over_all_k(tmp_path: Path, served: list[int]) -> None:
    result = sweep(plan(tmp_path, ks=(0, 2), starts=2), Console(quiet=True))
    assert served == [0, 2, 0, 2]
    assert [len(depth.starts) for depth in result.depths] == [2, 2]
