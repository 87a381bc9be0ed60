"""Which k a server should run with, from recorded scrapes: `specdec-exporter recommend`.

Recordings, one or several for each k, become step times and acceptance (`Recorded`); what is best
at each load follows from them by the tuner's own cost model. A running exporter has the same things
measured, and can hand them to `recommend` in the same form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from specdec_exporter.baseline import Baseline, BaselineError
from specdec_exporter.cost import Acceptance, CostModel, Prediction, Sample, extrapolate, predict
from specdec_exporter.model import Counters, ScrapeError, Window
from specdec_exporter.parse import parse
from specdec_exporter.replay import RecordingError, Rejected, read_recording
from specdec_exporter.report import console
from specdec_exporter.thresholds import Thresholds
from specdec_exporter.tuner_settings import TunerSettings
from specdec_exporter.window import History

STEADY_INTERVALS = 5
"""So many scrapes in a row at one load make a step time; fewer are a load that begins or drains."""
STEADY_WITHIN = 0.25
GAP = 3.0
"""An interval so many times as long as the median one is a gap: nobody saw the load in it."""
GRID_RATIO = 1.1
"""Of the loads that the batch-size schedule is looked for at."""
_BASELINE_START = -1.0


@dataclass(frozen=True)
class Recorded:
    """What recordings of one model say."""

    model_name: str
    costs: CostModel
    acceptance: Acceptance
    """Positions of every k together; empty without drafts."""
    load: tuple[tuple[float, float], ...]
    """Concurrency of one engine and tokens decoded at it, of steady stretches."""
    prefill_tokens_per_token: float | None
    """Prompt tokens computed for each decoded one; None where the recordings do not tell."""
    rejected: tuple[str, ...] = ()
    """Scrapes that could not be used."""


class Recommended(NamedTuple):
    """The best k at one load."""

    decode_concurrency: float
    k: int
    predicted_speedup_ratio: float
    stderr: float
    extrapolated: bool


@dataclass(frozen=True)
class Recommendation:
    """The best k at each load, and why."""

    recommended: tuple[Recommended, ...]
    predictions: tuple[tuple[float, tuple[Prediction, ...]], ...]
    """By load, every k that was thought of."""
    schedule: tuple[tuple[int, int, int], ...]
    """vLLM's `num_speculative_tokens_per_batch_size`: inclusive ranges of batch sizes, from 1."""
    reason: str

    @property
    def speculative_config(self) -> dict[str, Any]:
        """What to merge into the JSON of vLLM's `--speculative-config`, beside method and model."""
        return {
            "num_speculative_tokens": max(k for _, _, k in self.schedule),
            "num_speculative_tokens_per_batch_size": [list(entry) for entry in self.schedule],
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "recommended": [one._asdict() for one in self.recommended],
            "schedule": [list(entry) for entry in self.schedule],
            "reason": self.reason,
            "speculative_config": self.speculative_config,
            "predictions": [
                {
                    "decode_concurrency": c,
                    "k": p.k,
                    "predicted_speedup_ratio": p.speedup,
                    "stderr": p.stderr,
                    "extrapolated": p.extrapolated,
                }
                for c, by_k in self.predictions
                for p in by_k
            ],
        }


class _Interval(NamedTuple):
    k: int
    start: float
    seconds: float
    concurrency: float
    decode_seconds: float
    decode_steps: float
    decode_tokens: float
    prefill_tokens_per_step: float | None


