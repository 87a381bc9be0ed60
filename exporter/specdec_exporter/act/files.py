"""A configuration file, read and replaced whole: after a crash it is the old one or the new one.

It knows nothing of what is in the file.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specdec_exporter.act.errors import Refused

_MOST_BYTES = 1_000_000
_ADVICE = {
    errno.EBUSY: "; it is a mount of its own: mount its folder instead",
    errno.EPERM: "; only its owner, or root, can leave it to its owner",
    errno.EACCES: "; its folder has to be writable",
}


@dataclass(frozen=True, slots=True)
class Read:
    """A file as it was when it was read."""

    path: Path
    """As the operator names it."""
    place: Path
    """Where the bytes are; another path in the same folder if `path` is a link."""
    text: str


def read(path: Path) -> Read:
    """The text of a file.

    Raises:
        Refused: it cannot be read, or could not be replaced safely.
    """
    place = _place(path)
    try:
        with place.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise Refused(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _MOST_BYTES:
        raise Refused(f"{path}: over {_MOST_BYTES} bytes; is this the right file?")
    try:
        return Read(path, place, data.decode())
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: not UTF-8 at byte {error.start}") from error


def replace(old: Read, text: str) -> None:
    """Put another text in the place of one that was read; owner, mode and attributes stay.

    Nobody who opens the file sees half of it, whenever this process or the machine ends. What
    somebody else writes in the moment between the last look and the renaming is lost: the system
    has no call that compares and renames in one.

    Raises:
        Refused: the file has changed since, or the folder cannot be written; nothing was replaced.
    """
    temporary = old.place.with_name(f".{old.place.name}.specdec-new")
    try:
        _write(temporary, text.encode(), like=old.place)
        if read(old.path) != old:
            raise Refused(f"{old.path}: somebody changed it just now; nothing was written")
        os.replace(temporary, old.place)
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "")
        raise Refused(f"{old.path}: cannot be replaced ({error.strerror}){advice}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    # The new file is in force, whether or not its name is already safe on the disk.
    with suppress(OSError):
        _sync_folder(old.place.parent)


def _place(path: Path) -> Path:
    try:
        place = path.resolve(strict=True)
        folder = path.parent.resolve(strict=True)
        status = place.stat()
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise Refused(f"{path}: cannot be read ({why})") from error
    if place.parent != folder:
        raise Refused(f"{path}: a link to {place}, out of its folder; name that file itself")
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"{path}: not a regular file")
    if status.st_nlink > 1:
        raise Refused(f"{path}: has {status.st_nlink} hard links, which replacing it would part")
    return place


def _write(path: Path, data: bytes, *, like: Path) -> None:
    # Left behind by a process that was killed; the lock says that it is nobody else's.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        status = like.stat()
        if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(descriptor, status.st_uid, status.st_gid)
        # Attributes are where access lists are kept.
        shutil.copystat(like, path)
        os.utime(path)
        os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
