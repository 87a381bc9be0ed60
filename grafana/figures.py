"""What the boards Target and Raw vLLM both show, over whichever series they stand on.

The guide is Google's for serving Gemma 4 with multi-token prediction. Its limits are drawn as the
exporter's default settings have them; who has set others reads them on the exporter's page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_exporter.config import Settings

from grafana.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    Line,
    PanelBuilder,
    Words,
    band,
    bars,
    graph,
    reference,
)

DEEPEST = 8
"""Positions that have a line; the tuner goes no deeper."""
INTERVAL = 1.96
"""Standard errors to each end of a 95 % interval."""
WINDOW = "5m"
"""Of the exporter's figures and of the rules, unless set otherwise."""

GUIDE_ACCEPTANCE = (0.34, 0.36)
GUIDE_LENGTH = {2: 1.71, 1: 1.45}
"""By k."""
GUIDE_POSITIONS = (0.47, 0.24)
GUIDE_GAIN = (0.10, 0.15)

LIMITS = Settings().rules
DEFAULTS = "Limits are drawn at their defaults; settings may differ."

FRONT_STEPS = ((None, RED), (LIMITS.acceptance_low.below, YELLOW), (GUIDE_ACCEPTANCE[0], GREEN))
GAIN_STEPS = ((None, RED), (0.0, YELLOW), (GUIDE_GAIN[0], GREEN))
ANSWERS: Words = {1: ("yes", GREEN), 0: ("NO", RED)}