@dataclass
class _Tally:
    """What is counted over all recordings."""

    costs: CostModel = field(default_factory=CostModel)
    load: list[tuple[float, float]] = field(default_factory=list)
    drafts: list[float] = field(default_factory=list)
    """Of drafts with so many positions and more, by position; so is the rest."""
    before: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    decode_tokens: float = 0.0
    prefill_tokens: float | None = 0.0

    def count(self, increase: Counters, tokens: float) -> None:
        positions, drafts = increase.accepted_per_position, increase.drafts or 0.0
        for counts, values in (
            (self.drafts, [drafts] * len(positions)),
            (self.before, (drafts, *positions[:-1])),
            (self.accepted, positions),
        ):
            counts += [0.0] * (len(positions) - len(counts))
            for i, value in enumerate(values[: len(positions)]):
                counts[i] += value
        prefill = _prefill_tokens(increase)
        self.decode_tokens += tokens
        if self.prefill_tokens is not None:
            self.prefill_tokens = None if prefill is None else self.prefill_tokens + prefill

    def acceptance(self, variance_inflation: float) -> Acceptance:
        """Positions chained by p_i / p_(i−1), each from the recordings deep enough to show it."""
        ratios: list[float] = []
        for before, accepted in zip(self.before, self.accepted, strict=True):
            if before <= 0:
                break
            ratios.append((ratios[-1] if ratios else 1.0) * min(1.0, accepted / before))
        stderrs = [
            math.sqrt(variance_inflation * p * (1 - p) / n)
            for p, n in zip(ratios, self.drafts, strict=False)
        ]
        return Acceptance(tuple(ratios), tuple(stderrs), self.drafts[0] if self.drafts else 0.0)


def read_recordings(
    paths: Iterable[Path], *, variance_inflation: float, metric_prefix: Callable[[Path], str]
) -> Recorded:
    """Measure recordings of one server, or of servers that are alike.

    Args:
        paths: as for `replay`; each is taken for one start of a server.
        variance_inflation: how many times more than independent drafts their acceptance varies.
        metric_prefix: what a proxy put in front of the names in a recording.

    Raises:
        RecordingError: there is nothing usable, or there are several models.
    """
    tally, models, rejected = _Tally(), set[str](), []
    for number, path in enumerate(paths):
        intervals: dict[str, list[_Interval]] = {}
        history = History()
        for recorded in read_recording(path):
            if isinstance(recorded, Rejected):
                rejected.append(str(recorded))
                continue
            try:
                snapshot = parse(
                    recorded.page,
                    t=recorded.t,
                    metric_prefix=metric_prefix(path),
                    excerpt=recorded.excerpt,
                )
                history.add(snapshot)
            except ScrapeError as error:
                rejected.append(str(Rejected(recorded.place, error)))
                continue
            start = snapshot.process_start_time or float(number)
            models.update(sample.model_name for sample in snapshot.engines)
            for window in history.last_interval():
                if interval := _interval(window, start, tally):
                    intervals.setdefault(window.engine, []).append(interval)
        for engine in intervals.values():
            _take_in(engine, tally)
    if len(models) > 1:
        raise RecordingError(f"recordings of several models: {', '.join(sorted(models))}")
    if not tally.costs.cells:
        first = f"; first of {len(rejected)} troubles: {rejected[0]}" if rejected else ""
        raise RecordingError(
            f"no load was steady for {STEADY_INTERVALS} scrapes in a row, so there is no step time"
            + first
        )
    prefill = tally.prefill_tokens
    return Recorded(
        model_name=models.pop(),
        costs=tally.costs,
        acceptance=tally.acceptance(variance_inflation),
        load=tuple(tally.load),
        prefill_tokens_per_token=None if prefill is None else prefill / tally.decode_tokens,
        rejected=tuple(rejected),
    )


def _interval(window: Window, start: float, tally: _Tally) -> _Interval | None:
    """One engine between two scrapes; None without anything decoded."""
    increase, seconds = window.increase, window.covered_seconds
    busy, steps = increase.decode_seconds, increase.decode_steps
    if increase.generation_tokens is None or increase.first_tokens is None:
        return None
    tokens = increase.generation_tokens - increase.first_tokens
    if not busy or not steps or tokens <= 0 or seconds <= 0:
        return None
    tally.count(increase, tokens)
    prefill, engine_steps = _prefill_tokens(increase), increase.engine_steps
    return _Interval(
        k=window.num_speculative_tokens,
        start=start,
        seconds=seconds,
        concurrency=busy / seconds,
        decode_seconds=busy,
        decode_steps=steps,
        decode_tokens=tokens,
        prefill_tokens_per_step=prefill / engine_steps if prefill and engine_steps else None,
    )


def _prefill_tokens(increase: Counters) -> float | None:
    """Prompt tokens that were computed; None where the page does not tell."""
    prompt, cached = increase.prompt_tokens, increase.cached_prompt_tokens
    return None if prompt is None or cached is None else max(0.0, prompt - cached)


