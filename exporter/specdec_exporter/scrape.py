"""One HTTP GET to bytes, or a typed failure.

Only the address that it is given is fetched: redirects are not followed and no proxy is taken from
the environment. It knows nothing of what is on the page.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import zlib
from base64 import b64encode
from functools import lru_cache
from urllib.parse import urljoin, urlsplit

import httpx

from specdec_exporter.model import Reason, ScrapeError

_HEADERS = {
    "Accept": "text/plain;version=0.0.4,*/*;q=0.1",
    # Compressing costs the server's processor more than the page costs a local wire.
    "Accept-Encoding": "identity",
    "User-Agent": "specdec-exporter",
}
# Characters of a server's own words that a message repeats.
_SHOWN = 120
_MOST_VERSION_BYTES = 10_000
# Servers close idle connections after five seconds and more; one reused at that moment breaks.
_KEEPALIVE_SECONDS = 2.0


def new_client(*, tls: bool) -> httpx.AsyncBaseTransport:
    """What `fetch` sends through; without `tls` it does not load the system's certificates.

    It is httpx without cookies, redirects and environment, none of which a scrape wants, and which
    cost a fifth of it.
    """
    return httpx.AsyncHTTPTransport(
        verify=ssl.create_default_context() if tls else False,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
    )


@lru_cache(maxsize=1024)
def _request(url: str, connect_seconds: float) -> httpx.Request:
    address = httpx.URL(url)
    headers = dict(_HEADERS)
    if address.userinfo:
        login = f"{address.username}:{address.password}".encode()
        headers["Authorization"] = f"Basic {b64encode(login).decode()}"
    limits = httpx.Timeout(None, connect=connect_seconds)
    return httpx.Request("GET", address, headers=headers, extensions={"timeout": limits.as_dict()})


async def fetch(
    client: httpx.AsyncBaseTransport, url: str, *, timeout: float, max_page_bytes: int
) -> bytes:
    """The decompressed body of a GET.

    Args:
        client: from `new_client`.
        url: of the metrics page.
        timeout: for all of it, seconds, however slowly it drips.
        max_page_bytes: after decompression.

    Raises:
        ScrapeError: whatever went wrong.
    """
    try:
        # Cancelled in a TLS handshake the library would leave the socket to the garbage collector;
        # a limit of its own, which has to come first, closes it.
        request = _request(url, 0.9 * timeout)
        async with asyncio.timeout(timeout):
            response = await client.handle_async_request(request)
            try:
                _check(response)
                return await _body(response, max_page_bytes)
            finally:
                await response.aclose()
    except (TimeoutError, httpx.TimeoutException) as error:
        raise ScrapeError(
            Reason.TIMEOUT,
            f"no whole page within {timeout:g}s; is it overloaded? raise interval and timeout",
        ) from error
    except httpx.ConnectError as error:
        raise ScrapeError(
            Reason.CONNECT, f"cannot connect ({_short(error)}); is the server up, the port right?"
        ) from error
    except httpx.RemoteProtocolError as error:
        cut = "without sending complete message body" in str(error)
        raise ScrapeError(
            Reason.TRUNCATED if cut else Reason.PROTOCOL,
            f"the server broke off ({_short(error)})",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as error:
        # A ValueError comes from host names that no resolver would be asked for.
        raise ScrapeError(Reason.PROTOCOL, f"the transfer failed ({_short(error)})") from error


async def fetch_version(client: httpx.AsyncBaseTransport, metrics_url: str, timeout: float) -> str:
    """The engine's version, which no series carries: vLLM's `/version` beside its metrics page.

    Empty where there is no such route, or another server's.

    Raises:
        ScrapeError: the server could not be asked.
    """
    url = urljoin(metrics_url, "version")
    try:
        body = await fetch(client, url, timeout=timeout, max_page_bytes=_MOST_VERSION_BYTES)
        version = json.loads(body)["version"]
    except ScrapeError as error:
        if error.reason in (Reason.HTTP_STATUS, Reason.REDIRECT, Reason.TOO_LARGE):
            return ""
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return version[:_SHOWN] if isinstance(version, str) and version.isprintable() else ""


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if response.has_redirect_location:
        to = urlsplit(response.headers["location"])
        shown = f"{to.netloc.rpartition('@')[2]}{to.path}"
        raise ScrapeError(
            Reason.REDIRECT,
            f"status {status} to {shown[:_SHOWN]!r}; set the final address, none is followed",
        )
    if status != httpx.codes.OK:
        phrase = "".join(c for c in response.reason_phrase[:_SHOWN] if c.isprintable())
        raise ScrapeError(Reason.HTTP_STATUS, f"status {status} {phrase}; expected 200")


async def _body(response: httpx.Response, max_page_bytes: int) -> bytes:
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        raise ScrapeError(
            Reason.ENCODING, f"content-encoding {encoding[:_SHOWN]!r} was not asked for"
        )
    # A header of either zlib or gzip is recognised; the limit holds after decompression, so a small
    # body cannot become a large page.
    inflate = None if encoding in ("identity", "") else zlib.decompressobj(wbits=47)
    page = bytearray()
    async for chunk in response.aiter_raw():
        if inflate is None:
            page += chunk
        else:
            page += _inflate(inflate, chunk, max_page_bytes + 1 - len(page))
        if len(page) > max_page_bytes:
            raise ScrapeError(
                Reason.TOO_LARGE, f"the page is over max_page_bytes ({max_page_bytes})"
            )
    if inflate is not None and not inflate.eof:
        raise ScrapeError(Reason.TRUNCATED, "the compressed page ends early")
    return bytes(page)


def _inflate(inflate: zlib._Decompress, chunk: bytes, most: int) -> bytes:
    try:
        page = inflate.decompress(chunk, most)
    except zlib.error as error:
        raise ScrapeError(Reason.ENCODING, f"the compressed page is broken ({error})") from error
    if inflate.unused_data:
        # Kept by zlib, so it would be an unbounded page under another name.
        raise ScrapeError(Reason.ENCODING, "something follows the end of the compressed page")
    return page


def _short(error: Exception) -> str:
    """The system's own words where there are any; the libraries wrap them up to four deep."""
    told, cause = str(error), error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            own = isinstance(cause, ssl.SSLError | socket.gaierror)
            # For any other number asyncio has the address in place of what it means.
            told = cause.strerror if own else os.strerror(cause.errno or 0)
        cause = cause.__cause__ or cause.__context__
    return " ".join(told.split())[:_SHOWN] or type(error).__name__
