"""Other people's measurements: a CSV file with a row for each request, as runs of our own kind."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.record import Line, Request, Session, to_line


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no time")
    return value


def _milliseconds(text: str) -> float:
    return _number(text) / 1000


def _count(text: str) -> int:
    value = _number(text)
    if value != int(value) or value < 0:
        raise ValueError(f"{text} is no count")
    return int(value)


def _truth(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise ValueError(f"{text!r} is neither true nor false")
    return known[text.lower()]


FIELDS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "label": ("label", str),
    "workload": ("workload", str),
    "prompt": ("prompt", str),
    "repeat": ("repeat", _count),
    "started": ("started", _number),
    "ttfo_seconds": ("first_output_seconds", _number),
    "ttfo_ms": ("first_output_seconds", _milliseconds),
    "e2e_seconds": ("end_seconds", _number),
    "e2e_ms": ("end_seconds", _milliseconds),
    "prompt_tokens": ("prompt_tokens", _count),
    "completion_tokens": ("completion_tokens", _count),
    "finish_reason": ("finish_reason", str),
    "valid": ("valid", _truth),
    "problems": ("problems", str),
    "failure": ("failure", str),
}
"""What a column may be mapped to: the field of a request that it becomes, and how it is read.
Time to first output (ttfo) and to the end (e2e) count from when the request was sent; `started` is
in unix seconds."""

_NEEDED = {
    "label": "label",
    "workload": "workload",
    "prompt": "prompt",
    "first_output_seconds": "ttfo_ms",
    "end_seconds": "e2e_ms",
    "completion_tokens": "completion_tokens",
}


def parse_map(text: str) -> dict[str, str]:
    """`column=field,...` as a mapping.

    Raises:
        BenchError: not of that form, or no such field.
    """
    mapping = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        column, equals, name = part.rpartition("=")
        if not equals or not column:
            raise BenchError(f"--map: {part!r} is not column=field")
        if name not in FIELDS:
            raise BenchError(f"--map: no field {name!r}; there are {', '.join(FIELDS)}")
        mapping[column] = name
    return mapping


def read_csv(
    lines: Iterable[str], mapping: Mapping[str, str], name: str
) -> dict[str, list[Request]]:
    """The rows of a CSV file as requests by label, in their order.

    Args:
        lines: of the file, a heading first.
        mapping: from a column to one of `FIELDS`; a column that is called like a field is that.
        name: of the file, for messages.

    Raises:
        BenchError: a column is missing, or a row cannot be read; names its line.
    """
    rows = csv.DictReader(lines)
    columns = rows.fieldnames or ()
    for column in mapping:
        if column not in columns:
            raise BenchError(f"{name}: no column {column!r}; there are {', '.join(columns)}")
    used = {c: mapping.get(c, c) for c in columns if mapping.get(c, c) in FIELDS}
    targets = [FIELDS[field][0] for field in used.values()]
    for target, field in _NEEDED.items():
        if target not in targets:
            raise BenchError(
                f"{name}: nothing is mapped to {field}; give --map COLUMN={field}, with one of the "
                f"columns {', '.join(columns)}"
            )
    runs: dict[str, list[Request]] = {}
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        values: dict[str, Any] = {}
        for column, field in used.items():
            text = (row[column] or "").strip()
            target, read = FIELDS[field]
            try:
                if text:
                    values[target] = read(text)
            except (ValueError, OverflowError) as error:
                raise BenchError(f"{name}:{rows.line_num}: column {column}: {error}") from error
        if missing := [f for f in ("label", "workload", "prompt") if f not in values]:
            raise BenchError(f"{name}:{rows.line_num}: no {missing[0]}")
        key = values["label"], values["workload"], values["prompt"]
        counts[key] = counts.get(key, 0) + 1
        runs.setdefault(values.pop("label"), []).append(_request(values, counts[key]))
    if not runs:
        raise BenchError(f"{name}: no rows in it")
    return runs


def _request(values: dict[str, Any], nth: int) -> Request:
    told = values.pop("problems", None)
    valid = values.pop("valid", None)
    problems = (told,) if told and valid is not True else ()
    if valid is False and not problems:
        problems = ("said to be invalid",)
    return Request(**{"repeat": nth, **values}, problems=problems)


def run_lines(label: str, requests: Sequence[Request], source: str) -> Iterable[str]:
    """The lines of a run's file."""
    values: list[Line] = [Session(label=label, started=None, source=source), *requests]
    return (to_line(value) for value in values)


def import_csv(file: Path, mapping: Mapping[str, str], folder: Path) -> list[tuple[Path, int]]:
    """Write a run's file for each label of a CSV file.

    Returns:
        The files, and how many requests are in each.

    Raises:
        BenchError: the file cannot be read, or the folder not written to.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            runs = read_csv(lines, mapping, str(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else f"not CSV in UTF-8 ({error})"
        raise BenchError(f"{file}: {why}") from error
    written = []
    for label, requests in runs.items():
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in label)
        target = folder / f"{file.stem}.{safe}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(f"{line}\n" for line in run_lines(label, requests, file.name))
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"cannot write {target} ({error.strerror})") from error
        written.append((target, len(requests)))
    return written
