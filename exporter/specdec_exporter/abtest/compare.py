"""Two runs side by side: by workload and by prompt, each figure of all requests and of valid ones.

A ratio is of the second run to the first. The ratio of the medians of a workload and the ratios of
the medians of its prompts are two different figures, and stay apart. What speaks against comparing
the two runs at all is told first. It computes; what it is given is the whole of what it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from specdec_exporter.abtest.counters import ServerFigures, server_figures
from specdec_exporter.abtest.record import Request, Run
from specdec_exporter.abtest.stats import Ratio, ratio, ratio_of_medians

SEED = 1
"""Of the resampling: the same files give the same intervals."""
HITS_ALLOWED = 0.01
LENGTHS_ALLOWED = 0.10
"""A longer or shorter answer than this, by median, is worth a warning."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of some requests on both sides."""

    output_speed: Ratio
    """Tokens a second after the first."""
    first_output_seconds: Ratio
    end_seconds: Ratio
    completion_tokens: Ratio


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One prompt on both sides."""

    prompt: str
    output_speed: Ratio
    valid_output_speed: Ratio


@dataclass(frozen=True, slots=True)
class Side:
    """One workload on one side."""

    requests: int
    valid: int
    failed: int
    cut: int
    """Ended by max_tokens."""
    num_speculative_tokens: int | None
    """Observed k; 0 is no speculation, None where the server showed no counters."""
    acceptance_ratio: float | None
    """By the server's counters, as is the next."""
    mean_acceptance_length: float | None
    request_acceptance_ratio: float | None
    """By what the server said of each request, as is the next."""
    request_mean_acceptance_length: float | None
    tpot_seconds: float | None
    """By the server's counters, every token weighing the same."""
    prefix_hit_ratio: float | None


