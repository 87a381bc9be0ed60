"""What a server says of itself: its model, its version, and its counters before and after."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Literal

import httpx

from specdec_exporter.abtest.client import UnreachableError, why
from specdec_exporter.abtest.counters import flags, generated, keep, running
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.abtest.record import Page
from specdec_exporter.model import ScrapeError
from specdec_exporter.scrape import fetch, new_client

_PAGE_SECONDS = 10.0
_PAGE_BYTES = 20_000_000
_SETTLE_SECONDS = 3.0
_SETTLE_STEP = 0.05


async def identify(
    client: httpx.AsyncClient, url: str, model: str | None
) -> tuple[str, dict[str, str]]:
    """The name of the model to ask, and what is known of the server.

    Args:
        client: to ask with.
        url: of the server, without a path.
        model: to be asked; None takes the first.

    Raises:
        UnreachableError: nothing answers.
        BenchError: what answers is not such a server, or has no such model.
    """
    try:
        response = await client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        raise UnreachableError(f"{url} does not answer ({why(error)}); is it up?") from error
    if response.status_code in (401, 403):
        raise BenchError(f"{url}: status {response.status_code}; set VLLM_API_KEY to its key")
    cards: dict[str, Any] = {}
    if response.status_code == httpx.codes.OK:
        try:
            cards = {card["id"]: card for card in response.json()["data"]}
        except (ValueError, KeyError, TypeError):
            cards = {}
    if not cards:
        raise BenchError(
            f"{url}/v1/models: status {response.status_code} and no list of models; "
            "give the address of an OpenAI-compatible server, without a path"
        )
    name = next(iter(cards)) if model is None else model
    if name not in cards:
        raise BenchError(f"{url} has no model {name!r}; it has {', '.join(cards)}")
    known = {"max_model_len": cards[name].get("max_model_len")}
    # Other servers have no such page.
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
        known["version"] = (await client.get(f"{url}/version")).json()["version"]
    return name, {key: str(value) for key, value in known.items() if value is not None}


class Counters:
    """Looks at the server's metrics page.

    Args:
        url: of the server, without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/metrics"
        self._client = new_client(tls=url.startswith("https"))

    async def __aenter__(self) -> Counters:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def flags(self) -> dict[str, str]:
        """The flags that the page shows.

        Raises:
            ScrapeError: there is no such page.
        """
        return flags((await self._page("", "before")).lines)

    async def page(
        self, workload: str, moment: Literal["before", "after"], tokens: float = 0.0
    ) -> Page | None:
        """The counters once nothing of ours is on its way any more; None where there are none.

        The server counts a request shortly after its client has got the last token.

        Args:
            workload: whose requests are before or after it.
            moment: which of the two.
            tokens: ever generated, to wait for.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        try:
            while True:
                page = await self._page(workload, moment)
                settled = not running(page.lines) and generated(page.lines) >= tokens
                if settled or time.monotonic() > deadline:
                    return page
                await asyncio.sleep(_SETTLE_STEP)
        except ScrapeError:
            return None

    async def _page(self, workload: str, moment: Literal["before", "after"]) -> Page:
        page = await fetch(
            self._client, self._url, timeout=_PAGE_SECONDS, max_page_bytes=_PAGE_BYTES
        )
        return Page(workload, moment, time.time(), keep(page))
