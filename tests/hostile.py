"""A small HTTP server on a raw socket, so that it can do what no HTTP library would let it do.

It runs in threads of its own: what it sends is in no way held up by the client under test.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, to be answered as badly as a test likes."""

    number: int
    """Of the request among those for the same path, over all connections, from 0."""
    head: bytes
    peer: socket.socket
    stopped: threading.Event

    def send(self, data: bytes) -> None:
        self.peer.sendall(data)

    def drip(self, data: bytes, seconds: float = 0.05) -> None:
        """Send one byte at a time."""
        for i in range(len(data)):
            self.send(data[i : i + 1])
            if self.stopped.wait(seconds):
                return

    def hold(self) -> None:
        """Say nothing more until the client has gone."""
        while self.peer.recv(4096):
            pass


Answer = Callable[[Exchange], object]
"""Answers one request; the connection is closed after it, unless it returns True."""


class HostileServer:
    """Answers each request on 127.0.0.1 with `answer`, which may be exchanged while it runs."""

    def __init__(self, answer: Answer | bytes) -> None:
        self.answer = answer
        self.requests: list[bytes] = []
        self.connections = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for peer in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(peer)
            if self._stopped.is_set():
                peer.close()
                return
            self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            while (head := _head(peer)) is not None:
                with self._lock:
                    line = head.partition(b"\r\n")[0]
                    number = sum(before.startswith(line) for before in self.requests)
                    self.requests.append(head)
                answer = self.answer
                exchange = Exchange(number, head, peer, self._stopped)
                if isinstance(answer, bytes):
                    exchange.send(answer)
                    break
                if answer(exchange) is not True:
                    break
            # Closed at once, what the client still sends would be answered by a reset, and that may
            # overtake the answer.
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(65536):
                pass
        self._open.discard(peer)


TLS_HELLO = b"\x16\x03"


def _head(peer: socket.socket) -> bytes | None:
    head = b""
    while b"\r\n\r\n" not in head and not head.startswith(TLS_HELLO):
        data = peer.recv(65536)
        if not data:
            return None
        head += data
    return head


def response(
    body: bytes, *headers: str, status: str = "200 OK", length: int | None = None
) -> bytes:
    """A whole response; `length` is what it says of itself, its real length unless given."""
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


def chunked(*chunks: bytes, end: bool = True) -> bytes:
    """A response in chunks, with or without the one that ends it."""
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(parts) + (b"0\r\n\r\n" if end else b"")
