from __future__ import annotations

import pytest
from specdec_exporter.config import Settings
from specdec_exporter.replay import replay
from specdec_exporter.report import milliseconds, number, percent, print_table

from tests.pages import H200, counters
from tests.test_replay import row, written


def test_no_value_is_a_dash_and_not_a_0() -> None:
    assert {percent(None), number(None, 2), milliseconds(None)} == {"–"}


def test_a_ratio_is_shown_with_half_of_its_95_percent_interval() -> None:
    assert percent(0.355, 0.01) == "35.5 ± 2.0 %"


def test_a_recording_is_a_table_with_a_row_for_each_scrape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = H200 / "series_k2_pos1_collapse.jsonl"
    count = print_table(replay(path, (10.0,), Settings()))  # type: ignore[arg-type]
    shown = capsys.readouterr().out.splitlines()
    assert count == 13
    assert len(shown) == 13 + 2
    assert "47 10 %" in shown[-1]


@pytest.mark.parametrize("name", ["[/x]", "[bold]", "a\x1b[31mb", "[link=http://x]y"])
def test_names_from_outside_are_shown_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    rows = [row(t, counters(10.0 * t)) for t in (1, 2)]
    for one in rows:
        one["m"] = [line.replace('engine="0"', f'engine="{name}"') for line in one["m"]]
    path = written(tmp_path_factory.mktemp("names") / "x.jsonl", *rows)
    print_table(replay(path, (10.0,), Settings()))  # type: ignore[arg-type]
    shown = capsys.readouterr().out
    assert name.replace("\x1b", "\N{REPLACEMENT CHARACTER}") in shown
    assert "\x1b" not in shown
