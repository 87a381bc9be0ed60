"""Expressions with two readings: the exporter's own arithmetic, and PromQL.

The meaning is PromQL's, for one series at a time: a comparison lets its left side pass or gives
nothing, `&` is `and`, `|` is `or`, and None is the empty result, which spreads. What a rule says is
written once in these, and cannot mean two things. This module knows no metric and no rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

_PRECEDENCE = {
    "or": 1, "and": 2, "unless": 2,
    "<": 3, "<=": 3, ">": 3, ">=": 3, "==": 3,
    "+": 4, "-": 4, "*": 5, "/": 5,
}  # fmt: skip


class Expression:
    """What all expressions can do: be put together by Python's operators."""

    __slots__ = ()

    def __add__(self, other: Operand) -> Expression:
        return Operation("+", self, expression(other))

    def __radd__(self, other: float) -> Expression:
        return Operation("+", expression(other), self)

    def __sub__(self, other: Operand) -> Expression:
        return Operation("-", self, expression(other))

    def __rsub__(self, other: float) -> Expression:
        return Operation("-", expression(other), self)

    def __mul__(self, other: Operand) -> Expression:
        return Operation("*", self, expression(other))

    def __rmul__(self, other: float) -> Expression:
        return Operation("*", expression(other), self)

    def __truediv__(self, other: Operand) -> Expression:
        return Operation("/", self, expression(other))

    def __lt__(self, other: Operand) -> Expression:
        return Operation("<", self, expression(other))

    def __le__(self, other: Operand) -> Expression:
        return Operation("<=", self, expression(other))

    def __gt__(self, other: Operand) -> Expression:
        return Operation(">", self, expression(other))

    def __ge__(self, other: Operand) -> Expression:
        return Operation(">=", self, expression(other))

    def __and__(self, other: Expression) -> Expression:
        return Operation("and", self, other)

    def __or__(self, other: Expression) -> Expression:
        return Operation("or", self, other)

    def equals(self, other: Operand) -> Expression:
        """`==`; Python's own stays the comparison of two expressions as values."""
        return Operation("==", self, expression(other))

    def unless(self, other: Expression) -> Expression:
        """The left side where the right one gives nothing."""
        return Operation("unless", self, other)


Operand: TypeAlias = Expression | float


@dataclass(frozen=True, slots=True)
class Number(Expression):
    """A constant."""

    value: float


@dataclass(frozen=True, slots=True)
class Symbol(Expression):
    """Something observed; who evaluates says what, and who renders says how it is selected."""

    name: str


@dataclass(frozen=True, slots=True)
class Quantity(Expression):
    """A named intermediate result: a recording rule in Prometheus, its definition elsewhere."""

    name: str
    operation: str
    """What it is, as the last part of a recording rule's name: `ratio`, `stderr`."""
    definition: Expression
    windowed: bool = True
    """Whether it is of the window, which its name then says."""


@dataclass(frozen=True, slots=True)
class Operation(Expression):
    """Two operands. A comparison is a filter, or with `as_number` 1 or 0."""

    operator: str
    left: Expression
    right: Expression
    as_number: bool = False


@dataclass(frozen=True, slots=True)
class Function(Expression):
    """One of `abs`, `sqrt`, and `clamp_min` with its bound."""

    name: str
    argument: Expression
    bound: float | None = None


def expression(value: Operand) -> Expression:
    """An expression as it is, a number as a constant."""
    return value if isinstance(value, Expression) else Number(float(value))


def minimum(a: Expression, b: Expression) -> Expression:
    """The smaller of two; PromQL has no function for it."""
    return (b < a) | a


def maximum(a: Expression, b: Expression) -> Expression:
    """The larger of two, and `a` where there is no `b`."""
    return (b > a) | a


def indicator(comparison: Expression) -> Expression:
    """1 where a comparison holds, 0 where it does not.

    Raises:
        ValueError: it is no comparison.
    """
    if not isinstance(comparison, Operation) or comparison.operator not in _COMPARISONS:
        raise ValueError("expected a comparison")
    return Operation(comparison.operator, comparison.left, comparison.right, as_number=True)


