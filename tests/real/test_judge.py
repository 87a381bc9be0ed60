"""An alert goes through the states that Prometheus would give it, whenever its condition holds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from specdec_exporter.config import Settings
from specdec_exporter.duration import format_duration
from specdec_exporter.judge import Alert, step
from specdec_exporter.rules import rule_table

from tests.real.promtool_bed import Question, ask

pytestmark = pytest.mark.prometheus

EVALUATION = 15.0
WAITS = (0.0, 15.0, 20.0, 60.0)
KEEPS = (0.0, 15.0, 40.0, 90.0)
(RULE,) = [rule for rule in rule_table(Settings()) if rule.name == "acceptance_low"]


def state(alert: Alert) -> str:
    if alert.firing:
        return "firing"
    return "inactive" if alert.active_since is None else "pending"


def test_states_are_those_of_prometheus_on_random_conditions(
    promtool: Path, tmp_path: Path
) -> None:
    chance = random.Random(7)
    # Conditions that stay for a while, or the longer times would never be reached.
    stay = (0.5, 0.8, 0.9)
    histories: dict[str, list[bool]] = {}
    for i in range(24):
        met = [chance.random() < 0.5]
        while len(met) < 60:
            met.append(met[-1] if chance.random() < stay[i % 3] else not met[-1])
        histories[str(i)] = met
    alerts = [
        {
            "alert": f"for{wait:g}keep{keep:g}",
            "expr": "met == 1",
            "for": format_duration(wait),
            "keep_firing_for": format_duration(keep),
        }
        for wait, keep in product(WAITS, KEEPS)
    ]
    answers = ask(
        promtool,
        tmp_path,
        {f'met{{history="{h}"}}': [float(m) for m in met] for h, met in histories.items()},
        [Question("ALERTS", i * EVALUATION) for i in range(60)],
        step_seconds=EVALUATION,
        rules=f"groups: [{{name: g, rules: {alerts}}}]",
        evaluation_seconds=EVALUATION,
    )
    states = [
        {(one["alertname"], one["history"]): one["alertstate"] for one in map(dict, vector)}
        for vector in answers
    ]
    seen = set()
    for wait, keep in product(WAITS, KEEPS):
        rule = replace(RULE, wait_seconds=wait, keep_firing_seconds=keep)
        for history, met in histories.items():
            alert = Alert()
            for i, found in enumerate(states):
                alert = step(alert, met[i], i * EVALUATION, rule)
                shown = found.get((f"for{wait:g}keep{keep:g}", history), "inactive")
                assert state(alert) == shown, (wait, keep, met[: i + 1])
                seen.add((wait, keep, met[i], state(alert)))
    # Every pair of times has shown every state that it can have.
    for wait, keep in product(WAITS, KEEPS):
        possible = {(met, name) for w, k, met, name in seen if (w, k) == (wait, keep)}
        expected = {(True, "firing"), (False, "inactive")}
        expected |= {(True, "pending")} if wait else set()
        expected |= {(False, "firing")} if keep else set()
        assert possible == expected
