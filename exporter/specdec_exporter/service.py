"""The running exporter: the loop, the web server, reload and signals, put together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from specdec_exporter import __version__
from specdec_exporter.app import create_app
from specdec_exporter.config import ConfigError, Settings, listen_address
from specdec_exporter.history import Seen
from specdec_exporter.log import configure
from specdec_exporter.loop import Loop
from specdec_exporter.model import ExporterStatus
from specdec_exporter.pulse import Pulse
from specdec_exporter.store import Store, StoreError
from specdec_exporter.tuner import Refusal

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """Wakes once a second, not ten times: an exporter that nobody asks should cost nothing."""

    def __init__(self, config: uvicorn.Config, pulse: Pulse) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()
        self._pulse = pulse

    def stop(self) -> None:
        self.should_exit = True
        # Who waits for news would be waited for.
        self._pulse.end()
        self._stopped.set()

    async def main_loop(self) -> None:
        # At 0, as every tenth time, the server renews what it says the time is.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopped.wait()


class Exporter:
    """Everything between the settings and the port.

    Args:
        settings: checked settings.
        load: reads them anew; what a reload calls.
        store: where the state is that outlives the process; in memory unless given.
    """

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], store: Store | None = None
    ) -> None:
        self._load = load
        self._store = store or Store(None)
        self._loop = Loop(settings, self._store)
        self._reloaded = True

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._loop.settings

    @property
    def pulse(self) -> Pulse:
        """Beats when there is something new to see; ends when the exporter does."""
        return self._loop.pulse

    def seen(self) -> Seen:
        """What people are shown: all targets as of the last pulse."""
        return self._loop.seen()

    @property
    def reload_failed(self) -> bool:
        """Whether the last reload did."""
        return not self._reloaded

    def status(self) -> ExporterStatus:
        """What is known now."""
        return ExporterStatus(
            version=__version__,
            targets=self._loop.statuses(),
            window_label=len(self.settings.windows) > 1,
            last_reload_successful=self._reloaded,
        )

    def reload(self) -> None:
        """Read the settings anew and put them in force; `listen` needs a restart.

        Raises:
            ConfigError: they cannot be used; the old ones stay in force.
        """
        try:
            settings = self._load()
            if settings.listen != self.settings.listen:
                log.warning("listen changes at the next start", listen=settings.listen)
            if settings.state_file != self.settings.state_file:
                log.warning("state_file changes at the next start", file=str(settings.state_file))
            level = self.settings.log_level
            self._reloaded = True
            self._loop.reload(settings)
            if settings.log_level != level:
                configure(settings.log_level)
        except ConfigError as error:
            self._reloaded = False
            self._loop.publish()
            for problem in error.problems:
                log.error("reload failed", place=problem.place, problem=problem.message)
            raise
        log.info("reloaded", targets=len(settings.targets))

    def acknowledge_drift(self, target: str, model_name: str) -> bool:
        """End a drift incident; False where there is none."""
        done = self._loop.acknowledge_drift(target, model_name)
        if done:
            log.info("drift acknowledged", target=target, model=model_name)
        self._loop.publish()
        return done

    def relearn_reference(self, target: str, model_name: str) -> bool:
        """Begin a reference anew; False where nothing is watched."""
        done = self._loop.relearn_reference(target, model_name)
        if done:
            log.info("reference to be learned anew", target=target, model=model_name)
        self._loop.publish()
        return done

    def autotune(self, action: str, target: str, k: int | None, who: str) -> str:
        """Pause, resume, apply or roll back; of all targets where none is named.

        Returns:
            What was done, in words.

        Raises:
            Refusal: it cannot be done; nothing was.
        """
        done = self._autotune(action, target, k, who)
        self._loop.publish()
        return done

    def _autotune(self, action: str, target: str, k: int | None, who: str) -> str:
        tuners = self._loop.tuners
        if target and target not in tuners:
            raise Refusal(f"no target {target!r}; there are {', '.join(tuners) or 'none'}")
        if action in ("apply", "rollback"):
            if not target and len(tuners) != 1:
                raise Refusal(f"name one target of {', '.join(tuners) or 'none'}")
            tuner = tuners[target or next(iter(tuners))]
            now = time.time()
            return tuner.apply(k, who, now) if action == "apply" else tuner.roll_back(who, now)
        chosen = [tuners[target]] if target else list(tuners.values())
        for tuner in chosen:
            (tuner.pause if action == "pause" else tuner.resume)(who)
        return f"{action}d: {target or 'every target'}"

    def hear_alert(self, rule: str, labels: Mapping[str, str], *, firing: bool) -> int:
        """Take in an alert on a target, named by `target` or by its `instance`.

        Returns:
            How many targets it is of.
        """
        heard = 0
        for target in self.settings.targets:
            named = labels.get("target") == target.name
            scraped = "target" not in labels and labels.get("instance") == target.host_port
            tuner = self._loop.tuners.get(target.name)
            if tuner is not None and (named or scraped):
                tuner.hear(rule, labels.get("model_name", ""), firing=firing, now=time.time())
                heard += 1
        return heard

    def audit(self, limit: int) -> list[dict[str, Any]]:
        """The last entries of the audit log, newest first."""
        return self._store.logged("audit", limit)

    def _reload_on_signal(self) -> None:
        try:
            self.reload()
        except ConfigError:
            return  # Logged and counted; a signal has nobody to answer.

    async def run(self, listener: socket.socket) -> None:
        """Serve on a bound socket until a signal to stop."""
        config = uvicorn.Config(
            create_app(self),
            access_log=False,
            log_config=None,
            lifespan="off",
            server_header=False,
            http="h11",
            ws="none",
            timeout_graceful_shutdown=3,
        )
        server = _Server(config, self.pulse)
        running = asyncio.get_running_loop()
        running.add_signal_handler(signal.SIGHUP, self._reload_on_signal)
        # The web server raises the signal that ended it once more when it is done. Handled here,
        # the process ends with 0, as who stops a container expects.
        for stop in (signal.SIGINT, signal.SIGTERM):
            running.add_signal_handler(stop, server.stop)
        measuring = asyncio.create_task(self._loop.run())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        done, _ = await asyncio.wait({measuring, serving}, return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        await serving
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        for task in done:
            task.result()


def open_store(settings: Settings, port: int, environ: Mapping[str, str]) -> Store:
    """The file of the settings, or one of this user and port, or else memory with a warning.

    Raises:
        StoreError: the settings name a file that cannot be used.
    """
    if settings.state_file is not None:
        return Store(settings.state_file)
    # systemd gives a service a folder of its own; XDG says where a user's programs keep theirs.
    folder = environ.get("STATE_DIRECTORY") or environ.get("XDG_STATE_HOME")
    state = Path(folder) if folder else Path("~/.local/state").expanduser()
    try:
        return Store(state / "specdec-exporter" / f"{port}.db")
    except StoreError as error:
        log.warning("state is lost at the end; set state_file to keep it", problem=str(error))
        return Store(None)


def bind(listen: str) -> socket.socket:
    """A listening socket on HOST:PORT, so that a port in use is known before anything starts.

    Raises:
        OSError: the address cannot be had.
    """
    host, port = listen_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
