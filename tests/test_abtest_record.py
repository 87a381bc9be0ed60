"""A file of measurements is read as it was written, however it came to its end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.record import (
    Acceptance,
    Line,
    Page,
    Request,
    Run,
    Session,
    read_lines,
    to_line,
)

SESSION = Session(label="ar", started=5.0, model="m", prompts="f", seed=1, concurrency=2, server={})


def request(**fields: Any) -> Request:
    usual = {"workload": "w", "prompt": "p", "repeat": 1, "started": 10.0, "prompt_tokens": 7}
    times = {"first_output_seconds": 0.5, "end_seconds": 1.5, "completion_tokens": 11}
    return Request(**{**usual, **times, "finish_reason": "stop", **fields})


def page(workload: str, moment: Any) -> Page:
    return Page(workload, moment, 1.0, ("a 1",))


def written(*values: Line) -> list[str]:
    return [f"{to_line(value)}\n" for value in values]


def run_of(*values: Line) -> Run:
    return read_lines(written(*values), "f.jsonl")


SECONDS = st.none() | st.floats(0, 1e6)
REQUESTS = st.builds(
    Request,
    workload=st.text(min_size=1, max_size=5),
    prompt=st.text(max_size=5),
    repeat=st.integers(1, 9),
    started=SECONDS,
    first_output_seconds=SECONDS,
    end_seconds=SECONDS,
    prompt_tokens=st.none() | st.integers(0, 9),
    completion_tokens=st.none() | st.integers(0, 9),
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    problems=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    failure=st.none() | st.text(max_size=5),
    acceptance=st.none() | st.builds(Acceptance, *[st.integers(0, 9)] * 3),
    warmup=st.booleans(),
)


@given(st.lists(REQUESTS, max_size=5))
def test_what_was_written_is_read(requests: list[Request]) -> None:
    run = run_of(SESSION, *requests)
    assert run.sessions == (SESSION,)
    assert run.requests == tuple(r for r in requests if not r.warmup)
    assert run.warmups == tuple(r for r in requests if r.warmup)


def test_output_speed_is_the_tokens_after_the_first_over_the_time_after_it() -> None:
    assert request().output_speed == 10.0
    assert request(completion_tokens=1).output_speed is None
    assert request(end_seconds=0.5).output_speed is None
    assert request(completion_tokens=None).output_speed is None


def test_a_failed_request_is_not_valid_and_delivered_nothing() -> None:
    failed = request(failure="the stream broke off", completion_tokens=None)
    assert failed.output_speed == 0.0
    assert not failed.valid
    assert not request(problems=("not JSON",)).valid
    assert request().valid


def test_requests_belong_to_their_workload_and_session_with_the_pages_around_them() -> None:
    run = run_of(
        SESSION,
        request(warmup=True),
        page("w", "before"),
        request(repeat=1),
        page("w", "after"),
        page("v", "before"),
        request(workload="v"),
        SESSION,
        page("w", "before"),
        request(repeat=2),
        page("w", "after"),
    )
    assert [(s.session, s.workload, len(s.requests)) for s in run.spans] == [
        (0, "w", 1),
        (0, "v", 1),
        (1, "w", 1),
    ]
    assert [(s.before is not None, s.after is not None) for s in run.spans] == [
        (True, True),
        (True, False),
        (True, True),
    ]


def test_a_last_line_that_was_cut_off_is_passed_over() -> None:
    lines = written(SESSION, request(), request(repeat=2))
    for length in range(1, len(lines[-1]) - 1):
        cut = [*lines[:-1], lines[-1][:length]]
        assert len(read_lines(cut, "f.jsonl").requests) == 1


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("nonsense\n", "f.jsonl:2: not a line of a measurement"),
        ('{"kind": "other"}\n', "f.jsonl:2: not a line of a measurement"),
        ("[]\n", "f.jsonl:2: not a line of a measurement"),
        (
            '{"kind": "request", "workload": "w"}\n',
            "f.jsonl:2: not a line of a measurement (prompt",
        ),
    ],
)
def test_a_line_that_is_not_ours_is_told_with_its_place(line: str, place: str) -> None:
    lines = [*written(SESSION), line, *written(request())]
    with pytest.raises(BenchError) as caught:
        read_lines(lines, "f.jsonl")
    assert str(caught.value).startswith(place)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["\n"], written(request())])
def test_a_file_without_a_measurement_is_told(lines: list[str]) -> None:
    with pytest.raises(BenchError, match=r"^f\.jsonl: no measurement in it"):
        read_lines(lines, "f.jsonl")
