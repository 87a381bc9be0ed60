"""HTTP: the metrics, the page, the JSON API and the hooks. Serves what is known, does no scraping.

Nothing here waits on a target: a request is answered from the last cycle's findings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_exporter import __version__
from specdec_exporter.config import ConfigError, Settings
from specdec_exporter.expose import registry, render
from specdec_exporter.history import Seen
from specdec_exporter.model import ExporterStatus
from specdec_exporter.page import Board, Templates
from specdec_exporter.pulse import Pulse
from specdec_exporter.rules import rule_table
from specdec_exporter.store import StoreError
from specdec_exporter.tuner import Refusal

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

_READ = ["GET", "HEAD"]
_AUTOTUNE = ("pause", "resume", "apply", "rollback")
_ALERTS = {
    "SpecDecPositionDecay": "position_decay",
    "SpecDecDrafterBroken": "drafter_broken",
}
"""Alerts that the tuner acts on, and the rules that they are."""
_MOST_BODY_BYTES = 1_000_000
_STATIC = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
MOST_STREAMS = 32
"""Pages that are told of news at once; further ones have to ask."""
STREAM_SECONDS = 600.0
"""After so long a stream ends, and a page that is still there opens another."""
PING_SECONDS = 15.0
"""A stream that has nothing to say shows after so long that it is there."""
AUDIT_ENTRIES = 20
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]+))(?::\d*)?")


class Service(Protocol):
    """What the HTTP side needs to know of the rest."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""

    @property
    def pulse(self) -> Pulse:
        """Beats when there is something new to see; ends when the exporter does."""

    def seen(self) -> Seen:
        """What people are shown: all targets as of the last pulse."""

    @property
    def reload_failed(self) -> bool:
        """Whether the last reload did."""

    def status(self) -> ExporterStatus:
        """What is known now."""

    def reload(self) -> None:
        """Read the settings anew.

        Raises:
            ConfigError: they cannot be used; the old ones stay in force.
        """

    def acknowledge_drift(self, target: str, model_name: str) -> bool:
        """End a drift incident; False where there is none."""

    def relearn_reference(self, target: str, model_name: str) -> bool:
        """Begin a reference anew; False where nothing is watched."""

    def autotune(self, action: str, target: str, k: int | None, who: str) -> str:
        """Pause, resume, apply or roll back, and say what was done.

        Raises:
            Refusal: it cannot be done.
        """

    def hear_alert(self, rule: str, labels: Mapping[str, str], *, firing: bool) -> int:
        """Take in an alert; returns how many targets it is of."""

    def audit(self, limit: int) -> list[dict[str, Any]]:
        """The last entries of the audit log, newest first.

        Raises:
            StoreError: it cannot be read.
        """


