from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from specdec_exporter.config import Settings
from specdec_exporter.judge import DAY_SECONDS, Alert, Judge, drift_facts, facts, step
from specdec_exporter.measure import Meter
from specdec_exporter.model import RuleState, Verdict
from specdec_exporter.rules import Rule, rule_table

from tests.pages import counters, snapshot

TABLE = rule_table(Settings())
RULES = {rule.name: rule for rule in TABLE}
EVERY = 15.0

Observed = dict[str, float | None]


def observed(
    p0: float = 0.47, p1: float | None = 0.24, drafts: float = 50_000.0, **more: float | None
) -> Observed:
    """Facts of a window at k = 2, or at k = 1 without a second position."""
    positions = [p0] if p1 is None else [p0, p1]
    counts = [drafts * p for p in positions]
    return {
        "num_speculative_tokens": float(len(positions)),
        "drafts": drafts,
        "padded_drafts": 0.0,
        "draft_tokens": drafts * len(positions),
        "accepted_tokens": sum(counts),
        "accepted_position_0": counts[0],
        "accepted_position_1": counts[1] if len(counts) > 1 else None,
        "accepted_last_position": counts[-1],
        "accepted_positions": sum(counts),
        "accepted_squares": sum((2 * i + 1) * a for i, a in enumerate(counts)),
        "decode_steps": drafts,
        "decode_concurrency": 4.0,
        **more,
    }


HEALTHY = observed()
LOW = observed(0.28, 0.16)
MISALIGNED = observed(0.22, 0.04)
BROKEN = observed(0.02, 0.0)
FEW = observed(0.22, 0.04, drafts=100.0)
UP, DOWN = {"up": 1.0, "expected_up": 1.0}, {"up": 0.0, "expected_up": 1.0}


class Court:
    """A judge that sits every 15 seconds."""

    def __init__(self, settings: Settings | None = None, patience: float = 0.0) -> None:
        self.judge = Judge(rule_table(settings or Settings()), patience)
        self.t = 0.0

    def hear(
        self,
        what: Observed | None,
        minutes: float = 0.0,
        *,
        target: Observed | None = None,
        model: str = "m",
    ) -> dict[str, Verdict]:
        """The last verdicts after so long of the same; at least one evaluation."""
        end = self.t + minutes * 60
        while True:
            measured = [] if what is None else [(model, what)]
            verdicts = self.judge.judge(measured, self.t, target=target)
            self.t += EVERY
            if self.t > end:
                return {v.rule: v for v in verdicts if v.model_name in ("", model)}


