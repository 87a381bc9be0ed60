"""One streamed chat completion, timed by the client's own clock.

It knows the OpenAI protocol, and of vLLM's additions the reasoning fragments and the acceptance
that a server started with `--per-request-spec-decode-metrics` sends with the usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.record import Acceptance
from specdec_exporter.abtest.validity import Answer, ToolCall

NO_USAGE = "the server sends no usage with its streams"
_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
"""A server that says nothing for so long has forgotten the request."""
_KEEPALIVE_SECONDS = 2.0
"""Servers close idle connections after five seconds and more; one reused at that moment breaks."""
_SHOWN = 160


class UnreachableError(BenchError):
    """Nothing answers at the address."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request; times as in `record.Request`."""

    started: float
    answer: Answer
    first_output_seconds: float | None = None
    end_seconds: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    acceptance: Acceptance | None = None
    failure: str | None = None
    refused: bool = False
    """The server takes no such request: a status from 400 to 499, but for "too many"."""


def new_client(api_key: str | None) -> httpx.AsyncClient:
    """A client that asks only whom it is told to: no proxies and no redirects."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        timeout=httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS, pool=None),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
        trust_env=False,
    )


async def ask(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> Reply:
    """Send one request and read its stream to the end.

    Whatever goes wrong once the server has been reached is told in the reply.

    Args:
        client: from `new_client`.
        url: of the server, without a path.
        body: of a streamed chat completion with usage.

    Raises:
        UnreachableError: no connection.
    """
    stream = Stream()
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json"}
    failure, refused = None, False
    started, begin = time.time(), time.perf_counter()
    try:
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", content=content, headers=headers
        ) as response:
            if response.status_code != httpx.codes.OK:
                failure = f"status {response.status_code}: {_words(await response.aread())}"
                refused = 400 <= response.status_code < 500 and response.status_code != 429
            else:
                # httpx splits lines at characters that may stand inside JSON.
                rest = b""
                async for chunk in response.aiter_bytes():
                    seconds = time.perf_counter() - begin
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        stream.read(line, seconds)
                failure = stream.verdict()
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise UnreachableError(f"{url} does not answer ({why(error)}); is it up?") from error
    except httpx.TimeoutException:
        failure = f"nothing came for {_SILENCE_SECONDS:.0f} s"
    except (httpx.HTTPError, httpx.StreamError) as error:
        # The connection may break after the last event, which loses nothing.
        failure = stream.verdict() and f"the stream broke off ({why(error)})"
    except BadEventError as error:
        failure = str(error)
    return Reply(
        started=started,
        answer=stream.answer(),
        first_output_seconds=stream.first_output,
        end_seconds=stream.end,
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        acceptance=stream.acceptance,
        failure=failure,
        refused=refused,
    )


class BadEventError(Exception):
    """The stream holds something that is no event of a chat completion."""


@dataclass(slots=True)
class Stream:
    """A stream of events so far; each line comes with the seconds since the request was sent."""

    first_output: float | None = None
    end: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    acceptance: Acceptance | None = None
    content: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Name and arguments by index."""

    def read(self, line: bytes, seconds: float) -> None:
        """Take in one line.

        Raises:
            BadEventError: it is not of such a stream, or tells of an error.
        """
        line = line.strip()
        if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise BadEventError(f"the stream broke off ({_words(data)})")
            for choice in event.get("choices") or ():
                self._choice(choice, seconds)
            if usage := event.get("usage"):
                self.prompt_tokens = usage.get("prompt_tokens")
                self.completion_tokens = usage.get("completion_tokens")
            self._metrics(event.get("metrics"))
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise BadEventError(f"an event is not of a chat completion: {_words(data)}") from error

    def _choice(self, choice: Mapping[str, Any], seconds: float) -> None:
        delta = choice.get("delta") or {}
        said = delta.get("content") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        calls = delta.get("tool_calls") or ()
        self.content.append(said)
        for call in calls:
            name, arguments = self.calls.setdefault(call.get("index", 0), ["", ""])
            function = call.get("function") or {}
            name += function.get("name") or ""
            arguments += function.get("arguments") or ""
            self.calls[call.get("index", 0)] = [name, arguments]
        if said or thought or calls:
            self.end = seconds
            if self.first_output is None:
                self.first_output = seconds
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
            self.end = seconds

    def _metrics(self, metrics: Mapping[str, Any] | None) -> None:
        if metrics and (drafts := metrics.get("speculative_decoding")):
            self.acceptance = Acceptance(
                steps=drafts["num_spec_steps"],
                draft_tokens=drafts["num_draft_tokens"],
                accepted_tokens=drafts["num_accepted_draft_tokens"],
            )

    def verdict(self) -> str | None:
        """Why this is no whole answer, once no more comes."""
        if self.finish_reason is None:
            return "the stream ended in the middle"
        if self.completion_tokens is None:
            return NO_USAGE
        return None

    def answer(self) -> Answer:
        """What was said so far."""
        return Answer(
            content="".join(self.content),
            tool_calls=tuple(
                ToolCall(name, arguments) for _, (name, arguments) in sorted(self.calls.items())
            ),
            finish_reason=self.finish_reason,
        )


def _words(data: bytes) -> str:
    """The server's own words, in one short line."""
    try:
        plain = json.loads(data)
        error = plain.get("error", plain)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = data.decode(errors="replace")
    shown = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(shown.split())[:_SHOWN]


def why(error: Exception) -> str:
    """What went wrong, in the system's own words where there are any: libraries wrap them up."""
    told: BaseException = error
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            told = cause
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(told).split())[:_SHOWN] or type(told).__name__
