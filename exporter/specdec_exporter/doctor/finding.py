"""What a check found, and in which order findings are told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """It will not start, will not do what is written there, or cannot pay off."""
    WARNING = "warning"
    """It runs, and probably costs something."""
    NOTE = "note"
    """Nothing is wrong; somebody may be surprised."""


class Check(StrEnum):
    """What is looked for; docs/doctor.md says what each one finds."""

    FLAG_GONE = "flag-gone"
    GIVEN_TWICE = "given-twice"
    CONFIG_REPLACED = "config-replaced"
    CONFIG_NOT_READ = "config-not-read"
    K_OUTRANKED = "k-outranked"
    K_MISSING = "k-missing"
    K_TOO_DEEP = "k-too-deep"
    NO_MTP = "no-mtp"
    TOO_OLD = "too-old"
    BASE_TARGET = "base-target"
    OTHER_SIZE = "other-size"
    DRAFTER_TOO_SHORT = "drafter-too-short"
    NO_STATISTICS = "no-statistics"
    SCHEDULE_DATA_PARALLEL = "schedule-data-parallel"
    SCHEDULE_CAPPED = "schedule-capped"
    SCHEDULE_REFUSED = "schedule-refused"
    SCHEDULE_ZERO = "schedule-zero"
    NOT_TUNABLE = "not-tunable"
    NO_START = "no-start"
    OFF = "off"
    OTHER_K = "other-k"
    OTHER_MODEL = "other-model"
    ENGINES_DIFFER = "engines-differ"
    DRAFTER_BROKEN = "drafter-broken"
    NO_ANSWER = "no-answer"
    STEP_TIME_AS_TPOT = "step-time-as-tpot"
    MEAN_OF_RATIOS = "mean-of-ratios"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: each text is one line for somebody on call."""

    severity: Severity
    check: Check
    what: str
    where: str
    """FILE:LINE, a flag, or an address."""
    why: str
    mend: str


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """The worst first, and of one severity in the order in which they were found; none twice."""
    order = list(Severity)
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: order.index(f.severity)))
