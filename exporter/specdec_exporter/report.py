"""Figures for a terminal: as a table for people, as JSON lines for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_exporter.expose import format_window
from specdec_exporter.model import Derived, Gain
from specdec_exporter.replay import Replayed

NO_VALUE = "–"
COLUMNS = (
    "k",
    "drafts",
    "acceptance",
    "MAL",
    "positions",
    "TPOT",
    "step",
    "tokens\n/step",
    "in\ndecode",
)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Console:
    """A terminal as wide as it is, or a file as wide as the tables are.

    Whoever reads may leave early: that is a BrokenPipeError, as with print.
    """
    terminal = _Console()
    return terminal if terminal.is_terminal else _Console(width=160)


def percent(value: float | None, stderr: float | None = None) -> str:
    """A ratio in percent, with half of its 95 % interval where the error is known."""
    if value is None:
        return NO_VALUE
    error = "" if stderr is None else f" ± {196 * stderr:.1f}"
    return f"{100 * value:.1f}{error} %"


def number(value: float | None, digits: int) -> str:
    """A number, or the sign for none."""
    return NO_VALUE if value is None else f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """Seconds as milliseconds, or the sign for none."""
    return NO_VALUE if value is None else f"{1000 * value:.2f} ms"


def as_text(name: str) -> Text:
    """A name from outside, without markup and without anything that moves a terminal."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name))


def cells(derived: Derived) -> tuple[str, ...]:
    """The figures under COLUMNS."""
    return (
        str(derived.num_speculative_tokens),
        number(derived.drafts, 0),
        percent(derived.acceptance_ratio, derived.acceptance_ratio_stderr),
        number(derived.mean_acceptance_length, 2),
        _positions(derived.position_acceptance_ratio),
        milliseconds(derived.tpot_seconds),
        milliseconds(derived.step_seconds),
        number(derived.tokens_per_step, 2),
        number(derived.decode_concurrency, 1),
    )


def _positions(ratios: tuple[float | None, ...]) -> str:
    if not any(ratio is not None for ratio in ratios):
        return NO_VALUE
    return " ".join(NO_VALUE if p is None else f"{100 * p:.0f}" for p in ratios) + " %"


def _gain(gain: Gain | None) -> str:
    return NO_VALUE if gain is None else percent(gain.tpot_gain_ratio, gain.tpot_gain_ratio_stderr)


def print_json(results: Iterable[Replayed]) -> int:
    """Print one JSON object a line; returns how many."""
    count = 0
    for result in results:
        print(json.dumps(result.to_dict()))
        count += 1
    return count


def print_table(results: Iterable[Replayed]) -> int:
    """Print a table with a row for each result; returns how many."""
    rows = list(results)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("target", "seconds", "engine", "window"):
        table.add_column(column)
    with_gain = any(row.gain is not None or row.refused for row in rows)
    for column in (*COLUMNS, *(["gain"] if with_gain else [])):
        table.add_column(column, justify="right", no_wrap=True)
    start: dict[Path, float] = {}
    for row in rows:
        elapsed = row.t - start.setdefault(row.source, row.t)
        derived = row.derived
        table.add_row(
            as_text(row.target),
            f"{elapsed:.1f}",
            as_text(derived.engine),
            format_window(derived.window_seconds),
            *cells(derived),
            *([_gain(row.gain)] if with_gain else []),
        )
    if rows:
        console().print(table)
    return len(rows)
