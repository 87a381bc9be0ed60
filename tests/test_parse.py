from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter import parse as parse_module
from specdec_exporter.model import Counters, Reason, ScrapeError, Snapshot
from specdec_exporter.parse import VLLM, parse

from tests.pages import CPU, H200, PAGES, SERIES, counters, page, recording


def reason(body: bytes, **kwargs: object) -> Reason:
    with pytest.raises(ScrapeError) as caught:
        parse(body, t=0.0, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in caught.value.detail
    return caught.value.reason


def by_the_official_parser(body: bytes) -> dict[tuple[str, str, str], float]:
    """Name, engine and position of every sample that is read, from the whole page, unfiltered."""
    samples = [s for f in text_string_to_metric_families(body.decode()) for s in f.samples]
    values: dict[tuple[str, str, str], float] = {}
    for s in samples:
        key = (s.name, s.labels.get("engine", ""), s.labels.get("position", ""))
        if s.name == VLLM.finished_requests:
            failed = s.value if s.labels["finished_reason"] in ("abort", "error") else 0.0
            values[key] = values.get(key, 0.0) + failed
        elif s.name in VLLM.names or s.name == "process_start_time_seconds":
            values[key] = s.value
    return values


def by_us(snapshot: Snapshot, names: set[str]) -> dict[tuple[str, str, str], float]:
    values: dict[tuple[str, str, str], float] = {}
    if snapshot.process_start_time is not None:
        values["process_start_time_seconds", "", ""] = snapshot.process_start_time
    for sample in snapshot.engines:
        c = sample.counters
        histogram = next(h for h in VLLM.decode_histograms if f"{h}_sum" in names)
        for name, value in (
            (VLLM.drafts, c.drafts),
            (VLLM.draft_tokens, c.draft_tokens),
            (VLLM.accepted_tokens, c.accepted_tokens),
            (VLLM.generation_tokens, c.generation_tokens),
            (VLLM.first_tokens, c.first_tokens),
            (f"{histogram}_sum", c.decode_seconds),
            (f"{histogram}_count", c.decode_steps),
            (VLLM.prompt_tokens, c.prompt_tokens),
            (VLLM.cached_prompt_tokens, c.cached_prompt_tokens),
            (VLLM.engine_steps, c.engine_steps),
            (VLLM.preemptions, c.preemptions),
            (VLLM.finished_requests, c.failed_requests),
        ):
            if value is not None:
                values[name, sample.engine, ""] = value
        for i, value in enumerate(c.accepted_per_position):
            values[VLLM.accepted_per_position, sample.engine, str(i)] = value
    return values


@pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_filter_reads_what_the_official_parser_reads_from_the_whole_page(path) -> None:
    body = path.read_bytes()
    official = by_the_official_parser(body)
    assert len(official) >= 5
    assert by_us(parse(body, t=1.0), {name for name, _, _ in official}) == official


@pytest.mark.parametrize("path", SERIES, ids=lambda p: p.stem)
def test_recorded_lines_read_as_the_official_parser_reads_them(path) -> None:
    for row in recording(path):
        body = ("\n".join(row["m"]) + "\n").encode()
        official = by_the_official_parser(body)
        ours = by_us(parse(body, t=row["t"], excerpt=True), {name for name, _, _ in official})
        assert ours == official


def test_k_is_the_number_of_positions_on_real_pages() -> None:
    for path, k in (
        (H200 / "page_k1.prom", 1),
        (H200 / "page_k2.prom", 2),
        (CPU / "draft-real-k4.after.prom", 4),
        (CPU / "ngram-k2.after.prom", 2),
        (CPU / "plain.after.prom", 0),
    ):
        (sample,) = parse(path.read_bytes(), t=0.0).engines
        assert sample.num_speculative_tokens == k
        assert (sample.counters.drafts is None) == (k == 0)


def test_time_is_taken_over_as_it_is() -> None:
    assert parse(page(counters()), t=12.5, excerpt=True).t == 12.5


def test_two_engines_are_two_samples() -> None:
    snapshot = parse(page(counters(100), counters(7)), t=0.0)
    assert [(s.engine, s.counters.drafts) for s in snapshot.engines] == [("0", 100), ("1", 7)]


def test_labels_may_stand_in_any_order_and_lines_too() -> None:
    body = page(counters(100), counters(7))
    ordered = body.splitlines()
    random.Random(1).shuffle(ordered)
    swapped = re.sub(
        rb'engine="(\d)",model_name="m"(,position="\d")?',
        lambda m: (
            (m[2] or b"").lstrip(b",")
            + (b"," if m[2] else b"")
            + b'model_name="m", engine="'
            + m[1]
            + b'"'
        ),
        b"\n".join(ordered) + b"\n",
    )
    assert swapped != body
    assert parse(swapped, t=0.0) == parse(body, t=0.0)


def test_a_prefix_set_in_the_config_is_taken_off() -> None:
    body = page(counters(), prefix="ray_")
    assert parse(body, t=0.0, metric_prefix="ray_") == parse(page(counters()), t=0.0)


def test_a_prefix_that_is_not_set_is_named() -> None:
    with pytest.raises(ScrapeError, match="set metric_prefix to 'ray_'") as caught:
        parse(page(counters(), prefix="ray_"), t=0.0)
    assert caught.value.reason is Reason.NO_SERIES


def test_created_series_change_nothing() -> None:
    body = page(counters())
    created = b'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09\n'
    assert parse(created + body, t=0.0) == parse(body, t=0.0)


def test_of_two_inter_token_histograms_only_the_newer_is_read() -> None:
    body = page(counters(seconds=2.0))
    old = b"".join(
        line.replace(b"inter_token_latency", b"time_per_output_token") + b"\n"
        for line in body.splitlines()
        if b"inter_token" in line
    ).replace(b" 2.0", b" 99.0")
    assert b"time_per_output_token_seconds_sum" in old
    (both,) = parse(old + body, t=0.0).engines
    assert both.counters.decode_seconds == 2.0
    kept = b"".join(line + b"\n" for line in body.splitlines() if b"inter_token" not in line)
    (alone,) = parse(old + kept, t=0.0).engines
    assert alone.counters.decode_seconds == 99.0


def test_exponents_and_timestamps_are_numbers() -> None:
    body = page(counters(drafts=1_000_000)).replace(b" 1000000", b" 1e+06")
    assert b"1e+06" in body
    stamped = body.replace(b"\n", b" 1700000000000\n")
    for text in (body, stamped):
        assert parse(text, t=0.0).engines[0].counters.drafts == 1e6


def test_labels_of_a_proxy_tell_replicas_apart() -> None:
    body = b"".join(
        page(counters(n)).replace(b'engine="0"', b'engine="0",ReplicaId="r%d"' % n) for n in (1, 2)
    )
    samples = parse(body, t=0.0).engines
    assert [(s.engine, s.extra_labels, s.counters.drafts) for s in samples] == [
        ("0", (("ReplicaId", "r1"),), 1),
        ("0", (("ReplicaId", "r2"),), 2),
    ]


def test_several_start_times_are_no_start_time() -> None:
    starts = b'process_start_time_seconds{pod="a"} 1\nprocess_start_time_seconds{pod="b"} 2\n'
    assert parse(page(counters()) + starts, t=0.0).process_start_time is None


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf", b"-Inf", b"-0.5", b"1e16", b"8e307"])
def test_a_counter_that_cannot_be_is_refused(value: bytes) -> None:
    body = page(counters(seconds=2.0)).replace(b" 2.0", b" " + value)
    assert value in body
    assert reason(body) is Reason.BAD_VALUE


@pytest.mark.parametrize("value", [b"NaN", b"-1", b"+Inf"])
def test_a_start_time_that_cannot_be_is_refused(value: bytes) -> None:
    assert reason(page(counters()) + b"process_start_time_seconds " + value + b"\n") is (
        Reason.BAD_VALUE
    )


def test_a_gauge_that_is_not_read_costs_nothing() -> None:
    odd = b'vllm:num_requests_running{engine="0",model_name="m",pod="x"} NaN\n'
    assert parse(page(counters()) + odd, t=0.0) == parse(page(counters()), t=0.0)


@pytest.mark.parametrize("position", [b"9" * 5000, b"100", b"-1", "٣".encode(), b"1.0"])
def test_a_position_that_cannot_be_is_refused(position: bytes) -> None:
    body = page(counters()).replace(b'position="1"', b'position="' + position + b'"')
    assert reason(body) is Reason.MALFORMED


def test_more_engines_than_can_be_read_in_time_are_refused() -> None:
    line = b'vllm:generation_tokens_total{engine="%d",model_name="m"} 1\n'
    assert reason(b"".join(line % i for i in range(10_001))) is Reason.TOO_LARGE


def test_a_series_that_stands_twice_is_refused() -> None:
    for line in page(counters()).splitlines():
        assert reason(page(counters()) + line + b"\n") is Reason.DUPLICATE_SERIES


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", Reason.EMPTY),
        (b" \n\n", Reason.EMPTY),
        (b"<!doctype html>\n<html><body>sign in</body></html>\n", Reason.NOT_METRICS),
        (b"<html>no line end</html>", Reason.NOT_METRICS),
        (b'{"detail": "Not Found"}', Reason.NOT_METRICS),
        (b"\x00\xff\x80\n", Reason.NOT_METRICS),
        (b"# HELP up whether\nup 1\n", Reason.NO_SERIES),
        (b"python_info 1\nprocess_start_time_seconds 5\n", Reason.NO_SERIES),
    ],
)
def test_what_is_no_page_of_a_server_has_its_own_reason(body: bytes, expected: Reason) -> None:
    assert reason(body) is expected


