"""Whether a value fits a JSON schema, for the part of the language that answers are checked with.

A schema that uses more is refused when the prompt file is read, so nothing is passed over in
silence. That part is a hundred lines, so no library is needed for it: `jsonschema` would bring four
more distributions with it, one of them compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: (
        (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v % 1 == 0)
    ),
}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda v, limit: not _TYPES["number"](v) or v >= limit,
    "maximum": lambda v, limit: not _TYPES["number"](v) or v <= limit,
    "minLength": lambda v, limit: not isinstance(v, str) or len(v) >= limit,
    "maxLength": lambda v, limit: not isinstance(v, str) or len(v) <= limit,
    "minItems": lambda v, limit: not isinstance(v, list) or len(v) >= limit,
    "maxItems": lambda v, limit: not isinstance(v, list) or len(v) <= limit,
}
_WORDS = {"title", "description", "$schema"}
KEYWORDS = {
    *(
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "pattern",
    ),
    *_LIMITS,
}
"""What a schema may use beside words for people."""


def check_schema(schema: Any, place: str = "schema") -> None:
    """See that a schema uses what is known here.

    Raises:
        ValueError: names the place and the keyword.
    """
    if not isinstance(schema, dict):
        raise ValueError(f"{place}: expected a mapping of keywords")
    for keyword, value in schema.items():
        here = f"{place}.{keyword}"
        if keyword not in KEYWORDS | _WORDS:
            known = ", ".join(sorted(KEYWORDS))
            raise ValueError(f"{here}: not supported; there are {known}")
        if keyword == "type" and not {*_types(value)} <= _TYPES.keys():
            raise ValueError(f"{here}: no such type; there are {', '.join(_TYPES)}")
        if keyword in _LIMITS and not _TYPES["number"](value):
            raise ValueError(f"{here}: expected a number")
        if keyword in ("required", "enum") and not isinstance(value, list):
            raise ValueError(f"{here}: expected a list")
        if keyword == "pattern":
            try:
                re.compile(value)
            except (re.error, TypeError) as error:
                raise ValueError(f"{here}: not a regular expression ({error})") from error
        if keyword == "properties":
            if not isinstance(value, dict):
                raise ValueError(f"{here}: expected a mapping of names to schemas")
            for name, part in value.items():
                check_schema(part, f"{here}.{name}")
        if keyword == "items" or (keyword == "additionalProperties" and value is not False):
            check_schema({} if value is True else value, here)


def mismatches(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Where a value does not fit, and why; nothing where it fits."""
    if "type" in schema and not any(_TYPES[name](value) for name in _types(schema["type"])):
        yield f"{place} is not {' or '.join(_types(schema['type']))}"
        return
    if "const" in schema and not same(value, schema["const"]):
        yield f"{place} is not {schema['const']!r}"
    if "enum" in schema and not any(same(value, one) for one in schema["enum"]):
        yield f"{place} is none of {schema['enum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{place} does not match {schema['pattern']}"
    for keyword, fits in _LIMITS.items():
        if keyword in schema and not fits(value, schema[keyword]):
            yield f"{place} is beyond {keyword} {schema[keyword]}"
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        yield from (f"{place}.{n} is missing" for n in schema.get("required", ()) if n not in value)
        others = schema.get("additionalProperties", True)
        for name, part in value.items():
            if name in parts:
                yield from mismatches(part, parts[name], f"{place}.{name}")
            elif others is False:
                yield f"{place}.{name} is not in the schema"
            elif isinstance(others, dict):
                yield from mismatches(part, others, f"{place}.{name}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for i, item in enumerate(value):
            yield from mismatches(item, schema["items"], f"{place}[{i}]")


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


def _types(value: Any) -> list[str]:
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]
