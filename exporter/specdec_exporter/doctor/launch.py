"""What a vLLM is started with: settings of its `--config` file and of its command line.

They are put together as vLLM 0.32 does it (`vllm.utils.argparse_utils.FlexibleArgumentParser`,
`vllm.engine.arg_utils.EngineArgs.create_speculative_config`): settings of the file come first, the
last of a name wins, a speculative config is replaced whole and never merged, and the three short
flags of it are put into what won. Text in, values out: nothing here opens a file.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning

CONFIG = "speculative-config"
SHORT = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
"""Flags that are put into a speculative config, and what they are called there."""
TOKENS = "num_speculative_tokens"
SCHEDULE = "num_speculative_tokens_per_batch_size"
_ALIASES = {"sc": CONFIG, "dp": "data-parallel-size", "tp": "tensor-parallel-size"}
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_IMAGE = re.compile(r"(?:[\w.:-]+/)+vllm[\w-]*(?:[:@][\w.:-]+)?")
"""A container's image whose entry point is `vllm serve`."""
_NUMBER = re.compile(r"(-?\d{1,18})([kmgKMG]?)")
_MOST_VALUES = 100_000


class Unreadable(Exception):
    """An input that is not understood: where, and what was seen there."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")
        self.where = where
        self.what = what


@dataclass(frozen=True, slots=True)
class Fact:
    """A value, and where it stands."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as it was given."""

    name: str
    """In full, with dashes and without those at its front; `model` is the positional one, too."""
    value: Any
    """A string, True, a list of strings, or a mapping of `Fact`s for the speculative config."""
    where: str
    in_file: bool = False
    dotted: str = ""
    """Of `--speculative-config.KEY VALUE` the flag before the dot."""
    equals: bool = False
    """Whether a flag and its value are one word, `--flag=value`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """All that a server is started with, in the order in which vLLM reads it."""

    given: tuple[Given, ...]
    length: int | None = None
    """Longest sequence in tokens, where it is known from elsewhere than a setting."""
    complete: bool = True
    """Whether these are all settings; there may be a file that could not be read."""

    def last(self, name: str) -> Given | None:
        """The setting of that name that is in force."""
        return next((one for one in reversed(self.given) if one.name == name), None)

    def all(self, name: str) -> tuple[Given, ...]:
        """Every setting of that name."""
        return tuple(one for one in self.given if one.name == name)

    @property
    def model(self) -> Fact | None:
        """The target."""
        found = self.last("model") or self.last("model-tag")
        return Fact(str(found.value), found.where) if found else None

    @property
    def max_model_len(self) -> int | None:
        """The longest sequence that the target serves, in tokens."""
        found = self.last("max-model-len")
        written = found and whole_number(found.value)
        return written if written and written > 0 else self.length

    @property
    def data_parallel_size(self) -> int:
        """How many engines share the requests."""
        found = self.last("data-parallel-size")
        return (found and whole_number(found.value)) or 1

    @property
    def speculation(self) -> Mapping[str, Fact]:
        """The speculative config in force, by vLLM's names; empty without speculation."""
        config = self.last(CONFIG)
        merged: dict[str, Fact] = dict(config.value) if config else {}
        for flag, key in SHORT.items():
            if (short := self.last(flag)) and key not in merged:
                merged[key] = Fact(short.value, short.where)
        return merged

    @property
    def k(self) -> int | None:
        """The configured k; 0 without speculation, None where it is left to vLLM."""
        found = self.speculation.get(TOKENS)
        if found:
            return whole_number(found.value)
        return None if self.speculation or not self.complete else 0

    @property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """Of k by batch size: first and last size of a range, and its k; empty without one."""
        found = self.speculation.get(SCHEDULE)
        try:
            return tuple((int(a), int(b), int(k)) for a, b, k in found.value) if found else ()
        except (TypeError, ValueError, OverflowError):
            return ()


def whole_number(value: Any) -> int | None:
    """A number as vLLM's command line reads it, `32k` and `32K` included; None if it is none."""
    found = _NUMBER.fullmatch(str(value).strip())
    return int(found[1]) * _UNITS.get(found[2], 1) if found else None


