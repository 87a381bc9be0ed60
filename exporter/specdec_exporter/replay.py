"""Recorded scrapes through the same parsing, windows and formulas as live ones.

The recorded time is the clock. A scrape that cannot be used is reported and passed over, as it
would be live.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec_exporter.baseline import Baseline, BaselineError, choose
from specdec_exporter.gain import net_gain
from specdec_exporter.measure import Meter
from specdec_exporter.model import Derived, Gain, Reason, ScrapeError
from specdec_exporter.parse import parse


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
        plain = {"t": self.t, "target": self.target, **asdict(self.derived)}
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
    *,
    variance_inflation: float,
    metric_prefix: str = "",
    baseline: Baseline | None = None,
) -> Iterator[Replayed | Rejected]:
    """Measure one recording.

    Args:
        path: a `.jsonl` file of `{"t": seconds, "m": [lines]}`, or a folder of `*.prom` pages.
        windows: spans in seconds.
        variance_inflation: assumed until the recording itself spans four hours.
        metric_prefix: as in the settings of a target.
        baseline: to take the gain against. A recording does not tell its engine's version.

    Yields:
        For each scrape in time order, each window and each engine one result, and for several
        engines one more called `all`; or one rejection.

    Raises:
        RecordingError: there is nothing to replay at the path.
    """
    meter = Meter(windows, variance_inflation)
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
            meter.add(snapshot)
        except ScrapeError as error:
            yield Rejected(recorded.place, error)
            continue
        candidates = () if baseline is None else (baseline,)
        for measurement, measured in zip(meter.measure(), meter.windows(), strict=True):
            total, *engines = measured
            pairs = list(zip(measurement.engines, engines or measured, strict=True))
            if engines:
                pairs.append((measurement.total, total))
            chosen, refused = choose(candidates, total.model_name, "", recorded.t)
            for derived, window in pairs:
                gain = None if chosen is None else net_gain(window, chosen)
                yield Replayed(recorded.t, path, derived, gain, refused)


def read_baseline(path: Path) -> Baseline:
    """The baseline in a file.

    Raises:
        RecordingError: there is none.
    """
    try:
        return Baseline.from_json(path.read_text())
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    except (BaselineError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: {error}") from error


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
