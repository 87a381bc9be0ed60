"""Sends the prompts to one server and writes down what happens, as it happens."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import httpx
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specdec_exporter.abtest.client import NO_USAGE, Reply, UnreachableError, ask, new_client
from specdec_exporter.abtest.counters import generated
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.prompts import Prompt, PromptSet, Workload, body, request_id
from specdec_exporter.abtest.record import Page, Request, Run, Session, read_lines, to_line
from specdec_exporter.abtest.server import Counters, identify
from specdec_exporter.abtest.validity import problems
from specdec_exporter.model import ScrapeError


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    url: str
    label: str
    prompts: PromptSet
    repeat: int
    concurrency: int
    out: Path
    seed: int
    warmup: int
    model: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    workload: str
    prompt: Prompt
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.workload, self.prompt.id, self.repeat


def read(file: Path) -> Run:
    """A file that was written here.

    Raises:
        BenchError: it cannot be read, or is something else.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            return read_lines(lines, str(file))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise BenchError(f"{file}: {why}; expected what `bench run` writes") from error


async def run(plan: Plan, console: Console) -> Run:
    """Measure what the file does not hold yet.

    Each request is in the file as soon as it has ended, so that nothing that was measured is lost,
    whatever happens; the same plan goes on from there.

    Args:
        plan: what to measure.
        console: for the progress and for remarks.

    Returns:
        The whole file.

    Raises:
        BenchError: it cannot go on.
    """
    done = _done(plan)
    jobs = _remaining(plan, done)
    total = sum(map(len, jobs.values()))
    if not total:
        console.print(f"{plan.out} holds all of it already", highlight=False, soft_wrap=True)
        return read(plan.out)
    async with new_client(plan.api_key) as client, Counters(plan.url) as counters:
        session = await _session(plan, client, counters, console)
        if _holds_something(plan.out):
            _same_conditions(plan, read(plan.out), session)
            told = f"{plan.out}: {len(done)} measured before, {total} to go"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
        with _appending(plan.out) as file, _progress(console) as progress:
            measuring = _Measuring(plan, session, client, counters, file, console)
            task = progress.add_task("", total=total, completed=0)
            file.write(to_line(session) + "\n")
            refused = 0
            try:
                for workload in plan.prompts.workloads:
                    if workload.name not in jobs:
                        continue
                    progress.update(task, description=workload.name)
                    if await measuring.warm_up(workload):
                        await measuring.measure(
                            workload.name, jobs[workload.name], lambda: progress.advance(task)
                        )
                    else:
                        refused += 1
                        progress.advance(task, len(jobs[workload.name]))
            except UnreachableError as error:
                raise _kept(plan, error) from error
    if refused == len(jobs):
        raise BenchError(f"{plan.url} refuses every workload; nothing was measured")
    result = read(plan.out)
    console.print(summary(result, plan.out), highlight=False, soft_wrap=True)
    return result


def remaining(plan: Plan) -> int:
    """Requests that the file does not hold yet."""
    return sum(map(len, _remaining(plan, _done(plan)).values()))


def summary(result: Run, file: Path) -> str:
    """What a file holds, in a line, and one for each kind of failure."""
    requests = result.requests
    valid = sum(request.valid for request in requests)
    failures = Counter(r.failure for r in requests if r.failure is not None)
    told = [f"{file}: {len(requests)} requests, {valid} valid, {failures.total()} failed"]
    return "\n".join([*told, *(f"failed {n} times: {why}" for why, n in failures.most_common())])