def from_config(text: str, name: str) -> tuple[Given, ...]:
    """The settings of a file that vLLM reads by `--config`.

    Args:
        text: the file.
        name: of the file, for the places.

    Raises:
        Unreadable: it is no YAML mapping, which vLLM cannot read either.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            settings = YAML(typ="rt", pure=True).load(text)
        size = _size(settings, {})
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise Unreadable(place, " ".join((error.problem or "not YAML").split())) from error
    except RecursionError as error:
        raise Unreadable(name, "nested too deeply") from error
    except Exception as error:
        # What a tag or a digit too many brings out of the parser: ValueError, IndexError and such.
        raise Unreadable(name, "not YAML") from error
    if size > _MOST_VALUES:
        raise Unreadable(name, f"over {_MOST_VALUES:,} values, with the aliases written out")
    if not isinstance(settings, CommentedMap):
        raise Unreadable(name, "expected settings as `key: value` lines")
    given = []
    for key, value in settings.items():
        where = f"{name}:{_line(settings, key)}"
        flag = _long(str(key))
        if value is False:
            continue
        if flag.startswith(f"{CONFIG}."):
            given.append(_dotted(str(key), _plain(value), where, in_file=True))
        elif flag == CONFIG and isinstance(value, CommentedMap):
            inner = {
                _key(k): Fact(_plain(v), f"{name}:{_line(value, k)}") for k, v in value.items()
            }
            given.append(Given(flag, inner, where, in_file=True))
        else:
            given.append(_given(flag, _plain(value), where, in_file=True))
    return tuple(given)


def _line(node: CommentedMap, key: Any) -> int:
    """Where a key stands; one that a merge key (<<) brought in has no place but its mapping's."""
    position = (node.lc.data or {}).get(key)
    return int(position[0] if position else node.lc.line or 0) + 1


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values it is with every alias written out, without writing them out."""
    if not isinstance(value, Mapping | list):
        return 1
    if id(value) not in known:
        inner = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in inner)
    return known[id(value)]


def from_command(command: str) -> tuple[Given, ...]:
    """The settings of a command line, from `serve` or from vLLM's image on if one is in it.

    Raises:
        Unreadable: a quote is not closed, or a speculative config is no JSON.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise Unreadable("--command", str(error).lower()) from error
    start = next((i for i, word in enumerate(words) if word == "serve"), None)
    if start is None:
        start = next((i for i, word in enumerate(words) if _IMAGE.fullmatch(word)), None)
    if start is not None:
        del words[: start + 1]
        if words and not _is_flag(words[0]):
            words.insert(0, "--model")
    given: list[Given] = []
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not _is_flag(word):
            continue
        flag, equals, value = word.partition("=")
        values = [value] if equals else []
        if not equals:
            while at < len(words) and not _is_flag(words[at]):
                values.append(words[at])
                at += 1
        name = _long(flag.partition(".")[0])
        if "." in flag:
            if name == CONFIG:
                given.append(_dotted(flag, _loose(" ".join(values)), flag))
        else:
            found = values if len(values) > 1 else (values[0] if values else True)
            given.append(replace(_given(name, found, flag), equals=bool(equals)))
    return tuple(given)


def _dotted(flag: str, value: Any, where: str, *, in_file: bool = False) -> Given:
    shown, _, path = flag.lstrip("-").partition(".")
    shown = shown.replace("_", "-")
    return Given(CONFIG, {_key(path.rstrip("+")): Fact(value, where)}, where, in_file, shown)


def _given(flag: str, value: Any, where: str, *, in_file: bool = False) -> Given:
    if flag == CONFIG and not isinstance(value, Mapping):
        try:
            read = json.loads(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise Unreadable(where, f"{CONFIG} is not JSON: {str(value)[:60]!r}") from error
        if not isinstance(read, dict):
            raise Unreadable(where, f"{CONFIG} is not a JSON object: {str(value)[:60]!r}")
        value = read
    if flag == CONFIG:
        value = {_key(k): Fact(v, where) for k, v in value.items()}
    return Given(flag, value, where, in_file)


def from_arguments(arguments: Mapping[str, Any], where: str) -> tuple[Given, ...]:
    """Settings by name, as vLLM logs those that are not the default."""
    return tuple(
        _given(_long(name), value, where)
        for name, value in arguments.items()
        if value is not False and value is not None
    )


def merged(file: Iterable[Given], command: Iterable[Given]) -> Launch:
    """A launch of both: the command line is read last, so it wins.

    Dotted parts of a speculative config are put together and read after everything else.
    """
    given = (*file, *command)
    dotted: dict[str, Given] = {}
    for one in given:
        if one.dotted:
            before = dotted.get(one.dotted, one)
            dotted[one.dotted] = replace(one, value={**before.value, **one.value})
    return Launch((*(one for one in given if not one.dotted), *dotted.values()))


def _long(name: str) -> str:
    name = name.lstrip("-").replace("_", "-")
    return _ALIASES.get(name, name)


def _key(name: str) -> str:
    return str(name).replace("-", "_")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.fullmatch(word)


def _loose(text: str) -> Any:
    """A dotted value: JSON, or a number with a unit, or else a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = whole_number(text)
        return text if number is None else number


def _plain(value: Any) -> Any:
    """Without what the YAML parser remembers of its place."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)
