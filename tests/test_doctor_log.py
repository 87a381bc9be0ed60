"""Start-up logs of real servers are read, and what they show to be wrong is told.

The logs are those of vLLM 0.32.0 on the CPU, shortened; paths, dates and process numbers are not
those of the machine. `tests/data/logs/README.md` says how each was made.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec_exporter.doctor.finding import Finding, Severity
from specdec_exporter.doctor.launch import from_command, merged
from specdec_exporter.doctor.log import log_findings, read_log

LOGS = Path(__file__).parent / "data" / "logs"
ASSISTANT = "google/gemma-4-E2B-it-assistant"
OLD = (
    "(EngineCore pid=1) INFO 05-08 10:00:00 [core.py:109] Initializing a V1 LLM engine (v0.20.1) "
    f"with config: model='google/gemma-4-E2B-it', speculative_config=SpeculativeConfig("
    f"method='draft_model', model='{ASSISTANT}', num_spec_tokens=4), tokenizer='t', "
    "max_seq_len=8192, data_parallel_size=1\n"
)
"""In the form of 0.32's line, which 0.32 itself does not print for an assistant."""


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def of(text: str, command: str | None = None) -> list[Finding]:
    configured = None if command is None else merged((), from_command(command))
    return log_findings(text, "l", read_log(text, "l"), configured)


def told(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(f.severity is Severity.ERROR for f in found)
    return [(f.check, f.where) for f in found]


@pytest.mark.parametrize(
    ("name", "method", "k"),
    [
        ("gemma4-mtp", "mtp", 2),
        ("gemma4-no-method", "mtp", 2),
        ("gemma4-draft-model", "mtp", 2),
        ("llama-disable-log-stats", "draft_model", 4),
        ("both-merging", "draft_model", 2),
        ("ngram-schedule-dp2", "ngram", 3),
        ("no-speculation", "", 0),
    ],
)
def test_a_log_says_what_a_server_was_started_with_and_what_came_of_it(
    name: str, method: str, k: int
) -> None:
    start = read_log(log(name), name)
    assert (start.version, start.method, start.k) == ("0.32.0", method, k)
    launch = start.launch
    assert launch is not None
    assert launch.model is not None
    assert str(launch.model.value).startswith("/models/")
    assert (launch.k, launch.max_model_len) == (k, 1024)
    assert launch.data_parallel_size == (2 if "dp2" in name else 1)


@pytest.mark.parametrize(
    "name",
    ["gemma4-mtp", "gemma4-no-method", "gemma4-draft-model", "llama-disable-log-stats",
     "both-merging", "ngram-schedule-capped", "no-speculation"],
)  # fmt: skip
def test_a_start_that_went_as_it_was_meant_has_no_findings_of_its_own(name: str) -> None:
    assert of(log(name)) == []


def test_a_flag_that_vllm_did_not_know_is_told_by_its_name() -> None:
    (found,) = of(log("speculative-model"))
    assert told([found]) == [("flag-gone", "l:3")]
    assert "--speculative-model" in found.what


def test_settings_that_excluded_each_other_are_told() -> None:
    assert told(of(log("both"))) == [("given-twice", "l:8")]


def test_a_schedule_that_was_switched_off_is_told_once_for_all_engines() -> None:
    (found,) = of(log("ngram-schedule-dp2"))
    assert found.check == "schedule-data-parallel"
    assert "k is 3" in found.what


def test_an_assistant_that_ran_as_a_draft_model_is_told() -> None:
    found = of(OLD)
    assert told(found) == [("too-old", "l:1")]
    assert "0.20.1" in found[0].what
    assert of(OLD.replace(ASSISTANT, "google/gemma-4-E2B-it")) == []
    assert of(OLD.replace("draft_model", "mtp")) == []


@pytest.mark.parametrize(
    "line",
    [
        "NotImplementedError: Speculative Decoding with draft models or parallel drafting does not "
        "support multimodal models yet",
        "NotImplementedError: Unsupported speculative method: 'mtp'",
    ],
)
def test_a_vllm_that_gave_up_on_the_drafter_is_told(line: str) -> None:
    assert told(of(f"INFO x\n(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] {line}\n")) == [
        ("too-old", "l:2")
    ]


def test_a_start_without_the_speculation_that_was_configured_is_told() -> None:
    command = "vllm serve m --spec-method ngram --spec-tokens 2"
    assert told(of(log("no-speculation"), command)) == [("off", "l:5")]
    assert of(log("no-speculation"), "vllm serve m") == []


def test_a_start_with_another_k_than_the_configured_one_is_told() -> None:
    command = "vllm serve m --spec-method mtp --spec-model d --spec-tokens "
    (found,) = of(log("gemma4-mtp"), command + "3")
    assert found.check == "other-k"
    assert "k is 3 in --spec-tokens, and the engine started with 2" in found.what
    assert of(log("gemma4-mtp"), command + "2") == []


def test_of_several_starts_in_one_log_the_last_counts() -> None:
    text = log("gemma4-mtp") + log("no-speculation")
    start = read_log(text, "l")
    assert start.engine
    assert start.method == ""
    assert of(text) == []


def test_colours_do_not_matter() -> None:
    coloured = OLD.replace("(EngineCore pid=1)", "\x1b[0;36m(EngineCore pid=1)\x1b[0;0m")
    assert of(coloured) == of(OLD)


def test_arguments_that_print_as_no_value_leave_the_engines_own_line() -> None:
    text = "INFO non-default args: {'model': 'm', 'io': <Kind.A: 1>}\n" + OLD
    start = read_log(text, "l")
    assert start.k == 4
    assert start.launch is not None
    assert (start.launch.k, start.launch.max_model_len) == (4, 8192)
    assert {key: fact.value for key, fact in start.launch.speculation.items()} == {
        "method": "draft_model",
        "model": ASSISTANT,
        "num_speculative_tokens": "4",
    }


@pytest.mark.parametrize(
    ("text", "what", "mend"),
    [
        ("hello\n", "tells of no start", "from the start"),
        ("\n", "is empty", "from the start"),
        (log("gemma4-mtp").encode("utf-16").decode(errors="replace"), "no start", "as UTF-8"),
    ],
    ids=["another's", "empty", "utf-16"],
)
def test_a_log_without_a_start_is_not_taken_for_a_good_one(text: str, what: str, mend: str) -> None:
    start = read_log(text, "l")
    assert start.launch is None
    assert not start.engine
    (found,) = of(text)
    assert (found.check, found.severity, found.where) == ("no-start", Severity.WARNING, "l")
    assert what in found.what
    assert mend in found.mend


@pytest.mark.parametrize(
    "arguments",
    ["{[]: 1}", "{1: 2}", "{None: 'x'}", "{1, 2}", "{'a': " + "-" * 20_000 + "1}"],
    ids=["unhashable", "number", "none", "set", "deep"],
)
def test_arguments_that_are_no_mapping_of_names_leave_the_engines_own_line(arguments: str) -> None:
    start = read_log(f"non-default args: {arguments}\n{OLD}", "l")
    assert start.k == 4
    assert start.launch is not None
    assert start.launch.k == 4


def test_numbers_that_no_engine_has_are_passed_over() -> None:
    assert not read_log(OLD.replace("tokens=4", "tokens=" + "9" * 5000), "l").engine
    assert read_log(OLD.replace("=8192", "=" + "9" * 5000), "l").k == 4
