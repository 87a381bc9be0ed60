"""What holds for every test."""

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import settings

REAL = Path(__file__).parent / "real"

# A shared machine is slow at times, so no example has a deadline; in the continuous integration the
# examples are the same in every run.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_configure(config: pytest.Config) -> None:
    # A worker gives way to the tests on a vLLM under load. Linux shares the processor out by session
    # (sched_autogroup), and in one session with nice neighbours a client waits for its turn so long
    # that it takes half of a stream for one chunk.
    if hasattr(config, "workerinput"):
        with contextlib.suppress(OSError):
            os.setsid()
            Path("/proc/self/autogroup").write_text("5")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, since what they need may still be on its way.
    items.sort(key=in_real)
    for item in items:
        # They go over and over lines that others reach; traced they take twice to three times as long.
        if in_real(item) or item.get_closest_marker("slow"):
            item.add_marker("no_cover")


def in_real(item: pytest.Item) -> bool:
    """Whether it is a test with real programs."""
    return REAL in item.path.parents


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the exporter every SPECDEC_ variable is a setting, and its state is in the user's folder."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)
