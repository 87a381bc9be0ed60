"""The recorded runs of real servers, measured as live ones are, against what is known of them."""

from __future__ import annotations

from typing import Any

import pytest
from specdec_exporter.measure import Meter
from specdec_exporter.model import Counters, Measurement, ScrapeError
from specdec_exporter.parse import parse

from tests.pages import CPU, H200, counters, recording, snapshot

TRUTH = recording(H200 / "results.jsonl")


def measured(rows: list[dict[str, Any]], seconds: float) -> Measurement:
    meter = Meter([seconds], 13.0)
    for row in rows:
        page = ("\n".join(row["m"]) + "\n").encode()
        meter.add(parse(page, t=row["t"], excerpt=True))
    (last,) = meter.measure()
    return last


def phase(name: str, concurrency: int) -> Measurement:
    """The window from the first to the last scrape of a load, in its whole recording."""
    rows = recording(H200 / f"series_{name}.jsonl")
    of_phase = [row for row in rows if row["conc"] == concurrency]
    until = [row for row in rows if row["t"] <= of_phase[-1]["t"]]
    return measured(until, of_phase[-1]["t"] - of_phase[0]["t"])


def plain_counters(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in (line.rsplit(" ", 1) for line in row["m"])}


@pytest.mark.parametrize("truth", TRUTH, ids=lambda t: f"{t['name']}-{t['conc']}")
def test_tpot_is_what_the_client_measured(truth: dict[str, Any]) -> None:
    name, concurrency = truth["name"], truth["conc"]
    got = phase(name, concurrency).total
    # The recording of a load stops before its last requests drain, which shows at high loads.
    tolerance = {32: 0.015, 128: 0.04}.get(0 if name == "k0" else concurrency, 0.01)
    assert got.tpot_seconds == pytest.approx(truth["client_tpot_token_weighted"], rel=tolerance)
    assert got.num_speculative_tokens == truth["k"]


@pytest.mark.parametrize("truth", TRUTH, ids=lambda t: f"{t['name']}-{t['conc']}")
def test_the_mean_inter_token_latency_would_have_been_wrong(truth: dict[str, Any]) -> None:
    got = phase(truth["name"], truth["conc"]).total
    client = truth["client_tpot_token_weighted"]
    if truth["k"]:
        assert got.step_seconds > 1.3 * client
    else:
        assert got.step_seconds == pytest.approx(client, rel=0.01)


@pytest.mark.parametrize("truth", TRUTH, ids=lambda t: f"{t['name']}-{t['conc']}")
def test_ratios_are_the_counters_own_quotients(truth: dict[str, Any]) -> None:
    name, concurrency = truth["name"], truth["conc"]
    rows = [r for r in recording(H200 / f"series_{name}.jsonl") if r["conc"] == concurrency]
    first, last = plain_counters(rows[0]), plain_counters(rows[-1])

    def delta(series: str) -> float:
        return sum(last[key] - first[key] for key in last if key.startswith(series))

    got = phase(name, concurrency).total
    if not truth["k"]:
        assert got.acceptance_ratio is None
        return
    drafts = delta("vllm:spec_decode_num_drafts_total")
    accepted = delta("vllm:spec_decode_num_accepted_tokens_total")
    tokens = delta("vllm:spec_decode_num_draft_tokens_total")
    assert got.drafts == drafts > 0
    assert got.acceptance_ratio == pytest.approx(accepted / tokens, abs=1e-9)
    assert got.mean_acceptance_length == pytest.approx(1 + accepted / drafts, abs=1e-9)
    for i, p in enumerate(got.position_acceptance_ratio):
        at_i = sum(last[k] - first[k] for k in last if f'position="{i}"' in k)
        assert p == pytest.approx(at_i / drafts, abs=1e-9)


