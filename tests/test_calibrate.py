"""`calibrate` drives a server at each load and writes what its counters say, or says why it cannot."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.baseline import Baseline
from specdec_exporter.calibrate import CalibrationError, Plan, describe, from_recordings, measure

from tests import pages
from tests.pages import H200
from tests.test_cli import Run, run  # noqa: F401 - the fixture


class Server:
    """Streams tokens that take 3 ms and another 0.1 ms for each request in decode, by its counters."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.most_running = 0
        self.counted = {
            "generation_tokens_total": 0.0,
            "time_to_first_token_seconds_count": 0.0,
            "inter_token_latency_seconds_sum": 0.0,
            "inter_token_latency_seconds_count": 0.0,
            "iteration_tokens_total_count": 0.0,
            "prompt_tokens_total": 0.0,
            "prompt_tokens_cached_total": 0.0,
        }
        self.models = ["m"]
        self.extra = ""
        self.prompts: list[str] = []
        self.lengths: list[int] = []
        self.status = 200

    def page(self) -> bytes:
        with self.lock:
            return (
                "".join(
                    f'vllm:{name}{{engine="0",model_name="{model}"}} {value}\n'
                    for model in self.models
                    for name, value in self.counted.items()
                ).encode()
                + self.extra.encode()
            )

    def complete(self, body: dict[str, Any], write: Any) -> None:
        with self.lock:
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            self.prompts.append(body["prompt"])
            self.lengths.append(body["max_tokens"])
            self.counted["prompt_tokens_total"] += len(body["prompt"].split())
        for token in range(body["max_tokens"]):
            time.sleep(0.003)
            with self.lock:
                self.counted["generation_tokens_total"] += 1
                if token == 0:
                    self.counted["time_to_first_token_seconds_count"] += 1
                else:
                    self.counted["inter_token_latency_seconds_count"] += 1
                    self.counted["inter_token_latency_seconds_sum"] += 0.003 + 0.0001 * self.running
                    self.counted["iteration_tokens_total_count"] += 1 / self.running
            write(b"data: {}\n\n")
        with self.lock:
            self.running -= 1


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            body = b'{"version": "1.2.3"}' if self.path == "/version" else server.page()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/completions"
            assert body["model"] == "m"
            assert body["stream"] is True
            self.send_response(server.status)
            self.end_headers()
            if server.status != 200:
                self.wfile.write(b'{"error": "max_tokens\nis too large"}')
                return
            server.complete(body, self.wfile.write)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()


def plan(url: str, *concurrency: int, **more: Any) -> Plan:
    plain = Plan(f"{url}/metrics", concurrency, seconds=2.0, max_tokens=60)
    return replace(plain, **more)


def measured(server: Server, *concurrency: int, **more: Any) -> Baseline:
    with serving(server) as url:
        baseline, _ = asyncio.run(measure(plan(url, *concurrency, **more)))
        assert server.running == 0
    return baseline


