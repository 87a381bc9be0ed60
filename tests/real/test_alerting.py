"""From a real vLLM whose traffic changes to the message on somebody's phone, and back.

vLLM, `specdec-exporter serve`, Prometheus and Alertmanager are real and are processes of their own; what
they do is one story, told once. Its times are shortened by settings, its thresholds are the usual ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from tests.real.conftest import program
from tests.real.load import run_load
from tests.real.prometheus_bed import (
    Alertmanager,
    Prometheus,
    running,
    running_alertmanager,
)
from tests.real.vllm_bed import (
    HTTP,
    VllmServer,
    code_prompts,
    free_port,
    random_word_prompts,
)

pytestmark = [pytest.mark.vllm, pytest.mark.prometheus, pytest.mark.live, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "alerts" / "alertmanager.example.yaml"
DRAFT_MODEL = {"method": "draft_model", "model": "llama-draft", "num_speculative_tokens": 4}
SETTINGS = {
    "interval": "1s",
    "windows": "15s",
    "rules": {
        "evaluation_interval": "1s",
        "keep_firing_for": "3s",
        "acceptance_low": {"for": "3s"},
        "drafter_misaligned": {"for": "3s"},
        "target_down": {"for": "3s"},
    },
}
MISALIGNED, LOW, DOWN = "SpecDecDrafterMisaligned", "SpecDecAcceptanceLow", "SpecDecTargetDown"
PATIENCE = 90.0
COMMAND = Path(sys.executable).with_name("specdec-exporter")
CALM = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}


@dataclass
class Webhook:
    """Where Alertmanager sends its messages."""

    url: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    def told(self, alert: str, status: str) -> list[dict[str, Any]]:
        """The alerts of this name that came as firing, or as resolved."""
        return [
            one
            for message in self.messages
            for one in message["alerts"]
            if one["labels"]["alertname"] == alert and one["status"] == status
        ]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    class Receive(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hook.messages.append(json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receive) as server:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/alerts")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hook
        finally:
            server.shutdown()


@contextlib.contextmanager
def traffic(url: str, make_prompts: Callable[..., list[str]]) -> Iterator[None]:
    """Prompts of one kind, eight at a time, for as long as the block runs."""
    ended = threading.Event()

    def send() -> None:
        for seed in count():
            if ended.is_set():
                return
            # On long answers to anything but code, these models find their way back to it.
            run_load(url, make_prompts(8, seed=seed), concurrency=8, max_tokens=64)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
        assert sender.is_alive(), "a request failed"
    finally:
        ended.set()
        sender.join()


@contextlib.contextmanager
def exporter(server: str, folder: Path, settings: Path) -> Iterator[str]:
    """`specdec-exporter serve` on one server; gives the address of its metrics."""
    address = f"127.0.0.1:{free_port()}"
    log = folder / "exporter.log"
    arguments = ["--config", str(settings), "--target", f"tiny={server}", "--listen", address]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [COMMAND, "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=CALM,
        ) as process,
    ):
        try:
            yield f"http://{address}/metrics"
        finally:
            process.terminate()


def until(what: str, done: Callable[[], Any]) -> Any:
    """What `done` gives once it gives something."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if found := done():
                return found
        time.sleep(0.2)
    pytest.fail(f"not within {PATIENCE:.0f} seconds: {what}")


@dataclass
class Watch:
    """Who watches the server, and where the messages arrive."""

    prometheus: Prometheus
    alertmanager: Alertmanager
    hook: Webhook

    def value(self, expression: str) -> float | None:
        """The value of an expression that gives one series, or none."""
        rows = self.prometheus.api("query", query=expression)["result"]
        return float(rows[0]["value"][1]) if rows else None

    def states(self) -> dict[str, str]:
        """Every alert that is pending or firing in Prometheus."""
        alerts = self.prometheus.api("alerts")["alerts"]
        return {one["labels"]["alertname"]: one["state"] for one in alerts}

    def inhibited(self) -> set[str]:
        """The alerts that Alertmanager holds back because of another."""
        return {
            one["labels"]["alertname"]
            for one in self.alertmanager.alerts()
            if one["status"]["inhibitedBy"]
        }


@dataclass
class Story:
    """What was seen in each of its parts."""

    front: dict[str, float] = field(default_factory=dict)
    states_on_code: list[dict[str, str]] = field(default_factory=list)
    messages_on_code: int = 0
    states_on_random_words: dict[str, str] = field(default_factory=dict)
    inhibited_on_random_words: set[str] = field(default_factory=set)
    told_low_on_random_words: int = 0
    misaligned: list[dict[str, Any]] = field(default_factory=list)
    misaligned_resolved: list[dict[str, Any]] = field(default_factory=list)
    down: list[dict[str, Any]] = field(default_factory=list)
    down_resolved: list[dict[str, Any]] = field(default_factory=list)
    states_at_the_end: dict[str, str] = field(default_factory=dict)


FRONT = "target:specdec_front_acceptance:ratio15s"
DRAFTS = "target:specdec_drafts:increase15s"


