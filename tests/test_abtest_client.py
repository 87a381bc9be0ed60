"""A stream is timed by its output alone, and whatever breaks it is told in one line."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from specdec_exporter.abtest.client import (
    NO_USAGE,
    Reply,
    Stream,
    UnreachableError,
    ask,
    new_client,
)
from specdec_exporter.abtest.record import Acceptance
from specdec_exporter.abtest.validity import ToolCall

from tests.fake_openai import CUT, Answer, FakeServer, delta, finish, refuses, says, usage


def streamed(*events: tuple[float, dict[str, Any]]) -> Stream:
    """A stream of events that came at these seconds."""
    stream = Stream()
    for seconds, event in events:
        stream.read(f"data: {json.dumps(event)}\n".encode(), seconds)
    stream.read(b"data: [DONE]\n", 99.0)
    return stream


def reply(answer: Answer) -> Reply:
    async def once(url: str) -> Reply:
        async with new_client(None) as client:
            return await ask(client, url, {"messages": [{"role": "user", "content": "hi"}]})

    with FakeServer(answer) as server:
        return asyncio.run(once(server.url))


# What counts as output


@pytest.mark.parametrize(
    "output",
    [
        delta(content="a"),
        delta(reasoning="a"),
        delta(reasoning_content="a"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
    ],
    ids=["content", "reasoning", "reasoning of old", "tool name", "tool arguments"],
)
def test_the_first_output_is_reasoning_content_or_a_tool_call(output: dict[str, Any]) -> None:
    stream = streamed((1.0, delta(role="assistant", content="")), (2.0, output), (3.0, finish()))
    assert stream.first_output == 2.0


@pytest.mark.parametrize(
    "metadata",
    [
        delta(role="assistant"),
        delta(role="assistant", content=""),
        delta(content=None, reasoning=None, tool_calls=[]),
        {"choices": []},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}},
    ],
)
def test_an_event_without_output_is_not_the_first_output(metadata: dict[str, Any]) -> None:
    stream = streamed((1.0, metadata), (2.0, delta(content="a")), (3.0, finish()))
    assert stream.first_output == 2.0


def test_the_end_is_the_last_output_or_the_reason_and_not_the_usage() -> None:
    stream = streamed((1.0, delta(content="a")), (2.0, finish()), (7.0, usage(2)))
    assert stream.end == 2.0
    stream = streamed((1.0, finish()), (2.0, delta(content="a")), (7.0, usage(2)))
    assert stream.end == 2.0


def test_fragments_are_put_together_and_tool_calls_by_their_index() -> None:
    def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
        return delta(
            tool_calls=[{"index": index, "function": {"name": name, "arguments": arguments}}]
        )

    answer = streamed(
        (1.0, delta(content="a")),
        (1.1, call(1, "second", "")),
        (1.2, call(0, "first", '{"x"')),
        (1.3, call(0, None, ":1}")),
        (1.4, call(1, None, "{}")),
        (1.5, finish("tool_calls", content="b")),
    ).answer()
    assert answer.content == "ab"
    assert answer.tool_calls == (ToolCall("first", '{"x":1}'), ToolCall("second", "{}"))
    assert answer.finish_reason == "tool_calls"


def test_the_acceptance_that_vllm_sends_with_the_usage_is_kept() -> None:
    metrics = {
        "speculative_decoding": {
            "mean_acceptance_length": 1.5,
            "num_spec_steps": 4,
            "num_draft_tokens": 8,
            "num_accepted_draft_tokens": 2,
        }
    }
    stream = streamed((1.0, delta(content="a")), (2.0, finish()), (2.1, usage(6, metrics=metrics)))
    assert stream.acceptance == Acceptance(steps=4, draft_tokens=8, accepted_tokens=2)


# Over the wire


def test_a_whole_stream_gives_times_tokens_and_text() -> None:
    got = reply(says("hello, world", tokens=9))
    assert got.failure is None
    assert got.answer.content == "hello, world"
    assert (got.prompt_tokens, got.completion_tokens) == (20, 9)
    assert got.first_output_seconds is not None
    assert got.end_seconds is not None
    assert 0 < got.first_output_seconds <= got.end_seconds


def test_an_event_may_hold_what_ends_lines_elsewhere() -> None:
    text = "one\u2028two\u0085three"
    assert reply(says(text)).answer.content == text


def test_comments_and_lines_that_are_no_data_are_passed_over() -> None:
    got = reply(lambda _: [": ping\n\n", "event: x\n", delta(content="a"), finish(), usage(3)])
    assert (got.failure, got.answer.content) == (None, "a")


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (lambda _: [delta(content="a"), CUT], "the stream broke off ("),
        (lambda _: [delta(content="a")], "the stream ended in the middle"),
        (lambda _: [delta(content="a"), finish()], NO_USAGE),
        (lambda _: [delta(content="a"), "data: {nonsense\n\n"], "an event is not of a chat"),
        (lambda _: [delta(content="a"), "data: [1]\n\n"], "an event is not of a chat"),
        (
            lambda _: [{"error": {"message": "out of memory"}}],
            "the stream broke off (out of memory)",
        ),
        (refuses(500, "engine is dead"), "status 500: engine is dead"),
        (refuses(429, "too many"), "status 429: too many"),
    ],
    ids=["cut", "no end", "no usage", "nonsense", "a list", "error", "status 500", "status 429"],
)
def test_what_breaks_an_answer_is_told_in_one_line(answer: Answer, failure: str) -> None:
    got = reply(answer)
    assert got.failure is not None
    assert got.failure.startswith(failure)
    assert "\n" not in got.failure
    assert not got.refused


def test_a_connection_that_breaks_after_the_last_event_loses_nothing() -> None:
    assert reply(lambda _: [delta(content="a"), finish(), usage(3), CUT]).failure is None


def test_a_request_that_the_server_does_not_take_is_told_apart_from_a_failure() -> None:
    got = reply(refuses(400, "max_tokens is\ntoo large"))
    assert got.refused
    assert got.failure == "status 400: max_tokens is too large"


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with FakeServer(says("x")) as server:
        url = server.url

    async def once() -> None:
        async with new_client(None) as client:
            await ask(client, url, {})

    with pytest.raises(UnreachableError, match=f"^{url} does not answer .*; is it up") as caught:
        asyncio.run(once())
    assert "\n" not in str(caught.value)
