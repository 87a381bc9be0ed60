"""A comparison as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from specdec_exporter.abtest.compare import Comparison, Figures, Side, WorkloadComparison
from specdec_exporter.abtest.stats import Ratio
from specdec_exporter.report import NO_VALUE, as_text, number, percent


def pair(value: Ratio, scale: float = 1.0, digits: int = 2) -> str:
    """Both medians and their ratio."""
    a, b = (number(None if v is None else v * scale, digits) for v in (value.a, value.b))
    return f"{a}->{b} ({times(value.ratio)})"


def times(value: float | None) -> str:
    """A ratio, or the sign for none."""
    return NO_VALUE if value is None else f"{value:.2f}x"


def interval(value: Ratio) -> str:
    """The interval of a ratio, or nothing."""
    if value.low is None or value.high is None:
        return ""
    return f"{value.low:.2f}-{value.high:.2f}"


def extent(value: tuple[float, float] | None) -> str:
    """From the least to the largest."""
    return NO_VALUE if value is None else f"{value[0]:.2f}-{value[1]:.2f}"


def acceptance(side: Side) -> str:
    """k, acceptance and MAL, by the server's counters and by what it said of each request."""
    if not side.num_speculative_tokens and side.request_mean_acceptance_length is None:
        return "no counters" if side.num_speculative_tokens is None else "no speculation"
    told = f"{percent(side.acceptance_ratio)}, MAL {number(side.mean_acceptance_length, 2)}"
    if side.num_speculative_tokens is not None:
        told = f"k {side.num_speculative_tokens}: {told}"
    if side.request_mean_acceptance_length is not None:
        ratio = percent(side.request_acceptance_ratio)
        length = number(side.request_mean_acceptance_length, 2)
        told += f" (by request {ratio}, MAL {length})"
    return told


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print all of a comparison."""
    a, b = comparison.a, comparison.b
    for warning in comparison.warnings:
        console.print(as_text(f"warning: {warning}"), style="yellow", soft_wrap=True)
    if comparison.warnings:
        console.print()
    console.print(
        as_text(f"{a}->{b} (ratio) of medians, 95 % of the ratio; failed requests count as slowest")
    )
    speed = _table("workload", "requests", "output tokens/s", "95 %", "time to first output, ms")
    for heading in ("95 %", "end to end, ms", "95 %", "output tokens", "95 %"):
        speed.add_column(heading, no_wrap=True)
    for workload in comparison.workloads:
        speed.add_row(as_text(workload.workload), "all", *_figures(workload.all))
        if workload.valid is not workload.all:
            speed.add_row("", "valid", *_figures(workload.valid))
    console.print(speed)
    console.print()
    prompts = _table("prompt", "ratio of its medians of output tokens/s", "95 %", "valid only")
    for workload in comparison.workloads:
        for prompt in workload.prompts:
            prompts.add_row(
                as_text(f"{workload.workload} {prompt.prompt}"),
                times(prompt.output_speed.ratio),
                interval(prompt.output_speed),
                times(prompt.valid_output_speed.ratio),
            )
        if len(workload.prompts) > 1:
            told = as_text(f"{workload.workload}, range of {len(workload.prompts)}")
            prompts.add_row(told, extent(workload.prompt_ratios), "", "")
    console.print(prompts)
    console.print(f"per-prompt ratios {extent(comparison.prompt_ratios)}")
    console.print()
    answers = _table("workload", "side", "valid", "failed", "cut", "acceptance and MAL")
    for workload in comparison.workloads:
        _answers(answers, workload, (a, b))
    console.print(answers)
    (all_a, all_b), (valid_a, valid_b) = comparison.requests, comparison.valid
    console.print(as_text(f"valid {valid_a}/{all_a} with {a} and {valid_b}/{all_b} with {b}"))


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _figures(figures: Figures) -> tuple[str, ...]:
    return (
        pair(figures.output_speed),
        interval(figures.output_speed),
        pair(figures.first_output_seconds, 1000, 1),
        interval(figures.first_output_seconds),
        pair(figures.end_seconds, 1000, 0),
        interval(figures.end_seconds),
        pair(figures.completion_tokens, 1, 0),
        interval(figures.completion_tokens),
    )


def _answers(table: Table, workload: WorkloadComparison, labels: tuple[str, str]) -> None:
    for label, side in zip(labels, (workload.a, workload.b), strict=True):
        table.add_row(
            as_text(workload.workload if side is workload.a else ""),
            as_text(label),
            f"{side.valid}/{side.requests}",
            str(side.failed),
            str(side.cut),
            acceptance(side),
        )
