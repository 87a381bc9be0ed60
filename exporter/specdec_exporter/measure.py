"""Snapshots of one target to its figures: history, windows, reference and derivation in one place.

The live loop and the replay of recordings both measure with this, so they cannot differ. It does no
I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec_exporter.derive import derive
from specdec_exporter.model import (
    EngineTotals,
    Measurement,
    Overdispersion,
    Snapshot,
    Window,
)
from specdec_exporter.uncertainty import DispersionReference, Span, active_intervals
from specdec_exporter.window import History, combine

MOST_REFERENCES = 16
"""Pairs of model and k whose past is kept; the longest unused goes first."""


class Meter:
    """Measures one target.

    Args:
        windows: the spans to derive figures over, seconds.
        variance_inflation: assumed until the target's own past shows its own.
    """

    def __init__(self, windows: Sequence[float], variance_inflation: float) -> None:
        self._history = History()
        self._references: dict[tuple[str, int], DispersionReference] = {}
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

    def begin_anew(self) -> None:
        """Begin all windows anew, as after a time without scrapes; totals stay."""
        self._history.forget_points()

    def measure(self) -> tuple[Measurement, ...]:
        """The figures as of the last snapshot.

        One measurement for each window and model, windows in the order given.
        """
        return tuple(
            self._measure(windows)
            for seconds in self._windows
            for windows in _by_model(self._history.windows(seconds))
        )

    def windows(self) -> tuple[tuple[Window, ...], ...]:
        """What each measurement was made of, in the same order: its total, then its engines."""
        return tuple(
            windows if len(windows) == 1 else (combine(windows), *windows)
            for seconds in self._windows
            for windows in _by_model(self._history.windows(seconds))
        )

    def totals(self) -> tuple[EngineTotals, ...]:
        """Counters since the first snapshot, for each model and engine ever seen."""
        return self._history.totals()

    def _measure(self, windows: tuple[Window, ...]) -> Measurement:
        total = windows[0] if len(windows) == 1 else combine(windows)
        reference = self._references.get((total.model_name, total.num_speculative_tokens))

        def assume(active_seconds: float, span: Span) -> Overdispersion:
            inflation = reference.inflation(active_seconds, span) if reference else None
            return self._default if inflation is None else Overdispersion("reference", inflation)

        derived = derive(total, assume)
        engines = (derived,) if len(windows) == 1 else tuple(derive(w, assume) for w in windows)
        return Measurement(total=derived, engines=engines)

    def _remember(self, last: Window) -> None:
        """Add the last scrape interval to the past of the model at this k."""
        key = last.model_name, last.num_speculative_tokens
        reference = self._references.pop(key, None) or DispersionReference()
        self._references[key] = reference
        if len(self._references) > MOST_REFERENCES:
            del self._references[next(iter(self._references))]
        for interval in active_intervals(last):
            reference.add(interval)


def _by_model(windows: Iterable[Window]) -> tuple[tuple[Window, ...], ...]:
    grouped: dict[str, list[Window]] = {}
    for window in windows:
        grouped.setdefault(window.model_name, []).append(window)
    return tuple(tuple(group) for group in grouped.values())
