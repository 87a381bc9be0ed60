"""The command reads what it is given, tells it in words and as JSON, and leaves with the right code."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter import cli
from specdec_exporter.config import load
from specdec_exporter.doctor.finding import Check
from specdec_exporter.doctor.gemma4 import ADVISED_K
from specdec_exporter.doctor.launch import from_config, merged

from tests.hostile import Exchange, HostileServer, response
from tests.pages import CPU

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "tests" / "data" / "logs"
MODELS = ROOT / "tests" / "vllm" / "models"
RECIPES = ROOT / "deploy" / "vllm"
PAGE = ROOT / "docs" / "doctor.md"
RECIPES_PAGE = ROOT / "docs" / "recipes.md"
GOOD = """\
model: google/gemma-4-E4B-it
spec-method: mtp
spec-model: google/gemma-4-E4B-it-assistant
spec-tokens: 2
"""
BARE = b'python_info{implementation="CPython"} 1.0\n'
"""What is left of vLLM's page with --disable-log-stats."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def found(self) -> list[tuple[str, str]]:
        findings = json.loads(self.out)["findings"]
        return [(f["severity"], f["check"]) for f in findings]


Doctor = Callable[..., Ended]


@pytest.fixture
def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Doctor:
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, form: str = "json") -> Ended:
        command = ["specdec-exporter", "doctor", *map(str, arguments), "--format", form]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return Ended(end.value.code, *capsys.readouterr())

    return run


def vllm(page: bytes, model: str = "", length: object = 1024, version: str = "0.32.0") -> Any:
    """Answers as a vLLM does; with no model as a proxy that has only the page."""
    models = {"data": [{"id": "tiny", "root": model, "max_model_len": length}]} if model else {}
    bodies = {
        b"/metrics": page,
        b"/v1/models": json.dumps(models).encode(),
        b"/version": json.dumps({"version": version}).encode(),
    }

    def answer(exchange: Exchange) -> bool:
        path = exchange.head.split(b" ")[1]
        exchange.send(response(bodies[path]))
        return True

    return answer


def page(name: str) -> bytes:
    return (CPU / f"{name}.prom").read_bytes()


# Usage


def test_it_needs_something_to_look_at(doctor: Doctor) -> None:
    ended = doctor()
    assert ended.code == 2
    assert ended.err == (
        "specdec-exporter: doctor needs --config, --command, --url, --log or --rules\n"
    )


def test_a_file_that_cannot_be_read_is_a_usage_error(doctor: Doctor) -> None:
    for arguments, why in (
        (("--config", "none.yaml"), "none.yaml: No such file or directory"),
        (("--log", "none.log"), "none.log: No such file or directory"),
        (("--rules", "none.yaml"), "none.yaml: No such file or directory"),
    ):
        ended = doctor(*arguments)
        assert (ended.code, ended.err) == (2, f"specdec-exporter: {why}\n")


