"""The server's counters between two pages give the figures of that time, and what else went on."""

from __future__ import annotations

import pytest
from specdec_exporter.abtest.counters import flags, generated, keep, running, server_figures
from specdec_exporter.abtest.record import Page, Request, Span

from tests import pages
from tests.pages import CPU, counters


def page(moment: str, t: float, text: bytes) -> Page:
    return Page("w", moment, t, keep(text))  # type: ignore[arg-type]


def span(before: Page | None, after: Page | None, requests: int = 0) -> Span:
    made = tuple(Request("w", "p", n) for n in range(requests))
    return Span(0, "w", made, before, after)


def written(t: float, **fields: float) -> Page:
    """A page after so many drafts of which 47 and 24 % were accepted."""
    drafts = 100 * t
    counted = counters(drafts, (0.47 * drafts, 0.24 * drafts), first=10 * t, seconds=t)
    extra = "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in fields.items())
    return page("before", t, pages.page(counted) + extra.encode())


def test_a_recorded_run_has_the_figures_of_its_counters() -> None:
    name = "gemma4-mtp-synth-k2"
    texts = [(CPU / f"{name}.{moment}.prom").read_bytes() for moment in ("before", "after")]
    before, after = (page("before", t, text) for t, text in zip((1.0, 21.0), texts, strict=True))
    found = server_figures([span(before, after)])
    assert found is not None
    assert found.derived.num_speculative_tokens == 2
    assert found.derived.mean_acceptance_length == pytest.approx(1.71, abs=0.05)
    assert found.derived.tpot_seconds is not None
    assert found.derived.covered_seconds == 20.0


def test_the_lines_that_are_kept_are_enough_and_few() -> None:
    text = (CPU / "plain.after.prom").read_bytes()
    lines = keep(text)
    assert 5 < len(lines) < 20
    assert generated(lines) > 0
    assert running(lines) == 0


def test_the_flags_are_those_that_somebody_set_and_not_what_follows_from_memory() -> None:
    shown = flags(keep((pages.H200 / "page_k1.prom").read_bytes()))
    assert shown["gpu_memory_utilization"] == "0.5"
    assert shown["enable_prefix_caching"] == "True"
    assert "num_gpu_blocks" not in shown
    assert flags([]) == {}


def test_spans_add_up_before_anything_is_divided() -> None:
    """What came between two spans is nobody's."""
    spans = [span(written(1), written(2)), span(written(5), written(8))]
    found = server_figures(spans)
    assert found is not None
    assert found.derived.drafts == 100 * (1 + 3)
    assert found.derived.mean_acceptance_length == pytest.approx(1.71)
    assert found.derived.covered_seconds == 1 + 3
    assert found.derived.decode_concurrency == pytest.approx(1.0)


def test_a_span_that_was_broken_off_is_left_out() -> None:
    assert server_figures([span(written(1), None), span(None, written(2))]) is None
    found = server_figures([span(written(1), None), span(written(5), written(8))])
    assert found is not None
    assert found.derived.drafts == 300


def test_a_page_that_says_nothing_gives_no_figures() -> None:
    assert server_figures([span(page("before", 1, b"a 1\n"), page("after", 2, b"a 1\n"))]) is None
    assert server_figures([]) is None


def test_a_server_that_began_to_speculate_in_between_gives_no_figures() -> None:
    plain = page("before", 1, pages.page(counters(0, ())))
    assert server_figures([span(plain, written(2))]) is None


@pytest.mark.parametrize(("ours", "others"), [(10, 0), (8, 2), (11, 0)])
def test_first_tokens_that_nobody_of_ours_got_are_of_other_requests(ours: int, others: int) -> None:
    found = server_figures([span(written(1), written(2), requests=ours)])
    assert found is not None
    assert found.other_requests == others


def test_requests_that_run_before_ours_are_others() -> None:
    found = server_figures([span(written(1, num_requests_running=3), written(2), requests=10)])
    assert found is not None
    assert found.other_requests == 3


def test_prefix_hits_are_a_share_of_the_tokens_asked_for_meanwhile() -> None:
    before = written(1, prefix_cache_queries_total=1000, prefix_cache_hits_total=900)
    after = written(2, prefix_cache_queries_total=1400, prefix_cache_hits_total=1000)
    found = server_figures([span(before, after, requests=10)])
    assert found is not None
    assert found.prefix_hit_ratio == 0.25
