"""What holds for every test."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last, since what they need may still be on its way.
    items.sort(key=in_real)
    for item in items:
        # They compute figures over and over, on lines that others reach; traced they take three times
        # as long.
        if item.get_closest_marker("slow"):
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
