"""Drift of one target's drafters: which reference holds now, and what the detector makes of it.

A reference belongs to a model, its k, the engine's version and the user's revision; with another of
these the target has another acceptance, and another reference. What is configured is used at once.
Otherwise one is learned: in force from four hours of drafting on, for large falls only until it has
been fitted again to two days and knows the day, fitted for the last time to seven, and then frozen
for good. This module does arithmetic only; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specdec_exporter.drift import DAY_SECONDS, Detector, Fingerprint, Learner, Reference
from specdec_exporter.model import DriftIncident, DriftStatus
from specdec_exporter.uncertainty import Interval

MOST_FINGERPRINTS = 16
"""Whose past is kept; the longest unused goes first."""
_FITS_AFTER = (0.0, 2 * DAY_SECONDS, 7 * DAY_SECONDS)
"""Seconds since the first drafts at which a learned reference is fitted: once there is enough, then
with a daily cycle, then for the last time."""
_LOOK_SECONDS = 600.0
_CALM = 0.5
"""A score over this may be a drift that begins, which a new fit would take for normal."""

Configure = Callable[[Fingerprint, float], Reference | None]
"""The reference that the settings name for a fingerprint, as of a time; None to learn one."""


@dataclass(slots=True)
class _Watched:
    """One fingerprint: what is learned of it, and what is made of the reference."""

    learner: Learner | None
    began: float | None = None
    fits: int = 0
    next_look: float = 0.0
    detector: Detector | None = None


class DriftWatch:
    """Watches the drafters of one target.

    Args:
        variance_inflation: assumed where the past is too short to show its own.
        false_alarms_per_month: to be expected in 30 days of drafting without any change.
        configure: gives the configured reference.
    """

    def __init__(
        self, variance_inflation: float, false_alarms_per_month: float, configure: Configure
    ) -> None:
        self._variance_inflation = variance_inflation
        self._false_alarms = false_alarms_per_month
        self._configure = configure
        self._watched: dict[Fingerprint, _Watched] = {}
        self._current: dict[str, Fingerprint] = {}

    def add(self, unix_time: float, fingerprint: Fingerprint, interval: Interval) -> None:
        """Take in what was counted in a scrape interval that ended then."""
        if not fingerprint.num_speculative_tokens:
            self._current.pop(fingerprint.model_name, None)
            return
        self._current[fingerprint.model_name] = fingerprint
        watched = self._watched.get(fingerprint)
        if watched is None:
            watched = self._begin(unix_time, fingerprint)
        if interval.drafts <= 0:
            return
        if watched.learner is not None:
            if watched.began is None:
                watched.began = unix_time
            watched.learner.add(unix_time, interval)
            if unix_time >= watched.next_look:
                watched.next_look = unix_time + _LOOK_SECONDS
                self._fit(watched, fingerprint, unix_time)
        if watched.detector is not None:
            watched.detector.add(unix_time, interval)

    def keep(self, model_names: Collection[str]) -> None:
        """Show these models alone: the target has no others now. What is known of others stays."""
        for model_name in self._current.keys() - model_names:
            del self._current[model_name]

    def _begin(self, unix_time: float, fingerprint: Fingerprint) -> _Watched:
        reference = self._configure(fingerprint, unix_time)
        watched = _Watched(Learner(self._variance_inflation) if reference is None else None)
        if reference is not None:
            watched.detector = Detector(reference, self._false_alarms)
        self._watched[fingerprint] = watched
        if len(self._watched) > MOST_FINGERPRINTS:
            current = set(self._current.values())
            oldest = next((one for one in self._watched if one not in current), fingerprint)
            del self._watched[oldest]
        return watched

    def _fit(self, watched: _Watched, fingerprint: Fingerprint, unix_time: float) -> None:
        assert watched.learner is not None
        age = unix_time - (unix_time if watched.began is None else watched.began)
        if age < _FITS_AFTER[watched.fits]:
            return
        detector = watched.detector
        if detector is not None and (detector.incident is not None or detector.score > _CALM):
            return
        reference = watched.learner.reference(fingerprint, unix_time)
        if reference is None:
            return
        watched.detector = Detector(reference, self._false_alarms)
        watched.fits += 1
        if watched.fits == len(_FITS_AFTER):
            watched.learner = None

    def statuses(self) -> tuple[DriftStatus, ...]:
        """Of every model that speculates now."""
        return tuple(
            _status(fingerprint, self._watched[fingerprint])
            for _, fingerprint in sorted(self._current.items())
            if fingerprint in self._watched
        )

    def acknowledge(self, model_name: str) -> bool:
        """End a model's incident; False where it has none."""
        detector = self._detector(model_name)
        if detector is None or detector.incident is None:
            return False
        detector.acknowledge()
        return True

    def relearn(self, model_name: str) -> bool:
        """Forget a model's reference, so that the configured or a new one takes its place."""
        fingerprint = self._current.get(model_name)
        return fingerprint is not None and self._watched.pop(fingerprint, None) is not None

    def _detector(self, model_name: str) -> Detector | None:
        fingerprint = self._current.get(model_name)
        watched = None if fingerprint is None else self._watched.get(fingerprint)
        return None if watched is None else watched.detector

    def to_dict(self, *, learners: bool) -> dict[str, Any]:
        """What must outlive the process, as plain JSON values.

        Args:
            learners: with what is being learned, which is large and changes slowly; or without.
        """
        return {
            "watched": [
                {
                    "fingerprint": asdict(fingerprint),
                    "began": watched.began,
                    "fits": watched.fits,
                    "reference": (
                        None if watched.detector is None else watched.detector.reference.to_dict()
                    ),
                    "detector": None if watched.detector is None else watched.detector.to_dict(),
                    "learning": watched.learner is not None,
                    **({"learner": _learned(watched.learner)} if learners else {}),
                }
                for fingerprint, watched in self._watched.items()
            ]
        }

    def restore(self, saved: Mapping[str, Any], learned: Mapping[str, Any] | None) -> None:
        """Go on from what `to_dict` gave, without learners and with them.

        A reference that the settings name takes the place of a saved one that differs from it.

        Raises:
            KeyError, TypeError, ValueError: it is of another form; nothing was changed.
        """
        learners = {
            Fingerprint(**one["fingerprint"]): one["learner"]
            for one in (learned or {"watched": []})["watched"]
        }
        restored = {}
        for one in saved["watched"]:
            fingerprint = Fingerprint(**one["fingerprint"])
            if one["reference"] is None:
                detector, taken_at = None, 0.0
            else:
                reference = Reference.from_dict(one["reference"])
                taken_at = reference.taken_at
                detector = Detector.from_dict(reference, one["detector"], self._false_alarms)
            named = self._configure(fingerprint, taken_at)
            if named is not None:
                if detector is None or detector.reference != named:
                    detector = Detector(named, self._false_alarms)
                restored[fingerprint] = _Watched(None, detector=detector)
                continue
            if detector is not None and detector.reference.source == "configured":
                continue
            kept = learners.get(fingerprint)
            learner = None
            if one["learning"]:
                learner = Learner(self._variance_inflation)
                if kept is not None:
                    learner = Learner.from_dict(kept, self._variance_inflation)
            restored[fingerprint] = _Watched(
                learner, began=one["began"], fits=one["fits"], detector=detector
            )
        self._watched = restored


def _learned(learner: Learner | None) -> dict[str, Any] | None:
    return None if learner is None else learner.to_dict()


def _status(fingerprint: Fingerprint, watched: _Watched) -> DriftStatus:
    detector = watched.detector
    reference = None if detector is None else detector.reference
    found = None if detector is None else detector.incident
    incident = None
    if found is not None:
        incident = DriftIncident(
            since=found.since,
            detected_at=found.detected_at,
            shape=found.shape,
            expected_mean_acceptance_length=found.expected_mean_accepted_length,
            observed_mean_acceptance_length=found.observed_mean_accepted_length,
            expected_positions=found.expected_positions,
            observed_positions=found.observed_positions,
        )
    return DriftStatus(
        model_name=fingerprint.model_name,
        num_speculative_tokens=fingerprint.num_speculative_tokens,
        engine_version=fingerprint.engine_version,
        revision=fingerprint.revision,
        learned_seconds=None if watched.learner is None else watched.learner.seconds,
        reference_source=None if reference is None else reference.source,
        reference_taken_at=None if reference is None else reference.taken_at,
        reference_position_acceptance_ratio=(
            () if reference is None else tuple(reference.position_acceptance_ratio)
        ),
        score=None if detector is None else detector.score,
        incident=incident,
    )
