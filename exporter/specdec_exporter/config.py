"""Settings: flags over `SPECDEC_*` environment over a YAML file, checked as a whole.

A value that is wrong, or a key that does not exist, is an error that names its place. Loading makes
a new frozen value each time, so a reload that fails leaves the old one as it was.
"""

from __future__ import annotations

import difflib
import inspect
import ipaddress
import json
import os
import re
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError, YAMLStreamError

from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.duration import parse_duration
from specdec_exporter.thresholds import Ratio, Thresholds
from specdec_exporter.tuner_settings import TunerSettings

ENV_PREFIX = "SPECDEC_"
DEFAULT_TIMEOUT_SECONDS = 10.0
DEFAULT_INFLATION = 13.0
"""Requests of some 150 drafts show about this much."""

_LABEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
# Kubernetes puts these into the pods beside a Service whose name begins with "specdec".
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?)")


Duration = Annotated[float, BeforeValidator(parse_duration)]


def _split(value: object) -> object:
    """A string that carries a list, as environment variables do, into its parts.

    It is a JSON array, or parts between commas.
    """
    if not isinstance(value, str):
        return value
    try:
        parts = json.loads(value)
    except (ValueError, RecursionError):
        parts = None
    if isinstance(parts, list):
        return parts
    return [part for item in value.split(",") if (part := item.strip())]


def _mapping(value: object) -> object:
    """A string that carries a mapping, as environment variables do, as that mapping."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("expected a mapping, written as JSON") from None
    return value


def _encodable(value: str) -> str:
    """Refuses what no page could carry, such as bytes of the environment that are not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("there are characters in it that are not Unicode") from error
    return value


Text = Annotated[str, AfterValidator(_encodable)]


class Target(BaseModel):
    """One server to watch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Text
    """Base URL of the server, or the full URL of its metrics page."""
    name: Text = ""
    """The `target` label; host:port unless given."""
    metric_prefix: str = ""
    """What a proxy puts in front of each of the server's names, such as `ray_`."""
    labels: dict[str, Text] = Field(default_factory=dict)
    """Labels of your own, shown on `specdec_target_info`."""

    revision: Text = ""
    """Of the drafter or the images, as you count them; a new one has a reference of its own."""
    reference: tuple[Ratio, ...] | Path | None = None
    """Acceptance to compare with, by position, or a file of `take-reference`; learned if none."""

    actuator: ActuatorSettings | None = None
    """How k is changed on this server; without one the tuner recommends only."""
    role: Literal["serving", "baseline"] = "serving"
    """`baseline`: a replica without speculation, by which others of its model are measured."""
    baseline: float | Path | None = None
    """TPOT without speculation: a file of `calibrate`, or one duration for any load."""
    sweep: Path | None = None
    """The `sweep.json` of a `bench sweep` on this hardware: what each k costs, and a baseline."""

    @field_validator("baseline", mode="before")
    @classmethod
    def _baseline(cls, value: object) -> object:
        if value is None or isinstance(value, Path | float):
            return value
        try:
            return parse_duration(value)
        except ValueError:
            if isinstance(value, str) and value:
                return Path(value)
            raise ValueError("expected a duration like 8ms, or a file of calibrate") from None

    @field_validator("reference", mode="before")
    @classmethod
    def _reference(cls, value: object) -> object:
        if isinstance(value, list | tuple):
            numbers = all(isinstance(p, int | float) and not isinstance(p, bool) for p in value)
            falling = numbers and all(1 >= a >= b >= 0 for a, b in pairwise((1, *value)))
            if not value or not falling or not value[0]:
                raise ValueError("expected ratios in 0..1 that do not increase, like [0.47, 0.24]")
            return tuple(map(float, value))
        if value is None or isinstance(value, Path) or (isinstance(value, str) and value):
            return value if value is None else Path(str(value))
        raise ValueError("expected ratios by position, like [0.47, 0.24], or a file")

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        name, equals, url = value.partition("=")
        if equals and not set(name) & set("/:?"):
            return {"name": name.strip(), "url": url.strip()}
        return {"url": value.strip()}

    @field_validator("url")
    @classmethod
    def _metrics_url(cls, value: str) -> str:
        # An address that is not understood may hold a password in any of its parts.
        shown = "the address" if set(value) & set("@?#") else repr(value)
        problem = ValueError(f"{shown} is not a URL like http://127.0.0.1:8000")
        try:
            parts = urlsplit(value if "://" in value else f"http://{value}")
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            raise problem from None
        if not usable:
            raise problem
        if "@" in parts.path:
            raise ValueError("there is an @ in the path; a / in a password is written %2F")
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        return urlunsplit(parts._replace(path=path, fragment=""))

    @field_validator("metric_prefix")
    @classmethod
    def _prefix(cls, value: str) -> str:
        if value and not _PREFIX.fullmatch(value):
            raise ValueError(f"{value!r} cannot begin the name of a metric")
        return value

    @field_validator("labels")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        for label in value:
            if not _LABEL_NAME.fullmatch(label) or label.startswith("__"):
                raise ValueError(f"{label!r} is not a label name")
            if label in ("target", "url", "job", "instance"):
                raise ValueError(f"the label {label!r} is taken")
        return value

    @model_validator(mode="after")
    def _named(self) -> Target:
        if not self.name:
            object.__setattr__(self, "name", _host_port(urlsplit(self.url)))
        return self

    def same_series(self, other: Target) -> bool:
        """Whether both read the same series of the same page, so that history can go on."""
        return (self.url, self.metric_prefix) == (other.url, other.metric_prefix)

    @property
    def host_port(self) -> str:
        """As Prometheus's `instance` names it when it scrapes the server itself."""
        return _host_port(urlsplit(self.url))

    @property
    def shown_url(self) -> str:
        """The URL without what may be secret: user, password and query."""
        return _shown(urlsplit(self.url))


