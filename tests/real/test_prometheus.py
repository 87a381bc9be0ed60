"""A real Prometheus understands what the exporter serves."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client import parser as text
from prometheus_client.openmetrics import parser as openmetrics

from tests.real.prometheus_bed import Prometheus, running
from tests.real.vllm_bed import HTTP

pytestmark = pytest.mark.prometheus

ACCEPT = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}

Key = tuple[str, frozenset[tuple[str, str]]]
"""A series: its name and labels. To Prometheus an empty label is none."""

ADDED_BY_PROMETHEUS = ("up", "scrape_")


def page(url: str, form: str = "text") -> httpx.Response:
    return HTTP.get(f"{url}/metrics", headers={"Accept": ACCEPT[form]}).raise_for_status()


def families(page: str, form: str = "text") -> list[Metric]:
    parser = openmetrics if form == "openmetrics" else text
    return list(parser.text_string_to_metric_families(page))


def key(name: str, labels: Mapping[str, str]) -> Key:
    return name, frozenset((label, value) for label, value in labels.items() if value)


def stored(prometheus: Prometheus, job: str, since: float, until: float) -> dict[Key, set[float]]:
    """What Prometheus took from a job between two times: the values of each series."""
    found = {}
    for series in prometheus.samples(f'{{job="{job}"}}', 10, until):
        labels = {k: v for k, v in series.labels.items() if k not in ("job", "instance")}
        name = labels.pop("__name__")
        between = {value for t, value in series.samples if since < t < until}
        if between and not name.startswith(ADDED_BY_PROMETHEUS):
            found[key(name, labels)] = between
    return found


def values(page: str, form: str = "text") -> dict[Key, float]:
    return {
        key(sample.name, sample.labels): sample.value
        for family in families(page, form)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def kept_pages(demo_url: str) -> Iterator[dict[str, tuple[str, str]]]:
    """The page in each format, and a URL that serves just that, whatever is asked for."""
    pages = {form: page(demo_url, form) for form in ACCEPT}

    class Kept(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kept = pages[self.path.strip("/")]
            # On a busy machine Prometheus may have given up.
            with contextlib.suppress(ConnectionError):
                self.send_response(200)
                self.send_header("Content-Type", kept.headers["content-type"])
                self.end_headers()
                self.wfile.write(kept.content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Kept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            yield {form: (kept.text, f"{url}/{form}") for form, kept in pages.items()}
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def prometheus(
    prometheus_binary: Path,
    demo_url: str,
    kept_pages: dict[str, tuple[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    jobs = {"specdec": f"{demo_url}/metrics"} | {form: url for form, (_, url) in kept_pages.items()}
    # Several scrapes fall into one interval of the exporter: see quiet_spell.
    with running(prometheus_binary, folder, jobs, scrape_interval="300ms") as server:
        yield server


def quiet_spell(url: str, seconds: float) -> tuple[str, float, float]:
    """A page that stayed the same for so long, and the times between which it did.

    It changes once an interval of the exporter, so a spell begins where a change was seen.
    """
    for _ in range(20):
        old = page(url).text
        while (new := page(url).text) == old:
            time.sleep(0.02)
        since = time.time()
        time.sleep(seconds)
        until = time.time()
        if page(url).text == new:
            return new, since, until
    pytest.fail(f"the page never stayed the same for {seconds} seconds")


def test_the_target_is_up(prometheus: Prometheus) -> None:
    prometheus.wait_until_up("specdec")


def test_every_family_served_is_in_prometheus_with_its_type_and_help(
    prometheus: Prometheus, demo_url: str
) -> None:
    served = {
        family.name: (family.type, family.documentation)
        for family in families(page(demo_url, "openmetrics").text, "openmetrics")
    }
    assert len(served) > 20
    prometheus.wait_until_up("specdec")
    metadata = prometheus.api("targets/metadata", match_target='{job="specdec"}')
    assert {row["metric"]: (row["type"], row["help"]) for row in metadata} == served


def test_prometheus_stores_the_very_values_that_are_served(
    prometheus: Prometheus, demo_url: str
) -> None:
    prometheus.wait_until_up("specdec")
    for _ in range(10):
        served, since, until = quiet_spell(demo_url, 0.7)
        got = stored(prometheus, "specdec", since, until)
        if got:
            break
    assert got == {series: {value} for series, value in values(served).items()}


def test_promtool_finds_nothing_to_complain_of(promtool: Path, demo_url: str) -> None:
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input=page(demo_url).text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (checked.stdout, checked.stderr, checked.returncode) == ("", "", 0)


def test_both_formats_are_served_on_request_and_say_the_same(demo_url: str) -> None:
    for _ in range(40):
        plain, other, again = page(demo_url), page(demo_url, "openmetrics"), page(demo_url)
        if plain.text == again.text:
            break
    assert plain.headers["content-type"].startswith("text/plain; version=")
    assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert values(other.text, "openmetrics") == values(plain.text)


@pytest.mark.parametrize("form", ACCEPT)
def test_prometheus_takes_either_format(
    form: str, prometheus: Prometheus, kept_pages: dict[str, tuple[str, str]]
) -> None:
    """Prometheus asks for OpenMetrics where it can, so a page that was kept shows it the other."""
    prometheus.wait_until_up(form)
    served = {series: {value} for series, value in values(kept_pages[form][0], form).items()}
    assert stored(prometheus, form, 0, time.time()) == served
