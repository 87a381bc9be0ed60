"""Waits until the server is there again, and reads back from its metrics page which k it has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from specdec_exporter.act.errors import ActError
from specdec_exporter.duration import format_duration
from specdec_exporter.model import ScrapeError
from specdec_exporter.parse import parse
from specdec_exporter.scrape import fetch, new_client

_PROBE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server shows that it is ready, and with which k."""

    metrics_url: str
    model_name: str
    metric_prefix: str = ""
    ready_url: str | None = None
    max_page_bytes: int = 16_000_000
    poll_seconds: float = 1.0

    async def served_k(self) -> int:
        """The k that the model is served with now; 0 is no speculation.

        Raises:
            ActError: there is no telling.
        """
        if self.ready_url is not None:
            await self._get(self.ready_url, "not ready")
        page = await self._get(self.metrics_url, "metrics")
        try:
            snapshot = parse(page, t=0.0, metric_prefix=self.metric_prefix)
        except ScrapeError as error:
            raise ActError(f"metrics: {error.detail}") from error
        engines = [e for e in snapshot.engines if e.model_name == self.model_name]
        ks = {engine.num_speculative_tokens for engine in engines}
        if len(ks) != 1:
            seen = f"engines with k = {sorted(ks)}" if ks else "no engine"
            raise ActError(f"metrics: {seen} of model {self.model_name!r}")
        return ks.pop()

    async def wait_for(self, k: int, timeout: float) -> None:
        """Wait until the server is ready and has this k, which a server before its restart has not.

        Args:
            k: as it is written down.
            timeout: seconds.

        Raises:
            ActError: it was not so in time; the message says what was seen last.
        """
        seen = "nothing was seen"
        try:
            async with asyncio.timeout(timeout):
                while True:
                    try:
                        served = await self.served_k()
                    except ActError as error:
                        seen = str(error)
                    else:
                        if served == k:
                            return
                        seen = f"it serves k = {served}; does its command line set another k?"
                    await asyncio.sleep(self.poll_seconds)
        except TimeoutError:
            within = format_duration(timeout)
            raise ActError(f"the server has no k = {k} within {within}: {seen}") from None

    async def _get(self, url: str, what: str) -> bytes:
        try:
            async with new_client(tls=url.startswith("https")) as client:
                return await fetch(
                    client, url, timeout=_PROBE_SECONDS, max_page_bytes=self.max_page_bytes
                )
        except ScrapeError as error:
            raise ActError(f"{what}: {error.detail}") from error
