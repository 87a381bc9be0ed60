from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter.parse import parse
from specdec_exporter.simulator import SCENARIOS, Simulator

from tests.pages import CPU

REAL = CPU / "draft-real-k4.after.prom"
PLAIN = CPU / "plain.after.prom"

# Their bounds follow the longest context that the server accepts, 1 Ki tokens on the recorded one.
LENGTHS = {
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_prefill_kv_computed_tokens",
}

Shape = list[tuple[str, str, str, tuple[str, ...]]]


def shape(page: str) -> Shape:
    """Family, type, series name and label names in order, each as often as first seen."""
    seen: dict[tuple[str, str, str, tuple[str, ...]], None] = {}
    family = kind = ""
    for line in page.splitlines():
        if line.startswith("# TYPE"):
            _, _, family, kind = line.split()
            seen[family, kind, "", ()] = None
        elif not line.startswith("#"):
            name = re.match(r"[\w:]+", line)
            assert name is not None
            seen[family, kind, name[0], tuple(re.findall(r'[{,](\w+)="', line))] = None
    return list(seen)


def bounds(page: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        if bucket := re.match(r'([\w:]+)_bucket\{.*?le="([^"]+)"', line):
            found.setdefault(bucket[1], []).append(bucket[2])
    return found


def after_load(name: str, k: int | None = None) -> Simulator:
    scenario = SCENARIOS[name]
    simulator = Simulator(scenario if k is None else replace(scenario, k=k), 1)
    simulator.advance(50.0)
    return simulator


@pytest.mark.parametrize(("k", "real"), [(4, REAL), (0, PLAIN)], ids=["speculating", "plain"])
def test_families_types_and_labels_are_those_of_the_real_page_in_its_order(
    k: int, real: Path
) -> None:
    page = after_load("healthy", k).page().decode()
    recorded = real.read_text()
    assert shape(page) == shape(recorded)
    assert len(page) == pytest.approx(len(recorded), rel=0.15)


def test_bucket_bounds_are_those_of_the_real_page() -> None:
    ours, real = bounds(after_load("healthy").page().decode()), bounds(REAL.read_text())
    assert ours.keys() == real.keys()
    for name, recorded in real.items():
        if name in LENGTHS:
            assert ours[name][: len(recorded) - 1] == recorded[:-1]
        else:
            assert ours[name] == recorded


def test_before_the_first_request_a_page_has_what_the_real_one_has() -> None:
    real = CPU / "plain.before.prom"
    assert shape(Simulator(SCENARIOS["no-speculation"]).page().decode()) == shape(real.read_text())


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_page_says_exactly_what_the_snapshot_says(name: str) -> None:
    simulator = after_load(name)
    snapshot = simulator.snapshot()
    assert parse(simulator.page(), t=snapshot.t) == snapshot


def test_a_page_after_a_restart_parses_to_the_new_process() -> None:
    simulator = Simulator(SCENARIOS["restart"], 1)
    simulator.advance(90.5)
    assert parse(simulator.page(), t=90.5) == simulator.snapshot()


def test_without_speculation_no_series_speaks_of_it() -> None:
    assert b"spec_decode" not in after_load("no-speculation").page()
    assert b"spec_decode" in Simulator(SCENARIOS["healthy"]).page()


def test_a_server_of_several_processes_shows_neither_its_start_nor_its_process() -> None:
    page = after_load("two-engines").page().decode()
    assert not re.search(r"^(process_|python_)|_created\b", page, re.MULTILINE)
    one = shape(after_load("healthy").page().decode())
    without = [s for s in one if not re.search(r"^(process_|python_)|_created$", s[0])]
    assert shape(page) == without


def test_histograms_are_cumulative_and_agree_with_the_counters() -> None:
    simulator = after_load("healthy")
    page = simulator.page().decode()
    values = {}
    for family in text_string_to_metric_families(page):
        buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
        if family.type == "histogram":
            assert buckets == sorted(buckets)
            count = next(s.value for s in family.samples if s.name.endswith("_count"))
            assert buckets[-1] == count
        values |= {s.name: s.value for s in family.samples}
    finished = sum(
        s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if s.name == "vllm:request_success_total"
    )
    started = values["vllm:time_to_first_token_seconds_count"]
    assert values["vllm:e2e_request_latency_seconds_count"] == finished
    assert finished < started <= finished + values["vllm:num_requests_running"]
    assert values["vllm:request_generation_tokens_sum"] < values["vllm:generation_tokens_total"]
    assert values["vllm:iteration_tokens_total_sum"] == (
        values["vllm:prompt_tokens_total"] + values["vllm:generation_tokens_total"]
    )
    assert 0.0 < values["vllm:kv_cache_usage_perc"] < 1.0


def test_the_help_texts_are_our_own() -> None:
    def helps(page: str) -> set[str]:
        return set(re.findall(r"^# HELP [\w:]+ (.*)$", page, re.MULTILINE))

    assert helps(after_load("healthy").page().decode()).isdisjoint(helps(REAL.read_text()))


def test_a_model_name_may_hold_any_character() -> None:
    name = 'a "quoted"\\model\nname'
    simulator = Simulator(replace(SCENARIOS["healthy"], model_name=name))
    assert parse(simulator.page(), t=0.0).engines[0].model_name == name