def refused(server: Server, **more: Any) -> str:
    with pytest.raises(CalibrationError) as caught:
        measured(server, 2, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_server_is_measured_at_each_concurrency_and_let_drain() -> None:
    server = Server()
    made = measured(server, 2, 6)
    assert server.most_running == 6
    assert (made.source, made.model_name, made.engine_version) == ("measured", "m", "1.2.3")
    assert abs(made.taken_at - time.time()) < 60
    low, high = made.points
    # Between an answer and the next question a client is not in decode.
    assert low.decode_concurrency == pytest.approx(2, rel=0.25)
    assert high.decode_concurrency == pytest.approx(6, rel=0.25)
    for point in (low, high):
        expected = 0.003 + 0.0001 * point.decode_concurrency
        assert point.tpot_seconds == pytest.approx(expected, rel=0.02)
    assert min(server.lengths) >= 30
    assert max(server.lengths) <= 90
    assert len(set(server.prompts)) == len(server.prompts)
    assert made.conditions.context_tokens == pytest.approx(100 + 30, rel=0.2)
    assert made.conditions.prefix_hit_ratio == 0
    assert any("3." in line and "ms" in line for line in describe(made))


def test_prompts_of_a_file_are_asked_in_turn() -> None:
    server = Server()
    measured(server, 1, prompts=("one", "two", "three"))
    assert server.prompts[:4] == ["one", "two", "three", "one"]


def test_a_server_that_speculates_is_refused() -> None:
    server = Server()
    server.extra = "".join(
        f"{line}\n" for line in pages.lines(pages.counters()) if "spec_decode" in line
    )
    said = refused(server)
    assert said.startswith("the server speculates (k = 2), and a baseline is without")
    assert server.prompts == []


def test_of_several_models_one_must_be_named() -> None:
    server = Server()
    server.models = ["m", "n"]
    assert refused(server) == "the server has several models: give --model, m, n"
    assert refused(server, model_name="x") == "the server has no model 'x'; there is m, n"


def test_a_completion_that_fails_is_told_with_the_servers_words() -> None:
    server = Server()
    server.status = 400
    assert refused(server) == (
        "at concurrency 2: the server answered a completion with 400: "
        '{"error": "max_tokens is too large"}'
    )


def test_recordings_of_several_models_or_none_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    lines = list(pages.lines(replace(pages.counters(), drafts=None), model_name="other"))
    other.write_text(json.dumps({"t": 0, "m": [x for x in lines if "spec_decode" not in x]}) + "\n")
    with pytest.raises(CalibrationError, match="they are of gemma4-e4b-shape, other"):
        from_recordings([(H200 / "series_k0.jsonl", ""), (other, "")])
    with pytest.raises(CalibrationError, match="no steady load"):
        from_recordings([(other, "")])
    other.write_text("broken\n")
    with pytest.raises(CalibrationError, match="they are of none"):
        from_recordings([(other, "")])


# The command


def test_the_command_writes_a_file_that_replay_takes(run: Run, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "baseline.json"
    made = run("calibrate", "--from-series", H200 / "series_k0.jsonl", "--out", out)
    assert made.code == 0
    assert "series_k0.jsonl: left out 38.8 s to 52.4 s" in made.line
    assert made.out.endswith(f"written to {out}\n")
    shown = run("replay", H200 / "series_k1.jsonl", "--baseline", out)
    assert shown.code == 0
    assert "gain" in shown.out.splitlines()[1]
    refusal = run("replay", pages.CPU / "series_draft-real-k4.jsonl", "--baseline", out)
    assert refusal.code == 0
    assert "baseline refused: it is of model 'gemma4-e4b-shape'" in refusal.line


def test_several_recordings_make_one_curve(run: Run, tmp_path: Path) -> None:  # noqa: F811
    rows = (H200 / "series_k0.jsonl").read_text().splitlines()
    for name, part in (("a", rows[:11]), ("b", rows[11:33])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    out = tmp_path / "baseline.json"
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    assert run("calibrate", "--from-series", *both, "--out", out).code == 0
    assert len(Baseline.from_json(out.read_text()).points) == 3


def test_the_command_drives_a_server(run: Run, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "baseline.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    server = Server()
    with serving(server) as url:
        made = run(
            *("calibrate", "--url", url, "--concurrency", "2", "--duration", "2s"),
            *("--prompts", prompts, "--max-tokens", "60", "--out", out),
        )
    assert made.code == 0, made.err
    assert set(server.prompts) == {"one", "two"}
    assert Baseline.from_json(out.read_text()).points[0].tpot_seconds == pytest.approx(
        0.0032, rel=0.05
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either --url URL or --from-series PATHS"),
        (["--url", "http://127.0.0.1:1", "--from-series", "x.jsonl"], "either --url"),
        (["x.jsonl"], "either --url"),
        (["--url", "http://127.0.0.1:1", "--out", "no/such/folder.json"], "no such folder"),
        (["--url", "http://127.0.0.1:1", "--concurrency", "1,x"], "expected numbers from 1 on"),
        (["--url", "http://127.0.0.1:1", "--concurrency", "0"], "expected numbers from 1 on"),
        (["--url", "http://127.0.0.1:1", "--duration", "x"], "is not a duration"),
        (["--url", "http://127.0.0.1:1", "--prompts", "nothing.txt"], "nothing.txt: No such file"),
        (["--url", "http://127.0.0.1:1"], "cannot connect"),
        (["--url", "ftp://x"], "is not a URL"),
        (["--from-series", "nothing.jsonl"], "nothing.jsonl: No such file"),
        (["--from-series", str(H200 / "series_k2.jsonl")], "the server speculates"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("calibrate", *arguments)
    assert ended.code == 1
    assert said in ended.line
    assert list(tmp_path.iterdir()) == []
