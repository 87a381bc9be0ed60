from __future__ import annotations

import contextlib
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.model import (
    CIRCUMSTANCES,
    SCALARS,
    Counters,
    Reason,
    ScrapeError,
    Snapshot,
    Window,
)
from specdec_exporter.parse import parse
from specdec_exporter.window import History, combine

from tests.pages import counters, page, snapshot


def history(*snapshots: Snapshot, max_age: float = 300.0) -> History:
    made = History(max_age)
    for one in snapshots:
        made.add(one)
    return made


def only(windows: tuple[Window, ...]) -> Window:
    (window,) = windows
    return window


def refused(past: History, one: Snapshot) -> Reason:
    with pytest.raises(ScrapeError) as caught:
        past.add(one)
    return caught.value.reason


def test_a_window_is_what_was_counted_between_its_first_and_last_scrape() -> None:
    past = history(snapshot(0, counters(100, (47, 24))), snapshot(5, counters(160, (70, 31))))
    window = only(past.windows(300))
    assert window.increase.drafts == 60
    assert window.increase.accepted_per_position == (23, 7)
    assert window.covered_seconds == 5


def test_a_window_starts_at_the_last_scrape_at_or_before_its_edge() -> None:
    past = history(*(snapshot(t, counters(10 * t)) for t in (0, 4, 8, 12, 16)))
    assert only(past.windows(8)).increase.drafts == 80
    assert only(past.windows(9)).covered_seconds == 12
    assert only(past.windows(7.9995)).covered_seconds == 8, "a clock is not exact"


def test_the_first_scrape_alone_counts_nothing() -> None:
    window = only(history(snapshot(0, counters(10_000))).windows(300))
    assert window.covered_seconds == 0
    assert window.increase.drafts == 0


def test_a_missed_scrape_loses_nothing() -> None:
    all_of_them = history(*(snapshot(t, counters(10 * t)) for t in (0, 5, 10, 15)))
    one_missed = history(*(snapshot(t, counters(10 * t)) for t in (0, 5, 15)))
    assert only(one_missed.windows(300)).increase == only(all_of_them.windows(300)).increase


def test_one_counter_that_falls_resets_its_whole_engine() -> None:
    # The position counter is slow: 2 before the restart and 3 after it are five, not one.
    before, after = counters(1000, (300, 2)), counters(900, (290, 3))
    past = history(snapshot(0, before), snapshot(5, after))
    window = only(past.windows(300))
    assert window.increase == after
    assert past.totals()[0].restarts == 1


@pytest.mark.parametrize("name", [f.name for f in fields(Counters)])
def test_any_one_series_going_down_is_a_reset(name: str) -> None:
    before = replace(counters(100, (50, 20)), **dict.fromkeys(CIRCUMSTANCES, 10.0))
    after = counters(1000, (500, 200), first=100, seconds=10)
    after = replace(after, **dict.fromkeys(CIRCUMSTANCES, 20.0))
    lower = (49.0, 200.0) if name == "accepted_per_position" else getattr(before, name) - 0.5
    fallen = replace(after, **{name: lower})
    assert only(history(snapshot(0, before), snapshot(5, fallen)).windows(300)).increase == fallen


def test_a_new_process_start_time_is_a_reset_though_every_counter_is_higher() -> None:
    after = counters(500)
    past = history(snapshot(0, counters(100), start=1.0), snapshot(5, after, start=2.0))
    assert only(past.windows(300)).increase == after
    assert past.totals()[0].restarts == 1


def test_a_reset_of_one_engine_leaves_the_other_alone() -> None:
    past = history(
        snapshot(0, counters(100), counters(100)), snapshot(5, counters(150), counters(30))
    )
    assert [w.increase.drafts for w in past.windows(300)] == [50, 30]
    assert [e.restarts for e in past.totals()] == [0, 1]


def test_no_window_spans_a_change_of_k() -> None:
    past = history(
        snapshot(0, counters(100, (47, 24))),
        snapshot(5, counters(200, (94, 48))),
        snapshot(10, counters(10, (5, 2, 1, 0))),
        snapshot(15, counters(30, (14, 7, 3, 1))),
    )
    window = only(past.windows(300))
    assert window.num_speculative_tokens == 4
    assert window.covered_seconds == 5
    assert window.increase.drafts == 20