def test_a_file_that_is_not_understood_is_a_finding(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [\n")
    assert doctor("--config", "bad.yaml").found == [("error", "unreadable")]
    assert doctor("--rules", "bad.yaml").found == [("error", "unreadable")]
    assert doctor("--command", "vllm serve '").code == 1
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    assert doctor("--config", "latin.yaml").found == [("error", "unreadable")]
    assert doctor("--rules", "latin.yaml").found == [("error", "unreadable")]


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in pairwise("abcdefghi")
)
"""Nine lines that are 150 million values once the aliases are written out."""


@pytest.mark.parametrize(
    "text",
    [BOMB, "a: !!int ''\n", "a: " + "[" * 300 + "]" * 300 + "\n"],
    ids=["bomb", "empty-tag", "deep"],
)
def test_yaml_that_no_parser_likes_ends_neither_the_command_nor_its_patience(
    doctor: Doctor, tmp_path: Path, text: str
) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    for option in ("--config", "--rules"):
        assert doctor(option, "odd.yaml").found == [("error", "unreadable")]


def test_an_expression_behind_aliases_is_read_once(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "endless.yaml").write_text("a: &a [*a]\n")
    assert doctor("--rules", "endless.yaml").found == [("error", "unreadable")]
    expression = "histogram_quantile(0.5, vllm:inter_token_latency_seconds_bucket)"
    panel = f"panel: &p {{title: TPOT, expr: '{expression}'}}"
    (tmp_path / "board.yaml").write_text(f"{panel}\nagain: [*p, *p]\n")
    assert doctor("--rules", "board.yaml").found == [("error", "step-time-as-tpot")]


def test_settings_that_a_merge_key_brings_in_count_and_have_a_place(
    doctor: Doctor, tmp_path: Path
) -> None:
    (tmp_path / "merged.yaml").write_text(
        "shared: &shared\n  method: mtp\n"
        "speculative-config:\n  <<: *shared\n  num_speculative_tokens: 0\n"
    )
    ended = doctor("--config", "merged.yaml", form="text")
    assert "ERROR  merged.yaml:5: k is 0" in ended.out
    (tmp_path / "whole.yaml").write_text("a: &a\n  disable-log-stats: true\n<<: *a\n")
    assert doctor("--config", "whole.yaml").found == [("error", "no-statistics")]


@pytest.mark.parametrize(
    "command",
    [
        "--spec-tokens " + "9" * 5000,
        "--max-model-len " + "9" * 5000 + "k --spec-tokens 1",
        "--speculative-config.method '" + "[" * 100_000 + "'",
        "--speculative-config '"
        + json.dumps({"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 1e999, 2]]})
        + "'",
    ],
    ids=["k", "length", "dotted", "schedule"],
)
def test_numbers_that_no_server_has_are_no_trouble_of_ours(doctor: Doctor, command: str) -> None:
    assert doctor("--command", f"vllm serve m --spec-method mtp {command}").code in (0, 1)


def test_what_an_input_says_does_not_steer_the_terminal(doctor: Doctor, tmp_path: Path) -> None:
    for escape in ("\\e]0;x\\a", "\\ud800"):
        (tmp_path / "odd.yaml").write_text(
            f'model: "{escape}/gemma-4-E4B"\nspec-model: "{escape}/gemma-4-E4B-it-assistant"\n'
        )
        out = doctor("--config", "odd.yaml", form="text").out
        assert "gemma-4-E4B is a base model" in out
        assert out.replace("\n", "").isprintable()
        out.encode()


# Output


def test_what_is_good_is_said_in_one_line(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD)
    ended = doctor("--config", "vllm.yaml", form="text")
    assert (ended.code, ended.out) == (0, "Nothing wrong was found.\n")
    assert json.loads(doctor("--config", "vllm.yaml").out) == {
        "errors": 0, "warnings": 0, "notes": 0, "findings": [],
    }  # fmt: skip


def test_warnings_and_notes_leave_with_0_and_errors_with_1(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "deep.yaml").write_text(GOOD.replace("tokens: 2", "tokens: 5"))
    assert doctor("--config", "deep.yaml").code == 0
    (tmp_path / "old.yaml").write_text(GOOD.replace("spec-method: mtp\n", ""))
    ended = doctor("--config", "old.yaml")
    assert (ended.code, ended.found) == (1, [("error", "no-mtp")])
    told = doctor("--config", "old.yaml", form="text").out.splitlines()
    assert told[0].startswith("ERROR  old.yaml:2: ")
    assert told[1].startswith("    why:  ")
    assert told[2].startswith("    mend: ")
    assert told[-1] == "1 error"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_clean(doctor: Doctor, path: Path) -> None:
    if path.stem == "exporter-mig":
        targets = load(path).targets
        assert [t.labels["mig"] for t in targets] == ["1g.24gb"] * 4
        assert len({t.url for t in targets}) == 4
    else:
        ended = doctor("--config", path)
        assert (ended.code, ended.found) == (0, [])


def test_the_documented_example_is_what_the_command_prints(doctor: Doctor, tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    file = next(text for kind, text in blocks if kind == "yaml")
    shown = next(text for kind, text in blocks if text.startswith("$ specdec-exporter doctor"))
    command, _, output = shown.partition("\n")
    (tmp_path / "vllm.yaml").write_text(file)
    ended = doctor(*shlex.split(command)[3:], form="text")
    assert ended.out == output
    assert ended.code == 1


def test_the_page_names_every_check_and_no_other() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", PAGE.read_text(), re.M)
    assert rows == list(Check)


def test_the_page_has_the_advised_k() -> None:
    rows = re.findall(r"^\| (E2B|E4B|\S+B) \| (\d) \|", PAGE.read_text(), re.M)
    assert {size: int(k) for size, k in rows} == ADVISED_K


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_on_its_page_with_its_k(path: Path) -> None:
    row = re.search(rf"^\| \[{path.stem}\]\(\.\./deploy/vllm/{path.name}\) \|(.*)$",
                    RECIPES_PAGE.read_text(), re.M)  # fmt: skip
    if path.stem == "exporter-mig":
        assert path.name in RECIPES_PAGE.read_text()
        return
    assert row is not None
    _, model, k, _ = row[1].split("|", 3)
    assert model.strip() in path.read_text()
    assert int(k) == merged(from_config(path.read_text(), path.name), ()).k


# File and command together


def test_a_file_that_the_command_names_is_read(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD + "disable-log-stats: true\n")
    assert doctor("--command", "vllm serve --config vllm.yaml").found == [
        ("error", "no-statistics")
    ]
    # vLLM does not read this one either.
    assert doctor("--command", "vllm serve m --config=vllm.yaml").found == [
        ("error", "config-not-read")
    ]


def test_of_a_file_that_is_elsewhere_nothing_is_concluded(doctor: Doctor) -> None:
    command = "vllm serve tiny --config elsewhere.yaml"
    with HostileServer(vllm(page("ngram-k2.after"), "tiny")) as server:
        ended = doctor("--url", server.url, "--command", command)
        assert (ended.code, ended.found) == (0, [("note", "config-not-read")])
        ended = doctor("--url", server.url, "--command", f"{command} --spec-tokens 3")
        assert ended.found == [("error", "other-k"), ("note", "config-not-read")]


def test_the_command_outranks_the_file(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD)
    command = "vllm serve google/gemma-4-E4B --spec-tokens 9"
    assert doctor("--config", "vllm.yaml", "--command", command).found == [
        ("error", "base-target"),
        ("warning", "k-outranked"),
        ("warning", "k-too-deep"),
    ]


def test_folders_of_models_are_looked_into(doctor: Doctor) -> None:
    target, drafter = MODELS / "gemma4-tiny", MODELS / "gemma4-tiny-assistant"
    command = f"vllm serve {target} --spec-model {drafter} --spec-tokens 2"
    assert doctor("--command", command).found == [("error", "no-mtp")]
    command += " --spec-method mtp --max-model-len 4096"
    assert doctor("--command", command).found == [("warning", "drafter-too-short")]


# Logs


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gemma4-mtp", []),
        ("no-speculation", []),
        ("both-merging", [("warning", "given-twice")]),
        ("both", [("error", "given-twice")] * 2),
        ("speculative-model", [("error", "flag-gone")]),
        ("ngram-schedule-capped", [("error", "schedule-capped")]),
        ("ngram-schedule-dp2", [("error", "schedule-data-parallel")] * 2),
        ("llama-disable-log-stats", [("error", "no-statistics"), ("warning", "drafter-too-short")]),
    ],
)
def test_a_log_alone_is_enough(doctor: Doctor, name: str, found: list[tuple[str, str]]) -> None:
    ended = doctor("--log", LOGS / f"{name}.log")
    assert ended.found == found
    assert ended.code == any(severity == "error" for severity, _ in found)


def test_the_version_in_the_log_decides_how_bad_a_missing_method_is(
    doctor: Doctor, tmp_path: Path
) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD.replace("spec-method: mtp\n", ""))
    ended = doctor("--config", "vllm.yaml", "--log", LOGS / "gemma4-no-method.log")
    assert (ended.code, ended.found) == (0, [("note", "no-mtp")])


# A running server


def test_a_server_that_runs_as_configured_has_no_findings(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD.replace("google/gemma-4-E4B-it\n", "tiny\n", 1))
    with HostileServer(vllm(page("gemma4-mtp-synth-k2.after"), "tiny")) as server:
        ended = doctor("--config", "vllm.yaml", "--url", f"http://127.0.0.1:{server.port}")
    assert (ended.code, ended.found) == (0, [])


def test_a_server_without_series_is_told(doctor: Doctor) -> None:
    with HostileServer(vllm(BARE, "tiny")) as server:
        ended = doctor("--url", server.url)
    assert (ended.code, ended.found) == (1, [("error", "no-statistics")])


def test_a_server_without_the_configured_speculation_is_told(
    doctor: Doctor, tmp_path: Path
) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD)
    with HostileServer(vllm(page("plain.after"), "google/gemma-4-E4B-it")) as server:
        assert doctor("--url", server.url).found == [("note", "off")]
        ended = doctor("--url", server.url, "--config", "vllm.yaml")
    assert (ended.code, ended.found) == (1, [("error", "off")])


