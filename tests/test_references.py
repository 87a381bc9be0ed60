"""References as files: taken from a recording, and used where they fit."""

import json
import re
from pathlib import Path

import pytest
from specdec_exporter.config import ConfigError, Settings, Target
from specdec_exporter.drift import Fingerprint, Reference, configured
from specdec_exporter.model import RuleState
from specdec_exporter.references import (
    UnusableReference,
    check,
    configure,
    holds_for,
    read_reference,
    write_reference,
)
from specdec_exporter.replay import RecordingError, Rejected, replay, take_reference

from tests.pages import CPU, H200, recording

SERIES = CPU / "series_draft-real-k4.jsonl"


def reference_of(path: Path, begin: float = 0.0, duration: float | None = None) -> Reference:
    return take_reference(
        path, begin=begin, duration=duration, model_name=None, variance_inflation=13.0
    )


def test_random_words_after_code_are_drift_within_five_seconds_and_code_is_not() -> None:
    reference = reference_of(SERIES, duration=15.0)
    start = recording(SERIES)[0]["t"]
    found = [
        result.t - start
        for result in replay(SERIES, (300.0,), Settings(), reference=reference)
        if not isinstance(result, Rejected) and result.rules["drafter_drift"] is RuleState.FIRING
    ]
    assert 21.0 <= found[0] <= 26.0


@pytest.mark.parametrize("name", ["k1", "k2", "k4"])
def test_steady_series_never_drift_from_their_own_beginning(name: str) -> None:
    path = H200 / f"series_{name}.jsonl"
    reference = reference_of(path, duration=15.0)
    for result in replay(path, (300.0,), Settings(), reference=reference):
        assert not isinstance(result, Rejected)
        assert result.rules["drafter_drift"] is not RuleState.FIRING


def test_a_reference_survives_its_file(tmp_path: Path) -> None:
    reference = reference_of(SERIES, duration=15.0)
    write_reference(tmp_path / "r.json", reference)
    assert read_reference(tmp_path / "r.json") == reference
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_span_is_counted_from_the_first_scrape_and_holds_whole_intervals_only() -> None:
    rows = recording(SERIES)
    reference = reference_of(SERIES, begin=21.0, duration=20.0)
    assert reference.taken_at <= rows[0]["t"] + 41.0
    assert reference.span_seconds == pytest.approx(20.0, abs=2.1)
    assert reference.position_acceptance_ratio[0] < 0.3
    with pytest.raises(RecordingError, match="nothing was drafted in this span"):
        reference_of(SERIES, begin=1e6)


def exact(*positions: float) -> Reference:
    return configured(Fingerprint("m", 2), positions, taken_at=0.0, variance_inflation=13.0)


def test_a_span_with_a_handful_of_drafts_is_no_reference_and_says_how_many_would_be() -> None:
    with pytest.raises(RecordingError, match="drafts tell mean acceptance to ±") as refused:
        reference_of(SERIES, duration=1.0)
    drafts, margin, enough = map(
        int,
        re.findall(r"(\d+) drafts tell .* ± (\d+) % only.* of (\d+) drafts", str(refused.value))[0],
    )
    assert margin >= 50
    assert enough == pytest.approx(drafts * (margin / 10) ** 2, rel=0.05)
    assert 0.0 < reference_of(SERIES, duration=15.0).margin < 0.5
    assert exact(0.47, 0.24).margin == 0.0


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"fingerprint": 3}', "\x00", '{"a": ' * 2000]
)
def test_a_file_that_is_no_reference_is_one_line_that_says_how_to_make_one(
    tmp_path: Path, content: str
) -> None:
    file = tmp_path / "r.json"
    file.write_text(content)
    with pytest.raises(UnusableReference) as caught:
        read_reference(file)
    assert str(caught.value) == (
        f"{file}: not a reference; make one with specdec-exporter take-reference"
    )
    with pytest.raises(ConfigError) as refused:
        check(Settings(targets=(Target(url="http://a:1", name="a", reference=file),)))
    assert str(refused.value).startswith(f"target a: reference: {file}: ")


def test_a_reference_holds_for_its_model_and_k_and_for_any_version_that_it_does_not_name() -> None:
    own = reference_of(SERIES, duration=15.0)
    assert own.fingerprint == Fingerprint("tiny", 4)
    assert holds_for(own, Fingerprint("tiny", 4, "0.32.0", "b"))
    assert not holds_for(own, Fingerprint("tiny", 3))
    assert not holds_for(own, Fingerprint("other", 4))


def test_settings_name_positions_or_a_file(tmp_path: Path) -> None:
    write_reference(tmp_path / "r.json", reference_of(SERIES, duration=15.0))
    positions = configure(Target(url="http://a:1", reference=(0.47, 0.24)), 13.0)
    guide = positions(Fingerprint("m", 4), 5.0)
    assert guide is not None
    assert (guide.source, guide.position_acceptance_ratio) == ("configured", (0.47, 0.24))
    assert positions(Fingerprint("m", 0), 5.0) is None
    file = configure(Target(url="http://a:1", reference=tmp_path / "r.json"), 13.0)
    assert file(Fingerprint("m", 4), 5.0) is None
    recorded = file(Fingerprint("tiny", 4), 5.0)
    assert recorded is not None
    assert recorded.source == "recorded"
    assert json.loads((tmp_path / "r.json").read_text())["source"] == "recorded"


@pytest.mark.parametrize("value", [[], [0.2, 0.3], [1.5], ["a"], [0.0, 0.0], 3, True, {"a": 1}])
def test_positions_that_cannot_be_acceptance_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected ratios"):
        Target(url="http://a:1", reference=value)  # type: ignore[arg-type]
