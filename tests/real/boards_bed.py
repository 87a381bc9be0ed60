"""A real Prometheus with an hour and a half of a simulated fleet in it, and with recorded servers.

Virtual time: the simulator's pages go through the exporter's own code, and what it would have served
is written down, beside the server's own series and what Prometheus's engine makes of them by
`alerts/fleet.rules.yaml`. All of it becomes blocks of Prometheus's store; nobody waits for a scrape.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter.baseline import Baseline, BaselinePoint
from specdec_exporter.baselines import Baselines
from specdec_exporter.config import Settings, Target
from specdec_exporter.expose import registry
from specdec_exporter.loop import Monitor
from specdec_exporter.model import ExporterStatus, Reason, ScrapeError, TargetStatus
from specdec_exporter.simulator import Change, Restart, Scenario, Simulator
from specdec_exporter.simulator.scenario import Acceptance, StepTime, Traffic
from specdec_exporter.simulator.simulator import EPOCH
from specdec_exporter.store import Store
from specdec_exporter.tuner import Tuner

from grafana.dashboards import boards, written
from grafana.query import Ask, Choice, Row
from grafana.render import draw
from tests.pages import H200, lines, recording
from tests.real import debian
from tests.real.prometheus_bed import Prometheus, running
from tests.real.promtool_bed import Labels, Question, ask

RULES = Path(__file__).parents[2] / "alerts" / "fleet.rules.yaml"
STEP = 30.0
SECONDS = 5400.0
NOW = EPOCH + SECONDS
"""When the simulated fleet is looked at."""
RECORDED_STEP = 1.0
RECORDED_NOW = EPOCH + 86400.0
"""When the recorded servers end."""
RECORDED = {"h200-k1": "k1", "h200-k2": "k2", "h200-k4": "k4"}
"""Names of targets, and of the recordings that they are."""

EXPORTER = {"job": "specdec", "instance": "exporter:19185"}
SMALL, LARGE = "google/gemma-4-E4B-it", "google/gemma-4-31B-it"


STEP_SECONDS = ((1.0, 0.018), (8.0, 0.019), (32.0, 0.022))
"""Of a small, slow machine without speculation, by the requests in decode."""
BASELINE = Baseline(
    "measured",
    SMALL,
    "",
    EPOCH,
    tuple(BaselinePoint(c, seconds, 0.0001, 1e5) for c, seconds in STEP_SECONDS),
)
"""Nobody has measured one of the large model."""


def server(
    name: str,
    rates: tuple[float, ...] = (0.47, 0.24),
    *,
    k: int = 2,
    model: str = SMALL,
    script: tuple[Change | Restart, ...] = (),
    engines: tuple[float, ...] = (1.0,),
) -> Scenario:
    """One whose requests are all alike: an hour of it takes a second."""
    return Scenario(
        name,
        "",
        k=k,
        acceptance=Acceptance(rates, variance_inflation=1.0),
        traffic=Traffic(requests_per_second=0.6),
        step_time=StepTime(base=STEP_SECONDS),
        script=script,
        engine_shares=engines,
        model_name=model,
    )


FLEET: Mapping[str, Scenario] = {
    one.name: one
    for one in (
        # Position 1 collapses; after an hour somebody sets k to 1.
        server(
            "chat-1",
            script=(
                Change(1500.0, rates=(0.46, 0.09), over=300.0),
                Restart(4200.0, down_seconds=60.0, k=1, rates=(0.46,)),
            ),
        ),
        # The guide's case.
        server("chat-2"),
        # Position 1 has just collapsed.
        server("chat-3", script=(Change(4950.0, rates=(0.47, 0.06)),)),
        # Code, which is easy to draft, on two unequal engines.
        server("code-1", (0.82, 0.70, 0.60, 0.52), k=4, model=LARGE, engines=(0.7, 0.3)),
        # Prose in a language that the drafter hardly knows.
        server("prose-1", (0.24, 0.07)),
        # A drafter that never worked.
        server("broken-1", (0.027, 0.002), model=LARGE),
        # Nobody asks anything for the last half hour.
        server("night-1", script=(Change(3600.0, requests_per_second=0.0),)),
        # Gone for the last quarter of an hour.
        server("away-1", script=(Restart(4500.0, down_seconds=1e6),)),
        # Without speculation.
        server("plain-1", k=0),
    )
}
TARGETS: Mapping[str, Mapping[str, object]] = {
    "chat-1": {"reference": [0.47, 0.24]},
    "chat-2": {"reference": [0.47, 0.24]},
}
"""Settings of a target that are not the defaults."""

Samples = dict[tuple[str, Labels], list[tuple[float, float]]]
"""Unix seconds and values, by name and labels."""


@dataclass
class Watched:
    """One target as the exporter watches it."""

    monitor: Monitor
    tuner: Tuner | None

    def scrape(self, page: bytes | None, t: float) -> None:
        """Take in a page, or a scrape that failed."""
        away = ScrapeError(Reason.CONNECT, "it is not there")
        self.monitor.observe(away if page is None else page, t=t, duration=0.012)
        if self.monitor.engine_version is None:
            self.monitor.learn_version("0.32.0")

    def evaluate(self, t: float) -> None:
        """Judge, and decide about k, as the exporter's loop does."""
        self.monitor.judge(t)
        if self.tuner is not None:
            self.tuner.evaluate(self.monitor.evidence(t), t, self.monitor.baseline_curves())

    def status(self) -> TargetStatus:
        """What would be served."""
        status = self.monitor.status
        return status if self.tuner is None else self.tuner.shown_in(status)