def _take_in(intervals: Sequence[_Interval], tally: _Tally) -> None:
    """Make a sample of each steady stretch of one engine."""
    for stretch in _stretches(intervals):
        if len(stretch) < STEADY_INTERVALS:
            continue
        seconds = sum(i.seconds for i in stretch)
        concurrency = sum(i.decode_seconds for i in stretch) / seconds
        step = sum(i.decode_seconds for i in stretch) / sum(i.decode_steps for i in stretch)
        prefills = [i.prefill_tokens_per_step for i in stretch]
        known = [p for p in prefills if p is not None]
        prefill = sum(known) / len(known) if len(known) == len(prefills) else None
        first = stretch[0]
        tally.costs = tally.costs.observe(
            Sample(first.k, first.start, seconds, concurrency, step, prefill)
        )
        tally.load.append((concurrency, sum(i.decode_tokens for i in stretch)))


def _stretches(intervals: Sequence[_Interval]) -> Iterator[list[_Interval]]:
    """Runs of intervals of one k and start whose load stays by the mean of the run so far."""
    longest = GAP * median(i.seconds for i in intervals)
    for _, same in groupby(intervals, key=lambda i: (i.k, i.start)):
        run: list[_Interval] = []
        for interval in same:
            mean = sum(i.concurrency for i in run) / len(run) if run else interval.concurrency
            gap = interval.seconds > longest
            if gap or abs(interval.concurrency - mean) > STEADY_WITHIN * mean:
                yield run
                run = []
            if not gap:
                run.append(interval)
        yield run


def with_baseline(recorded: Recorded, text: str) -> Recorded:
    """Take the step times without speculation from a baseline, in place of recorded ones.

    Raises:
        RecordingError: the text is no baseline.
    """
    try:
        baseline = Baseline.from_json(text)
    except BaselineError as error:
        raise RecordingError(str(error)) from error
    if baseline.model_name != recorded.model_name:
        raise RecordingError(
            f"the baseline is of model {baseline.model_name!r}, "
            f"and the recordings are of {recorded.model_name!r}"
        )
    points = [(point.decode_concurrency, point.tpot_seconds) for point in baseline.points]
    costs = CostModel(tuple(cell for cell in recorded.costs.cells if cell.k > 0))
    for c, tpot in points:
        costs = costs.observe(Sample(0, _BASELINE_START, 1.0, c, tpot))
    return replace(recorded, costs=costs)


def recommend(recorded: Recorded, settings: TunerSettings, rules: Thresholds) -> Recommendation:
    """The best k at each load that was measured, in powers of two and by batch size.

    The guide's advice limits k first; then the smallest k wins that is within `min_gain` of the
    fastest.

    Raises:
        RecordingError: there were no drafts, or none of enough.
    """
    seen, measured = recorded.acceptance, recorded.costs.measured
    if not seen.ratios or seen.drafts < settings.min_drafts:
        raise RecordingError(
            f"{seen.drafts:.0f} drafts were recorded, and acceptance takes "
            f"{settings.min_drafts:.0f}; add a recording with speculation on"
        )
    cap = min(settings.max_k, max(measured) + settings.steps_above_measured)
    most, advice = _guide(seen, cap, rules)
    acceptance = extrapolate(seen, cap)

    def at(c: float) -> tuple[Prediction, ...]:
        return predict(
            recorded.costs,
            acceptance,
            [(c, 1.0)],
            range(settings.floor, cap + 1),
            settings,
            prefill_tokens_per_token=recorded.prefill_tokens_per_token or 0.0,
        )

    def best(predictions: Sequence[Prediction]) -> Prediction:
        allowed = [p for p in predictions if p.k <= max(most, settings.floor)]
        fastest = max(p.speedup for p in allowed)
        return next(p for p in allowed if p.speedup * (1 + settings.min_gain) >= fastest)

    greatest = max(c for c, _ in recorded.load)
    loads = [2.0**n for n in range(int(math.log2(max(1.0, greatest * 1.25))) + 1)]
    predictions = [(c, at(c)) for c in loads]
    recommended = []
    for c, by_k in predictions:
        one = best(by_k)
        recommended.append(Recommended(c, one.k, one.speedup, one.stderr, one.extrapolated))
    last = max(1, round(greatest * 1.25))
    return Recommendation(
        recommended=tuple(recommended),
        predictions=tuple(predictions),
        schedule=schedule(lambda c: best(at(c)).k, last),
        reason=_reason(recorded, recommended, advice),
    )


