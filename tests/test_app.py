"""What is served over HTTP: to whom, in which form, and with nothing in it that was not meant."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from pydantic import SecretStr
from specdec_exporter.app import MOST_STREAMS, Service, create_app, host_allowed, news
from specdec_exporter.config import Settings, Target, load
from specdec_exporter.history import Seen, Watched
from specdec_exporter.loop import Monitor
from specdec_exporter.model import ExporterStatus, Reason, RuleState, ScrapeError, TargetStatus
from specdec_exporter.page import FEW, MOST_OPEN, Board, Templates
from specdec_exporter.pulse import Pulse
from specdec_exporter.service import Exporter
from specdec_exporter.store import Store
from specdec_exporter.tuner import Refusal
from structlog.testing import capture_logs

from tests import pages
from tests.real import page_bed

PATHS = ["/", "/metrics", "/api/v1/status", "/-/healthy", "/-/ready", "/state", "/cards"]
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


class Fixed:
    """A service that knows what it is given."""

    def __init__(self, *statuses: TargetStatus, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.statuses = statuses
        self.reloads = 0
        self.asked: list[tuple[str, str, str]] = []
        self.pulse = Pulse()
        self.reload_failed = False

    def seen(self) -> Seen:
        return Seen(1.7e9, tuple(Watched(status, {}) for status in self.statuses))

    def status(self) -> ExporterStatus:
        return ExporterStatus("1.2.3", self.statuses, False, True)

    def reload(self) -> None:
        self.reloads += 1

    def acknowledge_drift(self, target: str, model_name: str) -> bool:
        self.asked.append(("acknowledge", target, model_name))
        return target == "a"

    def relearn_reference(self, target: str, model_name: str) -> bool:
        self.asked.append(("relearn", target, model_name))
        return target == "a"

    def autotune(self, action: str, target: str, k: int | None, who: str) -> str:
        self.asked.append((action, target, "" if k is None else str(k)))
        if target == "b":
            raise Refusal("target b has no actuator")
        return f"{action} of {target}"

    def hear_alert(self, rule: str, labels: Mapping[str, str], *, firing: bool) -> int:
        self.asked.append((rule, labels.get("target", ""), str(firing)))
        return 1

    def audit(self, limit: int) -> list[dict[str, Any]]:
        return [
            {"id": 2, "t": 1.7e9, "target": "a", "what": "ended", "outcome": "<b>verified</b>"},
            {"id": 1, "t": 1.7e9, "target": "a", "what": "begun", "from_k": 4, "to_k": 1},
        ][:limit]


APPS: WeakKeyDictionary[Service, FastAPI] = WeakKeyDictionary()


def ask(service: Service, path: str, method: str = "GET", **headers: str | bytes) -> httpx.Response:
    app = APPS.get(service) or APPS.setdefault(service, create_app(service))
    sent = {name.encode(): v if isinstance(v, bytes) else v.encode() for name, v in headers.items()}

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, headers=sent)

    return asyncio.run(once())


def measured(model_name: str = "m", **target: Any) -> TargetStatus:
    """A target after two good scrapes."""
    monitor = Monitor(Target(**{"url": "http://127.0.0.1:8000", **target}), Settings())
    escaped = model_name.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    for n in (1, 2):
        counted = pages.counters(1000 * n, (470 * n, 240 * n), first=10 * n, seconds=n)
        lines = "\n".join(pages.lines(counted, model_name=escaped))
        with capture_logs():
            monitor.observe(f"{lines}\n".encode(), t=5.0 * n, duration=0.1)
    assert monitor.status.up
    return monitor.status


def failed(name: str = "down", detail: str = "no whole page") -> TargetStatus:
    monitor = Monitor(Target(url="http://127.0.0.1:8000", name=name), Settings())
    with capture_logs():
        monitor.observe(ScrapeError(Reason.TIMEOUT, detail), t=5, duration=0.1)
    return monitor.status


def families(response: httpx.Response) -> list[Metric]:
    kind = response.headers["content-type"].partition(";")[0]
    parse = {
        "text/plain": parse_text,
        "application/openmetrics-text": openmetrics.text_string_to_metric_families,
    }[kind]
    metrics: list[Metric] = list(parse(response.text))  # type: ignore[no-untyped-call]
    return metrics


# Forms


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (b"", "text/plain; version=0.0.4; charset=utf-8"),
        (b"*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (b"text/html,application/xhtml+xml", "text/plain; version=0.0.4; charset=utf-8"),
        (b"text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS.encode(), "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        (
            b"application/openmetrics-text",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
def test_metrics_come_in_the_form_that_is_asked_for_and_say_the_same_in_each(
    accept: bytes, kind: str
) -> None:
    service = Fixed(measured(), failed())
    response = ask(service, "/metrics", accept=accept)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(kind)
    samples = {s.name: s.value for family in families(response) for s in family.samples}
    assert samples["specdec_drafts_total"] == 1000
    assert samples["specdec_acceptance_ratio"] == pytest.approx(0.355)
    assert samples.keys() == {
        s.name for family in families(ask(service, "/metrics")) for s in family.samples
    }
    assert not any(name.endswith("_created") for name in samples)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_answers_while_a_target_is_down_and_before_the_first_scrape(path: str) -> None:
    unseen = Monitor(Target(url="http://127.0.0.1:1"), Settings()).status
    for statuses in ([], [unseen], [failed()], [measured(), failed(), unseen]):
        assert ask(Fixed(*statuses), path).status_code == 200


def test_the_page_and_the_json_show_figures_and_why_there_are_none() -> None:
    service = Fixed(measured(), failed(detail="no whole page within 5s"))
    page = ask(service, "/").text
    assert "35.5 %" in page
    assert "no whole page within 5s" in page
    good, bad = ask(service, "/api/v1/status").json()["targets"]
    assert good["up"]
    assert good["measurements"][0]["total"]["acceptance_ratio"] == pytest.approx(0.355)
    assert bad["failures"] == {"timeout": 1}
    assert bad["last_error"] == "no whole page within 5s"


# Names full of other languages' syntax

NASTY = [
    '<script>alert("1")</script>',
    "</article><img src=x onerror='alert(1)'>&amp;&lt;",
    "{{ 7 * 7 }}{% raw %}",
    'a"b\\c\\nd\ne\\',
    'x"} 1\nspecdec_up{target="other',
    "# HELP specdec_up\t\r\x1b[31m",
    "ümläut 模型 \u2028 \U0001f525",
]


class Text(HTMLParser):
    """The text of a page, and the names of its elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}