@pytest.mark.parametrize(
    "line",
    [
        b'vllm:generation_tokens_total{engine="0',
        b'vllm:generation_tokens_total{engine="0"} x',
        b'vllm:generation_tokens_total{engine="0"}',
        b"vllm:generation_tokens_total{engine=0} 1",
        b"vllm:generation_tokens_total{\xff} 1",
        b'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="x"} 1',
        b'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0"} 1',
    ],
)
def test_a_line_that_is_broken_is_refused(line: bytes) -> None:
    assert reason(page(counters()) + line + b"\n") is Reason.MALFORMED


@pytest.mark.parametrize("path", PAGES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_page_cut_anywhere_is_refused_or_lost_only_what_is_not_read(path) -> None:
    body = path.read_bytes()
    whole = parse(body, t=0.0)
    cuts = [i + 1 for i, byte in enumerate(body) if byte == ord("\n")]
    refused = harmless = 0
    for cut in random.Random(7).sample(cuts[:-1], 40):
        try:
            assert parse(body[:cut], t=0.0) == whole
        except ScrapeError as error:
            refused += error.reason in (Reason.MISSING_SERIES, Reason.NO_SERIES)
        else:
            harmless += 1
        assert reason(body[: cut - 1]) in (Reason.TRUNCATED, Reason.NOT_METRICS)
    assert refused + harmless == 40
    assert refused > 5


@pytest.mark.parametrize(
    "name", [VLLM.drafts, VLLM.draft_tokens, VLLM.accepted_tokens, VLLM.accepted_per_position]
)
def test_speculation_series_come_together_or_not_at_all(name: str) -> None:
    kept = [x for x in page(counters()).splitlines() if not x.startswith(name.encode())]
    body = b"\n".join(kept) + b"\n"
    assert reason(body) is Reason.MISSING_SERIES
    assert reason(body, excerpt=True) is Reason.MISSING_SERIES


def test_positions_with_a_gap_are_refused() -> None:
    body = page(counters(100, (50, 20, 10))).replace(b'position="1"', b'position="7"')
    assert reason(body) is Reason.MISSING_SERIES


def test_a_recording_may_leave_families_out() -> None:
    body = b'vllm:generation_tokens_total{engine="0",model_name="m"} 5\n'
    assert reason(body) is Reason.MISSING_SERIES
    (sample,) = parse(body, t=0.0, excerpt=True).engines
    assert sample.counters == Counters(generation_tokens=5.0)


@given(
    st.lists(
        st.builds(
            lambda name, rest: name.encode() + rest,
            st.sampled_from([*VLLM.names, "process_start_time_seconds", "other"]),
            st.binary(max_size=40) | st.text(max_size=40).map(str.encode),
        ),
        max_size=8,
    )
)
def test_any_bytes_are_a_snapshot_or_a_typed_failure(rows: list[bytes]) -> None:
    body = page(counters()) + b"\n".join(rows) + b"\n"
    detail = ""
    try:
        engines = parse(body, t=0.0, excerpt=True).engines
    except ScrapeError as error:
        engines, detail = (), error.detail
    assert bool(engines) != bool(detail)
    assert "\n" not in detail


values = st.sampled_from(
    [b"1", b"2.5", b"1e3", b"NaN", b"1_0", b"+7", b"", b"0x1", b"1 1700", b"5\r", b"-1"]
)


@given(st.lists(st.tuples(st.sampled_from(VLLM.names), values), max_size=6))
def test_a_series_that_was_read_before_is_read_as_the_official_parser_reads_it(
    rows: list[tuple[str, bytes]],
) -> None:
    # Twice, so that the second time every name and label is known.
    for _ in range(2):
        for name, value in rows:
            line = name.encode() + b'{engine="0",model_name="a} b"} ' + value
            try:
                (family,) = text_string_to_metric_families(line.decode())
                (expected,) = family.samples
            except ValueError:
                expected = None
            try:
                (got,) = parse_module._read([line])
            except ScrapeError:
                got = None
            assert (got is None) == (expected is None)
            if got is not None:
                assert (got.name, got.labels) == (expected.name, expected.labels)
                assert repr(float(got.value)) == repr(float(expected.value))


def circumstance(name: str, value: float, **labels: str) -> bytes:
    inside = ",".join(f'{k}="{v}"' for k, v in {"model_name": "m", **labels}.items())
    return f"vllm:{name}{{{inside}}} {value}\n".encode()


def test_failed_requests_are_those_aborted_and_those_in_error() -> None:
    body = page(counters())
    for reason_, value in (("stop", 100), ("abort", 3), ("error", 4), ("length", 50)):
        body += circumstance("request_success_total", value, engine="0", finished_reason=reason_)
    (sample,) = parse(body, t=0.0).engines
    assert sample.counters.failed_requests == 7


def test_a_page_without_circumstances_is_read_and_they_are_unknown() -> None:
    (sample,) = parse(page(counters()), t=0.0).engines
    assert sample.counters.prompt_tokens is sample.counters.failed_requests is None


def test_circumstances_under_other_labels_are_of_no_engine() -> None:
    body = page(counters()) + circumstance("prompt_tokens_total", 5, engine="0", lora="x")
    assert parse(body, t=0.0) == parse(page(counters()), t=0.0)
    alone = circumstance("prompt_tokens_total", 5, engine="0")
    assert reason(alone, excerpt=True) is Reason.NO_SERIES


def test_a_failure_that_stands_twice_is_refused() -> None:
    line = circumstance("request_success_total", 5, engine="0", finished_reason="abort")
    assert reason(page(counters()) + line + line) is Reason.DUPLICATE_SERIES