def _divide(a: float, b: float) -> float:
    if b == 0:
        return (
            math.nan
            if a == 0 or math.isnan(a)
            else math.copysign(math.inf, a) * math.copysign(1, b)
        )
    return a / b


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
}


def evaluate(of: Expression, values: Mapping[str, float | None]) -> float | None:
    """The value of an expression, or None where PromQL would give no series.

    Args:
        of: the expression.
        values: what was observed, by symbol; what is missing is None.
    """
    match of:
        case Number(value):
            return value
        case Symbol(name):
            return values.get(name)
        case Quantity():
            return evaluate(of.definition, values)
        case Function():
            return _call(of, evaluate(of.argument, values))
        case Operation():
            return _operate(of, evaluate(of.left, values), lambda: evaluate(of.right, values))
    raise TypeError(f"not an expression: {of!r}")


def _call(function: Function, argument: float | None) -> float | None:
    if argument is None:
        return None
    if function.name == "abs":
        return abs(argument)
    if function.name == "sqrt":
        return math.sqrt(argument) if argument >= 0 else math.nan
    if function.name == "clamp_min" and function.bound is not None:
        return argument if math.isnan(argument) else max(function.bound, argument)
    raise ValueError(f"no such function: {function.name}")


def _operate(
    of: Operation, left: float | None, evaluate_right: Callable[[], float | None]
) -> float | None:
    if of.operator == "or":
        return left if left is not None else evaluate_right()
    if left is None:
        return None
    right = evaluate_right()
    if of.operator == "and":
        return left if right is not None else None
    if of.operator == "unless":
        return left if right is None else None
    if right is None:
        return None
    if of.operator in _ARITHMETIC:
        return _ARITHMETIC[of.operator](left, right)
    holds = _COMPARISONS[of.operator](left, right)
    if of.as_number:
        return float(holds)
    # A constant is no series that could pass; then it is the other side that does.
    passing = right if isinstance(of.left, Number) else left
    return passing if holds else None


def render(of: Expression, select: Callable[[Symbol | Quantity], str | None]) -> str | None:
    """The expression in PromQL; None where it stands on something that cannot be selected.

    What is missing spreads as an empty result does, so an `or` goes on with its other side.

    Args:
        of: the expression.
        select: PromQL of a symbol or of a named quantity, or None where there is none.
    """
    rendered = _render(of, select)
    return None if rendered is None else rendered[0]


def _render(
    of: Expression, select: Callable[[Symbol | Quantity], str | None]
) -> tuple[str, int] | None:
    """The text, and how strongly its outermost operator binds."""
    match of:
        case Number(value):
            return f"{value:.10g}", 9
        case Symbol() | Quantity():
            text = select(of)
            return None if text is None else (text, 9)
        case Function(name, argument, bound):
            inner = _render(argument, select)
            if inner is None:
                return None
            arguments = inner[0] if bound is None else f"{inner[0]}, {bound:.10g}"
            return f"{name}({arguments})", 9
        case Operation(operator, left, right, as_number):
            a, b = _render(left, select), _render(right, select)
            if operator == "or" and (a is None or b is None):
                return a or b
            if operator == "unless" and b is None:
                return a
            if a is None or b is None:
                return None
            binding = _PRECEDENCE[operator]
            # All of these group to the left, so an equal on the right needs its parentheses; in a
            # chain of conditions it does not, which says the same either way. Two comparisons in a
            # row get them as well, since nobody reads a < b < c as PromQL does.
            text_a = f"({a[0]})" if a[1] < binding or a[1] == binding == 3 else a[0]
            grouped = b[1] < binding or (b[1] == binding and operator != "and")
            text_b = f"({b[0]})" if grouped else b[0]
            word = f"{operator} bool" if as_number else operator
            return f"{text_a} {word} {text_b}", binding
    raise TypeError(f"not an expression: {of!r}")
