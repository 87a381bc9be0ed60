"""`specdec-exporter recommend`: k by load and a batch-size schedule, from recorded scrapes."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter import cli
from specdec_exporter.baseline import Baseline, BaselinePoint
from specdec_exporter.cost import Acceptance, CostModel, Sample
from specdec_exporter.recommend import (
    Recorded,
    read_recordings,
    recommend,
    schedule,
    with_baseline,
)
from specdec_exporter.replay import RecordingError
from specdec_exporter.thresholds import Thresholds
from specdec_exporter.tuner_settings import TunerSettings

from tests import pages

H200 = Path(__file__).parent / "data" / "vllm-0.24-h200"
SETTINGS, RULES = TunerSettings(), Thresholds()


def series(*names: str) -> list[Path]:
    return [H200 / f"series_{name}.jsonl" for name in names]


def recorded(*names: str) -> Recorded:
    return read_recordings(series(*names), variance_inflation=13.0, metric_prefix=lambda _: "")


def by_hand(
    steps: dict[int, dict[float, float]],
    positions: tuple[float, ...] = (0.8, 0.68, 0.58, 0.5),
    loads: tuple[float, ...] = (1.0, 100.0),
) -> Recorded:
    costs = CostModel()
    for k, by_load in steps.items():
        for c, seconds in by_load.items():
            costs = costs.observe(Sample(k, float(k), 60.0, c, seconds))
    acceptance = Acceptance(positions, (0.01,) * len(positions), 1e6)
    return Recorded("m", costs, acceptance, tuple((c, 1.0) for c in loads), 0.0)


BANDS = by_hand(
    # Deep drafts are all but free with few requests, and dear with many.
    {
        0: {1.0: 1.0, 10.0: 1.0, 100.0: 2.0},
        1: {1.0: 1.1, 10.0: 1.1, 100.0: 2.2},
        2: {1.0: 1.15, 10.0: 1.2, 100.0: 6.0},
        3: {1.0: 1.2, 10.0: 1.8, 100.0: 9.0},
    }
)


# The recordings of an H200


def test_on_the_h200_one_draft_token_is_best_at_every_load() -> None:
    found = recommend(recorded("k0", "k1", "k2", "k4"), SETTINGS, RULES)
    best = {one.decode_concurrency: one for one in found.recommended}
    assert {1.0, 8.0, 32.0} <= best.keys()
    assert {one.k for one in found.recommended} == {1}
    for c in (1.0, 8.0, 32.0):
        assert best[c].predicted_speedup_ratio > 1
        assert best[c].stderr > 0
        assert not best[c].extrapolated


def test_predictions_are_what_the_client_saw_in_the_same_starts() -> None:
    truth = {}
    for line in (H200 / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        truth[row["k"], row["name"], row["conc"]] = row["client_tpot_token_weighted"]
    found = recommend(recorded("k0", "k1", "k2", "k4"), SETTINGS, RULES)
    for c, predictions in found.predictions:
        for one in predictions:
            if c in (1.0, 8.0, 32.0) and one.k in (1, 2, 4):
                saw = truth[0, "k0", c] / truth[one.k, f"k{one.k}", c]
                assert one.speedup == pytest.approx(saw, rel=0.06), (c, one.k)


def test_a_collapsed_position_1_is_one_draft_token_by_the_guide() -> None:
    found = recommend(recorded("k0", "k1", "k2_pos1_collapse"), SETTINGS, RULES)
    assert {one.k for one in found.recommended} == {1}
    assert "the guide says k = 1" in found.reason


def test_without_a_recording_of_k_0_the_step_is_assumed_and_that_is_told() -> None:
    found = recommend(recorded("k1", "k2"), SETTINGS, RULES)
    assert {one.k for one in found.recommended} == {1}
    assert "the step without speculation is assumed" in found.reason


def test_a_baseline_file_takes_the_place_of_a_recording_of_k_0() -> None:
    known = recorded("k1", "k2")
    points = tuple(
        BaselinePoint(c, t, 0.0, 1e4) for c, t in ((1.0, 0.00461), (7.6, 0.00476), (30.0, 0.00547))
    )
    baseline = Baseline("measured", known.model_name, "", 0.0, points)
    found = recommend(with_baseline(known, baseline.to_json()), SETTINGS, RULES)
    measured = recommend(recorded("k0", "k1", "k2"), SETTINGS, RULES)
    assert "assumed" not in found.reason
    for ours, theirs in zip(found.recommended[:6], measured.recommended[:6], strict=True):
        assert ours.predicted_speedup_ratio == pytest.approx(
            theirs.predicted_speedup_ratio, rel=0.03
        )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": []}'])
def test_a_file_that_is_no_baseline_is_refused(text: str) -> None:
    with pytest.raises(RecordingError, match="no baseline: "):
        with_baseline(BANDS, text)


def test_a_baseline_of_another_model_is_refused() -> None:
    other = Baseline("measured", "other", "", 0.0, (BaselinePoint(1.0, 0.005, 0.0, 1.0),))
    with pytest.raises(RecordingError, match="of model 'other'"):
        with_baseline(BANDS, other.to_json())


# By hand


def test_what_is_within_the_least_gain_goes_to_the_smaller_k() -> None:
    steps = {0: {8.0: 1.0}, 1: {8.0: 1.1}, 2: {8.0: 1.1 * 2.48 / 1.8 / 1.02}}
    for min_gain, k in ((0.03, 1), (0.01, 2)):
        settings = TunerSettings(min_gain=min_gain, steps_above_measured=0)
        found = recommend(by_hand(steps, loads=(8.0,)), settings, RULES)
        assert found.recommended[-1].k == k


def test_a_broken_drafter_gets_the_floor_and_is_named() -> None:
    broken = by_hand({0: {8.0: 1.0}, 1: {8.0: 1.1}}, positions=(0.02,))
    for floor in (0, 1):
        found = recommend(broken, TunerSettings(floor=floor), RULES)
        assert {one.k for one in found.recommended} == {floor}
        assert "the drafter is broken" in found.reason
    assert found.speculative_config["num_speculative_tokens"] == 1


def test_where_no_speculation_is_faster_that_is_told() -> None:
    found = recommend(by_hand({0: {8.0: 1.0}, 1: {8.0: 3.0}}), SETTINGS, RULES)
    assert "no speculation at all is faster" in found.reason


def test_too_few_drafts_are_refused() -> None:
    with pytest.raises(RecordingError, match="0 drafts were recorded, and acceptance takes 2000"):
        recommend(recorded("k0"), SETTINGS, RULES)


def test_deep_drafts_with_few_requests_and_shallow_ones_with_many_make_a_schedule() -> None:
    found = recommend(BANDS, TunerSettings(steps_above_measured=0), RULES)
    assert [k for _, _, k in found.schedule] == [3, 2, 1]
    assert found.schedule[0][0] == 1
    assert found.schedule[-1][1] == 125
    assert all(b[0] == a[1] + 1 for a, b in pairwise(found.schedule))
    assert found.speculative_config == {
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in found.schedule],
    }


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), st.integers(1, 2000))
def test_a_schedule_is_of_inclusive_ranges_without_gaps_from_1_to_the_last_batch_size(
    ks: list[int], last: int
) -> None:
    found = schedule(lambda c: ks[int(c) % len(ks)], last)
    assert found[0][0] == 1
    assert found[-1][1] == last
    assert all(first <= end and k >= 1 for first, end, k in found)
    assert all(b[0] == a[1] + 1 and b[2] != a[2] for a, b in pairwise(found))


# Recordings


def written(path: Path, loads: list[float], *, k: int = 2, model: str = "m") -> Path:
    """One scrape a second; each load is the requests in decode for one more second."""
    drafts = seconds = t = 0.0
    with path.open("w") as file:
        for n in range(len(loads) + 1):
            accepted = tuple(drafts * 0.5 ** (i + 1) for i in range(k))
            counted = pages.counters(
                round(drafts), tuple(map(round, accepted)), first=0, seconds=seconds
            )
            lines = [line.replace('model_name="m"', f'model_name="{model}"') for line in pages.lines(counted)]  # fmt: skip
            file.write(json.dumps({"t": 100 + t, "m": lines}) + "\n")
            if n < len(loads):
                drafts += 1000 * loads[n]
                seconds += loads[n]
                t += 1
    return path


def test_a_load_that_is_not_steady_makes_no_step_time(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [8.0] * 6 + [4.0, 2.0, 1.0] + [32.0] * 4)
    one = read_recordings([path], variance_inflation=13.0, metric_prefix=lambda _: "")
    assert [round(cell.decode_concurrency) for cell in one.costs.cells] == [8]
    assert one.acceptance.drafts == pytest.approx(1000 * (48 + 7 + 128), rel=0.01)
    unsteady = written(tmp_path / "b.jsonl", [1.0, 2.0, 4.0, 8.0, 16.0])
    with pytest.raises(RecordingError, match="no load was steady for 5 scrapes in a row"):
        read_recordings([unsteady], variance_inflation=13.0, metric_prefix=lambda _: "")


def test_what_nobody_saw_for_long_is_not_steady(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [8.0] * 12)
    scrapes = path.read_text().splitlines()
    path.write_text("\n".join([*scrapes[:4], *scrapes[8:]]))
    with pytest.raises(RecordingError, match="no load was steady"):
        read_recordings([path], variance_inflation=13.0, metric_prefix=lambda _: "")


def test_several_models_are_not_mixed(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{m}.jsonl", [8.0] * 6, model=m) for m in ("m", "n")]
    with pytest.raises(RecordingError, match="recordings of several models: m, n"):
        read_recordings(paths, variance_inflation=13.0, metric_prefix=lambda _: "")


# The command


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["specdec-exporter", "recommend", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, out, err


def test_the_command_prints_json_under_the_documented_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    k0, k1, k2, k4 = series("k0", "k1", "k2", "k4")
    for arguments in (
        ["--series", k0, k1, k2, k4],
        ["--series", k0, "--series", k1, "--series", k2, "--series", k4],
    ):
        code, out, err = run(capsys, monkeypatch, *arguments, "--format", "json")
        assert (code, err) == (0, "")
        printed: dict[str, Any] = json.loads(out)
        assert printed["recommended"][0].keys() == {
            "decode_concurrency", "k", "predicted_speedup_ratio", "stderr", "extrapolated",
        }  # fmt: skip
        assert printed["schedule"][0][0] == 1
        assert printed["reason"].startswith("k = 1 with 1 to 128 requests in decode")


def test_the_command_prints_a_table_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, monkeypatch, "--series", *series("k0", "k1"))
    assert code == 0
    assert "best k" in out
    assert '{"num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": [[1, ' in out


def test_the_trouble_of_the_command_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "b.json").write_bytes(b"\xff")
    k1 = series("k1")[0]
    for arguments, told in (
        (["--series", tmp_path / "x.jsonl"], "x.jsonl: No such file"),
        (["--series", *series("k0")], "add a recording with speculation on"),
        (["--series", k1, "--baseline", tmp_path / "none"], "none: No such file"),
        (["--series", k1, "--baseline", tmp_path / "b.json"], "b.json: not UTF-8"),
    ):
        code, out, err = run(capsys, monkeypatch, *arguments)
        assert (code, out) == (1, "")
        assert told in err
        assert len(err.splitlines()) == 1
