"""Every number that the choice of k stands on; the `tuner` section of the settings.

What a number is for, and where it comes from, is told in docs/tuning.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec_exporter.thresholds import Count, Duration, Ratio, Wait

Tokens = Annotated[int, Field(ge=0, le=16)]
Multiple = Annotated[float, Field(ge=0.0, le=10.0)]


class TunerSettings(BaseModel):
    """The tuner's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["off", "recommend", "apply"] = "recommend"
    """`apply` changes k; `recommend` decides in full and changes nothing."""
    paused: bool = False
    """Hold everything at once, whatever is going on."""

    floor: Annotated[int, Field(ge=0, le=1)] = 1
    """The smallest k. 0 lets speculation be switched off, and tried again from time to time."""
    max_k: Annotated[int, Field(ge=1, le=16)] = 8
    """The deepest k there may be."""
    steps_above_measured: Tokens = 1
    """How far above the deepest k measured here k may go."""

    min_gain: Ratio = 0.03
    """A change must promise more speed than this."""
    stderr_multiple: Multiple = 0.3
    """Standard errors of the promise that are added to `min_gain`."""
    trial_starts: Annotated[int, Field(ge=0)] = 2
    """k = 1 that has been measured in fewer starts is tried where it looks better at all."""
    cooldown: Wait = 1800.0
    """Between two changes."""
    changes_per_day: Annotated[int, Field(ge=2)] = 4
    """In any 24 hours; the last one is kept for k = 1 or a way back."""
    override_gain: Ratio = 0.08
    """A change that promises more than this need not mind the daily limit. Less is no reason where
    requests queued up during the last change."""
    flapping_turns: Annotated[int, Field(ge=2)] = 6
    """So many turns of what the last window asks for make a workload that flaps."""
    flapping_within: Duration = 21600.0
    """The time that turns are counted over."""
    retry_off_after: Duration = 43200.0
    """Speculation that was switched off here is tried again after this; without drafts nothing
    else can tell that it would pay."""

    min_drafts: Count = 2000.0
    """With fewer drafts in the last hour nothing is concluded."""
    settle: Duration = 300.0
    """At a new k nothing is concluded for so long; then its measured step time counts."""
    ready_timeout: Duration = 600.0
    """A server that has not come back with its new k by then is rolled back."""
    verify_timeout: Duration = 7200.0
    """A change that could not be compared by then stays, unverified."""
    verify_z: Multiple = 1.645
    """Standard errors to "worse beyond noise"; this is the one-sided 95 % bound."""
    throughput_within: Ratio = 0.25
    """Decode throughputs that differ by less can be compared."""
    same_acceptance_within: Ratio = 0.05
    """Position 0 that has moved by less, or is within `verify_z` of noise, is the same workload."""
    block_for: Duration = 86400.0
    """A k that was rolled back is not tried again for so long at the load it was found at."""

    start_spread: Ratio = 0.13
    """Assumed relative spread of the step time between starts of one server, until several starts
    have been seen. Two sets of starts on one kind of machine (an H200) showed this."""
    assumed_position_cost: Ratio = 0.235
    """Of a step without speculation, for each draft token, until a second k has been measured. The
    guide's step of 1.47 at k = 2 gives it."""
    assumed_cost_stderr: Ratio = 0.10
    """Relative standard error of a step time that nobody has measured."""

    @model_validator(mode="after")
    def _consistent(self) -> TunerSettings:
        if self.override_gain < self.min_gain:
            raise ValueError("override_gain is below min_gain, so that no limit would hold")
        if self.verify_timeout < self.settle:
            raise ValueError("verify_timeout is shorter than settle, so that nothing is verified")
        return self
