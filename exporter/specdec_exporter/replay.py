"""Recorded scrapes through the same parsing, windows and formulas as live ones.

The recorded time is the clock. A scrape that cannot be used is reported and passed over, as it
would be live.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specdec_exporter.baseline import Baseline, choose
from specdec_exporter.config import Settings
from specdec_exporter.drift import Detector, Fingerprint, Reference, reference_from
from specdec_exporter.judge import Judge, drift_facts, facts
from specdec_exporter.measure import Drafted, Meter
from specdec_exporter.model import (
    Derived,
    Gain,
    Measurement,
    Reason,
    RuleState,
    ScrapeError,
    Verdict,
)
from specdec_exporter.parse import parse
from specdec_exporter.references import holds_for
from specdec_exporter.rules import EXPECTED_UP, UP, rule_table
from specdec_exporter.uncertainty import Interval
from specdec_exporter.window import EDGE_TOLERANCE_SECONDS

COARSEST_MARGIN = 0.5
"""A reference that is no better known would see no fall but the worst, and is not taken."""
FINE_MARGIN = 0.1


class RecordingError(Exception):
    """A recording that cannot be read at all; the message names it and says what was expected."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded scrape and where it stands."""

    place: str
    t: float
    page: bytes
    excerpt: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """A recorded scrape that gave no figures."""

    place: str
    error: ScrapeError

    def __str__(self) -> str:
        return f"{self.place}: {self.error}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """The figures of one engine, or of all, over one window, as of one recorded scrape."""

    t: float
    source: Path
    derived: Derived
    rules: Mapping[str, RuleState]
    """Of the model, and of the target."""
    gain: Gain | None = None
    """Against the baseline; None without one, or where it was refused."""
    refused: str = ""
    """Why the baseline is not of this model, in words."""

    @property
    def target(self) -> str:
        """What the recording is called, in place of a target's name."""
        return self.source.stem

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names of the formulas; what has no value is None."""
        plain = {
            "t": self.t,
            "target": self.target,
            **asdict(self.derived),
            "rules": dict(self.rules),
        }
        if self.gain is None and not self.refused:
            return plain
        gain = self.gain
        return plain | {
            "tpot_gain_ratio": gain and gain.tpot_gain_ratio,
            "tpot_gain_ratio_stderr": gain and gain.tpot_gain_ratio_stderr,
            "tpot_gain_throughput_ratio": gain and gain.tpot_gain_throughput_ratio,
            "tpot_gain_throughput_ratio_stderr": gain and gain.tpot_gain_throughput_ratio_stderr,
            "break_even_length": gain and gain.break_even_length,
            "baseline_tpot_seconds": gain and gain.baseline_tpot_seconds,
            "baseline_covered": gain is not None and gain.covered,
            "baseline_source": gain and gain.source,
            "gain_inconclusive": gain is not None and gain.inconclusive,
            "gain_reason": gain.reason if gain else self.refused,
        }


def replay(
    path: Path,
    windows: Sequence[float],
    settings: Settings,
    *,
    metric_prefix: str = "",
    reference: Reference | None = None,
    baseline: Baseline | None = None,
) -> Iterator[Replayed | Rejected]:
    """Measure and judge one recording.

    Args:
        path: a `.jsonl` file of `{"t": seconds, "m": [lines]}`, or a folder of `*.prom` pages.
        windows: spans in seconds; the rules look at the first.
        settings: the rules, and the variance inflation that is assumed until the recording itself
            spans four hours.
        metric_prefix: as in the settings of a target.
        reference: what to look for drift against; without one there is no drift.
        baseline: to take the gain against. A recording does not tell its engine's version.

    Yields:
        For each scrape in time order, each window and each engine one result, and for several
        engines one more called `all`; or one rejection.

    Raises:
        RecordingError: there is nothing to replay at the path.
    """
    meter = Meter(windows, settings.variance_inflation)
    court = _Court(settings, windows[0], reference)
    for recorded in read_recording(path):
        if isinstance(recorded, Rejected):
            yield recorded
            continue
        try:
            snapshot = parse(
                recorded.page,
                t=recorded.t,
                metric_prefix=metric_prefix,
                excerpt=recorded.excerpt,
            )
            court.hear(meter.add(snapshot), recorded.t)
        except ScrapeError as error:
            court.sit((), recorded.t, up=False)
            yield Rejected(recorded.place, error)
            continue
        measurements = meter.measure(partial(_choose, baseline, recorded.t))
        court.sit(measurements, recorded.t, up=True)
        for measurement in measurements:
            rules = court.states(measurement.total.model_name)
            results = list(zip(measurement.engines, measurement.engine_gains, strict=True))
            if len(results) > 1:
                results.append((measurement.total, measurement.gain))
            for derived, gain in results:
                refused = measurement.baseline_refused
                yield Replayed(recorded.t, path, derived, rules, gain, refused)


def _choose(baseline: Baseline | None, t: float, model_name: str) -> tuple[Baseline | None, str]:
    return choose(() if baseline is None else (baseline,), model_name, "", t)


def take_reference(
    path: Path,
    *,
    begin: float,
    duration: float | None,
    model_name: str | None,
    variance_inflation: float,
) -> Reference:
    """The acceptance of a recorded span, as a reference to compare later ones with.

    Args:
        path: as for `replay`.
        begin: of the span, seconds after the first scrape.
        duration: of the span, seconds; None is to the end.
        model_name: which of several models; None where there is one.
        variance_inflation: assumed of a span that is too short to show its own.

    Raises:
        RecordingError: there is nothing to replay at the path, nothing was drafted in the span, or
            so little that half of the acceptance could be chance.
    """
    meter = Meter((300.0,), variance_inflation)
    heard: dict[tuple[str, int], list[tuple[float, Interval]]] = {}
    start = None
    for recorded in read_recording(path):
        if isinstance(recorded, Rejected):
            continue
        start = recorded.t if start is None else start
        since = recorded.t - start
        try:
            drafted = meter.add(parse(recorded.page, t=recorded.t, excerpt=recorded.excerpt))
        except ScrapeError:
            continue
        # An interval belongs to the span when all of it does.
        for model, k, interval in drafted:
            inside = since - interval.seconds >= begin - EDGE_TOLERANCE_SECONDS
            inside = inside and (duration is None or since <= begin + duration)
            if inside and model_name in (None, model) and interval.drafts > 0:
                heard.setdefault((model, k), []).append((recorded.t, interval))
    if not heard:
        raise RecordingError(f"{path}: nothing was drafted in this span")
    if len(heard) > 1:
        found = ", ".join(f"{model} at k = {k}" for model, k in heard)
        raise RecordingError(f"{path}: the span has {found}; choose a --model or a shorter span")
    (((model, k), intervals),) = heard.items()
    try:
        reference = reference_from(
            intervals,
            Fingerprint(model, k),
            source="recorded",
            taken_at=intervals[-1][0],
            variance_inflation=variance_inflation,
        )
    except ValueError as error:
        raise RecordingError(f"{path}: {error}") from error
    if reference.margin >= COARSEST_MARGIN:
        enough = reference.drafts * (reference.margin / FINE_MARGIN) ** 2
        raise RecordingError(
            f"{path}: {reference.drafts:.0f} drafts tell mean acceptance to "
            f"± {100 * reference.margin:.0f} % only, and no smaller fall would be seen; "
            f"take a span of {enough:.0f} drafts, for ± {100 * FINE_MARGIN:.0f} %"
        )
    return reference


class _Court:
    """Judges after every recorded scrape, with its time as the time of the evaluation."""

    def __init__(self, settings: Settings, window: float, reference: Reference | None) -> None:
        self._judge = Judge(rule_table(settings))
        self._detectors: dict[str, Detector] = {}
        self._reference = reference
        self._budget = settings.rules.drafter_drift.false_alarms_per_month
        self._window = window
        self._verdicts: tuple[Verdict, ...] = ()

    def hear(self, drafted: Iterable[Drafted], t: float) -> None:
        for model_name, k, interval in drafted:
            fingerprint = Fingerprint(model_name, k)
            if self._reference is None or not holds_for(self._reference, fingerprint):
                self._detectors.pop(model_name, None)
                continue
            if model_name not in self._detectors:
                self._detectors[model_name] = Detector(self._reference, self._budget)
            self._detectors[model_name].add(t, interval)

    def sit(self, measurements: Iterable[Measurement], t: float, *, up: bool) -> None:
        measured = [
            (m.total.model_name, facts(m) | self._drift(m.total.model_name))
            for m in measurements
            if m.total.window_seconds == self._window
        ]
        target = {UP.name: float(up), EXPECTED_UP.name: 1.0}
        self._verdicts = self._judge.judge(measured, t, target=target)

    def _drift(self, model_name: str) -> dict[str, float | None]:
        detector = self._detectors.get(model_name)
        if detector is None:
            return {}
        return drift_facts(detector.score, detector.reference.position_acceptance_ratio)

    def states(self, model_name: str) -> dict[str, RuleState]:
        return {v.rule: v.state for v in self._verdicts if v.model_name in (model_name, "")}


def read_recording(path: Path) -> Iterable[Recorded | Rejected]:
    """The scrapes of a recording; a folder's in time order, a file's as they stand.

    Raises:
        RecordingError: the path is neither kind of recording, or empty.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return _read_lines(path)
    raise RecordingError(
        f"{path}: expected a .jsonl file or a folder of .prom pages"
        + ("" if path.exists() else "; there is nothing at this path")
    )


