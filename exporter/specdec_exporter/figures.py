"""The four numbers that say how speculation does, each with its bands and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specdec_exporter.chart import Gauge, gauge
from specdec_exporter.duration import format_duration
from specdec_exporter.model import Derived, Measurement, Verdict
from specdec_exporter.rules import BOUND

GUIDE_ACCEPTANCE = (0.34, 0.36)
"""At k = 2, and of the first two positions at any larger k."""
GUIDE_POSITIONS = (0.47, 0.24)
GUIDE_MEAN_ACCEPTANCE_LENGTH = 1.71
"""At k = 2."""
GUIDE_GAIN = (0.10, 0.15)

_LENGTH = "Mean acceptance length (MAL)"
_DECAY = "Position 0 → 1"
_GAIN = "Net TPOT gain"

INTERVAL = 1.96
"""Standard errors to half of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, or why there is none."""

    name: str
    value: str
    """Empty where it is not known."""
    plus_minus: str
    """Half of its 95 % interval, in the unit of the value."""
    absent: str
    """Why it is not known."""
    bands: str
    """What it should be, and from where on it alerts."""
    tone: str
    """`good`, `bad`, `unsure`, or `quiet` where nothing is to be judged."""
    judgement: str
    gauge: Gauge | None

    @property
    def short(self) -> str:
        """Its name where there is little room."""
        return _SHORT.get(self.name, self.name)


_SHORT = {_LENGTH: "MAL", _DECAY: "Positions", _GAIN: "Gain"}


def percent(value: float, digits: int = 1) -> str:
    """A ratio as people read it: 0.355 is `35.5 %`."""
    return f"{100 * value:.{digits}f} %"


def signed_percent(value: float) -> str:
    """A gain as people read it: 0.1 is `+10.0 %`."""
    return f"{100 * value:+.1f} %".replace("-", "−")


def limits(verdicts: tuple[Verdict, ...], model_name: str) -> dict[str, float]:
    """The thresholds in force for a model, by rule."""
    return {
        v.rule: v.threshold
        for v in verdicts
        if v.model_name == model_name and v.threshold is not None
    }


def figures(measurement: Measurement, limit: Mapping[str, float]) -> tuple[Figure, ...]:
    """Acceptance, MAL, position decay and net gain of a model, in this order.

    Args:
        measurement: of one window.
        limit: the thresholds in force, by rule.
    """
    derived = measurement.total
    return (
        _of_acceptance(derived, limit.get("acceptance_low")),
        _of_length(derived),
        _of_decay(derived, limit.get("position_decay")),
        _of_gain(measurement),
    )


def _why_nothing(derived: Derived) -> str:
    if derived.num_speculative_tokens == 0:
        return "speculation is off"
    if not derived.drafts:
        return f"no drafts in the last {format_duration(derived.window_seconds)}"
    return "the server's counters do not give it"


def _absent(name: str, why: str, bands: str = "") -> Figure:
    return Figure(name, "", "", why, bands, "quiet", "", None)


def plus_minus(stderr: float | None, scale: float = 100.0, digits: int = 1) -> str:
    """Half of a 95 % interval, in percent unless another scale is given; empty where unknown."""
    if stderr is None:
        return ""
    half, least = scale * INTERVAL * stderr, 10.0**-digits
    return f"{half:.{digits}f}" if half >= least / 2 else f"below {least:.{digits}f}"


def _half(stderr: float | None) -> float | None:
    return None if stderr is None else INTERVAL * stderr


def _of_acceptance(derived: Derived, limit: float | None) -> Figure:
    name, k = "Acceptance", derived.num_speculative_tokens
    value, front = derived.acceptance_ratio, derived.front_acceptance_ratio
    if value is None or front is None:
        return _absent(name, _why_nothing(derived))
    band = (GUIDE_POSITIONS[0] - 0.01, GUIDE_POSITIONS[0] + 0.01) if k == 1 else GUIDE_ACCEPTANCE
    bands = "guide 47 %" if k == 1 else "guide 34–36 %"
    if limit is not None:
        bands += f", alert below {percent(limit, 0)}"
    if k > 2:
        bands = f"falls with k; first two positions {percent(front)} ({bands})"
    if limit is not None and front < limit:
        tone, judgement = "bad", "below the alert line"
    elif front >= band[0]:
        tone, judgement = "good", "as the guide has it, or better"
    else:
        tone, judgement = "unsure", "below the guide's, above the alert line"
    return Figure(
        name=name,
        value=percent(value),
        plus_minus=plus_minus(derived.acceptance_ratio_stderr),
        absent="",
        bands=bands,
        tone=tone,
        judgement=judgement,
        gauge=gauge(
            front,
            (0.0, 0.6 if front < 0.6 else 1.0),
            half_width=_half(derived.front_acceptance_ratio_stderr),
            band=band,
            limit=limit,
        ),
    )


def _of_length(derived: Derived) -> Figure:
    name, k = _LENGTH, derived.num_speculative_tokens
    value = derived.mean_acceptance_length
    if value is None:
        return _absent(name, _why_nothing(derived))
    guide = GUIDE_MEAN_ACCEPTANCE_LENGTH
    bands = f"of at most {k + 1} tokens a draft at k = {k}"
    if k == 2:
        bands = f"guide {guide}, {bands}"
    return Figure(
        name=name,
        value=f"{value:.2f}",
        plus_minus=plus_minus(derived.mean_acceptance_length_stderr, 1.0, 2),
        absent="",
        bands=bands,
        tone="quiet",
        judgement="",
        gauge=gauge(
            value,
            (1.0, k + 1.0),
            half_width=_half(derived.mean_acceptance_length_stderr),
            band=(guide - 0.03, guide + 0.03) if k == 2 else None,
        ),
    )


def _of_decay(derived: Derived, limit: float | None) -> Figure:
    name = _DECAY
    positions, stderrs = derived.position_acceptance_ratio, derived.position_acceptance_ratio_stderr
    if not positions or positions[0] is None:
        return _absent(name, _why_nothing(derived))
    first = positions[0]
    if len(positions) == 1:
        return Figure(
            name="Position 0",
            value=percent(first),
            plus_minus=plus_minus(stderrs[0]),
            absent="",
            bands="guide 47 %; there is no other position at k = 1",
            tone="quiet",
            judgement="",
            gauge=gauge(first, (0.0, 1.0), half_width=_half(stderrs[0])),
        )
    second = positions[1]
    if second is None:
        return _absent(name, _why_nothing(derived))
    bands = "guide 47 → 24 %"
    if limit is not None:
        bands += f", alert with position 1 below {percent(limit, 0)}"
    tone, judgement = "good", "position 1 is worth its draft"
    if limit is not None and second < limit:
        tone, judgement = "bad", "position 1 is below the alert line"
    elif limit is None:
        tone, judgement = "quiet", ""
    return Figure(
        name=name,
        value=f"{100 * first:.1f} → {percent(second)}",
        plus_minus=plus_minus(stderrs[1]),
        absent="",
        bands=bands,
        tone=tone,
        judgement=judgement,
        gauge=gauge(
            second,
            (0.0, 0.6 if second < 0.6 else 1.0),
            half_width=_half(stderrs[1]),
            band=(GUIDE_POSITIONS[1] - 0.01, GUIDE_POSITIONS[1] + 0.01),
            limit=limit,
        ),
    )


def _of_gain(measurement: Measurement) -> Figure:
    name, bands = _GAIN, "guide: hold 10–15 %"
    gain, derived = measurement.gain, measurement.total
    if not derived.num_speculative_tokens or not derived.drafts:
        return _absent(name, _why_nothing(derived), bands)
    if gain is None:
        why = measurement.baseline_refused or "no baseline: run specdec-exporter calibrate"
        return _absent(name, why, bands)
    value, stderr = gain.tpot_gain_ratio, gain.tpot_gain_ratio_stderr
    if value is None:
        return _absent(name, gain.reason or "the baseline does not know this load", bands)
    if abs(value) <= BOUND * (stderr or 0.0):
        tone, judgement = "unsure", "cannot be told from 0"
    elif value < 0:
        tone, judgement = "bad", "slower than without speculation"
    elif value < GUIDE_GAIN[0]:
        tone, judgement = "unsure", "less than the guide says to hold"
    else:
        tone, judgement = "good", "as the guide has it, or better"
    return Figure(
        name=name,
        value=signed_percent(value),
        plus_minus=plus_minus(stderr),
        absent="",
        bands=bands,
        tone=tone,
        judgement=judgement,
        gauge=gauge(
            value,
            (min(-0.2, value), max(0.4, value)),
            half_width=_half(stderr),
            band=GUIDE_GAIN,
            limit=0.0,
        ),
    )