WEIGHTS = {"critical": 100, "warning": 10, "info": 1}
"""What a rule that fires adds to the trouble of a target."""
TROUBLE: Words = {
    0: ("none", GREEN),
    (1, 9): ("info", BLUE),
    (10, 99): ("WARNING", ORANGE),
    (100, None): ("CRITICAL", RED),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Expressions of one source, each giving one series per server and model."""

    selector: str
    """Of one server and model."""
    k: str
    acceptance: str
    front: str
    front_stderr: str
    length: str
    length_stderr: str | None
    position: str
    """By position."""
    position_0: str
    reference_position: str | None
    concurrency: str
    drafts: str
    draft_length: str
    coverage: str
    on: str
    """Labels that tell servers and models apart."""
    per_position_total: str
    accepted_total: str
    draft_tokens_total: str
    decode_tokens: tuple[str, ...]
    """Counters: the first less the others."""
    decode_seconds_total: str

    def rate(self, counter: str, more: str = "") -> str:
        """Of a counter, of the engines that are chosen, each by itself."""
        return f'rate({counter}{{{self.selector}, engine=~"$engine"{more}}}[$__rate_interval])'


def acceptance(f: Figures, *, width: int = 12) -> PanelBuilder:
    """Against the guide's band and the limits of two rules."""
    low, misaligned = LIMITS.acceptance_low, LIMITS.drafter_misaligned
    speculating = f"({f.k} > 0)"
    deep = f"({f.k} >= 2)"

    def by_k(at_k1: float, deeper: float) -> str:
        return f"{deeper:g} * ({speculating} >= bool 2) + {at_k1:g} * ({speculating} < bool 2)"

    return graph(
        "Acceptance",
        "Share of drafted tokens that were kept. *Front* is that of the first two positions, which "
        "can be compared at any k; A / T falls with k by construction. The guide sees 34–36 % at "
        "k = 2. Under the dashed line (25 %, at k = 1 33 %) the traffic has probably left what the "
        "drafter was trained on: find the new workload, realign the drafter if it stays. Under the "
        "dotted one (20 %, at k = 1 26.5 %) verification is probably paid for nothing. Acceptance "
        f"explains; whether speculation pays is said by the net gain. {DEFAULTS}",
        [
            *band(
                f"{f.front} - {INTERVAL} * {f.front_stderr}",
                f"{f.front} + {INTERVAL} * {f.front_stderr}",
                "front, 95 % interval",
                BLUE,
            ),
            *band(
                f"{GUIDE_ACCEPTANCE[0]} + 0 * {deep}",
                f"{GUIDE_ACCEPTANCE[1]} + 0 * {deep}",
                "guide 34–36 % (k = 2)",
                GREEN,
            ),
            reference(by_k(low.below_at_k1, low.below), "low below 25 % (k = 1: 33 %)", ORANGE),
            reference(
                by_k(misaligned.below_at_k1, misaligned.below),
                "misaligned below 20 % (k = 1: 26.5 %)",
                RED,
                "dot",
            ),
            Line(f.acceptance, "acceptance A / T", PURPLE, width=1),
            Line(f.front, "front acceptance", BLUE),
        ],
        unit="percentunit",
        decimals=0,
        low=0,
        high=0.5,
        width=width,
    )


def length(f: Figures, *, width: int = 12) -> PanelBuilder:
    """Mean acceptance length against k + 1."""
    interval: Sequence[Line] = ()
    if f.length_stderr is not None:
        interval = band(
            f"{f.length} - {INTERVAL} * {f.length_stderr}",
            f"{f.length} + {INTERVAL} * {f.length_stderr}",
            "95 % interval",
            BLUE,
        )
    guide = " or ".join(f"{mal:g} + 0 * ({f.k} == {k})" for k, mal in GUIDE_LENGTH.items())
    return graph(
        "Mean acceptance length (MAL)",
        "Tokens per verified draft, the target model's own included: from 1, where nothing is "
        "accepted, to k + 1, where everything is. The guide sees 1.71 at k = 2 and 1.45 at k = 1. "
        "Far under k + 1 the deeper drafts are wasted work: fix k where MAL stops growing. Near "
        "k + 1 a larger k may pay: see the predicted speed-up.",
        [
            *interval,
            reference(f"{f.k} + 1", "k + 1, the most possible", GREY),
            reference(guide, "guide (k = 2: 1.71, k = 1: 1.45)", GREEN, "dot"),
            Line(f.length, "MAL", BLUE),
        ],
        unit="none",
        decimals=2,
        low=1,
        width=width,
    )


def positions(f: Figures, *, width: int = 12) -> PanelBuilder:
    """How far drafts get now."""
    decay, broken = LIMITS.position_decay, LIMITS.drafter_broken
    by_position = "sum by (position)"

    def constants(values: Sequence[float]) -> str:
        return " or ".join(
            f'label_replace(vector({value:g}), "position", "{i}", "", "")'
            for i, value in enumerate(values)
        )

    values = [(f"{by_position} ({f.position})", "now", BLUE)]
    if f.reference_position is not None:
        values.append((f"{by_position} ({f.reference_position})", "frozen reference", PURPLE))
    values += [
        (constants(GUIDE_POSITIONS), "guide, k = 2", GREEN),
        (constants((broken.position_0_below, decay.position_1_below)), "alert below", RED),
    ]
    return bars(
        "Acceptance by position, now",
        "Share of all drafts that are accepted up to and including a position, counted from 0. "
        "The guide sees 47 % and 24 %. Position 0 under 5 %: the drafter is broken (wrong method, "
        "base model, bad image, too long contexts), and no k helps. Position 0 healthy (from 33 %) "
        "but position 1 under 15 %: shrink k to 1. A last position under 5 %: one less is as good. "
        + DEFAULTS,
        "position",
        values,
        unit="percentunit",
        width=width,
        high=0.6,
        empty="no drafts",
    )


def decay(f: Figures, *, width: int = 12) -> PanelBuilder:
    """Conditional acceptance, for which drafts of any k are comparable."""

    def accepted(i: int) -> str:
        position = f', position="{i}"'
        return f"sum without (engine, position) ({f.rate(f.per_position_total, position)})"

    colors = (BLUE, ORANGE, PURPLE, TEAL, RED, "#b8860b", "#7a7a7a", "#c71585")
    # The counter of a position that a smaller k has no more stands still, and says nothing.
    deeper = [
        Line(
            f"{accepted(i)} / ({accepted(i - 1)} > 0) and on ({f.on}) {f.k} > {i}",
            f"{i - 1} → {i}",
            colors[i],
        )
        for i in range(1, DEEPEST)
    ]
    healthy = GUIDE_POSITIONS[1] / GUIDE_POSITIONS[0]
    return graph(
        "Decay from position to position",
        "Position 0 of all drafts, and of the drafts that got past a position the share that got "
        "past the next one too, for the engines chosen above. It does not depend on k. A steady "
        "drafter loses about the same share at each step (guide: half from 0 to 1). One line that "
        "falls alone is a drafter that loses the thread there: a k that ends before it costs "
        "nothing. All that fall together are another workload or another model.",
        [
            reference(f"{healthy:.2f} + 0 * ({f.k} >= 2)", "guide 0 → 1: 51 %", GREEN, "dot"),
            Line(f.position_0, "position 0", colors[0]),
            *deeper,
        ],
        unit="percentunit",
        decimals=0,
        low=0,
        high=1,
        width=width,
    )


def concurrency(f: Figures, *, width: int = 8) -> PanelBuilder:
    """Requests in decode, by Little's law."""
    return graph(
        "Requests in decode",
        "Mean number of requests that decode at a time (Little's law: decode seconds per second), "
        f"over {WINDOW} for all engines, and by engine for those chosen above. Speculation pays "
        "least where the machine is busy: a gain that falls as this rises asks for a smaller k or "
        "for a batch-size schedule. Uneven engines ask for a look at the load balancer. Idle is 0.",
        [
            Line(f.rate(f.decode_seconds_total), "engine {{engine}}", width=1),
            Line(f.concurrency, "all engines", PURPLE),
        ],
        unit="none",
        decimals=1,
        low=0,
        width=width,
        empty="no figures",
    )


def throughput(f: Figures, *, width: int = 8) -> PanelBuilder:
    """Tokens a second, by engine."""
    first, *rest = (f.rate(counter) for counter in f.decode_tokens)
    return graph(
        "Decode throughput by engine",
        "Tokens a second after the first of each request, stacked by engine. It is what the load "
        "asks for while there is room, and what the machine gives when there is none. A fall "
        "without a fall of requests in decode is a slower server: look at TPOT.",
        [Line(" - ".join([first, *rest]), "engine {{engine}}")],
        unit="short",
        low=0,
        width=width,
        stacked=True,
        empty="no figures",
    )


def by_engine(f: Figures, *, width: int = 8) -> PanelBuilder:
    """Which engine it is."""
    accepted, drafted = f.rate(f.accepted_total), f.rate(f.draft_tokens_total)
    return graph(
        "Acceptance by engine",
        "A / T of each engine by itself. Engines of one model that get the same traffic accept "
        "alike: one that stays under the others runs another drafter, another image, or other "
        "requests. Never average these: the acceptance of all is their sums, divided.",
        [Line(f"{accepted} / ({drafted} > 0)", "engine {{engine}}")],
        unit="percentunit",
        decimals=0,
        low=0,
        high=0.5,
        width=width,
    )


def evidence(f: Figures, *, width: int = 12) -> PanelBuilder:
    """How much the ratios rest on."""
    return graph(
        "Drafts in the window",
        f"How much evidence the ratios of {WINDOW} rest on. Under the dashed line "
        f"({LIMITS.min_drafts:g}) every rule on acceptance is inconclusive and says nothing; "
        f"{LIMITS.drafter_broken.min_drafts:g} are needed to call a drafter broken. Few drafts at "
        f"a busy server: speculation is off for these requests, or stalled. {DEFAULTS}",
        [
            reference(
                f"{LIMITS.min_drafts:g} + 0 * ({f.k} > 0)",
                f"inconclusive below {LIMITS.min_drafts:g}",
                ORANGE,
            ),
            Line(f.drafts, "drafts", BLUE),
        ],
        unit="short",
        low=0,
        width=width,
    )


def drafting(f: Figures, *, width: int = 12) -> PanelBuilder:
    """Whether drafts are as long and as many as they should be."""
    return graph(
        "Drafts: full length, every step",
        "Both are 100 % where every decode step has a draft of k tokens. A mean length under 95 % "
        "of k: drafts vary (structured outputs, n-grams), deeper positions are lower bounds, and "
        "the rules on them are silent. Drafts per step under 100 %: steps without a draft, as in a "
        "batch-size schedule or with requests that opt out; over 100 %: the server counts padded "
        "drafts, which are taken out of the ratios. In vLLM's own series the five minutes after a "
        "change of k are a mixture of both.",
        [
            reference(
                f"0.95 + 0 * ({f.k} > 0)", "below 95 % of k: rules on positions silent", ORANGE
            ),
            Line(f"{f.draft_length} / on ({f.on}) ({f.k} > 0)", "mean draft length / k", BLUE),
            Line(f.coverage, "drafts per decode step", TEAL),
        ],
        unit="percentunit",
        decimals=0,
        low=0,
        high=1.1,
        width=width,
    )
