"""The values that flow through the exporter: frozen, free of I/O, importing nothing of ours.

A scrape becomes a `Snapshot`; two or more snapshots become a `Window` of increases; a window becomes
a `Derived`. What goes wrong on the way is a `ScrapeError` with one `Reason` out of a closed list.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import zip_longest


class Reason(StrEnum):
    """Why a scrape gave no snapshot; the values of `specdec_scrape_failures_total{reason}`."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    HTTP_STATUS = "http_status"
    REDIRECT = "redirect"
    PROTOCOL = "protocol"
    ENCODING = "encoding"
    TOO_LARGE = "too_large"
    TRUNCATED = "truncated"
    EMPTY = "empty"
    NOT_METRICS = "not_metrics"
    NO_SERIES = "no_series"
    MALFORMED = "malformed"
    BAD_VALUE = "bad_value"
    DUPLICATE_SERIES = "duplicate_series"
    MISSING_SERIES = "missing_series"
    CLOCK = "clock"
    INTERNAL = "internal"


class ScrapeError(Exception):
    """A scrape that gave no snapshot.

    `detail` is one line for a person on call: what was seen and what to do about it. It never
    carries a secret.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def _add(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _subtract(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of one engine, or increases of them.

    Counts but for `decode_seconds`, which is in seconds. None is a family that the server does not
    have. Without speculation the first three are None and `accepted_per_position` is empty.
    """

    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    accepted_per_position: tuple[float, ...] = ()
    generation_tokens: float | None = None
    first_tokens: float | None = None
    decode_seconds: float | None = None
    decode_steps: float | None = None

    def __add__(self, other: Counters) -> Counters:
        """Sum of two; absent in one is absent in the sum, positions are padded with 0."""
        return Counters(
            **{name: _add(getattr(self, name), getattr(other, name)) for name in SCALARS},
            accepted_per_position=tuple(
                a + b
                for a, b in zip_longest(
                    self.accepted_per_position, other.accepted_per_position, fillvalue=0.0
                )
            ),
        )

    def __sub__(self, other: Counters) -> Counters:
        """Difference of two with the same number of positions; absent in one is absent.

        Raises:
            ValueError: the numbers of positions differ.
        """
        return Counters(
            **{name: _subtract(getattr(self, name), getattr(other, name)) for name in SCALARS},
            accepted_per_position=tuple(
                a - b
                for a, b in zip(
                    self.accepted_per_position, other.accepted_per_position, strict=True
                )
            ),
        )


SCALARS = tuple(f.name for f in fields(Counters) if f.name != "accepted_per_position")
"""The names of the counters that are one number each."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What one scrape says of one engine: cumulative counters since the engine's start."""

    model_name: str
    engine: str
    counters: Counters
    requests_running: float | None = None
    """The gauge of running requests: a cross-check, never part of a formula."""
    extra_labels: tuple[tuple[str, str], ...] = ()
    """Other labels on the series (a proxy's, Ray's), sorted; they tell replicas apart."""

    @property
    def num_speculative_tokens(self) -> int:
        """Observed k: the number of `position` series; 0 without speculation."""
        return len(self.counters.accepted_per_position)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One parsed scrape of one target."""

    t: float
    """Time of the scrape, seconds; only differences of it matter."""
    engines: tuple[EngineSample, ...]
    process_start_time: float | None = None
    """The server's own start time in unix seconds, where it says so."""
