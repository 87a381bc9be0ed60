"""Durations as Prometheus writes them, read and written."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d|w))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def parse_duration(value: object) -> float:
    """Seconds of a number, or of a duration as Prometheus writes them: `5s`, `1m30s`, `500ms`.

    Raises:
        ValueError: it is neither, or not above 0.
    """
    seconds = parse_duration_or_zero(value)
    if seconds == 0:
        raise ValueError("0s is not above 0 and finite")
    return seconds


def parse_duration_or_zero(value: object) -> float:
    """The same where 0 has a meaning, which is "at once".

    Raises:
        ValueError: it is no duration, or below 0.
    """
    if isinstance(value, str) and _DURATION.fullmatch(value.strip()):
        seconds = sum(float(n) * _UNITS[unit] for n, unit in _PART.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise ValueError(f"{value!r} is not a duration; write it like 5s, 1m30s or 500ms")
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{seconds:g}s is not above 0 and finite")
    return seconds


def format_duration(seconds: float) -> str:
    """Seconds as Prometheus writes a duration: 300 is `5m`, 90 is `1m30s`, 0.5 is `500ms`."""
    rest = round(seconds * 1000)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def rough_duration(seconds: float) -> str:
    """The same for people to read, in two units at most: 5,530.2 s is `1h32m`.

    Below 0, as between two times when the clock was set back, it is `0s`.
    """
    seconds = max(0.0, seconds)
    parts = _PART.findall(format_duration(seconds if seconds < 1 else round(seconds)))
    return "".join(f"{count}{unit}" for count, unit in parts[:2]) or "0s"
