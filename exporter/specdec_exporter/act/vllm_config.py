"""k in the YAML file that vLLM reads by `--config`: text in, text out.

Only the digits of k are exchanged, at the place where a YAML parser finds them, so that everything
else stays as it is, byte for byte. Before and after, the file is read in full: what is not
understood is refused, and so is a change that would reach further than k.

With k = 0 the lines of the speculation become comments that begin with `OUT`, and another k makes
them lines again. What was taken out is kept there and not in a database, because the file is what
outlives everything: it is copied, restored and read by people together with it, the two change in
one rename, and whoever finds it can undo it with an editor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError, YAMLStreamError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
)
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from specdec_exporter.act.errors import Refused
from specdec_exporter.act.speculative_config import TOKENS, by_name, find_k

OUT = "# specdec-exporter k=0: "
"""What stands before each line that was taken out."""
# Some editors take the blank from the end of a line.
OUT_LINES = re.compile("^# specdec-exporter k=0:( |$)", re.M)
_EMPTY = "{}  # specdec-exporter k=0\n"
"""Stands in for the settings where none is left: vLLM cannot read a file without any."""

_DEEPEST = 50
_CONFIG = "speculative-config"
_SHORT = ("spec-tokens", "spec-method", "spec-model")
_NUMBER = re.compile(r"[1-9][0-9]{0,2}")


def read_k(text: str) -> int:
    """The k that a server started with this file has; 0 is no speculation.

    Raises:
        Refused: the file is not understood.
    """
    return _read(text).k


def with_k(text: str, k: int) -> str:
    """The same file with another k.

    Raises:
        Refused: the file is not understood, or there is no speculation to set a k for.
    """
    before = _read(text)
    if k == before.k:
        return text
    if k == 0:
        new = _taken_out(text, before)
    else:
        put_back = text if before.digits else _put_back(text)
        found = before if before.digits else _read(put_back)
        if found.digits is None:
            raise Refused(f"there is no speculation in it to set k = {k} for; write one in first")
        start, end = found.digits
        new = f"{put_back[:start]}{k}{put_back[end:]}"
    after = _read(new)
    same_drafter = k == 0 or before.k == 0 or after.drafter == before.drafter
    if after.k != k or after.others != before.others or not same_drafter:
        raise Refused("changing k in it would change more than k; write it more plainly")
    return new


_Plain = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Config:
    """What a file says, as far as it matters here."""

    k: int
    digits: tuple[int, int] | None
    """Where k stands in the text."""
    lines: tuple[tuple[int, int], ...]
    """Where each setting of the speculation stands, whole lines."""
    names_drafter: bool
    drafter: _Plain
    """The speculation but for its k."""
    others: _Plain
    """All other settings."""


def _read(text: str) -> _Config:
    root = _compose(text)
    speculation: dict[str, tuple[ScalarNode, Node]] = {}
    others: list[_Plain] = []
    for key, value in root.value:
        name = key.value.replace("_", "-")
        if name in (*_SHORT, _CONFIG):
            if name in speculation:
                raise Refused(f"{_line(key)}: {key.value} stands there twice in two spellings")
            speculation[name] = key, value
        elif name.startswith("spec") or name == "num-speculative-tokens":
            raise Refused(f"{_line(key)}: {key.value!r} is not understood; use {_CONFIG}")
        else:
            others.append((key.value, _plain(value)))
    if speculation and OUT_LINES.search(text):
        raise Refused(
            f"speculation stands in it beside lines of {OUT.strip()!r}, which would be put back; "
            "remove those lines, or the others"
        )
    lines = tuple(_lines(text, *pair) for pair in speculation.values())
    if not speculation:
        return _Config(0, None, (), False, (), tuple(others))
    if _CONFIG in speculation:
        if len(speculation) > 1:
            short = next(name for name in speculation if name != _CONFIG)
            raise Refused(f"{short} and {_CONFIG} exclude each other; keep one of them")
        key, value = speculation[_CONFIG]
        try:
            digits, drafter = _in_config(text, value)
        except Refused as error:
            raise Refused(f"{_line(key)}: {key.value}: {error}") from error
    elif "spec-tokens" in speculation:
        digits = _digits(text, *speculation["spec-tokens"])
        drafter = tuple((n, _plain(v)) for n, (_, v) in speculation.items() if n != "spec-tokens")
    else:
        raise Refused("spec-tokens is not in it; write down the k that is in use")
    return _Config(
        k=int(text[slice(*digits)]),
        digits=digits,
        lines=lines,
        names_drafter=bool(drafter),
        drafter=drafter,
        others=tuple(others),
    )


def _compose(text: str) -> MappingNode:
    """The one mapping that the file is, without anything that reads otherwise than it looks."""
    try:
        # Parsers keep what they have read, so each gets a new one.
        documents = depth = 0
        for event in YAML(typ="rt", pure=True).parse(text):
            line = f"line {event.start_mark.line + 1}"
            depth += isinstance(event, CollectionStartEvent)
            depth -= isinstance(event, CollectionEndEvent)
            if depth > _DEEPEST:
                raise Refused(f"{line}: nested too deeply")
            documents += isinstance(event, DocumentStartEvent)
            if documents > 1:
                raise Refused(f"{line}: a second YAML document begins; keep one")
            if isinstance(event, AliasEvent) or getattr(event, "anchor", None) is not None:
                raise Refused(f"{line}: an anchor or alias (& or *); write the value out")
            if getattr(event, "tag", None) is not None:
                raise Refused(f"{line}: a tag (!); write the value plainly")
        root = YAML(typ="rt", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark else ""
        raise Refused(f"{place}{' '.join((error.problem or 'not YAML').split())}") from error
    except (YAMLError, YAMLStreamError, ValueError) as error:
        raise Refused("not YAML") from error
    if root is None:
        raise Refused("there are no settings in it")
    if not isinstance(root, MappingNode):
        raise Refused(f"{_line(root)}: expected settings as `key: value` lines")
    if root.flow_style and root.value:
        raise Refused(f"{_line(root)}: settings between braces; write one a line")
    _check(root)
    return root


def _check(node: Node) -> None:
    """Refuses keys that are merged in, stand twice, or are no words."""
    if isinstance(node, SequenceNode):
        for item in node.value:
            _check(item)
    if not isinstance(node, MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise Refused(f"{_line(key)}: a key that is no word")
        if key.value == "<<":
            raise Refused(f"{_line(key)}: a merge key (<<); write the settings out")
        if key.value in seen:
            raise Refused(f"{_line(key)}: {key.value!r} stands there twice")
        seen.add(key.value)
        _check(value)


def _in_config(text: str, value: Node) -> tuple[tuple[int, int], _Plain]:
    """Where k stands in a speculative config, and the rest of that."""
    if isinstance(value, MappingNode):
        entries = {key.value: (key, node) for key, node in value.value}
        tokens = by_name(entries)[TOKENS]
        rest = tuple((name, _plain(v)) for name, (_, v) in entries.items() if name != tokens)
        return _digits(text, *entries[tokens]), rest
    if not isinstance(value, ScalarNode) or not value.value.strip():
        raise Refused("it is empty or a list; expected a mapping or JSON")
    start, end, config = find_k(text, value.start_mark.index, value.end_mark.index, value.value)
    return (start, end), (json.dumps(config, sort_keys=True),)


def _digits(text: str, key: ScalarNode, value: Node) -> tuple[int, int]:
    start, end = value.start_mark.index, value.end_mark.index
    if not isinstance(value, ScalarNode) or not _NUMBER.fullmatch(text[start:end]):
        seen = repr(text[start:end][:40]) if isinstance(value, ScalarNode) else "a list or mapping"
        raise Refused(f"{_line(key)}: {key.value} is {seen}; expected a whole number above 0")
    return start, end


def _taken_out(text: str, config: _Config) -> str:
    if not config.names_drafter:
        raise Refused(
            "spec-method and spec-model are not in it, so speculation cannot be taken out of it; "
            "move them there from the command line"
        )
    spans = sorted(config.lines)
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], re.sub("^", OUT, text[start:end], flags=re.M)]
        at = end
    if not config.others:
        parts.insert(1, _EMPTY)
    return "".join([*parts, text[at:]])


def _put_back(text: str) -> str:
    return OUT_LINES.sub("", text.replace(f"\n{_EMPTY}", "\n").removeprefix(_EMPTY))


def _lines(text: str, key: ScalarNode, value: Node) -> tuple[int, int]:
    """Start and end of the lines that a setting stands on, the last line break left out."""
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    end = max(_end(value), key.end_mark.index)
    # A block of text ends where the next setting begins, but its words end earlier.
    last = len(text[:end].rstrip())
    line_break = text.find("\n", last)
    return start, len(text) if line_break < 0 else line_break


def _end(node: Node) -> int:
    """Where the last word of a value ends; that of a block collection is its last part's."""
    if isinstance(node, CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, MappingNode) else last)
    end: int = node.end_mark.index
    return end


def _plain(node: Node) -> _Plain:
    """A value to compare by: what is in it, without where it stands."""
    return tuple(_walk(node))


def _walk(node: Node) -> Iterator[Any]:
    yield node.tag, type(node).__name__
    if isinstance(node, ScalarNode):
        yield node.value
    elif isinstance(node, MappingNode):
        yield from ((_plain(key), _plain(value)) for key, value in node.value)
    else:
        yield from map(_plain, node.value)


def _line(node: Node) -> str:
    return f"line {node.start_mark.line + 1}"
