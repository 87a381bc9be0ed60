from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specdec_exporter.baseline import static
from specdec_exporter.calibrate import from_recordings
from specdec_exporter.config import Settings
from specdec_exporter.model import Reason, RuleState
from specdec_exporter.references import UnusableReference, read_baseline
from specdec_exporter.replay import RecordingError, Rejected, Replayed, replay
from specdec_exporter.rules import rule_table
from specdec_exporter.thresholds import PositionDecay, Thresholds

from tests.pages import CPU, H200, counters, lines, recording

KEYS = {
    *("t", "target", "model_name", "engine", "window_seconds", "covered_seconds", "drafts"),
    *("num_speculative_tokens", "acceptance_ratio", "acceptance_ratio_stderr"),
    *("front_acceptance_ratio", "mean_acceptance_length", "position_acceptance_ratio"),
    *("position_conditional_acceptance_ratio", "mean_draft_length", "draft_coverage_ratio"),
    *("tokens_per_step", "step_seconds", "tpot_seconds", "decode_concurrency", "rules"),
}


def replayed(path: Path, *windows: float, **kwargs: Any) -> list[dict[str, Any]]:
    results = list(replay(path, windows or (300.0,), Settings(), **kwargs))
    assert all(isinstance(r, Replayed) for r in results), results
    return [r.to_dict() for r in results if isinstance(r, Replayed)]


def rejected(path: Path) -> list[Rejected]:
    results = replay(path, (300.0,), Settings())
    return [r for r in results if isinstance(r, Rejected)]