@pytest.mark.parametrize("nasty", NASTY)
def test_a_name_is_text_on_the_page(nasty: str) -> None:
    plain = Text(ask(Fixed(measured(), failed()), "/").text)
    service = Fixed(measured(nasty, name=nasty), failed(f"{nasty}2", nasty))
    page = Text(ask(service, "/").text)
    # The name and twice the model of the one, the name and the error of the other.
    assert page.text.count(nasty) == 5
    assert page.elements == plain.elements
    assert page.attributes == plain.attributes


@pytest.mark.parametrize("accept", ["text/plain", PROMETHEUS])
@pytest.mark.parametrize("nasty", NASTY)
def test_a_name_comes_through_metrics_as_it_was(nasty: str, accept: str) -> None:
    service = Fixed(measured(nasty, name=nasty, labels={"zone": nasty}))
    samples = [
        s for family in families(ask(service, "/metrics", accept=accept)) for s in family.samples
    ]
    plain = Fixed(measured(labels={"zone": "b"}))
    assert len(samples) == sum(len(f.samples) for f in families(ask(plain, "/metrics")))
    for label in ("target", "model_name", "zone"):
        assert {s.labels[label] for s in samples if label in s.labels} == {nasty}


@pytest.mark.parametrize("nasty", NASTY)
def test_a_name_comes_through_json_as_it_was(nasty: str) -> None:
    service = Fixed(measured(nasty, name=nasty, labels={"zone": nasty}), failed("x", nasty))
    good, bad = ask(service, "/api/v1/status").json()["targets"]
    assert good["name"] == nasty
    assert good["labels"] == {"zone": nasty}
    assert good["measurements"][0]["total"]["model_name"] == nasty
    assert bad["last_error"] == nasty


