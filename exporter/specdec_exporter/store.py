"""What must outlive the process: JSON documents and a log, in one SQLite file.

It knows nothing of what the documents mean. Every write is one transaction in write-ahead mode, so
a process that is killed at any moment loses at most the write that it was in.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, t REAL NOT NULL, value TEXT NOT NULL
);
"""


class StoreError(Exception):
    """The file cannot be used; the message is one line that names it and says why."""


class Store:
    """Documents by kind and key, and entries in the order in which they were logged.

    It may be used from several threads, one at a time. The file is closed with it at the latest.

    Args:
        path: of the file, made if need be; None keeps everything in memory.

    Raises:
        StoreError: there can be no such file.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                ":memory:" if path is None else path, check_same_thread=False, timeout=5.0
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: cannot be opened ({_why(error)})") from error
        weakref.finalize(self, self._database.close)
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._database.close()
            raise StoreError(f"{path}: {_why(error)}; move it away to begin anew") from error
        except StoreError:
            self._database.close()
            raise

    def _prepare(self) -> None:
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise StoreError(f"{self.path}: written by a newer specdec-exporter; update this one")
        self._database.execute("PRAGMA journal_mode = WAL")
        # In write-ahead mode this survives the death of the process; that of the machine may cost
        # the last writes, but not the file.
        self._database.execute("PRAGMA synchronous = NORMAL")
        with self._database:
            self._database.executescript(_SCHEMA)
            self._database.execute(f"PRAGMA user_version = {_VERSION}")

    def get(self, kind: str, key: str) -> Any:
        """A document, or None where there is none."""
        return self.documents(kind, key).get(key)

    def documents(self, kind: str, key: str | None = None) -> dict[str, Any]:
        """All documents of a kind by key, or the one of a key; one that is damaged is left out."""
        where, arguments = ("", (kind,)) if key is None else (" AND key = ?", (kind, key))
        query = f"SELECT key, value FROM documents WHERE kind = ?{where} ORDER BY key"
        found = {}
        for name, value in self._read(query, arguments):
            with suppress(ValueError):
                found[name] = json.loads(value)
        return found

    def put(self, kind: str, documents: Mapping[str, Any]) -> None:
        """Write documents by key, all or none; a value of None removes one.

        Raises:
            StoreError: the file cannot be written.
        """
        rows = [(kind, key, json.dumps(v)) for key, v in documents.items() if v is not None]
        gone = [(kind, key) for key, value in documents.items() if value is None]
        with self._lock:
            try:
                with self._database:
                    self._database.executemany(
                        "INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", rows
                    )
                    self._database.executemany(
                        "DELETE FROM documents WHERE kind = ? AND key = ?", gone
                    )
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: cannot be written ({_why(error)})") from error

    def log(self, kind: str, t: float, entry: Mapping[str, Any]) -> int:
        """Add an entry; returns its number.

        Raises:
            StoreError: the file cannot be written.
        """
        with self._lock:
            try:
                with self._database:
                    cursor = self._database.execute(
                        "INSERT INTO log (kind, t, value) VALUES (?, ?, ?)",
                        (kind, t, json.dumps(entry)),
                    )
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: cannot be written ({_why(error)})") from error
        return int(cursor.lastrowid or 0)

    def logged(self, kind: str, limit: int = 100) -> list[dict[str, Any]]:
        """The last entries of a kind, newest first, each with its `id` and `t`.

        One that is damaged is left out.

        Raises:
            StoreError: the file cannot be read.
        """
        query = "SELECT id, t, value FROM log WHERE kind = ? ORDER BY id DESC LIMIT ?"
        found = []
        for number, t, value in self._read(query, (kind, limit)):
            with suppress(ValueError, TypeError):
                found.append({"id": number, "t": t, **json.loads(value)})
        return found

    def _read(self, query: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._database.execute(query, arguments).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"{self.path}: cannot be read ({_why(error)})") from error

    def close(self) -> None:
        """Close the file; nothing may be asked afterwards."""
        with self._lock:
            self._database.close()


def _why(error: OSError | sqlite3.Error) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
