"""A comparison as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from specdec_exporter.abtest.compare import Comparison, Figures, Side
from specdec_exporter.abtest.stats import Ratio
from specdec_exporter.report import NO_VALUE, as_text, number, percent

_WIDEST_NAME = 20
"""A terminal of 80 characters shows all of the figures."""


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
    speed = _table("workload", "of", "figure", "medians (ratio)", "95 %")
    for workload in comparison.workloads:
        _figures(speed, workload.workload, "all", workload.all)
        if workload.valid is not workload.all:
            _figures(speed, "", "valid", workload.valid)
    console.print(speed)
    console.print()
    prompts = _table("workload", "prompt", "ratio of medians of tokens/s", "95 %", "valid only")
    for workload in comparison.workloads:
        for prompt in workload.prompts:
            prompts.add_row(
                as_text(workload.workload),
                as_text(prompt.prompt),
                times(prompt.output_speed.ratio),
                interval(prompt.output_speed),
                times(prompt.valid_output_speed.ratio),
            )
        if len(workload.prompts) > 1:
            told = f"range of {len(workload.prompts)}"
            prompts.add_row(as_text(workload.workload), told, extent(workload.prompt_ratios))
    console.print(prompts)
    console.print(f"per-prompt ratios {extent(comparison.prompt_ratios)}")
    console.print()
    answers = _table("workload", "side", "valid", "failed", "cut", "k", "acceptance", "MAL")
    by_request = any(
        side.request_mean_acceptance_length is not None
        for workload in comparison.workloads
        for side in (workload.a, workload.b)
    )
    if by_request:
        answers.add_column("by request", no_wrap=True)
    for workload in comparison.workloads:
        for label, side in zip((a, b), (workload.a, workload.b), strict=True):
            answers.add_row(
                as_text(workload.workload if side is workload.a else ""),
                as_text(label),
                *_answers(side),
                *([_by_request(side)] if by_request else []),
            )
    console.print(answers)
    (all_a, all_b), (valid_a, valid_b) = comparison.requests, comparison.valid
    console.print(as_text(f"valid {valid_a}/{all_a} with {a} and {valid_b}/{all_b} with {b}"))


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True, max_width=_WIDEST_NAME)
    for heading in others:
        table.add_column(heading, no_wrap=True)
    return table


def _figures(table: Table, name: str, which: str, figures: Figures) -> None:
    for figure, value, scale, digits in (
        ("tokens/s", figures.output_speed, 1.0, 2),
        ("first output ms", figures.first_output_seconds, 1000.0, 1),
        ("end to end ms", figures.end_seconds, 1000.0, 0),
        ("output tokens", figures.completion_tokens, 1.0, 0),
    ):
        table.add_row(as_text(name), which, figure, pair(value, scale, digits), interval(value))
        name = which = ""


def _answers(side: Side) -> tuple[str, ...]:
    return (
        f"{side.valid}/{side.requests}",
        str(side.failed),
        str(side.cut),
        number(side.num_speculative_tokens, 0),
        percent(side.acceptance_ratio),
        number(side.mean_acceptance_length, 2),
    )


def _by_request(side: Side) -> str:
    if side.request_mean_acceptance_length is None:
        return NO_VALUE
    length = number(side.request_mean_acceptance_length, 2)
    return f"{percent(side.request_acceptance_ratio)}, MAL {length}"
