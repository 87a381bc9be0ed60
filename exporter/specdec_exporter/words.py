"""What a target's figures come to, in one sentence that a person on call reads first."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_exporter.duration import format_duration
from specdec_exporter.model import (
    SEVERITIES,
    Derived,
    Gain,
    Measurement,
    RuleState,
    TargetStatus,
    Verdict,
)
from specdec_exporter.rules import BOUND


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence, and how it is meant."""

    tone: str
    """`good`, `bad`, `unsure` or `quiet`."""
    text: str

    @property
    def trouble(self) -> int:
        """The larger, the sooner somebody should look."""
        return ("quiet", "good", "unsure", "bad").index(self.tone)


def headline(status: TargetStatus, measurement: Measurement | None) -> Headline:
    """The verdict on one model of a target, or on the target where nothing is measured."""
    if not status.scrapes:
        return Headline("quiet", "Not scraped yet")
    if not status.up and measurement is None:
        return Headline("bad", "Does not answer")
    if measurement is None:
        return Headline("unsure", "Answers, but there are no figures yet")
    derived = measurement.total
    gain = measurement.gain
    known = gain is not None and gain.tpot_gain_ratio is not None
    firing = _loudest(status, derived.model_name)
    # Whether speculation pays is asked first, and a hint is no answer to it.
    if firing is not None and not (known and firing.severity == "info"):
        return _of_rule(firing, status, measurement)
    if derived.num_speculative_tokens == 0:
        return Headline("quiet", "Speculation is off")
    if not derived.drafts:
        window = format_duration(derived.window_seconds)
        return Headline("quiet", f"Idle: no drafts in the last {window}")
    if gain is not None and gain.tpot_gain_ratio is not None:
        return _of_gain(gain, derived)
    why = "no baseline, so the net gain is not known"
    if gain is not None:
        why = gain.reason or "the baseline does not know this load"
    elif measurement.baseline_refused:
        why = measurement.baseline_refused
    length = derived.mean_acceptance_length
    mean = "" if length is None else f", mean acceptance length {length:.2f}"
    return Headline("unsure", f"Drafting{mean}; {why}")


def _loudest(status: TargetStatus, model_name: str) -> Verdict | None:
    firing = [
        v
        for v in status.verdicts
        if v.state is RuleState.FIRING
        and v.inhibited_by is None
        and v.model_name in (model_name, "")
    ]
    return min(firing, key=lambda v: SEVERITIES.index(v.severity), default=None)


def _of_rule(verdict: Verdict, status: TargetStatus, measurement: Measurement) -> Headline:
    value = "" if verdict.value is None else f"{100 * verdict.value:.0f} %"
    tone = "unsure" if verdict.severity == "info" else "bad"
    match verdict.rule:
        case "target_down":
            text = "Does not answer"
        case "drafter_broken":
            text = f"Drafter broken: position 0 at {value}"
        case "drafter_misaligned":
            text = f"Drafter misaligned: {value} of the front tokens accepted"
        case "acceptance_low":
            text = f"Acceptance low: {value} of the front tokens accepted"
        case "position_decay":
            text = f"k too deep: position 1 at {value}; shrink k to 1"
        case "net_gain_negative" | "net_gain_low" if measurement.gain is not None:
            gain = _of_gain(measurement.gain, measurement.total)
            text, tone = gain.text, gain.tone if verdict.rule == "net_gain_low" else "bad"
        case "drafter_drift":
            text = f"Drafter drifted ({_shape(status, verdict.model_name)})"
        case _:
            text = verdict.summary.removesuffix(".")
    return Headline(tone, text)


def _shape(status: TargetStatus, model_name: str) -> str:
    for drift in status.drift:
        if drift.model_name == model_name and drift.incident is not None:
            found = drift.incident
            return (
                f"{found.shape}; MAL {found.observed_mean_acceptance_length:.2f}, expected "
                f"{found.expected_mean_acceptance_length:.2f}"
            )
    return "see its reference"


def _of_gain(gain: Gain, derived: Derived) -> Headline:
    value, stderr = gain.tpot_gain_ratio, gain.tpot_gain_ratio_stderr or 0.0
    if value is None:
        return Headline("unsure", f"The net gain is not known: {gain.reason}")
    at = ""
    if derived.decode_concurrency is not None:
        requests = max(1, round(derived.decode_concurrency))
        at = f" at {requests} request{'' if requests == 1 else 's'} in flight"
    if value - BOUND * stderr > 0:
        return Headline("good", f"Speculation pays: {100 * value:.0f} % faster{at}")
    if value + BOUND * stderr < 0:
        return Headline("bad", f"Speculation costs: {-100 * value:.0f} % slower{at}")
    return Headline("unsure", f"Speculation about breaks even: {100 * value:+.0f} %{at}")
