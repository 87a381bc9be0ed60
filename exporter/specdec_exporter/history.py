"""The last hour of a target in few points, for people to look at; nothing is judged by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from specdec_exporter.model import Measurement, TargetStatus

SPAN_SECONDS = 3600.0
STEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Moment:
    """One model's figures at one time; ratios are 0 to 1, None is not known."""

    t: float
    """Unix seconds."""
    num_speculative_tokens: int
    acceptance_ratio: float | None
    mean_acceptance_length: float | None
    position_0: float | None
    position_1: float | None
    tpot_seconds: float | None
    baseline_tpot_seconds: float | None
    tpot_gain_ratio: float | None
    decode_concurrency: float | None


def moment(measurement: Measurement, t: float) -> Moment:
    """What is kept of a measurement made at `t`, unix seconds."""
    derived, gain = measurement.total, measurement.gain
    positions = derived.position_acceptance_ratio
    return Moment(
        t=t,
        num_speculative_tokens=derived.num_speculative_tokens,
        acceptance_ratio=derived.acceptance_ratio,
        mean_acceptance_length=derived.mean_acceptance_length,
        position_0=positions[0] if positions else None,
        position_1=positions[1] if len(positions) > 1 else None,
        tpot_seconds=derived.tpot_seconds,
        baseline_tpot_seconds=gain.baseline_tpot_seconds if gain else None,
        tpot_gain_ratio=gain.tpot_gain_ratio if gain else None,
        decode_concurrency=derived.decode_concurrency,
    )


class History:
    """The moments of one target's models over the last hour, the last one of each half minute."""

    def __init__(self) -> None:
        self._moments: dict[str, deque[Moment]] = {}

    def add(self, measurements: Iterable[Measurement], t: float) -> None:
        """Take in what was measured at `t`, unix seconds; a clock that went back begins anew."""
        for measurement in measurements:
            kept = self._moments.setdefault(measurement.total.model_name, deque())
            if kept and (t < kept[-1].t or t // STEP_SECONDS == kept[-1].t // STEP_SECONDS):
                newest = kept.pop()
                if t < newest.t:
                    kept.clear()
            kept.append(moment(measurement, t))
        for model_name, kept in list(self._moments.items()):
            while kept and kept[0].t < t - SPAN_SECONDS:
                kept.popleft()
            if not kept:
                del self._moments[model_name]

    def moments(self) -> dict[str, tuple[Moment, ...]]:
        """By model, oldest first."""
        return {model_name: tuple(kept) for model_name, kept in self._moments.items()}


@dataclass(frozen=True, slots=True)
class Watched:
    """A target and its last hour."""

    status: TargetStatus
    history: dict[str, tuple[Moment, ...]]
    """By model."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was known of all targets at one time."""

    t: float
    """Unix seconds."""
    targets: tuple[Watched, ...]
