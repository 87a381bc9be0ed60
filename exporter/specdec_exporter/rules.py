"""The rules: what each looks at, when it may speak, and when its condition holds.

One table for all who judge: the exporter evaluates it over the window's counts, and Prometheus gets
it rendered, over the exporter's counters or the server's own. Conditions follow Google's Gemma 4
MTP serving guide. A threshold counts as passed only when the one-sided 95 % bound is past it, with
the variance inflation of the settings: a constant, so that Prometheus can know it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdec_exporter.expression import (
    Expression,
    Function,
    Number,
    Quantity,
    Symbol,
    indicator,
    maximum,
    minimum,
)
from specdec_exporter.model import EVEN_LENGTH
from specdec_exporter.thresholds import Thresholds

BOUND = 1.645
"""Standard errors to a one-sided 95 % bound."""
POSITIONS = 16
"""Positions that the variance of the accepted count is summed over."""

# Counted in the window, engines together.
DRAFTS = Symbol("drafts")
PADDED_DRAFTS = Symbol("padded_drafts")
DRAFT_TOKENS = Symbol("draft_tokens")
ACCEPTED_TOKENS = Symbol("accepted_tokens")
ACCEPTED_0 = Symbol("accepted_position_0")
ACCEPTED_1 = Symbol("accepted_position_1")
ACCEPTED_LAST = Symbol("accepted_last_position")
ACCEPTED_POSITIONS = Symbol("accepted_positions")
"""Σ A_i, which is the accepted tokens again."""
ACCEPTED_SQUARES = Symbol("accepted_squares")
"""Σ (2i + 1) A_i, which is the sum of J² over drafts."""
DECODE_STEPS = Symbol("decode_steps")
# Known of the target.
K = Symbol("num_speculative_tokens")
DECODE_CONCURRENCY = Symbol("decode_concurrency")
GREATEST_DRAFTING_CONCURRENCY = Symbol("greatest_drafting_concurrency")
"""The largest concurrency of the last day at which there were drafts."""
REFERENCE_FRONT = Symbol("reference_front")
DRIFT_SCORE = Symbol("drift_score")
COVERED = Symbol("baseline_covered")
GAIN = Symbol("tpot_gain")
GAIN_STDERR = Symbol("tpot_gain_stderr")
LAST_POSITION_GAIN = Symbol("last_position_gain")
"""Speed with the last position against without it, less 1, by the cost model."""
LAST_POSITION_GAIN_STDERR = Symbol("last_position_gain_stderr")
UP = Symbol("up")
EXPECTED_UP = Symbol("expected_up")
"""There after a first success, or once the grace is over."""

VERIFIED_DRAFTS = Quantity("verified_drafts", "increase", DRAFTS - PADDED_DRAFTS | DRAFTS)
VERIFIED_TOKENS = Quantity(
    "verified_draft_tokens", "increase", DRAFT_TOKENS - K * PADDED_DRAFTS | DRAFT_TOKENS
)
FRONT_TOKENS = Quantity(
    "front_draft_tokens",
    "increase",
    # Drafts that a grammar has emptied count, but have no tokens.
    VERIFIED_DRAFTS
    + Function("clamp_min", minimum(VERIFIED_DRAFTS, VERIFIED_TOKENS - VERIFIED_DRAFTS), 0.0),
)
ACCEPTED_FRONT = Quantity("accepted_front", "increase", ACCEPTED_0 + ACCEPTED_1 | ACCEPTED_0)
ACCEPTED_FRONT_SQUARES = Quantity(
    "accepted_front_squares", "increase", ACCEPTED_0 + 3 * ACCEPTED_1 | ACCEPTED_0
)
FRONT = Quantity("front_acceptance", "ratio", ACCEPTED_FRONT / FRONT_TOKENS)
ACCEPTANCE = Quantity("acceptance", "ratio", ACCEPTED_TOKENS / VERIFIED_TOKENS)
POSITION_0 = Quantity("position_0_acceptance", "ratio", ACCEPTED_0 / VERIFIED_DRAFTS)
POSITION_1 = Quantity("position_1_acceptance", "ratio", ACCEPTED_1 / VERIFIED_DRAFTS)
POSITION_LAST = Quantity("last_position_acceptance", "ratio", ACCEPTED_LAST / VERIFIED_DRAFTS)
DRAFT_LENGTH = Quantity("draft_length", "mean", VERIFIED_TOKENS / VERIFIED_DRAFTS)
MAL = Quantity("acceptance_length", "mean", ACCEPTED_TOKENS / VERIFIED_DRAFTS + 1)
DRAFTING_CONCURRENCY = Quantity("drafting_concurrency", "mean", DECODE_CONCURRENCY & (DRAFTS > 0))


@dataclass(frozen=True, slots=True)
class Severity:
    """How bad it is, and the case in which it is less."""

    usual: str
    relaxed: str | None = None
    relaxed_when: Expression | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. It fires where all of its three conditions hold for long enough."""

    name: str
    severity: Severity
    summary: str
    meaning: str
    """What was seen, for the alert's description, with `{value}` in it."""
    advice: str
    value: Expression
    """What the condition looks at, and what is shown."""
    threshold: Expression
    stderr: Expression | None
    applies: Expression | None
    """Gives nothing where the rule has no meaning, such as a second position at k = 1."""
    conclusive: Expression | None
    """Gives nothing where there is too little evidence to say anything."""
    met: Expression
    wait_seconds: float
    keep_firing_seconds: float
    inhibited_by: tuple[str, ...] = ()
    """Rules that say the same and more."""
    is_ratio: bool = True

    @property
    def on_target(self) -> bool:
        """Whether it speaks of the target itself, and not of a model on it."""
        return self.value == UP

    @property
    def alert(self) -> str:
        """The alert's name: `SpecDecAcceptanceLow`."""
        return "SpecDec" + "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def condition(self) -> Expression:
        """The value, where the rule's condition holds."""
        condition = self.value
        for part in (self.applies, self.conclusive, self.met):
            if part is not None and part != self.value:
                condition = condition & part
        return condition


