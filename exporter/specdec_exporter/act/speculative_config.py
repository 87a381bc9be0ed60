"""vLLM's speculative config, as JSON inside another text or as names of a mapping."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from specdec_exporter.act.errors import Refused

TOKENS = "num_speculative_tokens"
_SCHEDULE = "num_speculative_tokens_per_batch_size"
# In a JSON text, or in one whose quotes are escaped.
_K = re.compile(r'num[-_]speculative[-_]tokens\\?"\s*:\s*([1-9][0-9]{0,2})(?![0-9.eE])')


def find_k(text: str, start: int, end: int, written: str) -> tuple[int, int, dict[str, Any]]:
    """Where k stands in a speculative config that is written as JSON inside another text.

    Args:
        text: the file.
        start: of the JSON in it, with its quotes.
        end: of it.
        written: the JSON itself, with the file's own quoting undone.

    Returns:
        Start and end of k in the text, and the rest of the config.

    Raises:
        Refused: it is not understood.
    """
    try:
        config = json.loads(written, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused("it is no JSON, or has a key twice") from error
    if not isinstance(config, dict):
        raise Refused("expected a JSON object")
    names = by_name(config)
    k = config.pop(names[TOKENS])
    found = list(_K.finditer(text, start, end))
    if len(found) != 1 or type(k) is not int or found[0][1] != str(k):
        raise Refused(f"{TOKENS} has to stand in it once, as a whole number above 0")
    return *found[0].span(1), config


def by_name(keys: Collection[str]) -> dict[str, str]:
    """The keys of a speculative config by the names that vLLM makes of them.

    Raises:
        Refused: there is no k among them that could be changed.
    """
    names = {key.replace("-", "_"): key for key in keys}
    if len(names) < len(keys):
        raise Refused("a key stands in it twice, in two spellings")
    if _SCHEDULE in names:
        raise Refused(
            f"{_SCHEDULE} is in it: vLLM changes k by batch size itself; remove it to have k tuned"
        )
    if TOKENS not in names:
        raise Refused(f"{TOKENS} is not in it; write down the k that is in use")
    return names


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found
