"""Snapshots of one target to its figures: history, windows, reference and derivation in one place.

The live loop and the replay of recordings both measure with this, so they cannot differ. It does no
I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec_exporter.derive import derive
from specdec_exporter.model import (
    EngineTotals,
    Measurement,
    Overdispersion,
    Snapshot,
    Window,
)
from specdec_exporter.uncertainty import DispersionReference
from specdec_exporter.window import History, combine


@dataclass(slots=True)
class _Reference:
    """The past of one model's engines taken together, at one k."""

    num_speculative_tokens: int
    past: DispersionReference = field(default_factory=DispersionReference)


class Meter:
    """Measures one target.

    Args:
        windows: the spans to derive figures over, seconds.
        variance_inflation: assumed until the target's own past shows its own.
    """

    def __init__(self, windows: Sequence[float], variance_inflation: float) -> None:
        self._history = History()
        self._references: dict[str, _Reference] = {}
        self.reconfigure(windows, variance_inflation)

    def reconfigure(self, windows: Sequence[float], variance_inflation: float) -> None:
        """Measure over other windows from now on; a longer one than before fills up first."""
        self._windows = tuple(windows)
        self._default = Overdispersion("default", variance_inflation)
        self._history.max_age = max(self._windows)

    def add(self, snapshot: Snapshot) -> None:
        """Take in one snapshot.

        Raises:
            ScrapeError: it contradicts the last one; nothing was changed.
        """
        self._history.add(snapshot)
        for windows in _by_model(self._history.last_interval()):
            self._remember(combine(windows))

    def measure(self) -> tuple[Measurement, ...]:
        """The figures as of the last snapshot.

        One measurement for each window and model, windows in the order given.
        """
        return tuple(
            self._measure(windows)
            for seconds in self._windows
            for windows in _by_model(self._history.windows(seconds))
        )

    def totals(self) -> tuple[EngineTotals, ...]:
        """Counters since the first snapshot, for each model and engine ever seen."""
        return self._history.totals()

    def _measure(self, windows: tuple[Window, ...]) -> Measurement:
        total = windows[0] if len(windows) == 1 else combine(windows)
        inflation = self._references[total.model_name].past.inflation(total.covered_seconds)
        assumed = self._default if inflation is None else Overdispersion("reference", inflation)
        derived = derive(total, assumed)
        engines = (derived,) if len(windows) == 1 else tuple(derive(w, assumed) for w in windows)
        return Measurement(total=derived, engines=engines)

    def _remember(self, interval: Window) -> None:
        k = interval.num_speculative_tokens
        reference = self._references.get(interval.model_name)
        if reference is None or reference.num_speculative_tokens != k:
            reference = self._references[interval.model_name] = _Reference(k)
        if k and interval.covered_seconds > 0:
            reference.past.add(interval.covered_seconds, interval.increase)


def _by_model(windows: Iterable[Window]) -> tuple[tuple[Window, ...], ...]:
    grouped: dict[str, list[Window]] = {}
    for window in windows:
        grouped.setdefault(window.model_name, []).append(window)
    return tuple(tuple(group) for group in grouped.values())
