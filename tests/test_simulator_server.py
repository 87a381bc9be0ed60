from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
from specdec_exporter.model import Snapshot
from specdec_exporter.parse import parse
from specdec_exporter.simulator import SCENARIOS, SimulatorServer, serve

HEALTHY = SCENARIOS["healthy"]


def client_of(server: SimulatorServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, trust_env=False)


async def scrape(client: httpx.AsyncClient) -> Snapshot:
    response = await client.get("/metrics")
    assert response.status_code == 200
    return parse(response.content, t=time.monotonic())


async def until(happens: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that is due within a second or two."""
    deadline = time.monotonic() + 60.0
    while not await happens():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.02)


async def is_refused(server: SimulatorServer) -> bool:
    async with client_of(server) as client:
        try:
            await client.get("/health")
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False
    return False


async def is_up(server: SimulatorServer) -> bool:
    return not await is_refused(server)


def test_it_answers_as_vllm_does() -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY) as server, client_of(server) as client:
            metrics = await client.get("/metrics")
            assert metrics.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
            assert b"\nvllm:generation_tokens_total{" in metrics.content
            health = await client.get("/health")
            assert (health.status_code, health.content) == (200, b"")
            assert (await client.get("/version")).json() == {"version": "0.32.0"}
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get("/Metrics")).status_code == 404
            assert (await client.post("/health", content=b"x")).status_code == 405

    asyncio.run(story())


def test_counters_follow_the_real_clock_over_one_connection() -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY, seed=1) as server, client_of(server) as client:
            before = await scrape(client)
            await asyncio.sleep(1.5)
            after = await scrape(client)
            change = after.engines[0].counters - before.engines[0].counters
            seconds = change.decode_seconds
            assert seconds is not None
            assert 0.0 < seconds < 32 * (after.t - before.t)
            start = after.process_start_time
            assert start is not None
            assert 0.0 <= time.time() - start < 30.0

    asyncio.run(story())


def test_while_down_connections_are_refused_and_afterwards_the_port_is_the_same() -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY, seed=1) as server, client_of(server) as client:
            port = server.port
            before = await scrape(client)
            assert before.engines[0].num_speculative_tokens == 2
            server.restart(down_seconds=0.8, k=1)
            await until(lambda: is_refused(server))
            # The connection that was open is cut, and a new one refused.
            with pytest.raises(httpx.TransportError):
                await client.get("/metrics")
            await until(lambda: is_up(server))
            after = await scrape(client)
            assert server.port == port
            assert after.engines[0].num_speculative_tokens == 1
            assert after.process_start_time is not None
            assert before.process_start_time is not None
            assert after.process_start_time >= before.process_start_time + 0.8

    asyncio.run(story())


def test_an_actuator_can_restart_it_with_another_k() -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY) as server:
            server.restart(down_seconds=0.5, k=4)
            await until(lambda: is_refused(server))
            await until(lambda: is_up(server))
            async with client_of(server) as client:
                assert (await scrape(client)).engines[0].num_speculative_tokens == 4

    asyncio.run(story())


def test_serve_runs_until_cancelled_and_gives_its_port_back() -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY) as taken:
            with pytest.raises(OSError, match="in use"):
                await serve(HEALTHY, port=taken.port)
        serving = asyncio.create_task(serve(HEALTHY, port=taken.port))
        await until(lambda: is_up(taken))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert await is_refused(taken)

    asyncio.run(story())


def test_it_ends_with_connections_open_and_ends_only_once() -> None:
    async def story() -> None:
        server = SimulatorServer(HEALTHY)
        with pytest.raises(RuntimeError, match="not started"):
            _ = server.simulator
        await server.start()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /met")
        await writer.drain()
        await asyncio.wait_for(server.stop(), 5.0)
        await asyncio.wait_for(server.stop(), 5.0)
        # The end of the stream, clean or by a reset: it is over either way.
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
        writer.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", b"200 OK"),
        (b"GET /metrics?x=y HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"nonsense\r\n\r\n", b"404 Not Found"),
        (b"GET / HTTP/1.1\r\nx: " + 70_000 * b"x", b"431 Request Header Fields Too Large"),
    ],
    ids=["1.0", "close", "query", "nonsense", "long"],
)
def test_odd_requests_get_one_answer_and_the_end_of_the_connection(
    request_bytes: bytes, status: bytes
) -> None:
    async def story() -> None:
        async with SimulatorServer(HEALTHY) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(request_bytes)
            answer = await asyncio.wait_for(reader.readline(), 5.0)
            assert answer == b"HTTP/1.1 " + status + b"\r\n"
            await asyncio.wait_for(reader.read(), 5.0)
            writer.close()

    asyncio.run(story())
