"""The expressions of the rules mean what Prometheus makes of them, whatever they are and stand on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from specdec_exporter.expression import (
    Expression,
    Function,
    Number,
    Operation,
    Quantity,
    Symbol,
    evaluate,
    render,
)

from tests.real.promtool_bed import Question, ask

pytestmark = pytest.mark.prometheus

ARITHMETIC = ("+", "-", "*", "/")
COMPARISONS = ("<", "<=", ">", ">=", "==")
SETS = ("and", "or", "unless")
SYMBOLS = ("a", "b", "c")

# With few values the cases in which things are equal, zero or not numbers are not rare.
observed = st.none() | st.sampled_from((0.0, -0.0, 0.5, 1.0, -1.0, 3.0, math.inf, math.nan))
observed |= st.floats()
constants = st.sampled_from((0.0, 0.25, 1.0, 2.0, -3.0, 13.0, 1.645)).map(Number)
symbols = st.sampled_from(SYMBOLS).map(Symbol)


def larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    """What can be made of expressions of which each is a series; PromQL takes constants only here."""
    operator = st.sampled_from(ARITHMETIC + COMPARISONS)
    indicators = st.tuples(st.sampled_from(COMPARISONS), inner, inner | constants)
    return st.one_of(
        st.builds(Operation, operator, inner, inner),
        st.builds(Operation, operator, inner, constants),
        st.builds(Operation, operator, constants, inner),
        st.builds(Operation, st.sampled_from(SETS), inner, inner),
        indicators.map(lambda parts: Operation(*parts, as_number=True)),
        st.builds(Function, st.sampled_from(("abs", "sqrt")), inner),
        st.builds(Function, st.just("clamp_min"), inner, st.sampled_from((0.0, -1.0, 2.0))),
        st.builds(Quantity, st.just("named"), st.just("ratio"), inner),
    )


Case = tuple[Expression, Mapping[str, float | None], str | None]
"""An expression, what its symbols are worth, and one that the source may lack altogether."""
cases: st.SearchStrategy[Case] = st.tuples(
    st.recursive(symbols, larger, max_leaves=8),
    st.fixed_dictionaries(dict.fromkeys(SYMBOLS, observed)),
    st.none() | st.sampled_from(SYMBOLS),
)


def written(of: Expression, prefix: str, lacking: str | None) -> str | None:
    """In PromQL, over series of this case alone."""

    def select(one: Symbol | Quantity) -> str | None:
        if isinstance(one, Quantity):
            inner = render(one.definition, select)
            return None if inner is None else f"({inner})"
        return None if one.name == lacking else prefix + one.name

    return render(of, select)


def same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-15)


@given(st.lists(cases, min_size=40, max_size=40))
@settings(
    max_examples=15,
    phases=[Phase.generate],  # a case is small as it is, and to make it smaller takes minutes
    suppress_health_check=[
        HealthCheck.data_too_large,
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.large_base_example,
    ],
)
def test_an_expression_is_evaluated_as_prometheus_does(
    promtool: Path, tmp_path: Path, some: list[Case]
) -> None:
    """What a source lacks has no value here, and is left out of what is written there."""
    known = [
        {name: None if name == lacking else value for name, value in values.items()}
        for _, values, lacking in some
    ]
    asked = [written(of, f"case{i}_", lacking) for i, (of, _, lacking) in enumerate(some)]
    answers = iter(
        ask(
            promtool,
            tmp_path,
            {
                f"case{i}_{name}": [v]
                for i, values in enumerate(known)
                for name, v in values.items()
            },
            [Question(text, 0.0) for text in asked if text is not None],
            step_seconds=15.0,
        )
    )
    for (of, _, _), values, text in zip(some, known, asked, strict=True):
        found = None
        if text is not None:
            (found,) = next(answers).values() or (None,)
        assert same(evaluate(of, values), found), (text, values)
