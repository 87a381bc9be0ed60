"""A real Prometheus with an hour and a half of a simulated fleet in it, and with recorded servers.

Virtual time: the simulator's pages go through the exporter's own code, and what it would have served
is written down, beside the server's own series and what Prometheus's engine makes of them by
`alerts/fleet.rules.yaml`. All of it becomes blocks of Prometheus's store; nobody waits for a scrape.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter.config import Settings, Target
from specdec_exporter.expose import registry
from specdec_exporter.loop import Monitor
from specdec_exporter.model import ExporterStatus, Reason, ScrapeError, TargetStatus
from specdec_exporter.parse import VLLM
from specdec_exporter.simulator import Change, Restart, Scenario, Simulator
from specdec_exporter.simulator.scenario import Acceptance, Traffic
from specdec_exporter.simulator.simulator import EPOCH
from specdec_exporter.store import Store
from specdec_exporter.tuner import Tuner

from tests.pages import H200, recording
from tests.real.prometheus_bed import Prometheus, running
from tests.real.promtool_bed import Labels, Question, ask

RULES = Path(__file__).parents[2] / "alerts" / "fleet.rules.yaml"
STEP = 15.0
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
CALM = Traffic(requests_per_second=1.5)

FLEET: Mapping[str, Scenario] = {
    "chat-1": Scenario(
        "chat-1",
        "position 1 collapses; after an hour somebody sets k to 1",
        traffic=CALM,
        script=(
            Change(1500.0, rates=(0.46, 0.09), over=300.0),
            Restart(4200.0, down_seconds=60.0, k=1, rates=(0.46,)),
        ),
    ),
    "chat-2": Scenario("chat-2", "the guide's case", traffic=CALM),
    "code-1": Scenario(
        "code-1",
        "code, which is easy to draft, on two unequal engines",
        k=4,
        acceptance=Acceptance(rates=(0.82, 0.70, 0.60, 0.52)),
        traffic=CALM,
        engine_shares=(0.7, 0.3),
        model_name=LARGE,
    ),
    "prose-1": Scenario(
        "prose-1",
        "prose in a language that the drafter hardly knows",
        acceptance=Acceptance(rates=(0.24, 0.07)),
        traffic=CALM,
    ),
    "broken-1": Scenario(
        "broken-1",
        "a drafter that never worked",
        acceptance=Acceptance(rates=(0.027, 0.002)),
        traffic=CALM,
        model_name=LARGE,
    ),
    "night-1": Scenario(
        "night-1",
        "nobody asks anything for the last half hour",
        traffic=CALM,
        script=(Change(3600.0, requests_per_second=0.0),),
    ),
    "away-1": Scenario(
        "away-1",
        "gone for the last quarter of an hour",
        traffic=CALM,
        script=(Restart(4500.0, down_seconds=1e6),),
    ),
    "plain-1": Scenario(
        "plain-1",
        "without speculation: a live baseline, at loads that come and go",
        k=0,
        traffic=CALM,
        script=tuple(
            Change(600.0 * i, requests_per_second=rate)
            for i, rate in enumerate((0.7, 1.5, 3.0) * 3)
            if i
        ),
    ),
}
TARGETS = {
    "chat-1": {"reference": [0.47, 0.24]},
    "chat-2": {"reference": [0.47, 0.24]},
    "plain-1": {"role": "baseline"},
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

    def evaluate(self, t: float, peers: Mapping[str, object]) -> None:
        """Judge, and decide about k, as the exporter's loop does."""
        if self.tuner is not None:
            self.monitor.baselines.peers = dict(peers)  # type: ignore[arg-type]
            self.monitor.learn(t)
        self.monitor.judge(t)
        if self.tuner is not None:
            self.tuner.evaluate(self.monitor.evidence(t), t, self.monitor.baseline_curves())

    def status(self) -> TargetStatus:
        """What would be served."""
        status = self.monitor.status
        if self.tuner is None:
            return status
        verdicts = (*status.verdicts, *self.tuner.verdicts())
        return replace(status, tuner=self.tuner.statuses(), verdicts=verdicts)


@dataclass
class Feed:
    """Samples on their way to Prometheus."""

    samples: Samples = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], t: float, value: float) -> None:
        """One sample."""
        self.samples.setdefault((name, frozenset(labels.items())), []).append((t, value))

    def add_page(self, page: str, server: str, t: float) -> None:
        """What a rule or a board could stand on, of a server's own page."""
        wanted = "".join(
            f"{line}\n" for line in page.splitlines() if line.startswith(tuple(VLLM.names))
        )
        for family in text_string_to_metric_families(wanted):
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


def simulate(feed: Feed) -> None:
    """Let the fleet live, and the exporter watch it."""
    targets = [
        Target.model_validate({"url": f"http://{name}:8000", "name": name, **TARGETS.get(name, {})})
        for name in FLEET
    ]
    settings = Settings(targets=targets, interval=STEP)
    store = Store(None)
    watched = {
        target.name: Watched(
            Monitor(target, settings),
            None if target.role == "baseline" else Tuner(target, settings.tuner, store),
        )
        for target in targets
    }
    simulators = {name: Simulator(scenario, seed=1) for name, scenario in FLEET.items()}
    for i in range(round(SECONDS / STEP) + 1):
        t = EPOCH + i * STEP
        for name, simulator in simulators.items():
            simulator.advance(i * STEP)
            try:
                page = simulator.page()
            except ScrapeError:
                watched[name].scrape(None, t)
            else:
                watched[name].scrape(page, t)
                feed.add_page(page.decode(), name, t)
        peers = watched["plain-1"].monitor.as_peer(t)
        for one in watched.values():
            one.evaluate(t, peers)
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
            one.evaluate(t, {})
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
    more = [f"--query.lookback-delta={STEP + 5:g}s"]
    with running(prometheus, folder, {}, more_arguments=more) as server:
        yield server
