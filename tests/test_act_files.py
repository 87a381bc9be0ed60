"""A file is replaced whole and stays whose it was, or is refused; and only one process acts on it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from specdec_exporter.act import files
from specdec_exporter.act.errors import Refused
from specdec_exporter.act.lock import ControllerLock, beside, for_url

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"spec-tokens: 2\r\n# \xc3\xa9\n")
    return path


def test_a_file_is_read_and_replaced_byte_for_byte(config: Path) -> None:
    read = files.read(config)
    assert read.text == "spec-tokens: 2\r\n# é\n"
    files.replace(read, read.text.replace("2", "1"))
    assert config.read_bytes() == b"spec-tokens: 1\r\n# \xc3\xa9\n"
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o2664])
def test_mode_and_attributes_stay(config: Path, mode: int) -> None:
    config.chmod(mode)
    try:
        os.setxattr(config, "user.origin", b"puppet")
        attributes = True
    except OSError:
        attributes = False
    files.replace(files.read(config), "spec-tokens: 1\n")
    assert stat.S_IMODE(config.stat().st_mode) == mode
    if attributes:
        assert os.getxattr(config, "user.origin") == b"puppet"


@as_root
def test_the_owner_stays(config: Path) -> None:
    os.chown(config, 12345, 23456)
    files.replace(files.read(config), "spec-tokens: 1\n")
    assert (config.stat().st_uid, config.stat().st_gid) == (12345, 23456)


def test_the_time_of_the_file_is_that_of_the_change(config: Path) -> None:
    os.utime(config, (1, 1))
    files.replace(files.read(config), "spec-tokens: 1\n")
    assert config.stat().st_mtime > 1e9


def test_whoever_has_the_file_open_sees_one_whole_text(config: Path) -> None:
    with config.open() as reader:
        files.replace(files.read(config), "x" * 100_000)
        assert reader.read() == "spec-tokens: 2\n# é\n"


def test_a_file_that_changed_since_it_was_read_is_left_alone(config: Path) -> None:
    read = files.read(config)
    config.write_text("spec-tokens: 4\n")
    with pytest.raises(Refused, match=r"config\.yaml: somebody changed it just now; nothing was"):
        files.replace(read, "spec-tokens: 1\n")
    assert config.read_text() == "spec-tokens: 4\n"
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


def test_a_file_that_is_gone_since_is_not_made_anew(config: Path) -> None:
    read = files.read(config)
    config.unlink()
    with pytest.raises(Refused, match=r"cannot be replaced|cannot be read"):
        files.replace(read, "spec-tokens: 1\n")
    assert list(config.parent.iterdir()) == []


def test_a_link_in_the_folder_stays_a_link(config: Path) -> None:
    link = config.with_name("current.yaml")
    link.symlink_to("config.yaml")
    files.replace(files.read(link), "spec-tokens: 1\n")
    assert link.is_symlink()
    assert config.read_text() == "spec-tokens: 1\n"


def test_a_link_that_was_turned_since_is_refused(config: Path) -> None:
    other = config.with_name("other.yaml")
    other.write_bytes(config.read_bytes())
    link = config.with_name("current.yaml")
    link.symlink_to("config.yaml")
    read = files.read(link)
    link.unlink()
    link.symlink_to("other.yaml")
    with pytest.raises(Refused, match="somebody changed it"):
        files.replace(read, "spec-tokens: 1\n")


def test_a_folder_may_be_reached_by_a_link(config: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link = tmp_path / "deep" / "etc"
    link.symlink_to(config.parent)
    files.replace(files.read(link / "config.yaml"), "spec-tokens: 1\n")
    assert config.read_text() == "spec-tokens: 1\n"


def test_what_cannot_be_replaced_safely_is_refused(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    out = folder / "config.yaml"
    out.symlink_to(config)
    loop = folder / "loop"
    loop.symlink_to("loop")
    os.mkfifo(folder / "fifo")
    os.link(config, folder / "hard")
    large, latin = tmp_path / "large", tmp_path / "latin"
    large.write_bytes(b"#" * 1_000_001)
    latin.write_bytes(b"a: \xe9\n")
    for path, why in (
        (out, f"a link to {config}, out of its folder; name that file itself"),
        (loop, "cannot be read"),
        (folder / "nothing", "cannot be read"),
        (folder, "not a regular file"),
        (folder / "fifo", "not a regular file"),
        (folder / "hard", "has 2 hard links"),
        (large, "over 1000000 bytes"),
        (latin, "not UTF-8 at byte 3"),
    ):
        with pytest.raises(Refused) as caught:
            files.read(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert why in str(caught.value)


def test_a_disk_that_is_full_leaves_the_old_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(Refused, match=r"cannot be replaced .No space left on device."):
        files.replace(files.read(config), "spec-tokens: 1\n")
    assert files.read(config).text.startswith("spec-tokens: 2")
    assert len(list(config.parent.iterdir())) == 1


def test_file_and_folder_are_on_the_disk_before_the_change_counts_as_done(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    replace, fsync = os.replace, os.fsync

    def note_replace(*paths: Path) -> None:
        calls.append("rename")
        replace(*paths)

    def note_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    monkeypatch.setattr(files.os, "replace", note_replace)
    monkeypatch.setattr(files.os, "fsync", note_fsync)
    files.replace(files.read(config), "spec-tokens: 1\n")
    assert calls == ["file", "rename", "folder"]


def test_what_a_killed_process_left_behind_is_cleared_away(config: Path) -> None:
    config.with_name(".config.yaml.specdec-new").write_text("half")
    files.replace(files.read(config), "spec-tokens: 1\n")
    assert config.read_text() == "spec-tokens: 1\n"
    assert len(list(config.parent.iterdir())) == 1


# The lock

HOLDER = """
import sys, time
from pathlib import Path
from specdec_exporter.act.lock import ControllerLock
ControllerLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_told_who_acts_until_that_one_is_killed(config: Path) -> None:
    path = beside(config)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = ControllerLock(path, patience=0.1)
        with pytest.raises(Refused, match=rf"process {holder.pid} acts on this deployment"):
            lock.acquire()
        holder.kill()
        holder.wait()
        lock.acquire()
        lock.release()