def states(verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    quiet = (RuleState.INACTIVE, RuleState.INAPPLICABLE, RuleState.INCONCLUSIVE)
    return {name: v.state for name, v in verdicts.items() if v.state not in quiet}


def test_a_condition_makes_a_rule_pending_and_after_its_time_firing() -> None:
    court = Court()
    first = court.hear(LOW)["acceptance_low"]
    assert (first.state, first.since) == (RuleState.PENDING, 0.0)
    before = court.hear(LOW, 9.5)["acceptance_low"]
    assert (before.state, before.since) == (RuleState.PENDING, 0.0)
    after = court.hear(LOW, 0.5)["acceptance_low"]
    assert (after.state, after.since) == (RuleState.FIRING, 0.0)


def test_a_verdict_shows_what_it_stands_on() -> None:
    verdict = Court().hear(LOW)["acceptance_low"]
    assert verdict.value == pytest.approx(0.22)
    assert verdict.threshold == 0.25
    assert verdict.drafts == 50_000
    assert verdict.stderr is not None
    assert 0.22 + 1.645 * verdict.stderr < 0.25
    assert verdict.severity == "warning"
    assert verdict.summary == RULES["acceptance_low"].summary
    assert verdict.advice == RULES["acceptance_low"].advice


@pytest.mark.parametrize("end", [HEALTHY, FEW, None], ids=["healthy", "few", "nothing"])
def test_a_pending_rule_falls_back_at_once_for_want_of_evidence_too(end: Observed | None) -> None:
    court = Court()
    court.hear(LOW, 9)
    assert states(court.hear(end)) == {}
    assert court.hear(LOW)["acceptance_low"].since == court.t - EVERY


def test_a_firing_rule_goes_on_for_its_time_without_evidence_and_shows_what_it_last_saw() -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    kept = court.hear(FEW, 14.5)["drafter_misaligned"]
    assert kept.state is RuleState.FIRING
    assert kept.since == 0.0
    assert kept.value == pytest.approx(0.13)
    assert kept.drafts == 100
    assert court.hear(FEW, 1)["drafter_misaligned"].state is RuleState.INCONCLUSIVE


def test_evidence_in_between_lets_a_firing_rule_go_on_anew() -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    court.hear(HEALTHY, 14)
    court.hear(MISALIGNED)
    assert court.hear(HEALTHY, 14)["drafter_misaligned"].state is RuleState.FIRING
    assert court.hear(HEALTHY, 1.5)["drafter_misaligned"].state is RuleState.INACTIVE


def test_target_down_resolves_at_once() -> None:
    court = Court()
    assert court.hear(None, 6, target=DOWN)["target_down"].state is RuleState.FIRING
    assert court.hear(None, target=UP)["target_down"].state is RuleState.INACTIVE


def test_a_target_is_not_down_before_it_is_expected_to_be_up() -> None:
    court = Court()
    waiting = {"up": 0.0, "expected_up": None}
    assert court.hear(None, 20, target=waiting)["target_down"].state is RuleState.INCONCLUSIVE


def test_too_little_evidence_is_inconclusive_and_what_has_no_meaning_is_inapplicable() -> None:
    few = Court().hear(FEW)
    assert few["acceptance_low"].state is RuleState.INCONCLUSIVE
    assert few["drafter_broken"].state is RuleState.INCONCLUSIVE
    one = Court().hear(observed(0.47, None))
    assert one["position_decay"].state is RuleState.INAPPLICABLE
    assert one["net_gain_negative"].state is RuleState.INAPPLICABLE
    assert one["acceptance_low"].state is RuleState.INACTIVE
    off = Court().hear({"num_speculative_tokens": 0.0, "decode_steps": 1000.0})
    assert {v.state for v in off.values()} <= {RuleState.INAPPLICABLE, RuleState.INCONCLUSIVE}


def inhibitors(verdicts: Mapping[str, Verdict]) -> dict[str, str | None]:
    return {n: v.inhibited_by for n, v in verdicts.items() if v.state is RuleState.FIRING}


def test_stronger_rules_inhibit_weaker_ones() -> None:
    def after(what: Observed, minutes: float, target: Observed | None = None) -> dict[str, Any]:
        return inhibitors(Court().hear(what, minutes, target=target))

    assert after(LOW, 11) == {"acceptance_low": None}
    assert after(MISALIGNED, 11) == {
        "drafter_misaligned": None,
        "acceptance_low": "drafter_misaligned",
    }
    broken = after(BROKEN, 31)
    assert broken.pop("drafter_broken") is None
    assert broken.keys() == {"drafter_misaligned", "acceptance_low", "length_plateau"}
    assert set(broken.values()) == {"drafter_broken"}
    losing = observed(tpot_gain=-0.1, tpot_gain_stderr=0.01, baseline_covered=1.0)
    assert after(losing, 16) == {"net_gain_negative": None, "net_gain_low": "net_gain_negative"}
    assert set(after(BROKEN, 31, DOWN).values()) == {None, "target_down"}
    assert after(BROKEN, 31, DOWN)["drafter_broken"] == "target_down"


def test_only_what_fires_inhibits_and_only_what_is_active_is_inhibited() -> None:
    court = Court()
    pending = court.hear(MISALIGNED, 5)
    assert {v.inhibited_by for v in pending.values()} == {None}
    fires = court.hear(BROKEN, 3)
    assert fires["drafter_broken"].state is RuleState.FIRING
    assert fires["acceptance_low"].inhibited_by == "drafter_broken"
    assert fires["acceptance_low"].state is RuleState.PENDING
    assert fires["position_decay"].inhibited_by is None


def test_models_are_judged_apart_and_do_not_inhibit_each_other() -> None:
    judge = Judge(TABLE)
    for i in range(45):
        verdicts = judge.judge([("b", MISALIGNED), ("a", LOW)], i * EVERY, target=UP)
    firing = [(v.model_name, v.rule, v.inhibited_by) for v in verdicts if v.state == "firing"]
    assert firing == [
        ("a", "acceptance_low", None),
        ("b", "drafter_misaligned", None),
        ("b", "acceptance_low", "drafter_misaligned"),
    ]


def test_verdicts_are_in_the_order_of_the_table_the_targets_own_first() -> None:
    verdicts = Judge(TABLE).judge([("m", HEALTHY)], 0.0, target=UP)
    assert [v.rule for v in verdicts] == [rule.name for rule in TABLE]
    assert [v.model_name for v in verdicts] == [""] + ["m"] * (len(TABLE) - 1)


def test_a_model_without_a_name_is_a_model() -> None:
    verdicts = Judge(TABLE).judge([("", MISALIGNED)], 0.0, target=UP)
    assert [v.rule for v in verdicts] == [rule.name for rule in TABLE]
    assert {v.rule for v in verdicts if v.state == "pending"} == {
        "acceptance_low",
        "drafter_misaligned",
        "length_plateau",
    }


def test_a_model_that_is_gone_keeps_firing_for_its_time_and_is_then_forgotten() -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    gone = court.hear(None, 14)
    assert states(gone) == {"drafter_misaligned": "firing", "acceptance_low": "firing"}
    court.hear(None, 1.5)
    assert court.hear(None) == {}
    assert court.judge.to_dict()["models"] == {}


def test_drafting_has_stalled_only_at_a_load_that_was_drafted_at_within_a_day() -> None:
    idle = observed(drafts=0.0, decode_steps=5000.0, decode_concurrency=4.0)
    court = Court()
    court.hear(HEALTHY)
    assert court.hear(idle, 6)["drafting_stalled"].state is RuleState.FIRING
    busier = idle | {"decode_concurrency": 5.0}
    court = Court()
    court.hear(HEALTHY)
    assert court.hear(busier, 6)["drafting_stalled"].state is RuleState.INACTIVE
    court = Court()
    court.hear(HEALTHY)
    court.t += DAY_SECONDS + 7200.0
    assert court.hear(idle, 6)["drafting_stalled"].state is RuleState.INAPPLICABLE


def test_misalignment_that_gains_is_information_and_one_that_may_not_is_a_warning() -> None:
    court = Court()
    assert court.hear(MISALIGNED)["drafter_misaligned"].severity == "warning"
    gains = MISALIGNED | {"tpot_gain": 0.02}
    assert court.hear(gains)["drafter_misaligned"].severity == "info"
    loses = MISALIGNED | {"tpot_gain": -0.02}
    assert court.hear(loses)["drafter_misaligned"].severity == "warning"
    assert court.hear(loses)["acceptance_low"].severity == "warning"


def through_json(judge: Judge) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(judge.to_dict()))
    return saved


