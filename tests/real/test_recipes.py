"""vLLM's own argument parser takes the recipes as they are meant, and reads launches as doctor does."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from specdec_exporter.doctor.gemma4 import by_name
from specdec_exporter.doctor.launch import from_command, from_config, merged

from tests.real.vllm_bed import MODELS, ask

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
RECIPES = {
    path.stem: path
    for path in sorted((ROOT / "deploy" / "vllm").glob("*.yaml"))
    if path.stem != "exporter-mig"
}
ASK = """
from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.engine import arg_utils
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

# Offline it would look for the checkpoints already here.
arg_utils.get_model_path = lambda model, revision: model
parser = FlexibleArgumentParser(prog="vllm")
make_arg_parser(parser.add_subparsers(dest="subparser").add_parser("serve"))

def answer(arguments, tiny):
    try:
        args = parser.parse_args(["serve", *arguments])
        engine = arg_utils.AsyncEngineArgs.from_cli_args(args)
        if args.model_tag is not None:
            engine.model = args.model_tag
        said = {
            "model": engine.model,
            "max_model_len": engine.max_model_len,
            "data_parallel_size": engine.data_parallel_size,
            "disable_log_stats": engine.disable_log_stats,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "tensor_parallel_size": engine.tensor_parallel_size,
        }
        # What the engine makes of the flags, before it needs the checkpoints.
        arg_utils.SpeculativeConfig = lambda **given: given
        given = engine.create_speculative_config(None, None) or {}
        arg_utils.SpeculativeConfig = SpeculativeConfig
        given = {k: v for k, v in given.items() if not k.startswith("target_")}
        said["speculation"] = given
        if tiny and given:
            # The config itself, with models of the same kind that are here.
            target = arg_utils.EngineArgs(
                model=tiny["target"], tokenizer=tiny["tokenizer"], max_model_len=1024,
                dtype="float32", enforce_eager=True,
            ).create_model_config()
            models = {"model": tiny["drafter"]} if "model" in given else {}
            config = SpeculativeConfig(
                **{**given, **models}, target_model_config=target,
                target_parallel_config=ParallelConfig(),
            )
            said["validated"] = [config.method, config.num_speculative_tokens]
        return said
    except (ValueError, NotImplementedError, AssertionError) as error:
        return {"refused": str(error)}
    except SystemExit:
        return {"refused": "usage"}

answers = [answer(*one) for one in asked]
"""
"""What vLLM makes of command lines: the settings, the speculation, and the config where it can be."""

FILE = "speculative-config:\n  method: mtp\n  model: a/b\n  num_speculative_tokens: 2\n"
SHORT = "spec-method: mtp\nspec-model: a/b\nspec-tokens: 2\nmax-model-len: 4k\n"
LAUNCHES: list[tuple[str, str]] = [
    (FILE, "m"),
    (FILE, "m -sc.num_speculative_tokens 1"),
    (FILE, """m --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'"""),
    (FILE.replace("  num_speculative_tokens: 2\n", ""), "m --spec-tokens 4"),
    (SHORT, "m"),
    (SHORT, "m --spec-tokens 1 --max-model-len 8K"),
    (SHORT, "m --spec_tokens=1 -dp 2"),
    ("model: n\n" + SHORT, ""),
    ("model: n\ndisable-log-stats: true\n", "m"),
    ("model: n\ndisable-log-stats: false\n", ""),
    (
        "model: n\nspeculative-config.method: mtp\nspeculative-config.model: a/b\n",
        "--speculative-config.num_speculative_tokens 5",
    ),
    ("", """m -sc.method mtp --speculative-config '{"model": "x"}'"""),
    ("", "m --speculative-config.method mtp -sc.model x"),
    ("", "m --speculative_config.method=mtp --speculative-config.num-speculative-tokens 3"),
    ("", "m --max-model-len 32k --data-parallel-size 2 --disable-log-stats"),
]
"""A file and a command line each."""
REFUSED = [
    ("m --speculative-model x", "usage"),
    ("m --num-speculative-tokens 2", "usage"),
    ("""m -sc '{"num_speculative_tokens": 2}' --spec-tokens 2""", "mutually exclusive"),
]


