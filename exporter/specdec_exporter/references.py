"""What is compared with, as files and settings: references, baselines and sweeps."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from specdec_exporter.baseline import Baseline, BaselineError
from specdec_exporter.baselines import Baselines
from specdec_exporter.config import ConfigError, Problem, Settings, Target
from specdec_exporter.drift import Fingerprint, Reference, configured
from specdec_exporter.swept import SweepError, Swept, swept
from specdec_exporter.watch import Configure


class UnusableReference(Exception):
    """A reference or a baseline that cannot be used; the message is one line."""


def write_reference(file: Path, reference: Reference) -> None:
    """Write a reference, whole or not at all.

    Raises:
        UnusableReference: the file cannot be written.
    """
    new = file.with_name(f"{file.name}.new")
    try:
        new.write_text(json.dumps(reference.to_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(new, file)
    except OSError as error:
        raise UnusableReference(f"{file}: cannot be written ({error.strerror})") from error


def read_reference(file: Path) -> Reference:
    """Read what `write_reference` wrote.

    Raises:
        UnusableReference: there is no such file, or no reference in it.
    """
    try:
        return Reference.from_dict(json.loads(file.read_bytes()))
    except OSError as error:
        raise UnusableReference(f"{file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnusableReference(
            f"{file}: not a reference; make one with specdec-exporter take-reference"
        ) from error


def read_baseline(file: Path) -> Baseline:
    """Read what `calibrate` wrote.

    Raises:
        UnusableReference: there is no such file, or no baseline in it.
    """
    try:
        return Baseline.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableReference(f"{file}: {error.strerror}") from error
    except (BaselineError, UnicodeDecodeError) as error:
        raise UnusableReference(f"{file}: {error}") from error


def read_sweep(file: Path) -> Swept:
    """Read what `bench sweep` wrote.

    Raises:
        UnusableReference: there is no such file, or no sweep in it.
    """
    try:
        return swept(json.loads(file.read_bytes()))
    except OSError as error:
        raise UnusableReference(f"{file}: {error.strerror}") from error
    except SweepError as error:
        raise UnusableReference(f"{file}: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UnusableReference(f"{file}: not JSON; name a sweep.json of bench sweep") from error


def sweep(target: Target) -> Swept | None:
    """The sweep that the settings of a target name.

    Raises:
        ConfigError: the file that they name cannot be used.
    """
    if target.sweep is None:
        return None
    try:
        return read_sweep(target.sweep)
    except UnusableReference as error:
        raise ConfigError([Problem(f"target {target.name}", f"sweep: {error}")]) from error


def baselines(target: Target) -> Baselines:
    """The baselines that the settings of a target name, that of its sweep among them.

    Raises:
        ConfigError: a file that they name cannot be used.
    """
    learned = sweep(target)
    measured = [learned.baseline] if learned is not None and learned.baseline is not None else []
    if not isinstance(target.baseline, Path):
        return Baselines(tuple(measured), target.baseline)
    try:
        return Baselines((*measured, read_baseline(target.baseline)), None)
    except UnusableReference as error:
        raise ConfigError([Problem(f"target {target.name}", f"baseline: {error}")]) from error


def configure(target: Target, variance_inflation: float) -> Configure:
    """What the settings of a target name as its reference.

    Raises:
        ConfigError: the file that they name cannot be used.
    """
    if isinstance(target.reference, Path):
        try:
            recorded = read_reference(target.reference)
        except UnusableReference as error:
            raise ConfigError([Problem(f"target {target.name}", f"reference: {error}")]) from error
        return lambda fingerprint, _: recorded if holds_for(recorded, fingerprint) else None
    positions = target.reference

    def of_positions(fingerprint: Fingerprint, taken_at: float) -> Reference | None:
        if positions is None or not fingerprint.num_speculative_tokens:
            return None
        return configured(
            fingerprint, positions, taken_at=taken_at, variance_inflation=variance_inflation
        )

    return of_positions


def check(settings: Settings) -> None:
    """See whether every reference and baseline that the settings name can be used.

    Raises:
        ConfigError: naming every one that cannot.
    """
    problems: list[Problem] = []
    for target in settings.targets:
        for read in (baselines, partial(configure, variance_inflation=settings.variance_inflation)):
            try:
                read(target)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)


def holds_for(reference: Reference, fingerprint: Fingerprint) -> bool:
    """Whether a reference is of this model and k; what it does not know may be anything."""
    own = reference.fingerprint
    pairs: Iterable[tuple[str, str]] = (
        (own.engine_version, fingerprint.engine_version),
        (own.revision, fingerprint.revision),
    )
    return (
        own.model_name == fingerprint.model_name
        and own.num_speculative_tokens == fingerprint.num_speculative_tokens
        and all(not ours or ours == theirs for ours, theirs in pairs)
    )
