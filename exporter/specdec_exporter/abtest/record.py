"""What a run leaves behind: sessions, requests and the server's counters, one JSON object a line.

A file is written from top to bottom as things happen, so one that was broken off holds all that was
measured until then, and one that was taken up again holds several sessions. Lines to values and
values to lines; this module opens no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from specdec_exporter.abtest.errors import BenchError


@dataclass(frozen=True, slots=True)
class Session:
    """One start of a measurement, and the conditions that it ran under."""

    label: str
    started: float | None = None
    """Unix seconds; None where somebody else measured."""
    model: str | None = None
    prompts: str | None = None
    """Fingerprint of the prompt file."""
    seed: int | None = None
    """Of the ids at the head of the prompts."""
    concurrency: int | None = None
    server: Mapping[str, str] | None = None
    """What the server says of itself: version, longest context, flags that it shows."""
    source: str | None = None
    """The file that it was imported from; None for a measurement of our own."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of one request as the server itself counted them."""

    steps: int
    """Verified drafts."""
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request as its client saw it; times in seconds of the client's clock since it was sent.

    None is "not seen": no first output where nothing came, no tokens where the server told none.
    """

    workload: str
    prompt: str
    repeat: int
    """From 1."""
    started: float | None = None
    """When it was sent, unix seconds."""
    first_output_seconds: float | None = None
    """To the first fragment of reasoning, content or a tool call."""
    end_seconds: float | None = None
    """To the last such fragment, or to the event that says why the answer ended."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    problems: tuple[str, ...] = ()
    """Why the answer is not what was asked for."""
    failure: str | None = None
    """Why there is no whole answer."""
    acceptance: Acceptance | None = None
    warmup: bool = False

    @property
    def valid(self) -> bool:
        """Whether the answer is whole, and what was asked for."""
        return self.failure is None and not self.problems

    @property
    def output_speed(self) -> float | None:
        """Tokens a second after the first: (completion tokens − 1) / (end − first output).

        A failed request delivered nothing, at 0 tokens a second: left out it would make its side
        faster. A whole answer of one token, or all of whose tokens came at once, has no speed.
        """
        if self.failure is not None:
            return 0.0
        first, end, tokens = self.first_output_seconds, self.end_seconds, self.completion_tokens
        if first is None or end is None or tokens is None or tokens < 2 or end <= first:
            return None
        return (tokens - 1) / (end - first)


@dataclass(frozen=True, slots=True)
class Page:
    """The server's counters before or after the requests of a workload."""

    workload: str
    moment: Literal["before", "after"]
    t: float
    """Unix seconds."""
    lines: tuple[str, ...]
    """Lines of its metrics page, those that figures are made of."""


Line = Session | Request | Page


@dataclass(frozen=True, slots=True)
class Span:
    """The requests of one workload in one session, between two looks at the server's counters."""

    session: int
    """Index of the session."""
    workload: str
    requests: tuple[Request, ...]
    before: Page | None
    after: Page | None


@dataclass(frozen=True, slots=True)
class Run:
    """One file: one side of a comparison."""

    sessions: tuple[Session, ...]
    spans: tuple[Span, ...]
    warmups: tuple[Request, ...]

    @property
    def label(self) -> str:
        """What this side is called."""
        return self.sessions[0].label

    @property
    def requests(self) -> tuple[Request, ...]:
        """All measured requests, warm-ups left out, in the order in which they ended."""
        return tuple(request for span in self.spans for request in span.requests)


_KINDS: dict[str, TypeAdapter[Line]] = {
    kind.__name__.lower(): TypeAdapter(kind) for kind in (Session, Request, Page)
}


def to_line(value: Line) -> str:
    """One line of a file, without its end."""
    plain = {"kind": type(value).__name__.lower(), **asdict(value)}
    return json.dumps({k: v for k, v in plain.items() if v is not None}, ensure_ascii=False)


def read_lines(lines: Iterable[str], name: str) -> Run:
    """A file's lines as a run.

    A last line that was cut off in the middle is what a killed process leaves, and is passed over.

    Args:
        lines: of the file.
        name: of the file, for messages.

    Raises:
        BenchError: a line is not ours, or there is no session; names the place.
    """
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.strip()]
    values = []
    for n, line in numbered:
        try:
            values.append(_value(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if (n, line) == numbered[-1] and not line.endswith("\n") and values:
                break
            raise BenchError(
                f"{name}:{n}: not a line of a measurement ({_short(error)}); "
                "expected a file that `bench run` or `bench import-csv` wrote"
            ) from error
    if not values or not isinstance(values[0], Session):
        raise BenchError(f"{name}: no measurement in it; expected what `bench run` writes")
    return _assemble(values)


def _value(line: str) -> Line:
    plain = json.loads(line)
    return _KINDS[plain.pop("kind")].validate_python(plain)


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())[:80] or type(error).__name__


@dataclass(slots=True)
class _OpenSpan:
    session: int
    workload: str
    requests: list[Request] = field(default_factory=list)
    pages: dict[str, Page] = field(default_factory=dict)


def _assemble(values: Iterable[Line]) -> Run:
    sessions: list[Session] = []
    spans: list[_OpenSpan] = []
    warmups: list[Request] = []
    for value in values:
        if isinstance(value, Session):
            sessions.append(value)
            continue
        if isinstance(value, Request) and value.warmup:
            warmups.append(value)
            continue
        begins = isinstance(value, Page) and value.moment == "before"
        here = len(sessions) - 1, value.workload
        if begins or not spans or (spans[-1].session, spans[-1].workload) != here:
            spans.append(_OpenSpan(*here))
        if isinstance(value, Request):
            spans[-1].requests.append(value)
        else:
            spans[-1].pages[value.moment] = value
    return Run(
        sessions=tuple(sessions),
        spans=tuple(
            Span(
                session=span.session,
                workload=span.workload,
                requests=tuple(span.requests),
                before=span.pages.get("before"),
                after=span.pages.get("after"),
            )
            for span in spans
        ),
        warmups=tuple(warmups),
    )
