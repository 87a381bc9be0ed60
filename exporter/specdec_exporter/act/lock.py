"""One controller per deployment: a lock that ends with its process, however that ends.

The lock file lies beside the file that is changed, not beside the state: two exporters with a state
of their own each would not see each other's, but they meet at the file. It is not the file itself,
since that is replaced by every change and the lock would stay on the old one. Where nothing but a
webhook is called it lies in the state folder, and keeps apart the exporters that share one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec_exporter.act.errors import Refused

_RETRY_SECONDS = 0.05


def beside(file: Path) -> Path:
    """The lock file of a file that is changed; the same by whichever link the file is named."""
    place = file.resolve()
    return place.with_name(f".{place.name}.specdec-lock")


def for_url(url: str, state_folder: Path) -> Path:
    """The lock file of a webhook."""
    return state_folder / f"webhook-{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"


class ControllerLock:
    """Held from `acquire` to `release`, or to the end of the process.

    The file stays behind: removing it would let two processes hold locks on two files of one name.

    Args:
        path: of the lock file.
        patience: seconds to wait for another process. A command that was being started when the
            exporter was killed has the lock until it is loaded, and whoever comes at once meets it.
    """

    def __init__(self, path: Path, patience: float = 2.0) -> None:
        self.path = path
        self._patience = patience
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; does nothing where it is held by this object already. It may block.

        Raises:
            Refused: another process holds it, or there can be no such file.
        """
        if self._descriptor is not None:
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Refused(f"{self.path}: cannot be locked ({error.strerror})") from error
        try:
            self._lock(descriptor)
        except OSError as error:
            owner = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            os.close(descriptor)
            held = isinstance(error, BlockingIOError)
            by = f"process {owner}" if owner.isdecimal() else "another process"
            why = f"{by} acts on this deployment; only one may" if held else error.strerror
            raise Refused(f"{self.path}: {why}") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def release(self) -> None:
        """Give the lock back; does nothing where it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