def test_totals_go_on_over_restarts_and_changes_of_k() -> None:
    past = history(
        snapshot(0, counters(100, (47, 24))),
        snapshot(5, counters(200, (94, 48))),
        snapshot(10, counters(10, (5, 2, 1, 0))),
        snapshot(15, counters(30, (14, 7, 3, 1))),
        snapshot(20, counters(8, (3,))),
    )
    (total,) = past.totals()
    assert total.counters.drafts == 100 + 10 + 20 + 8
    assert total.counters.accepted_per_position == (47 + 14 + 3, 24 + 7, 3, 1)
    assert total.restarts == 2


def test_speculation_switched_off_and_on_again_keeps_the_counters() -> None:
    plain = Counters(
        generation_tokens=50.0, first_tokens=5.0, decode_seconds=0.5, decode_steps=45.0
    )
    past = history(snapshot(0, counters(100)), snapshot(5, counters(200)), snapshot(10, plain))
    window = only(past.windows(300))
    assert window.num_speculative_tokens == 0
    assert window.increase.drafts is None
    assert past.totals()[0].counters.drafts == 100
    past.add(snapshot(15, counters(30, first=1)))
    assert past.totals()[0].counters.drafts == 130


def test_circumstances_may_come_and_go_without_a_mark_on_any_figure() -> None:
    known = {"preemptions": 3.0, "prompt_tokens": 50.0}
    past = history(
        snapshot(0, counters(100)),
        snapshot(5, replace(counters(200), **known)),
        snapshot(10, counters(300)),
        snapshot(15, replace(counters(400), preemptions=4.0, prompt_tokens=70.0)),
    )
    window = only(past.windows(300))
    assert window.covered_seconds == 15
    assert window.increase.drafts == 300
    assert window.increase.preemptions is window.increase.prompt_tokens is None
    assert only(past.windows(5)).increase.preemptions is None
    past.add(snapshot(20, replace(counters(500), preemptions=6.0, prompt_tokens=90.0)))
    assert only(past.windows(5)).increase.preemptions == 2
    assert only(past.windows(5)).increase.prompt_tokens == 20


def test_decode_tokens_served_as_a_counter_never_fall() -> None:
    # Requests that fail after their first token add to one counter only.
    before = counters(100)
    failed = replace(before, first_tokens=40.0, generation_tokens=before.generation_tokens)
    more = replace(failed, generation_tokens=before.generation_tokens + 100)
    past = history(snapshot(0, before))
    seen = []
    for t, c in ((5, failed), (10, more)):
        past.add(snapshot(t, c))
        seen.append(past.totals()[0].decode_tokens)
    assert seen == [0, 70]


def test_a_clock_that_goes_back_once_costs_one_scrape() -> None:
    past = history(snapshot(0, counters(100)), snapshot(5, counters(150)))
    assert refused(past, snapshot(3, counters(170))) is Reason.CLOCK
    past.add(snapshot(10, counters(200)))
    window = only(past.windows(300))
    assert (window.increase.drafts, window.covered_seconds) == (100, 10)


def test_a_clock_that_was_set_back_begins_new_windows_and_keeps_the_counters() -> None:
    past = history(snapshot(1000, counters(100)), snapshot(1005, counters(150)))
    assert refused(past, snapshot(10, counters(160))) is Reason.CLOCK
    past.add(snapshot(15, counters(170)))
    assert only(past.windows(300)).covered_seconds == 0
    past.add(snapshot(20, counters(200)))
    window = only(past.windows(300))
    assert (window.increase.drafts, window.covered_seconds) == (30, 5)
    assert past.totals()[0].counters.drafts == 100


def test_the_same_time_twice_is_refused() -> None:
    past = history(snapshot(5, counters(100)))
    for _ in range(3):
        assert refused(past, snapshot(5, counters(150))) is Reason.CLOCK