def test_a_lock_outlasts_the_replacing_of_its_file(config: Path) -> None:
    with ControllerLock(beside(config)) as lock:
        files.replace(files.read(config), "spec-tokens: 1\n")
        lock.acquire()
        with pytest.raises(Refused, match=f"process {os.getpid()}"):
            ControllerLock(beside(config), patience=0).acquire()
    ControllerLock(beside(config)).acquire()


def test_a_lock_that_is_given_back_soon_is_waited_for(config: Path) -> None:
    held = ControllerLock(beside(config))
    held.acquire()
    timer = threading.Timer(0.2, held.release)
    timer.start()
    with pytest.raises(Refused):
        ControllerLock(beside(config), patience=0).acquire()
    ControllerLock(beside(config), patience=60).acquire()
    timer.join()


def test_one_file_by_two_names_has_one_lock(config: Path) -> None:
    link = config.with_name("current.yaml")
    link.symlink_to("config.yaml")
    assert beside(link) == beside(config)


def test_a_webhook_has_a_lock_of_its_own_that_does_not_show_its_url(tmp_path: Path) -> None:
    one, other = for_url("https://a/hunter2", tmp_path), for_url("https://b/", tmp_path)
    assert one != other
    assert one.parent == tmp_path
    assert "hunter2" not in one.name


def test_a_lock_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be locked"):
        ControllerLock(tmp_path / "nowhere" / "lock").acquire()


def test_a_restarted_command_does_not_inherit_the_lock(config: Path) -> None:
    program = "print(flush=True); input()"
    with (
        ControllerLock(beside(config)),
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()  # It has started, so that its open files are its own.
        held = os.listdir(f"/proc/{child.pid}/fd") if Path("/proc").is_dir() else []
        names = {os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in held}
        assert str(beside(config)) not in names
        child.communicate(b"\n")
