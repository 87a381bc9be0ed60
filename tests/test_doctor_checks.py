"""Each check fires on what it is for, and not on what is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specdec_exporter.doctor.checks import CHECKS, Case, Files, launch_findings, tunable
from specdec_exporter.doctor.finding import Check, Finding, Severity, in_order
from specdec_exporter.doctor.gemma4 import ADVISED_K, Checkpoint, by_name
from specdec_exporter.doctor.launch import from_command, from_config, merged

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "vllm" / "models"
RECIPES = sorted(
    path for path in (ROOT / "deploy" / "vllm").glob("*.yaml") if path.stem != "exporter-mig"
)
GOOD = """\
model: google/gemma-4-E4B-it
spec-method: mtp
spec-model: google/gemma-4-E4B-it-assistant
spec-tokens: 2
"""
NOTHING = Files()
SCHEDULE = "num_speculative_tokens_per_batch_size"


def findings(
    file: str = "",
    command: str = "vllm serve",
    *,
    version: str = "",
    target: Files = NOTHING,
    drafter: Files = NOTHING,
) -> list[Finding]:
    given = from_config(file, "f.yaml") if file else ()
    launch = merged(given, from_command(command))
    return launch_findings(Case(launch, target, drafter, version))


def told(found: list[Finding]) -> list[tuple[str, str, str]]:
    return [(str(f.severity), f.check, f.where) for f in found]


def scheduled(bands: object, k: int = 3, more: str = "") -> list[Finding]:
    config = {"method": "ngram", "num_speculative_tokens": k, SCHEDULE: bands}
    return findings(command=f"vllm serve m -sc '{json.dumps(config)}' {more}")


def test_a_good_launch_has_no_findings() -> None:
    assert findings(GOOD) == []
    assert findings(command="vllm serve google/gemma-4-E4B") == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_clean(path: Path) -> None:
    text = path.read_text()
    given = from_config(text, path.name)
    assert launch_findings(Case(merged(given, ()))) == []
    assert tunable(text, path.name, given) == []


@pytest.mark.parametrize(
    "flag",
    ["speculative-model", "num-speculative-tokens", "speculative-max-model-len",
     "ngram-prompt-lookup-max"],
)  # fmt: skip
def test_flags_of_the_first_engine_are_told(flag: str) -> None:
    assert told(findings(command=f"vllm serve m --{flag} 4")) == [
        ("error", "flag-gone", f"--{flag}")
    ]
    assert told(findings(f"model: m\n{flag}: 4\n")) == [("error", "flag-gone", "f.yaml:2")]


def test_k_in_two_places_that_exclude_each_other_is_an_error() -> None:
    both = (
        "model: m\nspeculative-config:\n  method: ngram\n  num_speculative_tokens: 2\n"
        "spec-tokens: 2\n"
    )
    (found,) = findings(both)
    assert (found.severity, found.check, found.where) == (Severity.ERROR, "given-twice", "f.yaml:5")
    assert "f.yaml:4" in found.why


def test_k_beside_a_config_without_one_runs_and_is_a_warning() -> None:
    beside = "model: m\nspeculative-config: {method: ngram}\nspec-tokens: 2\n"
    assert told(findings(beside)) == [("warning", "given-twice", "f.yaml:3")]


def test_a_config_that_is_replaced_and_loses_its_method_is_an_error() -> None:
    file = 'model: m\nspeculative-config: {method: mtp, "num_speculative_tokens": 2}\n'
    found = findings(file, "vllm serve -sc.num_speculative_tokens 1")
    assert told(found) == [
        ("error", "config-replaced", "-sc.num_speculative_tokens"),
        ("warning", "k-outranked", "-sc.num_speculative_tokens"),
    ]
    assert "method is lost" in found[0].what


def test_a_config_that_is_replaced_by_one_with_all_its_keys_is_no_finding() -> None:
    file = "model: m\nspeculative-config: {method: ngram}\n"
    command = """vllm serve -sc '{"method": "ngram", "num_speculative_tokens": 2}'"""
    assert [f.check for f in findings(file, command)] == ["k-outranked"]


def test_a_k_on_the_command_line_over_one_in_the_file_is_a_warning() -> None:
    assert told(findings(GOOD, "vllm serve --spec-tokens 1")) == [
        ("warning", "k-outranked", "--spec-tokens")
    ]


def test_a_config_file_that_vllm_passes_over_or_refuses_is_an_error() -> None:
    assert told(findings(command="vllm serve m --config=f.yaml")) == [
        ("error", "config-not-read", "--config")
    ]
    assert told(findings(command="vllm serve m --config f.json")) == [
        ("error", "config-not-read", "--config")
    ]
    assert findings(command="vllm serve m --config f.yml") == []


def test_speculation_without_a_k_is_a_warning_but_for_suffix_which_has_one_of_its_own() -> None:
    without = GOOD.replace("spec-tokens: 2\n", "")
    assert told(findings(without)) == [("warning", "k-missing", "f.yaml:2")]
    assert findings("model: m\nspec-method: suffix\n") == []


def test_a_k_of_0_is_an_error() -> None:
    assert told(findings(GOOD.replace("tokens: 2", "tokens: 0"))) == [
        ("error", "k-missing", "f.yaml:4")
    ]


@pytest.mark.parametrize("size", ADVISED_K)
def test_a_k_above_the_advised_one_is_a_warning_and_the_advised_one_is_not(size: str) -> None:
    def at(k: int) -> list[Finding]:
        return findings(GOOD.replace("E4B", size).replace("tokens: 2", f"tokens: {k}"))

    assert at(ADVISED_K[size]) == []
    assert told(at(ADVISED_K[size] + 1)) == [("warning", "k-too-deep", "f.yaml:4")]


def test_the_advice_is_for_assistants_only() -> None:
    deep = "model: google/gemma-4-E2B-it\nspec-method: ngram\nspec-tokens: 8\n"
    assert findings(deep) == []


@pytest.mark.parametrize(
    ("version", "severity"),
    [("", "error"), ("0.20.1", "error"), ("0.21.0", "note"), ("0.32.0+cpu", "note"),
     ("dev", "error"), ("v1.0", "note")],
)  # fmt: skip
def test_an_assistant_without_mtp_is_an_error_where_vllm_may_be_too_old(
    version: str, severity: str
) -> None:
    found = findings(GOOD.replace("spec-method: mtp\n", ""), version=version)
    assert told(found) == [(severity, "no-mtp", "f.yaml:2")]


def test_an_assistant_by_another_method_is_an_error_in_any_version() -> None:
    eagle = GOOD.replace("method: mtp", "method: eagle3")
    assert told(findings(eagle, version="0.32.0")) == [("error", "no-mtp", "f.yaml:2")]
    drafts = GOOD.replace("method: mtp", "method: draft_model")
    assert told(findings(drafts)) == [("error", "no-mtp", "f.yaml:2")]
    assert told(findings(drafts, version="0.32.0")) == [("note", "no-mtp", "f.yaml:2")]
    assert findings(GOOD.replace("method: mtp", "method: gemma4_mtp")) == []


def test_an_assistant_is_known_by_its_files_whatever_it_is_called() -> None:
    unnamed = "model: /models/a\nspec-model: /models/b\nspec-tokens: 2\n"
    assert findings(unnamed) == []
    config = json.loads((MODELS / "gemma4-tiny-assistant" / "config.json").read_text())
    assert told(findings(unnamed, drafter=Files.of(config))) == [("error", "no-mtp", "f.yaml:2")]


@pytest.mark.parametrize("base", ["google/gemma-4-E4B", "google/gemma-4-E4B-pt", "/m/gemma-4-e4b/"])
def test_a_base_target_is_an_error(base: str) -> None:
    found = findings(GOOD.replace("model: google/gemma-4-E4B-it\n", f"model: {base}\n", 1))
    assert told(found) == [("error", "base-target", "f.yaml:1")]


def test_a_quantised_target_whose_name_does_not_tell_is_let_through() -> None:
    quantised = GOOD.replace(
        "model: google/gemma-4-E4B-it\n", "model: nvidia/Gemma-4-E4B-NVFP4\n", 1
    )
    assert findings(quantised) == []


def test_an_assistant_of_another_size_is_an_error_by_name() -> None:
    other = GOOD.replace("E4B-it-assistant", "E2B-it-assistant")
    assert told(findings(other)) == [("error", "other-size", "f.yaml:3")]


def test_an_assistant_of_another_size_is_an_error_by_its_files() -> None:
    named = GOOD.replace("google/gemma-4-E4B-it-assistant", "/models/b").replace(
        "google/gemma-4-E4B-it", "/models/a"
    )
    drafter, target = (
        Files.of(json.loads((MODELS / name / "config.json").read_text()))
        for name in ("gemma4-tiny-assistant", "gemma4-tiny")
    )
    assert drafter.backbone_hidden_size == target.hidden_size == 64
    assert findings(named, target=target, drafter=drafter) == []
    wide = Files(hidden_size=128)
    assert told(findings(named, target=wide, drafter=drafter)) == [
        ("error", "other-size", "f.yaml:3")
    ]


def test_a_drafter_for_shorter_sequences_than_the_targets_is_a_warning() -> None:
    written = (
        "model: m\nmax-model-len: 4096\nspeculative-config:\n  model: d\n"
        "  num_speculative_tokens: 2\n  max_model_len: 2048\n"
    )
    assert told(findings(written)) == [("warning", "drafter-too-short", "f.yaml:6")]
    assert findings(written.replace("2048", "4096")) == []


def test_how_long_a_drafter_reads_is_known_from_its_files() -> None:
    file = "model: m\nmax-model-len: 4096\nspec-model: d\nspec-tokens: 2\n"
    short = Files(max_length=2048)
    assert told(findings(file, drafter=short)) == [("warning", "drafter-too-short", "f.yaml:3")]
    assert findings(file.replace("4096", "2048"), drafter=short) == []
    unlimited = file.replace("max-model-len: 4096\n", "")
    assert findings(unlimited, drafter=short) == []
    assert told(findings(unlimited, target=Files(max_length=8192), drafter=short)) == [
        ("warning", "drafter-too-short", "f.yaml:2")
    ]
    assert told(findings(file + "spec-method: eagle3\n", drafter=short)) == [
        ("warning", "drafter-too-short", "f.yaml:3")
    ]


def test_statistics_that_are_switched_off_are_an_error() -> None:
    assert told(findings(command="vllm serve m --disable-log-stats")) == [
        ("error", "no-statistics", "--disable-log-stats")
    ]
    assert told(findings("disable_log_stats: true\n")) == [("error", "no-statistics", "f.yaml:1")]
    assert findings("disable_log_stats: false\nmodel: m\n") == []


def test_a_schedule_under_data_parallel_is_an_error_and_one_by_itself_is_not() -> None:
    bands = [[1, 16, 3], [17, 128, 1]]
    assert scheduled(bands) == []
    assert told(scheduled(bands, more="-dp 2")) == [("error", "schedule-data-parallel", "-sc")]


def test_a_schedule_that_k_caps_is_an_error() -> None:
    (found,) = scheduled([[1, 16, 4], [17, 128, 1]], k=3)
    assert (found.severity, found.check) == (Severity.ERROR, "schedule-capped")
    assert "4" in found.what
    assert "3" in found.what


def test_a_band_without_drafts_is_a_note() -> None:
    assert told(scheduled([[1, 16, 3], [17, 128, 0]])) == [("note", "schedule-zero", "-sc")]


@pytest.mark.parametrize(
    "bands",
    [[], "x", [[2, 16, 3]], [[1, 16, 3], [16, 20, 1]], [[1, 0, 3]], [[1, 16, -1]], [[1, 2]]],
)
def test_a_schedule_that_vllm_refuses_is_an_error(bands: object) -> None:
    assert told(scheduled(bands)) == [("error", "schedule-refused", "-sc")]


def test_a_schedule_of_nothing_is_none() -> None:
    assert scheduled(None) == []


def test_a_file_in_which_the_exporter_cannot_change_k_is_a_note() -> None:
    anchored = "model: &m x\nspec-method: ngram\nspec-tokens: 2\ntokenizer: *m\n"
    (found,) = tunable(anchored, "f.yaml", from_config(anchored, "f.yaml"))
    assert (found.severity, found.check) == (Severity.NOTE, "not-tunable")
    plain = anchored.replace("spec-method: ngram\nspec-tokens: 2\n", "")
    assert tunable(plain, "f.yaml", from_config(plain, "f.yaml")) == []
    assert tunable(GOOD, "f.yaml", from_config(GOOD, "f.yaml")) == []


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("google/gemma-4-26B-A4B-it", Checkpoint("26B-A4B", True, False)),
        ("google/gemma-4-31B-it-assistant", Checkpoint("31B", True, True)),
        ("gg-hf-am/gemma-4-E2B-it-assistant", Checkpoint("E2B", True, True)),
        ("RedHatAI/gemma-4-E4B-it-FP8-dynamic", Checkpoint("E4B", True, False)),
        ("RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3", Checkpoint("26B-A4B", True, False)),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", Checkpoint("26B-A4B", None, False)),
        ("/srv/models/gemma-4-E2B/", Checkpoint("E2B", False, False)),
        ("google/gemma-4-9B-it", None),
        ("google/gemma-3-4b-it", None),
        (None, None),
    ],
)
def test_names_of_gemma_4_are_understood(name: str | None, checkpoint: Checkpoint | None) -> None:
    assert by_name(name) == checkpoint


def test_a_config_json_that_is_none_says_nothing() -> None:
    assert (
        Files.of([1]) == Files.of({}) == Files.of({"model_type": 3, "hidden_size": "x"}) == Files()
    )


def test_every_finding_is_a_line_with_a_reason_and_a_mend() -> None:
    bad = (
        "model: google/gemma-4-E2B\nspec-model: google/gemma-4-E4B-it-assistant\nspec-tokens: 9\n"
        "speculative-config: {max_model_len: 10}\nmax-model-len: 20\ndisable-log-stats: true\n"
        "speculative-model: x\n"
    )
    found = findings(bad, "vllm serve --config=x.yaml --spec-tokens 9")
    assert len({f.check for f in found}) > 6
    for finding in found:
        for words in (finding.what, finding.where, finding.why, finding.mend):
            assert words
            assert "\n" not in words
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)


def test_the_worst_is_told_first_and_nothing_twice() -> None:
    found = [Finding(s, Check.OFF, "w", "f", "y", "m") for s in reversed(Severity)]
    assert [f.severity for f in in_order([*found, *found])] == list(Severity)