def test_series_that_vanish_without_a_restart_are_doubted_once_and_then_believed() -> None:
    full = counters(150, first=20)
    cut = replace(full, first_tokens=None)
    past = history(snapshot(0, counters(100)))
    assert refused(past, snapshot(5, cut)) is Reason.MISSING_SERIES
    past.add(snapshot(10, full))
    assert only(past.windows(300)).increase.drafts == 50
    assert refused(past, snapshot(15, cut)) is Reason.MISSING_SERIES
    past.add(snapshot(20, cut))
    window = only(past.windows(300))
    assert window.covered_seconds == 0
    assert window.increase.first_tokens is None
    assert past.totals()[0].counters.first_tokens == 10


def test_positions_that_vanish_without_a_restart_are_not_a_smaller_k_yet() -> None:
    past = history(snapshot(0, counters(100, (47, 24))))
    assert refused(past, snapshot(5, counters(200, (94,)))) is Reason.MISSING_SERIES


def test_an_engine_that_vanishes_is_doubted_once_then_has_no_window_but_keeps_its_counters() -> (
    None
):
    past = history(
        snapshot(0, counters(100), counters(100)), snapshot(5, counters(150), counters(140))
    )
    assert refused(past, snapshot(10, counters(200))) is Reason.MISSING_SERIES
    past.add(snapshot(15, counters(250)))
    assert [w.engine for w in past.windows(300)] == ["0"]
    assert [e.counters.drafts for e in past.totals()] == [150, 40]


def test_replicas_behind_one_proxy_are_summed_under_their_engine() -> None:
    def both(a: float, b: float) -> bytes:
        return b"".join(
            page(counters(n)).replace(b'engine="0"', b'engine="0",pod="%d"' % i)
            for i, n in enumerate((a, b))
        )

    past = history(*(parse(both(100 * t, 10 * t), t=t) for t in (1, 2)), parse(both(20, 30), t=3))
    window = only(past.windows(300))
    assert window.increase.drafts == 100 + 20 + 10 + 10
    (total,) = past.totals()
    assert (total.engine, total.counters.drafts, total.restarts) == ("0", 140, 1)


def test_history_is_bounded_and_a_long_window_is_still_right() -> None:
    past = History(3600.0)
    for i in range(4000):
        past.add(snapshot(5.0 * i, counters(10.0 * i)))
    (engine,) = past._engines.values()
    assert len(engine.dense) <= 62
    assert len(engine.thin) <= 62
    window = only(past.windows(3600))
    assert 3600 <= window.covered_seconds <= 3665
    assert window.increase.drafts == pytest.approx(2 * window.covered_seconds)
    assert only(past.windows(300)).covered_seconds == 300


# Up to 25 scrapes within five minutes, of which all are kept.
steps = st.lists(
    st.tuples(
        st.floats(0.5, 12),
        st.sampled_from(["count", "count", "count", "restart"]),
        st.integers(0, 50),
        st.integers(0, 50),
        st.integers(0, 50),
    ),
    min_size=2,
    max_size=25,
)


def played(script: list[tuple[float, str, int, int, int]]) -> list[Snapshot]:
    made, t, drafts, positions, start = [], 0.0, 0, (0, 0), 1.0
    for seconds, event, d, first, second in script:
        t += seconds
        if event == "restart":
            drafts, positions, start = 0, (0, 0), start + 1
        p0 = min(first, d)
        drafts, positions = drafts + d, (positions[0] + p0, positions[1] + min(second, p0))
        made.append(snapshot(t, counters(drafts, positions, seconds=drafts / 7), start=start))
    return made


@given(steps)
def test_increases_are_never_negative(script: list[tuple[float, str, int, int, int]]) -> None:
    past = History(300.0)
    for one in played(script):
        past.add(one)
        for seconds in (0.1, 60, 300, 9e9):
            counted = only(past.windows(seconds)).increase
            values = [getattr(counted, name) for name in SCALARS if name not in CIRCUMSTANCES]
            assert all(v >= 0 for v in (*values, *counted.accepted_per_position))