@dataclass
class Feed:
    """Samples on their way to Prometheus."""

    samples: Samples = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], t: float, value: float) -> None:
        """One sample."""
        self.samples.setdefault((name, frozenset(labels.items())), []).append((t, value))

    def add_page(self, page: str, server: str, t: float) -> None:
        """A server's own page."""
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {**sample.labels, "job": "vllm", "instance": f"{server}:8000"}
                self.add(sample.name, labels, t, sample.value)

    def add_served(self, statuses: Sequence[TargetStatus], t: float) -> None:
        """What the exporter serves."""
        status = ExporterStatus("0", tuple(statuses), False, True)
        for family in registry(lambda: status).collect():
            for sample in family.samples:
                self.add(sample.name, {**sample.labels, **EXPORTER}, t, sample.value)

    def add_ruled(
        self, promtool: Path, folder: Path, start: float, end: float, step: float, every: float
    ) -> None:
        """What Prometheus's engine records and alerts of, by the rules over vLLM's series."""
        count = round((end - start) / step) + 1
        series: dict[str, list[float | None]] = {}
        for (name, labels), values in self.samples.items():
            if name.startswith("vllm:") and values[0][0] >= start:
                at = {round((t - start) / step): value for t, value in values}
                text = ",".join(f'{key}="{value}"' for key, value in sorted(labels))
                series[f"{name}{{{text}}}"] = [at.get(i) for i in range(count)]
        times = [i * every for i in range(round((end - start) / every) + 1)]
        made = '{__name__=~"instance:specdec_.+|ALERTS"}'
        answers = ask(
            promtool,
            folder,
            series,
            [Question(made, t) for t in times],
            step_seconds=step,
            rules=RULES.read_text(),
            evaluation_seconds=every,
        )
        for t, vector in zip(times, answers, strict=True):
            for labels, value in vector.items():
                named = dict(labels)
                self.add(named.pop("__name__"), named, start + t, value)

    def written(self) -> Iterable[str]:
        """As OpenMetrics, which promtool makes blocks of."""
        for (name, labels), values in sorted(
            self.samples.items(), key=lambda one: (one[0][0], sorted(one[0][1]))
        ):
            text = ",".join(f'{key}="{value}"' for key, value in sorted(labels) if value)
            for t, value in values:
                yield f"{name}{{{text}}} {value!r} {t:.3f}\n"
        yield "# EOF\n"


def _page(simulator: Simulator) -> bytes | None:
    """What a rule or a board could stand on, without the rest of a server's long page."""
    try:
        snapshot = simulator.snapshot()
    except ScrapeError:
        return None
    page = [f"process_start_time_seconds {snapshot.process_start_time or 0.0}"]
    for engine in snapshot.engines:
        page += lines(engine.counters, engine.engine, engine.model_name)
    return "".join(f"{line}\n" for line in page).encode()


