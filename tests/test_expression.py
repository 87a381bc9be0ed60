from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.expression import (
    Expression,
    Function,
    Number,
    Operation,
    Quantity,
    Symbol,
    evaluate,
    expression,
    indicator,
    maximum,
    minimum,
    render,
)

A, B, C = Symbol("a"), Symbol("b"), Symbol("c")


def name(of: Symbol | Quantity) -> str | None:
    return of.name


def value(of: Expression, **values: float | None) -> float | None:
    return evaluate(of, values)


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (A + B - C, "a + b - c"),
        (A - (B - C), "a - (b - c)"),
        (A / (B * C), "a / (b * c)"),
        ((A + 1) * 2, "(a + 1) * 2"),
        (1 - A, "1 - a"),
        (1 + A, "1 + a"),
        (0.5 * A, "0.5 * a"),
        ((A < B) | C, "a < b or c"),
        (A & (B | C), "a and (b or c)"),
        (A & (B & C), "a and b and c"),
        (A.unless(B.unless(C)), "a unless (b unless c)"),
        ((A > 1) > B, "(a > 1) > b"),
        (Operation(">", A, B >= 1), "a > (b >= 1)"),
        (A.equals(B), "a == b"),
        (indicator(A <= 2) * 3, "(a <= bool 2) * 3"),
        (Function("sqrt", A + B), "sqrt(a + b)"),
        (Function("clamp_min", A, 0.0), "clamp_min(a, 0)"),
        (minimum(A, B), "b < a or a"),
        (maximum(A, B), "b > a or a"),
        (expression(0.25) * A, "0.25 * a"),
    ],
    ids=str,
)
def test_an_expression_is_rendered_with_no_more_parentheses_than_it_needs(
    of: Expression, text: str
) -> None:
    assert render(of, name) == text


def test_no_value_spreads_except_through_or_and_unless() -> None:
    for of in (A + B, A / B, A < B, A & B, Function("abs", B), indicator(A < B), B.unless(A)):
        assert value(of, a=1.0) is None, of
    assert value(A | B, a=1.0) == 1.0
    assert value(B | A, a=1.0) == 1.0
    assert value(A.unless(B), a=1.0) == 1.0
    assert value(A.unless(B), a=1.0, b=2.0) is None


def test_what_cannot_be_selected_is_rendered_as_what_has_no_value_is_evaluated() -> None:
    for of in (A + B, A < B, A & B, B.unless(A), Function("abs", B)):
        assert render(of, lambda s: None if s.name == "b" else s.name) is None, of
    for of in (A | B, B | A, A.unless(B)):
        assert render(of, lambda s: None if s.name == "b" else s.name) == "a", of


def test_a_comparison_lets_its_left_side_pass_or_gives_nothing() -> None:
    assert value(A > 2, a=3.0) == 3.0
    assert value(A > 2, a=2.0) is None
    assert value(A >= 2, a=2.0) == 2.0
    assert value(A < B, a=1.0, b=math.nan) is None
    # PromQL has no constant series to let pass, so the other side is what remains.
    assert value(Number(2.0) < A, a=3.0) == 3.0


def test_an_indicator_is_1_or_0_and_only_of_a_comparison() -> None:
    assert value(indicator(A > 2), a=3.0) == 1.0
    assert value(indicator(A > 2), a=2.0) == 0.0
    for other in (A, A + B, A & B):
        with pytest.raises(ValueError, match="expected a comparison"):
            indicator(other)


def test_division_by_zero_is_infinite_or_not_a_number_as_in_promql() -> None:
    assert value(A / B, a=1.0, b=0.0) == math.inf
    assert value(A / B, a=-1.0, b=0.0) == -math.inf
    assert value(A / B, a=1.0, b=-0.0) == -math.inf
    assert math.isnan(value(A / B, a=0.0, b=0.0) or 0.0)
    assert math.isnan(value(A / B, a=math.nan, b=0.0) or 0.0)
    assert math.isnan(value(Function("sqrt", A), a=-1.0) or 0.0)
    assert math.isnan(value(Function("clamp_min", A, 0.0), a=math.nan) or 0.0)


def test_a_named_quantity_is_worth_its_definition() -> None:
    half = Quantity("half", "ratio", A / 2)
    assert value(half + 1, a=4.0) == 3.0
    assert render(half + 1, name) == "half + 1"


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_minimum_and_maximum_are_those_of_arithmetic(a: float, b: float) -> None:
    assert value(minimum(A, B), a=a, b=b) == min(a, b)
    assert value(maximum(A, B), a=a, b=b) == max(a, b)


def test_a_maximum_with_something_unknown_is_the_other() -> None:
    assert value(maximum(A, B), a=1.0) == 1.0
    assert value(minimum(A, B), a=1.0) == 1.0


def test_what_is_no_expression_and_what_is_no_function_are_errors() -> None:
    with pytest.raises(ValueError, match="no such function: log"):
        value(Function("log", A), a=1.0)
    with pytest.raises(TypeError, match="not an expression"):
        evaluate(3.0, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not an expression"):
        render(3.0, name)  # type: ignore[arg-type]


def test_expressions_are_values() -> None:
    assert Symbol("a") + 1 == Operation("+", A, Number(1.0))
    assert hash(A < B) == hash(Operation("<", A, B))
