"""Serves at one k after another, measures each, and writes down what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.html import sweep_page
from specdec_exporter.abtest.run import Plan, read, remaining, run
from specdec_exporter.abtest.serve import command, serving
from specdec_exporter.abtest.sweep import Spread, Sweep, start_figures, summarise
from specdec_exporter.report import NO_VALUE, as_text, number


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What is to be tried."""

    ks: Sequence[int]
    starts: int
    serve_command: str
    speculative_config: Mapping[str, Any]
    folder: Path
    plan: Plan
    """Of each start; its label and its file are replaced."""


def sweep(plan: SweepPlan, console: Console) -> Sweep:
    """Measure at every k, in rounds: what changes with time is spread over all of them.

    What the folder holds already is not measured again.

    Raises:
        BenchError: it cannot go on; what was measured is kept.
    """
    commands = {k: command(plan.serve_command, plan.speculative_config, k) for k in plan.ks}
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"cannot write to {plan.folder} ({error.strerror})") from error
    starts, model = [], None
    for n in range(1, plan.starts + 1):
        for k in plan.ks:
            file = plan.folder / f"k{k}.start{n}.jsonl"
            one = replace(plan.plan, label=f"k{k}", out=file)
            console.print(f"k = {k}, start {n} of {plan.starts}", highlight=False)
            if remaining(one):
                with serving(commands[k], one.url, file.with_suffix(".log")):
                    asyncio.run(run(one, console))
            measured = read(file)
            model = measured.sessions[0].model
            starts.append(start_figures(measured, k, n))
    result = summarise(starts, model)
    (plan.folder / "sweep.json").write_text(json.dumps(result.to_dict(), indent=1) + "\n")
    (plan.folder / "sweep.html").write_text(sweep_page(result), encoding="utf-8")
    return result


def print_sweep(result: Sweep, console: Console) -> None:
    """Print a row for each k, and what follows from them."""
    for warning in result.warnings:
        console.print(as_text(f"warning: {warning}"), style="yellow", soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = "k,MAL,marginal tokens,TPOT ms,gain %,step ms,tokens/step,acceptance %,valid"
    for heading in headings.split(","):
        table.add_column(heading, justify="right", no_wrap=True)
    for depth in result.depths:
        table.add_row(
            str(depth.k),
            _spread(depth.mean_acceptance_length),
            number(depth.marginal_tokens, 2),
            _spread(depth.tpot_seconds, 1000),
            _spread(depth.gain, 100, 1),
            _spread(depth.step_seconds, 1000),
            _spread(depth.tokens_per_step),
            _spread(depth.acceptance_ratio, 100, 1),
            f"{depth.valid}/{depth.requests}",
        )
    console.print(table)
    for heading, value, remark in result.verdicts():
        console.print(as_text(f"{heading}: {value} ({remark})"), soft_wrap=True)


def _spread(value: Spread | None, scale: float = 1.0, digits: int = 2) -> str:
    if value is None:
        return NO_VALUE
    told = f"{value.median * scale:.{digits}f}"
    if value.low == value.high:
        return told
    return f"{told} ({value.low * scale:.{digits}f} to {value.high * scale:.{digits}f})"