@pytest.mark.parametrize("name", ["k0", "k1", "k2", "k4", "k2_pos1_collapse"])
def test_decode_concurrency_in_steady_seconds_is_the_running_gauge(name: str) -> None:
    rows = recording(H200 / f"series_{name}.jsonl")

    def running(row: dict[str, Any]) -> float:
        return next(v for key, v in plain_counters(row).items() if "requests_running{" in key)

    shares = []
    for earlier, before, row in zip(rows, rows[1:], rows[2:], strict=False):
        # Steady: the load is a second old and every client has a request in flight at both ends.
        # The gauge counts prefill too, so decode is a little below it.
        steady = earlier["conc"] == row["conc"] == running(before) == running(row)
        if steady:
            got = measured([before, row], row["t"] - before["t"]).total
            shares.append(got.decode_concurrency / row["conc"])
    assert len(shares) >= 6
    assert 0.95 <= sum(shares) / len(shares) <= 1.03


def between(name: str) -> Measurement:
    meter = Meter([300.0], 13.0)
    for t, moment in enumerate(("before", "after")):
        meter.add(parse((CPU / f"{name}.{moment}.prom").read_bytes(), t=60.0 * t))
    (last,) = meter.measure()
    return last


def test_ngram_drafts_do_not_cover_every_step() -> None:
    got = between("ngram-k2").total
    assert got.num_speculative_tokens == 2
    assert got.draft_coverage_ratio == pytest.approx(616 / 1344)
    assert got.mean_draft_length == 1232 / 616
    assert got.tokens_per_step < got.mean_acceptance_length


def test_ngram_drafts_can_be_shorter_than_k() -> None:
    # With prompt_lookup_min at 1 a match can be the last token but one, after which only one follows.
    got = between("ngram-k2-short").total
    assert got.num_speculative_tokens == 2
    assert got.mean_draft_length == 1230 / 618 < 2
    assert got.acceptance_ratio == pytest.approx(620 / 1230)
    assert got.mean_acceptance_length == pytest.approx(1 + 620 / 618)


def test_a_server_without_speculation_has_k_0_and_a_tpot() -> None:
    got = between("plain").total
    assert got.num_speculative_tokens == 0
    assert got.drafts is got.acceptance_ratio is None
    assert got.tokens_per_step == pytest.approx(1.0)
    assert got.tpot_seconds > 0


@pytest.mark.parametrize(
    ("phase_name", "mal"), [("code-t0", 2.36), ("fr-t0", 1.60), ("ood-t0", 1.26)]
)
def test_real_acceptance_on_a_cpu_is_what_was_measured(phase_name: str, mal: float) -> None:
    assert between(f"draft-real-k4.{phase_name}").total.mean_acceptance_length == pytest.approx(
        mal, abs=0.06
    )


def test_real_drift_shows_in_a_short_window_and_ends_with_it() -> None:
    rows = recording(CPU / "series_draft-real-k4.jsonl")
    meter = Meter([5.0], 13.0)
    seen = {}
    for row in rows:
        meter.add(parse(("\n".join(row["m"]) + "\n").encode(), t=row["t"], excerpt=True))
        (m,) = meter.measure()
        seen[round(row["t"] - rows[0]["t"])] = m.total.mean_acceptance_length
    assert seen[20] > 2.1
    assert seen[35] < 1.4
    assert seen[60] > 2.0


def test_several_windows_are_measured_side_by_side() -> None:
    meter = Meter([5.0, 20.0], 13.0)
    for t in range(0, 25, 5):
        meter.add(snapshot(t, counters(10.0 * t)))
    short, long = meter.measure()
    assert (short.total.drafts, long.total.drafts) == (50, 200)
    assert (short.total.window_seconds, long.total.window_seconds) == (5, 20)


