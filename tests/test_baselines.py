"""Which baseline holds for a target: the best source first, and live ones from a peer."""

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from specdec_exporter.baseline import Baseline, BaselinePoint, static
from specdec_exporter.baselines import MOST_OBSERVED, Baselines
from specdec_exporter.config import ConfigError, Settings, Target
from specdec_exporter.loop import Loop, Monitor
from specdec_exporter.model import TargetStatus
from specdec_exporter.references import check, read_baseline
from specdec_exporter.simulator import SCENARIOS, Scenario, Simulator, SimulatorServer
from specdec_exporter.thresholds import Thresholds
from structlog.testing import capture_logs

from tests.pages import counters, page

MODEL = "google/gemma-4-E4B-it"
MEASURED = Baseline("measured", MODEL, "0.32.0", 0.0, (BaselinePoint(1.0, 0.005, 1e-5, 1e5),))
PLAIN = SCENARIOS["no-speculation"]
URL = "http://127.0.0.1:8000"


def driven(scenario: Scenario, seconds: float, seed: int = 1, version: str = "0.32.0") -> Monitor:
    """A monitor after so many seconds of a simulated server, looked at every five."""
    target = Target(name="m", url=URL)
    monitor = Monitor(target, Settings(targets=(target,)))
    monitor.engine_version = version
    simulator = Simulator(scenario, seed=seed)
    for i in range(int(seconds / 5) + 1):
        simulator.advance(5.0 * i)
        monitor.observe(simulator.page(), t=5.0 * i, duration=0.0)
        monitor.engine_version = version
        if i % 3 == 0:
            monitor.learn(5.0 * i)
    return monitor


def test_sources_are_preferred_as_peer_measured_observed_static() -> None:
    observed = driven(PLAIN, 600.0).baselines
    observed.measured, observed.static_seconds = (MEASURED,), 0.004
    observed.peers = {MODEL: replace(MEASURED, source="peer", taken_at=600.0)}
    found = []
    for _ in range(4):
        chosen, refused = observed.choose(MODEL, "0.32.0", 600.0)
        assert chosen is not None
        assert refused == ""
        found.append(chosen.source)
        if chosen.source == "peer":
            observed.peers = {}
        elif chosen.source == "measured":
            observed.measured = ()
        else:
            observed = Baselines((), 0.004)
    assert found == ["peer", "measured", "observed", "static"]
    assert Baselines((), None).choose(MODEL, "", 0.0) == (None, "")


def test_what_is_seen_without_speculation_is_a_baseline_when_there_is() -> None:
    monitor = driven(PLAIN, 900.0)
    chosen, _ = monitor.baselines.choose(MODEL, "0.32.0", 900.0)
    assert chosen is not None
    truth = PLAIN.step_time.base_seconds(chosen.points[0].decode_concurrency)
    assert chosen.points[0].tpot_seconds == pytest.approx(truth, rel=0.15)


def test_what_is_seen_with_speculation_teaches_nothing() -> None:
    monitor = driven(SCENARIOS["healthy"], 300.0)
    assert monitor.baselines.choose(MODEL, "0.32.0", 300.0) == (None, "")


def test_another_version_is_refused_in_words() -> None:
    monitor = driven(PLAIN, 600.0)
    chosen, refused = monitor.baselines.choose(MODEL, "0.33.0", 600.0)
    assert chosen is None
    assert "0.32.0" in refused
    assert "calibrate" in refused


def test_what_was_observed_survives_a_restart() -> None:
    monitor = driven(PLAIN, 600.0)
    saved = json.loads(json.dumps(monitor.learned()))
    again = Monitor(monitor.target, Settings(targets=(monitor.target,)))
    again.restore(monitor.saved(), saved, pause=10.0)
    before = monitor.baselines.choose(MODEL, "0.32.0", 600.0)
    assert again.baselines.choose(MODEL, "0.32.0", 600.0) == before
    assert before[0] is not None


