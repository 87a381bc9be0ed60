"""What is asked: workloads of prompts from a YAML file, each with what a right answer is.

Every request of a run gets an id at its head that no other has, so that nothing of it is in the
server's prefix cache; it is made from a seed, so that the other side gets the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.schema import check_schema
from specdec_exporter.abtest.validity import Expectation

READY = ("default",)
"""Prompt files that come with the package, by name."""
_OURS = ("model", "messages", "stream", "stream_options", "n")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: what is sent, and what is expected back."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    request: Mapping[str, Any]
    """Further fields of the request's body, such as `max_tokens` or `tools`."""
    expected: Expectation


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one kind, whose figures belong together."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A prompt file."""

    workloads: tuple[Workload, ...]

    @property
    def fingerprint(self) -> str:
        """Equal for two files that ask and expect the same."""
        plain = json.dumps([asdict(w) for w in self.workloads], sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:16]


def request_id(seed: int, workload: str, prompt: str, repeat: int | str) -> str:
    """The id of one request, the same on both sides of a comparison."""
    return hashlib.sha256(f"{seed}/{workload}/{prompt}/{repeat}".encode()).hexdigest()[:16]


def body(prompt: Prompt, unique: str, model: str) -> dict[str, Any]:
    """The body of a chat completion with the id at the head of its first message.

    Where there are tools and no system message it gets one of its own: templates put tools between
    the two, and tools that come first would be found in the cache.
    """
    head = f"[request {unique}]"
    first, *rest = prompt.messages
    if "tools" in prompt.request and first.get("role") != "system":
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": head}, first, *rest]
    elif isinstance(content := first.get("content"), str):
        messages = [{**first, "content": f"{head}\n{content}"}, *rest]
    else:
        parts = [{"type": "text", "text": head}, *(content or ())]
        messages = [{**first, "content": parts}, *rest]
    return {
        **prompt.request,
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _ToolCall(_Strict):
    name: str
    arguments: dict[str, Any]


class _Expect(_Strict):
    pattern: str | None = None
    json_schema: dict[str, Any] | None = None
    final_line: str | None = None
    tool_call: _ToolCall | None = None
    may_be_cut: bool | None = None

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: not a regular expression ({error})") from error
        if self.json_schema is not None:
            check_schema(self.json_schema, "json_schema")
        return self


class _Part(_Strict):
    request: dict[str, Any] = Field(default_factory=dict)
    expect: _Expect = Field(default_factory=_Expect)

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        for name in _OURS:
            if name in self.request:
                raise ValueError(f"request.{name} is set by the command itself; leave it out")
        return self


class _Prompt(_Part):
    id: str = Field(min_length=1)
    system: str | None = None
    user: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.user is None) == (self.messages is None):
            raise ValueError("give either user (and system) or messages")
        if self.messages is not None and self.system is not None:
            raise ValueError("system goes into messages")
        return self


class _Workload(_Part):
    name: str = Field(min_length=1)
    prompts: list[_Prompt] = Field(min_length=1)


class _File(_Part):
    workloads: list[_Workload] = Field(min_length=1)


def load(name: str) -> PromptSet:
    """A prompt file: by path, or one of `READY` by name.

    Raises:
        BenchError: it cannot be read, or something in it is wrong; names the place.
    """
    try:
        if name in READY:
            text = resources.files(__package__).joinpath("data", f"{name}.yaml").read_text("utf-8")
        else:
            text = Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        known = ", ".join(READY)
        raise BenchError(f"{name}: {why}; give a YAML file of prompts, or {known}") from error
    return parse(text, name)


def parse(text: str, name: str) -> PromptSet:
    """The text of a prompt file.

    Args:
        text: YAML.
        name: of the file, for messages.

    Raises:
        BenchError: something in it is wrong; names the place.
    """
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        what = " ".join((error.problem or "not YAML").split())
        raise BenchError(f"{name}{line}: not YAML: {what}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise BenchError(f"{name}: not YAML: {' '.join(str(error).split())[:120]}") from error
    if not isinstance(document, dict):
        raise BenchError(f"{name}: no prompts in it; expected `workloads:` with a list of them")
    try:
        prompts = _prompt_set(_File.model_validate(document))
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise BenchError(f"{name}: {place}{what}") from error
    _check(prompts, name)
    return prompts


def _prompt_set(file: _File) -> PromptSet:
    return PromptSet(
        tuple(
            Workload(
                workload.name,
                tuple(
                    Prompt(
                        prompt.id,
                        tuple(_messages(prompt)),
                        {**file.request, **workload.request, **prompt.request},
                        _expectation((file.expect, workload.expect, prompt.expect)),
                    )
                    for prompt in workload.prompts
                ),
            )
            for workload in file.workloads
        )
    )


def _messages(prompt: _Prompt) -> Iterator[Mapping[str, Any]]:
    if prompt.messages is not None:
        yield from prompt.messages
        return
    if prompt.system is not None:
        yield {"role": "system", "content": prompt.system}
    yield {"role": "user", "content": prompt.user}


def _expectation(parts: Sequence[_Expect]) -> Expectation:
    """The nearest says what holds; what it does not name holds from further out."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= {k: v for k, v in part if v is not None}
    if call := merged.pop("tool_call", None):
        merged["tool_call"] = (call.name, call.arguments)
    return Expectation(**merged)


def _check(prompts: PromptSet, name: str) -> None:
    names = [workload.name for workload in prompts.workloads]
    ids = [f"{w.name}/{p.id}" for w in prompts.workloads for p in w.prompts]
    for what, found in (("workload", names), ("prompt", ids)):
        if twice := next((n for n in found if found.count(n) > 1), None):
            raise BenchError(f"{name}: {what} {twice} is there twice; each needs a name of its own")
    try:
        prompts.fingerprint  # noqa: B018 - what cannot be written as JSON cannot be sent either
    except (TypeError, ValueError) as error:
        raise BenchError(
            f"{name}: a value cannot be sent as JSON ({error}); put dates in quotes"
        ) from error


def _place(loc: Sequence[int | str]) -> str:
    place = ""
    for part in loc:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    return f"{place}: " if place else ""
