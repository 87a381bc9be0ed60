"""Each target is measured at its interval, and the trouble of one is nobody else's.

Most of these tests run the real loop against real sockets; where hours or the order of ticks matter,
time is an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter import loop as loop_module
from specdec_exporter.config import Settings, Target
from specdec_exporter.expose import registry, render
from specdec_exporter.loop import Loop, Monitor
from specdec_exporter.model import ExporterStatus, Reason, ScrapeError, TargetStatus, TunerStatus
from specdec_exporter.scrape import fetch
from specdec_exporter.store import Store
from specdec_exporter.thresholds import AcceptanceLow, DrafterBroken, Thresholds
from structlog.testing import capture_logs

from tests import pages
from tests.hostile import Answer, Exchange, HostileServer, chunked, response

INTERVAL = 5.0
URL = "http://127.0.0.1:8000/metrics"


def growing(exchange: Exchange) -> None:
    """A good server: each page has 1,000 drafts more than the one before."""
    n = exchange.number + 1
    exchange.send(response(good_page(n)))


def good_page(n: int) -> bytes:
    return pages.page(pages.counters(1000 * n, (470 * n, 240 * n), first=10 * n, seconds=n))


def served(*statuses: TargetStatus) -> dict[tuple[str, str, str], float]:
    """What /metrics says of these targets, by name, target and the label that tells samples apart."""
    status = ExporterStatus("0", statuses, window_label=False, last_reload_successful=True)
    body, _ = render(registry(lambda: status), "")
    return {
        (
            s.name,
            s.labels.get("target", ""),
            s.labels.get("reason", s.labels.get("position", "")),
        ): (s.value)
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }


def failures(status: TargetStatus) -> dict[str, int]:
    return dict(status.failures)


async def until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to pass"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Loop]:
    loop = Loop(settings)
    task = asyncio.create_task(loop.run())
    try:
        yield loop
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


PATIENT = 60.0
"""Longer than any interval here, which only a test may say: a busy machine is no slow server."""


def every(seconds: float, *targets: Target, timeout: float = PATIENT, **more: Any) -> Settings:
    settings = Settings(targets=targets, interval=seconds, **more)
    return settings.model_copy(update={"timeout": timeout})


def by_name(loop: Loop) -> dict[str, TargetStatus]:
    return {status.name: status for status in loop.statuses()}


# Every kind of bad target at once, beside a good one


def never_answers(exchange: Exchange) -> None:
    exchange.hold()


def drips(exchange: Exchange) -> None:
    exchange.drip(response(good_page(1)))


def mended_at(line: bytes, by: bytes) -> bytes:
    page = good_page(1)
    assert line in page
    return page.replace(line, by)


PAGE = good_page(1)
HALF_OF_THE_LINES = b"".join(PAGE.splitlines(keepends=True)[:4])
DRAFTS = b'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} '

BAD: dict[str, tuple[Answer | bytes, Reason]] = {
    "never-answers": (never_answers, Reason.TIMEOUT),
    "drips": (drips, Reason.TIMEOUT),
    "too-large": (response(b"#" * 200_000), Reason.TOO_LARGE),
    "gzip-bomb": (
        response(gzip.compress(b"\n" * 5_000_000), "Content-Encoding: gzip"),
        Reason.TOO_LARGE,
    ),
    "redirect": (
        response(b"", "Location: http://127.0.0.1:1/", status="302 Found"),
        Reason.REDIRECT,
    ),
    "404": (response(PAGE, status="404 Not Found"), Reason.HTTP_STATUS),
    "500": (response(PAGE, status="500 Oops"), Reason.HTTP_STATUS),
    "204": (response(b"", status="204 No Content"), Reason.HTTP_STATUS),
    "short-of-its-length": (response(PAGE[:-9], length=len(PAGE)), Reason.TRUNCATED),
    "chunks-without-end": (chunked(PAGE, end=False), Reason.TRUNCATED),
    "cut-inside-a-line": (response(PAGE[:-9]), Reason.TRUNCATED),
    "cut-between-lines": (response(HALF_OF_THE_LINES), Reason.MISSING_SERIES),
    "cut-between-lines-http-1.0": (
        b"HTTP/1.0 200 OK\r\n\r\n" + HALF_OF_THE_LINES,
        Reason.MISSING_SERIES,
    ),
    "html": (response(b"<!doctype html>\n<h1>vllm:</h1>\n"), Reason.NOT_METRICS),
    "json": (response(b'{"detail": "Not Found"}\n'), Reason.NOT_METRICS),
    "binary": (response(bytes(range(128, 256)) * 20 + b"\n"), Reason.NOT_METRICS),
    "empty": (response(b""), Reason.EMPTY),
    "of-another-program": (response(b"go_goroutines 7\n"), Reason.NO_SERIES),
    "gzip-cut-off": (
        response(gzip.compress(PAGE)[:-9], "Content-Encoding: gzip"),
        Reason.TRUNCATED,
    ),
    "gzip-garbage": (response(PAGE, "Content-Encoding: gzip"), Reason.ENCODING),
    "brotli": (response(PAGE, "Content-Encoding: br"), Reason.ENCODING),
    "not-http": (b"220 smtp.example ESMTP\r\n", Reason.PROTOCOL),
    "header-garbage": (b"HTTP/1.1 200 OK\r\n\x00\xff\r\n\r\n", Reason.PROTOCOL),
    "not-a-number": (response(mended_at(DRAFTS + b"1000", DRAFTS + b"many")), Reason.MALFORMED),
    "negative": (response(mended_at(DRAFTS + b"1000", DRAFTS + b"-1000")), Reason.BAD_VALUE),
    "nan": (response(mended_at(DRAFTS + b"1000", DRAFTS + b"NaN")), Reason.BAD_VALUE),
    "twice": (response(PAGE + DRAFTS + b"7\n"), Reason.DUPLICATE_SERIES),
}


@dataclasses.dataclass(frozen=True)
class Aftermath:
    statuses: dict[str, TargetStatus]
    metrics: dict[tuple[str, str, str], float]
    logs: list[Any]


@pytest.fixture(scope="module")
def aftermath() -> Aftermath:
    """What one loop says after two scrapes of a good target and of every bad one."""

    async def measure(urls: dict[str, str], timeout: float) -> tuple[TargetStatus, ...]:
        targets = [Target(name=name, url=url) for name, url in urls.items()]
        settings = every(0.3, *targets, timeout=timeout, max_page_bytes=100_000)
        async with running(settings) as loop:
            await until(lambda: all(status.scrapes >= 2 for status in loop.statuses()))
            return loop.statuses()

    async def measure_all(urls: dict[str, str]) -> tuple[TargetStatus, ...]:
        slow = {name: urls.pop(name) for name, (_, reason) in BAD.items() if reason == "timeout"}
        return *await measure(slow, 0.3), *await measure(urls, PATIENT)

    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(HostileServer(bad)).url for name, (bad, _) in BAD.items()}
        with HostileServer(b"") as gone:
            urls["refused"] = gone.url
        urls["good"] = stack.enter_context(HostileServer(growing)).url
        with capture_logs() as logs:
            statuses = asyncio.run(measure_all(urls))
    return Aftermath({s.name: s for s in statuses}, served(*statuses), list(logs))


REASONS = {"refused": Reason.CONNECT} | {name: reason for name, (_, reason) in BAD.items()}


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_a_bad_target_costs_counted_failures_of_one_reason_and_no_value(
    name: str, reason: Reason, aftermath: Aftermath
) -> None:
    status = aftermath.statuses[name]
    assert failures(status) == {reason: status.scrapes}
    assert aftermath.metrics["specdec_scrape_failures_total", name, reason] == status.scrapes
    assert aftermath.metrics["specdec_up", name, ""] == 0
    told = {metric for metric, target, _ in aftermath.metrics if target == name}
    assert told == {
        "specdec_scrape_failures_total",
        "specdec_up",
        "specdec_scrape_duration_seconds",
        "specdec_target_info",
    }


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_a_bad_target_is_logged_once_with_its_reason_on_one_line(
    name: str, reason: Reason, aftermath: Aftermath
) -> None:
    (entry,) = [entry for entry in aftermath.logs if entry.get("target") == name]
    assert (entry["event"], entry["log_level"]) == ("scrape failed", "warning")
    assert entry["reason"] == reason
    assert entry["detail"] == aftermath.statuses[name].last_error
    assert "\n" not in entry["detail"]


def test_the_good_target_beside_them_is_unharmed(aftermath: Aftermath) -> None:
    status = aftermath.statuses["good"]
    assert status.up
    assert failures(status) == {}
    assert aftermath.metrics["specdec_acceptance_ratio", "good", ""] == pytest.approx(0.355)
    assert aftermath.metrics["specdec_drafts_total", "good", ""] == 1000 * (status.scrapes - 1)
    assert [e["event"] for e in aftermath.logs if e.get("target") == "good"] == ["target up"]


def test_a_target_that_hangs_holds_up_no_other() -> None:
    async def run(hanging: str, good: str) -> None:
        targets = Target(name="hangs", url=hanging), Target(name="good", url=good)
        async with running(every(0.1, *targets)) as loop:
            await until(lambda: by_name(loop)["good"].scrapes > 5)
            assert by_name(loop)["hangs"].scrapes == 0
            assert failures(by_name(loop)["good"]) == {}

    with HostileServer(never_answers) as hanging, HostileServer(growing) as good, capture_logs():
        asyncio.run(run(hanging.url, good.url))


# Rules


def broken_page(n: int) -> bytes:
    return pages.page(pages.counters(1000 * n, (20 * n, 0), first=10 * n, seconds=n))


def states(status: TargetStatus) -> dict[str, str]:
    return {verdict.rule: str(verdict.state) for verdict in status.verdicts}


def judged_until(watched: Monitor, page: Callable[[int], bytes], begin: int, end: int) -> None:
    """A scrape every 5 s, a look at the rules every 15 s."""
    for i in range(begin, end + 1):
        watched.observe(page(i + 1), t=5.0 * i, duration=0.1)
        if i % 3 == 0:
            watched.judge(5.0 * i)


def test_a_broken_drafter_is_pending_and_after_its_time_fires_with_its_evidence() -> None:
    watched = monitor()
    judged_until(watched, broken_page, 0, 0)
    assert states(watched.status)["drafter_broken"] == "inconclusive"
    judged_until(watched, broken_page, 1, 24)
    assert states(watched.status)["drafter_broken"] == "pending"
    judged_until(watched, broken_page, 25, 27)
    (verdict,) = [v for v in watched.status.verdicts if v.rule == "drafter_broken"]
    assert verdict.state == "firing"
    assert verdict.since == 15.0
    assert verdict.value == pytest.approx(0.02)
    assert verdict.threshold == 0.05
    assert verdict.drafts == 27_000
    assert verdict.stderr == pytest.approx((13 * 0.02 * 0.98 / 27_000) ** 0.5)
    assert "-it" in verdict.advice
    metrics = rule_metrics(watched.status)
    assert metrics["drafter_broken"] == 1.0
    assert metrics["position_decay"] == 0.0
    assert "net_gain_low" not in metrics


def test_a_broken_drafter_of_one_model_says_nothing_of_another_on_the_same_target() -> None:
    watched = monitor()

    def two_models(n: int) -> bytes:
        return broken_page(n) + good_page(n).replace(b'model_name="m"', b'model_name="z"')

    judged_until(watched, two_models, 0, 27)
    found = watched.evidence(15.0 * 27)
    assert found["m"].verdicts["drafter_broken"] == "firing"
    assert found["z"].verdicts["drafter_broken"] == "inactive"
    assert found["z"].verdicts["target_down"] == "inactive"


def test_a_model_that_the_server_was_restarted_without_leaves_no_series_of_drift() -> None:
    watched = monitor()
    watched.learn_version("0.32.0")
    watched.observe(good_page(1), t=0.0, duration=0.1)
    watched.observe(good_page(2), t=5.0, duration=0.1)
    assert [one.model_name for one in watched.status.drift] == ["m"]
    renamed = good_page(1).replace(b'model_name="m"', b'model_name="z"')
    watched.observe(renamed, t=10.0, duration=0.1)
    watched.learn_version("0.32.0")
    watched.observe(renamed, t=15.0, duration=0.1)
    assert [one.model_name for one in watched.status.drift] == ["z"]


def test_the_last_save_is_not_undone_by_an_earlier_one_that_was_held_up() -> None:
    store = Store(None)
    loop = Loop(Settings(), store)
    loop._save({"m": {"rules": "new"}}, {}, {}, 1015.0)
    loop._save({"m": {"rules": "old"}}, {}, {}, 1000.0)
    assert store.documents("targets") == {"m": {"rules": "new"}}
    assert store.get("judged", "all") == 1015.0


def test_a_last_position_that_the_tuner_says_costs_more_than_it_adds_is_a_plateau() -> None:
    def plateau(gain: float | None, stderr: float | None) -> str:
        watched = monitor()
        said = tuned(gain, stderr)
        for i in range(61):
            watched.observe(good_page(i + 1), t=5.0 * i, duration=0.1)
            if i % 3 == 0:
                watched.judge(5.0 * i, (said,))
        return states(watched.status)["length_plateau"]

    assert plateau(-0.05, 0.01) == "pending"
    assert plateau(-0.05, 0.04) == "inactive"
    assert plateau(0.05, 0.01) == "inactive"
    assert plateau(None, None) == "inactive"


def tuned(gain: float | None, stderr: float | None) -> TunerStatus:
    """Of the model of the pages."""
    nothing: dict[str, Any] = dict.fromkeys(f.name for f in dataclasses.fields(TunerStatus))
    said = {"last_position_gain_ratio": gain, "last_position_gain_ratio_stderr": stderr}
    return TunerStatus(**nothing | {"model_name": "m"} | said)


def rule_metrics(status: TargetStatus) -> dict[str, float]:
    shown = ExporterStatus("0", (status,), window_label=False, last_reload_successful=True)
    body, _ = render(registry(lambda: shown), "")
    return {
        s.labels["rule"]: s.value
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
        if s.name == "specdec_rule_firing"
    }


def test_a_target_that_stops_answering_fires_after_its_time_and_one_never_seen_after_the_grace() -> (
    None
):
    seen, never = monitor(), monitor()
    seen.observe(good_page(1), t=0, duration=0.1)
    for i in range(1, 500):
        seen.observe(DOWN, t=5.0 * i, duration=0.1)
        never.observe(DOWN, t=5.0 * i, duration=0.1)
        if i % 3 == 0:
            seen.judge(5.0 * i)
            never.judge(5.0 * i)
        if i == 3 + 60:
            assert states(seen.status)["target_down"] == "firing"
        if i == 60 + 300:
            assert states(never.status)["target_down"] != "firing"
    assert states(never.status)["target_down"] == "firing"
    seen.observe(good_page(2), t=5.0 * 500, duration=0.1)
    seen.judge(5.0 * 500)
    assert states(seen.status)["target_down"] == "inactive"


def test_rules_stay_as_they_were_over_a_restart_and_pending_ones_do_not_age_in_between() -> None:
    first = monitor()
    judged_until(first, broken_page, 0, 27)
    assert states(first.status)["drafter_broken"] == "firing"
    assert states(first.status)["drafter_misaligned"] == "pending"
    saved = json.loads(json.dumps(first.saved()))
    second = monitor()
    second.restore(saved, None, pause=3600.0)
    later = 5.0 * 27 + 3600.0
    second.observe(broken_page(1), t=0.0, duration=0.1)
    second.judge(later)
    # One scrape is no evidence for or against anything.
    assert states(second.status)["drafter_broken"] == "firing"
    assert states(second.status)["drafter_misaligned"] == "pending"
    (verdict,) = [v for v in second.status.verdicts if v.rule == "drafter_misaligned"]
    assert verdict.since == 15.0 + 3600.0


def test_state_of_another_server_under_the_same_name_is_not_taken_over() -> None:
    first = monitor()
    judged_until(first, broken_page, 0, 27)
    other = Monitor(
        Target(name="m", url="http://127.0.0.1:8001"),
        Settings(targets=(Target(name="m", url="http://127.0.0.1:8001"),)),
    )
    other.restore(first.saved(), first.learned(), pause=0.0)
    other.observe(good_page(1), t=0.0, duration=0.1)
    other.judge(200.0)
    assert "firing" not in states(other.status).values()


@pytest.mark.parametrize("saved", ["text", [], {"url": URL}, {"url": URL, "rules": {"m": 3}}])
def test_saved_state_of_an_unknown_form_is_left_unused_with_a_warning(saved: Any) -> None:
    store = Store(None)
    store.put("targets", {"m": saved})
    store.put("judged", {"all": 0.0})
    with capture_logs() as logs:
        loop = Loop(Settings(targets=(Target(name="m", url=URL),)), store)
    assert [entry["event"] for entry in logs] == ["saved state not used"]
    assert loop.statuses()[0].name == "m"
    store.close()


def test_the_loop_saves_what_the_rules_came_to_and_the_next_one_goes_on_from_there(
    tmp_path: Path,
) -> None:
    quick = Thresholds(
        evaluation_interval=0.1, min_drafts=1, drafter_broken=DrafterBroken(for_=0.3, min_drafts=1)
    )

    async def until_firing(store: Store, page: Callable[[Exchange], None]) -> list[str]:
        seen: list[str] = []
        with HostileServer(page) as server:
            target = Target(name="m", url=f"http://127.0.0.1:{port or server.port}/metrics")
            loop = Loop(Settings(targets=(target,), interval=0.5, rules=quick), store)
            running = asyncio.create_task(loop.run())
            await until(lambda: "drafter_broken" in states(by_name(loop)["m"]))
            seen.append(states(by_name(loop)["m"])["drafter_broken"])
            await until(lambda: states(by_name(loop)["m"])["drafter_broken"] == "firing")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        return seen

    port = 0

    def broken(exchange: Exchange) -> None:
        exchange.send(response(broken_page(exchange.number + 1)))

    file = tmp_path / "state.db"
    store = Store(file)
    asyncio.run(until_firing(store, broken))
    saved = store.documents("targets")["m"]
    assert saved["rules"]["models"]["m"]["alerts"]["drafter_broken"]["firing"]
    store.close()
    # The next process meets a server that answers no more: what fired still does.
    port = int(saved["url"].rpartition(":")[2].partition("/")[0])
    store = Store(file)
    assert asyncio.run(until_firing(store, broken)) == ["firing"]
    store.close()


def test_a_reload_changes_the_rules_and_keeps_what_fires() -> None:
    watched = monitor()
    judged_until(watched, broken_page, 0, 27)
    quiet = Thresholds(acceptance_low=AcceptanceLow(enabled=False))
    watched.reconfigure(watched.target, Settings(targets=(watched.target,), rules=quiet))
    watched.judge(5.0 * 28)
    assert states(watched.status)["drafter_broken"] == "firing"
    assert "acceptance_low" not in states(watched.status)


# One target's life


def monitor(**settings: Any) -> Monitor:
    target = Target(name="m", url="http://127.0.0.1:8000")
    return Monitor(target, Settings(targets=(target,), interval=INTERVAL, **settings))


DOWN = ScrapeError(Reason.TIMEOUT, "no whole page")


def test_a_target_that_stops_answering_is_down_at_once_and_keeps_its_figures_for_three_intervals() -> (
    None
):
    watched = monitor()
    watched.observe(good_page(1), t=0, duration=0.1)
    watched.observe(good_page(2), t=5, duration=0.1)
    for t in (10, 15):
        watched.observe(DOWN, t=t, duration=0.1)
        metrics = served(watched.status)
        assert metrics["specdec_up", "m", ""] == 0
        assert metrics["specdec_acceptance_ratio", "m", ""] == pytest.approx(0.355)
    watched.observe(DOWN, t=20, duration=0.1)
    metrics = served(watched.status)
    assert ("specdec_acceptance_ratio", "m", "") not in metrics
    assert ("specdec_num_speculative_tokens", "m", "") not in metrics
    assert metrics["specdec_drafts_total", "m", ""] == 1000
    assert metrics["specdec_last_scrape_success_timestamp_seconds", "m", ""] == 5
    assert metrics["specdec_scrape_failures_total", "m", "timeout"] == 3


def test_a_target_that_answers_again_counts_what_it_did_meanwhile_once() -> None:
    watched = monitor()
    watched.observe(good_page(1), t=0, duration=0.1)
    watched.observe(DOWN, t=5, duration=0.1)
    watched.observe(good_page(3), t=60, duration=0.1)
    metrics = served(watched.status)
    assert metrics["specdec_up", "m", ""] == 1
    assert watched.status.last_error is None
    assert metrics["specdec_drafts_total", "m", ""] == 2000
    assert metrics["specdec_acceptance_ratio", "m", ""] == pytest.approx(0.355)


def test_each_change_of_state_is_logged_once() -> None:
    watched = monitor()
    connect = ScrapeError(Reason.CONNECT, "refused")
    results: list[bytes | ScrapeError] = [
        good_page(1),
        good_page(2),
        DOWN,
        DOWN,
        connect,
        connect,
        DOWN,
        good_page(3),
    ]
    with capture_logs() as logs:
        for i, result in enumerate(results):
            watched.observe(result, t=5.0 * i, duration=0.1)
    assert [(e["event"], e.get("reason")) for e in logs] == [
        ("target up", None),
        ("scrape failed", "timeout"),
        ("scrape failed", "connect"),
        ("scrape failed", "timeout"),
        ("target up", None),
    ]


def test_a_page_that_breaks_the_parser_is_internal_and_its_traceback_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("our mistake")

    watched = monitor()
    watched.observe(good_page(1), t=0, duration=0.1)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(loop_module, "parse", broken)
        for t in (5, 10, 15):
            watched.observe(good_page(2), t=t, duration=0.1)
    assert failures(watched.status) == {Reason.INTERNAL: 3}
    assert not watched.status.up
    assert [e["event"] for e in logs] == ["internal error", "scrape failed"]
    assert isinstance(logs[0]["exc_info"], ZeroDivisionError)
    watched.observe(good_page(3), t=20, duration=0.1)
    assert served(watched.status)["specdec_drafts_total", "m", ""] == 2000


def test_figures_that_cannot_be_derived_are_one_internal_failure_a_scrape_however_many_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("our mistake")

    watched = monitor()
    watched.observe(good_page(1), t=0, duration=0.1)
    with monkeypatch.context() as patch:
        patch.setattr("specdec_exporter.measure.derive", broken)
        watched.observe(good_page(2), t=5, duration=0.1)
        for _ in range(3):
            assert failures(watched.status) == {Reason.INTERNAL: 1}
            assert not watched.status.up
            assert watched.status.measurements == ()
    watched.observe(good_page(3), t=10, duration=0.1)
    assert watched.status.up
    assert served(watched.status)["specdec_drafts_total", "m", ""] == 2000


def test_an_unexpected_exception_harms_its_own_target_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks_on_bad(client: Any, url: str, **limits: Any) -> bytes:
        if url.endswith("/bad"):
            raise LookupError("nobody thought of this")
        return await fetch(client, url, **limits)

    monkeypatch.setattr(loop_module, "fetch", breaks_on_bad)

    async def both(url: str) -> dict[str, TargetStatus]:
        bad, good = Target(name="bad", url=f"{url}/bad"), Target(name="good", url=url)
        async with running(every(0.2, bad, good)) as loop:
            await until(lambda: all(status.scrapes > 2 for status in loop.statuses()))
            return by_name(loop)

    with HostileServer(growing) as server, capture_logs():
        statuses = asyncio.run(both(server.url))
    assert set(failures(statuses["bad"])) == {Reason.INTERNAL}
    assert statuses["good"].up
    assert failures(statuses["good"]) == {}


def test_a_server_that_restarts_counts_one_restart_and_nothing_falls() -> None:
    async def watch(server: HostileServer) -> list[TargetStatus]:
        seen: list[TargetStatus] = []
        settings = every(0.05, Target(name="m", url=server.url))
        async with running(settings) as loop:

            def scraped(times: int) -> bool:
                if not seen or seen[-1] is not loop.statuses()[0]:
                    seen.append(loop.statuses()[0])
                return seen[-1].scrapes >= times

            await until(lambda: scraped(4))
            server.answer = response(good_page(1))  # fewer than before: it began anew
            enough = seen[-1].scrapes + 4
            await until(lambda: scraped(enough))
        return seen

    with HostileServer(growing) as server, capture_logs():
        seen = asyncio.run(watch(server))
    history = [served(status) for status in seen]
    assert history[-1]["specdec_target_restarts_total", "m", ""] == 1
    for name in ("specdec_drafts_total", "specdec_decode_tokens_total"):
        values = [metrics[name, "m", ""] for metrics in history if (name, "m", "") in metrics]
        assert values == sorted(values)
        assert values[0] >= 0
    assert history[-1]["specdec_acceptance_ratio", "m", ""] == pytest.approx(0.355)
    assert failures(seen[-1]) == {}


# Ticks


def test_ticks_that_a_slow_target_missed_are_left_out_and_the_others_keep_their_grid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    begun: list[float] = []
    costs = iter([0.5, 23.0, 0.5, 0.5])  # seconds; the second misses four ticks

    async def costly(*_: object, **__: object) -> bytes:
        nonlocal now
        begun.append(now)
        cost = next(costs, None)
        if cost is None:
            await asyncio.Event().wait()
        else:
            now += cost
        return good_page(len(begun))

    async def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds >= 0
        now += seconds

    async def run() -> None:
        settings = Settings(targets=(Target(url="http://127.0.0.1:1"),), interval=INTERVAL)
        task = asyncio.create_task(Loop(settings, clock=lambda: now).run())
        while len(begun) < 5 and not task.done():
            await wait(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def version(*_: object) -> str:
        return ""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    wait = asyncio.sleep
    monkeypatch.setattr(loop_module, "fetch", costly)
    monkeypatch.setattr(loop_module, "fetch_version", version)
    monkeypatch.setattr(Loop, "_judge", never)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with capture_logs():
        asyncio.run(run())
    assert begun == [1000, 1005, 1030, 1035, 1040]


def test_a_page_is_as_old_as_the_question_not_as_the_answer() -> None:
    asked: list[float] = []

    def slowly(exchange: Exchange) -> None:
        asked.append(time.time())
        time.sleep(0.2)
        growing(exchange)

    async def run() -> float | None:
        with HostileServer(slowly) as server:
            async with running(every(30.0, Target(name="m", url=server.url))) as loop:
                await until(lambda: by_name(loop)["m"].up)
                return by_name(loop)["m"].last_success

    last_success = asyncio.run(run())
    assert last_success is not None
    assert last_success <= asked[0]


def test_windows_do_not_go_back_with_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(url: str) -> None:
        async with running(every(0.1, Target(name="m", url=url))) as loop:
            await until(lambda: by_name(loop)["m"].scrapes > 2)
            monkeypatch.setattr(time, "time", lambda: 5.0)
            await until(lambda: by_name(loop)["m"].last_success == 5.0)
            await until(lambda: by_name(loop)["m"].scrapes > 6)
            status = by_name(loop)["m"]
            assert failures(status) == {}
            assert status.measurements[0].total.covered_seconds > 0.3

    with HostileServer(growing) as server, capture_logs():
        asyncio.run(run(server.url))


# Reload


def test_a_reload_keeps_the_history_of_unchanged_targets_drops_removed_ones_and_adds_new_ones() -> (
    None
):
    async def run(kept: Target, moved: Target, new: Target, gone: Target) -> None:
        settings = every(0.1, gone, kept, moved)
        async with running(settings) as loop:
            await until(lambda: all(status.scrapes > 2 for status in loop.statuses()))
            before = by_name(loop)
            moved_now = moved.model_copy(update={"url": moved.url + "?elsewhere"})
            loop.reload(settings.model_copy(update={"targets": (kept, moved_now, new)}))
            after = by_name(loop)
            assert list(after) == ["kept", "moved", "new"]
            assert after["kept"].totals == before["kept"].totals != ()
            assert after["moved"].totals == after["new"].totals == ()
            assert after["moved"].scrapes == 0
            await until(lambda: by_name(loop)["new"].up and by_name(loop)["moved"].up)
            await until(lambda: by_name(loop)["kept"].scrapes > before["kept"].scrapes)
            drafts = by_name(loop)["kept"].totals[0].counters.drafts
            assert drafts is not None
            assert drafts > (before["kept"].totals[0].counters.drafts or 0)
            assert failures(by_name(loop)["kept"]) == {}

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(HostileServer(growing)) for _ in range(4)]
        targets = [
            Target(name=name, url=server.url)
            for name, server in zip(("kept", "moved", "new", "gone"), servers, strict=True)
        ]
        with capture_logs():
            asyncio.run(run(*targets))
        asked = len(servers[3].requests)
        time.sleep(0.3)
        assert len(servers[3].requests) == asked


def test_a_reload_that_changes_how_is_measured_keeps_what_was_counted() -> None:
    async def run(url: str) -> None:
        settings = every(0.1, Target(name="m", url=url))
        async with running(settings) as loop:
            await until(lambda: loop.statuses()[0].scrapes > 3)
            before = loop.statuses()[0]
            target = Target(name="m", url=url, labels={"zone": "b"})
            change = {"windows": (60.0, 120.0), "interval": 0.2, "targets": (target,)}
            loop.reload(settings.model_copy(update=change))
            await until(lambda: loop.statuses()[0].scrapes > before.scrapes + 2)
            after = loop.statuses()[0]
            assert [m.total.window_seconds for m in after.measurements] == [60, 120]
            assert after.measurements[0].total.covered_seconds > (
                before.measurements[0].total.covered_seconds
            )
            assert after.totals[0].counters.drafts > before.totals[0].counters.drafts
            assert after.labels == (("zone", "b"),)

    with HostileServer(growing) as server, capture_logs():
        asyncio.run(run(server.url))


def test_a_reload_interrupts_a_scrape_that_hangs() -> None:
    async def run(hanging: str, good: str) -> None:
        settings = every(60, Target(name="m", url=hanging))
        async with running(settings) as loop:
            await until(lambda: bool(server.requests))
            loop.reload(settings.model_copy(update={"targets": (Target(name="m", url=good),)}))
            await until(lambda: loop.statuses()[0].up)

    with HostileServer(never_answers) as server, HostileServer(growing) as good, capture_logs():
        asyncio.run(run(server.url, good.url))


def test_a_loop_without_targets_waits_for_a_reload_that_brings_some() -> None:
    async def run(url: str) -> None:
        settings = every(0.1)
        async with running(settings) as loop:
            await asyncio.sleep(0.05)
            loop.reload(settings.model_copy(update={"targets": (Target(url=url),)}))
            await until(lambda: loop.statuses()[0].up)

    with HostileServer(growing) as server, capture_logs():
        asyncio.run(run(server.url))