def test_json_has_no_nan_and_no_infinity() -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    status = measured()
    (measurement,) = status.measurements
    odd = dataclasses.replace(
        measurement.total,
        tpot_seconds=float("nan"),
        step_seconds=float("inf"),
        position_acceptance_ratio=(float("-inf"), 0.5),
    )
    status = dataclasses.replace(
        status, measurements=(dataclasses.replace(measurement, total=odd),)
    )
    response = ask(Fixed(status), "/api/v1/status")
    assert response.status_code == 200
    total = json.loads(response.text, parse_constant=refuse)["targets"][0]["measurements"][0][
        "total"
    ]
    assert total["tpot_seconds"] is total["step_seconds"] is None
    assert total["position_acceptance_ratio"] == [None, 0.5]


def test_user_password_and_query_of_a_targets_url_are_served_nowhere() -> None:
    service = Fixed(
        measured(url="http://user:hunter2@127.0.0.1:8000/m?key=hunter2"),
        admin_token="hunter2",
        targets=["http://user:hunter2@127.0.0.1:8000/m?key=hunter2"],
    )
    for path in PATHS:
        assert "hunter2" not in ask(service, path).text
        assert "user" not in ask(service, path).text.replace("user's", "")


# The page, without a script and for one


def named(name: str, *, good: bool = True) -> TargetStatus:
    return measured(name=name) if good else failed(name)