def test_a_new_process_goes_on_where_the_old_one_stopped() -> None:
    court = Court()
    court.hear(MISALIGNED, 8)
    heir = Court()
    heir.judge.restore(through_json(court.judge))
    heir.t = court.t
    assert heir.hear(MISALIGNED, 2)["drafter_misaligned"].state is RuleState.FIRING


def test_a_pending_rule_does_not_grow_older_while_nobody_judges() -> None:
    court = Court()
    court.hear(MISALIGNED, 8)
    heir = Court()
    pause = 3600.0
    heir.judge.restore(through_json(court.judge), pause)
    heir.t = court.t + pause
    assert heir.hear(MISALIGNED, 1.5)["drafter_misaligned"].state is RuleState.PENDING
    assert heir.hear(MISALIGNED, 0.5)["drafter_misaligned"].state is RuleState.FIRING


def test_what_fires_goes_on_firing_after_a_restart() -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    heir = Court(patience=300.0)
    heir.judge.restore(through_json(court.judge), 3600.0)
    heir.t = court.t + 3600.0
    first = heir.hear(FEW)["drafter_misaligned"]
    assert first.state is RuleState.FIRING
    assert first.since == 0.0


def test_a_new_process_has_patience_until_its_windows_are_full_again() -> None:
    court = Court()
    court.hear(MISALIGNED, 8)
    heir = Court(patience=300.0)
    heir.judge.restore(through_json(court.judge))
    heir.t = court.t
    assert heir.hear(FEW, 4)["drafter_misaligned"].state is RuleState.PENDING
    assert heir.hear(None, 0.5)["drafter_misaligned"].state is RuleState.PENDING
    assert heir.hear(FEW, 1)["drafter_misaligned"].state is RuleState.INCONCLUSIVE


def test_patience_is_for_want_of_evidence_and_not_for_evidence_that_all_is_well() -> None:
    court = Court()
    court.hear(MISALIGNED, 8)
    heir = Court(patience=300.0)
    heir.judge.restore(through_json(court.judge))
    heir.t = court.t
    assert heir.hear(HEALTHY)["drafter_misaligned"].state is RuleState.INACTIVE


def test_a_rule_that_is_no_longer_judged_is_not_restored() -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    without = Settings(rules={"acceptance_low": {"enabled": False}})
    heir = Court(without)
    heir.judge.restore(through_json(court.judge))
    heir.t = court.t
    seen = heir.hear(MISALIGNED)
    assert seen["drafter_misaligned"].state is RuleState.FIRING
    assert "acceptance_low" not in seen
    heir.hear(HEALTHY, 16)
    heir.hear(None)
    assert heir.hear(None) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"target": {}, "models": {}},
        {"target": None, "models": {}},
        {"target": {"alerts": {}, "greatest_concurrency": []}, "models": []},
        {"target": {"alerts": {"target_down": {"x": 1}}, "greatest_concurrency": []}, "models": {}},
        {"target": {"alerts": {}, "greatest_concurrency": [["x", 1]]}, "models": {}},
    ],
)
def test_what_is_of_another_form_is_refused_and_changes_nothing(wrong: dict[str, Any]) -> None:
    court = Court()
    court.hear(MISALIGNED, 11)
    before = court.judge.to_dict()
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        court.judge.restore(wrong)
    assert court.judge.to_dict() == before


