"""A real vLLM reads from what was rewritten what was meant: its own parser, and its own config of it.

No server is started: one Python with vLLM parses all files as `vllm serve --config FILE` does.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.act import env_file, vllm_config

from tests.real.vllm_bed import MODELS, ask

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TARGET, DRAFT = MODELS / "llama-target", MODELS / "llama-draft"
REST = f"model: {TARGET}\nmax-model-len: 1024  # tokens\ndtype: float32\nenforce-eager: yes\n"
FORMS = {
    "keys": f"{REST}spec-method: draft_model\nspec-model: {DRAFT}\nspec-tokens: 2  # k\n",
    "underscores": f"{REST}spec_tokens: 2\nspec_model: {DRAFT}\nspec_method: draft_model\n",
    "mapping": f"speculative-config:\n  method: draft_model\n  model: {DRAFT}\n  # k\n"
    f"  num_speculative_tokens: 2\n{REST}",
    "flow": f"{REST}speculative_config: {{method: ngram, num-speculative-tokens: 2, prompt_lookup_max: 4}}\n",
    "json": f'{REST}speculative-config: \'{{"method": "ngram", "num_speculative_tokens": 2}}\'\n',
    "escaped": f'speculative-config: "{{\\"method\\": \\"ngram\\", \\"num_speculative_tokens\\": 2}}"\n{REST}',
    "block": f'speculative-config: |\n  {{"method": "ngram",\n   "num_speculative_tokens": 2}}\n\n{REST}',
}
ALONE = "spec-method: ngram\nspec-tokens: 2"
"""A file with nothing else: the model is on the command line."""
KS = (2, 1, 0)
READ_BY_VLLM = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve = parser.add_subparsers().add_parser("serve")
make_arg_parser(serve)
answers = {}
for name, arguments in asked.items():
    args = parser.parse_args(["serve", *arguments])
    args.model = args.model_tag or args.model  # as vllm serve does
    engine = AsyncEngineArgs.from_cli_args(args)
    speculative = engine.create_engine_config().speculative_config
    answers[name] = {
        "max_model_len": args.max_model_len,
        "k": 0 if speculative is None else speculative.num_speculative_tokens,
        "method": None if speculative is None else speculative.method,
    }
"""


@pytest.fixture(scope="module")
def read_by_vllm(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM makes of every form with every k, by `form k`; 3 is set where 0 was before."""
    folder = tmp_path_factory.mktemp("act")
    asked: dict[str, list[str]] = {}
    for form, text in {**FORMS, "alone": ALONE}.items():
        model = [str(TARGET), "--max-model-len", "1024"] if form == "alone" else []
        for k in KS:
            file = folder / f"{form}-{k}.yaml"
            file.write_text(vllm_config.with_k(text, k))
            asked[f"{form} {k}"] = [*model, "--config", str(file)]
        file = folder / f"{form}-back.yaml"
        file.write_text(vllm_config.with_k(vllm_config.with_k(text, 0), 3))
        asked[f"{form} 3"] = [*model, "--config", str(file)]
    variable = 'K=\'{"method": "ngram", "num_speculative_tokens": 2}\'\n'
    for k in KS:
        script = f'{env_file.with_k(variable, "K", k)}printf %s "$K"'
        value = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
        arguments = ["--max-model-len", "1024", "--speculative-config", value.stdout]
        asked[f"variable {k}"] = [str(TARGET), *arguments]
    answers: dict[str, dict[str, Any]] = ask(venv, READ_BY_VLLM, asked)
    assert answers.keys() == asked.keys()
    return answers


@pytest.mark.parametrize("k", [*KS, 3])
@pytest.mark.parametrize("form", [*FORMS, "alone"])
def test_vllm_speculates_as_the_rewritten_file_says(
    read_by_vllm: dict[str, dict[str, Any]], form: str, k: int
) -> None:
    answer = read_by_vllm[f"{form} {k}"]
    method = "draft_model" if "draft_model" in FORMS.get(form, "") else "ngram"
    assert answer == {"max_model_len": 1024, "k": k, "method": method if k else None}


@pytest.mark.parametrize("k", KS)
def test_vllm_speculates_as_the_rewritten_variable_says(
    read_by_vllm: dict[str, dict[str, Any]], k: int
) -> None:
    answer = read_by_vllm[f"variable {k}"]
    assert (answer["k"], answer["method"]) == (k, "ngram" if k else None)