class _Guard:
    """Refuses requests under a foreign name, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._app
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not host_allowed(host, self._service.settings.allowed_hosts):
                app = PlainTextResponse(
                    f"Host {host!r} is not an address of this exporter; "
                    "add the name to allowed_hosts if it should be.\n",
                    status_code=421,
                )
        await app(scope, receive, send_guarded)


def create_app(service: Service) -> FastAPI:
    """The exporter's web application."""
    app = FastAPI(title="specdec-exporter", docs_url=None, redoc_url=None, openapi_url=None)
    collectors = registry(service.status)
    board = _boards(service)
    streams: set[object] = set()
    folder = resources.files("specdec_exporter") / "static"
    files = {name: (folder / name).read_bytes() for name in _STATIC}

    app.add_middleware(_Guard, service=service)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> Response:
        # Answered outside of all middleware; the server logs the exception.
        return PlainTextResponse(
            "Internal error; please report the log.\n", status_code=500, headers=_HEADERS
        )

    @app.api_route("/metrics", methods=_READ)
    async def metrics(request: Request) -> Response:
        """The metrics page for Prometheus: text, or OpenMetrics where that is asked for."""
        body, content_type = render(collectors, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    @app.api_route("/-/healthy", methods=_READ)
    async def healthy() -> Response:
        """Answers 200 while the exporter runs, whatever its targets do."""
        return PlainTextResponse("specdec-exporter is healthy.\n")

    @app.api_route("/-/ready", methods=_READ)
    async def ready() -> Response:
        """Answers 200 once requests are served, whatever its targets do."""
        return PlainTextResponse("specdec-exporter is ready.\n")

    @app.post("/-/reload")
    async def reload(request: Request) -> Response:
        """Reads the settings anew, as SIGHUP does; needs the admin token.

        Settings that are wrong are answered with 500 and the place of each mistake; the old ones
        stay in force.
        """
        if (refusal := _refusal(request, service.settings)) is not None:
            return refusal
        try:
            service.reload()
        except ConfigError as error:
            return PlainTextResponse(
                f"The old settings stay in force, the new ones are wrong.\n{error}\n",
                status_code=500,
            )
        return PlainTextResponse("Reloaded.\n")

    @app.post("/api/v1/drift/{action}")
    async def drift(request: Request, action: str, target: str = "", model: str = "") -> Response:
        """Ends a drift incident of a model, or takes its reference anew; needs the admin token.

        `acknowledge` is the one, `relearn` the other. What is not there is answered with 404.
        """
        if action not in ("acknowledge", "relearn"):
            return PlainTextResponse("Not found.\n", status_code=404)
        if (refusal := _refusal(request, service.settings)) is not None:
            return refusal
        acknowledge = action == "acknowledge"
        act = service.acknowledge_drift if acknowledge else service.relearn_reference
        if act(target, model):
            done = "Acknowledged" if acknowledge else "The reference is taken anew"
            return PlainTextResponse(f"{done}.\n")
        return PlainTextResponse(
            f"No {'drift incident' if acknowledge else 'reference'} of target {target!r} and model "
            f"{model!r}; give both as ?target=NAME&model=NAME, as in /api/v1/status.\n",
            status_code=404,
        )

    @app.post("/api/v1/autotune/{action}")
    async def autotune(request: Request, action: str, target: str = "", k: str = "") -> Response:
        """Has the tuner `pause`, `resume`, `apply` or `rollback`; needs the admin token.

        Without `target` all targets pause or resume, and the only one is changed. `apply` takes
        `k`, or what is recommended. What is refused is answered with 409 and the reason.
        """
        if service.settings.admin_token is None or action not in _AUTOTUNE:
            return PlainTextResponse("Not found.\n", status_code=404)
        if (refusal := _refusal(request, service.settings)) is not None:
            return refusal
        if k and not (k.isascii() and k.isdecimal() and len(k) < 3):
            return PlainTextResponse(f"k {k!r} is not a number.\n", status_code=422)
        who = f"{request.client.host if request.client else 'somebody'} over HTTP"
        try:
            done = service.autotune(action, target, int(k) if k else None, who)
        except Refusal as error:
            return PlainTextResponse(f"{error}\n", status_code=409)
        return PlainTextResponse(f"{done}\n")

    @app.post("/hooks/alertmanager")
    async def alertmanager(request: Request) -> Response:
        """Takes in webhook messages of Alertmanager, version 4; needs the admin token.

        SpecDecDrafterBroken and SpecDecPositionDecay count as rules of the targets that they name.
        """
        if service.settings.admin_token is None:
            return PlainTextResponse("Not found.\n", status_code=404)
        if (refusal := _refusal(request, service.settings)) is not None:
            return refusal
        alerts = _alerts(await _body(request))
        if alerts is None:
            return PlainTextResponse(
                "Expected a webhook message of Alertmanager, version 4.\n", status_code=422
            )
        heard = sum(
            service.hear_alert(_ALERTS[name], labels, firing=firing)
            for name, labels, firing in alerts
            if name in _ALERTS
        )
        return PlainTextResponse(f"Heard {heard} of {len(alerts)} alerts.\n")

    @app.api_route("/api/v1/audit", methods=_READ)
    async def audit(limit: int = 100) -> Response:
        """The newest entries, at most 1000, of the audit log: what was decided and done about k."""
        return JSONResponse(service.audit(min(max(limit, 1), 1000)))

    @app.api_route("/api/v1/status", methods=_READ)
    async def status() -> Response:
        """All that is known of all targets: figures, verdicts, drift, baselines, the tuner."""
        known = service.status()
        # Of hundreds of targets this takes long enough to make scrapes late.
        return await asyncio.to_thread(lambda: JSONResponse(_plain(known)))

    @app.api_route("/", methods=_READ)
    async def index(q: str = "", trouble: str = "", target: str | None = None) -> Response:
        """The page for people: `q` finds text, `trouble` leaves out what is well, `target` one."""
        return HTMLResponse(board().page(q, bool(trouble), target))

    @app.api_route("/cards", methods=_READ)
    async def cards(rows: str = "", whole: str = "", audit: str = "") -> Response:
        return HTMLResponse(board().fragment(rows.split("."), whole.split("."), bool(audit)))

    @app.api_route("/state", methods=_READ)
    async def state() -> Response:
        return JSONResponse(board().state)

    @app.get("/events")
    async def events() -> Response:
        if len(streams) >= MOST_STREAMS:
            return PlainTextResponse("Too many are listening; ask /state.\n", status_code=503)
        return StreamingResponse(
            news(service.pulse, board, streams),
            media_type="text/event-stream",
            headers={"X-Accel-Buffering": "no"},
        )

    @app.api_route("/static/{name}", methods=_READ)
    async def static(name: str) -> Response:
        if name not in _STATIC:
            return PlainTextResponse("Not found.\n", status_code=404)
        return Response(files[name], media_type=_STATIC[name])

    return app


def _boards(service: Service) -> Callable[[], Board]:
    """What gives the board as of the last pulse, made once for all who ask."""
    templates = Templates()
    kept: tuple[int, Board] | None = None

    def board() -> Board:
        nonlocal kept
        count = service.pulse.count
        # Before the first pulse what is shown is of now, whenever that is.
        if kept is None or kept[0] != count or not count:
            settings = service.settings
            runbooks = {
                rule.name: f"{settings.rules.runbook_url}{rule.alert}"
                for rule in rule_table(settings)
            }
            failed = "The last reload failed; the settings before it are in force."
            notices = [failed] if service.reload_failed else []
            try:
                audit = service.audit(AUDIT_ENTRIES)
            except StoreError as error:
                # Whoever is on call needs the rest of the page all the same.
                audit = []
                notices.append(f"The audit log cannot be shown: {error}.")
            kept = (
                count,
                Board(
                    service.seen(),
                    audit=audit,
                    notice=" ".join(notices),
                    version=__version__,
                    templates=templates,
                    runbooks=runbooks,
                    every=settings.rules.evaluation_interval,
                ),
            )
        return kept[1]

    return board


async def news(
    pulse: Pulse, board: Callable[[], Board], streams: set[object]
) -> AsyncIterator[str]:
    """One event now, and one whenever there is news; a slow reader misses all but the newest."""
    me, now = object(), asyncio.get_running_loop().time
    end, shown = now() + STREAM_SECONDS, -1
    streams.add(me)
    try:
        while not pulse.ended and now() < end:
            if pulse.count == shown:
                yield ":\n\n"
            else:
                shown = pulse.count
                yield f"id: {shown}\ndata: {json.dumps(board().state)}\n\n"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pulse.after(shown), PING_SECONDS)
    finally:
        streams.discard(me)


