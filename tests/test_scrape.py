"""One GET gives bytes or a typed failure, within its time and its memory, from its address alone."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
import tracemalloc
import zlib

import pytest
from specdec_exporter.model import Reason, ScrapeError
from specdec_exporter.scrape import fetch, fetch_version, new_client

from tests import pages
from tests.hostile import Answer, Exchange, HostileServer, chunked, response

PAGE = pages.page(pages.counters())


def scrape(url: str, *, timeout: float = 20, max_page_bytes: int = 1_000_000) -> bytes:
    async def once() -> bytes:
        async with new_client(tls=url.startswith("https")) as client:
            return await fetch(client, url, timeout=timeout, max_page_bytes=max_page_bytes)

    return asyncio.run(once())


def failure(
    answer: Answer | bytes, *, timeout: float = 20, max_page_bytes: int = 1_000_000
) -> ScrapeError:
    with HostileServer(answer) as server, pytest.raises(ScrapeError) as caught:
        scrape(server.url, timeout=timeout, max_page_bytes=max_page_bytes)
    return caught.value


def page_from(answer: Answer | bytes) -> bytes:
    with HostileServer(answer) as server:
        return scrape(server.url)


def compressed(body: bytes, encoding: str = "gzip") -> bytes:
    return response(body, f"Content-Encoding: {encoding}")


# What a page is


@pytest.mark.parametrize(
    "answer",
    [
        response(PAGE),
        chunked(PAGE[:100], PAGE[100:]),
        b"HTTP/1.0 200 OK\r\n\r\n" + PAGE,
        compressed(gzip.compress(PAGE)),
        compressed(gzip.compress(PAGE), "x-gzip"),
        compressed(zlib.compress(PAGE), "deflate"),
        compressed(PAGE, "identity"),
    ],
    ids=["plain", "chunked", "http-1.0", "gzip", "x-gzip", "deflate", "identity"],
)
def test_a_whole_page_is_read_however_it_is_sent(answer: bytes) -> None:
    assert page_from(answer) == PAGE


def test_a_page_that_comes_slowly_but_in_time_is_read() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send(response(b"", length=20))
        exchange.drip(b"a 1\n" * 5, 0.01)

    assert page_from(answer) == b"a 1\n" * 5


@pytest.mark.parametrize("length", [999, 1000])
def test_a_page_of_just_max_page_bytes_is_read(length: int) -> None:
    for body in (response(b"a" * length), compressed(gzip.compress(b"a" * length))):
        with HostileServer(body) as server:
            assert len(scrape(server.url, max_page_bytes=1000)) == length


# What is not one


def test_a_port_that_nobody_listens_on_is_a_connect_failure_in_the_words_of_the_system() -> None:
    with HostileServer(b"") as server:
        url = server.url
    with pytest.raises(ScrapeError, match=r"cannot connect \(Connection refused\);") as caught:
        scrape(url)
    assert caught.value.reason is Reason.CONNECT


def test_a_name_that_does_not_resolve_is_a_connect_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ScrapeError, match=r"\(Name or service not known\)") as caught:
        scrape("http://vllm.invalid:8000/metrics")
    assert caught.value.reason is Reason.CONNECT


@pytest.mark.parametrize("host", ["xn--", "a..b\u0301", "\u2100", "256.256.256.256", "[1:1:1]"])
def test_a_host_name_that_no_resolver_would_be_asked_for_is_a_typed_failure(host: str) -> None:
    with pytest.raises(ScrapeError) as caught:
        scrape(f"http://{host}:1/metrics")
    assert caught.value.reason is Reason.PROTOCOL


def test_https_to_a_server_without_tls_is_a_connect_failure() -> None:
    plain = response(b"", status="400 Bad Request")
    with HostileServer(plain) as server, pytest.raises(ScrapeError, match="SSL") as caught:
        scrape(server.url.replace("http", "https"))
    assert caught.value.reason is Reason.CONNECT


@pytest.mark.parametrize("status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial"])
def test_another_status_than_200_is_a_failure_that_names_it(status: str) -> None:
    error = failure(response(PAGE if status[0] != "2" else b"", status=status))
    assert error.reason is Reason.HTTP_STATUS
    assert status in error.detail


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(PAGE[:-100], length=len(PAGE)), Reason.TRUNCATED),
        (chunked(PAGE, end=False), Reason.TRUNCATED),
        (chunked(PAGE, end=False)[:-20], Reason.TRUNCATED),
        (compressed(gzip.compress(PAGE)[:-20]), Reason.TRUNCATED),
        (compressed(b""), Reason.TRUNCATED),
        (compressed(PAGE), Reason.ENCODING),
        (compressed(gzip.compress(PAGE) + b"more"), Reason.ENCODING),
        (compressed(gzip.compress(PAGE), "br"), Reason.ENCODING),
        (compressed(gzip.compress(PAGE), "gzip, gzip"), Reason.ENCODING),
        (b"", Reason.PROTOCOL),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Reason.PROTOCOL),
        (bytes(range(256)) * 4, Reason.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\n", Reason.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n", Reason.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 50_000, Reason.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n" + PAGE, Reason.PROTOCOL),
        (response(PAGE, "Content-Length: 7"), Reason.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Reason.PROTOCOL),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n", Reason.PROTOCOL),
    ],
    ids=[
        "length-longer-than-body",
        "chunks-without-end",
        "cut-inside-a-chunk",
        "gzip-cut-off",
        "gzip-of-nothing",
        "gzip-garbage",
        "gzip-with-a-tail",
        "unknown-encoding",
        "two-encodings",
        "nothing",
        "not-http",
        "binary",
        "head-cut-off",
        "header-garbage",
        "endless-headers",
        "negative-length",
        "two-lengths",
        "bad-chunk",
        "other-protocol",
    ],
)
def test_a_broken_answer_is_a_typed_failure(answer: bytes, reason: Reason) -> None:
    assert failure(answer).reason is reason


def test_a_connection_that_is_reset_in_the_middle_is_a_typed_failure() -> None:
    def answer(exchange: Exchange) -> None:
        exchange.send(response(PAGE[:100], length=len(PAGE)))
        exchange.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        exchange.peer.close()

    error = failure(answer)
    assert error.reason in (Reason.PROTOCOL, Reason.TRUNCATED)


# Time


def drips_the_body(exchange: Exchange) -> None:
    exchange.send(response(b"", length=len(PAGE)))
    exchange.drip(PAGE)


def drips_the_head(exchange: Exchange) -> None:
    exchange.drip(response(PAGE))


@pytest.mark.parametrize("answer", [drips_the_body, drips_the_head, Exchange.hold])
def test_a_server_that_never_ends_costs_no_more_than_the_timeout(answer: Answer) -> None:
    begun = time.monotonic()
    assert failure(answer, timeout=0.3).reason is Reason.TIMEOUT
    # All of the page would take a minute; a second's grace for a busy machine.
    assert 0.3 <= time.monotonic() - begun < 10


def test_a_tls_handshake_that_never_ends_leaves_no_connection_open() -> None:
    closed = threading.Event()

    def answer(exchange: Exchange) -> None:
        exchange.hold()
        closed.set()

    async def once(url: str) -> None:
        async with new_client(tls=True) as client:
            with pytest.raises(ScrapeError) as caught:
                await fetch(client, url, timeout=0.3, max_page_bytes=1000)
            assert caught.value.reason is Reason.TIMEOUT
            assert await asyncio.to_thread(closed.wait, 10)

    with HostileServer(answer) as server:
        asyncio.run(once(server.url.replace("http", "https")))


# Memory

BOMB = gzip.compress(b"\n" * 64_000_000, compresslevel=1)
LIMIT = 100_000


def sends_for_ever(exchange: Exchange, start: bytes, more: bytes) -> None:
    exchange.send(start)
    while not exchange.stopped.is_set():
        exchange.send(more)


def endless_page(exchange: Exchange) -> None:
    sends_for_ever(exchange, b"HTTP/1.1 200 OK\r\n\r\n", b"\n" * 65536)


def endless_tail(exchange: Exchange) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n"
    sends_for_ever(exchange, head + gzip.compress(PAGE), b"\0" * 65536)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (endless_page, Reason.TOO_LARGE),
        (response(b"a" * (LIMIT + 1)), Reason.TOO_LARGE),
        (compressed(BOMB), Reason.TOO_LARGE),
        (endless_tail, Reason.ENCODING),
    ],
    ids=["endless-page", "one-byte-over", "gzip-bomb", "endless-tail-of-gzip"],
)
def test_a_page_over_max_page_bytes_is_refused_before_it_fills_the_memory(
    answer: Answer | bytes, reason: Reason
) -> None:
    tracemalloc.start()
    try:
        error = failure(answer, max_page_bytes=LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error.reason is reason
    assert peak < 5_000_000 < len(gzip.decompress(BOMB))


# Addresses


def test_a_redirect_is_a_failure_that_names_its_goal_and_the_goal_is_never_contacted() -> None:
    with HostileServer(response(PAGE)) as goal:
        location = f"http://user:hunter2@127.0.0.1:{goal.port}/metrics?key=hunter2"
        error = failure(response(b"", f"Location: {location}", status="302 Found"))
        assert error.reason is Reason.REDIRECT
        assert f"127.0.0.1:{goal.port}/metrics" in error.detail
        assert "hunter2" not in error.detail
        assert goal.connections == 0


def test_a_redirect_to_nowhere_is_a_typed_failure() -> None:
    for location in ("http://[::1", "http://xn--/", "//["):
        error = failure(response(b"", f"Location: {location}", status="302 Found"))
        assert error.reason in (Reason.REDIRECT, Reason.PROTOCOL)


def test_no_proxy_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostileServer(response(b"proxied 1\n")) as proxy, HostileServer(response(PAGE)) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert scrape(server.url) == PAGE
        assert proxy.connections == 0


def test_user_and_password_of_the_url_are_sent_as_basic_authentication() -> None:
    with HostileServer(response(PAGE)) as server:
        scrape(server.url.replace("127.0.0.1", "user:hunter2@127.0.0.1"))
        assert b"Authorization: Basic dXNlcjpodW50ZXIy" in server.requests[0]


# Connections


def test_a_server_that_closes_idle_connections_between_scrapes_causes_no_failure() -> None:
    def answer(exchange: Exchange) -> object:
        exchange.send(response(PAGE))  # and closes, though it did not say that it would
        return False

    async def three_times(url: str) -> list[bytes]:
        async with new_client(tls=False) as client:
            got = []
            for _ in range(3):
                got.append(await fetch(client, url, timeout=20, max_page_bytes=100_000))
                await asyncio.sleep(0.05)
            return got

    with HostileServer(answer) as server:
        assert asyncio.run(three_times(server.url)) == [PAGE] * 3


def test_a_connection_that_the_server_keeps_is_used_again() -> None:
    def answer(exchange: Exchange) -> object:
        exchange.send(response(PAGE))
        return True

    async def twice(url: str) -> None:
        async with new_client(tls=False) as client:
            for _ in range(2):
                await fetch(client, url, timeout=20, max_page_bytes=100_000)

    with HostileServer(answer) as server:
        asyncio.run(twice(server.url))
        assert (server.connections, len(server.requests)) == (1, 2)


# Words


@pytest.mark.parametrize(
    "answer",
    [
        response(b"", status="404 " + "a" * 50_000),
        response(b"", status="404 \x1b[31mred\x9b"),
        response(b"", "Location: http://x/" + "a" * 50_000, status="302 Found"),
        compressed(b"", "a" * 50_000),
        b"a" * 50_000 + b"\r\n\r\n",
    ],
    ids=["long-status", "terminal-codes", "long-location", "long-encoding", "long-garbage"],
)
def test_what_a_server_says_is_told_on_one_short_printable_line(answer: bytes) -> None:
    detail = failure(answer).detail
    assert len(detail) < 250
    assert detail.isprintable()


# The engine's version


def version(url: str) -> str:
    async def once() -> str:
        async with new_client(tls=False) as client:
            return await fetch_version(client, url, 20)

    return asyncio.run(once())


@pytest.mark.parametrize("path", ["/metrics", "/vllm/metrics", "/metrics?name=a"])
def test_the_version_is_asked_for_beside_the_metrics_page(path: str) -> None:
    with HostileServer(response(b'{"version": "0.32.0"}')) as server:
        base = server.url.removesuffix("/metrics")
        assert version(f"{base}{path}") == "0.32.0"
        beside = path.partition("?")[0].removesuffix("metrics")
        assert server.requests[0].startswith(f"GET {beside}version HTTP/1.1".encode())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n",
        response(b"<html>"),
        response(b"[]"),
        response(b"{}"),
        response(b'{"version": 3}'),
        response(b'{"version": "a\\nb"}'),
        response(b"[" * 9_000),
        response(b" " * 20_000),
    ],
)
def test_a_server_without_that_route_has_an_unknown_version(answer: bytes) -> None:
    with HostileServer(answer) as server:
        assert version(server.url) == ""


def test_a_server_that_is_not_there_is_a_failure_and_no_unknown_version() -> None:
    with pytest.raises(ScrapeError) as caught:
        version("http://127.0.0.1:1/metrics")
    assert caught.value.reason is Reason.CONNECT
