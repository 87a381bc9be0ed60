"""Every shell block of the docs that can be run here is run, and the others say why not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from reference.shell import ROOT, Block, blocks, named_files, renewed, run, workplace
from tests.real import debian

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    r"^make (demo|monitor)\b": "runs until Ctrl-C; tests/real/test_monitor.py runs what it does",
    r"specdec-exporter serve\b": "runs until Ctrl-C; tests/real runs it",
    r"--url http://127\.0\.0\.1:8000": "needs a vLLM",
    r"bench sweep": "starts a vLLM",
    r"doctor --config vllm\.yaml": "ends with 1, as it should; tests/test_doctor.py runs it",
    r"pip install": "takes packages from a registry",
    r"systemctl": "needs root and systemd",
    r"^docker |docker compose": "needs a container engine",
    r"kubectl (apply|create)": "needs a cluster",
}
"""What a block has in it that cannot be run here, and why."""
FILES = {
    "docs/acting.md": {
        "config.yaml": "spec-method: mtp\nspec-model: m\nspec-tokens: 2\n",
        "env": 'SPECULATION=\'{"method": "mtp", "num_speculative_tokens": 2}\'\n',
    },
    "docs/bench.md": {
        "requests.csv": "mode,workload,prompt_id,repetition,ttfo_ms,e2e_ms,completion_tokens,"
        "output_valid,invalid_reasons\n"
        + "".join(
            f"{mode},plain,p{i},{r},80,{1000 + i if mode == 'normal' else 600 + i},101,true,\n"
            for mode in ("normal", "mtp")
            for i in range(4)
            for r in range(2)
        )
    },
}
"""What blocks take for granted."""


def page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def why_not(block: Block) -> str | None:
    return next((why for what, why in NOT_RUN.items() if re.search(what, block.script, re.M)), None)


ALL = [(path, block) for path in PAGES for block in blocks(path.read_text())]
RUN = [(path, block) for path, block in ALL if why_not(block) is None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A folder for each page, so that one block can use what another has made."""

    @cache
    def of(path: Path) -> Path:
        folder = tmp_path_factory.mktemp(path.stem)
        workplace(folder, named_files(path.read_text()) | FILES.get(page(path), {}))
        return folder

    return of


def programs(folder: Path) -> str:
    """A folder with the programs that were fetched; a block whose program is missing is skipped."""
    for name in debian.PACKAGES:
        found = debian.find(name)
        if found is not None and not (folder / name).exists():
            (folder / name).symlink_to(found)
    return str(folder)


def knows_components(kubectl: str) -> bool:
    said = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True).stdout
    return 'Minor:"20"' not in said


@pytest.mark.parametrize(
    ("path", "block"), RUN, ids=[f"{page(p)}-{b.script.split(chr(10))[0][:40]}" for p, b in RUN]
)
def test_a_shell_block_runs_and_prints_what_the_page_says(
    path: Path, block: Block, place: Callable[[Path], Path], tmp_path: Path
) -> None:
    more_path = programs(tmp_path)
    for name in set(re.findall(r"^(kubectl|promtool|amtool)\b", block.script, re.M)):
        found = shutil.which(name, path=f"{more_path}{os.pathsep}{os.environ['PATH']}")
        if found is None or (name == "kubectl" and not knows_components(found)):
            pytest.skip(f"there is no {name}, or an old one")
    status, printed = run(block, place(path), more_path)
    assert status == 0, printed
    if block.language == "console":
        assert printed == block.text, f"make docs, or python -m reference.shell {page(path)}"


def test_a_reason_not_to_run_a_block_is_one_of_a_block_that_there_is() -> None:
    used = {why_not(block) for _, block in ALL}
    assert set(NOT_RUN.values()) <= used


def test_a_command_is_in_a_block_that_is_run_and_in_no_indented_one() -> None:
    for path in PAGES:
        text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.M | re.S)
        hidden = re.findall(
            r"^ {4}((?:\.venv/bin/)?(?:specdec-exporter|make|curl|pip) .*)", text, re.M
        )
        assert hidden == [], page(path)


def test_a_block_that_prints_something_else_is_found_and_renewed() -> None:
    text = "```console\n$ echo a\nb\n$ echo c; echo d >&2\n```\n"
    assert renewed(text) == "```console\n$ echo a\na\n$ echo c; echo d >&2\nc\nd\n```\n"


def test_a_block_that_fails_is_no_output(tmp_path: Path) -> None:
    (block,) = blocks("```sh\nfalse\necho never\n```\n")
    assert run(block, tmp_path) == (1, "")
    with pytest.raises(RuntimeError, match="gives 1"):
        renewed("```console\n$ false\n```\n")


def test_a_file_that_a_page_shows_by_name_is_there_for_its_blocks() -> None:
    text = "```yaml\n# a.yaml\nx: 1\n```\n\n```yaml\nx: 2\n```\n"
    assert named_files(text) == {"a.yaml": "# a.yaml\nx: 1\n"}
