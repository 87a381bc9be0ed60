"""Pages that stand alone: one file with its style and its plots, no script and nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from random import Random

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from specdec_exporter.abtest.compare import Comparison, WorkloadComparison
from specdec_exporter.abtest.plot import (
    Scale,
    dot,
    line,
    line_plot,
    round_numbers,
    short,
    svg,
    text,
    ticks,
)
from specdec_exporter.abtest.record import Request, Run
from specdec_exporter.abtest.stats import Ratio
from specdec_exporter.abtest.sweep import Sweep
from specdec_exporter.report import NO_VALUE, percent

_WIDTH, _LEFT, _RIGHT, _ROW = 960.0, 260.0, 90.0, 24.0
_MOST_LABEL = 26


def comparison_page(comparison: Comparison, a: Run, b: Run) -> str:
    """A comparison as a page.

    Args:
        comparison: of the two runs.
        a: the first run, whose requests are shown one by one.
        b: the second.
    """
    return _template("compare.html").render(
        c=comparison,
        conditions=_conditions(a, b),
        ratios=_ratios(comparison.workloads),
        speeds=_speeds(comparison, a.requests, b.requests),
    )


def sweep_page(sweep: Sweep) -> str:
    """A sweep as a page."""
    names = [f"k = {depth.k}" for depth in sweep.depths]
    ks = [depth.k for depth in sweep.depths]
    grown, fastest = sweep.stops_growing_at, sweep.fastest
    plots = [
        line_plot(
            "Mean acceptance length",
            "tokens per verified draft",
            names,
            [d.values("mean_acceptance_length") for d in sweep.depths],
            [] if grown not in ks else [(ks.index(grown), "stops growing")],
            from_zero=True,
        ),
        line_plot(
            "Time per output token",
            "ms",
            names,
            [[1000 * v for v in d.values("tpot_seconds")] for d in sweep.depths],
            [] if fastest is None else [(ks.index(fastest), "fastest")],
            from_zero=True,
        ),
        line_plot(
            "Step time",
            "ms",
            names,
            [[1000 * v for v in d.values("step_seconds")] for d in sweep.depths],
            from_zero=True,
        ),
    ]
    return _template("sweep.html").render(s=sweep, plots=plots, verdicts=sweep.verdicts())


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.globals |= {
        "number": _number,
        "times": _times,
        "percent": percent,
        "verdict": _verdict,
        "dash": lambda value: NO_VALUE if value is None else value,
    }
    return environment


def _template(name: str) -> Template:
    return _environment().get_template(name)


def _number(value: float | None, scale: float = 1.0, digits: int = 1) -> str:
    return NO_VALUE if value is None else f"{value * scale:,.{digits}f}"


def _times(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}×"


def _verdict(ratio: Ratio) -> str:
    """Only an interval that leaves 1 out says which is faster."""
    if ratio.low is not None and ratio.low > 1:
        return "faster"
    return "slower" if ratio.high is not None and ratio.high < 1 else ""


def _conditions(a: Run, b: Run) -> str:
    session = a.sessions[0]
    known = [f"{len(a.requests)} and {len(b.requests)} requests"]
    if session.concurrency is not None:
        known.insert(0, f"{session.concurrency} at a time")
    if session.server and "version" in session.server:
        known.insert(0, f"server version {session.server['version']}")
    if session.model is not None:
        known.insert(0, session.model)
    if session.started is not None:
        known.append(f"{datetime.fromtimestamp(session.started, UTC):%Y-%m-%d %H:%M} UTC")
    return " · ".join(known)


def _label(words: str) -> str:
    return words if len(words) <= _MOST_LABEL else f"{words[: _MOST_LABEL - 1]}…"


def _ratios(workloads: Sequence[WorkloadComparison]) -> Markup:
    """The ratio of each workload and of its prompts, with intervals."""
    rows: list[tuple[str, Ratio, bool]] = []
    for workload in workloads:
        rows.append((workload.workload, workload.all.output_speed, True))
        rows += [(p.prompt, p.output_speed, False) for p in workload.prompts]
    known = [v for _, r, _ in rows for v in (r.ratio, r.low, r.high) if v is not None]
    low, high = round_numbers(min([1.0, *known]), max([1.0, *known]))
    x = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    height = 34 + _ROW * len(rows) + 10 * len(workloads)
    parts = _axis(x, height)
    parts.append(line(x(1.0), 24, x(1.0), height, "one"))
    y = 20.0
    for name, ratio, whole in rows:
        y += _ROW + (10 if whole else 0)
        parts.append(text(0.0 if whole else 16.0, y + 4, _label(name), "strong" if whole else ""))
        kind = "whole" if whole else "part"
        if ratio.low is not None and ratio.high is not None:
            parts.append(line(x(ratio.low), y, x(ratio.high), y, kind))
        if ratio.ratio is not None:
            parts.append(dot(x(ratio.ratio), y, 5.5 if whole else 3.5, f"{kind}-dot"))
        parts.append(
            text(_WIDTH - _RIGHT + 16, y + 4, _times(ratio.ratio), "strong" if whole else "soft")
        )
    return svg(_WIDTH, height + 8, "ratios of output speed", parts)


def _speeds(comparison: Comparison, a: Sequence[Request], b: Sequence[Request]) -> Markup:
    """Every request's speed, by workload and side."""
    speeds = [r.output_speed for r in (*a, *b) if r.output_speed is not None]
    if not speeds:
        return svg(_WIDTH, 30, "output speeds", [text(0, 20, "no request has a speed", "soft")])
    low, high = round_numbers(0.0, max(speeds))
    x = Scale(low, high, _LEFT, _WIDTH - _RIGHT)
    height = 34 + 72.0 * len(comparison.workloads)
    parts = _axis(x, height)
    chance = Random(0)
    for i, workload in enumerate(comparison.workloads):
        top = 34 + 72.0 * i
        parts.append(text(0, top + 36, _label(workload.workload), "strong"))
        for j, (requests, side, label, middle) in enumerate(
            (
                (a, "a", comparison.a, workload.all.output_speed.a),
                (b, "b", comparison.b, workload.all.output_speed.b),
            )
        ):
            y = top + 18 + 32 * j
            parts.append(text(_LEFT - 12, y + 4, _label(label)[:12], "end soft"))
            for request in requests:
                speed = request.output_speed
                if request.workload != workload.workload or speed is None:
                    continue
                kind = side if request.valid else f"{side}-open"
                told = f"{request.prompt} {request.repeat}: {speed:.1f} tokens/s"
                why = request.failure or ", ".join(request.problems)
                place = y + chance.uniform(-9, 9)
                parts.append(dot(x(speed), place, 3.2, kind, f"{told} {why}".strip()))
            if middle is not None:
                parts.append(line(x(middle), y - 13, x(middle), y + 13, f"{side}-line"))
                parts.append(text(_WIDTH - _RIGHT + 16, y + 4, f"{middle:.1f}"))
    return svg(_WIDTH, height + 4, "output speed of every request", parts)


def _axis(x: Scale, height: float) -> list[Markup]:
    parts: list[Markup] = []
    for tick in ticks(x.low, x.high, 8):
        parts += [
            line(x(tick), 24, x(tick), height, "grid"),
            text(x(tick), 16, short(tick), "middle soft"),
        ]
    return parts
