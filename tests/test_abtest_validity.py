"""An answer is valid if it is whole and what was asked for, and each reason against it is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.abtest.schema import check_schema, mismatches, same
from specdec_exporter.abtest.validity import CUT, Answer, Expectation, ToolCall, problems


def answer(content: str = "", *calls: tuple[str, str], reason: str = "stop") -> Answer:
    return Answer(content, tuple(ToolCall(*call) for call in calls), reason)


def test_an_answer_of_which_nothing_is_expected_is_valid_unless_it_was_cut() -> None:
    assert problems(answer("anything"), Expectation()) == ()
    assert problems(answer("anything", reason="length"), Expectation()) == (CUT,)
    assert problems(answer("a", reason="length"), Expectation(may_be_cut=True)) == ()


def test_a_pattern_is_looked_for_anywhere() -> None:
    expected = Expectation(pattern=r"(?i)moon\b")
    assert problems(answer("the Moon\nabove"), expected) == ()
    assert problems(answer("moonlight"), expected) == ("pattern not found",)


@pytest.mark.parametrize(
    ("content", "valid"),
    [
        ("x\nFINAL: 12", True),
        ("x\n  FINAL: 12 \n\n", True),
        ("FINAL: 12\nso it is", False),
        ("x\nFINAL: 120", False),
        ("", False),
    ],
)
def test_the_final_line_is_the_last_that_is_not_empty(content: str, valid: bool) -> None:
    found = problems(answer(content), Expectation(final_line="FINAL: 12"))
    assert found == (() if valid else ("another final line",))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"a": 1}', ()),
        ('\n```json\n{"a": 1}\n```\n', ()),
        ('Here it is: {"a": 1}', ("not JSON",)),
        ('{"a": "1"}', ("JSON: $.a is not integer",)),
        ("[" * 100_000, ("not JSON",)),
        ("{}", ("JSON: $.a is missing",)),
    ],
)
def test_json_is_the_whole_answer_and_fits(content: str, found: tuple[str, ...]) -> None:
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert problems(answer(content), Expectation(json_schema=schema)) == found


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([("f", '{"x": 21, "y": "a"}')], ()),
        ([("f", '{"y": "a", "x": 21.0}')], ()),
        ([("f", '{"x": 21}')], ("other tool arguments",)),
        ([("f", '{"x": 21, "y": "a", "z": 1}')], ("other tool arguments",)),
        ([("f", "{x")], ("tool arguments are not JSON",)),
        ([("g", '{"x": 21, "y": "a"}')], ("another tool called",)),
        ([], ("no tool call",)),
        ([("f", "{}"), ("f", "{}")], ("2 tool calls, not one",)),
    ],
)
def test_a_tool_call_is_one_call_of_that_tool_with_those_arguments(
    calls: list[tuple[str, str]], found: tuple[str, ...]
) -> None:
    expected = Expectation(tool_call=("f", {"x": 21, "y": "a"}))
    assert problems(answer("", *calls, reason="tool_calls"), expected) == found


def test_every_reason_is_told() -> None:
    expected = Expectation(pattern="a", final_line="b")
    found = problems(answer("c", reason="length"), expected)
    assert found == (CUT, "pattern not found", "another final line")


# JSON schema


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [1, 1.0, -3], [True, "1", 1.5, None]),
        ({"type": "number"}, [1, 1.5], [False, "1"]),
        ({"type": ["string", "null"]}, ["a", None], [1, []]),
        ({"type": "boolean"}, [True], [1, 0]),
        ({"const": 1}, [1, 1.0], [True, 2, "1"]),
        ({"enum": ["a", 18]}, ["a", 18.0], ["b", 17]),
        ({"pattern": "^a"}, ["ab", 5], ["ba"]),
        ({"minimum": 1, "maximum": 2}, [1, 2, "x"], [0.9, 2.1]),
        ({"minLength": 1, "maxLength": 2}, ["a", "ab", 5], ["", "abc"]),
        ({"minItems": 1, "maxItems": 2}, [[1], [1, 2], "abc"], [[], [1, 2, 3]]),
        ({"items": {"type": "string"}}, [["a"], [], "x"], [["a", 1]]),
        ({"required": ["a"]}, [{"a": None}, []], [{}, {"b": 1}]),
        ({"properties": {"a": {"type": "string"}}}, [{"a": "x"}, {"b": 1}], [{"a": 1}]),
        (
            {"properties": {"a": {}}, "additionalProperties": False},
            [{"a": 1}, {}],
            [{"b": 1}, {"a": 1, "b": 1}],
        ),
        ({"additionalProperties": {"type": "string"}}, [{"a": "x"}], [{"a": 1}]),
        (
            {"items": {"properties": {"a": {"items": {"type": "null"}}}}},
            [[{"a": [None]}]],
            [[{"a": [1]}]],
        ),
    ],
)
def test_a_schema_takes_what_fits_and_nothing_else(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    check_schema(schema)
    assert [value for value in good if list(mismatches(value, schema))] == []
    assert [value for value in bad if not list(mismatches(value, schema))] == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"oneOf": []}, "s.oneOf"),
        ({"properties": {"a": {"format": "date"}}}, "s.properties.a.format"),
        ({"items": {"$ref": "#"}}, "s.items.$ref"),
        ({"type": "float"}, "s.type"),
        ({"pattern": "("}, "s.pattern"),
        ({"minimum": "1"}, "s.minimum"),
        ({"required": "a"}, "s.required"),
        ({"properties": []}, "s.properties"),
        ({"items": [{}]}, "s.items"),
        ({"additionalProperties": 3}, "s.additionalProperties"),
        ([], "s"),
    ],
)
def test_a_schema_that_uses_more_than_is_known_is_refused(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(place)}: "):
        check_schema(schema, "s")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSON)
def test_a_value_is_the_same_as_itself_through_json(value: Any) -> None:
    assert same(value, json.loads(json.dumps(value)))
    assert list(mismatches(value, {"const": value})) == []


@given(JSON, JSON)
def test_sameness_is_that_of_json_with_true_no_number(a: Any, b: Any) -> None:
    def typed(value: Any) -> Any:
        if isinstance(value, bool):
            return ("truth", value)
        if isinstance(value, int | float):
            return ("number", float(value))
        if isinstance(value, list):
            return [typed(v) for v in value]
        return {k: typed(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert same(a, b) == (typed(a) == typed(b))
