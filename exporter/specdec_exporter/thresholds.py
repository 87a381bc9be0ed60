"""Every number that the rules stand on, with its default; the `rules` section of the settings.

The thresholds are those of Google's Gemma 4 MTP serving guide where it names one: acceptance under
25 %, position 1 under 15 % with position 0 healthy, net gain of 10 to 15 %. At k = 1 the limits of
acceptance are the same share of a healthy position 0 as they are of a healthy acceptance at k = 2.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specdec_exporter.duration import parse_duration, parse_duration_or_zero

Duration = Annotated[float, BeforeValidator(parse_duration)]
Wait = Annotated[float, BeforeValidator(parse_duration_or_zero)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class AcceptanceLow(_Section):
    """Front acceptance under the guide's limit, or under a share of the target's own reference."""

    enabled: bool = True
    for_: Wait = Field(default=600.0, alias="for")
    below: Ratio = 0.25
    below_at_k1: Ratio = 0.33
    reference_share: Ratio = 0.70


class DrafterMisaligned(_Section):
    """Front acceptance so low that verification is probably paid for nothing."""

    enabled: bool = True
    for_: Wait = Field(default=600.0, alias="for")
    below: Ratio = 0.20
    below_at_k1: Ratio = 0.265


class DrafterBroken(_Section):
    """Position 0 almost never accepted."""

    enabled: bool = True
    for_: Wait = Field(default=120.0, alias="for")
    position_0_below: Ratio = 0.05
    min_drafts: Count = 1000.0


class PositionDecay(_Section):
    """A healthy first position and a second that is not worth its cost."""

    enabled: bool = True
    for_: Wait = Field(default=600.0, alias="for")
    position_0_from: Ratio = 0.33
    position_1_below: Ratio = 0.15


class NetGainLow(_Section):
    """Less gain than the guide says to hold."""

    enabled: bool = True
    for_: Wait = Field(default=900.0, alias="for")
    below: float = 0.10


class NetGainNegative(_Section):
    """Slower than without speculation."""

    enabled: bool = True
    for_: Wait = Field(default=600.0, alias="for")
    below: float = 0.0


class LengthPlateau(_Section):
    """A last position that adds too few tokens, or that costs more than they are worth."""

    enabled: bool = True
    for_: Wait = Field(default=1800.0, alias="for")
    last_position_below: Ratio = 0.05


class DrafterDrift(_Section):
    """Acceptance that has left the frozen reference; how far is up to the detector's budget."""

    enabled: bool = True
    for_: Wait = Field(default=0.0, alias="for")
    false_alarms_per_month: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.5


class AcceptanceSuspicious(_Section):
    """Acceptance too good to be true."""

    enabled: bool = True
    for_: Wait = Field(default=900.0, alias="for")
    above: Ratio = 0.98


class DraftingStalled(_Section):
    """Tokens without drafts, at a load at which there used to be drafts."""

    enabled: bool = True
    for_: Wait = Field(default=300.0, alias="for")
    min_steps: Count = 200.0


class CountersInconsistent(_Section):
    """Accepted tokens that are not the sum of the positions."""

    enabled: bool = True
    for_: Wait = Field(default=300.0, alias="for")
    above: Ratio = 0.01


class TargetDown(_Section):
    """A target that has stopped answering, or that has not begun to in time."""

    enabled: bool = True
    for_: Wait = Field(default=300.0, alias="for")
    grace: Duration = 1800.0


class Thresholds(_Section):
    """The rules' settings."""

    evaluation_interval: Duration = 15.0
    """Time between two looks at all rules."""
    min_drafts: Count = 200.0
    """With fewer drafts in the window, rules on acceptance are inconclusive."""
    keep_firing_for: Wait = 900.0
    """A firing rule goes on for so long after its condition was last seen to hold."""
    runbook_url: str = "https://specdec-exporter.readthedocs.io/en/latest/runbooks/"
    """Address under which the page of each alert is found."""
    acceptance_low: AcceptanceLow = AcceptanceLow()
    drafter_misaligned: DrafterMisaligned = DrafterMisaligned()
    drafter_broken: DrafterBroken = DrafterBroken()
    position_decay: PositionDecay = PositionDecay()
    net_gain_low: NetGainLow = NetGainLow()
    net_gain_negative: NetGainNegative = NetGainNegative()
    length_plateau: LengthPlateau = LengthPlateau()
    drafter_drift: DrafterDrift = DrafterDrift()
    acceptance_suspicious: AcceptanceSuspicious = AcceptanceSuspicious()
    drafting_stalled: DraftingStalled = DraftingStalled()
    counters_inconsistent: CountersInconsistent = CountersInconsistent()
    target_down: TargetDown = TargetDown()
