"""What is served: by scenario as whole pages, and by rule."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text
from specdec_exporter.config import Settings, Target
from specdec_exporter.duration import format_duration
from specdec_exporter.expose import (
    FAMILIES,
    Section,
    reference,
    registry,
    render,
)
from specdec_exporter.loop import Monitor
from specdec_exporter.model import ExporterStatus, Reason, ScrapeError, TargetStatus
from specdec_exporter.simulator import SCENARIOS, Scenario, Simulator
from specdec_exporter.store import Store
from specdec_exporter.tuner import Tuner
from specdec_exporter.tuner_settings import TunerSettings

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
URL = "http://127.0.0.1:8000"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def monitored(
    scenario: Scenario, until: float, settings: Settings | None = None, target: Target | None = None
) -> TargetStatus:
    """The status of a simulated server that was scraped every five seconds of virtual time."""
    settings = settings or Settings()
    simulator = Simulator(scenario, seed=1)
    target = target or Target(url="http://127.0.0.1:8000", name="demo")
    monitor = Monitor(target, settings)
    for i in range(int(until / settings.interval) + 1):
        t = settings.interval * i
        simulator.advance(t)
        try:
            result: bytes | ScrapeError = simulator.page()
        except ScrapeError as error:
            result = error
        monitor.observe(result, t=1_700_000_000.0 + t, duration=0.002)
        if t % settings.rules.evaluation_interval == 0:
            monitor.judge(1_700_000_000.0 + t)
    return monitor.status


def served(*targets: TargetStatus, window_label: bool = False, accept: str = "") -> str:
    status = ExporterStatus(
        version="0.0.0", targets=targets, window_label=window_label, last_reload_successful=True
    )
    body, _ = render(registry(lambda: status), accept)
    return re.sub(r'python_version="[^"]*"', 'python_version="3"', body.decode())


def names(page: str) -> set[str]:
    return {s.name for family in text(page) for s in family.samples}


def value(page: str, name: str, **labels: str) -> float:
    (found,) = [
        s.value
        for family in text(page)
        for s in family.samples
        if s.name == name and labels.items() <= s.labels.items()
    ]
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_each_scenario_serves_its_golden_page(scenario: str) -> None:
    page = served(monitored(SCENARIOS[scenario], until=150.0))
    path = GOLDEN / f"{scenario}.prom"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(page)
    golden = path.read_text()
    if sys.version_info >= (3, 12):
        # The pages were made with 3.11; the last digits are those of sum, which is another since.
        page, golden = rounded(page), rounded(golden)
    assert page == golden, "if this is meant: UPDATE_GOLDEN=1, and read the difference"


def rounded(page: str) -> str:
    return re.sub(r"^([^#].* )(\S+)$", lambda m: f"{m[1]}{float(m[2]):.12g}", page, flags=re.M)


def test_the_reference_in_the_docs_is_that_of_the_code() -> None:
    assert DOCS.read_text() == "\n".join(reference()) + "\n", "run make docs"


def test_the_healthy_case_is_the_guides() -> None:
    page = served(monitored(SCENARIOS["healthy"], until=300.0))
    assert value(page, "specdec_mean_acceptance_length") == pytest.approx(1.71, abs=0.03)
    assert value(page, "specdec_position_acceptance_ratio", position="1") == pytest.approx(
        0.24, abs=0.02
    )
    assert value(page, "specdec_num_speculative_tokens") == 2
    assert value(page, "specdec_window_covered_seconds") == 300


def test_a_target_at_k_2_has_at_most_65_series() -> None:
    page = served(monitored(SCENARIOS["healthy"], until=300.0))
    assert sum(not line.startswith("#") for line in page.splitlines()) <= 65


def test_a_target_at_k_2_with_all_that_can_be_known_of_it_has_at_most_65_series() -> None:
    watched = Target(url=URL, name="demo", baseline=0.005, reference=(0.47, 0.24))
    monitor = Monitor(watched, Settings(targets=(watched,)))
    monitor.engine_version = "0.32.0"
    tuner = Tuner(watched, TunerSettings(), Store(None), clock=lambda: 0.0)
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    for i in range(361):
        simulator.advance(5.0 * i)
        monitor.observe(simulator.page(), t=5.0 * i, duration=0.002)
        if i % 3 == 0:
            monitor.judge(5.0 * i)
            tuner.evaluate(monitor.evidence(5.0 * i), 5.0 * i, monitor.baseline_curves())
    page = served(replace(monitor.status, tuner=tuner.statuses()))
    assert value(page, "specdec_tpot_gain_ratio", match="concurrency") > 0
    assert value(page, "specdec_drift_score") < 1
    assert value(page, "specdec_reference_position_acceptance_ratio", position="1") == 0.24
    assert value(page, "specdec_recommended_speculative_tokens") in (1, 2, 3)
    assert value(page, "specdec_predicted_speedup_ratio", k="2") > 1
    assert value(page, "specdec_autotune_mode", mode="recommend") == 1
    assert sum(not line.startswith("#") for line in page.splitlines()) <= 65


def test_windowed_families_carry_no_engine_and_counters_carry_the_servers_own() -> None:
    page = served(monitored(SCENARIOS["two-engines"], until=60.0))
    for family in text(page):
        for s in family.samples:
            windowed = any(f.name == s.name and f.is_windowed for f in FAMILIES)
            assert not (windowed and "engine" in s.labels)
            assert s.labels.get("engine", "0") in ("0", "1")
    assert value(page, "specdec_drafts_total", engine="1") > 0


def test_with_one_window_there_is_no_window_label_and_with_several_there_is() -> None:
    two = Settings(windows="1m,5m")
    status = monitored(SCENARIOS["healthy"], until=400.0, settings=two)
    page = served(status, window_label=True)
    assert value(page, "specdec_window_covered_seconds", window="1m") == 60
    assert value(page, "specdec_window_covered_seconds", window="5m") == 300
    assert "window=" not in served(monitored(SCENARIOS["healthy"], until=60.0))


def test_without_speculation_the_target_is_up_at_k_0_without_figures_of_it() -> None:
    page = served(monitored(SCENARIOS["no-speculation"], until=60.0))
    assert value(page, "specdec_up") == 1
    assert value(page, "specdec_num_speculative_tokens") == 0
    assert value(page, "specdec_tpot_seconds") > 0
    assert not [n for n in names(page) if re.search("accept|draft|overdispersion", n)]


def test_an_idle_window_has_no_ratio_rather_than_0() -> None:
    scenario = replace(SCENARIOS["idle-night"], script=SCENARIOS["idle-night"].script[:1])
    page = served(monitored(scenario, until=600.0))
    assert value(page, "specdec_window_drafts") == 0
    assert value(page, "specdec_decode_concurrency") == 0
    assert not [n for n in names(page) if re.search("acceptance|tpot|step_seconds", n)]
    assert value(page, "specdec_accepted_tokens_total") > 0


def test_a_target_that_stops_answering_keeps_counters_and_loses_figures() -> None:
    settings = Settings()
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    monitor = Monitor(Target(url="http://127.0.0.1:8000"), settings)
    for t in (0.0, 5.0):
        simulator.advance(t)
        monitor.observe(simulator.page(), t=t, duration=0.0)
    shown = []
    for t in (10.0, 15.0, 20.0, 25.0):
        gone = ScrapeError(Reason.CONNECT, "cannot connect")
        monitor.observe(gone, t=t, duration=0.0)
        page = served(monitor.status)
        assert value(page, "specdec_up") == 0
        assert value(page, "specdec_drafts_total") > 0
        shown.append("specdec_acceptance_ratio" in names(page))
    assert shown == [True, True, False, False]
    assert value(page, "specdec_scrape_failures_total", reason="connect") == 4


@pytest.mark.parametrize("late", [-0.01, 0.0, 0.01])
def test_figures_go_with_the_third_failed_scrape_though_scrapes_are_not_on_the_dot(
    late: float,
) -> None:
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    monitor = Monitor(Target(url="http://127.0.0.1:8000"), Settings())
    for t in (0.0, 5.0):
        simulator.advance(t)
        monitor.observe(simulator.page(), t=t, duration=0.0)
    shown = []
    for t in (10.0, 15.0, 20.0):
        monitor.observe(ScrapeError(Reason.CONNECT, "gone"), t=t + late, duration=0.0)
        shown.append(bool(monitor.status.measurements))
    assert shown == [True, True, False]


def test_a_window_does_not_average_over_an_outage_longer_than_itself() -> None:
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    monitor = Monitor(Target(url="http://127.0.0.1:8000"), Settings())
    for t in (0.0, 5.0, 3605.0, 3610.0):
        simulator.advance(t)
        monitor.observe(simulator.page(), t=t, duration=0.0)
    (m,) = monitor.status.measurements
    assert m.total.covered_seconds == 5
    assert m.total.decode_concurrency > 2


def test_after_a_reload_only_the_windows_in_force_are_served() -> None:
    target = Target(url="http://127.0.0.1:8000", name="demo")
    two = Settings(windows="1m,5m")
    simulator = Simulator(SCENARIOS["healthy"], seed=1)
    monitor = Monitor(target, two)
    for t in (0.0, 5.0):
        simulator.advance(t)
        monitor.observe(simulator.page(), t=t, duration=0.0)
    monitor.reconfigure(target, Settings())
    assert value(served(monitor.status), "specdec_window_covered_seconds") == 5


def test_a_target_never_scraped_is_down_and_has_no_more_to_say() -> None:
    target = Target(url="http://127.0.0.1:8000", labels={"mig": "1g.24gb"})
    page = served(Monitor(target, Settings()).status)
    assert value(page, "specdec_up") == 0
    assert value(page, "specdec_target_info", mig="1g.24gb") == 1
    ours = {n for n in names(page) if not n.startswith("specdec_exporter_")}
    assert ours == {"specdec_up", "specdec_target_info"}


def test_labels_of_one_target_are_not_put_on_another() -> None:
    a = Target(url="http://a", labels={"mig": "0"})
    b = Target(url="http://b", labels={"zone": "z"})
    page = served(*(Monitor(t, Settings()).status for t in (a, b)))
    infos = [s.labels for f in text(page) for s in f.samples if s.name == "specdec_target_info"]
    assert [sorted(i) for i in infos] == [["mig", "target", "url"], ["target", "url", "zone"]]


def test_openmetrics_has_the_same_samples_and_no_created_series() -> None:
    status = monitored(SCENARIOS["healthy"], until=60.0)
    plain, strict = served(status), served(status, accept=OPENMETRICS)
    assert strict.endswith("# EOF\n")
    assert "_created" not in plain + strict

    def samples(families: object) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
        return {
            (s.name, tuple(sorted(s.labels.items())), s.value)
            for f in families  # type: ignore[attr-defined]
            for s in f.samples
        }

    assert samples(text(plain)) == samples(openmetrics(strict))


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text;version=abc", "text/plain;version=1.x.0", ";;=,\x7f"]
)
def test_an_accept_header_that_makes_no_sense_gets_text(accept: str) -> None:
    page = served(Monitor(Target(url="http://a"), Settings()).status, accept=accept)
    assert value(page, "specdec_up") == 0


def test_every_help_text_ends_with_its_server_series_where_there_is_one() -> None:
    read = {"drafts_total": "vllm:spec_decode_num_drafts_total", "tpot_seconds": "vllm:"}
    for name, upstream in read.items():
        (family,) = [f for f in FAMILIES if f.name == f"specdec_{name}"]
        assert upstream in family.help.rpartition(". ")[2]
    of_the_server = [f for f in FAMILIES if f.section in (Section.COUNTERS, Section.WINDOWED)]
    without = {"specdec_target_restarts_total", "specdec_window_covered_seconds"}
    for family in of_the_server:
        assert ("vllm:" in family.help.rpartition(". ")[2]) != (family.name in without)


@pytest.mark.parametrize(
    ("seconds", "text_"),
    [
        (300, "5m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (86400, "1d"),
        (0.5, "500ms"),
        (1e6, "11d13h46m40s"),
    ],
)
def test_windows_are_written_as_prometheus_does(seconds: float, text_: str) -> None:
    assert format_duration(seconds) == text_