def test_a_server_with_another_k_or_model_is_told(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "vllm.yaml").write_text(GOOD)
    with HostileServer(vllm(page("draft-real-k4.after"), "/models/llama")) as server:
        ended = doctor("--url", server.url, "--config", "vllm.yaml")
    assert ended.found == [("error", "other-k"), ("warning", "other-model")]
    assert "k is 2 in vllm.yaml:4, and the server runs 4" in ended.out


def test_k_that_runs_though_none_is_configured_is_told(doctor: Doctor) -> None:
    with HostileServer(vllm(page("ngram-k2.after"))) as server:
        ended = doctor("--url", server.url, "--command", "vllm serve tiny")
        assert ended.found == [("error", "other-k")]
        assert doctor("--url", server.url).found == []


def test_a_drafter_that_is_never_accepted_is_told(doctor: Doctor) -> None:
    healthy = page("draft-real-k4.after").decode()
    position_0 = re.compile(r'(?<=position="0"\} )\S+')
    drafts = re.compile(r"(?<=num_drafts_total\{)(\S+\}) \S+")
    broken = drafts.sub(r"\1 2000.0", position_0.sub("30.0", healthy))
    too_few = drafts.sub(r"\1 900.0", position_0.sub("9.0", healthy))
    with HostileServer(vllm(broken.encode(), "tiny")) as server:
        ended = doctor("--url", server.url)
        assert (ended.code, ended.found) == (1, [("error", "drafter-broken")])
        assert "of 2,000 drafts since the start 1.5 %" in ended.out
        server.answer = vllm(too_few.encode(), "tiny")
        assert doctor("--url", server.url).found == []


