"""The baselines that one target has, and which of them holds for a model now.

A peer without speculation is the best, then what was measured, then what was seen of the target
itself while speculation was off, then a number that somebody knows. This module does arithmetic
only; time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_exporter.baseline import Baseline, Observed, choose, static
from specdec_exporter.model import Window

MOST_OBSERVED = 8
"""Models and versions whose own past without speculation is kept; the longest unused goes first."""


class Baselines:
    """All baselines of one target.

    Args:
        measured: by `calibrate` or a sweep.
        static_seconds: TPOT that is known, whatever the load; or None.
    """

    def __init__(self, measured: tuple[Baseline, ...], static_seconds: float | None) -> None:
        self.measured = measured
        self.static_seconds = static_seconds
        self.peers: Mapping[str, Baseline] = {}
        """Live ones of other targets, by model."""
        self._observed: dict[tuple[str, str], Observed] = {}
        self._curves: dict[tuple[str, str], Baseline] = {}

    def observe(self, window: Window, engine_version: str, now: float) -> None:
        """Learn from a window of all engines of a model that ends now; without speculation only.

        It must be longer than the time between two calls.
        """
        if any(track[-1].totals.drafts is not None for track in window.tracks):
            return
        key = window.model_name, engine_version
        observed = self._observed.pop(key, None) or Observed(*key)
        self._observed[key] = observed
        if len(self._observed) > MOST_OBSERVED:
            oldest = next(iter(self._observed))
            del self._observed[oldest]
            self._curves.pop(oldest, None)
        observed.add(window, now)
        if (curve := observed.baseline()) is not None:
            self._curves[key] = curve

    def choose(
        self, model_name: str, engine_version: str, now: float
    ) -> tuple[Baseline | None, str]:
        """The best one for a model on an engine of this version, and why others were refused."""
        candidates = list(self.measured)
        if (peer := self.peers.get(model_name)) is not None:
            candidates.append(peer)
        candidates += [b for (model, _), b in self._curves.items() if model == model_name]
        if self.static_seconds is not None:
            candidates.append(static(model_name, self.static_seconds, now))
        return choose(candidates, model_name, engine_version, now)

    def to_dict(self) -> dict[str, Any]:
        """What was observed, as plain JSON values."""
        return {"observed": [observed.to_dict() for observed in self._observed.values()]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave.

        Raises:
            BaselineError, KeyError, TypeError: it is of another form; nothing was changed.
        """
        restored = [Observed.from_dict(one) for one in saved["observed"]]
        self._observed = {(one.model_name, one.engine_version): one for one in restored}
        self._curves = {
            key: curve for key, one in self._observed.items() if (curve := one.baseline())
        }
