"""What a running exporter knows, asked for and shown: its recommendations and its audit log."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import httpx
from rich.table import Table

from specdec_exporter.report import NO_VALUE, as_text, console


class Unreachable(Exception):
    """There is no exporter to ask; the message is one line that says what to do."""


def ask(url: str, path: str) -> Any:
    """The JSON that an exporter answers with.

    Raises:
        Unreachable: it does not answer, or not as an exporter does.
    """
    base = url if "://" in url else f"http://{url}"
    try:
        answer = httpx.get(f"{base.rstrip('/')}{path}", timeout=10.0, trust_env=False)
        answer.raise_for_status()
        return answer.json()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise Unreachable(f"{url}: answered with status {status}; is it an exporter?") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(
            f"{url}: no exporter answers ({str(error) or type(error).__name__}); "
            "start one with specdec-exporter serve"
        ) from error
    except ValueError as error:
        raise Unreachable(f"{url}: the answer is not JSON; is it an exporter?") from error


def recommendations(url: str) -> list[dict[str, Any]]:
    """What a running exporter recommends, one entry for each target and model.

    Raises:
        Unreachable: see `ask`.
    """
    try:
        return [
            {"target": target["name"], **tuner}
            for target in ask(url, "/api/v1/status")["targets"]
            for tuner in target["tuner"]
        ]
    except (KeyError, TypeError) as error:
        raise Unreachable(f"{url}: this is no exporter of this version") from error


def print_recommendations(entries: list[dict[str, Any]], *, as_json: bool) -> None:
    """As a table, or as JSON."""
    if as_json:
        print(json.dumps({"recommended": entries}))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("target", "model", "k", "best", "speedup by k", "why"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        speedups = "  ".join(
            f"{p['k']}: {p['speedup']:.2f}{'*' if p['extrapolated'] else ''}"
            for p in entry["predictions"]
        )
        table.add_row(
            as_text(entry["target"]),
            as_text(entry["model_name"]),
            _number(entry["observed_k"]),
            _number(entry["recommended_k"]),
            speedups or NO_VALUE,
            as_text(entry["reason"]),
        )
    console().print(table)


def print_audit(entries: list[dict[str, Any]], *, as_json: bool) -> None:
    """The audit log, oldest first: as a table, or one JSON object a line."""
    if as_json:
        for entry in reversed(entries):
            print(json.dumps(entry))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("when (UTC)", "target", "what", "k", "outcome", "why"):
        table.add_column(column, overflow="fold")
    for entry in reversed(entries):
        when = datetime.fromtimestamp(float(entry["t"]), UTC).strftime("%Y-%m-%d %H:%M:%S")
        change = NO_VALUE
        if entry.get("to_k") is not None:
            change = f"{_number(entry.get('from_k'))} → {entry['to_k']}"
        table.add_row(
            when,
            as_text(str(entry.get("target", ""))),
            as_text(str(entry.get("what", ""))),
            change,
            as_text(str(entry.get("outcome", ""))),
            as_text(str(entry.get("problem") or entry.get("reason", ""))),
        )
    console().print(table)


def _number(value: Any) -> str:
    return NO_VALUE if value is None else str(value)
