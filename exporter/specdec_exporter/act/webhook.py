"""Asks somebody else to change k: a signed POST, repeated under one key until it is answered.

The receiver proves the sender by the HMAC of time and body, refuses what is old, and acts once on
one key. docs/acting.md has its side of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable

import httpx

from specdec_exporter.act.change import Change
from specdec_exporter.act.errors import ActError, Refused
from specdec_exporter.scrape import new_client

VERSION = 1
"""Of the body; it grows when a receiver has to read it otherwise."""
_ATTEMPTS = 5
_TIMEOUT_SECONDS = 10.0


def body(change: Change) -> bytes:
    """The body of the request: the same bytes in every attempt."""
    return json.dumps(
        {
            "version": VERSION,
            "idempotency_key": change.key,
            "target": change.target,
            "model_name": change.model_name,
            "from_k": change.from_k,
            "to_k": change.to_k,
            "reason": change.reason,
            "time": change.time,
        }
    ).encode()


def signature(secret: str, timestamp: str, content: bytes) -> str:
    """What `X-Specdec-Signature` says of a body sent at a time."""
    signed = hmac.new(secret.encode(), f"{timestamp}.".encode() + content, hashlib.sha256)
    return f"sha256={signed.hexdigest()}"


class Webhook:
    """A receiver of changes.

    Args:
        url: of the receiver.
        secret: shared with it.
        pause: seconds before the second attempt; each further pause is twice as long.
        now: the clock by which the receiver tells old requests from new ones.
    """

    def __init__(
        self, url: str, secret: str, pause: float = 1.0, now: Callable[[], float] = time.time
    ) -> None:
        self._url = url
        self._secret = secret
        self._pause = pause
        self._now = now

    async def read_k(self) -> int | None:
        """Nobody is asked: what the server serves is on its metrics page."""
        return None

    async def set_k(self, change: Change) -> None:
        """Ask for a change.

        Raises:
            Refused: the receiver cannot be reached or does not want to.
            ActError: it did not say whether it has taken it up.
        """
        content = body(change)
        problem, arrived = "", False
        async with httpx.AsyncClient(
            transport=new_client(tls=self._url.startswith("https")),
            trust_env=False,
            follow_redirects=False,
            timeout=_TIMEOUT_SECONDS,
        ) as client:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(self._pause * 2 ** (attempt - 1))
                try:
                    async with asyncio.timeout(_TIMEOUT_SECONDS):
                        status = await self._post(client, content, change.key)
                except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                    problem = f"cannot connect ({type(error).__name__})"
                except (httpx.TransportError, TimeoutError) as error:
                    # Sent, perhaps acted on, and not answered.
                    problem, arrived = f"no answer ({type(error).__name__})", True
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                    raise Refused(f"webhook: not sent ({type(error).__name__})") from error
                else:
                    if 200 <= status < 300:
                        return
                    problem = f"status {status}"
                    arrived = arrived or status >= 500
                    if status < 500 and status != httpx.codes.TOO_MANY_REQUESTS:
                        advice = "; redirects are not followed" if 300 <= status < 400 else ""
                        raise (ActError if arrived else Refused)(f"webhook: {problem}{advice}")
        kind = ActError if arrived else Refused
        raise kind(f"webhook: {problem} in the last of {_ATTEMPTS} attempts; is the receiver up?")

    async def _post(self, client: httpx.AsyncClient, content: bytes, key: str) -> int:
        timestamp = str(int(self._now()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "specdec-exporter",
            "Idempotency-Key": key,
            "X-Specdec-Timestamp": timestamp,
            "X-Specdec-Signature": signature(self._secret, timestamp, content),
        }
        # What the receiver says beyond the status is of no use, however long it is.
        async with client.stream("POST", self._url, content=content, headers=headers) as response:
            return response.status_code