def test_several_engines_have_figures_of_their_own_beside_the_total() -> None:
    meter = Meter([300.0], 13.0)
    meter.add(snapshot(0, counters(0, (0, 0)), counters(0, (0, 0))))
    meter.add(snapshot(5, counters(900, (450, 90)), counters(100, (10, 0))))
    (m,) = meter.measure()
    assert [e.engine for e in m.engines] == ["0", "1"]
    assert [e.acceptance_ratio for e in m.engines] == [pytest.approx(0.3), pytest.approx(0.05)]
    assert m.total.engine == "all"
    assert m.total.acceptance_ratio == pytest.approx(550 / 2000)


def test_two_models_on_one_page_are_never_mixed() -> None:
    def both(t: float, a: Counters, b: Counters) -> Any:
        one, two = snapshot(t, a, model_name="a"), snapshot(t, b, model_name="b")
        return type(one)(t, one.engines + two.engines)

    meter = Meter([300.0], 13.0)
    meter.add(both(0, counters(0, (0, 0)), counters(0, (0,))))
    meter.add(both(5, counters(100, (47, 24)), counters(100, (30,))))
    a, b = meter.measure()
    assert (a.total.model_name, a.total.mean_acceptance_length) == ("a", pytest.approx(1.71))
    assert (b.total.model_name, b.total.mean_acceptance_length) == ("b", pytest.approx(1.30))


def test_a_refused_snapshot_changes_nothing() -> None:
    meter = Meter([300.0], 13.0)
    meter.add(snapshot(0, counters(100)))
    meter.add(snapshot(5, counters(200)))
    (before,) = meter.measure()
    with pytest.raises(ScrapeError):
        meter.add(snapshot(3, counters(900)))
    assert meter.measure() == (before,)
    meter.add(snapshot(10, counters(200)))
    (after,) = meter.measure()
    assert after.total.drafts == before.total.drafts


def test_the_reference_of_a_target_is_its_own_past_at_this_k() -> None:
    meter = Meter([300.0], 13.0)

    def sources(m: Measurement) -> set[str]:
        return {o.source for o in m.total.overdispersion}

    drafts, t = 0.0, 0.0
    for i in range(4 * 720 + 2):
        t, drafts = 5.0 * i, drafts + 100
        # Accepted counts that alternate a little, so that there is something to estimate.
        position = 47 * i + (i % 7)
        meter.add(snapshot(t, counters(drafts, (position, position // 2))))
        if i == 2000:
            (m,) = meter.measure()
            assert "default" in sources(m)
    (m,) = meter.measure()
    assert "reference" in sources(m)
    meter.add(snapshot(t + 5, counters(100, (47,))))
    meter.add(snapshot(t + 10, counters(200, (94,))))
    (m,) = meter.measure()
    assert "default" in sources(m), "another k has another past"
    for i in (15, 20):
        meter.add(snapshot(t + i, counters(drafts + i, (position + i, position // 2))))
    (m,) = meter.measure()
    assert "reference" in sources(m), "back at this k its past is not lost"


def test_the_pasts_that_are_kept_are_bounded() -> None:
    meter = Meter([300.0], 13.0)
    for i in range(50):
        meter.add(snapshot(20.0 * i, counters(1), model_name=f"m{i}", start=10.0 * i))
        meter.add(snapshot(20.0 * i + 5, counters(2), model_name=f"m{i}", start=10.0 * i))
    assert len(meter._references) == 16


def test_what_was_drafted_since_the_last_scrape_is_told_unless_drafts_vary_in_length() -> None:
    meter = Meter((300.0,), 13.0)
    assert meter.add(snapshot(0.0, counters(100, (47, 24))))[0].interval.drafts == 0
    (even,) = meter.add(snapshot(5.0, counters(200, (94, 48))))
    assert (even.model_name, even.num_speculative_tokens) == ("m", 2)
    assert even.interval.drafts == 100
    assert even.interval.per_position == (47, 24)
    (short,) = meter.add(snapshot(10.0, counters(300, (110, 50), draft_tokens=400 + 120)))
    assert short.interval.drafts == 0
