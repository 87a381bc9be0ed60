"""Measures every target at its interval, and publishes what it found.

It owns the clock, the state and the tasks. Each target has a monitor that is told what a scrape
gave and when; the tasks around it only wait and fetch. One target's trouble is its own.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import structlog

from specdec_exporter import rules
from specdec_exporter.baseline import PEER_SECONDS, Baseline, BaselineError, learn
from specdec_exporter.config import Settings, Target
from specdec_exporter.decide import Evidence
from specdec_exporter.drift import Fingerprint
from specdec_exporter.evidence import HOUR_SECONDS, evidence_of, unanswered
from specdec_exporter.history import History, Seen, Watched
from specdec_exporter.judge import Facts, Judge, drift_facts, facts
from specdec_exporter.measure import Drafted, Meter
from specdec_exporter.model import (
    Measurement,
    Reason,
    ScrapeError,
    TargetStatus,
    TunerStatus,
)
from specdec_exporter.parse import parse
from specdec_exporter.pulse import Pulse
from specdec_exporter.references import baselines, check, configure, sweep
from specdec_exporter.rules import rule_table
from specdec_exporter.scrape import fetch, fetch_version, new_client
from specdec_exporter.store import Store, StoreError
from specdec_exporter.tuner import Tuner
from specdec_exporter.watch import DriftWatch

EXPIRY_INTERVALS = 3
"""A target that has not answered for so many intervals loses its figures, but not its counters."""

MOST_VERSION_FAILURES = 3
LEARN_WINDOW_SECONDS = 60.0
"""Looked at for a baseline at a time; longer than the time between two evaluations."""
LEARNED_SECONDS = 300.0
"""Time between two writes of what is being learned."""

log = structlog.get_logger()


class Monitor:
    """The state of one target, fed with what its scrapes gave."""

    def __init__(self, target: Target, settings: Settings) -> None:
        self.target = target
        self._meter = Meter(settings.windows, settings.variance_inflation)
        self._watch = _drift_watch(target, settings)
        self.engine_version: str | None = None
        """As the server says it; empty where it does not, None while it has not been asked."""
        self.baselines = baselines(target)
        self._version_failures = 0
        self._restarts = 0
        self._started: float | None = None
        self._models: tuple[str, ...] = ()
        self._now = -math.inf
        self._judge = Judge(rule_table(settings), patience=settings.windows[0])
        self._judged_window = settings.windows[0]
        self.history = History()
        self._grace = settings.rules.target_down.grace
        self._first_seen: float | None = None
        self._interval = settings.interval
        self._shortest_window = min(settings.windows)
        self._failures: Counter[str] = Counter()
        self._measured_until = -math.inf
        self._state: str | None = None
        self._measurements: tuple[Measurement, ...] | None = ()
        self._status = TargetStatus(
            name=target.name,
            url=target.shown_url,
            labels=tuple(sorted(target.labels.items())),
            up=False,
            scrapes=0,
            scrape_duration_seconds=None,
            last_success=None,
            failures=(),
            last_error=None,
            totals=(),
            measurements=(),
        )

    @property
    def status(self) -> TargetStatus:
        """What is known now.

        Figures are derived when somebody looks: nobody looks at every scrape.
        """
        if self._measurements is None:
            try:
                self._measurements = self._meter.measure(self._choose)
            except Exception as error:  # noqa: BLE001 - one target's trouble is its own
                self._measurements = ()
                self._record(self._typed(error))
        return replace(
            self._status,
            totals=self._meter.totals(),
            measurements=self._measurements,
            drift=self._watch.statuses(),
        )

    def reconfigure(self, target: Target, settings: Settings) -> None:
        """Go on under new settings; counters and history stay."""
        self.target = target
        self._meter.reconfigure(settings.windows, settings.variance_inflation)
        self._judge.reconfigure(rule_table(settings))
        before = self._watch.to_dict(learners=True)
        self._watch = _drift_watch(target, settings)
        self._watch.restore(before, before)
        observed = self.baselines.to_dict()
        self.baselines = baselines(target)
        self.baselines.restore(observed)
        self._judged_window = settings.windows[0]
        self._grace = settings.rules.target_down.grace
        self._shortest_window = min(settings.windows)
        self._interval = settings.interval
        self._status = replace(self._status, labels=tuple(sorted(target.labels.items())))
        if self._measurements:
            # What is served must be of the windows that are in force, and of no others.
            self._measurements = None

    def observe(
        self,
        result: bytes | Exception,
        *,
        t: float,
        duration: float,
        unix_time: float | None = None,
    ) -> None:
        """Take in what the scrape begun at `t` gave; a failure is counted, never raised.

        Args:
            result: the page, or why there is none.
            t: seconds that never go back.
            duration: of the scrape, seconds.
            unix_time: of that moment, for people to read; `t` unless given.
        """
        unix_time = t if unix_time is None else unix_time
        error = (
            self._add(result, t, unix_time) if isinstance(result, bytes) else self._typed(result)
        )
        last_success = self._status.last_success
        if error is None:
            self._measured_until = t
            self._measurements = None
            last_success = unix_time
        # Half an interval early, since a scrape may be a little early or late.
        elif t - self._measured_until > (EXPIRY_INTERVALS - 0.5) * self._interval:
            self._measurements = ()
        self._status = replace(
            self._status,
            scrapes=self._status.scrapes + 1,
            scrape_duration_seconds=duration,
            last_success=last_success,
        )
        self._record(error)

    def _choose(self, model_name: str) -> tuple[Baseline | None, str]:
        return self.baselines.choose(model_name, self.engine_version or "", self._now)

    def learn(self, unix_time: float) -> None:
        """Take what there is without speculation as a baseline for when there is."""
        self._now = unix_time
        if self.engine_version is not None and self.status.measurements:
            for window in self._meter.recent(LEARN_WINDOW_SECONDS):
                self.baselines.observe(window, self.engine_version, unix_time)

    def evidence(self, unix_time: float) -> dict[str, Evidence]:
        """What there is to decide about k on, by model."""
        served = {
            m.total.model_name: m
            for m in self.status.measurements
            if m.total.window_seconds == self._judged_window
        }
        found = {}
        for window in self._meter.recent(HOUR_SECONDS) if served else ():
            if (now := served.get(window.model_name)) is not None:
                found[window.model_name] = evidence_of(
                    now,
                    self._meter.figures(window),
                    window,
                    server_start=self._server_start(unix_time),
                    verdicts=self._states(window.model_name),
                )
        self._models = tuple(found) or self._models
        if found:
            return found
        start = self._server_start(unix_time)
        return {model: unanswered(start, self._states(model)) for model in self._models}

    def _states(self, model_name: str) -> dict[str, str]:
        """State of each rule of a model, and of the target."""
        return {
            v.rule: str(v.state)
            for v in self._status.verdicts
            if v.model_name in (model_name, "") and v.inhibited_by != "target_down"
        }

    def _server_start(self, unix_time: float) -> float:
        if self._started is None:
            self._started = unix_time
        return self._started

    def baseline_curves(self) -> dict[str, Baseline]:
        """The baseline in force, by model."""
        chosen = {model: self._choose(model)[0] for model in self._models}
        return {model: baseline for model, baseline in chosen.items() if baseline is not None}

    def as_peer(self, unix_time: float) -> dict[str, Baseline]:
        """What this target is as a live baseline of others, by model.

        Raises:
            BaselineError: it speculates.
        """
        if not self.status.measurements:
            return {}
        learned = {
            window.model_name: learn(
                window.tracks,
                source="peer",
                model_name=window.model_name,
                engine_version=self.engine_version or "",
                taken_at=unix_time,
            )[0]
            for window in self._meter.recent(PEER_SECONDS)
        }
        return {model: baseline for model, baseline in learned.items() if baseline is not None}

    def judge(self, unix_time: float, tuned: Iterable[TunerStatus] = ()) -> None:
        """Evaluate the rules on what is known now, and on what the tuner last made of it."""
        self._now = unix_time
        status = self.status
        elsewhere: defaultdict[str, dict[str, float | None]] = defaultdict(dict)
        for one in status.drift:
            elsewhere[one.model_name] |= drift_facts(
                one.score, one.reference_position_acceptance_ratio
            )
        for tuner in tuned:
            elsewhere[tuner.model_name] |= {
                rules.LAST_POSITION_GAIN.name: tuner.last_position_gain_ratio,
                rules.LAST_POSITION_GAIN_STDERR.name: tuner.last_position_gain_ratio_stderr,
            }
        judged = [m for m in status.measurements if m.total.window_seconds == self._judged_window]
        self.history.add(judged, unix_time)
        measured = [(m.total.model_name, facts(m) | elsewhere[m.total.model_name]) for m in judged]
        verdicts = self._judge.judge(measured, unix_time, target=self._facts(status, unix_time))
        self._status = replace(self._status, verdicts=verdicts)

    def _facts(self, status: TargetStatus, unix_time: float) -> Facts:
        """Of the target itself; before the first scrape nothing is known of it."""
        if not status.scrapes:
            return {}
        if self._first_seen is None:
            self._first_seen = unix_time
        expected = status.last_success is not None or unix_time - self._first_seen >= self._grace
        return {rules.UP.name: float(status.up), rules.EXPECTED_UP.name: 1.0 if expected else None}

    def saved(self) -> dict[str, Any]:
        """What must outlive the process, as plain JSON values."""
        return {
            "url": self.target.url,
            "rules": self._judge.to_dict(),
            "drift": self._watch.to_dict(learners=False),
        }

    def learned(self) -> dict[str, Any]:
        """What is being learned: large, slow to change, and worth to be kept now and then."""
        return {
            "url": self.target.url,
            "drift": self._watch.to_dict(learners=True),
            "baselines": self.baselines.to_dict(),
        }

    def restore(
        self, saved: Mapping[str, Any], learned: Mapping[str, Any] | None, pause: float
    ) -> None:
        """Go on from what an earlier process saved, `pause` seconds ago.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is of another form.
        """
        if saved["url"] == self.target.url:
            self._judge.restore(saved["rules"], pause)
            if learned is None or learned["url"] != self.target.url:
                self._watch.restore(saved["drift"], None)
            else:
                self._watch.restore(saved["drift"], learned["drift"])
                self.baselines.restore(learned["baselines"])

    def acknowledge_drift(self, model_name: str) -> bool:
        """End a model's drift incident; False where there is none."""
        return self._watch.acknowledge(model_name)

    def relearn_reference(self, model_name: str) -> bool:
        """Begin a model's reference anew; False where nothing is watched."""
        return self._watch.relearn(model_name)

    def _add(self, page: bytes, t: float, unix_time: float) -> ScrapeError | None:
        try:
            snapshot = parse(page, t=t, metric_prefix=self.target.metric_prefix)
            if t - self._measured_until > self._shortest_window:
                # A window that spans a long outage would be an average over nothing.
                self._meter.begin_anew()
            self._compare(self._meter.add(snapshot), unix_time)
            self._forget_version()
        except Exception as error:  # noqa: BLE001 - what is not typed yet becomes so
            return self._typed(error)
        return None

    def _compare(self, drafted: Collection[Drafted], unix_time: float) -> None:
        """Show the drift watch what was drafted; of an unknown version it would learn the wrong."""
        self._watch.keep({one.model_name for one in drafted})
        if self.engine_version is None:
            return
        for model_name, k, interval in drafted:
            fingerprint = Fingerprint(model_name, k, self.engine_version, self.target.revision)
            self._watch.add(unix_time, fingerprint, interval)

    def learn_version(self, version: str | None) -> None:
        """What the server said its version is; None that it could not be asked.

        One that answers with its metrics and not with this is taken to have none.
        """
        self._version_failures = 0 if version is not None else self._version_failures + 1
        if version is None and self._version_failures >= MOST_VERSION_FAILURES:
            version = ""
        self.engine_version = version

    def _forget_version(self) -> None:
        """A server that has started anew may be of another version, and is asked again."""
        if self._meter.restarts != self._restarts:
            self._restarts = self._meter.restarts
            self._started = None
            self.engine_version = None

    def _record(self, error: ScrapeError | None) -> None:
        if error is not None:
            self._failures[error.reason] += 1
        self._log_change(error)
        self._status = replace(
            self._status,
            up=error is None,
            failures=tuple(sorted(self._failures.items())),
            last_error=None if error is None else error.detail,
        )

    def _typed(self, error: Exception) -> ScrapeError:
        if isinstance(error, ScrapeError):
            return error
        # A page that breaks us is our mistake, yet it must not end the other targets' watch.
        if self._state != Reason.INTERNAL:
            log.error("internal error", target=self.target.name, exc_info=error)
        return ScrapeError(Reason.INTERNAL, f"{type(error).__name__}; please report the log")

    def _log_change(self, error: ScrapeError | None) -> None:
        state = "up" if error is None else str(error.reason)
        if state == self._state:
            return
        self._state = state
        if error is None:
            log.info("target up", target=self.target.name, url=self.target.shown_url)
        else:
            log.warning(
                "scrape failed",
                target=self.target.name,
                url=self.target.shown_url,
                reason=str(error.reason),
                detail=error.detail,
            )


