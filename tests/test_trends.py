"""An hour of a model as small plots."""

from __future__ import annotations

from dataclasses import replace

from specdec_exporter.history import Moment
from specdec_exporter.trends import Trends, trends

MOMENT = Moment(
    t=0.0,
    num_speculative_tokens=2,
    acceptance_ratio=0.355,
    mean_acceptance_length=1.71,
    position_0=0.47,
    position_1=0.24,
    tpot_seconds=0.0041,
    baseline_tpot_seconds=0.0047,
    tpot_gain_ratio=0.128,
    decode_concurrency=6.0,
)
HOUR = [replace(MOMENT, t=30.0 * i) for i in range(121)]


def shown(moments: list[Moment], now: float | None = None, **limit: float) -> Trends:
    found = trends(moments, moments[-1].t if now is None else now, limit)
    assert found is not None
    return found


def by_name(found: Trends) -> dict[str, tuple[str, ...]]:
    return {one.name: one.now for one in found.plots}


def test_each_figure_has_its_plot_its_value_and_its_extent() -> None:
    found = shown(HOUR)
    assert by_name(found) == {
        "Acceptance": ("35.5 %",),
        "MAL": ("1.71",),
        "Position 0 / 1": ("47.0 %", "24.0 %"),
        "TPOT / baseline": ("4.10 ms", "4.70 ms"),
        "Net TPOT gain": ("+12.8 %",),
        "Requests in decode": ("6.0",),
    }
    assert found.span == "hour"
    assert found.plots[2].extent == "24.0 % to 47.0 %"
    assert found.plots[2].says.startswith("Now position 0 47.0 % and position 1 24.0 %;")


def test_what_was_never_known_has_no_plot_and_what_is_not_known_now_says_so() -> None:
    bare = [replace(m, baseline_tpot_seconds=None, tpot_gain_ratio=None) for m in HOUR]
    bare[-1] = replace(bare[-1], acceptance_ratio=None)
    found = by_name(shown(bare))
    assert "Net TPOT gain" not in found
    assert found["TPOT"] == ("4.10 ms",)
    assert found["Acceptance"] == ("not known",)


def test_k_is_shown_where_it_changed() -> None:
    changed = [
        *HOUR[:60],
        *(replace(m, num_speculative_tokens=1, position_1=None) for m in HOUR[60:]),
    ]
    found = by_name(shown(changed))
    assert found["k"] == ("1",)
    assert found["Position 0 / 1"] == ("47.0 %",)


def test_bands_and_limits_are_drawn_where_they_mean_what_is_drawn() -> None:
    limit = {"acceptance_low": 0.25, "position_decay": 0.15}
    acceptance, _, positions, *_ = shown(HOUR, **limit).plots
    assert acceptance.plot.band is not None
    assert acceptance.plot.limit is not None
    assert positions.plot.limit is not None
    deep = [replace(m, num_speculative_tokens=4) for m in HOUR]
    assert shown(deep, **limit).plots[0].plot.band is None
    assert shown(deep, **limit).plots[0].plot.limit is None


def test_the_first_minutes_do_not_look_like_an_hour_and_one_moment_is_no_line() -> None:
    assert shown(HOUR[:5]).span == "10m"
    assert shown(HOUR[:61]).span == "30m"
    assert trends(HOUR[:1], 0.0, {}) is None


def test_a_model_gone_silent_shows_what_it_was() -> None:
    assert by_name(shown(HOUR[:60], now=3600.0))["MAL"] == ("was 1.71",)
