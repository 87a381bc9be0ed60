"""How rules of Prometheus and boards of Grafana read vLLM's series, where that is surely wrong.

vLLM observes one inter-token latency per request and engine step, however many tokens the step
brought (`vllm.v1.metrics`), so under speculation its mean and its quantiles are the time of a step
and not the time per output token. And a mean of ratios is not the ratio. What may be right in
somebody's hands is not told. Text in, values out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML

from specdec_exporter.doctor.finding import Check, Finding, Severity
from specdec_exporter.doctor.launch import Unreadable

_STEP_TIME = r"vllm:(?:inter_token_latency|time_per_output_token)_seconds"
_SUM, _COUNT = re.compile(rf"{_STEP_TIME}_sum\b"), re.compile(rf"{_STEP_TIME}_count\b")
_QUANTILE = re.compile(rf"histogram_quantile\b.*{_STEP_TIME}_bucket\b", re.S)
_TOKENS = re.compile(r"\b(?:vllm:)?generation_tokens|tokens_per_step|acceptance_length")
_TPOT_WORDS = re.compile(r"tpot|time[ _-]?per[ _-]?(?:output[ _-]?)?token", re.I)
_TPOT_SERIES = re.compile(r"\bspecdec_\w*tpot\w*|\bvllm:request_time_per_output_token_seconds")
_AVERAGE = re.compile(r"\bavg\s*(?:(?:by|without)\s*\([^)]*\)\s*)?\(")
_SPECULATION = re.compile(r"(?:vllm:spec_decode_num|specdec_)\w+_total")


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what people are told that it shows."""

    expression: str
    name: str
    where: str
    recorded: str = ""
    """The name that a recording rule gives it."""


def read_queries(text: str, name: str) -> tuple[Query, ...]:
    """The expressions of a rule file, a PrometheusRule or a dashboard.

    Args:
        text: YAML or JSON.
        name: of the file, for the places.

    Raises:
        Unreadable: it is none of these.
    """
    try:
        document: Any = (
            json.loads(text)
            if text.lstrip().startswith("{")
            else list(YAML(typ="safe", pure=True).load_all(text))
        )
        queries = tuple(_walk(document, "", name, _Places(text), set()))
    except Exception as error:
        # What a tag or a digit too many brings out of the parser: ValueError, IndexError and such.
        raise Unreadable(name, "neither YAML nor JSON") from error
    if not queries:
        raise Unreadable(name, "no expression in it; expected Prometheus rules or a Grafana board")
    return queries


def query_findings(queries: tuple[Query, ...]) -> list[Finding]:
    """What the expressions of a file get wrong."""
    step_times = {q.recorded for q in queries if q.recorded and _is_step_time(q.expression, set())}
    return [
        finding
        for query in queries
        for finding in (*_step_time_as_tpot(query, step_times), *_mean_of_ratios(query))
    ]


def _step_time_as_tpot(query: Query, step_times: set[str]) -> Iterator[Finding]:
    if not _is_step_time(query.expression, step_times):
        return
    called = _TPOT_WORDS.search(query.name)
    compared = _TPOT_SERIES.search(query.expression)
    if called or compared:
        yield Finding(
            Severity.ERROR,
            Check.STEP_TIME_AS_TPOT,
            f"{query.name!r} {'is' if called else 'compares a TPOT with'} vLLM's inter-token "
            "latency",
            query.where,
            "that is the time of an engine step, whatever number of tokens it brings: on an H200 "
            "it said 61 % slower where tokens came 6 % faster",
            "divide by tokens: rate(vllm:inter_token_latency_seconds_sum) / "
            "(rate(vllm:generation_tokens_total) - rate(vllm:time_to_first_token_seconds_count)), "
            "or use specdec_tpot_seconds",
        )


def _is_step_time(expression: str, recorded: set[str]) -> bool:
    if _TOKENS.search(expression):
        return False
    mean = "/" in expression and _SUM.search(expression) and _COUNT.search(expression)
    named = any(re.search(rf"(?<![\w:]){re.escape(r)}(?![\w:])", expression) for r in recorded)
    return bool(mean or _QUANTILE.search(expression) or named)


def _mean_of_ratios(query: Query) -> Iterator[Finding]:
    for found in _AVERAGE.finditer(query.expression):
        left, slash, right = _division(query.expression[found.end() :])
        if slash and _SPECULATION.search(left) and _SPECULATION.search(right):
            yield Finding(
                Severity.ERROR,
                Check.MEAN_OF_RATIOS,
                f"{query.name!r} takes the mean of ratios",
                query.where,
                "an idle engine weighs as much in it as a busy one, so it is no engine's ratio "
                "and not theirs together",
                "divide last: sum(rate(...)) / sum(rate(...))",
            )
            return


def _division(text: str) -> tuple[str, str, str]:
    """Both sides of a division that stands directly in the parentheses that text begins within."""
    depth, slash = 0, -1
    quoted = False
    for at, character in enumerate(text):
        quoted ^= character == '"'
        if quoted:
            continue
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                text = text[:at]
                break
        elif character == "/" and not depth and slash < 0:
            slash = at
    return (text, "", "") if slash < 0 else (text[:slash], "/", text[slash + 1 :])


class _Places:
    """Lines of a text in which expressions are found one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def line(self, expression: str) -> int:
        """Of the next place where the expression's first line stands, plainly or as JSON."""
        first = expression.strip().partition("\n")[0].strip()
        for begin in (self._at, 0):
            for words in (first, json.dumps(first)[1:-1]):
                at = self._text.find(words, begin)
                if at >= 0:
                    self._at = at + 1
                    return self._text.count("\n", 0, at) + 1
        return 1


def _walk(node: Any, title: str, file: str, places: _Places, seen: set[int]) -> Iterator[Query]:
    # What aliases stand for is read once: written out it may be without end.
    if id(node) in seen:
        return
    if isinstance(node, list):
        seen.add(id(node))
        for item in node:
            yield from _walk(item, title, file, places, seen)
    elif isinstance(node, dict):
        seen.add(id(node))
        own = node.get("title") or node.get("alert") or node.get("record")
        title = own if isinstance(own, str) else title
        expression = node.get("expr")
        if isinstance(expression, str):
            legend = node.get("legendFormat")
            # A legend that is more than labels says what the line is; else the panel's title does.
            said = re.sub(r"\{\{.*?\}\}|__auto", "", legend) if isinstance(legend, str) else ""
            name = legend if re.search(r"[a-z]{3}", said, re.I) else title
            where = f"{file}:{places.line(expression)}"
            record = node.get("record")
            recorded = record if isinstance(record, str) else ""
            yield Query(expression, str(name), where, recorded)
        for key, value in node.items():
            if key not in ("expr", "annotations"):
                yield from _walk(value, title, file, places, seen)
