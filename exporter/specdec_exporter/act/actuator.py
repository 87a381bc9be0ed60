"""Where k is written: the protocol, and the kinds of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from specdec_exporter.act import env_file, files, lock, vllm_config
from specdec_exporter.act.change import Change
from specdec_exporter.act.errors import Refused
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.act.webhook import Webhook


class Actuator(Protocol):
    """Writes down the k that the server is to have after its next start."""

    async def read_k(self) -> int | None:
        """The k that is written down; None where it cannot be read.

        Raises:
            Refused: what is there is not understood.
        """
        ...

    async def set_k(self, change: Change) -> None:
        """Write `to_k` where `from_k` stands; does nothing where it is there already.

        Raises:
            Refused: nothing was changed.
            ActError: it is not known whether something was.
        """
        ...


class FileActuator:
    """A file whose text holds k.

    Args:
        path: of the file.
        read_k: the k of a text.
        with_k: a text with another k.
    """

    def __init__(
        self, path: Path, read_k: Callable[[str], int], with_k: Callable[[str, int], str]
    ) -> None:
        self._path = path
        self._read_k = read_k
        self._with_k = with_k

    async def read_k(self) -> int | None:
        """The k in the file."""
        return await asyncio.to_thread(self._read)

    async def set_k(self, change: Change) -> None:
        """Write another k into the file."""
        await asyncio.to_thread(self._set, change)

    def _read(self) -> int:
        try:
            return self._read_k(files.read(self._path).text)
        except Refused as error:
            raise self._named(error) from error

    def _set(self, change: Change) -> None:
        try:
            old = files.read(self._path)
            k = self._read_k(old.text)
            if k == change.to_k:
                return
            if k != change.from_k:
                raise Refused(f"k is {k} in it, not {change.from_k}: somebody else changed it")
            files.replace(old, self._with_k(old.text, change.to_k))
        except Refused as error:
            raise self._named(error) from error

    def _named(self, error: Refused) -> Refused:
        message = str(error)
        named = message.startswith(f"{self._path}: ")
        return error if named else Refused(f"{self._path}: {message}")


def new_actuator(settings: ActuatorSettings) -> Actuator:
    """The actuator that the settings ask for."""
    if settings.kind == "webhook":
        assert settings.url is not None
        assert settings.secret is not None
        return Webhook(settings.url, settings.secret.get_secret_value())
    assert settings.file is not None
    if settings.kind == "vllm-config":
        return FileActuator(settings.file, vllm_config.read_k, vllm_config.with_k)
    assert settings.variable is not None
    return FileActuator(
        settings.file,
        partial(env_file.read_k, variable=settings.variable),
        lambda text, k: env_file.with_k(text, settings.variable or "", k),
    )


def lock_path(settings: ActuatorSettings, state_folder: Path) -> Path:
    """The file whose lock the only controller of a deployment holds."""
    if settings.file is not None:
        return lock.beside(settings.file)
    return lock.for_url(settings.url or "", state_folder)
