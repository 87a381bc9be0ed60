"""What the name of a Gemma 4 checkpoint says, and the k that is advised for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"gemma-?4-(?P<size>e2b|e4b|12b|26b-a4b|31b)(?P<rest>(?:-[\w.]+)*)$", re.I)

ADVISED_K = {"E2B": 2, "E4B": 4, "12B": 8, "26B-A4B": 4, "31B": 8}
"""The largest k that vLLM's own recipes advise for a size, from measurements on A100 and H100."""

FIRST_VERSION = (0, 21)
"""The first vLLM that knows the assistants; an older one takes them for any draft model."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Gemma 4 checkpoint by its name."""

    size: str
    """E2B, E4B, 12B, 26B-A4B or 31B."""
    instructed: bool | None
    """Whether it is an -it model; None where the name does not tell."""
    assistant: bool
    """Whether it is a drafter."""


def by_name(model: str | None) -> Checkpoint | None:
    """What a repository's or folder's name says; None for anything but Gemma 4."""
    found = _NAME.search((model or "").rstrip("/").rpartition("/")[2])
    if found is None:
        return None
    words = found["rest"].lower().split("-")[1:]
    instructed: bool | None = None
    if "it" in words:
        instructed = True
    elif not words or words[0] in ("pt", "base"):
        # Of others, such as quantised ones, the names often leave it out.
        instructed = False
    return Checkpoint(found["size"].upper(), instructed, "assistant" in words)
