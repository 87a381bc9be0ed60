"""Whether an answer is what was asked for: a broken answer that came fast is no gain."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from specdec_exporter.abtest.schema import mismatches, same

CUT = "cut off by max_tokens"

_FENCED = re.compile(r"\A```\w*\n(.*)\n```\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, its arguments as the text that the model wrote."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, put together from the fragments."""

    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an answer must be; what is None is not looked at."""

    pattern: str | None = None
    """A regular expression that is found in the content."""
    json_schema: dict[str, Any] | None = None
    """The whole content, or one fenced block that is all of it, is JSON that fits."""
    final_line: str | None = None
    """The last line of the content that is not empty, spaces around it left out."""
    tool_call: tuple[str, dict[str, Any]] | None = None
    """The one tool that is called, and its arguments."""
    may_be_cut: bool = False
    """An answer that ends at max_tokens is as good as any other."""


def problems(answer: Answer, expected: Expectation) -> tuple[str, ...]:
    """Why an answer is not what was asked for, each reason in a few words; none if it is."""
    found = []
    if answer.finish_reason == "length" and not expected.may_be_cut:
        found.append(CUT)
    if expected.pattern is not None and not re.search(expected.pattern, answer.content):
        found.append("pattern not found")
    if expected.json_schema is not None:
        found += _json_problems(answer.content, expected.json_schema)
    if expected.final_line is not None and _last_line(answer.content) != expected.final_line:
        found.append("another final line")
    if expected.tool_call is not None:
        found += _call_problems(answer.tool_calls, *expected.tool_call)
    return tuple(found)


def _json_problems(content: str, schema: dict[str, Any]) -> list[str]:
    text = content.strip()
    fenced = _FENCED.fullmatch(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return ["not JSON"]
    return [f"JSON: {why}" for why in list(mismatches(value, schema))[:1]]


def _last_line(content: str) -> str:
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _call_problems(calls: tuple[ToolCall, ...], name: str, arguments: dict[str, Any]) -> list[str]:
    if len(calls) != 1:
        return [f"{len(calls)} tool calls, not one" if calls else "no tool call"]
    if calls[0].name != name:
        return ["another tool called"]
    try:
        given = json.loads(calls[0].arguments)
    except (ValueError, RecursionError):
        return ["tool arguments are not JSON"]
    return [] if same(given, arguments) else ["other tool arguments"]
