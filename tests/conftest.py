"""What holds for every test."""

import contextlib
import importlib
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import specdec_exporter
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


UNTRACED = re.compile(
    "test_(abtest_(client|run)|alert_docs|bench_drift|cli|config|demo|deploy|doc_shell|docs|expose|house"
    "|recommend|replay|scrape|simulator.*|store|tuner_bench)"
)
"""Tests of modules whose coverage is not measured, since they do input and output."""


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Without the tracer of coverage, which makes everything take twice to three times as long.

    In a worker pytest-cov's own mark, no_cover, only uncovers the tracer of an earlier start.
    """
    mine, others = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(mine)
        threading.settrace(others)  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    known = UNTRACED.fullmatch(item.path.stem)
    if known or in_real(item) or item.get_closest_marker("slow"):
        with untraced():
            return (yield)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # What is measured is imported while it is traced, and the tests are not.
    for module in pkgutil.walk_packages(specdec_exporter.__path__, "specdec_exporter."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    with untraced():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=turn)


def turn(item: pytest.Item) -> int:
    """What mostly waits is first, then the long files; last what vLLM may still be on its way for."""
    if item.get_closest_marker("waits"):
        return 0
    return (3 if item.get_closest_marker("vllm") else 1) if in_real(item) else 2


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