@pytest.fixture(scope="module")
def watch_and_server(
    venv: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Watch, Any]]:
    folder = tmp_path_factory.mktemp("alerting")
    binaries = [program("prometheus"), program("prometheus-alertmanager")]
    settings = folder / "settings.yaml"
    settings.write_text(json.dumps(SETTINGS))
    rules = folder / "rules.yaml"
    rules.write_text(
        subprocess.run(
            [COMMAND, "rules", "--config", settings],
            env=CALM,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    port = free_port()
    served = count()

    def start() -> VllmServer:
        return VllmServer(
            venv,
            "llama-target",
            port=port,
            speculative_config=DRAFT_MODEL,
            log=folder / f"vllm{next(served)}.log",
        )

    with contextlib.ExitStack() as stack:
        hook = stack.enter_context(webhook())
        config = YAML(typ="safe").load(EXAMPLE)
        (receiver,) = [r for r in config["receivers"] if r["name"] == "specdec"]
        receiver["webhook_configs"][0]["url"] = hook.url
        (route,) = config["route"]["routes"]
        route |= {"group_wait": "10s", "group_interval": "1s"}
        manager = stack.enter_context(running_alertmanager(binaries[1], folder, config))
        url = stack.enter_context(exporter(f"http://127.0.0.1:{port}", folder, settings))
        prometheus = stack.enter_context(
            running(binaries[0], folder, {"specdec": url}, rule_files=[rules], alertmanager=manager)
        )
        yield Watch(prometheus, manager, hook), start


@pytest.fixture(scope="module")
def story(watch_and_server: tuple[Watch, Callable[[], VllmServer]]) -> Story:
    watch, start = watch_and_server
    seen = Story()

    def settled(low: float, high: float) -> Callable[[], bool]:
        """Whether a whole window is of one kind of prompts."""

        def settled() -> bool:
            front, drafts = watch.value(FRONT), watch.value(DRAFTS)
            return front is not None and low < front < high and (drafts or 0.0) >= 500

        return settled

    with start() as server:
        with traffic(server.url, code_prompts):
            until("acceptance on code", settled(0.4, 0.6))
            for _ in range(10):
                time.sleep(1.0)
                seen.states_on_code.append(watch.states())
            until("an end of what waits", lambda: not watch.states())
            seen.front["code"] = watch.value(FRONT) or 0.0
            seen.messages_on_code = len(watch.hook.messages)
        with traffic(server.url, random_word_prompts):
            until(
                "a message that the drafter is misaligned",
                lambda: watch.hook.told(MISALIGNED, "firing"),
            )
            until("inhibition of the weaker alert", lambda: LOW in watch.inhibited())
            seen.front["random words"] = watch.value(FRONT) or 0.0
            seen.states_on_random_words = watch.states()
            seen.inhibited_on_random_words = watch.inhibited()
            seen.told_low_on_random_words = len(watch.hook.told(LOW, "firing"))
            seen.misaligned = watch.hook.told(MISALIGNED, "firing")
        with traffic(server.url, code_prompts):
            until("a message that it is over", lambda: watch.hook.told(MISALIGNED, "resolved"))
            seen.misaligned_resolved = watch.hook.told(MISALIGNED, "resolved")
            until("an end of the weaker alert", lambda: LOW not in watch.states())
    until("a message that the server is down", lambda: watch.hook.told(DOWN, "firing"))
    seen.down = watch.hook.told(DOWN, "firing")
    with start() as server, traffic(server.url, code_prompts):
        until("a message that it is back", lambda: watch.hook.told(DOWN, "resolved"))
        seen.down_resolved = watch.hook.told(DOWN, "resolved")
        until("acceptance on code again", settled(0.4, 0.6))
        until("an end of what still waits", lambda: not watch.states())
        seen.states_at_the_end = watch.states()
    print(json.dumps(seen.front), [m["alerts"][0]["labels"] for m in watch.hook.messages])
    return seen


def test_the_drafter_is_as_good_at_code_and_as_bad_at_random_words_as_it_should_be(
    story: Story,
) -> None:
    assert story.front["code"] > 0.4
    assert story.front["random words"] < 0.2


def test_on_code_nothing_fires(story: Story) -> None:
    assert all("firing" not in states.values() for states in story.states_on_code)
    # Of a scrape that a busy machine misses something else may wait a moment, but not of acceptance.
    assert not any(states.keys() & {MISALIGNED, LOW} for states in story.states_on_code)
    assert story.messages_on_code == 0


def test_random_words_reach_somebody_as_a_misaligned_drafter(story: Story) -> None:
    alert = story.misaligned[0]
    assert alert["labels"] | {"instance": ""} == {
        "alertname": MISALIGNED,
        "job": "specdec",
        "instance": "",
        "target": "tiny",
        "model_name": "tiny",
        "severity": "warning",
    }
    assert "Front acceptance is " in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"].endswith(MISALIGNED)


def test_the_weaker_alert_fires_too_and_is_held_back(story: Story) -> None:
    assert story.states_on_random_words[LOW] == "firing"
    assert story.states_on_random_words[MISALIGNED] == "firing"
    assert story.inhibited_on_random_words == {LOW}
    assert story.told_low_on_random_words == 0


def test_back_to_code_the_alert_resolves(story: Story) -> None:
    assert story.misaligned_resolved[0]["labels"] == story.misaligned[0]["labels"]


def test_a_server_that_is_stopped_is_told_of_and_its_return_as_well(story: Story) -> None:
    assert story.down[0]["labels"]["target"] == "tiny"
    assert story.down_resolved[0]["labels"] == story.down[0]["labels"]
    assert "firing" not in story.states_at_the_end.values()


def test_the_messages_lead_to_pages_of_prometheus(
    story: Story, watch_and_server: tuple[Watch, Any]
) -> None:
    """The link of an alert is a query that Prometheus answers."""
    watch, _ = watch_and_server
    link = httpx.URL(story.misaligned[0]["generatorURL"])
    expression = link.params["g0.expr"]
    answer = HTTP.get(f"{watch.prometheus.url}/api/v1/query", params={"query": expression})
    assert answer.json()["status"] == "success"