def test_only_so_many_models_are_remembered() -> None:
    baselines = driven(PLAIN, 60.0).baselines
    monitor = driven(PLAIN, 60.0)
    (window,) = monitor._meter.recent(60.0)
    for i in range(3 * MOST_OBSERVED):
        baselines.observe(replace(window, model_name=f"m{i}"), "", 60.0)
    assert len(baselines.to_dict()["observed"]) == MOST_OBSERVED


def test_a_target_that_speculates_is_no_peer_and_says_so_once() -> None:
    async def run() -> list[str]:
        async with SimulatorServer(SCENARIOS["healthy"]) as server:
            target = Target(name="peer", url=server.url, role="baseline")
            quick = Thresholds(evaluation_interval=0.1)
            loop = Loop(Settings(targets=(target,), interval=0.1, rules=quick))
            running = asyncio.create_task(loop.run())
            with capture_logs() as logs:
                await asyncio.sleep(1.5)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            return [entry["event"] for entry in logs]

    assert asyncio.run(run()).count("no baseline") == 1


def test_a_live_peer_without_speculation_gives_the_others_their_gain() -> None:
    async def run() -> TargetStatus:
        async with SimulatorServer(SCENARIOS["healthy"]) as fast, SimulatorServer(PLAIN) as slow:
            targets = (
                Target(name="fast", url=fast.url),
                Target(name="slow", url=slow.url, role="baseline"),
            )
            quick = Thresholds(evaluation_interval=0.5)
            loop = Loop(Settings(targets=targets, interval=0.25, rules=quick))
            running = asyncio.create_task(loop.run())
            try:
                for _ in range(600):
                    await asyncio.sleep(0.1)
                    status = next(s for s in loop.statuses() if s.name == "fast")
                    gains = [m.gain for m in status.measurements]
                    if gains and gains[0] is not None and gains[0].tpot_gain_ratio is not None:
                        return status
                raise AssertionError(f"no gain within a minute: {status}")
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    status = asyncio.run(run())
    gain = status.measurements[0].gain
    assert gain is not None
    assert (gain.source, gain.covered) == ("peer", True)
    assert gain.tpot_gain_ratio == pytest.approx(0.14, abs=0.1)
    assert gain.baseline_tpot_seconds == pytest.approx(0.0047, rel=0.15)


def test_settings_name_a_file_or_one_time_for_any_load(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(MEASURED.to_json())
    assert read_baseline(file) == MEASURED
    named = Target(url=URL, baseline=str(file))  # type: ignore[arg-type]
    check(Settings(targets=(named,)))
    known = Target(url=URL, baseline="8ms")  # type: ignore[arg-type]
    assert known.baseline == 0.008
    gone = Target(name="a", url=URL, baseline=tmp_path / "gone.json")
    with pytest.raises(ConfigError) as caught:
        check(Settings(targets=(gone,)))
    assert str(caught.value).startswith("target a: baseline: ")
    with pytest.raises(ValueError, match="expected a duration like 8ms"):
        Target(url=URL, baseline=[])  # type: ignore[arg-type]


def test_the_gain_reaches_the_figures_the_rules_and_the_static_baseline_is_named() -> None:
    target = Target(name="m", url=URL, baseline=0.001)
    monitor = Monitor(target, Settings(targets=(target,)))
    monitor.engine_version = ""
    for i in range(200):
        n = i + 1
        monitor.observe(
            page(counters(1000 * n, (470 * n, 240 * n), first=10 * n, seconds=5.0 * n)),
            t=5.0 * i,
            duration=0.0,
        )
        if i % 3 == 0:
            monitor.judge(5.0 * i)
    status = monitor.status
    gain = status.measurements[0].gain
    assert gain is not None
    assert gain.source == "static"
    assert gain.tpot_gain_ratio == pytest.approx(1 - (5.0 / 1710) / 0.001)
    assert static("m", 0.001, 0.0).points[0].tpot_seconds == 0.001
    states = {v.rule: str(v.state) for v in status.verdicts}
    assert states["net_gain_negative"] == "firing"
    assert states["net_gain_low"] == "firing"
    (low,) = [v for v in status.verdicts if v.rule == "net_gain_low"]
    assert low.inhibited_by == "net_gain_negative"
