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


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: each text is one line for somebody on call."""

    severity: Severity
    check: str
    """Name of the check, for programs."""
    what: str
    where: str
    """FILE:LINE, a flag, or an address."""
    why: str
    mend: str


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """The worst first, and of one severity in the order in which they were found; none twice."""
    order = list(Severity)
    return tuple(sorted(dict.fromkeys(findings), key=lambda f: order.index(f.severity)))
