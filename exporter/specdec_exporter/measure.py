"""Snapshots of one target to its figures: history, windows, reference and derivation in one place.

The live loop and the replay of recordings both measure with this, so they cannot differ. It does no
I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec_exporter.derive import derive
from specdec_exporter.model import (
    Counters,
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
        self._windows = tuple(windows)
        self._default = Overdispersion("default", variance_inflation)
        self._history = History(max(self._windows))
        self._references: dict[str, _Reference] = {}

    def add(self, snapshot: Snapshot) -> tuple[Measurement, ...]:
        """Take in one snapshot and derive the figures as of it.

        Returns:
            One measurement for each window and model, windows in the order given.

        Raises:
            ScrapeError: the snapshot contradicts the last one; nothing was changed.
        """
        self._history.add(snapshot)
        measurements: list[Measurement] = []
        for number, seconds in enumerate(self._windows):
            by_model: dict[str, list[Window]] = {}
            for window in self._history.windows(seconds):
                by_model.setdefault(window.model_name, []).append(window)
            for model_name, windows in by_model.items():
                total = windows[0] if len(windows) == 1 else combine(tuple(windows))
                if number == 0:
                    self._remember(total)
                measurements.append(self._measure(model_name, total, windows))
        return tuple(measurements)

    def totals(self) -> tuple[EngineTotals, ...]:
        """Counters since the first snapshot, for each model and engine ever seen."""
        return self._history.totals()

    def _measure(self, model_name: str, total: Window, windows: list[Window]) -> Measurement:
        inflation = self._references[model_name].past.inflation(total.covered_seconds)
        assumed = self._default if inflation is None else Overdispersion("reference", inflation)
        derived = derive(total, assumed)
        engines = (derived,) if len(windows) == 1 else tuple(derive(w, assumed) for w in windows)
        return Measurement(total=derived, engines=engines)

    def _remember(self, total: Window) -> None:
        k = total.num_speculative_tokens
        reference = self._references.get(total.model_name)
        if reference is None or reference.num_speculative_tokens != k:
            reference = self._references[total.model_name] = _Reference(k)
        if not k:
            return
        steps = [(t[-1].t - t[-2].t, t[-1].totals - t[-2].totals) for t in total.tracks if t[1:]]
        if steps:
            counted = sum((increase for _, increase in steps), Counters(0, 0, 0, (), 0, 0, 0, 0))
            reference.past.add(max(seconds for seconds, _ in steps), counted)