def written(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def row(t: float, *engines: Any) -> dict[str, Any]:
    return {"t": t, "m": [line for i, c in enumerate(engines) for line in lines(c, str(i))]}


def test_there_is_one_result_for_each_scrape_and_window() -> None:
    path = H200 / "series_k2.jsonl"
    results = replayed(path, 10.0, 60.0)
    rows = recording(path)
    assert len(results) == 2 * len(rows)
    assert [r["t"] for r in results[::2]] == [r["t"] for r in rows]
    assert {r["window_seconds"] for r in results} == {10.0, 60.0}
    assert all(r.keys() >= KEYS for r in results)
    assert {r["target"] for r in results} == {"series_k2"}
    json.dumps(results, allow_nan=False)


def test_a_phase_is_had_by_a_window_of_its_length() -> None:
    path = H200 / "series_k2.jsonl"
    phase = [r for r in recording(path) if r["conc"] == 8]
    seconds = phase[-1]["t"] - phase[0]["t"]
    (got,) = [r for r in replayed(path, seconds) if r["t"] == phase[-1]["t"]]
    assert got["covered_seconds"] == pytest.approx(seconds)
    assert got["tpot_seconds"] == pytest.approx(0.0049587, rel=0.01)


def test_no_value_is_none_and_never_nan(tmp_path: Path) -> None:
    path = written(tmp_path / "idle.jsonl", row(0, counters(5)), row(5, counters(5)))
    first, last = replayed(path)
    assert first["covered_seconds"] == first["drafts"] == 0
    assert first["decode_concurrency"] is None
    assert last["acceptance_ratio"] is last["tpot_seconds"] is None
    assert last["position_acceptance_ratio"] == (None, None)
    assert last["decode_concurrency"] == 0


def test_several_engines_are_followed_by_all_of_them(tmp_path: Path) -> None:
    path = written(
        tmp_path / "two.jsonl",
        row(0, counters(0, (0, 0)), counters(0, (0, 0))),
        row(5, counters(900, (450, 90)), counters(100, (10, 0))),
    )
    last = replayed(path)[-3:]
    assert [r["engine"] for r in last] == ["0", "1", "all"]
    assert [r["acceptance_ratio"] for r in last] == pytest.approx([0.3, 0.05, 0.275])


def test_a_folder_of_pages_is_read_in_the_order_of_their_times(tmp_path: Path) -> None:
    for name, source, seconds in (("b", "before", 1000), ("a", "after", 1060)):
        page = (CPU / f"draft-real-k4.code-t0.{source}.prom").read_text()
        (tmp_path / f"{name}.prom").write_text(f"# scraped_at {seconds}\n{page}")
    results = replayed(tmp_path)
    assert [r["t"] for r in results] == [1000, 1060]
    assert results[-1]["mean_acceptance_length"] == pytest.approx(2.36, abs=0.06)
    assert results[-1]["target"] == tmp_path.stem


def test_a_page_without_a_time_has_that_of_its_file(tmp_path: Path) -> None:
    for name, seconds in (("before", 2000), ("after", 2030)):
        path = tmp_path / f"{name}.prom"
        shutil.copy(CPU / f"plain.{name}.prom", path)
        os.utime(path, (seconds, seconds))
    results = replayed(tmp_path)
    assert [r["t"] for r in results] == [2000, 2030]
    assert results[-1]["num_speculative_tokens"] == 0


def test_a_recorded_restart_is_no_negative_increase(tmp_path: Path) -> None:
    path = written(
        tmp_path / "restart.jsonl",
        row(0, counters(1000, (300, 2))),
        row(5, counters(100, (30, 3))),
    )
    last = replayed(path)[-1]
    assert last["drafts"] == 100
    assert last["position_acceptance_ratio"] == (0.3, 0.03)


def test_a_prefix_is_taken_off(tmp_path: Path) -> None:
    m = list(lines(counters(), prefix="ray_"))
    path = written(tmp_path / "ray.jsonl", {"t": 0, "m": m}, {"t": 5, "m": m})
    assert len(replayed(path, metric_prefix="ray_")) == 2
    assert [r.error.reason for r in rejected(path)] == [Reason.NO_SERIES] * 2


@pytest.mark.parametrize(
    "broken",
    [
        "not json",
        "[]",
        "{}",
        '{"t": 5}',
        '{"t": "x", "m": []}',
        '{"t": NaN, "m": []}',
        '{"t": 1e999, "m": []}',
        '{"t": null, "m": []}',
        '{"t": 5, "m": "text"}',
        "[" * 100_000,
        '{"t": 1' + "0" * 400 + ', "m": []}',
    ],
)
def test_a_broken_line_is_reported_by_its_place_and_the_rest_is_measured(
    tmp_path: Path, broken: str
) -> None:
    path = written(tmp_path / "x.jsonl", row(0, counters(0)), broken, row(10, counters(70)))
    results = list(replay(path, (300.0,), Settings()))
    assert str(results[1]).startswith(f"{path}:2: malformed: ")
    assert isinstance(results[2], Replayed)
    assert results[2].derived.drafts == 70


def test_a_time_that_goes_back_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", row(10, counters(0)), row(5, counters(9)))
    assert [r.error.reason for r in rejected(path)] == [Reason.CLOCK]


def test_a_bad_page_time_is_reported_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.prom").write_text("# scraped_at noon\nx 1\n")
    (problem,) = rejected(tmp_path)
    assert str(problem).startswith(f"{tmp_path / 'a.prom'}:1: malformed: ")


@pytest.mark.parametrize("name", ["missing.jsonl", "missing", "empty.jsonl", "folder", "a.txt"])
def test_a_path_that_is_no_recording_says_what_was_expected(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecordingError, match=name):
        list(replay(tmp_path / name, (300.0,), Settings()))


def test_a_folder_in_place_of_a_page_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "odd.prom").mkdir()
    shutil.copy(CPU / "plain.after.prom", tmp_path)
    assert len(replayed(tmp_path)) == 1


def test_an_empty_page_is_reported_by_its_name(tmp_path: Path) -> None:
    shutil.copy(CPU / "plain.after.prom", tmp_path / "a.prom")
    (tmp_path / "c.prom").write_text("")
    (problem,) = rejected(tmp_path)
    assert str(problem).startswith(f"{tmp_path / 'c.prom'}: empty: ")