@given(steps, st.data())
def test_splitting_a_window_and_adding_gives_the_whole(
    script: list[tuple[float, str, int, int, int]], data: st.DataObject
) -> None:
    snapshots = played(script)
    cut = data.draw(st.integers(0, len(snapshots) - 1))
    past = History(9e9)
    for one in snapshots[: cut + 1]:
        past.add(one)
    left = only(past.windows(9e9))
    for one in snapshots[cut + 1 :]:
        past.add(one)
    right = only(past.windows(snapshots[-1].t - snapshots[cut].t))
    whole = only(past.windows(9e9))
    summed = left.increase + right.increase
    assert summed.drafts == whole.increase.drafts
    assert summed.accepted_per_position == whole.increase.accepted_per_position
    assert summed.decode_seconds == pytest.approx(whole.increase.decode_seconds)
    assert left.covered_seconds + right.covered_seconds == pytest.approx(whole.covered_seconds)


@given(steps, steps)
def test_summing_engines_commutes_with_parsing(
    a: list[tuple[float, str, int, int, int]], b: list[tuple[float, str, int, int, int]]
) -> None:
    pairs = [
        (x.engines[0].counters, y.engines[0].counters)
        for x, y in zip(played(a), played(b), strict=False)
        if x.process_start_time == y.process_start_time == 1.0
    ]
    apart, together = History(9e9), History(9e9)
    for t, (x, y) in enumerate(pairs):
        apart.add(parse(page(x, y), t=t))
        together.add(parse(page(x + y), t=t))
    if pairs:
        summed = combine(apart.windows(9e9)).increase
        whole = only(together.windows(9e9)).increase
        assert summed.drafts == whole.drafts
        assert summed.accepted_per_position == whole.accepted_per_position
        assert summed.decode_seconds == pytest.approx(whole.decode_seconds)


def test_replicas_that_come_and_go_under_new_names_are_forgotten_but_for_their_counters() -> None:
    past = History()
    for i in range(200):
        for step in (0, 1, 2):
            body = page(counters(10.0 * step)).replace(b'engine="0"', b'engine="0",pod="%d"' % i)
            # A pod's first page without its predecessor is doubted once.
            with contextlib.suppress(ScrapeError):
                past.add(parse(body, t=180.0 * i + 60.0 * step))
    assert len(past._engines) <= 22
    (total,) = past.totals()
    assert total.counters.drafts == 10 * 200 + 10


def test_a_start_time_that_goes_back_is_another_server_and_is_doubted() -> None:
    # Two replicas behind one address, of which the second started later.
    a, b = counters(1_000_000), counters(2_000_000)
    past = history(snapshot(0, a, start=100.0), snapshot(5, b, start=200.0))
    assert past.totals()[0].counters.drafts == 2_000_000, "a restart, as far as anybody can know"
    for t in range(10, 100, 10):
        assert refused(past, snapshot(t, a, start=100.0)) is Reason.OTHER_PROCESS
        past.add(snapshot(t + 5, b, start=200.0))
    assert past.totals()[0].counters.drafts == 2_000_000
    assert past.totals()[0].restarts == 1


def test_another_server_that_stays_is_believed_and_counts_from_there() -> None:
    past = history(snapshot(0, counters(100), start=200.0), snapshot(5, counters(150), start=200.0))
    assert refused(past, snapshot(10, counters(7000), start=100.0)) is Reason.OTHER_PROCESS
    past.add(snapshot(15, counters(7010), start=100.0))
    assert only(past.windows(300)).covered_seconds == 0
    past.add(snapshot(20, counters(7040), start=100.0))
    assert only(past.windows(300)).increase.drafts == 30
    assert past.totals()[0].counters.drafts == 50 + 30


def test_a_start_time_computed_anew_each_time_is_no_restart() -> None:
    past = history(*(snapshot(5 * i, counters(100 + i), start=50 + 0.01 * i) for i in range(9)))
    assert past.totals()[0].restarts == 0


def test_a_restart_seen_without_its_start_time_is_not_counted_again_with_it() -> None:
    past = history(
        snapshot(0, counters(1000), start=1.0),
        snapshot(5, counters(50)),
        snapshot(10, counters(150), start=9.0),
    )
    assert past.totals()[0].counters.drafts == 150
    assert past.totals()[0].restarts == 1


