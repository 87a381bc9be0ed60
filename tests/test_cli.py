"""Each command says what happened in one line, leaves with the right code and stops when told to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter import __version__, cli
from typer.testing import CliRunner

from tests import pages
from tests.hostile import Exchange, HostileServer, response

COMMAND = [sys.executable, "-W", "error", "-c", "from specdec_exporter.cli import main; main()"]
# Buffered, as it is for users.
QUIET_ENVIRON = {
    k: v for k, v in os.environ.items() if not k.startswith(("SPECDEC_", "PYTHONUNBUFFERED"))
}


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on standard error."""
        assert self.err.endswith("\n")
        (line,) = self.err.splitlines()
        return line


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process, the way its entry point does."""
    for name in os.environ:
        if name.startswith("SPECDEC_"):
            monkeypatch.delenv(name)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["specdec-exporter", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        assert isinstance(code, int)
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


def recording(file: Path, scrapes: int = 3) -> Path:
    with file.open("w") as lines:
        for n in range(1, scrapes + 1):
            counted = pages.counters(1000 * n, (470 * n, 240 * n), first=10 * n, seconds=n)
            lines.write(json.dumps({"t": 5.0 * n, "m": list(pages.lines(counted))}) + "\n")
    return file


# Words


def test_version_and_help() -> None:
    runner = CliRunner()
    for asked in ("version", "--version"):
        assert runner.invoke(cli.app, [asked]).output == f"specdec-exporter {__version__}\n"
    for arguments in (["--help"], ["-h"], *([c, "--help"] for c in ("serve", "replay", "demo"))):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_an_unknown_command_or_option_is_a_usage_error() -> None:
    for arguments in (["srve"], ["serve", "--tarket", "x"], ["replay"], ["check-config"]):
        assert CliRunner().invoke(cli.app, arguments).exit_code == 2


def test_a_value_that_no_option_takes_is_told_with_those_that_it_does(run: Run) -> None:
    ended = run("rules", "--format", "foo")
    assert ended.code == 2
    assert ended.line == (
        "specdec-exporter: Invalid value for '--format': 'foo' is not one of 'prometheus', "
        "'prometheusrule'; see --help"
    )


def test_serve_without_targets_says_how_to_name_one(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "empty.yml"
    file.write_text("")
    for arguments in ([], ["--config", file]):
        ended = run("serve", *arguments)
        assert ended.code == 1
        assert ended.line.startswith("targets: none; give --target http://")


def test_serve_on_a_port_in_use_names_it_and_what_to_do(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("serve", "--target", "http://127.0.0.1:1", "--listen", listen)
    assert ended.code == 1
    assert ended.line == (
        f"specdec-exporter: cannot listen on {listen} (Address already in use); "
        "choose another --listen"
    )


@pytest.mark.parametrize(
    "listen", ["192.0.2.1:19185", "[2001:db8::1]:19185", "a..b:1", f"{'a' * 70}:1"]
)
def test_serve_on_an_address_that_is_not_ours_says_so(listen: str, run: Run) -> None:
    ended = run("serve", "--target", "http://127.0.0.1:1", "--listen", listen)
    assert ended.code == 1
    assert ended.line.startswith("specdec-exporter: cannot listen on ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--interval", "often"], "--interval: interval: 'often' is not a duration; write it like"),
        (["--listen", "nowhere"], "--listen: listen: 'nowhere' is not HOST:PORT, such as"),
        (["--target", "ftp://a"], "--target: targets.1.url: 'ftp://a' is not a URL like"),
        (["--config", "none.yml"], "none.yml: No such file or directory"),
    ],
)
def test_a_wrong_setting_of_serve_is_one_line(arguments: list[str], told: str, run: Run) -> None:
    ended = run("serve", "--target", "http://127.0.0.1:1", *arguments)
    assert ended.code == 1
    assert ended.line.startswith(told)


def test_check_config_tells_a_good_file_from_a_bad_one_by_its_exit_code(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "specdec.yml"
    file.write_text("targets: [http://a]\n")
    assert run("check-config", file) == Ended(0, f"{file}: good, 1 target\n", "")
    file.write_text("targets: [http://a, http://b]\n")
    assert run("check-config", file).out == f"{file}: good, 2 targets\n"
    file.write_text("interval: often\n\ninteval: 5s\n")
    ended = run("check-config", file)
    assert (ended.code, ended.out) == (1, "")
    assert sorted(line.partition(": ")[0] for line in ended.err.splitlines()) == [
        f"{file}:1",
        f"{file}:3",
    ]
    for path in (tmp_path, tmp_path / "none.yml"):
        ended = run("check-config", path)
        assert ended.code == 1
        assert ended.line.startswith(f"{path}: ")


# Replay


def test_replay_prints_figures_as_json_lines_or_as_a_table(run: Run, tmp_path: Path) -> None:
    file = recording(tmp_path / "chat.jsonl")
    ended = run("replay", file, "--format", "json")
    assert (ended.code, ended.err) == (0, "")
    figures = [json.loads(line) for line in ended.out.splitlines()]
    assert [f["t"] for f in figures] == [5, 10, 15]
    assert figures[-1]["target"] == "chat"
    assert figures[-1]["acceptance_ratio"] == pytest.approx(0.355)
    ended = run("replay", file)
    assert (ended.code, ended.err) == (0, "")
    assert "35.5" in ended.out


def test_replay_over_several_windows_prints_each(run: Run, tmp_path: Path) -> None:
    file = recording(tmp_path / "chat.jsonl")
    ended = run(
        "replay", file, "--format", "json", "--window", "5s", "--window", "1m", "--window", "5s"
    )
    spans = [json.loads(line)["window_seconds"] for line in ended.out.splitlines()]
    assert spans == [5, 60] * 3


@pytest.mark.parametrize("window", ["often", "0s", "", "-1m"])
def test_replay_over_no_window_is_one_line(window: str, run: Run, tmp_path: Path) -> None:
    ended = run("replay", recording(tmp_path / "chat.jsonl"), "--window", window)
    assert (ended.code, ended.out) == (1, "")
    assert ended.line.startswith("specdec-exporter: --window: ")


def test_replay_of_nothing_names_the_path_and_what_was_expected(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    text = tmp_path / "notes.txt"
    text.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    for path, told in (
        (tmp_path / "none.jsonl", "No such file or directory"),
        (tmp_path / "none", "there is nothing at this path"),
        (empty, "the recording is empty"),
        (text, "expected a .jsonl file or a folder of .prom pages"),
        (folder, "there are no .prom pages in this folder"),
    ):
        for output in ("json", "table"):
            ended = run("replay", path, "--format", output)
            assert (ended.code, ended.out) == (1, "")
            assert ended.line.startswith(f"specdec-exporter: {path}: ")
            assert told in ended.line


def test_replay_passes_over_broken_lines_and_tells_each_with_its_place(
    run: Run, tmp_path: Path
) -> None:
    file = recording(tmp_path / "chat.jsonl")
    good = file.read_text().splitlines()
    negative = good[1].replace(
        'vllm:spec_decode_num_drafts_total{engine=\\"0\\",model_name=\\"m\\"} ',
        'vllm:spec_decode_num_drafts_total{engine=\\"0\\",model_name=\\"m\\"} -',
    )
    broken = ["", "not json", '{"t": 7}', "[]", '{"t": null, "m": []}', negative, good[1][:50]]
    file.write_text("\n".join([good[0], *broken, *good[1:]]) + "\n")
    ended = run("replay", file, "--format", "json")
    assert ended.code == 0
    assert [json.loads(line)["t"] for line in ended.out.splitlines()] == [5, 10, 15]
    told = ended.err.splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{file}:{n}" for n in range(3, 9)]
    assert "bad_value" in told[4]


def test_replay_without_a_single_usable_scrape_fails(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("nonsense\n")
    ended = run("replay", file)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == "specdec-exporter: no scrape could be used"


# The library that draws the table ends with 1 by itself.
@pytest.mark.parametrize(
    ("output", "codes", "scrapes"), [("json", {0}, 3), ("json", {0}, 300), ("table", {0, 1}, 300)]
)
def test_replay_into_a_pipe_that_nobody_reads_is_quiet(
    output: str, codes: set[int], scrapes: int, tmp_path: Path
) -> None:
    file = recording(tmp_path / "chat.jsonl", scrapes)
    with subprocess.Popen(
        [*COMMAND, "replay", str(file), "--format", output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=QUIET_ENVIRON,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) in codes


# The running exporter


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str]
    url: str
    log: Path

    def get(self, path: str) -> str:
        with httpx.Client(trust_env=False, timeout=120) as client:
            return client.get(f"{self.url}{path}").text

    def value(self, name: str) -> float | None:
        values = [
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name
        ]
        return values[0] if values else None

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def stop(self, number: int) -> str:
        """Send a signal, and return what it logged until its end."""
        self.process.send_signal(number)
        self.process.wait(120)
        return self.log.read_text()


@contextlib.contextmanager
def serving(folder: Path, *arguments: str | Path, **environ: str) -> Iterator[Serving]:
    log = folder / "log"
    with (
        log.open("w") as err,
        subprocess.Popen(
            [*COMMAND, "serve", "--listen", "127.0.0.1:0", *map(str, arguments)],
            stderr=err,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**QUIET_ENVIRON, **environ},
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 120
            while not (found := re.search(r" on (http://\S+)\n", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield Serving(process, found[1], log)
        finally:
            if process.poll() is None:
                process.kill()


def good(exchange: Exchange) -> None:
    n = exchange.number + 1
    exchange.send(response(pages.page(pages.counters(1000 * n, (470 * n, 240 * n), first=n))))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_stop_ends_serve_with_0_and_no_traceback_though_a_target_hangs(
    number: int, tmp_path: Path
) -> None:
    with (
        HostileServer(good) as server,
        HostileServer(Exchange.hold) as hanging,
        serving(
            tmp_path,
            *("--target", server.url, "--target", f"hangs={hanging.url}", "--interval", "2s"),
        ) as exporter,
    ):
        exporter.until(lambda: exporter.value("specdec_acceptance_ratio") == pytest.approx(0.355))
        exporter.until(lambda: bool(hanging.requests))
        log = exporter.stop(number)
        assert exporter.process.returncode == 0
        assert "Traceback" not in log
        # More than once if a busy machine lost a scrape; the one that hangs never.
        up = [line for line in log.splitlines() if 'event="target up"' in line]
        assert up
        assert all(f"url={server.url}" in line for line in up)


def test_a_sighup_at_the_start_ends_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, "--target", "http://127.0.0.1:9") as exporter:
        exporter.process.send_signal(signal.SIGHUP)
        assert "healthy" in exporter.get("/-/healthy")


def test_sighup_reloads_and_a_bad_file_keeps_the_old_settings(tmp_path: Path) -> None:
    file = tmp_path / "specdec.yml"
    succeeded = "specdec_exporter_config_last_reload_successful"
    with HostileServer(good) as one, HostileServer(good) as two:
        file.write_text(f"interval: 200ms\ntargets: [one={one.url}]\n")
        with serving(tmp_path, "--config", file) as exporter:
            exporter.until(lambda: exporter.value("specdec_up") == 1)
            drafts = exporter.value("specdec_drafts_total")
            file.write_text("inteval: 200ms\n")
            exporter.process.send_signal(signal.SIGHUP)
            exporter.until(lambda: exporter.value(succeeded) == 0)
            # A busy machine may miss a scrape of so short an interval now and then.
            exporter.until(lambda: exporter.value("specdec_up") == 1)
            file.write_text(f"interval: 200ms\ntargets: [one={one.url}, two={two.url}]\n")
            exporter.process.send_signal(signal.SIGHUP)
            exporter.until(lambda: exporter.value(succeeded) == 1)
            exporter.until(lambda: 'specdec_up{target="two"} 1.0' in exporter.get("/metrics"))
            kept = exporter.value("specdec_drafts_total")
            assert drafts is not None
            assert kept is not None
            assert kept > drafts
            log = exporter.stop(signal.SIGTERM)
            assert exporter.process.returncode == 0
    (failure,) = [line for line in log.splitlines() if "reload failed" in line]
    assert f"{file}:1" in failure
    assert "did you mean interval?" in failure
    assert "Traceback" not in log


def test_no_secret_is_served_logged_or_told(tmp_path: Path) -> None:
    """Passwords and keys in URLs, and the token, in all that leaves the process."""
    file = tmp_path / "specdec.yml"
    with HostileServer(good) as server, HostileServer(b"nonsense\r\n\r\n") as broken:
        redirect = f"Location: http://user:hunter2@127.0.0.1:{server.port}/?key=hunter2"
        moved = HostileServer(response(b"", redirect, status="302 Found"))
        with moved, HostileServer(b"") as gone:
            urls = {"good": server.url, "broken": broken.url, "moved": moved.url}
            urls |= {"refused": gone.url, "name": "http://xn--:1/"}
        secret = {
            name: url.replace("://", "://user:hunter2@").rstrip("/") + "?key=hunter2"
            for name, url in urls.items()
        }
        targets = [{"name": name, "url": url} for name, url in secret.items()]
        text = json.dumps({"targets": targets, "interval": "200ms", "log_level": "debug"})
        file.write_text(text)
        with serving(tmp_path, "--config", file, SPECDEC_ADMIN_TOKEN="hunter2hunter2") as exporter:
            exporter.until(
                lambda: all(
                    t["scrapes"] > 1 for t in json.loads(exporter.get("/api/v1/status"))["targets"]
                )
            )
            file.write_text(text.replace("127.0.0.1", "127.0.0.1:x", 1))
            with httpx.Client(trust_env=False, timeout=120) as client:
                answers = [
                    client.post(
                        f"{exporter.url}/-/reload", headers={"Authorization": f"Bearer {token}"}
                    )
                    for token in ("hunter2hunter2", "hunter2hunter3")
                ]
            assert [answer.status_code for answer in answers] == [500, 401]
            told = [answer.text for answer in answers]
            told += [exporter.get(path) for path in ("/", "/metrics", "/api/v1/status", "/none")]
            told.append(exporter.stop(signal.SIGTERM))
    for part in told:
        assert "hunter" not in part
        assert "user" not in part
    assert "scrape failed" in told[-1]
    assert "reload failed" in told[-1]
