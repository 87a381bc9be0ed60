"""The exporter on a simulated vLLM, with what it finds in a live table."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec_exporter.baseline import Baseline, BaselinePoint
from specdec_exporter.config import Settings, load
from specdec_exporter.duration import format_duration
from specdec_exporter.log import configure
from specdec_exporter.model import ExporterStatus, RuleState, TargetStatus
from specdec_exporter.report import COLUMNS, NO_VALUE, as_text, cells, console
from specdec_exporter.service import Exporter, bind
from specdec_exporter.simulator import SCENARIOS, Scenario, SimulatorServer
from specdec_exporter.words import headline

REFRESH_SECONDS = 1.0
PLAIN_REFRESH_SECONDS = 5.0


class DemoError(Exception):
    """The demo cannot start; the message says why and what to do."""


async def run(scenario: str, listen: str | None, duration: float | None) -> None:
    """Run the demo until the duration has passed or a signal to stop comes.

    Args:
        scenario: a name from `SCENARIOS`; `list` prints them all and returns.
        listen: HOST:PORT of the exporter, or None for the default.
        duration: seconds, or None for no end.

    Raises:
        DemoError: no such scenario, or the port is in use.
    """
    screen = console()
    if scenario == "list":
        for known in SCENARIOS.values():
            screen.print(f"{known.name:20} {known.description}", highlight=False, soft_wrap=True)
        return
    if scenario not in SCENARIOS:
        raise DemoError(f"no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    configure("error")
    with tempfile.TemporaryDirectory(prefix="specdec-demo-") as folder:
        baseline = Path(folder) / "baseline.json"
        baseline.write_text(baseline_of(SCENARIOS[scenario], time.time()).to_json())
        await _run(screen, scenario, baseline, listen, duration)


def baseline_of(scenario: Scenario, taken_at: float) -> Baseline:
    """What a token costs on the simulated server without speculation, by the simulator's own law.

    With c requests in decode c / (answer − 1) of them end in a step, and as many prompts come in.
    """
    law, traffic = scenario.step_time, scenario.traffic
    prompt = traffic.prompt_tokens * (1.0 - traffic.prefix_hit_ratio)
    prefill = prompt / (traffic.output_tokens - 1.0)
    points = tuple(
        BaselinePoint(c, law.seconds(0, c, c * prefill), tpot_stderr=0.0, decode_tokens=0.0)
        for c, _ in law.base
    )
    return Baseline("measured", scenario.model_name, "", taken_at, points)


async def _run(
    screen: Console, scenario: str, baseline: Path, listen: str | None, duration: float | None
) -> None:
    async with SimulatorServer(SCENARIOS[scenario]) as server:
        flags = {
            "targets": [{"name": "demo", "url": server.url, "baseline": baseline}],
            "interval": 1.0,
            "rules": {"evaluation_interval": 5.0},
            "listen": listen,
        }
        settings = load(flags=flags)
        try:
            listener = bind(settings.listen)
        except OSError as error:
            raise DemoError(
                f"cannot listen on {settings.listen} ({error.strerror}); choose another --listen"
            ) from error
        exporter = Exporter(settings, lambda: settings)
        serving = asyncio.create_task(exporter.run(listener))
        showing = asyncio.create_task(_show(screen, exporter, settings, server.url, scenario))
        done, _ = await asyncio.wait(
            {serving, showing}, timeout=duration, return_when=asyncio.FIRST_COMPLETED
        )
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        if serving not in done:
            # As Ctrl-C would: the web server ends, and what waits on it.
            signal.raise_signal(signal.SIGINT)
        await serving


async def _show(
    screen: Console, exporter: Exporter, settings: Settings, simulator: str, scenario: str
) -> None:
    address = f"http://{settings.listen}"
    screen.print(
        f"Simulated vLLM  {simulator}  ({scenario})\n"
        f"Exporter        {address}/\n"
        f"For Prometheus  {address}/metrics\n",
        highlight=False,
        soft_wrap=True,
    )
    screen.print(f"{SCENARIOS[scenario].description}. Ctrl-C ends both.\n", highlight=False)
    if not screen.is_terminal:
        while True:
            await asyncio.sleep(PLAIN_REFRESH_SECONDS)
            screen.print(_table(exporter.status()))
    with Live(console=screen, auto_refresh=False, transient=False) as live:
        while True:
            live.update(_table(exporter.status()), refresh=True)
            await asyncio.sleep(REFRESH_SECONDS)


def _table(status: ExporterStatus) -> Group:
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("target", no_wrap=True)
    table.add_column("up")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    notes = []
    for target in status.targets:
        up = Text("up", "green") if target.up else Text("down", "red")
        rows = target.measurements or (None,)
        for measurement in rows:
            figures = cells(measurement.total) if measurement else (NO_VALUE,) * len(COLUMNS)
            table.add_row(as_text(target.name), up, *figures)
        notes.append(_note(target))
        notes += [f"{target.name}: {headline(target, m).text}" for m in target.measurements]
        notes += [
            f"{v.rule} {v.state}: {v.summary}"
            for v in target.verdicts
            if v.state in (RuleState.PENDING, RuleState.FIRING) and v.inhibited_by is None
        ]
    return Group(table, Text("\n".join(notes), "dim"))


def _note(target: TargetStatus) -> str:
    if target.last_error is not None:
        return f"{target.name}: {target.last_error}"
    for measurement in target.measurements[:1]:
        total = measurement.total
        return (
            f"figures of the last {total.covered_seconds:.0f} s of "
            f"{format_duration(total.window_seconds)}; ± is half of a 95 % interval"
        )
    return f"{target.name}: waiting for the first scrape"
