"""What a sweep teaches: step times by start, and a baseline of those without speculation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.abtest.sweep import summarise
from specdec_exporter.config import ConfigError, Settings, Target
from specdec_exporter.cost import CostModel
from specdec_exporter.loop import Loop
from specdec_exporter.references import baselines, check, sweep
from specdec_exporter.store import Store
from specdec_exporter.swept import ONE_START_STDERR, SweepError, Swept, swept

from tests.test_abtest_sweep import start

MODEL = "google/gemma-4-E4B-it"
COUNTED = {
    "engine_version": "0.32.0",
    "measured_seconds": 60.0,
    "decode_tokens": 5000.0,
    "engine_prefill_tokens_per_step": 3.0,
    "context_tokens": 500.0,
    "prefill_tokens_per_token": 0.8,
}


def document(**changes: Any) -> dict[str, Any]:
    starts = [
        start(0, 0.0040, n=1, started=1000.0, **COUNTED),
        start(0, 0.0044, n=2, started=3000.0, **COUNTED),
        start(1, 0.0036, 1.5, n=1, started=2000.0, **COUNTED),
        start(1, 0.0038, 1.5, n=2, started=4000.0, **COUNTED),
    ]
    # As it is after having been a file.
    plain: dict[str, Any] = json.loads(json.dumps(summarise(starts, MODEL).to_dict()))
    return plain | changes


def test_each_start_is_a_sample_of_what_its_k_costs() -> None:
    learned = swept(document())
    assert [(s.k, s.start) for s in learned.samples] == [
        (0, 1000.0), (0, 3000.0), (1, 2000.0), (1, 4000.0),
    ]  # fmt: skip
    assert learned.samples[2].step_seconds == pytest.approx(0.0036 * 1.5)
    assert learned.samples[2].prefill_tokens_per_step == 3.0
    costs = learned.teach(CostModel())
    assert costs.measured == (0, 1)
    assert costs.starts(1) == 2


def test_a_sweep_that_is_read_again_teaches_nothing_new() -> None:
    learned = swept(document())
    once = learned.teach(CostModel())
    assert learned.teach(once) == once


def test_the_starts_without_speculation_are_a_measured_baseline_as_sure_as_they_agree() -> None:
    baseline = swept(document()).baseline
    assert baseline is not None
    assert baseline.source == "measured"
    assert (baseline.model_name, baseline.engine_version) == (MODEL, "0.32.0")
    assert baseline.taken_at == 3000.0
    (point,) = baseline.points
    assert point.tpot_seconds == pytest.approx(0.0042)
    assert point.tpot_stderr == pytest.approx(0.0002)
    assert point.decode_tokens == 10000
    assert baseline.conditions.context_tokens == 500.0
    assert baseline.conditions.prefill_tokens_per_step == 0.8


def test_one_start_is_taken_to_be_as_sure_as_starts_agree_elsewhere() -> None:
    starts = [start(0, 0.004, started=1.0, **COUNTED)]
    baseline = swept(summarise(starts, MODEL).to_dict()).baseline
    assert baseline is not None
    assert baseline.points[0].tpot_stderr == pytest.approx(ONE_START_STDERR * 0.004)


def test_concurrency_is_of_one_engine_while_there_are_requests() -> None:
    starts = [
        start(0, 0.004, started=1.0, engines=2, decode_concurrency=12.0, **COUNTED),
        start(0, 0.004, n=2, started=2.0, decode_concurrency=0.4, **COUNTED),
    ]
    learned = swept(summarise(starts, MODEL).to_dict())
    assert [s.decode_concurrency for s in learned.samples] == [6.0, 1.0]
    assert learned.baseline is not None
    assert [p.decode_concurrency for p in learned.baseline.points] == [1.0, 6.0]


def test_without_a_start_at_k_0_there_are_step_times_and_no_baseline() -> None:
    starts = [start(2, 0.004, 1.7, started=1.0, **COUNTED)]
    learned = swept(summarise(starts, MODEL).to_dict())
    assert learned.baseline is None
    assert [s.k for s in learned.samples] == [2]


def test_a_server_that_ran_at_another_k_than_it_was_told_teaches_of_the_one_that_it_ran_at() -> (
    None
):
    starts = [start(2, 0.004, 1.7, started=1.0, observed_k=1, **COUNTED)]
    assert [s.k for s in swept(summarise(starts, MODEL).to_dict()).samples] == [1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"format": "else"}, "bench sweep"),
        ({"version": 9}, "format 9"),
        ({"depths": []}, "no server of this sweep showed its counters"),
        ({"depths": [{"starts": [{}]}]}, "observed_k"),
        ({"depths": 3}, "makes no sense"),
        ({"model": None}, "no step times"),
    ],
)
def test_what_is_no_sweep_is_refused_with_one_line(value: Mapping[str, Any], said: str) -> None:
    with pytest.raises(SweepError, match=said) as refused:
        swept(document(**value))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["engines", "decode_concurrency", "step_seconds", "tpot_seconds", "started",
             "engine_prefill_tokens_per_step", "prefix_hit_ratio"],
)  # fmt: skip
@pytest.mark.parametrize(
    "number", [-1e-320, math.inf, math.nan, 10**400, "x"], ids=lambda n: str(n)[:6]
)
def test_a_number_that_makes_no_sense_refuses_the_sweep_or_does_no_harm(
    name: str, number: Any
) -> None:
    value = document()
    for depth in value["depths"]:
        for one in depth["starts"]:
            one[name] = number
    try:
        learned = swept(value)
    except SweepError as refused:
        assert "\n" not in str(refused)  # noqa: PT017 - either is right
        return
    json.dumps(learned.teach(CostModel()).to_dict(), allow_nan=False)
    assert learned.baseline is None or json.dumps(learned.baseline.to_dict(), allow_nan=False)


def test_a_sweep_of_no_engines_is_refused() -> None:
    value = document()
    value["depths"][0]["starts"][0]["engines"] = 0
    with pytest.raises(SweepError, match="makes no sense"):
        swept(value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\xff", '{"format": "x"}'])
def test_a_file_that_is_no_sweep_is_named_by_the_settings_check(tmp_path: Path, text: str) -> None:
    file = tmp_path / "sweep.json"
    file.write_bytes(text.encode("latin-1"))
    settings = Settings(targets=(Target(url="http://127.0.0.1:1", sweep=file),))
    with pytest.raises(ConfigError, match="sweep"):
        check(settings)


def test_a_target_learns_from_the_sweep_that_its_settings_name_and_remembers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(document()))
    target = Target(url="http://127.0.0.1:1/metrics", name="a", sweep=file)
    learned = sweep(target)
    assert isinstance(learned, Swept)
    chosen, refused = baselines(target).choose(MODEL, "0.32.0", 5000.0)
    assert (chosen, refused) == (learned.baseline, "")
    store = Store(None)
    loop = Loop(Settings(targets=(target,)), store)
    tuner = loop.tuner("a")
    assert tuner is not None
    saved = tuner.saved()
    assert CostModel.from_dict(saved[MODEL]["costs"]) == learned.teach(CostModel())
    # Its settings without the sweep, a process later: what was learned stays.
    store.put("tuner", {"a": saved})
    later = Loop(Settings(targets=(target.model_copy(update={"sweep": None}),)), store).tuner("a")
    assert later is not None
    assert later.saved() == saved


def test_the_newer_of_two_measured_baselines_holds(tmp_path: Path) -> None:
    learned = swept(document())
    assert learned.baseline is not None
    (tmp_path / "sweep.json").write_text(json.dumps(document()))
    for taken_at, expected in ((2000.0, learned.baseline.taken_at), (9000.0, 9000.0)):
        plain = learned.baseline.to_dict() | {"taken_at": taken_at}
        file = tmp_path / "baseline.json"
        file.write_text(type(learned.baseline).from_dict(plain).to_json())
        both = baselines(
            Target(url="http://127.0.0.1:1", sweep=tmp_path / "sweep.json", baseline=file)
        )
        chosen, _ = both.choose(MODEL, "", 9999.0)
        assert chosen is not None
        assert chosen.taken_at == expected
