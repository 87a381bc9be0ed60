"""Serves a simulated vLLM over HTTP against the real clock.

It knows the simulator and a small part of HTTP/1.1: GET of three paths. While the simulated server
is down it does not listen, so that a client is refused as by a process that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from types import TracebackType

from specdec_exporter.simulator.page import CONTENT_TYPE
from specdec_exporter.simulator.scenario import Scenario
from specdec_exporter.simulator.simulator import Simulator

_VERSION = json.dumps({"version": "0.32.0"}).encode()
_READ_TIMEOUT = 60.0
_REBIND_SECONDS = 0.2

_LONGEST_LEAP = 10.0
"""Seconds to let pass before simulating them, so that a late first scrape is not a slow one."""


class SimulatorServer:
    """A simulated server on a port, to `start` and `stop` or to use with `async with`.

    Args:
        scenario: what to simulate; its time starts with `start`.
        host: address to listen on.
        port: 0 takes a free one, which it keeps over simulated restarts.
        seed: of the simulation.
    """

    def __init__(
        self, scenario: Scenario, host: str = "127.0.0.1", port: int = 0, seed: int = 0
    ) -> None:
        self.host = host
        self.port = port
        """The bound port, once started."""
        self._scenario = scenario
        self._seed = seed
        self._simulator: Simulator | None = None
        self._began = 0.0
        self._listener: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        """The address of the server, without a path."""
        return f"http://{self.host}:{self.port}"

    @property
    def simulator(self) -> Simulator:
        """The simulation, advanced to now.

        Raises:
            RuntimeError: not started.
        """
        if self._simulator is None:
            raise RuntimeError("the simulator is not started")
        self._simulator.advance(time.monotonic() - self._began)
        return self._simulator

    async def start(self) -> None:
        """Listen, and start the simulation's time.

        Raises:
            OSError: the address cannot be bound.
        """
        self._simulator = Simulator(self._scenario, self._seed, epoch=time.time())
        self._began = time.monotonic()
        await self._listen()
        self._watcher = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Close everything; does nothing where nothing is open."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        await self._vanish()

    def restart(self, down_seconds: float = 10.0, k: int | None = None) -> None:
        """Restart the simulated server now, as an actuator would, with another k if given."""
        self.simulator.restart(down_seconds, k)
        self._changed.set()

    async def __aenter__(self) -> SimulatorServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve_connection, self.host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _vanish(self) -> None:
        """Stop listening and cut all connections, as the end of a process would."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await listener.wait_closed()

    async def _watch(self) -> None:
        """Follow the simulation up and down."""
        while True:
            self._changed.clear()
            simulator = self.simulator
            wait = simulator.next_event - simulator.now
            if simulator.up and self._listener is None:
                try:
                    await self._listen()
                except OSError:
                    # Somebody else may have the port for a moment.
                    wait = min(wait, _REBIND_SECONDS)
            elif not simulator.up:
                await self._vanish()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(0.0, wait), _LONGEST_LEAP)):
                    await self._changed.wait()

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while await self._serve_request(reader, writer):
                pass
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.LimitOverrunError:
            writer.write(_response("431 Request Header Fields Too Large", b"", keep=False))
        finally:
            del self._connections[task]
            writer.close()

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; returns whether the connection stays open."""
        async with asyncio.timeout(_READ_TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
        simulator = self.simulator
        if not simulator.up:
            # The script's moment has come before the watcher's.
            writer.transport.abort()
            return False
        request, *headers = head.decode("latin-1").split("\r\n")
        method, path, version = (*request.split(" "), "", "")[:3]
        # A body would have to be read before the next request, so its connection ends.
        headers = [header.lower() for header in headers]
        names = {header.partition(":")[0] for header in headers}
        keep = (
            version == "HTTP/1.1"
            and names.isdisjoint({"content-length", "transfer-encoding"})
            and "connection: close" not in headers
        )
        match path.partition("?")[0].rstrip("/"):
            case "/metrics" | "/health" | "/version" if method != "GET":
                response = _response("405 Method Not Allowed", b"", keep=keep)
            case "/metrics":
                response = _response("200 OK", simulator.page(), keep=keep, kind=CONTENT_TYPE)
            case "/health":
                response = _response("200 OK", b"", keep=keep)
            case "/version":
                response = _response("200 OK", _VERSION, keep=keep)
            case _:
                response = _response("404 Not Found", b'{"detail":"Not Found"}', keep=keep)
        writer.write(response)
        await writer.drain()
        return keep


async def serve(scenario: Scenario, host: str = "127.0.0.1", port: int = 0, seed: int = 0) -> None:
    """Serve a scenario until cancelled.

    Raises:
        OSError: the address cannot be bound.
    """
    async with SimulatorServer(scenario, host, port, seed):
        await asyncio.Event().wait()


def _response(status: str, body: bytes, *, keep: bool, kind: str = "application/json") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\n"
        f"content-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n"
        f"connection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    return head.encode() + body
