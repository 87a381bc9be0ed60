"""Where lines and bars run."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.chart import HEIGHT, WIDTH, Plot, gauge, plot

LINE = [(0.0, 1.0), (30.0, 2.0), (60.0, 1.5)]


def drawn(*lines: list[tuple[float, float | None]], **settings: object) -> Plot:
    found = plot(lines, **{"begin": 0.0, "end": 60.0, "gap": 75.0} | settings)  # type: ignore[arg-type]
    assert found is not None
    return found


def corners(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+?) (\d+\.\d)", path)]


def test_a_line_runs_from_edge_to_edge_with_large_values_on_top() -> None:
    (path,) = drawn(LINE).paths
    (x0, y0), (x1, y1), (x2, y2) = corners(path)
    assert (x0, x1, x2) == (0, WIDTH / 2, WIDTH)
    assert 0 <= y1 < y2 < y0 <= HEIGHT


@pytest.mark.parametrize(
    "line", [[(0.0, 1.0), (20.0, None), (40.0, 1.0)], [(0.0, 1.0), (100.0, 1.0)]]
)
def test_a_line_breaks_where_nothing_is_known(line: list[tuple[float, float | None]]) -> None:
    (path,) = drawn(line, end=100.0).paths
    assert path.count("M") == 2
    assert "L" not in path


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=50),
    st.one_of(st.none(), st.floats(-1e6, 1e6)),
)
def test_everything_is_in_the_picture(values: list[float | None], limit: float | None) -> None:
    line = [(float(i), value) for i, value in enumerate(values)]
    found = plot([line], begin=0.0, end=50.0, gap=2.0, limit=limit, band=(1.0, 2.0), include=(0.0,))
    if found is None:
        assert all(value is None for value in values)
        return
    heights = [y for _, y in corners(found.paths[0])]
    assert len(heights) == sum(value is not None for value in values)
    assert all(0 <= y <= HEIGHT for y in heights)
    assert found.band is not None
    assert 0 <= found.band[0] <= found.band[0] + found.band[1] <= HEIGHT
    assert found.limit is None or 0 <= found.limit <= HEIGHT


def test_a_flat_line_runs_through_the_middle_and_noise_is_no_mountain() -> None:
    assert {y for _, y in corners(drawn([(0.0, 5.0), (60.0, 5.0)]).paths[0])} == {HEIGHT / 2}
    (_, y0), (_, y1) = corners(drawn([(0.0, 5.0), (60.0, 5.001)]).paths[0])
    assert abs(y1 - y0) < 1


def test_there_is_no_picture_of_nothing() -> None:
    assert plot([[]], begin=0.0, end=1.0, gap=1.0) is None
    assert plot([LINE], begin=1.0, end=1.0, gap=1.0) is None


def test_a_gauge_shows_value_interval_band_and_limit_on_its_scale() -> None:
    found = gauge(0.3, (0.0, 0.6), half_width=0.03, band=(0.34, 0.36), limit=0.15)
    assert (found.value, found.limit) == pytest.approx((50, 25))
    assert found.interval == pytest.approx((45, 10))
    assert found.band == pytest.approx((56.667, 3.333), abs=0.001)


def test_what_lies_beyond_a_gauge_stands_at_its_end() -> None:
    assert gauge(9.0, (0.0, 1.0)).value == 100
    assert gauge(-9.0, (0.0, 1.0), half_width=1.0).interval == (0, 0)