def names(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def cards(page: str) -> dict[str, bool]:
    """The ids of a page's cards, and whether each is open."""
    return {i: " open" in rest for i, rest in re.findall(r'id="(t\w{12})"([^>]*)>', page)}


def test_the_worst_come_first_and_then_the_alphabet() -> None:
    service = Fixed(named("b"), named("z", good=False), named("A"), named("y", good=False))
    assert names(ask(service, "/").text)[:4] == ["y", "z", "A", "b"]
    assert "2 of 4 targets need attention" in ask(service, "/").text


def test_a_page_without_a_script_can_be_filtered_and_shows_one_target_whole() -> None:
    service = Fixed(named("chat"), named("code"), named("gone", good=False), named("a&b"))
    assert names(ask(service, "/?q=CHAT").text)[:1] == ["chat"]
    assert len(cards(ask(service, "/?q=does+not+answer").text)) == 1
    assert names(ask(service, "/?trouble=1").text)[:1] == ["gone"]
    assert "No target fits" in ask(service, "/?q=nowhere").text
    assert list(cards(ask(service, "/?target=a%26b").text).values()) == [True]
    assert "There is no target of this name" in ask(service, "/?target=x").text


def test_many_cards_are_lines_but_for_a_few_in_trouble_and_lead_to_all_of_each() -> None:
    few = Fixed(*(named(f"n{i}") for i in range(FEW)))
    assert all(cards(ask(few, "/").text).values())
    many = Fixed(
        *(named(f"n & {i}") for i in range(FEW)), *(named(f"d{i}", good=False) for i in range(9))
    )
    page = ask(many, "/").text
    assert list(cards(page).values()) == [True] * MOST_OPEN + [False] * (FEW + 9 - MOST_OPEN)
    link = re.search(r'href="(\?target=n[^"]*)"', page)
    assert link is not None
    assert "Accepted up to each position" in ask(many, f"/{link[1]}").text


def test_the_state_changes_with_what_a_card_says_and_the_cards_come_as_asked() -> None:
    service = Fixed(named("a"), named("b"))
    before = ask(service, "/state").json()
    service.statuses = (named("a"), named("b", good=False))
    assert ask(service, "/state").json()["cards"] != before["cards"]
    after = ask(service, "/state").json()
    assert after["summary"] == "1 of 2 targets needs attention"
    changed = dict(after["cards"]).items() - dict(before["cards"]).items()
    ((b, _),) = changed
    (a,) = dict(after["cards"]).keys() - {b}
    part = ask(service, f"/cards?rows={a}.nothing&whole={b}").text
    assert cards(part) == {b: True, a: False}
    assert 'id="audit"' not in part
    assert 'id="audit"' in ask(service, "/cards?audit=1").text


def test_what_is_shown_is_made_once_for_each_pulse() -> None:
    service = Fixed(named("a"))
    service.pulse.beat()
    assert names(ask(service, "/").text)[0] == "a"
    service.statuses = (named("b"),)
    assert names(ask(service, "/").text)[0] == "a"
    service.pulse.beat()
    assert names(ask(service, "/").text)[0] == "b"


def test_what_is_not_known_is_said_in_words() -> None:
    (measurement,) = measured().measurements
    monitor = Monitor(Target(url="http://127.0.0.1:8000"), Settings())
    monitor.judge(0.0)
    (verdict,) = monitor.status.verdicts
    idle = dataclasses.replace(
        measured(),
        measurements=(
            dataclasses.replace(
                measurement,
                total=dataclasses.replace(
                    measurement.total,
                    drafts=0.0,
                    acceptance_ratio=None,
                    front_acceptance_ratio=None,
                    mean_acceptance_length=None,
                    position_acceptance_ratio=(None, None),
                ),
            ),
        ),
    )
    unsure = dataclasses.replace(verdict, value=float("nan"), state=RuleState.INCONCLUSIVE)
    idle = dataclasses.replace(idle, verdicts=(unsure,))
    page = Text(ask(Fixed(idle), "/").text).text
    assert "no drafts in the last 5m" in page
    assert not re.search(r"\b(nan|None|inf)\b", page)
    assert "no baseline: run specdec-exporter calibrate" in ask(Fixed(measured()), "/").text


# The stream of news


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_tells_what_is_now_then_the_news_and_ends_with_the_exporter() -> None:
    one, two = (page_bed.Watched(named(name), {}) for name in "ab")
    with page_bed.served(one) as served, httpx.stream("GET", f"{served.url}events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer)
        assert len(next(told)["cards"]) == 1
        served.show(one, two)
        assert len(next(told)["cards"]) == 2
        begun = time.monotonic()
        served.stop()
        assert list(told) == []
        # It would be cut off, after three seconds, if it did not end by itself.
        assert time.monotonic() - begun < 2.5


def test_beyond_so_many_streams_one_has_to_ask_until_another_ends() -> None:
    limits = httpx.Limits(max_connections=None)
    with page_bed.served() as served, httpx.Client(base_url=served.url, limits=limits) as client:
        with contextlib.ExitStack() as streams:
            told = [
                events(streams.enter_context(client.stream("GET", "events")))
                for _ in range(MOST_STREAMS)
            ]
            assert [next(one)["cards"] for one in told] == [[]] * MOST_STREAMS
            assert client.get("events").status_code == 503
            assert client.get("state").status_code == 200
        deadline, status = time.monotonic() + 60, 503
        while status == 503 and time.monotonic() < deadline:
            with client.stream("GET", "events") as answer:
                status = answer.status_code
        assert status == 200


def test_who_reads_slowly_gets_the_newest_and_not_all_that_was_missed() -> None:
    service, streams = Fixed(named("a")), set[object]()

    def board() -> Board:
        return Board(
            service.seen(),
            audit=[],
            notice="",
            version="",
            templates=Templates(),
            runbooks={},
            every=15.0,
        )

    async def read() -> list[str]:
        told = news(service.pulse, board, streams)
        first = await anext(told)
        for _ in range(5):
            service.pulse.beat()
        second = await anext(told)
        assert len(streams) == 1
        service.pulse.end()
        return [first, second, *[one async for one in told]]

    first, second = asyncio.run(read())
    assert first.startswith("id: 0\ndata: {")
    assert second.startswith("id: 5\ndata: {")
    assert not streams


# Who may ask

NAMED = Fixed(allowed_hosts=["Exporter.example"], admin_token="hunter2")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:19185", "10.1.2.3:", "[::1]", "[::1]:19185", "[fe80::1]:1", "localhost",
     "LOCALHOST:19185", "exporter.example", "Exporter.Example:19185"],
)  # fmt: skip
def test_an_address_localhost_and_configured_names_may_be_asked(host: str) -> None:
    assert ask(NAMED, "/metrics", host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:19185", "127.0.0.1.evil.example", "localhost.evil.example",
     "exporter.example.evil.example", "[evil.example]", "[localhost]", "127.0.0.1@evil.example",
     "127.0.0.1:1@evil.example", "evil.example:127.0.0.1", "127.0.0.1:evil.example", "", ":", ":80",
     "[", "[]", "[::1", "[::1]evil.example", "::1]", "127.1", "0x7f.0.0.1", "localhost,evil.example",
     "<script>", "\xff"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/metrics", "/-/reload"])
def test_any_other_name_is_misdirected(host: str, path: str) -> None:
    service = NAMED
    response = ask(
        service, path, "POST", host=host.encode("latin-1"), authorization="Bearer hunter2"
    )
    assert response.status_code == 421
    assert response.headers["content-type"].startswith("text/plain")
    assert "allowed_hosts" in response.text
    assert service.reloads == 0
    assert not host_allowed(host, ("exporter.example",))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of the application behind the real web server."""
    config = uvicorn.Config(
        create_app(Fixed()), log_config=None, lifespan="off", http="h11", ws="none"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n", 200),
        ("GET http://evil.example/metrics HTTP/1.1\r\nHost: evil.example\r\n", 421),
        ("GET /metrics HTTP/1.0\r\n", 421),
        ("GET /metrics HTTP/1.1\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nHost: evil.example\r\nHost: 127.0.0.1\r\n", 400),
    ],
)
def test_a_missing_or_doubled_host_header_gives_no_metrics(
    head: str, status: int, port: int
) -> None:
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(f"{head}Connection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: peer.recv(65536), b"")).decode()
    assert int(answer.split(" ")[1]) == status
    assert ("specdec_" in answer) == (status == 200)


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        *(("GET", path, "127.0.0.1", 200) for path in PATHS),
        ("GET", "/nothing/here", "127.0.0.1", 404),
        ("GET", "/docs", "127.0.0.1", 404),
        ("GET", "/openapi.json", "127.0.0.1", 404),
        ("GET", "/-/reload", "127.0.0.1", 405),
        ("DELETE", "/metrics", "127.0.0.1", 405),
        ("POST", "/-/reload", "127.0.0.1", 403),
        ("GET", "/metrics", "evil.example", 421),
    ],
)
def test_every_answer_forbids_foreign_scripts_frames_sniffing_and_storing(
    method: str, path: str, host: str, status: int
) -> None:
    response = ask(Fixed(measured()), path, method, host=host)
    assert response.status_code == status
    forbids(response)


def forbids(response: httpx.Response) -> None:
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|\*|data:", policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-store"


def test_the_page_needs_nothing_that_its_policy_forbids() -> None:
    service = Fixed(measured())
    page = ask(service, "/").text
    parsed = Text(page)
    assert parsed.elements.isdisjoint({"style", "img", "iframe", "object"})
    assert not {name for name in parsed.attributes if name == "style" or name.startswith("on")}
    assert "<script>" not in page
    needed = set(re.findall(r'(?:src|href)="(static/[^"]*)"', page))
    assert needed == {"static/page.css", "static/page.js", "static/icon.svg"}
    for path in needed:
        served = ask(service, f"/{path}")
        assert served.status_code == 200
        assert "http" not in served.text.replace("http://www.w3.org/2000/svg", "")
        forbids(served)


@pytest.mark.parametrize("name", ["page.html", "%2e%2e%2fapp.py", "../app.py", ""])
def test_nothing_but_the_pages_own_files_is_served_beside_it(name: str) -> None:
    assert ask(Fixed(), f"/static/{name}").status_code == 404


def test_an_error_of_our_own_is_told_without_its_insides() -> None:
    class Broken(Fixed):
        def status(self) -> ExporterStatus:
            raise RuntimeError("hunter2")

        def seen(self) -> Seen:
            raise RuntimeError("hunter2")

    for path in ("/", "/metrics", "/api/v1/status"):
        response = ask(Broken(), path)
        assert response.status_code == 500
        assert "hunter2" not in response.text
        assert "Traceback" not in response.text
        forbids(response)


# Reload


def test_without_a_token_nothing_can_be_changed_over_http() -> None:
    service = Fixed()
    for authorization in (b"", b"Bearer ", b"Bearer None", b"Bearer hunter2"):
        response = ask(service, "/-/reload", "POST", authorization=authorization)
        assert response.status_code == 403
        assert "SIGHUP" in response.text
    assert service.reloads == 0


@pytest.mark.parametrize(
    "authorization",
    [b"", b"Bearer", b"Bearer ", b"Bearer hunter", b"Bearer hunter22", b"Bearer HUNTER2", b"hunter2",
     b"Basic hunter2", b"Bearer hunter2 hunter2", b"Bearer \xff\x00", b"Basic Omh1bnRlcjI="],
)  # fmt: skip
def test_a_wrong_token_is_refused_and_does_nothing(authorization: bytes) -> None:
    service = Fixed(admin_token="hunter2")
    response = ask(service, "/-/reload", "POST", authorization=authorization)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert "hunter2" not in response.text
    assert service.reloads == 0


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER   "])
@pytest.mark.parametrize("token", ["hunter2", "h=u/n+t~e.r-2_", "hünter2 模型"])
def test_the_right_token_reloads(scheme: bytes, token: str) -> None:
    service = Fixed(admin_token=token)
    response = ask(service, "/-/reload", "POST", authorization=scheme + token.encode())
    assert (response.status_code, service.reloads) == (200, 1)


@pytest.mark.parametrize("what", ["acknowledge", "relearn"])
def test_drift_is_acknowledged_and_references_replaced_by_those_who_have_the_token(
    what: str,
) -> None:
    service = Fixed(admin_token="hunter2")
    path = f"/api/v1/drift/{what}?target=a&model=x/y"
    assert ask(service, path, "POST").status_code == 401
    assert ask(service, path, "GET", authorization="Bearer hunter2").status_code == 405
    assert ask(Fixed(), path, "POST").status_code == 403
    assert service.asked == []
    assert ask(service, path, "POST", authorization="Bearer hunter2").status_code == 200
    assert service.asked == [(what, "a", "x/y")]
    unknown = ask(service, path.replace("=a", "=b"), "POST", authorization="Bearer hunter2")
    assert unknown.status_code == 404
    assert unknown.text.count("\n") == 1
    assert "'b'" in unknown.text


TUNING = ["pause", "resume", "apply", "rollback"]
MESSAGE = {
    "version": "4",
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "SpecDecPositionDecay", "target": "a", "model_name": "m"},
        },
        {"status": "resolved", "labels": {"alertname": "SpecDecDrafterBroken", "target": "a"}},
        {"status": "firing", "labels": {"alertname": "SpecDecAcceptanceLow", "target": "a"}},
    ],
}


@pytest.mark.parametrize(
    "path", ["/hooks/alertmanager", *(f"/api/v1/autotune/{a}" for a in TUNING)]
)
def test_without_a_token_set_nothing_that_tunes_exists(path: str) -> None:
    service = Fixed()
    assert ask(service, path, "POST").status_code == 404
    assert ask(service, path, "POST", authorization="Bearer x").status_code == 404
    assert service.asked == []


@pytest.mark.parametrize("action", TUNING)
def test_tuning_is_for_those_who_have_the_token(action: str) -> None:
    service = Fixed(admin_token="hunter2")
    path = f"/api/v1/autotune/{action}?target=a&k=2"
    assert ask(service, path, "POST").status_code == 401
    assert ask(service, path, "GET", authorization="Bearer hunter2").status_code == 405
    assert service.asked == []
    done = ask(service, path, "POST", authorization="Bearer hunter2")
    assert (done.status_code, done.text) == (200, f"{action} of a\n")
    assert service.asked == [(action, "a", "2")]


def test_what_cannot_be_tuned_is_a_conflict_with_the_reason() -> None:
    service = Fixed(admin_token="hunter2")
    ours = {"authorization": "Bearer hunter2"}
    refused = ask(service, "/api/v1/autotune/apply?target=b", "POST", **ours)
    assert (refused.status_code, refused.text) == (409, "target b has no actuator\n")
    for k in ("x", "-1", "1e3", "100", "\u0663"):
        assert ask(service, f"/api/v1/autotune/apply?k={k}", "POST", **ours).status_code == 422
    assert ask(service, "/api/v1/autotune/explode", "POST", **ours).status_code == 404


def post(service: Fixed, path: str, body: bytes, **headers: str) -> httpx.Response:
    app = create_app(service)

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body, headers=headers)

    return asyncio.run(once())


def test_alertmanagers_message_is_heard_for_the_alerts_that_are_acted_on() -> None:
    service = Fixed(admin_token="hunter2")
    body = json.dumps(MESSAGE).encode()
    assert post(service, "/hooks/alertmanager", body).status_code == 401
    heard = post(service, "/hooks/alertmanager", body, authorization="Bearer hunter2")
    assert (heard.status_code, heard.text) == (200, "Heard 2 of 3 alerts.\n")
    assert service.asked == [("position_decay", "a", "True"), ("drafter_broken", "a", "False")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"alerts": 3}',
        b'{"alerts": [{}]}',
        b"\xff",
        b"[" * 9000,
        b" " * 2_000_000,
    ],
    ids=range(8),
)
def test_what_is_no_message_of_alertmanager_is_refused_in_one_line(body: bytes) -> None:
    service = Fixed(admin_token="hunter2")
    refused = post(service, "/hooks/alertmanager", body, authorization="Bearer hunter2")
    assert refused.status_code == 422
    assert refused.text.count("\n") == 1
    assert service.asked == []


def test_the_audit_log_is_served_and_shown_as_text() -> None:
    service = Fixed()
    assert [e["id"] for e in ask(service, "/api/v1/audit?limit=1").json()] == [2]
    page = ask(service, "/").text
    assert "&lt;b&gt;verified&lt;/b&gt;" in page
    assert "k 4 → 1" in page


def test_a_get_never_reloads() -> None:
    service = Fixed(admin_token="hunter2")
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        response = ask(service, "/-/reload", method, authorization="Bearer hunter2")
        assert response.status_code == 405
    assert service.reloads == 0


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    class Token(str):
        """Fails when it is compared in any other way."""

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> NoReturn:
            raise AssertionError("not in constant time")

    service = Fixed()
    service.settings = service.settings.model_copy(
        update={"admin_token": SecretStr(Token("hunter2"))}
    )
    monkeypatch.setattr(secrets, "compare_digest", spy)
    ask(service, "/-/reload", "POST", authorization="Bearer hunter1")
    assert compared == [(b"hunter1", b"hunter2")]


def test_a_state_file_that_cannot_be_read_costs_the_page_its_audit_log_only(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "state.db")
    settings = Settings(targets=(Target(url="http://127.0.0.1:8000", name="a"),))
    exporter = Exporter(settings, lambda: settings, store)
    other = sqlite3.connect(tmp_path / "state.db")
    with other:
        other.execute("DROP TABLE log")
    other.close()
    for path in ("/", "/state", "/cards?audit=1"):
        assert ask(exporter, path).status_code == 200
    state = ask(exporter, "/state").json()
    assert len(state["cards"]) == 1
    assert "The audit log cannot be shown" in state["notice"]
    assert str(tmp_path / "state.db") in state["notice"]
    store.close()


class Reloadable:
    """A real exporter, whose settings stand in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.write("interval: 1s")
        self.exporter = Exporter(self.load(), self.load)

    def write(self, text: str) -> None:
        self.file.write_text(f"admin_token: hunter2\n{text}\n")

    def load(self) -> Settings:
        return load(self.file, None, {})

    def reload(self) -> httpx.Response:
        return ask(self.exporter, "/-/reload", "POST", authorization="Bearer hunter2")

    def successful(self) -> float:
        (value,) = [
            s.value
            for family in families(ask(self.exporter, "/metrics"))
            for s in family.samples
            if s.name == "specdec_exporter_config_last_reload_successful"
        ]
        return value


@pytest.fixture
def reloadable(tmp_path: Path) -> Reloadable:
    return Reloadable(tmp_path / "specdec.yml")


def test_a_reload_puts_new_settings_in_force(reloadable: Reloadable) -> None:
    reloadable.write("targets: [http://a]\ninterval: 2s\nallowed_hosts: [new.example]")
    with capture_logs() as logs:
        response = reloadable.reload()
    assert response.status_code == 200
    assert logs == [{"event": "reloaded", "log_level": "info", "targets": 1}]
    assert reloadable.exporter.settings.interval == 2
    (target,) = reloadable.exporter.status().targets
    assert target.name == "a:80"
    assert ask(reloadable.exporter, "/metrics", host="new.example").status_code == 200


def test_a_reload_of_wrong_settings_keeps_the_old_ones_and_says_so_everywhere(
    reloadable: Reloadable,
) -> None:
    assert reloadable.successful() == 1
    reloadable.write("interval: often\nlistn: x")
    with capture_logs() as logs:
        response = reloadable.reload()
    assert response.status_code == 500
    assert "The old settings stay in force" in response.text
    for number, name in ((2, "interval"), (3, "listn")):
        assert f"{reloadable.file}:{number}: {name}: " in response.text
    assert sorted(e["place"] for e in logs) == [f"{reloadable.file}:{n}" for n in (2, 3)]
    assert {(e["event"], e["log_level"]) for e in logs} == {("reload failed", "error")}
    assert reloadable.successful() == 0
    assert reloadable.exporter.settings.interval == 1
    assert "The last reload failed" in ask(reloadable.exporter, "/").text
    assert not ask(reloadable.exporter, "/api/v1/status").json()["last_reload_successful"]

    reloadable.write("interval: 3s")
    with capture_logs():
        assert reloadable.reload().status_code == 200
    assert reloadable.successful() == 1
    assert "The last reload failed" not in ask(reloadable.exporter, "/").text


def test_settings_that_the_loop_refuses_change_no_log_level_either(
    reloadable: Reloadable, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured: list[str] = []
    monkeypatch.setattr("specdec_exporter.service.configure", configured.append)
    targets = "targets: [{url: http://a, reference: nowhere.json}]"
    reloadable.write(f"{targets}\nlog_level: debug")
    with capture_logs():
        assert reloadable.reload().status_code == 500
    assert configured == []
    reloadable.write("log_level: debug")
    with capture_logs():
        assert reloadable.reload().status_code == 200
    assert configured == ["debug"]


def test_a_reload_without_its_file_keeps_the_old_settings(reloadable: Reloadable) -> None:
    reloadable.file.unlink()
    with capture_logs():
        assert reloadable.reload().status_code == 500
    assert reloadable.exporter.settings.interval == 1
    assert reloadable.successful() == 0


def test_what_somebody_changes_is_shown_at_once(reloadable: Reloadable) -> None:
    exporter = reloadable.exporter
    reloadable.write("targets: [http://a]")
    with capture_logs():
        reloadable.reload()
        counts = [exporter.pulse.count]
        for act in (
            lambda: exporter.autotune("pause", "", None, "me"),
            lambda: exporter.acknowledge_drift("a:80", "m"),
            lambda: exporter.relearn_reference("a:80", "m"),
        ):
            act()
            counts.append(exporter.pulse.count)
    assert counts == [1, 2, 3, 4]
    assert [w.status.name for w in exporter.seen().targets] == ["a:80"]


def test_a_failed_reload_shows_no_secret(reloadable: Reloadable) -> None:
    reloadable.write("admin_token: hunter3\ntargets: ['http://user:hunter4@a:port']")
    with capture_logs() as logs:
        doubled = reloadable.reload().text
        reloadable.write("targets: ['http://user:hunter4@a:port']")
        wrong = reloadable.reload().text
    assert len(logs) == 2
    assert "hunter" not in f"{doubled}{wrong}{logs}"


def test_a_reload_changes_the_log_level_at_once_and_the_address_at_the_next_start(
    reloadable: Reloadable, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr("specdec_exporter.service.configure", levels.append)
    reloadable.write("log_level: debug\nlisten: 127.0.0.1:1")
    with capture_logs() as logs, contextlib.suppress(OSError):
        reloadable.reload()
        reloadable.reload()
    assert levels == ["debug"]
    assert [e["event"] for e in logs].count("listen changes at the next start") == 1
