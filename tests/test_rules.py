from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from specdec_exporter import rules
from specdec_exporter.config import Settings
from specdec_exporter.expression import Quantity, evaluate
from specdec_exporter.judge import facts
from specdec_exporter.measure import Meter
from specdec_exporter.model import Measurement
from specdec_exporter.rules import Rule, rule_table
from specdec_exporter.thresholds import Thresholds

from tests.pages import counters, snapshot

TABLE = rule_table(Settings())
RULES = {rule.name: rule for rule in TABLE}
SWITCHES = [name for name, f in Thresholds.model_fields.items() if hasattr(f.default, "enabled")]


@st.composite
def windows(draw: st.DrawFn) -> Measurement:
    """Figures of a window whose drafts are of any acceptance, some padded, some cut short."""
    k = draw(st.integers(1, 8))
    real = draw(st.integers(1, 100_000))
    padded = draw(st.sampled_from([0, 0, 1, 500]))
    length = draw(st.floats(0.0, 1.0)) if draw(st.booleans()) else 1.0
    positions, left = [], real
    for _ in range(k):
        left = draw(st.integers(0, left))
        positions.append(float(left))
    tokens = max(round(real * k * length), sum(positions))
    assume(sum(positions[:2]) <= real + max(0.0, min(real, tokens - real)))
    meter = Meter((300.0,), 13.0)
    meter.add(snapshot(0.0, counters(0, (0.0,) * k, steps=0, first=0, seconds=0.0)))
    after = counters(
        real + padded, tuple(positions), steps=real, draft_tokens=tokens + padded * k, seconds=60.0
    )
    meter.add(snapshot(60.0, after))
    (measurement,) = meter.measure()
    return measurement


@given(windows())
def test_the_rules_look_at_the_figures_that_are_served(measurement: Measurement) -> None:
    known, shown = facts(measurement), measurement.total
    p = shown.position_acceptance_ratio
    for quantity, figure in (
        (rules.FRONT, shown.front_acceptance_ratio),
        (rules.ACCEPTANCE, shown.acceptance_ratio),
        (rules.MAL, shown.mean_acceptance_length),
        (rules.DRAFT_LENGTH, shown.mean_draft_length),
        (rules.POSITION_0, p[0]),
        (rules.POSITION_1, p[1] if len(p) > 1 else None),
        (rules.POSITION_LAST, p[-1]),
    ):
        if figure is not None:
            assert evaluate(quantity, known) == pytest.approx(figure, abs=1e-9), quantity.name


@given(windows())
def test_their_standard_errors_are_those_that_are_served_before_a_target_has_a_past(
    measurement: Measurement,
) -> None:
    known, shown = facts(measurement), measurement.total
    errors = shown.position_acceptance_ratio_stderr
    for name, figure in (
        ("acceptance_low", shown.front_acceptance_ratio_stderr),
        ("acceptance_suspicious", shown.acceptance_ratio_stderr),
        ("drafter_broken", errors[0]),
        ("position_decay", errors[1] if len(errors) > 1 else None),
        ("length_plateau", errors[-1]),
    ):
        stderr = RULES[name].stderr
        assert stderr is not None
        if figure is not None:
            # A variance of 0 is the difference of two large numbers.
            assert evaluate(stderr, known) == pytest.approx(figure, rel=1e-6, abs=1e-5), name


def test_there_is_a_rule_for_each_section_of_the_settings_and_each_can_be_switched_off() -> None:
    assert sorted(RULES) == sorted(SWITCHES)
    assert len(RULES) == 12
    for name in SWITCHES:
        without = rule_table(Settings(rules={name: {"enabled": False}}))
        assert {rule.name for rule in without} == RULES.keys() - {name}


@pytest.mark.parametrize("name", SWITCHES)
def test_how_long_a_rule_waits_is_a_setting(name: str) -> None:
    (rule,) = [r for r in rule_table(Settings(rules={name: {"for": "77s"}})) if r.name == name]
    assert rule.wait_seconds == 77.0
    assert RULES[name].wait_seconds == getattr(Thresholds(), name).for_


NUMBERS = [
    (section, field)
    for section in SWITCHES
    for field in type(getattr(Thresholds(), section)).model_fields
    if field not in ("enabled", "for_")
]


