"""Two runs side by side: nothing that is slow is left out, and nothing unequal is passed over."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from specdec_exporter.abtest.compare import compare
from specdec_exporter.abtest.html import comparison_page
from specdec_exporter.abtest.record import Acceptance, Page, Request, Run, Session, Span
from specdec_exporter.abtest.table import print_comparison
from specdec_exporter.report import console

from tests import pages

AR = Session("ar", 100.0, "m", "prompts", 1, 1, {"version": "0.32.0", "block_size": "16"})
MTP = replace(AR, label="mtp", started=900.0)


def request(speed: float, prompt: str = "p", repeat: int = 1, **fields: Any) -> Request:
    """101 tokens at a speed, the first after 0.1 s."""
    usual: dict[str, Any] = {
        "workload": "w",
        "started": 100.0 + repeat,
        "first_output_seconds": 0.1,
        "end_seconds": 0.1 + 100 / speed,
        "prompt_tokens": 20,
        "completion_tokens": 101,
        "finish_reason": "stop",
    }
    return Request(prompt=prompt, repeat=repeat, **{**usual, **fields})


def failed(prompt: str = "p", repeat: int = 1) -> Request:
    return Request("w", prompt, repeat, 100.0, 0.1, 0.2, failure="the stream broke off")


def repeats(*speeds: float, **fields: Any) -> list[Request]:
    return [request(speed, repeat=n, **fields) for n, speed in enumerate(speeds, start=1)]


def later(requests: list[Request]) -> list[Request]:
    return [replace(r, started=(r.started or 0) + 800) for r in requests]


def side(session: Session, requests: list[Request], *pages: Page) -> Run:
    workloads = dict.fromkeys(r.workload for r in requests)
    before, after = pages or (None, None)
    spans = [
        Span(0, name, tuple(r for r in requests if r.workload == name), before, after)
        for name in workloads
    ]
    return Run((session,), tuple(spans), ())


def two(a: list[Request], b: list[Request]) -> tuple[Run, Run]:
    return side(AR, a), side(MTP, later(b))


# Figures


def test_a_workload_has_the_medians_of_all_its_requests_and_their_ratio() -> None:
    (workload,) = compare(*two(repeats(90, 100, 110), repeats(190, 200, 230))).workloads
    speed = workload.all.output_speed
    assert (speed.a, speed.b, speed.ratio) == pytest.approx((100, 200, 2))
    assert workload.all.end_seconds.ratio == pytest.approx(0.6 / 1.1)
    assert workload.all.first_output_seconds.ratio == 1
    assert workload.all.completion_tokens.ratio == 1


def test_the_ratios_by_prompt_are_another_figure_than_the_ratio_of_the_workload() -> None:
    """Two prompts of one ratio each, and a workload of which neither is the ratio."""
    a = [*repeats(10, 10, 10), *repeats(100, 100, prompt="q")]
    b = [*repeats(30, 30, 30), *repeats(150, 150, prompt="q")]
    comparison = compare(*two(a, b))
    (workload,) = comparison.workloads
    assert workload.all.output_speed.ratio == pytest.approx(3.0)
    assert [p.output_speed.ratio for p in workload.prompts] == pytest.approx([3.0, 1.5])
    assert workload.prompt_ratios == comparison.prompt_ratios == pytest.approx((1.5, 3.0))


def test_a_failed_request_makes_its_side_slower_and_valid_only_stands_beside() -> None:
    """Left out, the failures would make the second side look twice as fast."""
    b = [*repeats(200, 200), failed(repeat=3), failed(repeat=4), failed(repeat=5)]
    (workload,) = compare(*two(repeats(100, 100, 100, 100, 100), b)).workloads
    assert workload.all.output_speed.b == 0
    assert workload.all.end_seconds.b is None
    assert workload.valid.output_speed.ratio == pytest.approx(2)
    assert (workload.b.requests, workload.b.valid, workload.b.failed) == (5, 2, 3)


def test_invalid_and_cut_requests_stay_in_the_figures() -> None:
    b = [
        request(200, repeat=1),
        request(300, repeat=2, problems=("not JSON",)),
        request(400, repeat=3, problems=("cut off by max_tokens",), finish_reason="length"),
    ]
    comparison = compare(*two(repeats(100, 100, 100), b))
    (workload,) = comparison.workloads
    assert workload.all.output_speed.b == pytest.approx(300)
    assert workload.valid.output_speed.b == pytest.approx(200)
    assert workload.prompts[0].valid_output_speed.ratio == pytest.approx(2)
    assert (workload.b.valid, workload.b.cut, workload.b.failed) == (1, 1, 0)
    assert comparison.valid == (3, 1)
    assert comparison.requests == (3, 3)


def test_warm_ups_are_in_no_figure() -> None:
    a, b = two(repeats(100, 100), repeats(200, 200))
    warm = replace(b, warmups=(request(1, warmup=True),))
    assert compare(a, warm) == compare(a, b)


def test_acceptance_by_request_is_pooled_and_not_a_mean_of_ratios() -> None:
    few, many = Acceptance(1, 2, 2), Acceptance(99, 198, 99)
    b = [request(200, acceptance=few), request(200, repeat=2, acceptance=many)]
    (workload,) = compare(*two(repeats(100, 100), b)).workloads
    assert workload.b.request_acceptance_ratio == pytest.approx(101 / 200)
    assert workload.b.request_mean_acceptance_length == pytest.approx(2.01)
    assert workload.a.request_mean_acceptance_length is None


def page(t: float, **more: float) -> Page:
    drafts = 100 * t
    counted = pages.counters(drafts, (0.5 * drafts, 0.2 * drafts), first=2 * t, seconds=t)
    extra = (f'vllm:{name}{{engine="0"}} {value}' for name, value in more.items())
    return Page("w", "before", t, (*pages.lines(counted), *extra))


def test_acceptance_and_mal_are_those_of_the_servers_counters() -> None:
    a, _ = two(repeats(100, 100), [])
    b = side(MTP, later(repeats(200, 200)), page(1), page(2))
    (workload,) = compare(a, b).workloads
    assert workload.b.num_speculative_tokens == 2
    assert workload.b.acceptance_ratio == pytest.approx(0.35)
    assert workload.b.mean_acceptance_length == pytest.approx(1.7)
    assert workload.a.num_speculative_tokens is None


def test_a_run_beside_itself_is_as_fast_as_itself() -> None:
    run = side(AR, repeats(90, 100, 110))
    (workload,) = compare(run, run).workloads
    assert workload.all.output_speed.ratio == 1


# Warnings


def warnings(a: Run, b: Run) -> str:
    return "\n".join(compare(a, b).warnings)


def test_equal_conditions_give_no_warning() -> None:
    assert compare(*two(repeats(100, 101), repeats(200, 201))).warnings == ()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompts": "others"}, "the prompts differ"),
        ({"seed": 2}, "the ids at the head of the prompts differ"),
        ({"concurrency": 8}, "concurrency differs: ar 1, mtp 8"),
        ({"model": "other"}, "model differs: ar m, mtp other"),
        (
            {"server": {"version": "0.24.0", "block_size": "16"}},
            "the servers differ beyond speculation: version 0.32.0 and 0.24.0",
        ),
        (
            {"server": {"version": "0.32.0", "block_size": "16", "max_model_len": "9"}},
            "the servers differ beyond speculation: max_model_len – and 9",
        ),
    ],
)
def test_unequal_conditions_are_told(changed: dict[str, Any], said: str) -> None:
    b = side(replace(MTP, **changed), later(repeats(200, 201)))
    assert warnings(side(AR, repeats(100, 101)), b).splitlines() == [said] or said in warnings(
        side(AR, repeats(100, 101)), b
    )


def test_a_server_that_was_changed_between_sessions_is_told() -> None:
    a, b = two(repeats(100, 101), repeats(200, 201))
    changed = replace(b, sessions=(MTP, replace(MTP, server={"version": "0.33.0"})))
    assert "the server of mtp was another one after a break: version 0.32.0 and 0.33.0" in warnings(
        a, changed
    )


def test_requests_that_only_one_side_made_are_told() -> None:
    said = warnings(*two(repeats(100, 101, 102), repeats(200, 201)))
    assert said == "1 requests of the other side were not made with mtp"


def test_prompts_of_another_length_in_tokens_are_told() -> None:
    said = warnings(*two(repeats(100, 101), repeats(200, 201, prompt_tokens=30)))
    assert said == "2 of 2 prompts have another number of tokens: another template?"


def test_runs_at_the_same_time_are_told_and_those_in_turns_are_not() -> None:
    a = side(AR, repeats(100, 101))
    assert "both were measured at once" in warnings(a, side(MTP, repeats(200, 201)))
    # a, then b, then a again: their first and last moments overlap, their sessions do not.
    first, second = repeats(100, 101)
    late = replace(second, started=2000.0)
    spans = (Span(0, "w", (first,), None, None), Span(1, "w", (late,), None, None))
    in_turns = Run((AR, AR), spans, ())
    assert warnings(in_turns, side(MTP, later(repeats(200, 201)))) == ""


def test_shorter_answers_are_told_since_they_end_sooner_without_being_faster() -> None:
    b = repeats(100, 100, completion_tokens=51, end_seconds=0.6)
    comparison = compare(*two(repeats(100, 100), b))
    assert comparison.workloads[0].all.end_seconds.ratio == pytest.approx(0.6 / 1.1)
    assert comparison.workloads[0].all.output_speed.ratio == pytest.approx(1)
    assert "answers of mtp are 0.50 times as long as those of ar" in "\n".join(comparison.warnings)


def test_hits_in_the_prefix_cache_and_other_traffic_are_told() -> None:
    a, _ = two(repeats(100, 101), [])
    before = page(1, prefix_cache_queries_total=100, prefix_cache_hits_total=0)
    after = page(3, prefix_cache_queries_total=200, prefix_cache_hits_total=41)
    said = warnings(a, side(MTP, later(repeats(200, 201)), before, after))
    assert "w: 41 % of the prompt tokens of mtp came from the prefix cache" in said
    assert "w: the server of mtp had at least 2 other requests meanwhile" in said


# How it is shown


HOSTILE = '<script>alert("x")</script>[bold]'


def shown() -> tuple[Run, Run]:
    a = [*repeats(90, 100, 110), *repeats(50, 60, prompt=HOSTILE)]
    b = [
        *repeats(190, 200, 210),
        request(100, HOSTILE, 1, problems=("<b>",)),
        failed(HOSTILE, 2),
    ]
    return two([replace(r, workload=HOSTILE) for r in a], [replace(r, workload=HOSTILE) for r in b])


def test_the_table_has_both_kinds_of_ratio_on_lines_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_comparison(compare(*shown()), console())
    printed = capsys.readouterr().out
    assert re.search(r"all +tokens/s +90.00->190.00 \(2.11x\)", printed)
    assert re.search(r"valid +tokens/s +90.00->200.00 \(2.22x\)", printed)
    assert "per-prompt ratios 0.91-2.00" in printed
    assert "valid 5/5 with ar and 3/5 with mtp" in printed
    for line in printed.splitlines():
        assert not ("->" in line and "per-prompt" in line)


def test_the_json_has_no_value_that_is_no_json() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    b = [failed(repeat=n) for n in (1, 2)]
    told = json.loads(
        json.dumps(compare(*two(repeats(90, 100), b)).to_dict()), parse_constant=refuse
    )
    assert told["workloads"][0]["all"]["end_seconds"]["b"] is None
    assert told["valid"] == [2, 0]


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_stands_alone(page: str) -> Tags:
    """No script, nothing to fetch, and plots that are well-formed."""
    tags = Tags(page)
    names = {name for name, _ in tags.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "image", "use"})
    for _, attributes in tags.tags:
        assert {"src", "href", "xlink:href", "srcset"}.isdisjoint(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"url\(|@import|https?://", page)
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert plots
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "nan" not in plot
        assert "inf" not in plot
    assert "prefers-color-scheme: dark" in page
    return tags


def test_the_page_stands_alone_and_shows_every_request() -> None:
    a, b = shown()
    page = comparison_page(compare(a, b), a, b)
    tags = assert_stands_alone(page)
    dots = [attributes["class"] for name, attributes in tags.tags if name == "circle"]
    assert (dots.count("a"), dots.count("b")) == (5, 3)
    assert dots.count("b-open") == 2
    assert HOSTILE in tags.text
    assert "2.11×" in tags.text
    assert "valid 5/5 and 3/5" in tags.text


def test_the_page_of_runs_without_a_speed_says_so() -> None:
    one = repeats(100, completion_tokens=1)
    a, b = two(one, one)
    tags = assert_stands_alone(comparison_page(compare(a, b), a, b))
    assert "no request has a speed" in tags.text