def _read_folder(folder: Path) -> list[Recorded | Rejected]:
    pages = [_read_page(file) for file in sorted(folder.glob("*.prom")) if file.is_file()]
    if not pages:
        raise RecordingError(f"{folder}: there are no .prom pages in this folder")
    return sorted(pages, key=lambda page: page.t if isinstance(page, Recorded) else -math.inf)


def _read_page(file: Path) -> Recorded | Rejected:
    try:
        page, t = file.read_bytes(), file.stat().st_mtime
    except OSError as error:
        return _malformed(str(file), f"cannot be read ({error.strerror})")
    first = page.partition(b"\n")[0]
    if first.startswith(b"# scraped_at"):
        try:
            t = _time(float(first.removeprefix(b"# scraped_at")))
        except ValueError:
            return _malformed(f"{file}:1", "expected `# scraped_at SECONDS`")
    return Recorded(str(file), t, page, excerpt=False)


def _read_lines(file: Path) -> Iterator[Recorded | Rejected]:
    try:
        lines = file.open("rb")
    except OSError as error:
        raise RecordingError(f"{file}: {error.strerror}") from error
    empty = True
    with lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                empty = False
                yield _read_line(f"{file}:{number}", line)
    if empty:
        raise RecordingError(f"{file}: the recording is empty")


def _read_line(place: str, line: bytes) -> Recorded | Rejected:
    try:
        value = json.loads(line)
        t, metrics = _time(float(value["t"])), value["m"]
        if not isinstance(metrics, list):
            raise TypeError
        page = "".join(f"{metric}\n" for metric in metrics).encode()
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return _malformed(place, 'expected {"t": seconds, "m": [metric lines]}')
    return Recorded(place, t, page, excerpt=True)


def _time(t: float) -> float:
    if not math.isfinite(t):
        raise ValueError("not a time")
    return t


def _malformed(place: str, expected: str) -> Rejected:
    return Rejected(place, ScrapeError(Reason.MALFORMED, expected))
