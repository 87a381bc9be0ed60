"""The page in a real browser: in every state, live, by keyboard, on a phone, and with its names hostile."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)
from specdec_exporter.app import MOST_STREAMS
from specdec_exporter.history import Watched

from tests.real.page_bed import END, NASTY, Served, fleet, served

pytestmark = [pytest.mark.chromium, pytest.mark.slow]

PICTURES = Path(__file__).parents[2] / "build" / "page"
WAIT_MS = 20_000
VERDICTS = {
    "chat-pays": ("good", r"Speculation pays: 1\d % faster at \d requests in flight"),
    "prose-costs": ("bad", r"Speculation costs: 2\d % slower at \d requests in flight"),
    "code-deep": ("bad", r"k too deep: position 1 at \d+ %; shrink k to 1"),
    "31b-broken": ("bad", r"Drafter broken: position 0 at \d %"),
    "korean-drifts": ("bad", r"Drafter drifted \((even|tail|front); MAL 1\.\d+, expected 1\.71\)"),
    "night-idle": ("quiet", r"Idle: no drafts in the last 5m"),
    "plain": ("quiet", r"Speculation is off"),
    "gone": ("bad", r"Does not answer"),
    "new-unmeasured": ("unsure", r"Drafting, mean acceptance length 1\.\d+; no baseline, .*"),
    NASTY: ("unsure", r"Drafting, .*"),
}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def targets() -> tuple[Watched, ...]:
    return fleet()


@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=chromium, args=root)
        yield browser
        browser.close()


class Trouble(list[str]):
    """What a browser complains of: errors, dialogs, and requests to anywhere else."""

    def watch(self, page: Page, url: str) -> None:
        def said(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.append(message.text)

        def asked(dialog: Dialog) -> None:
            self.append(dialog.message)
            dialog.dismiss()

        def wanted(request: Request) -> None:
            if not request.url.startswith(url):
                self.append(request.url)

        page.on("console", said)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("dialog", asked)
        page.on("request", wanted)


@pytest.fixture
def trouble() -> Iterator[Trouble]:
    """Whatever happens in a page here is a failure, unless the test has taken it out."""
    found = Trouble()
    yield found
    assert found == []


@pytest.fixture
def visit(browser: Browser, trouble: Trouble) -> Open:
    """Opens a served page in a window of its own, and waits until it is live."""

    def visit(server: Served, path: str = "", *, live: bool = True, **window: Any) -> Page:
        page = server.windows.enter_context(browser.new_context(**window)).new_page()
        page.set_default_timeout(WAIT_MS)
        trouble.watch(page, server.url)
        page.goto(server.url + path)
        if live:
            expect(page.locator("#live")).to_have_text("Live, as of", timeout=WAIT_MS)
        return page

    return visit


def card(page: Page, name: str) -> Locator:
    return page.locator(".card").filter(has=page.get_by_role("heading", name=name, exact=True))


def renamed(watched: Watched, name: str) -> Watched:
    return replace(watched, status=replace(watched.status, name=name))


def many(targets: tuple[Watched, ...], count: int = 200) -> list[Watched]:
    """So many targets, every twentieth of them in some trouble."""
    return [
        renamed(targets[i // 20 % 5] if i % 20 == 7 else targets[0], f"gpu-{i:03}")
        for i in range(count)
    ]


def test_every_state_has_its_verdict_in_words_and_by_more_than_its_colour(
    targets: tuple[Watched, ...], visit: Open
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with served(*targets) as server:
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                window = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
                page = visit(server, **window)
                page.screenshot(path=PICTURES / f"fleet-{width}-{scheme}.png", full_page=True)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
        signs = set()
        for name, (tone, says) in VERDICTS.items():
            shown = card(page, name)
            verdict = shown.locator("summary .verdict")
            assert re.fullmatch(says, verdict.inner_text()), (name, verdict.inner_text())
            assert tone in (shown.get_attribute("class") or "").split()
            sign = shown.locator(".sign").evaluate("e => getComputedStyle(e, '::before').content")
            signs.add((tone, sign))
        assert len(signs) == len({sign for _, sign in signs}) == 4
        expect(page.locator("#summary")).to_have_text("5 of 10 targets need attention")


def test_names_full_of_markup_are_text(targets: tuple[Watched, ...], visit: Open) -> None:
    nasty = next(w for w in targets if w.status.name == NASTY)
    with served(nasty) as server:
        page = visit(server)
        assert page.locator("h2").first.inner_text() == NASTY
        assert NASTY in page.locator("h3").inner_text()
        assert page.locator("script").count() == 1
        assert page.locator("img").count() == 0
        server.show(replace(nasty, status=replace(nasty.status, last_error=NASTY)))
        expect(page.locator(".body > .bad")).to_have_text(NASTY)
        assert page.locator("script").count() == 1


def test_news_come_by_themselves_and_leave_focus_openness_and_place_alone(
    targets: tuple[Watched, ...], visit: Open
) -> None:
    pays, costs, *_ = targets
    rest = [renamed(pays, f"other-{i}") for i in range(6)]
    with served(renamed(pays, "m"), *rest) as server:
        page = visit(server, viewport={"width": 1280, "height": 900})
        loads: list[str] = []
        page.on("load", lambda _: loads.append("again"))
        mine = card(page, "m")
        more = mine.locator("details.more").first
        more.locator("summary").click()
        closed = card(page, "other-1")
        closed.locator("summary").first.click()
        mine.get_by_text("Every rule").focus()
        page.mouse.wheel(0, 300)
        page.wait_for_timeout(200)
        before = page.evaluate("scrollY")
        assert before > 0
        marked = mine.element_handle()
        server.show(renamed(costs, "m"), *rest)
        expect(mine.locator("summary .verdict")).to_contain_text("Speculation costs")
        expect(mine.locator(".rules strong").first).to_have_text("net_gain_negative")
        expect(page.locator("#summary")).to_have_text("1 of 7 targets needs attention")
        expect(page).to_have_title(re.compile("^1 of 7"))
        assert more.get_attribute("open") is not None
        assert closed.get_attribute("open") is None
        assert "Every rule" in page.evaluate("document.activeElement.textContent")
        assert page.evaluate("e => e === document.activeElement.closest('.card')", marked)
        assert loads == []


def test_only_the_summary_is_announced(targets: tuple[Watched, ...], visit: Open) -> None:
    with served(*targets[:3]) as server:
        page = visit(server)
        announced = page.locator("[aria-live], [role=status], [role=alert], output")
        assert announced.evaluate_all("all => all.map(e => e.id)") == ["summary", "lost"]


def test_targets_come_and_go_with_the_settings(targets: tuple[Watched, ...], visit: Open) -> None:
    pays, costs, *_ = targets
    with served(renamed(pays, "a"), renamed(pays, "b")) as server:
        page = visit(server)
        server.show(renamed(pays, "b"), renamed(costs, "c"))
        expect(page.locator("h2")).to_have_text(["c", "b"])


def test_a_page_that_is_cut_off_says_so_and_goes_on_when_it_can(
    targets: tuple[Watched, ...], visit: Open, trouble: Trouble
) -> None:
    with served(*targets[:1]) as server:
        page = visit(server)
        port = server.port
        server.stop()
        expect(page.locator("#lost")).to_contain_text("Not live", timeout=WAIT_MS)
        with served(*targets[:2], port=port):
            expect(page.locator("#lost")).to_be_empty(timeout=WAIT_MS)
            expect(page.locator("h2")).to_have_count(2)
    trouble[:] = [t for t in trouble if "ERR_" not in t]


def test_a_page_for_which_there_is_no_stream_asks_instead(
    targets: tuple[Watched, ...], visit: Open, trouble: Trouble
) -> None:
    with (
        served(*targets[:1]) as server,
        httpx.Client(limits=httpx.Limits(max_connections=None)) as client,
        ExitStack() as streams,
    ):
        for _ in range(MOST_STREAMS):
            streams.enter_context(client.stream("GET", f"{server.url}events"))
        deadline = time.monotonic() + 60
        while client.get(f"{server.url}events").status_code != 503:
            assert time.monotonic() < deadline
        page = visit(server)
        expect(page.locator("#lost")).to_be_empty()
        assert trouble
        trouble[:] = [t for t in trouble if "503" not in t]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious(
    scheme: str, width: int, targets: tuple[Watched, ...], visit: Open
) -> None:
    with served(*targets) as server:
        page = visit(server, color_scheme=scheme, viewport={"width": width, "height": 900})
        # The last ones closed, and what is folded away in the others open.
        page.evaluate(
            "document.querySelectorAll('.card').forEach((e, i) => { e.open = i < 5 });"
            "document.querySelectorAll('.more').forEach((e) => { e.open = true })"
        )
        found = Axe().run(page).response["violations"]
        told = [(f["id"], f["impact"], f["nodes"][0]["html"][:200]) for f in found]
        assert [t for t in told if t[1] in ("serious", "critical")] == []


def test_the_keyboard_reaches_opens_and_filters(targets: tuple[Watched, ...], visit: Open) -> None:
    with served(*targets) as server:
        page = visit(server)
        page.locator("input[name=q]").focus()
        page.keyboard.type("GEMMA")
        assert page.locator(".card:visible").count() == 8
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        assert page.locator(".card:visible").count() == 4
        assert page.url.endswith("?q=GEMMA&trouble=1")
        page.keyboard.press("Tab")
        first = page.locator(".card:visible").first
        assert first.locator("> summary").evaluate("e => e === document.activeElement")
        page.keyboard.press("Enter")
        assert first.get_attribute("open") is None
        page.locator("input[name=q]").fill("nowhere")
        assert page.locator("#none").is_visible()


def test_with_two_hundred_targets_only_what_is_looked_at_is_asked_for(
    targets: tuple[Watched, ...], visit: Open
) -> None:
    crowd = many(targets)
    with served(*crowd) as server:
        page = visit(server, viewport={"width": 1280, "height": 900})
        assert page.locator(".card").count() == 200
        assert page.locator(".card[open]").count() == 2
        closed = card(page, page.locator(".card:not([open]) h2").first.inner_text())
        closed.locator("summary").first.click()
        expect(closed.locator(".figures").first).to_be_visible()
        asked: list[str] = []
        page.on("request", lambda r: asked.append(r.url))
        # Better by a point everywhere, so that every line changes.
        server.show(*(better(w) for w in crowd))
        expect(page.locator("#at")).to_contain_text(
            time.strftime("%H:%M:%S", time.gmtime(END + 15))
        )
        page.wait_for_timeout(500)
        ids = {i for url in asked for i in re.findall(r"t[0-9a-f]{12}", url)}
        assert 0 < len(ids) < 60
        asked.clear()
        page.locator(".card").nth(180).scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        assert any("cards?" in url for url in asked)
        page.locator("input[name=q]").fill("gpu-199")
        assert page.locator(".card:visible").count() == 1


def better(watched: Watched) -> Watched:
    def total(m: Any) -> Any:
        if m.total.acceptance_ratio is None:
            return m
        return replace(m, total=replace(m.total, acceptance_ratio=m.total.acceptance_ratio + 0.01))

    measurements = tuple(total(m) for m in watched.status.measurements)
    return replace(watched, status=replace(watched.status, measurements=measurements))


def test_without_a_script_everything_can_still_be_read_and_found(
    targets: tuple[Watched, ...], visit: Open
) -> None:
    with served(*many(targets)) as server:
        page = visit(server, live=False, java_script_enabled=False)
        page.locator("input[name=q]").fill("gpu-150")
        page.get_by_role("button", name="Filter").click()
        expect(page.locator(".card[open] .figures")).to_be_visible()
        page.goto(server.url)
        closed = page.locator(".card:not([open])").last
        name = closed.locator("h2").inner_text()
        closed.locator("summary").click()
        page.get_by_role("link", name=f"All of {name}").click()
        expect(page.locator("h2").first).to_have_text(name)
        expect(page.locator(".trends svg").first).to_be_visible()