@pytest.mark.parametrize(("section", "field"), NUMBERS)
def test_every_number_of_the_settings_reaches_the_rules(section: str, field: str) -> None:
    value = getattr(getattr(Thresholds(), section), field)
    changed = Settings(rules={section: {field: value * 0.5 + 0.01}})
    elsewhere = (("target_down", "grace"), ("drafter_drift", "false_alarms_per_month"))
    if (section, field) in elsewhere:
        # When a target is expected to be up, and how soon the detector speaks, is not the table's.
        assert rule_table(changed) == TABLE
    else:
        assert rule_table(changed) != TABLE


def test_the_limits_of_acceptance_depend_on_k_and_on_the_reference() -> None:
    def limit(name: str, k: float, reference: float | None = None) -> float | None:
        known = {"num_speculative_tokens": k, "reference_front": reference}
        return evaluate(RULES[name].threshold, known)

    assert [limit("acceptance_low", k) for k in (1, 2, 8)] == [0.33, 0.25, 0.25]
    assert [limit("drafter_misaligned", k) for k in (1, 2, 8)] == [0.265, 0.20, 0.20]
    assert limit("acceptance_low", 2, 0.5) == pytest.approx(0.35)
    assert limit("acceptance_low", 2, 0.3) == 0.25
    assert limit("drafter_misaligned", 2, 0.5) == 0.20


def test_inhibition_is_by_rules_that_exist_and_goes_all_the_way_up() -> None:
    for rule in TABLE:
        assert set(rule.inhibited_by) <= RULES.keys() - {rule.name}
        assert rule.name == "target_down" or "target_down" in rule.inhibited_by
        for stronger in rule.inhibited_by:
            # Else silencing the one between would let the weaker speak.
            assert set(RULES[stronger].inhibited_by) <= set(rule.inhibited_by), rule.name
    order = ["target_down", "drafter_broken", "drafter_misaligned", "acceptance_low"]
    for i, name in enumerate(order):
        assert RULES[name].inhibited_by == tuple(order[:i])
    assert "net_gain_negative" in RULES["net_gain_low"].inhibited_by


def test_the_alerts_names_are_their_rules_in_camel_case() -> None:
    assert RULES["acceptance_low"].alert == "SpecDecAcceptanceLow"
    assert len({rule.alert for rule in TABLE}) == len(TABLE)


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.name)
def test_a_rule_says_what_was_seen_and_what_to_do(rule: Rule) -> None:
    assert rule.summary.endswith(".")
    assert rule.advice.endswith(".")
    assert rule.meaning.endswith(".")
    assert ("{value}" in rule.meaning) == (rule.name != "target_down")


def test_the_condition_holds_only_where_it_applies_and_there_is_enough_to_go_by() -> None:
    low = RULES["acceptance_low"]
    known = {
        "num_speculative_tokens": 2.0,
        "drafts": 10_000.0,
        "draft_tokens": 20_000.0,
        "accepted_position_0": 1000.0,
        "accepted_position_1": 100.0,
    }
    assert evaluate(low.condition, known) == pytest.approx(0.055)
    assert evaluate(low.condition, known | {"drafts": 199.0, "draft_tokens": 398.0}) is None
    assert evaluate(low.condition, known | {"num_speculative_tokens": 0.0}) is None
    assert evaluate(low.condition, known | {"num_speculative_tokens": None}) is None


@given(st.floats(0.0, 0.5), st.integers(200, 1_000_000))
def test_acceptance_is_low_only_where_the_bound_is_below_the_limit(p: float, drafts: int) -> None:
    """With one position there is nothing but a proportion, whose error everybody knows."""
    known = {
        "num_speculative_tokens": 1.0,
        "drafts": float(drafts),
        "draft_tokens": float(drafts),
        "accepted_position_0": p * drafts,
    }
    bound = p + 1.645 * (13 * p * (1 - p) / drafts) ** 0.5
    assume(abs(bound - 0.33) > 1e-9)
    met = evaluate(RULES["acceptance_low"].condition, known) is not None
    assert met == (bound < 0.33)


def test_quantities_have_names_of_their_own() -> None:
    """A recording rule is known by its name: two definitions of one name would be one too many."""
    found: dict[tuple[str, str], Quantity] = {}

    def walk(of: object) -> None:
        if isinstance(of, Quantity):
            assert found.setdefault((of.name, of.operation), of) == of
            walk(of.definition)
        for part in ("left", "right", "argument"):
            if hasattr(of, part):
                walk(getattr(of, part))

    for rule in TABLE:
        walk(rule.condition)
    assert len(found) > 10