class _Measuring:
    def __init__(
        self,
        plan: Plan,
        session: Session,
        client: httpx.AsyncClient,
        counters: Counters,
        file: TextIO,
        console: Console,
    ) -> None:
        self._plan = plan
        self._model = session.model or ""
        self._client = client
        self._counters = counters
        self._file = file
        self._console = console

    async def warm_up(self, workload: Workload) -> bool:
        """Whether the server takes requests of this workload."""
        prompt = workload.prompts[0]
        for n in range(1, max(1, self._plan.warmup) + 1):
            # An id of this moment: a second run must not find the first one's in the cache.
            unique = request_id(self._plan.seed, workload.name, prompt.id, f"{time.time_ns()}")
            reply = await self._ask(prompt, unique)
            if reply.failure == NO_USAGE:
                raise BenchError(
                    f"{self._plan.url}: {NO_USAGE}, without which there are no tokens to count; "
                    "stream_options.include_usage was asked for"
                )
            if reply.refused:
                self._console.print(
                    f"{workload.name} is left out: {reply.failure}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
                return False
            if n <= self._plan.warmup:
                measured = _request(_Job(workload.name, prompt, n), reply)
                self._write(replace(measured, warmup=True))
        return True

    async def measure(
        self, workload: str, jobs: Iterable[_Job], advance: Callable[[], object]
    ) -> None:
        before = await self._counters.page(workload, "before")
        if before is not None:
            self._write(before)
        waiting = iter(jobs)
        tokens = 0

        async def work() -> None:
            nonlocal tokens
            for job in waiting:
                unique = request_id(self._plan.seed, *job.key)
                request = _request(job, await self._ask(job.prompt, unique))
                self._write(request)
                tokens += request.completion_tokens or 0
                advance()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._plan.concurrency):
                    group.create_task(work())
        except* UnreachableError as errors:
            raise errors.exceptions[0] from errors
        if before is not None:
            expected = generated(before.lines) + tokens
            after = await self._counters.page(workload, "after", expected)
            if after is not None:
                self._write(after)

    async def _ask(self, prompt: Prompt, unique: str) -> Reply:
        return await ask(self._client, self._plan.url, body(prompt, unique, self._model))

    def _write(self, value: Request | Page) -> None:
        self._file.write(to_line(value) + "\n")


def _request(job: _Job, reply: Reply) -> Request:
    found = () if reply.failure is not None else problems(reply.answer, job.prompt.expected)
    return Request(
        workload=job.workload,
        prompt=job.prompt.id,
        repeat=job.repeat,
        started=reply.started,
        first_output_seconds=reply.first_output_seconds,
        end_seconds=reply.end_seconds,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        finish_reason=reply.answer.finish_reason,
        problems=found,
        failure=reply.failure,
        acceptance=reply.acceptance,
    )


def _remaining(plan: Plan, done: set[tuple[str, str, int]]) -> dict[str, list[_Job]]:
    """By workload, of those that have any."""
    jobs = {
        workload.name: [job for job in _jobs(workload, plan.repeat) if job.key not in done]
        for workload in plan.prompts.workloads
    }
    return {name: left for name, left in jobs.items() if left}


def _jobs(workload: Workload, repeat: int) -> Iterable[_Job]:
    """Each prompt once, then each a second time: a run that is broken off has all of them."""
    for n in range(1, repeat + 1):
        for prompt in workload.prompts:
            yield _Job(workload.name, prompt, n)


def _done(plan: Plan) -> set[tuple[str, str, int]]:
    if not _holds_something(plan.out):
        return set()
    return {(r.workload, r.prompt, r.repeat) for r in read(plan.out).requests}


def _holds_something(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _same_conditions(plan: Plan, held: Run, session: Session) -> None:
    old = held.sessions[0]
    for name in ("label", "model", "prompts", "seed", "concurrency"):
        was, now = getattr(old, name), getattr(session, name)
        if was != now:
            raise BenchError(
                f"{plan.out} holds a run with another {name} ({was}, now {now}); "
                "choose another --out"
            )


async def _session(
    plan: Plan, client: httpx.AsyncClient, counters: Counters, console: Console
) -> Session:
    model, known = await identify(client, plan.url, plan.model)
    try:
        known |= await counters.flags()
    except ScrapeError as error:
        told = f"no counters of the server, so no acceptance and no MAL: {error.detail}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return Session(
        label=plan.label,
        started=time.time(),
        model=model,
        prompts=plan.prompts.fingerprint,
        seed=plan.seed,
        concurrency=plan.concurrency,
        server=known,
    )


def _appending(file: Path) -> TextIO:
    """The file, open at its end, without a last line that a killed process has left half."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab+") as raw:
            raw.seek(0)
            raw.truncate(raw.read().rfind(b"\n") + 1)
        return file.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise BenchError(f"cannot write {file} ({error.strerror}); choose another --out") from error


def _kept(plan: Plan, error: Exception) -> BenchError:
    held = len(read(plan.out).requests)
    told = f"{held} requests are kept in {plan.out}, and the same command goes on from there"
    return BenchError(f"{error} {told}" if held else str(error))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