@pytest.fixture(scope="module")
def answers(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """To everything here."""
    folder = tmp_path_factory.mktemp("launches")
    gemma4 = {
        "target": str(MODELS / "gemma4-tiny"),
        "drafter": str(MODELS / "gemma4-tiny-assistant"),
        "tokenizer": str(MODELS / "llama-target"),
    }
    asked: dict[str, tuple[list[str], dict[str, str] | None]] = {}
    for name, path in RECIPES.items():
        tiny = None if name == "control-eagle" else gemma4
        asked[name] = (["--config", str(path)], tiny)
    for number, (file, command) in enumerate(LAUNCHES):
        path = folder / f"{number}.yaml"
        path.write_text(file or "model: unused\n")
        words = shlex.split(command)
        asked[f"launch {number}"] = ([*words, "--config", str(path)] if file else words, None)
    for command, _ in REFUSED:
        asked[command] = (shlex.split(command), None)
    path = folder / "passed-over.yaml"
    path.write_text(SHORT)
    asked["passed over"] = (["m", f"--config={path}"], None)
    asked["other ending"] = (["m", "--config", str(path.with_suffix(".json"))], None)
    return dict(zip(asked, ask(venv, ASK, list(asked.values())), strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_vllm_takes_a_recipe_as_it_is_written(name: str, answers: dict[str, Any]) -> None:
    answer = answers[name]
    assert "refused" not in answer, answer
    written = YAML(typ="safe").load(RECIPES[name].read_text())
    assert answer["model"] == written["model"]
    assert answer["max_model_len"] == written["max-model-len"]
    assert answer["gpu_memory_utilization"] == written["gpu-memory-utilization"]
    assert answer["tensor_parallel_size"] == written.get("tensor-parallel-size", 1)
    launch = merged(from_config(RECIPES[name].read_text(), name), ())
    assert answer["speculation"] == {k: f.value for k, f in launch.speculation.items()}
    drafter = by_name(answer["speculation"].get("model"))
    if drafter and drafter.assistant:
        assert answer["speculation"]["method"] == "mtp"
        assert answer["speculation"]["model"] == f"{answer['model']}-assistant"
        assert answer["validated"] == ["mtp", launch.k]
    elif name == "control-ngram":
        assert answer["validated"] == ["ngram", launch.k]


@pytest.mark.parametrize("number", range(len(LAUNCHES)))
def test_doctor_reads_a_launch_as_vllm_does(number: int, answers: dict[str, Any]) -> None:
    file, command = LAUNCHES[number]
    answer = answers[f"launch {number}"]
    given = from_config(file, "f") if file else ()
    launch = merged(given, from_command(f"vllm serve {command}"))
    assert launch.model is not None
    read = {
        "model": launch.model.value,
        "max_model_len": launch.max_model_len,
        "data_parallel_size": launch.data_parallel_size,
        "disable_log_stats": launch.last("disable-log-stats") is not None,
        "speculation": {key: str(fact.value) for key, fact in launch.speculation.items()},
    }
    answer["speculation"] = {key: str(value) for key, value in answer["speculation"].items()}
    assert read == {key: answer[key] for key in read}


@pytest.mark.parametrize(("command", "why"), REFUSED)
def test_vllm_refuses_what_doctor_says_it_refuses(
    command: str, why: str, answers: dict[str, Any]
) -> None:
    assert why in answers[command]["refused"]


def test_vllm_passes_over_a_config_file_in_one_word_and_refuses_other_endings(
    answers: dict[str, Any],
) -> None:
    assert answers["passed over"]["speculation"] == {}
    assert "yaml" in answers["other ending"]["refused"]