def host_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a Host header names this exporter: an IP literal, localhost or a configured name.

    A page in somebody's browser can point a name of its own at our address; such a request carries
    that name.
    """
    parts = _HOST.fullmatch(host.strip().lower())
    if parts is None:
        return False
    name = parts["name"]
    if name is not None and name in ("localhost", *(a.lower() for a in allowed)):
        return True
    try:
        ipaddress.ip_address(name or parts["ipv6"])
    except ValueError:
        return False
    return True


def _refusal(request: Request, settings: Settings) -> Response | None:
    if settings.admin_token is None:
        return PlainTextResponse(
            "No admin_token is set, so nothing can be changed over HTTP; send SIGHUP to reload.\n",
            status_code=403,
        )
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    expected = settings.admin_token.get_secret_value()
    # Headers are read as Latin-1, so this gives back the bytes that were sent.
    sent = given.strip().encode("latin-1")
    if scheme.lower() == "bearer" and secrets.compare_digest(sent, os.fsencode(expected)):
        return None
    return PlainTextResponse(
        "Send the admin token as `Authorization: Bearer TOKEN`.\n",
        status_code=401,
        headers={"WWW-Authenticate": "Bearer"},
    )


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MOST_BODY_BYTES:
            return b""
    return bytes(body)


def _alerts(body: bytes) -> list[tuple[str, dict[str, str], bool]] | None:
    """Name, labels and whether it fires of each alert; None where this is no such message."""
    try:
        return [
            (
                str(alert["labels"]["alertname"]),
                {str(name): str(value) for name, value in alert["labels"].items()},
                alert["status"] == "firing",
            )
            for alert in json.loads(body)["alerts"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _plain(status: ExporterStatus) -> dict[str, Any]:
    plain: dict[str, Any] = _json(status)
    for target in plain["targets"]:
        target["labels"] = dict(target["labels"])
        target["failures"] = dict(target["failures"])
    return plain


def _json(value: Any) -> Any:
    """As JSON values; NaN and infinity, which JSON does not have, become null."""
    if dataclasses.is_dataclass(value):
        return {f.name: _json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