@dataclass(frozen=True, slots=True)
class WorkloadComparison:
    """One workload on both sides."""

    workload: str
    all: Figures
    valid: Figures
    """Of the valid requests of each side."""
    prompts: tuple[PromptFigures, ...]
    a: Side
    b: Side

    @property
    def prompt_ratios(self) -> tuple[float, float] | None:
        """The least and the largest ratio of a prompt's medians of speed."""
        return span(p.output_speed.ratio for p in self.prompts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it."""

    a: str
    b: str
    """What the two sides are called."""
    warnings: tuple[str, ...]
    workloads: tuple[WorkloadComparison, ...]

    @property
    def prompt_ratios(self) -> tuple[float, float] | None:
        """The least and the largest ratio of a prompt's medians of speed, of all workloads."""
        return span(p.output_speed.ratio for w in self.workloads for p in w.prompts)

    @property
    def requests(self) -> tuple[int, int]:
        """Of each side."""
        return sum(w.a.requests for w in self.workloads), sum(w.b.requests for w in self.workloads)

    @property
    def valid(self) -> tuple[int, int]:
        """Valid requests of each side."""
        return sum(w.a.valid for w in self.workloads), sum(w.b.valid for w in self.workloads)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what has no value is None."""
        plain = asdict(self)
        for workload, told in zip(self.workloads, plain["workloads"], strict=True):
            told["prompt_ratios"] = workload.prompt_ratios
        return {
            **plain,
            "prompt_ratios": self.prompt_ratios,
            "requests": self.requests,
            "valid": self.valid,
        }


def span(values: Iterable[float | None]) -> tuple[float, float] | None:
    """The least and the largest, or None of nothing."""
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if known else None


def compare(a: Run, b: Run) -> Comparison:
    """Set two runs side by side; what only one of them has is left out, and told."""
    sides: dict[str, tuple[list[Request], list[Request]]] = {}
    for index, run in enumerate((a, b)):
        for request in run.requests:
            sides.setdefault(request.workload, ([], []))[index].append(request)
    names = [name for name, (of_a, of_b) in sides.items() if of_a and of_b]
    counters = {
        name: tuple(server_figures(s for s in r.spans if s.workload == name) for r in (a, b))
        for name in names
    }
    workloads = tuple(
        _workload(name, sides[name][0], sides[name][1], counters[name]) for name in names
    )
    label_a, label_b = (a.label, b.label) if a.label != b.label else ("A", "B")
    return Comparison(
        a=label_a,
        b=label_b,
        warnings=tuple(_warnings(a, b, (label_a, label_b), workloads, counters)),
        workloads=workloads,
    )


Counted = tuple[ServerFigures | None, ...]
Value = Callable[[Request], float | None]


def _workload(
    name: str, a: Sequence[Request], b: Sequence[Request], counted: Counted
) -> WorkloadComparison:
    valid_a, valid_b = ([r for r in side if r.valid] for side in (a, b))
    everything = _figures(name, a, b)
    prompts = [p for p in dict.fromkeys(r.prompt for r in a) if any(r.prompt == p for r in b)]

    def of_prompt(prompt: str) -> PromptFigures:
        chosen = [[r for r in s if r.prompt == prompt] for s in (a, b, valid_a, valid_b)]
        speed = _ratio(f"{name}/{prompt}", chosen[0], chosen[1], _speed)
        all_valid = (len(chosen[0]), len(chosen[1])) == (len(chosen[2]), len(chosen[3]))
        return PromptFigures(
            prompt,
            speed,
            speed if all_valid else _ratio(f"{name}/{prompt}", chosen[2], chosen[3], _speed),
        )

    return WorkloadComparison(
        workload=name,
        all=everything,
        valid=everything
        if len(valid_a) + len(valid_b) == len(a) + len(b)
        else _figures(name, valid_a, valid_b),
        prompts=tuple(map(of_prompt, prompts)),
        a=_side(a, counted[0]),
        b=_side(b, counted[1]),
    )


def _figures(name: str, a: Sequence[Request], b: Sequence[Request]) -> Figures:
    return Figures(
        output_speed=_ratio(name, a, b, _speed),
        first_output_seconds=_ratio(name, a, b, _first_output),
        end_seconds=_ratio(name, a, b, _end),
        completion_tokens=_ratio(name, a, b, _tokens),
    )


def _ratio(name: str, a: Sequence[Request], b: Sequence[Request], value: Value) -> Ratio:
    chance = Random(f"{SEED}/{name}/{value.__name__}")
    return ratio_of_medians(_by_prompt(a, value), _by_prompt(b, value), chance)


def _by_prompt(requests: Sequence[Request], value: Value) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for request in requests:
        if (found := value(request)) is not None:
            groups.setdefault(request.prompt, []).append(found)
    return groups


def _speed(request: Request) -> float | None:
    return request.output_speed


def _first_output(request: Request) -> float | None:
    never = math.inf if request.failure is not None else None
    return never if request.first_output_seconds is None else request.first_output_seconds


def _end(request: Request) -> float | None:
    return math.inf if request.failure is not None else request.end_seconds


def _tokens(request: Request) -> float | None:
    return None if request.failure is not None else request.completion_tokens


def _side(requests: Sequence[Request], counted: ServerFigures | None) -> Side:
    told = [r.acceptance for r in requests if r.acceptance is not None]
    steps, drafted, accepted = (
        sum(getattr(one, name) for one in told)
        for name in ("steps", "draft_tokens", "accepted_tokens")
    )
    derived = counted.derived if counted else None
    excess = ratio(steps, accepted)
    return Side(
        requests=len(requests),
        valid=sum(r.valid for r in requests),
        failed=sum(r.failure is not None for r in requests),
        cut=sum(r.finish_reason == "length" for r in requests),
        num_speculative_tokens=derived.num_speculative_tokens if derived else None,
        acceptance_ratio=derived.acceptance_ratio if derived else None,
        mean_acceptance_length=derived.mean_acceptance_length if derived else None,
        request_acceptance_ratio=ratio(drafted, accepted),
        request_mean_acceptance_length=None if excess is None else 1.0 + excess,
        tpot_seconds=derived.tpot_seconds if derived else None,
        prefix_hit_ratio=counted.prefix_hit_ratio if counted else None,
    )


def _warnings(
    a: Run,
    b: Run,
    labels: tuple[str, str],
    workloads: Sequence[WorkloadComparison],
    counters: dict[str, Counted],
) -> Iterable[str]:
    yield from _conditions(a, b, labels)
    yield from _coverage(a, b, labels)
    if (overlap := _overlap(a, b)) > 0:
        yield f"both were measured at once for {overlap:.0f} s: they share what their servers share"
    for workload in workloads:
        yield from _lengths(workload, labels)
        for label, side, counted in zip(
            labels, (workload.a, workload.b), counters[workload.workload], strict=True
        ):
            hits = side.prefix_hit_ratio
            if hits is not None and hits > HITS_ALLOWED:
                yield (
                    f"{workload.workload}: {100 * hits:.0f} % of the prompt tokens of {label} came "
                    "from the prefix cache; restart its server, or take another --seed for both"
                )
            if counted and counted.other_requests:
                yield (
                    f"{workload.workload}: the server of {label} had at least "
                    f"{counted.other_requests} other requests meanwhile"
                )


def _conditions(a: Run, b: Run, labels: tuple[str, str]) -> Iterable[str]:
    first, second = a.sessions[0], b.sessions[0]
    imported = [run.label for run in (a, b) if run.sessions[0].source is not None]
    if imported:
        yield (
            f"{' and '.join(imported)} was imported: whether conditions were equal is not known"
            if len(imported) == 1
            else f"{' and '.join(imported)} were imported: "
            "whether conditions were equal is not known"
        )
        return
    advice = {
        "prompts": "the prompts differ, so the runs asked different things",
        "seed": "the ids at the head of the prompts differ; give both the same --seed",
    }
    for name in ("prompts", "seed", "concurrency", "model"):
        was, now = getattr(first, name), getattr(second, name)
        if was != now:
            yield advice.get(name, f"{name} differs: {labels[0]} {was}, {labels[1]} {now}")
    for label, run in zip(labels, (a, b), strict=True):
        told = [session.server or {} for session in run.sessions]
        if any(one != told[0] for one in told[1:]):
            yield f"the server of {label} was another one after a break: {_differences(*told[:2])}"
    mine, theirs = first.server or {}, second.server or {}
    if mine != theirs:
        yield f"the servers differ beyond speculation: {_differences(mine, theirs)}"


def _differences(a: Any, b: Any) -> str:
    names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return ", ".join(f"{name} {a.get(name, '–')} and {b.get(name, '–')}" for name in names)


def _coverage(a: Run, b: Run, labels: tuple[str, str]) -> Iterable[str]:
    keys = [{(r.workload, r.prompt, r.repeat): r for r in run.requests} for run in (a, b)]
    for label, mine, theirs in zip(labels, keys, reversed(keys), strict=True):
        if missing := len(theirs.keys() - mine.keys()):
            yield f"{missing} requests of the other side were not made with {label}"
    both = keys[0].keys() & keys[1].keys()
    pairs = [(keys[0][key].prompt_tokens, keys[1][key].prompt_tokens) for key in both]
    if differ := sum(p != q for p, q in pairs if p is not None and q is not None):
        yield f"{differ} of {len(pairs)} prompts have another number of tokens: another template?"


def _lengths(workload: WorkloadComparison, labels: tuple[str, str]) -> Iterable[str]:
    lengths = workload.all.completion_tokens
    if lengths.ratio is not None and abs(lengths.ratio - 1) > LENGTHS_ALLOWED:
        yield (
            f"{workload.workload}: answers of {labels[1]} are {lengths.ratio:.2f} times as long as "
            f"those of {labels[0]}, by median; their end-to-end times do not compare"
        )


def _overlap(a: Run, b: Run) -> float:
    """Seconds in which sessions of both ran."""
    return sum(
        max(0.0, min(end_a, end_b) - max(begin_a, begin_b))
        for begin_a, end_a in _times(a)
        for begin_b, end_b in _times(b)
    )


def _times(run: Run) -> Iterable[tuple[float, float]]:
    for index in range(len(run.sessions)):
        requests = [r for s in run.spans if s.session == index for r in s.requests]
        started = [r.started for r in requests if r.started is not None]
        if started:
            yield (
                min(started),
                max(r.started + (r.end_seconds or 0.0) for r in requests if r.started is not None),
            )
