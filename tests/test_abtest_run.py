"""A run asks both sides the same, keeps what it measured whatever happens, and goes on from there."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from specdec_exporter import cli
from specdec_exporter.abtest.compare import compare
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.prompts import parse
from specdec_exporter.abtest.record import Run
from specdec_exporter.abtest.run import Plan, read, run

from tests.fake_openai import (
    CUT,
    STEP_SECONDS,
    Answer,
    FakeServer,
    delta,
    finish,
    refuses,
    saying,
    says,
    usage,
)

TEXT = """
workloads:
  - name: text
    expect: {pattern: fine}
    prompts:
      - {id: a, user: how are you}
      - {id: b, user: and you}
  - name: code
    prompts:
      - {id: c, user: print}
"""
PROMPTS = parse(TEXT, "f.yaml")
MAIN = "from specdec_exporter.cli import main; main()"
COMMAND = [sys.executable, "-W", "error", "-c", MAIN, "bench"]


@dataclass(frozen=True)
class Measured:
    run: Run
    remarks: str


def measure(server: FakeServer | str, out: Path, **changed: Any) -> Measured:
    usual: Mapping[str, Any] = {
        "url": server if isinstance(server, str) else server.url,
        "label": "ar",
        "prompts": PROMPTS,
        "repeat": 3,
        "concurrency": 1,
        "out": out,
        "seed": 1,
        "warmup": 2,
    }
    remarks = io.StringIO()
    asyncio.run(run(Plan(**{**usual, **changed}), Console(file=remarks, width=200)))
    return Measured(read(out), remarks.getvalue())


def failure(*arguments: Any, **changed: Any) -> str:
    with pytest.raises(BenchError) as caught:
        measure(*arguments, **changed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def keys(run: Run) -> list[tuple[str, str, int]]:
    return [(r.workload, r.prompt, r.repeat) for r in run.requests]


ALL = {(w, p, n) for w, p in (("text", "a"), ("text", "b"), ("code", "c")) for n in (1, 2, 3)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


# What is asked


def test_every_prompt_is_asked_so_often_and_warm_ups_are_apart(out: Path) -> None:
    with FakeServer(says("fine")) as server:
        measured = measure(server, out).run
    assert len(keys(measured)) == len(ALL)
    assert {*keys(measured)} == ALL
    assert [(r.workload, r.warmup) for r in measured.warmups] == [
        *[("text", True)] * 2,
        *[("code", True)] * 2,
    ]
    assert len(server.bodies) == len(ALL) + 4


def test_no_two_requests_begin_alike_and_both_sides_get_the_same(tmp_path: Path) -> None:
    heads = []
    for label in ("ar", "mtp"):
        with FakeServer(says("fine")) as server:
            measured = measure(server, tmp_path / f"{label}.jsonl", label=label).run
        prompts = server.prompts
        assert len({prompt[:20] for prompt in prompts}) == len(prompts)
        assert all(re.fullmatch(r"\[request [0-9a-f]{16}\]\n.*", prompt) for prompt in prompts)
        warm = len(measured.warmups)
        heads.append({*prompts} - {*prompts[:2], *prompts[warm + 4 : warm + 6]})
    assert len(heads[0] & heads[1]) == len(ALL)


def test_another_seed_asks_under_other_ids(tmp_path: Path) -> None:
    asked = []
    for seed in (1, 2):
        with FakeServer(says("fine")) as server:
            measure(server, tmp_path / f"{seed}.jsonl", seed=seed)
        asked.append({*server.prompts})
    assert asked[0].isdisjoint(asked[1])


def test_requests_are_in_flight_together_up_to_the_concurrency(out: Path) -> None:
    most = now = 0

    def answer(_: dict[str, Any]) -> Any:
        nonlocal most, now
        now += 1
        most = max(most, now)
        yield delta(content="fine")
        yield 0.05
        now -= 1
        yield from (finish(), usage(9))

    with FakeServer(answer) as server:
        measured = measure(server, out, concurrency=3, warmup=0).run
    assert {*keys(measured)} == ALL
    assert most == 3


# What is kept


def test_validity_and_tokens_are_kept_for_each_request(out: Path) -> None:
    def answer(body: dict[str, Any]) -> Any:
        text = body["messages"][0]["content"]
        return saying("fine" if "how are" in text else "bad", tokens=11)

    with FakeServer(answer) as server:
        measured = measure(server, out).run
    assert {(r.prompt, r.valid) for r in measured.requests} == {
        ("a", True),
        ("b", False),
        ("c", True),
    }
    for request in measured.requests:
        assert (request.prompt_tokens, request.completion_tokens) == (20, 11)
        assert request.finish_reason == "stop"
        assert request.output_speed is not None
        assert request.output_speed > 0


def test_figures_by_workload_come_from_the_servers_counters(out: Path) -> None:
    with FakeServer(says("fine", tokens=11), k=2) as server:
        measured = measure(server, out).run
    assert len(measured.spans) == 2
    for workload in compare(measured, measured).workloads:
        assert workload.a.num_speculative_tokens == 2
        assert workload.a.mean_acceptance_length == 2.0
        assert workload.a.acceptance_ratio == 0.5
        assert workload.a.tpot_seconds == pytest.approx(STEP_SECONDS * 1.4 / 2)
    assert compare(measured, measured).warnings == (
        # The same run on both sides is at the same time as itself.
        next(w for w in compare(measured, measured).warnings if "at once" in w),
    )


def test_what_vllm_says_of_each_request_is_kept(out: Path) -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 2}
    events = [
        delta(content="fine"),
        finish(),
        usage(7, metrics={"speculative_decoding": told}),
    ]
    with FakeServer(lambda _: events) as server:
        measured = measure(server, out).run
    (workload, _) = compare(measured, measured).workloads
    assert workload.a.request_mean_acceptance_length == 1.5
    assert workload.a.request_acceptance_ratio == 0.25


def test_two_servers_of_equal_conditions_give_no_warning(tmp_path: Path) -> None:
    runs = []
    for label, k in (("ar", 0), ("mtp", 2)):
        with FakeServer(says("fine", tokens=11), k=k) as server:
            runs.append(measure(server, tmp_path / f"{label}.jsonl", label=label).run)
    assert compare(*runs).warnings == ()


def test_other_traffic_and_prefix_hits_during_a_run_are_told(tmp_path: Path) -> None:
    with FakeServer(says("fine")) as server:
        clean = measure(server, tmp_path / "clean.jsonl").run

    def answer(body: dict[str, Any]) -> Any:
        server.others += 1
        server.hits += 10
        return saying("fine")

    with FakeServer(answer) as server:
        busy = measure(server, tmp_path / "busy.jsonl", label="mtp").run
    said = "\n".join(compare(clean, busy).warnings)
    assert "text: 50 % of the prompt tokens of mtp came from the prefix cache" in said
    assert "text: the server of mtp had at least 6 other requests meanwhile" in said
    assert " of ar" not in said


def test_other_flags_of_a_server_are_told(tmp_path: Path) -> None:
    runs = []
    for flag in ("True", "False"):
        with FakeServer(says("fine")) as server:
            server.flags = {"enable_prefix_caching": flag}
            runs.append(measure(server, tmp_path / f"{flag}.jsonl", label=flag).run)
    assert compare(*runs).warnings == (
        "the servers differ beyond speculation: enable_prefix_caching True and False",
    )


def test_a_server_without_counters_is_measured_all_the_same(out: Path) -> None:
    with FakeServer(says("fine"), metrics=False) as server:
        measured = measure(server, out)
    assert {*keys(measured.run)} == ALL
    assert "no counters of the server, so no acceptance and no MAL: status 404" in measured.remarks
    assert all(span.before is None for span in measured.run.spans)


# Going on


def test_a_second_run_measures_what_is_missing_and_nothing_twice(out: Path) -> None:
    with FakeServer(says("fine"), k=1) as server:
        measure(server, out, repeat=1)
        asked = len(server.bodies)
        measured = measure(server, out)
        assert len(server.bodies) == asked + 6 + 4
        assert len(keys(measured.run)) == len(ALL)
        assert {*keys(measured.run)} == ALL
        assert "3 measured before, 6 to go" in measured.remarks
        again = measure(server, out)
        assert len(server.bodies) == asked + 6 + 4
        assert again.run == measured.run
    (workload, _) = compare(measured.run, measured.run).workloads
    assert workload.a.mean_acceptance_length == 2.0
    assert not any("other requests" in w for w in compare(measured.run, measured.run).warnings)


def test_a_file_that_was_cut_off_anywhere_is_gone_on_with(out: Path) -> None:
    with FakeServer(says("fine")) as server:
        measure(server, out, repeat=2)
        whole = out.read_bytes()
        for length in (len(whole) - 1, len(whole) // 2, len(whole) // 3):
            out.write_bytes(whole[:length])
            measured = measure(server, out, repeat=2).run
            assert sorted(keys(measured)) == sorted(key for key in ALL if key[2] <= 2)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"label": "mtp"}, "label"),
        ({"seed": 2}, "seed"),
        ({"concurrency": 2}, "concurrency"),
        ({"prompts": parse(TEXT.replace("print", "other"), "f.yaml")}, "prompts"),
    ],
)
def test_a_file_is_not_gone_on_with_under_other_conditions(
    changed: dict[str, Any], name: str, out: Path
) -> None:
    with FakeServer(says("fine")) as server:
        measure(server, out, repeat=1)
        held = out.read_bytes()
        said = failure(server, out, **changed)
    assert said.startswith(f"{out} holds a run with another {name} (")
    assert out.read_bytes() == held


def test_a_file_of_something_else_is_not_written_to(out: Path) -> None:
    out.write_text("my diary\n")
    with FakeServer(says("fine")) as server:
        assert failure(server, out).startswith(f"{out}:1: not a line of a measurement")
    assert out.read_text() == "my diary\n"


# Trouble


def test_a_server_that_is_not_there_is_told(out: Path) -> None:
    with FakeServer(says("fine")) as server:
        url = server.url
    said = failure(url, out)
    assert re.fullmatch(rf"{url} does not answer \(.*\); is it up\?", said)
    assert not out.exists()


def test_what_is_no_such_server_is_told(out: Path) -> None:
    with FakeServer(says("fine")) as server:
        assert "no list of models" in failure(f"{server.url}/nothing", out)
        assert failure(server, out, model="other").endswith("has no model 'other'; it has fake")


def test_a_server_that_goes_away_leaves_what_was_measured(out: Path) -> None:
    def answer(_: dict[str, Any]) -> Any:
        if len(server.bodies) > 5:
            server.leave()
            return [delta(content="fi"), CUT]
        return saying("fine")

    with FakeServer(answer) as server:
        said = failure(server, out)
    held = read(out).requests
    assert len(held) >= 3
    assert [r.failure is None for r in held[:3]] == [True] * 3
    assert said.endswith(
        f"{len(held)} requests are kept in {out}, and the same command goes on from there"
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: [delta(content="fi"), CUT], "the stream broke off"),
        (refuses(500, "engine is dead"), "status 500: engine is dead"),
    ],
    ids=["cut", "status 500"],
)
def test_requests_that_fail_in_the_middle_are_kept_and_told(
    answer: Answer, why: str, out: Path
) -> None:
    def sometimes(body: dict[str, Any]) -> Any:
        return answer(body) if len(server.bodies) in (4, 5) else saying("fine")

    with FakeServer(sometimes) as server:
        measured = measure(server, out)
    failures = [r.failure for r in measured.run.requests if r.failure is not None]
    assert len(failures) == 2
    assert all(f.startswith(why) for f in failures)
    assert {*keys(measured.run)} == ALL
    assert f"{out}: 9 requests, 7 valid, 2 failed" in measured.remarks
    assert f"failed 2 times: {failures[0]}" in measured.remarks


def test_a_workload_that_the_server_refuses_is_left_out_and_told(out: Path) -> None:
    def answer(body: dict[str, Any]) -> Any:
        if "print" in body["messages"][0]["content"]:
            return refuses(400, "no code here")(body)
        return saying("fine")

    with FakeServer(answer) as server:
        measured = measure(server, out)
    assert {w for w, _, _ in keys(measured.run)} == {"text"}
    assert "code is left out: status 400: no code here" in measured.remarks


def test_a_server_that_refuses_everything_is_told(out: Path) -> None:
    with FakeServer(refuses(400, "no")) as server:
        assert failure(server, out).endswith("refuses every workload; nothing was measured")


def test_a_server_without_usage_is_told_at_once(out: Path) -> None:
    with FakeServer(lambda _: [delta(content="fine"), finish()]) as server:
        said = failure(server, out)
        assert len(server.bodies) == 1
    assert "sends no usage with its streams, without which there are no tokens to count" in said


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with FakeServer(says("fine")) as server:
        said = failure(server, tmp_path / "file" / "out.jsonl", prompts=PROMPTS)
    assert "cannot write" in said or "Not a directory" in said


# The commands


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.yaml"
    file.write_text(TEXT)
    return file


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a bench command in this process; its code and what it printed and told."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specdec-exporter", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return command


Command = Callable[..., tuple[int, str, str]]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ctrl_c_keeps_what_was_measured_and_the_command_goes_on(
    out: Path, prompts: Path, command: Command
) -> None:
    arguments = ("--label", "ar", "--prompts", prompts, "--repeat", "3", "--out", out)
    slow: Answer = lambda _: [delta(content="fine"), 0.1, finish(), usage(9)]  # noqa: E731
    with FakeServer(slow) as server:
        words = map(str, ("run", "--url", server.url, *arguments))
        with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True) as process:
            until(lambda: out.exists() and len(server.bodies) >= 6)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
        held = keys(read(out))
        assert process.returncode == 130
        assert told.splitlines()[-1] == (
            f"stopped: {len(held)} requests are kept in {out}, and the same command goes on from there"
        )
        assert "Traceback" not in told
        assert 0 < len(held) < len(ALL)
        server.answer = says("fine")
        code, _, told = command("run", "--url", server.url, *arguments)
        assert code == 0, told
    assert sorted(keys(read(out))) == sorted(ALL)


def test_the_commands_measure_and_compare(tmp_path: Path, prompts: Path, command: Command) -> None:
    files = []
    for label, k in (("ar", 0), ("mtp", 2)):
        files.append(tmp_path / f"{label}.jsonl")
        with FakeServer(says("fine"), k=k) as server:
            arguments = ("--url", f"{server.url}/v1/", "--label", label, "--prompts", prompts)
            ended = command("run", *arguments, "--repeat", "2", "--out", files[-1])
        assert ended == (0, "", f"{files[-1]}: 6 requests, 6 valid, 0 failed\n")
    code, printed, told = command("compare", *files)
    assert (code, told) == (0, "")
    assert printed.startswith("ar->mtp")
    code, printed, _ = command("compare", *files, "--format", "json")
    assert json.loads(printed)["workloads"][0]["b"]["mean_acceptance_length"] == 2.0
    code, printed, _ = command("compare", *files, "--format", "html")
    assert printed.startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "--url", "x", "--label", "a", "--prompts", "default", "--out", "o"],
            "--url: 'x' is",
        ),
        (
            [
                "run",
                "--url",
                "http://127.0.0.1:1",
                "--label",
                "a",
                "--prompts",
                "none",
                "--out",
                "o",
            ],
            "none: No such file or directory; give a YAML file of prompts, or default",
        ),
        (
            [
                "run",
                "--url",
                "http://127.0.0.1:1",
                "--label",
                "a",
                "--prompts",
                "default",
                "--out",
                "o",
            ],
            "http://127.0.0.1:1 does not answer (",
        ),
        (["compare", "none.jsonl", "none.jsonl"], "none.jsonl: No such file or directory"),
        (["import-csv", "none.csv"], "none.csv: No such file or directory"),
        (
            ["sweep", "--k", "0,x", "--prompts", "default", "--serve-command", "a", "--out", "o"],
            "--k: '0,x' is no list of numbers",
        ),
        (
            ["sweep", "--k", "0", "--prompts", "default", "--serve-command", "a", "--out", "o"],
            "--serve-command: expected {speculative_config} once",
        ),
        (
            [
                *(
                    "sweep",
                    "--k",
                    "0",
                    "--prompts",
                    "default",
                    "--serve-command",
                    "a",
                    "--out",
                    "o",
                ),
                *("--speculative-config", '{"num_speculative_tokens": 2}'),
            ],
            "--speculative-config: expected a JSON object without num_speculative_tokens",
        ),
    ],
)
def test_a_wrong_command_is_told_in_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, told = command(*arguments)
    assert (code, printed) == (1, "")
    (line,) = told.splitlines()
    assert line.startswith(f"specdec-exporter: {said}")