def test_engines_that_differ_are_told(doctor: Doctor) -> None:
    one, other = page("ngram-k2.after").decode(), page("draft-real-k4.after").decode()
    lines = [*one.splitlines(), *other.replace('engine="0"', 'engine="1"').splitlines()]
    merged = "\n".join(line for line in lines if line.startswith("vllm:")) + "\n"
    with HostileServer(vllm(merged.encode(), "tiny")) as server:
        assert doctor("--url", server.url).found == [("warning", "engines-differ")]


def test_a_prefix_of_a_proxy_does_not_matter(doctor: Doctor) -> None:
    behind_ray = page("ngram-k2.after").replace(b"vllm:", b"ray_vllm:")
    with HostileServer(vllm(behind_ray, "tiny")) as server:
        ended = doctor("--url", server.url, "--command", "vllm serve tiny")
    assert ended.found == [("error", "other-k")]


def test_a_server_that_does_not_answer_is_told_without_its_password(doctor: Doctor) -> None:
    with HostileServer(response(b"", status="503 Overloaded")) as server:
        ended = doctor("--url", f"http://user:secret@127.0.0.1:{server.port}")
    assert ended.found == [("error", "no-answer")]
    assert "status 503" in ended.out
    assert "secret" not in ended.out


def test_an_address_that_is_none_is_a_usage_error(doctor: Doctor) -> None:
    ended = doctor("--url", "http://")
    assert ended.code == 2
    assert "is not a URL" in ended.err


def test_odd_answers_beside_a_good_page_do_not_matter(doctor: Doctor) -> None:
    good = page("ngram-k2.after")
    with HostileServer(vllm(good, "tiny", length="x", version="")) as server:
        assert doctor("--url", server.url).found == []
        server.answer = lambda e: e.send(
            response(good) if b"/metrics" in e.head else response(b"[[", status="404 Not Found")
        )
        assert doctor("--url", server.url).found == []


def test_what_the_server_says_of_its_length_and_version_is_used(
    doctor: Doctor, tmp_path: Path
) -> None:
    drafter = MODELS / "gemma4-tiny-assistant"
    (tmp_path / "vllm.yaml").write_text(f"model: tiny\nspec-model: {drafter}\nspec-tokens: 2\n")
    with HostileServer(vllm(page("gemma4-mtp-synth-k2.after"), "tiny", 4096)) as server:
        ended = doctor("--config", "vllm.yaml", "--url", server.url)
    assert ended.found == [("warning", "drafter-too-short"), ("note", "no-mtp")]


# Rules


def test_several_files_of_rules_are_looked_at(doctor: Doctor, tmp_path: Path) -> None:
    itl = "vllm:inter_token_latency_seconds"
    expr = f"rate({itl}_sum[5m]) / rate({itl}_count[5m])"
    panel = {"title": "TPOT", "targets": [{"expr": expr}]}
    (tmp_path / "board.json").write_text(json.dumps({"panels": [panel]}))
    good = ROOT / "alerts" / "specdec.rules.yaml"
    ended = doctor("--rules", good, "--rules", "board.json")
    assert (ended.code, ended.found) == (1, [("error", "step-time-as-tpot")])
