"""Settings of what changes k: where it is written, and how the server takes it up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SecretStr,
    field_validator,
    model_validator,
)

from specdec_exporter.duration import parse_duration

Duration = Annotated[float, BeforeValidator(parse_duration)]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NEEDED = {"vllm-config": ("file",), "env-file": ("file", "variable"), "webhook": ("url", "secret")}
_PLACE = ("file", "variable", "url", "secret")


class ActuatorSettings(BaseModel):
    """How k is changed on one target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["vllm-config", "env-file", "webhook"]
    """The YAML of `vllm serve --config`, a file of environment variables, or somebody to ask."""
    file: Path | None = None
    """Absolute path of what is rewritten."""
    variable: str | None = None
    """Of the environment file: holds the number or the speculative config."""
    url: str | None = None
    """Of the webhook."""
    secret: SecretStr | None = None
    """Of the webhook's signature."""
    restart: tuple[str, ...] = ()
    """Command and arguments, run without a shell; none where a written k is taken up by itself."""
    restart_timeout: Duration = 300.0
    """Time limit of the command; with all that it started it is ended then."""
    ready_url: str | None = None
    """Answers 200 when the server is ready; the metrics page alone is asked unless given."""
    ready_timeout: Duration = 900.0
    """Time from the end of the command until the server has to serve the new k."""

    @field_validator("file")
    @classmethod
    def _file(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError(f"{str(value)!r} is not an absolute path")
        return value

    @field_validator("variable")
    @classmethod
    def _variable(cls, value: str | None) -> str | None:
        if value is not None and not _VARIABLE.fullmatch(value):
            raise ValueError(f"{value!r} is not the name of a variable")
        return value

    @field_validator("url", "ready_url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            parts = urlsplit(value)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            # What is not understood may hold a password in any of its parts.
            raise ValueError("not a URL like http://127.0.0.1:8000/health")
        return value

    @field_validator("secret")
    @classmethod
    def _secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return None
        # Files and secrets of Kubernetes often end in a newline.
        secret = value.get_secret_value().strip()
        if not secret:
            raise ValueError("the secret is empty")
        return SecretStr(secret)

    @field_validator("restart", mode="before")
    @classmethod
    def _restart(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError("expected a list, like [systemctl, restart, vllm]; no shell runs it")
        return value

    @field_validator("restart")
    @classmethod
    def _command(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and (not value[0] or any("\0" in part for part in value)):
            raise ValueError("expected the name of a command, then its arguments")
        return value

    @model_validator(mode="after")
    def _complete(self) -> ActuatorSettings:
        for name in _PLACE:
            given, needed = getattr(self, name) is not None, name in _NEEDED[self.kind]
            if given != needed:
                raise ValueError(f"{self.kind} {'needs' if needed else 'has no'} {name}")
        return self

    @property
    def applies_itself(self) -> bool:
        """Whether a k that is written is taken up without a command of ours."""
        return not self.restart
