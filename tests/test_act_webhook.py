"""A change is asked for under one key, signed, again and again, and only at the address given."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import runpy
import socket
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.act.change import Change
from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.act.webhook import Webhook, signature

from tests.hostile import Exchange, HostileServer, response

CHANGE = Change("c-1", "vllm:8000", "google/gemma", 2, 1, "position decay", 1_760_000_000.5)
SECRET = "a secret that is shared"
OK, BUSY = response(b"", status="202 Accepted"), response(b"", status="503 Busy")


class Receiver:
    """Answers with one response after another, and keeps what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.heads: list[dict[str, str]] = []
        self.bodies: list[bytes] = []

    def __call__(self, exchange: Exchange) -> None:
        head, _, body = exchange.head.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.heads.append({k.lower(): v for k, v in (x.split(": ", 1) for x in lines[1:])})
        length = int(self.heads[-1]["content-length"])
        while len(body) < length:
            body += exchange.peer.recv(4096)
        self.bodies.append(body)
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        if answer:
            exchange.send(answer)


def ask(receiver: Receiver, change: Change = CHANGE) -> None:
    times = iter(range(1_760_000_001, 1_760_000_100))
    with HostileServer(receiver) as server:
        hook = Webhook(server.url, SECRET, pause=0.001, now=lambda: next(times))
        asyncio.run(hook.set_k(change))


def test_the_body_says_what_is_to_be_changed() -> None:
    receiver = Receiver(OK)
    ask(receiver)
    assert json.loads(receiver.bodies[0]) == {
        "version": 1,
        "idempotency_key": "c-1",
        "target": "vllm:8000",
        "model_name": "google/gemma",
        "from_k": 2,
        "to_k": 1,
        "reason": "position decay",
        "time": 1_760_000_000.5,
    }
    assert receiver.heads[0]["content-type"] == "application/json"
    assert receiver.heads[0]["idempotency-key"] == "c-1"


def test_time_and_body_are_signed_by_an_hmac_of_sha_256() -> None:
    receiver = Receiver(OK)
    ask(receiver)
    (head,), (body,) = receiver.heads, receiver.bodies
    signed = head["x-specdec-timestamp"].encode() + b"." + body
    expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert head["x-specdec-signature"] == f"sha256={expected}"


@pytest.mark.parametrize("first", [BUSY, response(b"", status="429 Slow down"), b""])
def test_what_may_pass_is_asked_again_under_the_same_key_and_a_new_time(first: bytes) -> None:
    receiver = Receiver(first, first, OK)
    ask(receiver)
    assert len(receiver.bodies) == 3
    assert len(set(receiver.bodies)) == 1
    assert {head["idempotency-key"] for head in receiver.heads} == {"c-1"}
    assert len({head["x-specdec-timestamp"] for head in receiver.heads}) == 3
    for head, body in zip(receiver.heads, receiver.bodies, strict=True):
        signed = signature(SECRET, head["x-specdec-timestamp"], body)
        assert head["x-specdec-signature"] == signed


@pytest.mark.parametrize("status", ["400 Bad", "401 Who", "404 Where", "409 No", "422 What"])
def test_a_refusal_is_final(status: str) -> None:
    receiver = Receiver(response(b"hunter2", status=status))
    with pytest.raises(Refused, match=f"webhook: status {status[:3]}$"):
        ask(receiver)
    assert len(receiver.bodies) == 1


def test_a_refusal_after_an_answer_that_was_lost_leaves_open_what_was_done() -> None:
    with pytest.raises(ActError) as caught:
        ask(Receiver(b"", response(b"", status="409 Twice")))
    assert not isinstance(caught.value, Refused)


def test_a_redirect_is_not_followed() -> None:
    with HostileServer(Receiver(OK)) as elsewhere:
        moved = response(b"", f"Location: {elsewhere.url}", status="307 Elsewhere")
        with pytest.raises(Refused, match="status 307; redirects are not followed"):
            ask(Receiver(moved))
        assert elsewhere.connections == 0


def test_a_receiver_that_stays_busy_is_given_up_with_what_it_did_unknown() -> None:
    receiver = Receiver(BUSY)
    with pytest.raises(ActError, match="status 503 in the last of 5 attempts") as caught:
        ask(receiver)
    assert not isinstance(caught.value, Refused)
    assert len(receiver.bodies) == 5


def test_a_receiver_that_is_not_there_was_surely_not_asked() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(Refused, match="cannot connect"):
            asyncio.run(Webhook(url, SECRET, pause=0.001).set_k(CHANGE))


def test_no_proxy_and_no_password_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    receiver = Receiver(OK)
    ask(receiver)
    assert "authorization" not in receiver.heads[0]


# The receiver of docs/acting.md

DOCS = Path(__file__).parents[1] / "docs" / "acting.md"


@pytest.fixture
def documented(tmp_path: Path) -> dict[str, Any]:
    """What the snippet defines."""
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    script = tmp_path / "receiver.py"
    script.write_text(snippet)
    return runpy.run_path(str(script))


@pytest.fixture
def running(documented: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the documented receiver."""
    monkeypatch.setenv("SECRET", SECRET)
    with ThreadingHTTPServer(("127.0.0.1", 0), documented["Receiver"]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_the_documented_receiver_acts_once_on_one_key(
    running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        asyncio.run(Webhook(running, SECRET).set_k(CHANGE))
    assert capsys.readouterr().out == "vllm:8000: k = 1\n"


def test_the_documented_receiver_refuses_another_secret_and_an_old_time(
    running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for hook in (Webhook(running, "guessed"), Webhook(running, SECRET, now=lambda: 1e9)):
        with pytest.raises(Refused, match="status 401"):
            asyncio.run(hook.set_k(CHANGE))
    assert capsys.readouterr().out == ""
