"""The restart command runs without a shell and within its time; the server is asked until it is ready."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.act.ready import Server
from specdec_exporter.act.restart import run

from tests import pages
from tests.hostile import Exchange, HostileServer, response

PYTHON = (sys.executable, "-S", "-I", "-c")


def python(code: str, timeout: float = 20) -> None:
    asyncio.run(run((*PYTHON, code), timeout))


def failure(code: str, timeout: float = 20) -> ActError:
    with pytest.raises(ActError) as caught:
        python(code, timeout)
    return caught.value


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_arguments_arrive_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'w').write(repr(sys.argv[1:]))"
    asyncio.run(run((*PYTHON, code, "a b", "$HOME", "; touch x", "*"), 20))
    assert out.read_text() == "['a b', '$HOME', '; touch x', '*']"


def test_the_command_has_no_input_and_none_of_our_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECDEC_ADMIN_TOKEN", "hunter2")
    monkeypatch.setenv("KUBECONFIG", "/etc/k")
    python(
        "import os, sys; assert sys.stdin.read() == ''; assert os.environ['KUBECONFIG'] == '/etc/k'; "
        "assert not [n for n in os.environ if n.startswith('SPECDEC_')]"
    )


def test_a_command_that_fails_is_told_of_by_its_last_line_and_its_last_words_are_kept() -> None:
    error = failure("print('x' * 5000); print('one\\x1b[31m'); print('two'); raise SystemExit(3)")
    assert str(error) == f"restart: {sys.executable!r} ended with status 3: two"
    assert len(error.output) <= 2000
    assert error.output.endswith("x\none[31m\ntwo")


def test_what_looks_like_a_credential_is_not_kept() -> None:
    said = [
        "Authorization: Bearer hunter2",
        "password=hunter2",
        '"api_key": "hunter2"',
        "HF_TOKEN=hunter2",
        "fetch https://me:hunter2@host/x",
        "SECRET: hunter2,",
        "curl -H 'bearer hunter2'",
    ]
    error = failure(f"print({chr(10).join(said)!r}); raise SystemExit(1)")
    assert "hunter2" not in f"{error} {error.output}"
    assert "host/x" in error.output


def test_a_command_that_was_killed_or_says_nothing_is_told_of() -> None:
    assert str(failure("import os; os.kill(os.getpid(), 9)")).endswith(
        "signal 9: it printed nothing"
    )


@pytest.mark.parametrize("command", [("/no/such/command",), ("/",), ("a\0b",)])
def test_a_command_that_cannot_be_run_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="cannot be run"):
        asyncio.run(run(command, 20))


def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, time; child = os.fork(); print('waiting', flush=True); "
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(300)"
    )
    error = failure(code, timeout=2)
    assert str(error).endswith("did not end within 2s")
    assert "waiting" in error.output
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in found):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_command_is_ended_when_its_caller_is_cancelled(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); "
        f"os.rename({str(pid)!r}, {str(pid) + 's'!r}); time.sleep(300)"
    )

    async def cancelled() -> None:
        task = asyncio.create_task(run((*PYTHON, code), 60))
        while not os.path.exists(f"{pid}s"):  # noqa: ASYNC110, ASYNC240 - another process makes it
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not alive(int(Path(f"{pid}s").read_text()))


def test_a_server_that_the_command_leaves_running_outlives_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    python(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); time.sleep(0.2); print('still here', flush=True)\n"
        f"    open({str(done)!r}, 'w').close()"
    )
    deadline = time.monotonic() + 60
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_event_loop_goes_on_while_a_command_runs() -> None:
    async def both() -> int:
        turns = 0
        task = asyncio.create_task(run((*PYTHON, "import time; time.sleep(0.3)"), 20))
        while not task.done():
            turns += 1
            await asyncio.sleep(0.01)
        await task
        return turns

    assert asyncio.run(both()) > 3


# Until the server is ready

TWO = pages.page(pages.counters())
ONE = pages.page(pages.counters(per_position=(47.0,)))


def served(answer: object, **settings: object) -> int:
    with HostileServer(answer) as http:  # type: ignore[arg-type]
        server = Server(http.url, "m", **settings)  # type: ignore[arg-type]
        return asyncio.run(server.served_k())


def test_k_is_the_number_of_positions_and_0_without_speculation() -> None:
    plain = b"".join(x for x in TWO.splitlines(keepends=True) if b"spec_decode" not in x)
    assert [served(response(p)) for p in (TWO, ONE, plain)] == [2, 1, 0]
    assert served(response(pages.page(pages.counters(), prefix="ray_")), metric_prefix="ray_") == 2


def test_a_page_that_does_not_tell_k_is_told_of() -> None:
    two_engines = b"\n".join([TWO.rstrip(), ONE.replace(b'engine="0"', b'engine="1"')])
    for page, why in (
        (two_engines, r"engines with k = \[1, 2\] of model 'm'"),
        (TWO.replace(b'"m"', b'"other"'), "no engine of model 'm'"),
        (b"<html>", "metrics: not a metrics page"),
    ):
        with pytest.raises(ActError, match=why):
            served(response(page))


def wait(answer: object, k: int, timeout: float, ready: str | None = None) -> None:
    with HostileServer(answer) as http:  # type: ignore[arg-type]
        url = None if ready is None else http.url.replace("/metrics", ready)
        server = Server(http.url, "m", ready_url=url, poll_seconds=0.01)
        asyncio.run(server.wait_for(k, timeout))


def test_the_old_server_is_not_taken_for_the_new_one() -> None:
    numbers: list[int] = []

    def answer(exchange: Exchange) -> None:
        numbers.append(exchange.number)
        exchange.send(response(TWO if exchange.number < 3 else ONE))

    wait(answer, 1, 20)
    assert numbers == [0, 1, 2, 3]


def test_a_server_whose_ready_url_says_no_is_waited_for() -> None:
    asked: list[bytes] = []

    def answer(exchange: Exchange) -> None:
        path = exchange.head.split()[1]
        asked.append(path)
        starting = path == b"/health" and asked.count(b"/health") < 3
        exchange.send(response(ONE, status="503 Starting" if starting else "200 OK"))

    wait(answer, 1, 20, "/health")
    assert asked == [b"/health", b"/health", b"/health", b"/metrics"]


def test_a_server_that_is_not_ready_in_time_is_told_of_by_what_was_seen_last() -> None:
    for answer, seen in (
        (response(TWO), "it serves k = 2; does its command line set another k?"),
        (response(b"", status="503 Starting"), "metrics: status 503 Starting"),
    ):
        with pytest.raises(ActError, match="the server has no k = 1 within 200ms: ") as caught:
            wait(answer, 1, 0.2)
        assert seen in str(caught.value)


def test_a_server_that_holds_a_request_does_not_hold_the_time_limit() -> None:
    begun = time.monotonic()
    with pytest.raises(ActError, match="nothing was seen"):
        wait(Exchange.hold, 1, 0.2)
    assert time.monotonic() - begun < 4, os.getloadavg()
