"""What a `bench sweep` teaches the exporter: step times for the cost model, and a baseline.

A sweep starts the server several times at each k. Each start is a sample of what k costs there, and
those without speculation are a measured baseline. Arithmetic only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from specdec_exporter.baseline import Baseline, BaselineError, BaselinePoint, Conditions
from specdec_exporter.cost import CostModel, Sample

FORMAT = "specdec-exporter sweep"
VERSION = 1
ONE_START_STDERR = 0.01
"""Relative, of a time without speculation that one start has shown; starts without speculation
differ by about so much."""
_TOGETHER = 1.1
"""Starts whose requests in decode differ by less than this factor are of one load."""


class SweepError(Exception):
    """A sweep that nothing can be learned from; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep teaches."""

    model_name: str
    samples: tuple[Sample, ...]
    """One for each start whose server showed its counters."""
    baseline: Baseline | None
    """None where no start was without speculation."""

    def teach(self, costs: CostModel) -> CostModel:
        """The cost model with these samples; those that it has had already are not taken twice."""
        for sample in self.samples:
            if not costs.measured_seconds(sample.k, sample.start):
                costs = costs.observe(sample)
        return costs


def swept(value: Mapping[str, Any]) -> Swept:
    """What `bench sweep` wrote, of one concurrency; further keys are ignored.

    Raises:
        SweepError: it wrote something else, or no server showed its counters.
    """
    try:
        if value["format"] != FORMAT:
            raise SweepError("not a sweep; make one with `specdec-exporter bench sweep`")
        if value["version"] != VERSION:
            raise SweepError(
                f"a sweep of format {value['version']!r}; this release reads {VERSION}"
            )
        starts = [
            start
            for depth in value["depths"]
            for start in depth["starts"]
            if start["observed_k"] is not None and start["step_seconds"] and start["started"]
        ]
        model_name = value["model"]
        if not isinstance(model_name, str) or not starts:
            raise SweepError("no server of this sweep showed its counters, so no step times")
        samples = tuple(map(_sample, starts))
        return Swept(model_name, samples, _baseline(model_name, starts))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        BaselineError,
    ) as error:
        raise SweepError(f"a value is missing or makes no sense ({error})") from error


def _sample(start: Mapping[str, Any]) -> Sample:
    prefill = start["engine_prefill_tokens_per_step"]
    sample = Sample(
        k=int(start["observed_k"]),
        start=float(start["started"]),
        seconds=float(start["measured_seconds"]),
        decode_concurrency=_concurrency(start),
        step_seconds=float(start["step_seconds"]),
        prefill_tokens_per_step=None if prefill is None else float(prefill),
    )
    numbers = (
        sample.start,
        sample.seconds,
        sample.decode_concurrency,
        sample.step_seconds,
        sample.prefill_tokens_per_step or 0.0,
    )
    if not (all(map(math.isfinite, numbers)) and sample.seconds > 0 and sample.step_seconds > 0):
        raise ValueError("a step time that is none")
    return sample


def _concurrency(start: Mapping[str, Any]) -> float:
    """Requests in decode on one engine, while there were any."""
    return max(1.0, float(start["decode_concurrency"]) / int(start["engines"]))


def _baseline(model_name: str, starts: Sequence[Mapping[str, Any]]) -> Baseline | None:
    without = sorted(
        (s for s in starts if s["observed_k"] == 0 and s["tpot_seconds"]), key=_concurrency
    )
    if not without:
        return None
    points, group = [], [without[0]]
    for start in without[1:]:
        if _concurrency(start) > _TOGETHER * _concurrency(group[0]):
            points.append(_point(group))
            group = []
        group.append(start)
    points.append(_point(group))
    versions = {str(s["engine_version"]) for s in without}
    baseline = Baseline(
        source="measured",
        model_name=model_name,
        engine_version=versions.pop() if len(versions) == 1 else "",
        taken_at=max(float(s["started"]) for s in without),
        points=tuple(points),
        conditions=Conditions(
            context_tokens=_mean(without, "context_tokens"),
            prefill_tokens_per_step=_mean(without, "prefill_tokens_per_token"),
            prefix_hit_ratio=_mean(without, "prefix_hit_ratio"),
        ),
    )
    # Checked as any baseline is that is read.
    return Baseline.from_dict(baseline.to_dict())


def _point(starts: Sequence[Mapping[str, Any]]) -> BaselinePoint:
    """Of starts at one load: the mean of what a token took, and how sure that is."""
    times = [float(s["tpot_seconds"]) for s in starts]
    mean = fmean(times)
    stderr = ONE_START_STDERR * mean / math.sqrt(len(times))
    if len(times) > 1:
        stderr = max(stderr, stdev(times) / math.sqrt(len(times)))
    return BaselinePoint(
        decode_concurrency=fmean(map(_concurrency, starts)),
        tpot_seconds=mean,
        tpot_stderr=stderr,
        decode_tokens=sum(float(s["decode_tokens"]) for s in starts),
    )


def _mean(starts: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [float(s[name]) for s in starts if s[name] is not None]
    return fmean(known) if known else None
