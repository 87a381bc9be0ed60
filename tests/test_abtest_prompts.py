"""A prompt file says what is sent and what is right; both sides send the same, and nobody else has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.prompts import PromptSet, body, load, parse, request_id
from specdec_exporter.abtest.validity import Expectation

MINIMAL = """
workloads:
  - name: w
    prompts:
      - id: p
        user: hello
"""


def failure(text: str) -> str:
    with pytest.raises(BenchError) as caught:
        parse(text, "f.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def only(prompts: PromptSet) -> Any:
    ((prompt,),) = (workload.prompts for workload in prompts.workloads)
    return prompt


# The ready file


def test_the_ready_file_covers_six_kinds_of_work_each_with_a_check() -> None:
    prompts = load("default")
    names = [workload.name for workload in prompts.workloads]
    assert names == ["plain_text", "code", "reasoning", "json", "tool_calling", "korean"]
    for workload in prompts.workloads:
        assert len(workload.prompts) >= 3
        for prompt in workload.prompts:
            assert prompt.expected != Expectation(), f"{workload.name}/{prompt.id}"
            assert prompt.request["temperature"] == 0
            assert prompt.request["max_tokens"] >= 1024


def test_the_ready_reasoning_answers_are_right() -> None:
    lines = {
        prompt.id: prompt.expected.final_line
        for workload in load("default").workloads
        if workload.name == "reasoning"
        for prompt in workload.prompts
    }
    # Both trains are as far out when the fast one has driven t hours: 60 (t + 1.5) = 105 t.
    t = 60 * 1.5 / (105 - 60)
    ages = next(
        a for a in range(1, 200) for b in range(1, 100) if a == 3 * b and a + 12 == 2 * (b + 12)
    )
    sevens = sum("7" in str(n) for n in range(1, 1001))
    assert lines == {
        "trains": f"FINAL: {105 * t:.0f}",
        "digits": f"FINAL: {sevens}",
        "ages": f"FINAL: {ages}",
    }


# What a file says


def test_what_is_nearest_to_a_prompt_holds_and_the_rest_comes_from_further_out() -> None:
    prompt = only(
        parse(
            """
request: {max_tokens: 10, temperature: 0}
expect: {may_be_cut: true, pattern: a}
workloads:
  - name: w
    request: {max_tokens: 20, top_p: 1}
    expect: {pattern: b}
    prompts:
      - id: p
        system: be brief
        user: hello
        request: {top_p: 0.5}
        expect: {final_line: c, may_be_cut: false}
""",
            "f.yaml",
        )
    )
    assert prompt.request == {"max_tokens": 20, "temperature": 0, "top_p": 0.5}
    assert prompt.expected == Expectation(pattern="b", final_line="c")
    assert [m["role"] for m in prompt.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f.yaml: no prompts in it; expected `workloads:` with a list of them"),
        ("hello", "f.yaml: no prompts in it; expected `workloads:` with a list of them"),
        ("workloads: []", "f.yaml: workloads: "),
        ("workloads: [", "f.yaml:1: not YAML: "),
        ("workloads: {a: 1}", "f.yaml: workloads: "),
        ("a: 1\na: 2", "f.yaml:2: not YAML: "),
        (MINIMAL.replace("user:", "usr:"), "f.yaml: workloads[0].prompts[0].usr: "),
        (
            MINIMAL.replace("        user: hello\n", ""),
            "f.yaml: workloads[0].prompts[0]: give either",
        ),
        (
            MINIMAL + "        messages: [{role: user}]",
            "f.yaml: workloads[0].prompts[0]: give either",
        ),
        (
            MINIMAL + "        request: {stream: false}",
            "f.yaml: workloads[0].prompts[0]: request.stream",
        ),
        (
            MINIMAL + "        expect: {pattern: '('}",
            "f.yaml: workloads[0].prompts[0].expect: pattern: not",
        ),
        (
            MINIMAL + "        expect: {json_schema: {anyOf: []}}",
            "f.yaml: workloads[0].prompts[0].expect: json_schema.anyOf: not supported",
        ),
        (
            MINIMAL + "        expect: {tool_call: {name: f}}",
            "f.yaml: workloads[0].prompts[0].expect.tool_call.arguments",
        ),
        (MINIMAL + "      - {id: p, user: again}", "f.yaml: prompt w/p is there twice"),
        (
            MINIMAL + "        request: {since: 2024-05-03}",
            "f.yaml: a value cannot be sent as JSON",
        ),
    ],
)
def test_a_wrong_file_is_told_in_one_line_with_the_place(text: str, said: str) -> None:
    assert failure(text).startswith(said)


def test_a_file_that_is_not_there_is_told_with_the_ready_ones(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.yaml: No such file .* or default"):
        load(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"workloads: \xff")
    with pytest.raises(BenchError, match="not UTF-8"):
        load(str(tmp_path / "latin.yaml"))


def test_files_that_ask_the_same_have_one_fingerprint_and_others_another() -> None:
    same = parse("# a comment\n" + MINIMAL.replace("hello", "'hello'"), "g.yaml")
    assert same.fingerprint == parse(MINIMAL, "f.yaml").fingerprint
    for changed in (MINIMAL.replace("hello", "hi"), MINIMAL + "        request: {max_tokens: 1}"):
        assert parse(changed, "f.yaml").fingerprint != same.fingerprint


# What is sent


def test_an_id_belongs_to_one_request_and_follows_from_the_seed() -> None:
    keys = [(w, p, r) for w in "ab" for p in ("x", "y") for r in range(1, 21)]
    ids = [request_id(1, *key) for key in keys]
    assert len({*ids}) == len(ids)
    assert ids == [request_id(1, *key) for key in keys]
    assert {*ids}.isdisjoint(request_id(2, *key) for key in keys)


def test_a_request_is_a_stream_with_usage_and_has_its_id_at_the_very_head() -> None:
    prompt = only(parse(MINIMAL + "        request: {max_tokens: 5}", "f.yaml"))
    sent = body(prompt, "abc", "some-model")
    assert sent == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "[request abc]\nhello"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_id_stands_before_a_system_message_before_parts_and_before_tools() -> None:
    system = only(parse(MINIMAL + "        system: be brief", "f.yaml"))
    first, second = body(system, "abc", "m")["messages"]
    assert first == {"role": "system", "content": "[request abc]\nbe brief"}
    assert second == {"role": "user", "content": "hello"}

    parts = "messages: [{role: user, content: [{type: text, text: hello}]}]"
    prompt = only(parse(MINIMAL.replace("user: hello", parts), "f.yaml"))
    (message,) = body(prompt, "abc", "m")["messages"]
    assert [part["text"] for part in message["content"]] == ["[request abc]", "hello"]

    tools = only(parse(MINIMAL + "        request: {tools: []}", "f.yaml"))
    assert body(tools, "abc", "m")["messages"] == [
        {"role": "system", "content": "[request abc]"},
        {"role": "user", "content": "hello"},
    ]