def test_a_recording_is_judged_at_its_own_time() -> None:
    settings = Settings(rules=Thresholds(position_decay=PositionDecay(for_=4.0)))
    results = list(replay(H200 / "series_k2_pos1_collapse.jsonl", (30.0,), settings))
    start = results[0].t  # type: ignore[union-attr]
    states = [(r.t - start, r.rules["position_decay"]) for r in results]  # type: ignore[union-attr]
    pending = [t for t, state in states if state is RuleState.PENDING]
    firing = [t for t, state in states if state is RuleState.FIRING]
    assert firing
    assert pending
    # The condition was seen at one scrape, and fires at the first one 4 s later.
    assert firing[0] >= pending[0] + 4.0
    assert max(pending) < firing[0] <= pending[0] + 4.0 + 1.5
    assert {r.rules["drafter_broken"] for r in results} <= {  # type: ignore[union-attr]
        RuleState.INACTIVE,
        RuleState.INCONCLUSIVE,
    }


def test_each_result_has_the_state_of_every_rule() -> None:
    names = {rule.name for rule in rule_table(Settings())}
    for result in replayed(H200 / "series_k1.jsonl", 10.0):
        assert set(result["rules"]) == names
        assert result["rules"]["position_decay"] == "inapplicable"
        assert result["rules"]["net_gain_low"] == "inapplicable"
        assert result["rules"]["target_down"] == "inactive"


# The net gain


GAIN_KEYS = {
    *("tpot_gain_ratio", "tpot_gain_throughput_ratio", "break_even_length"),
    *("baseline_tpot_seconds", "baseline_covered"),
}


def h200_baseline(tmp_path: Path) -> Path:
    made, _ = from_recordings([(H200 / "series_k0.jsonl", "")])
    path = tmp_path / "baseline.json"
    path.write_text(made.to_json())
    return path


@pytest.mark.parametrize(("name", "gain"), [("k1", 0.103), ("k2", -0.042), ("k4", -0.485)])
def test_the_gain_of_a_phase_is_in_the_figures_of_its_window(
    tmp_path: Path, name: str, gain: float
) -> None:
    path = H200 / f"series_{name}.jsonl"
    phase = [r for r in recording(path) if r["conc"] == 8]
    seconds = phase[-1]["t"] - phase[0]["t"]
    baseline = read_baseline(h200_baseline(tmp_path))
    (got,) = [r for r in replayed(path, seconds, baseline=baseline) if r["t"] == phase[-1]["t"]]
    assert got.keys() >= GAIN_KEYS
    assert got["tpot_gain_ratio"] == pytest.approx(gain, abs=0.02)
    assert got["tpot_gain_ratio"] == pytest.approx(
        1 - got["tpot_seconds"] / got["baseline_tpot_seconds"]
    )
    assert got["baseline_covered"] is True
    json.dumps(got, allow_nan=False)


def test_without_a_baseline_nothing_is_said_of_a_gain() -> None:
    assert not GAIN_KEYS & replayed(H200 / "series_k2.jsonl")[-1].keys()


def test_a_baseline_of_another_model_is_refused_and_the_rest_is_measured(tmp_path: Path) -> None:
    baseline = replace(read_baseline(h200_baseline(tmp_path)), model_name="other")
    last = replayed(H200 / "series_k2.jsonl", baseline=baseline)[-1]
    assert last["tpot_gain_ratio"] is None
    assert last["baseline_covered"] is False
    assert last["gain_reason"].startswith("measured baseline refused: it is of model 'other'")
    assert last["acceptance_ratio"] is not None


def test_several_engines_have_a_gain_each_and_one_together(tmp_path: Path) -> None:
    path = written(
        tmp_path / "two.jsonl",
        row(0, counters(0, (0, 0)), counters(0, (0, 0), seconds=0)),
        row(5, counters(900, (450, 90), seconds=6.0), counters(100, (10, 0), seconds=2.0)),
    )
    last = replayed(path, baseline=static("m", 0.005, 0.0))[-3:]
    tpots = [5 / 1440, 2 / 110, 7 / 1550]
    assert [r["tpot_gain_ratio"] for r in last] == pytest.approx([1 - t / 0.005 for t in tpots])


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"\xff", "utf-8"), (b"{}", "calibrate"), (b"x", "not JSON")],
)
def test_a_file_that_is_no_baseline_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnusableReference, match=f"baseline.json: .*{said}"):
        read_baseline(path)
