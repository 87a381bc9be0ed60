"""What a running server shows to be wrong, by its metrics page, its models and its version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from specdec_exporter.doctor.finding import Check, Finding, Severity
from specdec_exporter.doctor.launch import TOKENS, Launch
from specdec_exporter.model import Counters, Reason, ScrapeError, Snapshot
from specdec_exporter.parse import parse
from specdec_exporter.scrape import fetch, fetch_version, new_client
from specdec_exporter.thresholds import Thresholds

_TIMEOUT_SECONDS = 10.0
# What a proxy, such as Ray's, puts in front of vLLM's names.
_PREFIX = re.compile(rb"^([A-Za-z_][A-Za-z0-9_]*)vllm:", re.M)
_MOST_BYTES = 16_000_000


@dataclass(frozen=True, slots=True)
class Server:
    """What a server answered."""

    url: str
    """Of its metrics page, without what may be secret."""
    snapshot: Snapshot | None
    trouble: ScrapeError | None = None
    """Why there is no snapshot."""
    version: str = ""
    model: str = ""
    """What its first model was loaded from; empty if not known."""
    max_model_len: int | None = None


async def ask(metrics_url: str, shown_url: str) -> Server:
    """Ask a server for its metrics, its models and its version; no answer is an answer, too.

    Args:
        metrics_url: of the metrics page; the other routes lie beside it.
        shown_url: the same without what may be secret.
    """
    client = new_client(tls=metrics_url.startswith("https:"))
    try:
        try:
            page = await fetch(
                client, metrics_url, timeout=_TIMEOUT_SECONDS, max_page_bytes=_MOST_BYTES
            )
            prefix = _PREFIX.search(page)
            snapshot = parse(page, t=0.0, metric_prefix=prefix[1].decode() if prefix else "")
            trouble = None
        except ScrapeError as error:
            snapshot, trouble = None, error
            if error.reason is not Reason.NO_SERIES:
                return Server(shown_url, None, error)
        model, length = await _model(client, metrics_url)
        try:
            version = await fetch_version(client, metrics_url, _TIMEOUT_SECONDS)
        except ScrapeError:
            version = ""
        return Server(shown_url, snapshot, trouble, version, model, length)
    finally:
        await client.aclose()


async def _model(client: Any, metrics_url: str) -> tuple[str, int | None]:
    try:
        body = await fetch(
            client,
            urljoin(metrics_url, "v1/models"),
            timeout=_TIMEOUT_SECONDS,
            max_page_bytes=_MOST_BYTES,
        )
        first = json.loads(body)["data"][0]
        root, length = first.get("root"), first.get("max_model_len")
    except (ScrapeError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", None
    return (
        root if isinstance(root, str) else "",
        length if isinstance(length, int) else None,
    )


def server_findings(server: Server, configured: Launch | None) -> list[Finding]:
    """What a server's answers show to be wrong.

    Args:
        server: its answers.
        configured: what it should have been started with, where that is known.
    """
    return list(_findings(server, configured))


def _findings(server: Server, configured: Launch | None) -> Iterator[Finding]:
    where = server.url
    if server.snapshot is None:
        trouble = server.trouble
        assert trouble is not None
        none = trouble.reason is Reason.NO_SERIES
        yield Finding(
            Severity.ERROR,
            Check.NO_STATISTICS if none else Check.NO_ANSWER,
            "there is no vllm: series on the metrics page" if none else "the server cannot be read",
            where,
            trouble.detail,
            "start it without --disable-log-stats, and check the port"
            if none
            else "check address and server",
        )
        return
    observed = sorted({e.num_speculative_tokens for e in server.snapshot.engines})
    if len(observed) > 1:
        yield Finding(
            Severity.WARNING,
            Check.ENGINES_DIFFER,
            f"engines have different k: {', '.join(map(str, observed))}",
            where,
            "a server has one k; this is a merged page, or engines were started differently",
            "give each server a target of its own",
        )
    elif observed == [0]:
        yield from _off(where, configured)
    else:
        yield from _other_k(where, observed[0], configured)
        yield from _broken(server.snapshot, where)
    model = configured.model if configured else None
    if model and server.model and server.model != str(model.value):
        yield Finding(
            Severity.WARNING,
            Check.OTHER_MODEL,
            f"the server runs {server.model}, and {model.value} is configured",
            where,
            "the settings that were checked are not those of this server",
            "check the address, or restart the server with them",
        )


def _off(where: str, configured: Launch | None) -> Iterator[Finding]:
    wanted = configured is not None and bool(configured.speculation)
    yield Finding(
        Severity.ERROR if wanted else Severity.NOTE,
        Check.OFF,
        "speculation is configured, and the server runs without" if wanted else "it is off",
        where,
        "the series of speculation are there from the start where it is on, and none is",
        "restart the server with the settings, and look at its log with --log"
        if wanted
        else "nothing to do, if that is meant",
    )


def _other_k(where: str, observed: int, configured: Launch | None) -> Iterator[Finding]:
    if configured is None or not configured.given:
        return
    wanted = configured.k
    if wanted is not None and wanted != observed:
        fact = configured.speculation.get(TOKENS)
        yield Finding(
            Severity.ERROR,
            Check.OTHER_K,
            f"k is {wanted} in {fact.where if fact else 'the settings'}, and the server runs "
            f"{observed}",
            where,
            "vLLM takes k at its start only, and the command line outranks the file; the number "
            "of position series is the k that runs",
            "restart the server, and remove k from the command line",
        )


def _broken(snapshot: Snapshot, where: str) -> Iterator[Finding]:
    rule = Thresholds().drafter_broken
    total = sum((e.counters for e in snapshot.engines[1:]), snapshot.engines[0].counters)
    first = _first_position(total)
    if (
        first is not None
        and (total.drafts or 0) >= rule.min_drafts
        and first < rule.position_0_below
    ):
        yield Finding(
            Severity.ERROR,
            Check.DRAFTER_BROKEN,
            f"of {total.drafts:,.0f} drafts since the start {100 * first:.1f} % were accepted at "
            "position 0",
            where,
            "a drafter that fits gets 40 % and more there: this is a wrong method, a base target, "
            "a bad image, or contexts beyond the drafter's maximum length",
            "check the start with --config and --log; until then speculation is paid for nothing",
        )


def _first_position(counters: Counters) -> float | None:
    positions, drafts = counters.accepted_per_position, counters.drafts
    return positions[0] / drafts if positions and drafts else None
