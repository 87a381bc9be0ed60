"""The store: what is written is there afterwards, whatever happens to the process."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from specdec_exporter.store import Store, StoreError

WRITER = """
import sys
from pathlib import Path
from specdec_exporter.store import Store
store = Store(Path(sys.argv[1]))
for i in range(10**9):
    store.put("count", {"a": i, "b": i})
    store.log("count", float(i), {"i": i})
    print(i, flush=True)
"""


def test_what_is_put_is_there_for_the_next_process(tmp_path: Path) -> None:
    first = Store(tmp_path / "deep" / "state.db")
    first.put("rules", {"m": {"a": [1, 2.5, None]}, "n": "text"})
    first.log("audit", 12.5, {"what": "k 2 to 1"})
    first.close()
    second = Store(tmp_path / "deep" / "state.db")
    assert second.documents("rules") == {"m": {"a": [1, 2.5, None]}, "n": "text"}
    assert second.get("rules", "m") == {"a": [1, 2.5, None]}
    assert second.get("rules", "nobody") is None
    assert second.logged("audit") == [{"id": 1, "t": 12.5, "what": "k 2 to 1"}]
    second.close()


def test_kinds_do_not_see_each_other_and_none_removes() -> None:
    store = Store(None)
    store.put("a", {"x": 1, "y": 2})
    store.put("b", {"x": 3})
    store.put("a", {"x": None, "z": 4})
    assert store.documents("a") == {"y": 2, "z": 4}
    assert store.documents("b") == {"x": 3}
    store.close()


def test_the_log_gives_the_newest_first_and_no_more_than_asked_for() -> None:
    store = Store(None)
    numbers = [store.log("audit", float(i), {"i": i}) for i in range(5)]
    assert numbers == sorted(set(numbers))
    assert [entry["i"] for entry in store.logged("audit", limit=3)] == [4, 3, 2]
    store.close()


def test_an_entry_that_is_damaged_is_left_out_and_the_others_are_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    for i in range(4):
        store.log("audit", float(i), {"i": i})
    other = sqlite3.connect(tmp_path / "state.db")
    with other:
        other.execute("UPDATE log SET value = '{' WHERE id = 2")
        other.execute("UPDATE log SET value = '[1]' WHERE id = 3")
    other.close()
    assert [entry["i"] for entry in store.logged("audit")] == [3, 0]
    store.close()


def test_documents_of_one_put_are_written_all_or_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    store.put("a", {"x": 1})
    with pytest.raises(TypeError):
        store.put("a", {"x": 2, "y": object()})
    assert store.documents("a") == {"x": 1}
    store.close()


@pytest.mark.parametrize("content", [b"this is no database at all, and long enough to be read"])
def test_a_file_that_is_no_database_is_one_line_that_names_it_and_stays_as_it_was(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        Store(file)
    assert str(caught.value) == f"{file}: file is not a database; move it away to begin anew"
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "state.db"
    with pytest.raises(StoreError) as caught:
        Store(path)
    assert str(caught.value).startswith(f"{path}: cannot be opened (")
    assert "\n" not in str(caught.value)


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="newer specdec-exporter"):
        Store(file)


def test_a_damaged_document_does_not_hide_the_others(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    store = Store(file)
    store.put("a", {"x": 1, "y": 2})
    store.close()
    with sqlite3.connect(file) as database:
        database.execute("UPDATE documents SET value = '{' WHERE key = 'x'")
    database.close()
    store = Store(file)
    assert store.documents("a") == {"y": 2}
    store.close()


def test_a_disk_that_refuses_is_a_store_error_and_what_was_there_stays(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    store.put("a", {"x": 1})
    other = sqlite3.connect(tmp_path / "state.db", timeout=0)
    store._database.execute("PRAGMA busy_timeout = 1")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="cannot be written"):
        store.put("a", {"x": 2})
    with pytest.raises(StoreError, match="cannot be written"):
        store.log("a", 1.0, {})
    other.rollback()
    other.close()
    assert store.documents("a") == {"x": 1}
    store.close()
    with pytest.raises(StoreError, match="cannot be read"):
        store.documents("a")


def test_a_process_killed_at_any_moment_has_lost_at_most_the_write_it_was_in(
    tmp_path: Path,
) -> None:
    for moment in range(8):
        file = tmp_path / f"{moment}.db"
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, file], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.003 * moment)
            os.kill(process.pid, signal.SIGKILL)
            said = [int(line) for line in process.stdout.read().split()]
        store = Store(file)
        found = store.documents("count")
        done = said[-1] if said else 0
        assert found["a"] == found["b"]
        assert found["a"] in (done, done + 1)
        assert store.logged("count", 1)[0]["i"] in (done, done + 1)
        assert json.loads(json.dumps(found)) == found
        store.close()
