"""Snapshots of one target to its figures: history, windows, reference and derivation in one place.

The live loop and the replay of recordings both measure with this, so they cannot differ. It does no
I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from specdec_exporter.baseline import Baseline
from specdec_exporter.derive import derive
from specdec_exporter.gain import net_gain
from specdec_exporter.model import (
    EVEN_LENGTH,
    EngineTotals,
    Gain,
    Measurement,
    Overdispersion,
    Snapshot,
    Window,
)
from specdec_exporter.uncertainty import DispersionReference, Interval, Span, active_intervals
from specdec_exporter.window import History, combine

KEPT_SECONDS = 3600.0
"""Scrapes are kept for so long, and for the longest window; the choice of k looks at an hour."""
MOST_REFERENCES = 16
"""Pairs of model and k whose past is kept; the longest unused goes first."""


ChooseBaseline = Callable[[str], tuple[Baseline | None, str]]
"""The baseline of a model, and the words of those that were refused."""


class Drafted(NamedTuple):
    """What one model drafted between two scrapes.

    Drafts that vary in length are left out: fewer tokens accepted of fewer drafted is no drift.
    """

    model_name: str
    num_speculative_tokens: int
    interval: Interval


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
        self._history.max_age = max(*self._windows, KEPT_SECONDS)

    @property
    def restarts(self) -> int:
        """Restarts of the target's engines, ever seen."""
        return self._history.restarts

    def add(self, snapshot: Snapshot) -> tuple[Drafted, ...]:
        """Take in one snapshot.

        Returns:
            What each model drafted in the scrape interval that ends with it, engines together.

        Raises:
            ScrapeError: it contradicts the last one; nothing was changed.
        """
        self._history.add(snapshot)
        models = _by_model(self._history.last_interval())
        return tuple(self._remember(combine(windows)) for windows in models)

    def begin_anew(self) -> None:
        """Begin all windows anew, as after a time without scrapes; totals stay."""
        self._history.forget_points()

    def measure(self, choose: ChooseBaseline | None = None) -> tuple[Measurement, ...]:
        """The figures as of the last snapshot.

        One measurement for each window and model, windows in the order given.

        Args:
            choose: gives each model's baseline; without it there is no gain.
        """
        return tuple(
            self._measure(windows, choose)
            for seconds in self._windows
            for windows in _by_model(self._history.windows(seconds))
        )

    def recent(self, seconds: float) -> tuple[Window, ...]:
        """The last so many seconds of each model, engines together; an hour at most."""
        return tuple(combine(windows) for windows in _by_model(self._history.windows(seconds)))

    def figures(self, window: Window) -> Measurement:
        """The figures of a window that `recent` gave, without a gain."""
        return self._measure((window,), None)

    def totals(self) -> tuple[EngineTotals, ...]:
        """Counters since the first snapshot, for each model and engine ever seen."""
        return self._history.totals()

    def _measure(self, windows: tuple[Window, ...], choose: ChooseBaseline | None) -> Measurement:
        total = windows[0] if len(windows) == 1 else combine(windows)
        reference = self._references.get((total.model_name, total.num_speculative_tokens))

        def assume(active_seconds: float, span: Span) -> Overdispersion:
            inflation = reference.inflation(active_seconds, span) if reference else None
            return self._default if inflation is None else Overdispersion("reference", inflation)

        derived = derive(total, assume)
        engines = (derived,) if len(windows) == 1 else tuple(derive(w, assume) for w in windows)
        baseline, refused = (None, "") if choose is None else choose(total.model_name)
        gain = None if baseline is None else net_gain(total, baseline)
        gains: tuple[Gain | None, ...] = (gain,)
        if len(windows) > 1:
            gains = tuple(None if baseline is None else net_gain(w, baseline) for w in windows)
        return Measurement(
            total=derived,
            engines=engines,
            increase=total.increase,
            gain=gain,
            engine_gains=gains,
            baseline_refused=refused,
        )

    def _remember(self, last: Window) -> Drafted:
        """Add the last scrape interval to the past of the model at this k."""
        key = last.model_name, last.num_speculative_tokens
        reference = self._references.pop(key, None) or DispersionReference()
        self._references[key] = reference
        if len(self._references) > MOST_REFERENCES:
            del self._references[next(iter(self._references))]
        intervals = active_intervals(last)
        for interval in intervals:
            reference.add(interval)
        if not intervals or _drafts_vary(last):
            return Drafted(*key, Interval(last.covered_seconds, 0.0, ()))
        return Drafted(*key, intervals[-1])


def _drafts_vary(window: Window) -> bool:
    increase = window.increase
    if not increase.drafts or increase.draft_tokens is None:
        return False
    return increase.draft_tokens < EVEN_LENGTH * window.num_speculative_tokens * increase.drafts


def _by_model(windows: Iterable[Window]) -> tuple[tuple[Window, ...], ...]:
    grouped: dict[str, list[Window]] = {}
    for window in windows:
        grouped.setdefault(window.model_name, []).append(window)
    return tuple(tuple(group) for group in grouped.values())