worlds = st.lists(st.sampled_from([HEALTHY, LOW, MISALIGNED, BROKEN, FEW, None]), max_size=20)
SHORT = {"for": "30s"}
FAST = Settings(
    rules={name: SHORT for name in RULES if name != "target_down"} | {"keep_firing_for": "30s"}
)


@settings(max_examples=50)
@given(worlds, worlds)
@example([LOW] * 9, [LOW] * 9)
def test_saving_and_restoring_makes_no_difference(
    before: list[Observed | None], after: list[Observed | None]
) -> None:
    one, other = Court(FAST), Court(FAST)
    for what in before:
        one.hear(what)
    other.judge.restore(through_json(one.judge))
    other.t = one.t
    for what in after:
        assert one.hear(what) == other.hear(what)


@settings(max_examples=50)
@given(worlds)
@example([LOW] * 9)
def test_the_states_are_those_of_the_steps(history: list[Observed | None]) -> None:
    court = Court(FAST)
    (rule,) = [rule for rule in rule_table(FAST) if rule.name == "acceptance_low"]
    alert = Alert()
    for what in history:
        t = court.t
        verdict = court.hear(what).get("acceptance_low")
        alert = step(alert, what in (LOW, MISALIGNED, BROKEN), t, rule)
        assert (verdict is not None and verdict.state is RuleState.FIRING) == alert.firing
        assert (None if verdict is None else verdict.since) == alert.active_since


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 5), st.integers(0, 5))
def test_a_rule_fires_after_so_many_conditions_in_a_row_and_not_sooner(
    met: list[bool], wait: int, keep: int
) -> None:
    rule: Rule = replace(
        RULES["acceptance_low"], wait_seconds=wait * EVERY, keep_firing_seconds=keep * EVERY
    )
    alert = Alert()
    for i, now in enumerate(met):
        was = alert.firing
        alert = step(alert, now, i * EVERY, rule)
        if alert.firing and not was:
            assert all(met[i - wait : i + 1])
            assert i >= wait
        if was and not alert.firing:
            assert not any(met[i - keep : i + 1])


def test_the_facts_are_those_of_the_window() -> None:
    meter = Meter((300.0,), 13.0)
    meter.add(snapshot(0.0, counters(0, (0, 0, 0), steps=0, first=0, seconds=0.0)))
    meter.add(snapshot(60.0, counters(1000, (470, 240, 100), steps=900, seconds=120.0)))
    (measurement,) = meter.measure()
    assert facts(measurement) == {
        "num_speculative_tokens": 3.0,
        "drafts": 1000.0,
        "padded_drafts": 100.0,
        "draft_tokens": 3000.0,
        "accepted_tokens": 810.0,
        "accepted_position_0": 470.0,
        "accepted_position_1": 240.0,
        "accepted_last_position": 100.0,
        "accepted_positions": 810.0,
        "accepted_squares": 470.0 + 3 * 240 + 5 * 100,
        "decode_steps": 900.0,
        "decode_concurrency": 2.0,
    }


def test_without_speculation_there_are_no_facts_of_it() -> None:
    meter = Meter((300.0,), 13.0)
    plain = replace(
        counters(0, (), steps=100), drafts=None, draft_tokens=None, accepted_tokens=None
    )
    meter.add(snapshot(0.0, plain))
    (measurement,) = meter.measure()
    known = facts(measurement)
    assert known["num_speculative_tokens"] == 0.0
    assert known["decode_steps"] == 0.0
    assert {name for name, value in known.items() if value is None} >= {
        "drafts",
        "accepted_position_0",
        "accepted_last_position",
        "accepted_squares",
    }


def test_changed_thresholds_change_the_verdicts() -> None:
    stricter = Settings(rules={"acceptance_low": {"below": 0.40, "for": "1m"}})
    assert states(Court().hear(HEALTHY, 2)) == {}
    assert states(Court(stricter).hear(HEALTHY, 2)) == {"acceptance_low": "firing"}


def test_the_front_of_a_reference_is_the_mean_of_its_first_two_positions() -> None:
    def front(*positions: float) -> float | None:
        return drift_facts(None, positions)["reference_front"]

    assert front(0.47, 0.24, 0.1) == pytest.approx(0.355)
    assert front(0.47) == 0.47
    assert front() is None
