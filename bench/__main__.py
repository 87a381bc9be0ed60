"""What the exporter costs, against the goals it has set itself: `make bench`.

Speed is a ratio of two measurements taken in turns in one run, so a busy machine slows both. Exits
with 1 where a goal is missed.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from specdec_exporter.parse import parse
from specdec_exporter.simulator import SCENARIOS, SimulatorServer

PAGES = sorted((Path(__file__).parents[1] / "tests" / "data").glob("*/*.prom"))
UP = re.compile(r"^specdec_up\{.*\} 1\.0$", re.M)
ROUNDS = 15
STARTS = 5
SCRAPES = 50
PARTS = 5
"""Neighbours on the machine only ever add to what a part costs, so the best part is judged."""
INTERVAL_SECONDS = 0.05
WINDOW_INTERVALS = 60
"""As in the default window of five minutes at the default interval of five seconds."""


@dataclass(frozen=True)
class Result:
    """One figure and the goal for it."""

    what: str
    figure: str
    goal: str
    met: bool


def seconds(work: Callable[[], object], times: int = 1) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begin) / times


def parsing() -> Iterator[Result]:
    ratios = []
    for path in PAGES:
        page = path.read_bytes()

        def official(text: str = page.decode()) -> object:
            return list(text_string_to_metric_families(text))

        ours = partial(parse, page, t=0.0)
        pairs = [(seconds(official), seconds(ours, times=10)) for _ in range(ROUNDS)]
        ratios.append(statistics.median(theirs / own for theirs, own in pairs))
    yield Result(
        f"parsing a page, against prometheus_client ({len(PAGES)} pages, slowest and median)",
        f"{min(ratios):.1f}x, {statistics.median(ratios):.1f}x",
        "at least 12x",
        min(ratios) >= 12,
    )


@contextmanager
def simulated_server() -> Iterator[str]:
    """The healthy scenario, served from a thread of this process."""
    loop = asyncio.new_event_loop()
    server = SimulatorServer(SCENARIOS["healthy"])
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def exporter(target: str) -> Iterator[tuple[int, httpx.Client, float]]:
    """`serve` on a target: its process id, a client for it, and when it was started."""
    listen = f"127.0.0.1:{free_port()}"
    program = str(Path(sys.executable).with_name("specdec-exporter"))
    interval = f"{INTERVAL_SECONDS * 1000:g}ms"
    command = [program, "serve", "--target", target, "--listen", listen, "--interval", interval]
    environ = os.environ | {"SPECDEC_WINDOWS": f"{WINDOW_INTERVALS * INTERVAL_SECONDS:g}s"}
    # As installed: Python keeps what it has compiled, but for where this variable forbids it.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as state,
        subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env=environ | {"XDG_STATE_HOME": state}
        ) as process,
        httpx.Client(base_url=f"http://{listen}", timeout=5) as client,
    ):
        try:
            yield process.pid, client, begin
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port: int = chosen.getsockname()[1]
        return port


def page(client: httpx.Client) -> str:
    try:
        return client.get("/metrics").text
    except httpx.TransportError:
        return ""


def until_up(client: httpx.Client, begin: float) -> float:
    """Wait for the first page with up 1; returns the seconds since the start."""
    while not UP.search(page(client)):
        if time.monotonic() - begin > 30:
            raise SystemExit("the exporter did not come up within 30 s")
        time.sleep(0.01)
    return time.monotonic() - begin


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_megabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def scraping(pid: int, client: httpx.Client) -> float:
    """Milliseconds of processor for one scrape."""
    cpu, before = cpu_seconds(pid), scrapes(client)
    time.sleep(SCRAPES * INTERVAL_SECONDS)
    return 1000 * (cpu_seconds(pid) - cpu) / (scrapes(client) - before)


def page_serving(pid: int, client: httpx.Client, scrape: float) -> float:
    """Milliseconds of processor for one page, less those of the scrapes that go on meanwhile."""
    cpu, before = cpu_seconds(pid), scrapes(client)
    for _ in range(SCRAPES):
        page(client)
        time.sleep(INTERVAL_SECONDS / 10)
    meanwhile = scrape * (scrapes(client) - before)
    return (1000 * (cpu_seconds(pid) - cpu) - meanwhile) / SCRAPES


def scrapes(client: httpx.Client) -> int:
    return int(client.get("/api/v1/status").json()["targets"][0]["scrapes"])


def serving() -> Iterator[Result]:
    with simulated_server() as target:
        starts = []
        for _ in range(STARTS):
            with exporter(target) as (_, client, begin):
                starts.append(until_up(client, begin))
        yield Result(
            f"first page with up 1, median of {STARTS} starts",
            f"{statistics.median(starts):.2f} s",
            "within 2 s",
            statistics.median(starts) <= 2,
        )
        with exporter(target) as (pid, client, begin):
            until_up(client, begin)
            time.sleep((WINDOW_INTERVALS + 10) * INTERVAL_SECONDS)
            each = [scraping(pid, client) for _ in range(PARTS)]
            served = [page_serving(pid, client, min(each)) for _ in range(PARTS)]
            memory = resident_megabytes(pid)
        yield Result(
            f"processor time of a scrape, all in all, best and median of {PARTS} times {SCRAPES}",
            f"{min(each):.1f} ms, {statistics.median(each):.1f} ms",
            "at most 4 ms",
            min(each) <= 4,
        )
        yield Result(
            f"processor time of serving /metrics, best and median of {PARTS} times {SCRAPES}",
            f"{min(served):.1f} ms, {statistics.median(served):.1f} ms",
            "at most 10 ms",
            min(served) <= 10,
        )
        yield Result(
            "resident memory after all of these",
            f"{memory:.0f} MB",
            "at most 80 MB",
            memory <= 80,
        )


def main() -> int:
    results = [*parsing(), *serving()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "figure", "goal", ""):
        table.add_column(column, no_wrap=True)
    for result in results:
        table.add_row(result.what, result.figure, result.goal, "met" if result.met else "MISSED")
    Console(width=140).print(table)
    return 0 if all(result.met for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