def simulate(feed: Feed) -> None:
    """Let the fleet live, and the exporter watch it."""
    targets = [
        Target.model_validate({"url": f"http://{name}:8000", "name": name, **TARGETS.get(name, {})})
        for name in FLEET
    ]
    settings = Settings(targets=targets, interval=STEP)
    store = Store(None)
    watched = {
        target.name: Watched(Monitor(target, settings), Tuner(target, settings.tuner, store))
        for target in targets
    }
    for name, one in watched.items():
        if FLEET[name].k:
            one.monitor.baselines = Baselines((BASELINE,), None)
    simulators = {name: Simulator(scenario, seed=1) for name, scenario in FLEET.items()}
    for i in range(round(SECONDS / STEP) + 1):
        t = EPOCH + i * STEP
        for name, simulator in simulators.items():
            simulator.advance(i * STEP)
            page = _page(simulator)
            watched[name].scrape(page, t)
            if page is not None:
                feed.add_page(page.decode(), name, t)
        for one in watched.values():
            one.evaluate(t)
        feed.add_served([one.status() for one in watched.values()], t)


def replay(feed: Feed) -> float:
    """Watch the recorded servers, each until the same moment; returns when the longest began."""
    settings = Settings(interval=RECORDED_STEP)
    begun = RECORDED_NOW
    by_time: dict[float, list[tuple[str, str]]] = {}
    for name, stem in RECORDED.items():
        scrapes = {round(line["t"]): line["m"] for line in recording(H200 / f"series_{stem}.jsonl")}
        last = ()
        for second in range(min(scrapes), max(scrapes) + 1):
            # Between two loads nothing was scraped, and nothing counted.
            last = scrapes.get(second, last)
            t = RECORDED_NOW - max(scrapes) + second
            by_time.setdefault(t, []).append((name, "".join(f"{line}\n" for line in last)))
            begun = min(begun, t)
    watched = {
        name: Watched(Monitor(Target(url=f"http://{name}:8000", name=name), settings), None)
        for name in RECORDED
    }
    for t in sorted(by_time):
        for name, page in by_time[t]:
            watched[name].scrape(page.encode(), t)
            feed.add_page(page, name, t)
        for one in watched.values():
            one.evaluate(t)
        feed.add_served([one.status() for one in watched.values()], t)
    return begun


@contextmanager
def fed(prometheus: Path, promtool: Path, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that has seen all of it."""
    feed = Feed()
    simulate(feed)
    rules = folder / "simulated"
    rules.mkdir()
    feed.add_ruled(promtool, rules, EPOCH, NOW, STEP, STEP)
    begun = replay(feed)
    rules = folder / "recorded"
    rules.mkdir()
    feed.add_ruled(promtool, rules, begun, RECORDED_NOW, RECORDED_STEP, 5.0)
    text = folder / "feed.om"
    with text.open("w") as file:
        file.writelines(feed.written())
    made = subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", text, folder / "data"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    # What is not scraped any more is gone at once, as where Prometheus scrapes by itself.
    more = [f"--query.lookback-delta={STEP - 1:g}s"]
    with running(prometheus, folder, {}, more_arguments=more) as server:
        yield server


def asker(server: Prometheus) -> Ask:
    """Questions of a board to this Prometheus."""

    def ask(expr: str, start: float, end: float, step: float | None) -> Sequence[Row]:
        if step is None:
            found = server.api("query", query=expr, time=f"{end:.3f}")["result"]
            return [(one["metric"], [(one["value"][0], float(one["value"][1]))]) for one in found]
        found = server.api(
            "query_range", query=expr, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}s"
        )["result"]
        return [(one["metric"], [(t, float(v)) for t, v in one["values"]]) for one in found]

    return ask


CHOICES: Mapping[str, Choice] = {
    "specdec-fleet": {"job": ".*", "target": ".*", "model_name": ".*", "engine": ".*"},
    "specdec-target": {"job": ".*", "target": "chat-1", "model_name": SMALL, "engine": ".*"},
    "specdec-raw": {"job": ".*", "target": "chat-1:8000", "model_name": SMALL, "engine": ".*"},
}
"""What the pictures show."""


def main(folder: Path) -> None:
    """Draw all boards: `python -m tests.real.boards_bed docs/boards`."""
    prometheus, promtool = debian.find("prometheus"), debian.find("promtool")
    if prometheus is None or promtool is None:
        sys.exit("there is no Prometheus; get it with: python -m tests.real.debian prometheus")
    folder.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        fed(prometheus, promtool, Path(scratch)) as server,
    ):
        for name, board in boards().items():
            stem = name.removesuffix(".json")
            picture = draw(json.loads(written(board)), asker(server), CHOICES[stem], EPOCH, NOW)
            (folder / f"{stem}.png").write_bytes(picture)
            print(f"{folder / stem}.png: {len(picture)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
