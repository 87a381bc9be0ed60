"""A closed-loop client of a server, that times every token stream by its own clock.

The clock runs in a process of its own, `python -m tests.real.load`: what else the tests do must not
keep it from looking. In a session of its own, too, since Linux shares the processor out by session
(sched_autogroup), and neighbours in a session that are nice slow down the others in it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Completion:
    """One streamed completion, in seconds of the client's own clock."""

    sent: float
    first_token: float
    last_token: float
    tokens: int
    """As the server's `usage` says: a chunk of the stream can carry several tokens."""
    chunks: int
    """Parts that the tokens came in: one per engine step, unless the server falls behind."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a client saw of a load."""

    completions: tuple[Completion, ...]

    @property
    def tokens(self) -> int:
        """All tokens that were delivered."""
        return sum(c.tokens for c in self.completions)

    @property
    def tpot_seconds(self) -> float:
        """Time per output token after the first, every token weighing the same."""
        decoding = sum(c.last_token - c.first_token for c in self.completions)
        return decoding / (self.tokens - len(self.completions))

    @property
    def tokens_per_chunk(self) -> float:
        """Tokens per part of the streams, the first of each stream left out."""
        chunks = sum(c.chunks - 1 for c in self.completions)
        return (self.tokens - len(self.completions)) / chunks


Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""


def complete(url: str, prompt: Prompt, max_tokens: int, temperature: float) -> Completion:
    """Stream one completion of exactly `max_tokens` tokens, and time its chunks."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = HTTPConnection(address.hostname, address.port, timeout=120.0)
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        sent = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"status {response.status}: {response.read(2000).decode()}")
        arrivals: list[float] = []
        tokens = 0
        for line in response:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise OSError(f"the stream broke off: {event['error']}")
            if event["choices"]:
                arrivals.append(now)
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    finally:
        connection.close()
    return Completion(sent, arrivals[0], arrivals[-1], tokens, len(arrivals))


def run_load(
    url: str,
    prompts: Iterable[Prompt],
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> Load:
    """Send all prompts, `concurrency` at a time, each as soon as one before it is done.

    Raises:
        OSError: a request failed; the others end first.
    """
    asked = {
        "url": url,
        "prompts": list(prompts),
        "concurrency": concurrency,
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    client = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    if client.returncode != 0:
        raise OSError(client.stderr.rstrip().rpartition("\n")[2])
    return Load(tuple(Completion(**done) for done in json.loads(client.stdout)))


def send(
    url: str,
    prompts: Iterable[Prompt],
    concurrency: int,
    max_tokens: int,
    temperature: float,
) -> list[Completion]:
    waiting = iter(prompts)
    lock = threading.Lock()
    done: list[Completion] = []
    failures: list[Exception] = []

    def work() -> None:
        while not failures:
            with lock:
                prompt = next(waiting, None)
            if prompt is None:
                return
            try:
                done.append(complete(url, prompt, max_tokens, temperature))
            except Exception as failure:  # noqa: BLE001 - raised again below
                failures.append(failure)

    workers = [threading.Thread(target=work) for _ in range(concurrency)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return done


if __name__ == "__main__":
    try:
        json.dump([asdict(one) for one in send(**json.load(sys.stdin))], sys.stdout)
    except OSError as error:
        raise SystemExit(str(error)) from error
