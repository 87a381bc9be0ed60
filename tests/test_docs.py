"""The docs hold together: what is generated is current, links lead somewhere, the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel
from ruamel.yaml import YAML
from specdec_exporter.act.settings import ActuatorSettings
from specdec_exporter.app import create_app
from specdec_exporter.config import Settings, Target
from specdec_exporter.rules import rule_table
from specdec_exporter.service import Exporter
from specdec_exporter.tuner_settings import TunerSettings

from reference import api, settings
from reference.links import plain

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [*PAGES, *(ROOT / n / "README.md" for n in (".", "deploy", "alerts", "grafana"))]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(path: Path) -> str:
    """A page without what is shown as code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """As they are made of headings wherever Markdown is shown."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("name", "lines"), [("settings.md", settings.reference), ("api.md", api.reference)]
)
def test_a_page_made_from_the_code_is_what_the_code_gives(
    name: str, lines: type[Iterator[str]]
) -> None:
    assert (DOCS / name).read_text() == "\n".join(lines()) + "\n", "make docs"


@pytest.mark.parametrize("model", [Settings, Target, ActuatorSettings, TunerSettings])
def test_every_setting_says_what_it_means(model: type[BaseModel]) -> None:
    assert settings.docstrings(model).keys() == model.model_fields.keys()


def test_every_route_that_changes_something_says_so_and_names_the_token() -> None:
    app = create_app(Exporter(Settings(), Settings))
    changing = [r for r in app.routes if isinstance(r, APIRoute) and "POST" in r.methods]
    assert len(changing) >= 4
    for route in changing:
        assert "needs the admin token" in (route.endpoint.__doc__ or ""), route.path


@pytest.mark.parametrize("path", READ, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(path: Path) -> None:
    for name, anchor in LINK.findall(prose(path)):
        place = path.parent / name if name else path
        assert place.exists(), name
        if anchor:
            assert anchor in anchors(place), f"{name}#{anchor}"


def nav(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for inner in part.values():
            yield from nav(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from nav(inner)


def test_every_page_has_its_place_in_the_site() -> None:
    listed = list(nav(YAML().load(ROOT / "mkdocs.yml")["nav"]))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(PAGES)
    for page in pages:
        fetched = re.findall(
            r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"([^\"]+)", page.read_text()
        )
        assert [address for address in fetched if "//" in address] == [], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?:[^)]*", styles) == []


def test_an_alert_links_to_a_page_of_the_site(site: Path) -> None:
    for rule in rule_table(Settings()):
        assert (site / "runbooks" / rule.alert / "index.html").exists()


def test_a_link_out_of_the_docs_is_a_plain_name_on_the_site() -> None:
    text = "[a](../alerts/a.yaml) [b](b.md#c) [d](../README.md) [e](runbooks/) [f](https://x.org)"
    assert plain(text, "page.md") == "a [b](b.md#c) d e [f](https://x.org)"
    assert plain("[up](../alerts.md) [out](../../x)", "runbooks/r.md") == "[up](../alerts.md) out"
