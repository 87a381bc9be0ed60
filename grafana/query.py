"""What the boards ask, read back from their JSON, with values for what Grafana would fill in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Choice = Mapping[str, str | Sequence[str]]
"""Values of a board's variables: a text, or several where several can be chosen."""
Json = dict[str, Any]
Row = tuple[Mapping[str, str], Sequence[tuple[float, float]]]
"""Labels, and values by unix seconds."""
Ask = Callable[[str, float, float, float | None], Sequence[Row]]
"""An expression from a time to a time in steps; without a step it is asked once, for the latter."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    panel: str
    ref: str
    expr: str
    instant: bool
    legend: str


def panels(board: Json) -> list[Json]:
    """Those that show something: no headings."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(panel: Json) -> Iterator[Query]:
    """All queries of a panel."""
    for one in panel["targets"]:
        yield Query(
            panel["title"],
            one["refId"],
            one["expr"],
            bool(one.get("instant")),
            one.get("legendFormat", ""),
        )


def filled_in(expr: str, choice: Choice, *, rate_seconds: float = 60, step: float = 15) -> str:
    """As Grafana sends it: its own variables first, then the board's.

    Several values become a regular expression, as Grafana makes one. A text is taken as it is: the
    values of these boards' tests have nothing in them that would have to be escaped.
    """
    expr = expr.replace("$__rate_interval", f"{rate_seconds:g}s")
    expr = expr.replace("$__interval", f"{step:g}s")

    def value(found: re.Match[str]) -> str:
        chosen = choice[found[1]]
        return chosen if isinstance(chosen, str) else f"({'|'.join(chosen)})"

    return re.sub(r"\$(\w+)", value, expr)
