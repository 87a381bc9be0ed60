"""The shell blocks of pages: found, run, and their printed output renewed.

A block of `sh` is a script. In one of `console`, lines after `$ ` are commands, and what follows
each is what it prints, on both of its outputs. `python -m reference.shell FILE...` renews that.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.M | re.S)
_NAMED = re.compile(r"^```\w+\n# ([\w./-]+\.\w+)\b.*\n(?:.*\n)*?```$", re.M)
_WAIT_SECONDS = 60


@dataclass(frozen=True)
class Block:
    """One block: where its text begins in the page, its language and its text."""

    start: int
    language: str
    text: str

    @property
    def script(self) -> str:
        """The commands alone."""
        if self.language == "sh":
            return self.text
        lines = self.text.splitlines(keepends=True)
        return "".join(line[2:] for line in lines if line.startswith("$ "))


def blocks(markdown: str) -> list[Block]:
    """All shell blocks of a page."""
    return [Block(m.start(2), m[1], m[2]) for m in _BLOCK.finditer(markdown)]


def named_files(markdown: str) -> dict[str, str]:
    """Blocks of other languages that begin with a comment of a file's name, by that name."""
    return {m[1]: m[0].split("\n", 1)[1].removesuffix("```") for m in _NAMED.finditer(markdown)}


def workplace(folder: Path, files: Mapping[str, str]) -> None:
    """Make a folder look like a checkout in which nothing can be spoiled."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "build":
            (folder / path.name).symlink_to(path)
    for name, text in files.items():
        (folder / name).write_text(text)


def run(block: Block, folder: Path, more_path: str = "") -> tuple[int, str]:
    """Run a block; gives its status and, for a console, its text with what is printed now."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{more_path}"
    calm = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
    # The marks tell what belongs to which command.
    script = block.script if block.language == "sh" else _marked(block.script)
    done = subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=folder,
        env=calm | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_WAIT_SECONDS,
    )
    return done.returncode, "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def _marked(script: str) -> str:
    lines = script.splitlines()
    return "".join(f"printf '%s\\n' {_quoted('$ ' + line)}\n{line}\n" for line in lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def renewed(markdown: str) -> str:
    """A page with what its console blocks print now.

    Raises:
        RuntimeError: a block fails.
    """
    found = [block for block in blocks(markdown) if block.language == "console"]
    with tempfile.TemporaryDirectory() as folder:
        workplace(Path(folder), named_files(markdown))
        texts = []
        for block in found:
            status, text = run(block, Path(folder))
            if status:
                raise RuntimeError(f"{block.script}gives {status}:\n{text}")
            texts.append(text)
    for block, text in reversed(list(zip(found, texts, strict=True))):
        end = block.start + len(block.text)
        markdown = markdown[: block.start] + text + markdown[end:]
    return markdown


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(renewed(Path(name).read_text()))
