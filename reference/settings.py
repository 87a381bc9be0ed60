"""Writes docs/settings.md from the models of the settings: `python -m reference.settings`."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, SecretStr
from pydantic.fields import FieldInfo
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.config import ENV_PREFIX, Settings, Target
from specdec_exporter.duration import format_duration, parse_duration, parse_duration_or_zero
from specdec_exporter.thresholds import Thresholds
from specdec_exporter.tuner_settings import TunerSettings

_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    SecretStr: "secret",
}
_PLACES: dict[type[BaseModel], str] = {
    Target: "one of `targets`",
    ActuatorSettings: "`actuator` of a target",
    TunerSettings: "`tuner`",
    Thresholds: "`rules`",
}


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """What stands under each field of a model, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[field.target.id] = " ".join(text.value.split())
    return found


def _is_duration(metadata: list[Any]) -> bool:
    readers = [m.func for m in metadata if isinstance(m, BeforeValidator)]
    return parse_duration in readers or parse_duration_or_zero in readers


def _type(annotation: Any, metadata: list[Any]) -> str:
    if _is_duration(metadata):
        return "duration"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0], list(annotation.__metadata__))
    if origin in (types.UnionType, typing.Union):
        kinds = [_type(a, metadata) for a in arguments if a is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return "list" if arguments[0] is Target else f"list ({_type(arguments[0], [])})"
    if origin is dict:
        return "mapping"
    if annotation in _PLACES:
        return "section"
    bounds = {type(m).__name__: getattr(m, type(m).__name__.lower()) for m in metadata if _bound(m)}
    if annotation is float and bounds == {"Ge": 0.0, "Le": 1.0}:
        return "0 to 1"
    words = [_WORDS[annotation]]
    words += [f"from {bounds['Ge']:g}"] if "Ge" in bounds else []
    words += [f"to {bounds['Le']:g}"] if "Le" in bounds else []
    words += [f"above {bounds['Gt']:g}"] if "Gt" in bounds else []
    return " ".join(words)


def _bound(metadata: Any) -> bool:
    return type(metadata).__name__ in ("Ge", "Gt", "Le")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    metadata = list(field.metadata)
    if typing.get_origin(field.annotation) is tuple:
        (item, *_) = typing.get_args(field.annotation)
        metadata = list(getattr(item, "__metadata__", ()))
        return ", ".join(f"`{_value(v, metadata)}`" for v in value)
    if value in (None, "", {}) or isinstance(value, BaseModel):
        return ""
    return f"`{_value(value, metadata)}`"


def _value(value: Any, metadata: list[Any]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return format_duration(value) if _is_duration(metadata) else f"{value:g}"
    return str(value)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    said = docstrings(model)
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        kind = _type(field.annotation, list(field.metadata))
        meaning = said.get(name, "").replace("|", "\\|")
        yield f"| `{field.alias or name}` | {kind} | {_default(field)} | {meaning} |"


def _rules() -> Iterator[str]:
    sections: dict[str, type[BaseModel]] = {}
    plain: dict[str, FieldInfo] = {}
    for name, field in Thresholds.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            sections[name] = field.annotation
        else:
            plain[name] = field
    said = docstrings(Thresholds)
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in plain.items():
        kind = _type(field.annotation, list(field.metadata))
        yield f"| `{name}` | {kind} | {_default(field)} | {said[name]} |"
    yield ""
    yield "Each rule is a section of its own, with these settings and defaults:"
    yield ""
    yield "| rule | fires on | settings |"
    yield "|---|---|---|"
    for name, section in sections.items():
        values = ", ".join(
            f"`{field.alias or key}: {_default(field).strip('`')}`"
            for key, field in section.model_fields.items()
        )
        yield f"| `{name}` | {' '.join((section.__doc__ or '').split())} | {values} |"


def reference() -> Iterator[str]:
    """Lines of docs/settings.md."""
    yield "# Settings"
    yield ""
    yield "Generated by `make docs`. Flags outrank variables of the environment, which outrank the"
    yield f"YAML file of `--config` (or `{ENV_PREFIX}CONFIG`). A setting of the top level is also the"
    yield f"variable `{ENV_PREFIX}` and its name in capitals; lists there are separated by commas, and"
    yield "sections are JSON. A duration is written as Prometheus does: `5s`, `1m30s`, `500ms`. A key"
    yield "that does not exist is an error that names the nearest one."
    yield ""
    yield "## Top level"
    yield ""
    yield from _rows(Settings)
    for model, place in _PLACES.items():
        yield ""
        yield f"## {place[0].upper()}{place[1:]}"
        yield ""
        if model is Target:
            yield "A mapping of these; a URL or `NAME=URL` is short for one."
            yield ""
        yield from _rules() if model is Thresholds else _rows(model)


if __name__ == "__main__":
    print("\n".join(reference()))
