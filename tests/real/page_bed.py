"""A fleet in every state that the page has a word for, and the page served to a real browser.

`python -m tests.real.page_bed docs/page.png` draws the README's picture.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright
from specdec_exporter.app import create_app
from specdec_exporter.config import Settings, Target
from specdec_exporter.history import Seen, Watched
from specdec_exporter.loop import Monitor
from specdec_exporter.model import ExporterStatus, Reason, ScrapeError
from specdec_exporter.pulse import Pulse
from specdec_exporter.service import bind
from specdec_exporter.simulator import SCENARIOS, Change, Scenario, Simulator
from specdec_exporter.store import Store
from specdec_exporter.tuner import Tuner
from structlog.testing import capture_logs

from tests.real import debian

HOUR = 3600.0
END = 1_790_000_000.0
"""Unix time at which everything is looked at."""
NASTY = "</summary><script>alert(\"1\")</script><img src=x onerror='alert(2)'>&amp;{{ 7 * 7 }}"


def watch(
    name: str,
    scenario: str | Scenario = "healthy",
    *,
    seconds: float = HOUR,
    step: float = 15.0,
    down_for: float = 0.0,
    model_name: str | None = None,
    **target: Any,
) -> Watched:
    """A target as it is after a simulated while, with its history and its tuner's advice.

    Args:
        name: of the target.
        scenario: of the simulator.
        seconds: that it was watched for.
        step: between two scrapes.
        down_for: at the end it did not answer for so long.
        model_name: instead of the simulator's.
        target: further settings of it.
    """
    watched = Target(name=name, url="http://10.0.0.1:8000", **target)
    settings = Settings(targets=(watched,), interval=step)
    monitor, tuner = Monitor(watched, settings), Tuner(watched, settings.tuner, Store(None))
    monitor.engine_version = ""
    # What the script of a scenario does in its first minutes is to be seen in the last half hour.
    lead = max(0.0, seconds - 1800.0)
    chosen = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    chosen = replace(chosen, script=tuple(replace(one, at=one.at + lead) for one in chosen.script))
    if model_name is not None:
        chosen = replace(chosen, model_name=model_name)
    simulator = Simulator(chosen, seed=sum(name.encode()))
    begin = END - seconds
    with capture_logs():
        for i in range(int(seconds / step) + 1):
            t = step * i
            simulator.advance(t)
            gone = ScrapeError(Reason.CONNECT, "connection refused; does the server run?")
            page = gone if t > seconds - down_for else simulator.page()
            monitor.observe(page, t=begin + t, duration=0.01)
            monitor.judge(begin + t)
            if i % 8 == 0:
                tuner.evaluate(monitor.evidence(begin + t), begin + t, monitor.baseline_curves())
    return Watched(tuner.shown_in(monitor.status), monitor.history.moments())


IDLE = replace(SCENARIOS["healthy"], script=(Change(60.0, requests_per_second=0.0),))


def fleet(seconds: float = 1200.0) -> tuple[Watched, ...]:
    """One target for each verdict, each watched for so long."""
    long = seconds
    return (
        watch("chat-pays", seconds=long, baseline=0.0049),
        watch("prose-costs", seconds=long, baseline=0.0034),
        watch("code-deep", "position-1-collapse", seconds=long, baseline=0.0047),
        watch("31b-broken", "broken-drafter", seconds=0.4 * long),
        watch("korean-drifts", "drift", seconds=0.6 * long, reference=(0.47, 0.24)),
        watch("night-idle", IDLE, seconds=0.5 * long),
        watch("plain", "no-speculation", seconds=0.2 * long),
        watch("gone", seconds=0.6 * long, down_for=600.0),
        watch("new-unmeasured", seconds=240.0, labels={"zone": "eu-1"}),
        watch(NASTY, seconds=240.0, model_name=NASTY),
    )


class Shown:
    """A service that shows what it is given; what it is not asked for in a browser it lacks."""

    def __init__(self, *targets: Watched) -> None:
        self.settings = Settings()
        self.pulse = Pulse()
        self.reload_failed = False
        self.targets = targets
        self.t = END
        self.log: list[dict[str, Any]] = []

    def seen(self) -> Seen:
        return Seen(self.t, self.targets)

    def status(self) -> ExporterStatus:
        return ExporterStatus("1.2.3", tuple(w.status for w in self.targets), False, True)

    def audit(self, limit: int) -> list[dict[str, Any]]:
        return self.log[:limit]

    def reload(self) -> None:
        raise NotImplementedError

    def acknowledge_drift(self, target: str, model_name: str) -> bool:
        raise NotImplementedError

    def relearn_reference(self, target: str, model_name: str) -> bool:
        raise NotImplementedError

    def autotune(self, action: str, target: str, k: int | None, who: str) -> str:
        raise NotImplementedError

    def hear_alert(self, rule: str, labels: Mapping[str, str], *, firing: bool) -> int:
        raise NotImplementedError


class Served:
    """The page of a service on a port of its own."""

    def __init__(self, service: Shown, port: int) -> None:
        self.service = service
        self.windows = ExitStack()
        """What looks at it, to be closed before it ends: what a browser is amid fetching is reset."""
        self._listener = bind(f"127.0.0.1:{port}")
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(service),
                log_config=None,
                lifespan="off",
                http="h11",
                ws="none",
                timeout_graceful_shutdown=3,
            )
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        if self._loop.is_closed():
            return

        def end() -> None:
            self.service.pulse.end()
            self._server.should_exit = True

        self._loop.call_soon_threadsafe(end)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def show(self, *targets: Watched) -> None:
        """Something new is known a quarter of a minute later."""

        def news() -> None:
            self.service.t += 15.0
            self.service.targets = targets
            self.service.pulse.beat()

        self._loop.call_soon_threadsafe(news)


@contextmanager
def served(*targets: Watched, port: int = 0) -> Iterator[Served]:
    """The page of these targets, for as long as it is needed."""
    server = Served(Shown(*targets), port)
    server.start()
    try:
        with server.windows:
            yield server
    finally:
        server.stop()


def draw(file: Path, chromium: Path) -> None:
    """The picture in the README: lines of a fleet, and one card that is opened."""
    pays, _, deep, broken, drifts, idle, *_ = fleet(HOUR)
    with served(pays, deep, broken, drifts, idle) as server, sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=root)
        page = browser.new_page(viewport={"width": 1180, "height": 600}, color_scheme="light")
        page.goto(server.url)
        for card in page.locator(".card").all():
            if card.locator("h2").inner_text() != pays.status.name:
                card.locator("summary").first.click()
        page.evaluate("document.activeElement.blur()")
        page.mouse.move(0, 0)
        page.screenshot(path=file, full_page=True)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]), debian.ensure("chromium"))
