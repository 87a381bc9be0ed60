"""The last hour in few points."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.config import Settings, Target
from specdec_exporter.history import SPAN_SECONDS, STEP_SECONDS, History
from specdec_exporter.loop import Monitor
from specdec_exporter.measure import Meter
from specdec_exporter.model import Measurement

from tests import pages


def measurement(model_name: str = "m") -> Measurement:
    meter = Meter((300.0,), 13.0)
    for n in (1, 2):
        meter.add(
            pages.snapshot(
                5.0 * n, pages.counters(1000 * n, (470 * n, 240 * n)), model_name=model_name
            )
        )
    (found,) = meter.measure()
    return found


M = measurement()


def test_a_moment_has_what_was_measured() -> None:
    history = History()
    history.add([M], 1000.0)
    (kept,) = history.moments()["m"]
    assert kept.t == 1000.0
    assert (kept.position_0, kept.position_1) == pytest.approx((0.47, 0.24))
    assert kept.acceptance_ratio == pytest.approx(0.355)
    assert kept.mean_acceptance_length == pytest.approx(1.71)
    assert kept.num_speculative_tokens == 2
    assert kept.tpot_gain_ratio is kept.baseline_tpot_seconds is None


def test_without_speculation_there_are_no_positions() -> None:
    off = replace(M, total=replace(M.total, position_acceptance_ratio=(), num_speculative_tokens=0))
    history = History()
    history.add([off], 1.0)
    (kept,) = history.moments()["m"]
    assert kept.position_0 is kept.position_1 is None


@given(st.lists(st.floats(1.0, 600.0), min_size=1, max_size=200))
def test_it_is_bounded_in_order_and_keeps_the_last_of_each_half_minute(steps: list[float]) -> None:
    history, t, times = History(), 0.0, []
    for step in steps:
        t += step
        times.append(t)
        history.add([M], t)
    kept = [moment.t for moment in history.moments()["m"]]
    last = {at // STEP_SECONDS: at for at in times}
    assert kept == [at for at in last.values() if at >= t - SPAN_SECONDS]
    assert len(kept) <= SPAN_SECONDS / STEP_SECONDS + 1


def test_a_model_that_is_gone_is_kept_for_an_hour() -> None:
    history = History()
    history.add([measurement("old")], 0.0)
    history.add([M], SPAN_SECONDS)
    assert history.moments().keys() == {"m", "old"}
    history.add([M], SPAN_SECONDS + 1)
    assert history.moments().keys() == {"m"}


def test_a_clock_that_went_back_begins_anew() -> None:
    history = History()
    for t in (1000.0, 1100.0, 500.0, 530.0):
        history.add([M], t)
    assert [moment.t for moment in history.moments()["m"]] == [500.0, 530.0]


def test_an_evaluation_adds_a_moment_and_a_scrape_does_not() -> None:
    monitor = Monitor(Target(url="http://127.0.0.1:8000"), Settings())
    for n in range(1, 20):
        page = pages.page(pages.counters(1000 * n, (470 * n, 240 * n), first=10 * n, seconds=n))
        monitor.observe(page, t=5.0 * n, duration=0.1)
    assert monitor.history.moments() == {}
    monitor.judge(100.0)
    monitor.judge(130.0)
    assert [m.t for m in monitor.history.moments()["m"]] == [100.0, 130.0]