def test_a_start_time_that_is_missing_once_is_remembered() -> None:
    past = history(
        snapshot(0, counters(100), start=1.0),
        snapshot(5, counters(200)),
        snapshot(10, counters(900), start=9.0),
    )
    assert past.totals()[0].counters.drafts == 100 + 900
    assert past.totals()[0].restarts == 1


def test_a_restart_under_another_model_name_counts_from_its_beginning() -> None:
    past = history(snapshot(0, counters(100), start=1.0, model_name="a"))
    past.add(snapshot(5, counters(50), start=9.0, model_name="b"))
    totals = {e.model_name: e for e in past.totals()}
    assert totals["b"].counters.drafts == 50
    assert totals["b"].decode_tokens == 50 + 71


def test_two_pages_that_lose_different_engines_do_not_confirm_each_other() -> None:
    past = history(snapshot(0, counters(1), counters(2)))
    first, second = (snapshot(t, counters(1), counters(2)).engines for t in (5, 10))
    assert refused(past, Snapshot(5, first[:1])) is Reason.MISSING_SERIES
    assert refused(past, Snapshot(10, second[1:])) is Reason.MISSING_SERIES


def test_a_clock_set_back_after_an_engine_has_gone_breaks_nothing() -> None:
    past = history(snapshot(1000, counters(1), counters(2)))
    for t in (1005, 1010):
        with contextlib.suppress(ScrapeError):
            past.add(snapshot(t, counters(3)))
    assert refused(past, snapshot(10, counters(4))) is Reason.CLOCK
    for t in (15, 20, 9000):
        past.add(snapshot(t, counters(float(t))))
    assert [w.engine for w in past.windows(300)] == ["0"]


def test_windows_that_are_begun_anew_have_no_past_but_the_counters_do() -> None:
    past = history(snapshot(0, counters(100)), snapshot(5, counters(150)))
    past.forget_points()
    assert past.windows(300) == ()
    past.add(snapshot(3605, counters(170)))
    assert only(past.windows(300)).covered_seconds == 0
    assert past.totals()[0].counters.drafts == 70


worlds = st.lists(
    st.tuples(
        st.floats(0.5, 900),
        st.sampled_from(["count"] * 5 + ["restart", "k"]),
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=3, max_size=3),
    ),
    min_size=2,
    max_size=40,
)


@given(worlds, st.sampled_from([60.0, 300.0, 1800.0]))
def test_windows_of_several_engines_are_what_a_plain_list_of_all_scrapes_says(
    script: list[tuple[float, str, list[tuple[int, int]]]], seconds: float
) -> None:
    past, t, k, start = History(1800.0), 0.0, 2, 1.0
    counted = [0, 0, 0]  # since the last restart
    total = [0, 0, 0]  # since the first scrape
    kept: list[tuple[float, list[int]]] = []  # scrapes at this k
    for i, (wait, event, steps) in enumerate(script):
        t += wait
        if event != "count" and i:
            start, counted = start + 10, [0, 0, 0]
            if event == "k":
                k, kept = 5 - k, []
        counted = [c + d for c, (d, _) in zip(counted, steps, strict=True)]
        if i:
            grown = counted if event != "count" else [d for d, _ in steps]
            total = [a + b for a, b in zip(total, grown, strict=True)]
        engines = (counters(c, (c / 2,) + (c / 4,) * (k - 1)) for c in counted)
        past.add(snapshot(t, *engines, start=start))
        kept.append((t, total))
        # Thinned, the start may be up to a minute before the last scrape at or before the edge.
        edge = t - seconds
        latest = max((j for j, (at, _) in enumerate(kept) if at <= edge + 1e-3), default=0)
        for e, window in enumerate(past.windows(seconds)):
            begins = t - window.covered_seconds
            (j,) = [j for j, (at, _) in enumerate(kept) if abs(at - begins) < 1e-6]
            assert j <= latest
            assert kept[latest][0] - kept[j][0] < (60.0 if seconds > 300 else 1e-6)
            assert window.increase.drafts == total[e] - kept[j][1][e]
            assert window.num_speculative_tokens == k
        assert [e.counters.drafts for e in past.totals()] == total