def _drift_watch(target: Target, settings: Settings) -> DriftWatch:
    return DriftWatch(
        settings.variance_inflation,
        settings.rules.drafter_drift.false_alarms_per_month,
        configure(target, settings.variance_inflation),
    )


class Loop:
    """All targets, one task each, and one task that judges them.

    Args:
        settings: what to watch and how.
        store: where the state is that outlives the process; in memory unless given.
        clock: gives seconds that never go back.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._store = store or Store(None)
        self._saved: dict[str, Any] = {}
        self._saved_at = -math.inf
        self._saving = threading.Lock()
        self._store_broken = False
        self._learned_at = time.time()
        self._refused_peers: set[str] = set()
        self._leaving: list[Tuner] = []
        self._monitors = {t.name: self._monitor(t, settings) for t in settings.targets}
        self._tuners = {
            t.name: self._tuner(t, settings) for t in settings.targets if t.role != "baseline"
        }
        self._changed = asyncio.Event()
        self.pulse = Pulse()
        self._seen: Seen | None = None

    def _tuner(self, target: Target, settings: Settings, old: Tuner | None = None) -> Tuner:
        tuner = old or Tuner(target, settings.tuner, self._store)
        tuner.reconfigure(target, settings.tuner)
        if (learned := sweep(target)) is not None:
            tuner.teach(learned)
        return tuner

    def _monitor(self, target: Target, settings: Settings) -> Monitor:
        """A new monitor, with what an earlier process knew of the target."""
        monitor = Monitor(target, settings)
        try:
            saved = self._store.get("targets", target.name)
            last = self._store.get("judged", "all")
            learned = self._store.get("learned", target.name)
            if saved is not None and last is not None:
                monitor.restore(saved, learned, pause=max(0.0, time.time() - float(last)))
        except (StoreError, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("saved state not used", target=target.name, problem=str(error))
        return monitor

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    def statuses(self) -> tuple[TargetStatus, ...]:
        """What the last cycle found, in the order of the settings."""
        return tuple(self._status(name) for name in self._monitors)

    def seen(self) -> Seen:
        """All targets and their last hour as of the last pulse; before the first, as of now."""
        return self._seen or self._look()

    def _look(self) -> Seen:
        return Seen(
            time.time(),
            tuple(
                Watched(self._status(name), monitor.history.moments())
                for name, monitor in self._monitors.items()
            ),
        )

    def publish(self) -> None:
        """Keep what is known now for people to look at, and wake those who do."""
        try:
            self._seen = self._look()
        except Exception as error:
            log.error("cannot show", exc_info=error)
        self.pulse.beat()

    def _status(self, name: str) -> TargetStatus:
        status, tuner = self._monitors[name].status, self._tuners.get(name)
        return status if tuner is None else tuner.shown_in(status)

    def reload(self, settings: Settings) -> None:
        """Put new settings in force; a target that stays as it was keeps what it has counted.

        Raises:
            ConfigError: a reference that they name cannot be used; the old ones stay in force.
        """
        check(settings)
        monitors = {}
        for target in settings.targets:
            monitor = self._monitors.get(target.name)
            if monitor is None or not monitor.target.same_series(target):
                monitor = self._monitor(target, settings)
            monitor.reconfigure(target, settings)
            monitors[target.name] = monitor
        self._settings, self._monitors = settings, monitors
        self._retune(settings)
        self.publish()
        self._changed.set()

    def _retune(self, settings: Settings) -> None:
        old, self._tuners = self._tuners, {}
        for target in settings.targets:
            # A baseline has no k to be chosen.
            if target.role != "baseline":
                tuner = self._tuner(target, settings, old.pop(target.name, None))
                self._tuners[target.name] = tuner
        self._leaving += old.values()

    def tuner(self, target: str) -> Tuner | None:
        """The tuner of a target."""
        return self._tuners.get(target)

    @property
    def tuners(self) -> Mapping[str, Tuner]:
        """All tuners, by target."""
        return self._tuners

    def acknowledge_drift(self, target: str, model_name: str) -> bool:
        """End a drift incident; False where there is none."""
        monitor = self._monitors.get(target)
        return monitor is not None and monitor.acknowledge_drift(model_name)

    def relearn_reference(self, target: str, model_name: str) -> bool:
        """Begin a reference anew; False where nothing is watched."""
        monitor = self._monitors.get(target)
        return monitor is not None and monitor.relearn_reference(model_name)

    async def run(self) -> None:
        """Scrape and judge until cancelled; then write down what the next process goes on from."""
        try:
            for tuner in self._tuners.values():
                await tuner.resume_change()
            await self._run()
        finally:
            for tuner in (*self._tuners.values(), *self._leaving):
                await tuner.stop()
            self._save(self._documents(), self._learned(), self._tuned(), time.time())

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            settings = self._settings
            tls = any(t.url.startswith("https") for t in settings.targets)
            async with new_client(tls=tls) as client, asyncio.TaskGroup() as tasks:
                # The targets' ticks are spread over one second, so that many do not come at once.
                delays = [i / len(self._monitors) for i in range(len(self._monitors))]
                running = [
                    tasks.create_task(self._watch(monitor, settings, client, delay))
                    for monitor, delay in zip(self._monitors.values(), delays, strict=True)
                ]
                running.append(tasks.create_task(self._judge(settings)))
                await self._changed.wait()
                for task in running:
                    task.cancel()

    async def _judge(self, settings: Settings) -> None:
        while True:
            await asyncio.sleep(settings.rules.evaluation_interval)
            now = time.time()
            self.judge(now)
            self.tune(now)
            self.publish()
            # A slow disk must not hold up the scrapes.
            due = now >= self._learned_at + LEARNED_SECONDS
            self._learned_at = now if due else self._learned_at
            learned = self._learned() if due else {}
            await asyncio.to_thread(self._save, self._documents(), learned, self._tuned(), now)

    def tune(self, unix_time: float) -> None:
        """Decide about k on every target, and begin what may be begun."""
        for name, tuner in self._tuners.items():
            monitor = self._monitors[name]
            try:
                evidence = monitor.evidence(unix_time)
                tuner.evaluate(evidence, unix_time, monitor.baseline_curves())
            except Exception as error:
                log.error("cannot decide", target=name, exc_info=error)

    def _peers(self, unix_time: float) -> dict[str, Baseline]:
        peers: dict[str, Baseline] = {}
        for name, monitor in self._monitors.items():
            if monitor.target.role != "baseline":
                continue
            try:
                peers |= monitor.as_peer(unix_time)
                self._refused_peers.discard(name)
            except BaselineError as error:
                if name not in self._refused_peers:
                    log.warning("no baseline", target=name, problem=str(error))
                self._refused_peers.add(name)
        return peers

    def _tuned(self) -> dict[str, Any]:
        return {name: tuner.saved() for name, tuner in self._tuners.items()}

    def _documents(self) -> dict[str, Any]:
        return {name: monitor.saved() for name, monitor in self._monitors.items()}

    def _learned(self) -> dict[str, Any]:
        return {name: monitor.learned() for name, monitor in self._monitors.items()}

    def judge(self, unix_time: float) -> None:
        """Learn baselines, share those of peers, and evaluate the rules on every target."""
        peers = self._peers(unix_time)
        for monitor in self._monitors.values():
            try:
                if monitor.target.role != "baseline":
                    monitor.baselines.peers = peers
                    monitor.learn(unix_time)
                tuner = self._tuners.get(monitor.target.name)
                monitor.judge(unix_time, () if tuner is None else tuner.statuses())
            except Exception as error:
                log.error("cannot judge", target=monitor.target.name, exc_info=error)

    def _save(
        self,
        documents: dict[str, Any],
        learned: dict[str, Any],
        tuned: dict[str, Any],
        unix_time: float,
    ) -> None:
        """Write what has changed since the last time; trouble is logged once, never raised."""
        # At the end the thread of the last evaluation may still be at it, or not have begun.
        with self._saving:
            if unix_time >= self._saved_at:
                self._saved_at = unix_time
                self._write(documents, learned, tuned, unix_time)

    def _write(
        self,
        documents: dict[str, Any],
        learned: dict[str, Any],
        tuned: dict[str, Any],
        unix_time: float,
    ) -> None:
        changed = {name: d for name, d in documents.items() if self._saved.get(name) != d}
        try:
            self._store.put("targets", changed)
            self._store.put("learned", learned)
            self._store.put("tuner", tuned)
            self._store.put("judged", {"all": unix_time})
        except StoreError as error:
            if not self._store_broken:
                log.error("state not saved", problem=str(error))
            self._store_broken = True
            return
        self._store_broken = False
        self._saved = documents

    async def _ask_version(self, monitor: Monitor, settings: Settings) -> None:
        url, timeout = monitor.target.url, settings.scrape_timeout
        try:
            # On a connection of its own: the scrapes' must not depend on how this one ends.
            async with new_client(tls=url.startswith("https")) as client:
                monitor.learn_version(await fetch_version(client, url, timeout))
        except ScrapeError:
            monitor.learn_version(None)

    async def _watch(
        self, monitor: Monitor, settings: Settings, client: httpx.AsyncBaseTransport, delay: float
    ) -> None:
        await asyncio.sleep(delay)
        due = self._clock()
        while True:
            t, unix_time = self._clock(), time.time()
            result: bytes | Exception
            try:
                result = await fetch(
                    client,
                    monitor.target.url,
                    timeout=settings.scrape_timeout,
                    max_page_bytes=settings.max_page_bytes,
                )
            except Exception as error:  # noqa: BLE001 - the monitor counts and logs it
                result = error
            now = self._clock()
            monitor.observe(result, t=t, duration=now - t, unix_time=unix_time)
            if monitor.engine_version is None and monitor.status.up:
                await self._ask_version(monitor, settings)
            # Ticks that a slow target missed are left out, not caught up.
            due += settings.interval * max(1, math.ceil((now - due) / settings.interval))
            await asyncio.sleep(due - self._clock())
