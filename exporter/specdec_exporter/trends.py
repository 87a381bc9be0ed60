"""The last hour of a model as small plots: what each shows, beside what, and in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specdec_exporter.chart import Plot, plot
from specdec_exporter.duration import rough_duration
from specdec_exporter.figures import GUIDE_ACCEPTANCE, GUIDE_GAIN, percent, signed_percent
from specdec_exporter.history import SPAN_SECONDS, STEP_SECONDS, Moment

SHORTEST_SECONDS = 600.0
"""Shown at least, so that the first minutes do not look like a long time."""

Read = Callable[[Moment], float | None]


@dataclass(frozen=True, slots=True)
class Trend:
    """One small plot, and what it says in words."""

    name: str
    now: tuple[str, ...]
    """Of each line."""
    extent: str
    """The least and the greatest value."""
    plot: Plot
    says: str


@dataclass(frozen=True, slots=True)
class Trends:
    """All plots of a model over one span."""

    span: str
    plots: tuple[Trend, ...]


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.2f} ms"


def trends(moments: Sequence[Moment], now: float, limit: Mapping[str, float]) -> Trends | None:
    """The plots of a model; None where there are no two moments to join.

    Args:
        moments: oldest first.
        now: unix seconds.
        limit: the thresholds in force, by rule.
    """
    if len(moments) < 2:
        return None
    covered = now - moments[0].t
    begin = now - min(max(covered, SHORTEST_SECONDS), SPAN_SECONDS)
    gap = 2.5 * STEP_SECONDS
    was = "was " if now - moments[-1].t > gap else ""
    k = moments[-1].num_speculative_tokens

    def trend(
        name: str,
        reads: Mapping[str, Read],
        form: Callable[[float], str],
        include: tuple[float, ...] = (),
        band: tuple[float, float] | None = None,
        limit: float | None = None,
    ) -> Trend | None:
        lines = [[(m.t, read(m)) for m in moments] for read in reads.values()]
        drawn = plot(
            lines,
            begin=begin,
            end=now,
            gap=gap,
            include=include,
            band=band,
            limit=limit,
        )
        known = [value for line in lines for _, value in line if value is not None]
        if drawn is None or not known:
            return None
        newest = tuple(
            was + form(value) if (value := line[-1][1]) is not None else "not known"
            for line in lines
        )
        extent = f"{form(min(known))} to {form(max(known))}"
        said = " and ".join(f"{what} {value}" for what, value in zip(reads, newest, strict=True))
        return Trend(name, newest, extent, drawn, f"Now {said}; {extent} before.")

    # At more than two positions the guide's figures, which are of two, say nothing of the ratio.
    comparable = k == 2
    found = (
        trend(
            "Acceptance",
            {"acceptance": lambda m: m.acceptance_ratio},
            percent,
            band=GUIDE_ACCEPTANCE if comparable else None,
            limit=limit.get("acceptance_low") if k <= 2 else None,
        ),
        trend(
            "MAL",
            {"MAL": lambda m: m.mean_acceptance_length},
            "{:.2f}".format,
        ),
        trend(
            "Position 0 / 1",
            {"position 0": lambda m: m.position_0}
            | ({"position 1": lambda m: m.position_1} if k > 1 else {}),
            percent,
            include=(0.0,),
            limit=limit.get("position_decay") if k > 1 else None,
        ),
        trend(
            "TPOT / baseline"
            if any(m.baseline_tpot_seconds is not None for m in moments)
            else "TPOT",
            {"TPOT": lambda m: m.tpot_seconds}
            | (
                {"baseline": lambda m: m.baseline_tpot_seconds}
                if any(m.baseline_tpot_seconds is not None for m in moments)
                else {}
            ),
            _milliseconds,
        ),
        trend(
            "Net TPOT gain",
            {"gain": lambda m: m.tpot_gain_ratio},
            signed_percent,
            band=GUIDE_GAIN,
            limit=0.0,
        ),
        trend(
            "Requests in decode",
            {"requests": lambda m: m.decode_concurrency},
            "{:.1f}".format,
            include=(0.0,),
        ),
        trend("k", {"k": lambda m: m.num_speculative_tokens}, "{:.0f}".format, include=(0.0,))
        if len({m.num_speculative_tokens for m in moments}) > 1
        else None,
    )
    span = rough_duration(round(now - begin, -1))
    return Trends(
        span="hour" if span == "1h" else span,
        plots=tuple(one for one in found if one is not None),
    )
