"""What a server is started with is read from file and command line as vLLM itself reads it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.doctor.launch import (
    Launch,
    Unreadable,
    from_command,
    from_config,
    merged,
    whole_number,
)

MTP = {"method": "mtp", "model": "a/b", "num_speculative_tokens": 2}
FORMS = {
    "json": f"vllm serve m --speculative-config '{json.dumps(MTP)}'",
    "equals": f"vllm serve m --speculative-config='{json.dumps(MTP)}'",
    "short name": f"vllm serve m -sc '{json.dumps(MTP)}'",
    "underscores": f"vllm serve m --speculative_config '{json.dumps(MTP)}'",
    "dotted": "vllm serve m --speculative-config.method mtp --speculative-config.model=a/b "
    "--speculative-config.num_speculative_tokens 2",
    "dotted, mixed": "vllm serve m --speculative_config.method mtp --speculative-config.model=a/b "
    "--speculative-config.num-speculative-tokens 2",
    "dotted short": "vllm serve m -sc.method mtp -sc.model a/b -sc.num_speculative_tokens 2",
    "flags": "vllm serve m --spec-method mtp --spec-model a/b --spec-tokens 2",
    "lines": "CUDA_VISIBLE_DEVICES=0 vllm serve m \\\n  --spec-method mtp \\\n  --spec-model a/b "
    "\\\n  --spec-tokens=2",
    "module": "python -m vllm.entrypoints.openai.api_server --model m --spec-method mtp "
    "--spec-model a/b --spec-tokens 2",
    "image": "docker run --gpus all -v ~/.cache:/root/.cache -p 8000:8000 --ipc=host "
    "vllm/vllm-openai:v0.32.0 m --spec-method mtp --spec-model a/b --spec-tokens 2",
    "image with a command": "podman run nvcr.io/nvidia/vllm:26.03-py3 vllm serve m -sc.method mtp "
    "-sc.model a/b -sc.num_speculative_tokens 2",
    "dashes within": "vllm serve m -sc "
    '\'{"method": "mtp", "model": "a/b", "num-speculative-tokens": 2}\'',
}


def speculation(launch: Launch) -> dict[str, object]:
    return {key: fact.value for key, fact in launch.speculation.items()}


@pytest.mark.parametrize("command", FORMS.values(), ids=FORMS)
def test_each_form_of_the_command_line_gives_the_same_speculation(command: str) -> None:
    launch = merged((), from_command(command))
    assert launch.model is not None
    assert launch.model.value == "m"
    read = speculation(launch)
    assert {**read, "num_speculative_tokens": int(str(read["num_speculative_tokens"]))} == MTP
    assert launch.k == 2


@pytest.mark.parametrize(
    "text",
    [
        "model: m\nspec-method: mtp\nspec-model: a/b\nspec-tokens: 2\n",
        "model: m\nspec_method: mtp\nspec_model: a/b\nspec_tokens: 2\n",
        f"model: m\nspeculative-config: '{json.dumps(MTP)}'\n",
        "model: m\nspeculative-config:\n  method: mtp\n  model: a/b\n  num_speculative_tokens: 2\n",
        "model: m\nspeculative-config.method: mtp\nspeculative-config.model: a/b\n"
        "speculative-config.num_speculative_tokens: 2\n",
    ],
)
def test_each_form_of_the_file_gives_the_same_speculation(text: str) -> None:
    assert speculation(merged(from_config(text, "f.yaml"), ())) == MTP


def test_a_place_is_a_line_of_the_file_or_the_flag() -> None:
    file = from_config("# k\nmodel: m\nspeculative-config:\n  method: mtp\n\n  model: x\n", "f")
    launch = merged(file, from_command("vllm serve --spec-tokens 3"))
    assert {k: f.where for k, f in launch.speculation.items()} == {
        "method": "f:4",
        "model": "f:6",
        "num_speculative_tokens": "--spec-tokens",
    }


def test_the_command_line_outranks_the_file_and_a_speculative_config_is_replaced_whole() -> None:
    file = from_config(
        "model: m\nmax-model-len: 4k\nspeculative-config: {method: mtp, model: a}\n", "f"
    )
    launch = merged(file, from_command("vllm serve n --max-model-len 8K -sc.model b"))
    assert launch.model is not None
    assert launch.model.value == "n"
    assert launch.max_model_len == 8192
    assert speculation(launch) == {"model": "b"}


def test_dotted_parts_outrank_json_on_the_same_line_wherever_they_stand() -> None:
    command = """vllm serve m -sc.method mtp --speculative-config '{"model": "x"}'"""
    assert speculation(merged((), from_command(command))) == {"method": "mtp"}


def test_short_flags_are_put_into_the_config_that_wins() -> None:
    file = from_config("spec-tokens: 3\nspec-method: mtp\nspec-model: a\n", "f")
    launch = merged(file, from_command("vllm serve m --spec-tokens 1"))
    assert speculation(launch) == {
        "method": "mtp",
        "model": "a",
        "num_speculative_tokens": "1",
    }
    assert launch.k == 1


def test_without_speculation_k_is_0_and_without_a_written_k_it_is_not_known() -> None:
    assert merged((), from_command("vllm serve m")).k == 0
    assert merged((), from_command("vllm serve m --spec-method suffix")).k is None


def test_flags_that_are_false_in_a_file_are_not_given() -> None:
    given = from_config("disable-log-stats: false\nenforce-eager: true\n", "f")
    assert [one.name for one in given] == ["enforce-eager"]


def test_engines_in_data_parallel_are_counted() -> None:
    for command in ("vllm serve m -dp 2", "vllm serve m --data-parallel-size=2"):
        assert merged((), from_command(command)).data_parallel_size == 2
    assert merged((), from_command("vllm serve m")).data_parallel_size == 1


def test_a_longest_sequence_that_vllm_is_to_find_out_is_not_known() -> None:
    launch = merged((), from_command("vllm serve m --max-model-len -1 --seed 3"))
    assert launch.max_model_len is None


def test_a_schedule_is_read_and_what_is_none_is_empty() -> None:
    def of(schedule: object) -> tuple[tuple[int, int, int], ...]:
        config = json.dumps({"num_speculative_tokens_per_batch_size": schedule})
        return merged((), from_command(f"vllm serve m -sc '{config}'")).schedule

    assert of([[1, 16, 3], [17, 128, 1]]) == ((1, 16, 3), (17, 128, 1))
    assert of("1-16") == of([[1, 16]]) == of(3) == of(None) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "f.yaml:1: "),
        ("a: 1\na: 2\n", "f.yaml:2: "),
        ("- a\n", "f.yaml: expected settings as `key: value` lines"),
        ("", "f.yaml: expected settings as `key: value` lines"),
        ("a: \x00\n", "f.yaml: not YAML"),
        ("speculative-config: mtp\n", "f.yaml:1: speculative-config is not JSON: 'mtp'"),
        ("speculative-config: '[1]'\n", "f.yaml:1: speculative-config is not a JSON object"),
        ("speculative-config:\n- 1\n", "f.yaml:1: speculative-config is not JSON"),
    ],
)
def test_a_file_that_is_not_understood_is_told_with_its_place(text: str, message: str) -> None:
    with pytest.raises(Unreadable) as told:
        from_config(text, "f.yaml")
    assert str(told.value).startswith(message)


def test_a_command_that_is_not_understood_is_told() -> None:
    with pytest.raises(Unreadable, match=r"^--command: no closing quotation$"):
        from_command("vllm serve 'm")
    with pytest.raises(Unreadable, match=r"^--speculative-config: speculative-config is not JSON"):
        from_command("vllm serve m --speculative-config {method: mtp}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8),
        ("32k", 32000),
        ("32K", 32768),
        ("2m", 2000000),
        ("-1", -1),
        ("x", None),
        ("", None),
    ],
)
def test_numbers_are_those_of_vllm(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@given(st.text(max_size=60))
def test_no_command_breaks_it(command: str) -> None:
    try:
        launch = merged((), from_command(command))
    except Unreadable:
        return
    assert launch.data_parallel_size is not None
    assert launch.k is None or isinstance(launch.k, int)
