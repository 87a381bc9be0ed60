"""What the tests against real programs share: the programs, and an exporter that watches a demo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real import debian
from tests.real.vllm_bed import HTTP, VllmServer, VllmUnavailableError, free_port, vllm_venv

Start = Callable[..., VllmServer]
"""Makes a server of a model, a `speculative_config` or None, and further arguments."""


def program(name: str) -> Path:
    """One of Debian's programs; without it the test fails in the CI, and is skipped elsewhere."""
    if path := debian.find(name):
        return path
    missing = f"there is no {name}; get it with: python -m tests.real.debian {name}"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def prometheus_binary() -> Path:
    return program("prometheus")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return program("promtool")


@pytest.fixture(scope="session")
def chromium() -> Path:
    return program("chromium")


@pytest.fixture(scope="session")
def demo_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `specdec-exporter demo` on the healthy scenario, once it serves ratios."""
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("demo") / "demo.log"
    command = Path(sys.executable).with_name("specdec-exporter")
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [command, "demo", "--listen", url.removeprefix("http://"), "--scenario", "healthy"],
            env={k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 180
            while "\nspecdec_acceptance_ratio{" not in _page(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the demo served no ratio:\n{log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=60)


def _page(url: str) -> str:
    try:
        return HTTP.get(f"{url}/metrics").text
    except httpx.TransportError:
        return ""


@pytest.fixture(scope="session")
def venv(request: pytest.FixtureRequest) -> Path:
    try:
        return vllm_venv()
    except VllmUnavailableError as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing), pytrace=False)
        plugins = request.config.pluginmanager
        terminal, capture = (plugins.get_plugin(n) for n in ("terminalreporter", "capturemanager"))
        assert terminal is not None
        assert capture is not None
        with capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(f"NO TEST WITH A REAL vLLM. {missing}", red=True, bold=True)
        pytest.skip("there is no vLLM; a line above says how to get it")


@pytest.fixture(scope="session")
def start(venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    def start(model: str, speculative: Mapping[str, Any] | None, *extra_args: str) -> VllmServer:
        return VllmServer(
            venv,
            model,
            speculative_config=speculative,
            extra_args=extra_args,
            log=tmp_path_factory.mktemp("vllm") / "vllm.log",
        )

    return start