class RuleSettings(Protocol):
    """What the rules need to know of the settings."""

    @property
    def rules(self) -> Thresholds:
        """The thresholds."""

    @property
    def variance_inflation(self) -> float:
        """Of accepted tokens."""


def rule_table(settings: RuleSettings) -> tuple[Rule, ...]:
    """All rules that are enabled, strongest of a family first."""
    t = settings.rules
    inflation = settings.variance_inflation
    enough = DRAFTS >= t.min_drafts
    # Deeper positions of drafts that vary in length are lower bounds, which nothing follows from.
    even_length = enough & (DRAFT_LENGTH >= EVEN_LENGTH * K)

    def proportion_stderr(p: Expression) -> Expression:
        variance = Function("clamp_min", p * (1 - p), 0.0)
        return Function("sqrt", inflation * variance / VERIFIED_DRAFTS)

    def sum_stderr(accepted: Expression, squares: Expression) -> Expression:
        """Of the accepted count over all drafts: √(o · (Σ J² − (Σ J)² / D))."""
        variance = squares - accepted * accepted / VERIFIED_DRAFTS
        return Function("sqrt", inflation * Function("clamp_min", variance, 0.0))

    front_stderr = Quantity(
        "front_acceptance",
        "stderr",
        sum_stderr(ACCEPTED_FRONT, ACCEPTED_FRONT_SQUARES) / FRONT_TOKENS,
    )
    acceptance_stderr = Quantity(
        "acceptance", "stderr", sum_stderr(ACCEPTED_TOKENS, ACCEPTED_SQUARES) / VERIFIED_TOKENS
    )
    position_0_stderr = Quantity("position_0_acceptance", "stderr", proportion_stderr(POSITION_0))
    position_1_stderr = Quantity("position_1_acceptance", "stderr", proportion_stderr(POSITION_1))
    last_stderr = Quantity("last_position_acceptance", "stderr", proportion_stderr(POSITION_LAST))

    def by_k(at_k1: float, else_: float) -> Expression:
        return indicator(K >= 2) * else_ + indicator(K < 2) * at_k1

    def rule(
        name: str,
        *,
        severity: Severity,
        summary: str,
        meaning: str,
        advice: str,
        value: Expression,
        threshold: Expression,
        met: Expression,
        stderr: Expression | None = None,
        applies: Expression | None = None,
        conclusive: Expression | None = None,
        inhibited_by: tuple[str, ...] = (),
        is_ratio: bool = True,
    ) -> Rule:
        return Rule(
            name=name,
            severity=severity,
            summary=summary,
            meaning=meaning,
            advice=advice,
            value=value,
            threshold=threshold,
            stderr=stderr,
            applies=applies,
            conclusive=conclusive,
            met=met,
            wait_seconds=getattr(t, name).for_,
            keep_firing_seconds=0.0 if name == "target_down" else t.keep_firing_for,
            inhibited_by=inhibited_by,
            is_ratio=is_ratio,
        )

    low, misaligned = t.acceptance_low, t.drafter_misaligned
    low_limit = Quantity(
        "acceptance_low",
        "threshold",
        maximum(
            Quantity(
                "guide_acceptance", "threshold", by_k(low.below_at_k1, low.below), windowed=False
            ),
            low.reference_share * REFERENCE_FRONT,
        ),
        windowed=False,
    )
    misaligned_limit = Quantity(
        "drafter_misaligned",
        "threshold",
        by_k(misaligned.below_at_k1, misaligned.below),
        windowed=False,
    )
    decay, broken = t.position_decay, t.drafter_broken
    table = (
        rule(
            "target_down",
            severity=Severity("warning"),
            summary="A target of the exporter does not answer.",
            meaning="The last scrape of the target failed.",
            advice="See whether the server runs and its /metrics can be reached from here.",
            value=UP,
            threshold=Number(1.0),
            conclusive=EXPECTED_UP,
            met=UP < 1,
            is_ratio=False,
        ),
        rule(
            "drafter_broken",
            severity=Severity("critical"),
            summary="The drafter's first token is almost never accepted.",
            meaning="Position 0 is accepted in {value} of drafts.",
            advice="Check that the method is mtp, that target and drafter are the paired -it "
            "models, and that contexts stay under the drafter's maximum length; until then switch "
            "speculation off. No k helps.",
            value=POSITION_0,
            threshold=Number(broken.position_0_below),
            stderr=position_0_stderr,
            applies=K >= 1,
            conclusive=DRAFTS >= broken.min_drafts,
            met=POSITION_0 + BOUND * position_0_stderr < broken.position_0_below,
            inhibited_by=("target_down",),
        ),
        rule(
            "drafter_misaligned",
            severity=Severity("warning", "info", GAIN >= 0),
            summary="So few drafts are accepted that verification is probably paid for nothing.",
            meaning="Front acceptance is {value}.",
            advice="Look at the net gain; where it is negative or unknown use k = 1 or switch "
            "speculation off, and realign the drafter with this traffic.",
            value=FRONT,
            threshold=misaligned_limit,
            stderr=front_stderr,
            applies=K >= 1,
            conclusive=enough,
            met=FRONT + BOUND * front_stderr < misaligned_limit,
            inhibited_by=("target_down", "drafter_broken"),
        ),
        rule(
            "acceptance_low",
            severity=Severity("warning"),
            summary="Fewer drafts are accepted than the guide or the target's past expects.",
            meaning="Front acceptance is {value}.",
            advice="The traffic has probably moved away from what the drafter was trained on: "
            "see which workload is new, and realign the drafter if it stays.",
            value=FRONT,
            threshold=low_limit,
            stderr=front_stderr,
            applies=K >= 1,
            conclusive=enough,
            met=FRONT + BOUND * front_stderr < low_limit,
            inhibited_by=("target_down", "drafter_broken", "drafter_misaligned"),
        ),
        rule(
            "position_decay",
            severity=Severity("warning"),
            summary="The second draft token is rarely accepted while the first one is.",
            meaning="Position 1 is accepted in {value} of drafts, and position 0 is healthy.",
            advice="Shrink k to 1: the drafter works, but deeper drafts do not pay here.",
            value=POSITION_1,
            threshold=Number(decay.position_1_below),
            stderr=position_1_stderr,
            applies=K >= 2,
            conclusive=even_length,
            met=(POSITION_1 + BOUND * position_1_stderr < decay.position_1_below)
            & (POSITION_0 - BOUND * position_0_stderr >= decay.position_0_from),
            inhibited_by=("target_down", "drafter_broken"),
        ),
        rule(
            "length_plateau",
            severity=Severity("info"),
            summary="The last draft position adds next to nothing, or costs more than it adds.",
            meaning="The last position adds {value} tokens to a draft.",
            advice="Fix k where the mean acceptance length stops growing or the predicted speedup "
            "is largest: one lower is as good or better.",
            value=POSITION_LAST,
            threshold=Number(t.length_plateau.last_position_below),
            stderr=last_stderr,
            applies=K >= 2,
            conclusive=even_length,
            met=(POSITION_LAST + BOUND * last_stderr < t.length_plateau.last_position_below)
            | (LAST_POSITION_GAIN + BOUND * LAST_POSITION_GAIN_STDERR < 0),
            inhibited_by=(
                "target_down",
                "drafter_broken",
                "drafter_misaligned",
                "position_decay",
            ),
            is_ratio=False,
        ),
        rule(
            "net_gain_negative",
            severity=Severity("warning"),
            summary="Decoding is slower than it would be without speculation.",
            meaning="The net TPOT gain is {value} at this load.",
            advice="Lower k, or switch speculation off at this load, whatever acceptance says.",
            value=GAIN,
            threshold=Number(t.net_gain_negative.below),
            stderr=GAIN_STDERR,
            applies=(K >= 1) & (COVERED >= 1),
            conclusive=GAIN,
            met=GAIN + BOUND * GAIN_STDERR < t.net_gain_negative.below,
            inhibited_by=("target_down",),
        ),
        rule(
            "net_gain_low",
            severity=Severity("info"),
            summary="Speculation gains less than the guide says to hold.",
            meaning="The net TPOT gain is {value} at this load.",
            advice="Review the MTP settings: k, the load at which speculation is on, and the "
            "drafter.",
            value=GAIN,
            threshold=Number(t.net_gain_low.below),
            stderr=GAIN_STDERR,
            applies=(K >= 1) & (COVERED >= 1),
            conclusive=GAIN,
            met=GAIN + BOUND * GAIN_STDERR < t.net_gain_low.below,
            inhibited_by=("target_down", "net_gain_negative"),
        ),
        rule(
            "drafter_drift",
            severity=Severity("warning"),
            summary="Acceptance has left the target's frozen reference.",
            meaning="The drift score is {value}; 1 is the limit.",
            advice="Compare the workload and the images with those of the reference; realign the "
            "drafter, or take a new reference if this is the new normal.",
            value=DRIFT_SCORE,
            threshold=Number(1.0),
            applies=DRIFT_SCORE,
            met=DRIFT_SCORE >= 1,
            inhibited_by=("target_down", "drafter_broken"),
            is_ratio=False,
        ),
        rule(
            "acceptance_suspicious",
            severity=Severity("info"),
            summary="Nearly every draft token is accepted, as in a repetition loop.",
            meaning="Acceptance is {value}.",
            advice="Read a few answers: a model that repeats itself looks exactly like this.",
            value=ACCEPTANCE,
            threshold=Number(t.acceptance_suspicious.above),
            stderr=acceptance_stderr,
            applies=K >= 2,
            conclusive=enough,
            met=ACCEPTANCE - BOUND * acceptance_stderr > t.acceptance_suspicious.above,
            inhibited_by=("target_down",),
        ),
        rule(
            "drafting_stalled",
            severity=Severity("warning"),
            summary="Tokens are generated without drafts although speculation is on.",
            meaning="There were {value} drafts at a load at which there used to be some.",
            advice="Look for a batch-size schedule, for requests that speculation is off for, and "
            "for errors of the drafter in the server's log.",
            value=DRAFTS,
            threshold=Number(0.0),
            applies=(K >= 1) & GREATEST_DRAFTING_CONCURRENCY,
            conclusive=DECODE_STEPS >= t.drafting_stalled.min_steps,
            met=(DRAFTS <= 0) & (DECODE_CONCURRENCY <= GREATEST_DRAFTING_CONCURRENCY),
            inhibited_by=("target_down",),
            is_ratio=False,
        ),
        rule(
            "counters_inconsistent",
            severity=Severity("info"),
            summary="The server's counters of accepted tokens contradict each other.",
            meaning="The positions' sum differs from the accepted tokens by {value}.",
            advice="Do not trust the positions of this server; report it to the server's "
            "developers with its version.",
            value=Function("abs", ACCEPTED_POSITIONS - ACCEPTED_TOKENS) / ACCEPTED_TOKENS,
            threshold=Number(t.counters_inconsistent.above),
            applies=K >= 1,
            conclusive=enough,
            met=Function("abs", ACCEPTED_POSITIONS - ACCEPTED_TOKENS) / ACCEPTED_TOKENS
            > t.counters_inconsistent.above,
            inhibited_by=("target_down",),
        ),
    )
    return tuple(one for one in table if getattr(t, one.name).enabled)
