"""Questions to Prometheus' own engine, without a server: `promtool test rules` on given series.

promtool compares with what a test expects, and prints what it found where that differs. Every
expectation here is one that cannot be met, so it prints all answers, at full precision.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Labels = frozenset[tuple[str, str]]
Vector = Mapping[Labels, float]
Values = Sequence[float | None]
"""One for each scrape; None is a scrape in which the series was not there."""

_IMPOSSIBLE = {"labels": "impossible", "value": 0}
_GOT = re.compile(r"^ {8}got: ?(.*)$", re.M)
_SAMPLE = re.compile(r'([\w:]*)\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\} (\S+?)(?:, |$)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Question:
    """An expression, and when it is asked: seconds since the first scrape."""

    expression: str
    t: float


def ask(
    promtool: Path,
    folder: Path,
    series: Mapping[str, Values],
    questions: Iterable[Question],
    *,
    step_seconds: float,
    rules: str = "",
    evaluation_seconds: float = 15.0,
) -> list[Vector]:
    """What Prometheus answers to each question.

    Args:
        promtool: the program.
        folder: where its files are put.
        series: values by name and labels, scraped every `step_seconds`.
        questions: of one time and expression each.
        step_seconds: time between scrapes.
        rules: a rule file, evaluated from the first scrape on.
        evaluation_seconds: time between evaluations of the rules.
    """
    asked = list(questions)
    if not asked:
        return []
    (folder / "rules.yaml").write_text(rules or "groups: []\n")
    document = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": _duration(evaluation_seconds),
        "tests": [
            {
                "interval": _duration(step_seconds),
                "input_series": [
                    {"series": name, "values": _written(values)} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": question.expression,
                        "eval_time": _duration(question.t),
                        "exp_samples": [_IMPOSSIBLE],
                    }
                    for question in asked
                ],
            }
        ],
    }
    (folder / "questions.yaml").write_text(json.dumps(document))
    done = subprocess.run(
        [promtool, "test", "rules", "questions.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        # It is done in a second: with Go's usual collector a fifth of its time goes into tidying up.
        env=os.environ | {"GOGC": "400"},
    )
    said = done.stdout + done.stderr
    answers = _GOT.findall(said)
    assert len(answers) == len(asked), said[-3000:]
    return [_vector(answer) for answer in answers]


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _written(values: Values) -> str:
    """As promtool reads them. A series that is gone ends with a staleness marker, as after a scrape."""
    words, known = [], False
    for value in values:
        if value is None:
            words.append("stale" if known else "_")
        else:
            words.append(repr(value) if math.isfinite(value) else f"{value}".replace("nan", "NaN"))
        known = value is not None
    return " ".join(words)


def _vector(text: str) -> Vector:
    if text == "nil":
        return {}
    found = {}
    for name, labels, value in _SAMPLE.findall(text):
        pairs = _LABEL.findall(labels)
        found[frozenset([*([("__name__", name)] if name else []), *pairs])] = float(value)
    assert found, text
    return found


def firing(
    promtool: Path,
    folder: Path,
    series: Mapping[str, Values],
    times: Sequence[float],
    *,
    step_seconds: float,
    rules: str,
    evaluation_seconds: float,
) -> list[frozenset[tuple[str, str]]]:
    """The alerts that fire at each time, with the model that each speaks of."""
    answers = ask(
        promtool,
        folder,
        series,
        [Question('ALERTS{alertstate="firing"}', t) for t in times],
        step_seconds=step_seconds,
        rules=rules,
        evaluation_seconds=evaluation_seconds,
    )
    return [
        frozenset((one["alertname"], one.get("model_name", "")) for one in map(dict, vector))
        for vector in answers
    ]