def schedule(best_k: Callable[[float], int], last: int) -> tuple[tuple[int, int, int], ...]:
    """Ranges of batch sizes of the same best k, from 1 to `last`; beyond it vLLM keeps the last k.

    vLLM's drafter runs at k = 0 as well, and it takes at least one token to have a drafter, so 1
    stands in for 0.
    """
    sizes = [1]
    while sizes[-1] < last:
        sizes.append(min(last, max(sizes[-1] + 1, round(sizes[-1] * GRID_RATIO))))
    ranges: list[tuple[int, int, int]] = []
    for k, group in groupby(sizes, key=lambda size: max(1, best_k(float(size)))):
        first = ranges[-1][1] + 1 if ranges else 1
        ranges.append((first, list(group)[-1], k))
    return tuple(ranges)


def _guide(seen: Acceptance, cap: int, rules: Thresholds) -> tuple[int, str]:
    """The deepest k that the guide leaves, and its advice."""
    p = seen.ratios
    if p[0] < rules.drafter_broken.position_0_below:
        return 0, "the drafter is broken: mend it, k is not the remedy"
    decay = rules.position_decay
    if len(p) > 1 and p[0] >= decay.position_0_from and p[1] < decay.position_1_below:
        return (
            1,
            "position 1 is rarely accepted while position 0 is healthy, so the guide says k = 1",
        )
    return cap, ""


def _reason(recorded: Recorded, recommended: Sequence[Recommended], advice: str) -> str:
    parts = []
    for k, group in groupby(recommended, key=lambda one: one.k):
        ones = list(group)
        first, last = ones[0].decode_concurrency, ones[-1].decode_concurrency
        where = f"{first:g} to {last:g}" if last > first else f"{first:g}"
        low = min(one.predicted_speedup_ratio for one in ones)
        high = max(one.predicted_speedup_ratio for one in ones)
        name = "no speculation" if k == 0 else f"k = {k}"
        parts.append(f"{name} with {where} requests in decode ({low:.2f}x to {high:.2f}x)")
    positions = ", ".join(f"{100 * p:.0f} %" for p in recorded.acceptance.ratios)
    told = [
        f"positions are accepted in {positions} of drafts, and step times were measured at k = "
        + ", ".join(map(str, recorded.costs.measured))
    ]
    if advice:
        told.append(advice)
    if any(one.k > 0 and one.predicted_speedup_ratio < 1 for one in recommended):
        told.append("where the speedup is below 1, no speculation at all is faster")
    if 0 not in recorded.costs.measured:
        told.append(
            "without a recording of k = 0 or a --baseline, the step without speculation is assumed"
        )
    if recorded.prefill_tokens_per_token is None:
        told.append("prefill is not known and taken to be none")
    return f"{'; '.join(parts)}: {'; '.join(told)}."


def _shown(p: Prediction) -> str:
    return f"{p.speedup:.2f} ± {1.96 * p.stderr:.2f}{'*' if p.extrapolated else ''}"


def print_recommendation(recommendation: Recommendation, *, as_json: bool) -> None:
    """Print it for programs, or for people."""
    if as_json:
        print(json.dumps(recommendation.to_dict(), indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("in\ndecode", justify="right")
    table.add_column("best k", justify="right")
    ks = [p.k for p in recommendation.predictions[0][1]]
    for k in ks:
        table.add_column(f"speedup\nat k = {k}", justify="right")
    for one, (c, by_k) in zip(recommendation.recommended, recommendation.predictions, strict=True):
        table.add_row(
            f"{c:g}",
            str(one.k),
            *(
                f"{p.speedup:.2f} ± {1.96 * p.stderr:.2f}{'*' if p.extrapolated else ''}"
                for p in by_k
            ),
        )
    console().print(table)
    if any(p.extrapolated for _, by_k in recommendation.predictions for p in by_k):
        print("* beyond what was measured")
    print()
    print(recommendation.reason)
    print("For vLLM's --speculative-config, beside method and model:")
    print(json.dumps(recommendation.speculative_config))