def _host_port(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def _shown(parts: SplitResult) -> str:
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc, query="", fragment=""))


class Settings(BaseSettings):
    """All settings, with their defaults."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__"
    )

    targets: Annotated[tuple[Target, ...], NoDecode, BeforeValidator(_split)] = ()
    """Servers to watch: a list of URLs, of NAME=URL, or of mappings."""
    listen: str = "127.0.0.1:19185"
    """HOST:PORT to serve on; `:PORT` is every IPv4 address of the machine."""
    interval: Duration = 5.0
    """Time between scrapes of a target."""
    timeout: Duration | None = None
    """Time limit of one scrape; the interval unless given, but at most 10s."""
    windows: Annotated[tuple[Duration, ...], NoDecode, BeforeValidator(_split)] = (300.0,)
    """Spans that figures are derived over; with several, each carries a `window` label."""
    max_page_bytes: int = Field(default=16_000_000, ge=1)
    """A longer page, counted after decompression, is refused."""
    variance_inflation: float = Field(default=DEFAULT_INFLATION, ge=1.0, allow_inf_nan=False)
    """Assumed overdispersion of accepted tokens until four hours of a target have been seen."""
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Host names, besides IP addresses and localhost, by which the exporter may be addressed."""
    admin_token: SecretStr | None = None
    """Bearer token for requests that change something; without one there are none."""
    tuner: Annotated[TunerSettings, NoDecode, BeforeValidator(_mapping)] = TunerSettings()
    """How k is chosen, and whether it is changed."""
    state_file: Path | None = None
    """SQLite file for what outlives the process; one in the user's state folder unless given."""
    rules: Annotated[Thresholds, NoDecode, BeforeValidator(_mapping)] = Thresholds()
    """Which rules are judged, and by what numbers."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged, on standard error."""

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        listen_address(value)
        return value

    @field_validator("admin_token")
    @classmethod
    def _token(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        # Files and secrets of Kubernetes often end in a newline, which no header can carry.
        token = value.get_secret_value().strip()
        if not token:
            raise ValueError("the token is empty; leave the setting out to have none")
        return SecretStr(token)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not _HOST_NAME.fullmatch(host):
                raise ValueError(f"{host!r} is not a host name; give it without scheme and port")
        return value

    @field_validator("windows")
    @classmethod
    def _windows(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or len(set(value)) != len(value):
            raise ValueError("name one window or several different ones")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        names = [target.name for target in self.targets]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two targets are called {name!r}; give each a name of its own")
        if self.timeout is not None and self.timeout > self.interval:
            raise ValueError(
                f"timeout {self.timeout:g}s is longer than the interval {self.interval:g}s"
            )
        if min(self.windows) < self.interval:
            raise ValueError(
                f"window {min(self.windows):g}s is shorter than the interval {self.interval:g}s"
            )
        return self

    @property
    def scrape_timeout(self) -> float:
        """Time limit of one scrape in seconds."""
        return self.timeout or min(self.interval, DEFAULT_TIMEOUT_SECONDS)


def listen_address(value: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; IPv6 in brackets.

    Raises:
        ValueError: it is not of that form.
    """
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    usable = colon and port.isdecimal() and int(port) <= 65535 and value.isprintable()
    if not usable or (":" in host and not bracketed):
        raise ValueError(f"{value!r} is not HOST:PORT, such as 127.0.0.1:19185 or [::1]:19185")
    if bracketed:
        host = host[1:-1]
        ipaddress.IPv6Address(host)
    return host or "0.0.0.0", int(port)


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in the settings, and where it stands."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(Exception):
    """Settings that cannot be used; one problem for each mistake."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Read and check the settings.

    Args:
        file: YAML file, or None.
        flags: values from the command line, over all others.
        environ: the environment; `os.environ` unless given.

    Raises:
        ConfigError: naming every mistake by file and line, variable or flag.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    environ = os.environ if environ is None else environ
    document = CommentedMap() if file is None else _read_yaml(file)
    variables = {
        name[len(ENV_PREFIX) :].lower(): name for name in environ if name.startswith(ENV_PREFIX)
    }
    problems = list(_unknown_variables(variables))
    try:
        settings = _settings(document, flags, {v: environ[v] for v in variables.values()})
    except ValidationError as error:
        problems += [
            Problem(_place(e["loc"], file, document, flags, variables), _message(e))
            for e in error.errors(include_url=False)
        ]
    if problems:
        raise ConfigError(sorted(problems, key=_line_told))
    return settings


def _settings(
    document: CommentedMap, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    class Loaded(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            # Both in one shape: a mapping of settings. Flags first, the file last.
            from_environ = {
                name: value
                for key, value in environ.items()
                if (name := key[len(ENV_PREFIX) :].lower()) in Settings.model_fields
            }
            return tuple(
                InitSettingsSource(settings_cls, init_kwargs=dict(source))
                for source in (flags, from_environ, document)
            )

    return Loaded()


def _read_yaml(file: Path) -> CommentedMap:
    try:
        text = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            # An anchor may be given anew; that is YAML, and no news for the person at the terminal.
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            document = YAML(typ="rt").load(text)
    except OSError as error:
        raise ConfigError([Problem(str(file), error.strerror or str(error))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(file), f"not UTF-8 at byte {error.start}")]) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        what = " ".join((error.problem or "not YAML").split())
        if isinstance(error, DuplicateKeyError):
            what = what.partition(" with value ")[0]  # A value may be the token.
        raise ConfigError([Problem(place, what)]) from error
    except (YAMLError, YAMLStreamError) as error:
        what = " ".join(str(error).split())
        raise ConfigError([Problem(str(file), f"not YAML: {what}")]) from error
    except RecursionError as error:
        raise ConfigError([Problem(str(file), "nested too deeply")]) from error
    except Exception as error:
        # What a tag or a digit too many brings out of the parser: ValueError, IndexError and such.
        # Their texts quote values, so they are not shown.
        what = "a value cannot be read as YAML; put it in quotes if it is meant as text"
        raise ConfigError([Problem(str(file), what)]) from error
    if document is None:
        return CommentedMap()
    if not isinstance(document, CommentedMap):
        raise ConfigError([Problem(f"{file}:1", "expected settings as `key: value` lines")])
    nameless = [key for key in document if not isinstance(key, str)]
    if nameless:
        raise ConfigError(
            Problem(f"{file}:{_line(document, key) or 1}", "a setting's name is a plain word")
            for key in nameless
        )
    return document


def _unknown_variables(variables: Mapping[str, str]) -> Iterable[Problem]:
    for key, name in variables.items():
        known = key in Settings.model_fields or key == "config"
        if not known and not _SERVICE_LINK.fullmatch(name):
            yield Problem(name, _unknown(key, Settings.model_fields, ENV_PREFIX))


def _unknown(key: str, known: Iterable[str], prefix: str = "") -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    shown = [f"{prefix}{n.upper() if prefix else n}" for n in (near or names)]
    return (
        f"no such setting; did you mean {shown[0]}?"
        if near
        else (f"no such setting; there are {', '.join(shown)}")
    )


def _message(error: Any) -> str:
    loc: tuple[str | int, ...] = error["loc"]
    if error["type"] == "extra_forbidden":
        key = " ".join(str(loc[-1]).split())
        return f"{key}: {_unknown(key, _fields_at(loc[:-1]))}"
    message = _EXPECTED.get(error["type"], str(error["msg"]).removeprefix("Value error, "))
    if error["type"] == "model_type" and loc[0] == "targets":
        message = "expected a URL or a mapping with one"
    path = ".".join(str(part) for part in loc)
    return f"{path}: {message}" if path else message


_EXPECTED = {
    "missing": "it is missing, and is needed",
    "tuple_type": "expected a list",
    "model_type": "expected a mapping of settings",
}
"""Errors that pydantic words for programmers."""


def _fields_at(loc: Sequence[str | int]) -> Iterable[str]:
    """The settings that may stand at a place, by walking the models' annotations."""
    model: Any = Settings
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[Any]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _place(
    loc: Sequence[str | int],
    file: Path | None,
    document: CommentedMap,
    flags: Mapping[str, Any],
    variables: Mapping[str, str],
) -> str:
    top = str(loc[0]) if loc else ""
    if top in flags:
        return f"--{_FLAG_NAMES.get(top, top)}"
    if top in variables:
        return variables[top]
    if file is None or (not loc and (flags or variables)):
        return "settings"
    line = 1
    node: Any = document
    for part in loc:
        inside = isinstance(node, CommentedMap) and part in node
        if not inside and not (isinstance(node, CommentedSeq) and isinstance(part, int)):
            break
        line = _line(node, part) or line
        node = node[part]
    return f"{file}:{line}"


def _line_told(problem: Problem) -> int:
    """The line of a mistake in the file; 0 for a variable or a flag, which has none."""
    line = problem.place.rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def _line(node: CommentedMap | CommentedSeq, part: Any) -> int | None:
    """The line of one part of a document; None for what a merge key or an alias brought in."""
    position = (node.lc.data or {}).get(part)
    return position[0] + 1 if position else None


_FLAG_NAMES = {"targets": "target"}
