"""Makes a baseline: drives a server without speculation, or reads recorded scrapes of one.

What the server's own counters say becomes the curve, as it does in `baseline`; the clients here
only keep it busy, and measure nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urljoin

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specdec_exporter.baseline import Baseline, BaselineError, learn, speculates
from specdec_exporter.model import Point, ScrapeError, Snapshot
from specdec_exporter.parse import parse
from specdec_exporter.replay import Rejected, read_recording
from specdec_exporter.scrape import fetch, fetch_version, new_client
from specdec_exporter.window import History

INTERVAL_SECONDS = 1.0
LEAST_INTERVALS = 10
"""Of a phase; a short one is scraped more often."""
WARM_UP_SHARE = 0.25
"""Of a phase's length, before it and not counted; or until each client has had an answer."""
TIMEOUT_SECONDS = 10.0
MAX_PAGE_BYTES = 16 * 1024 * 1024
_WORDS = (
    "again amber answer autumn basket bridge candle circle copper corner cotton danger drawer "
    "engine family figure finger garden glass hammer harbor island kettle ladder letter market "
    "meadow mirror model morning number orange paper pencil people pocket question rabbit river "
    "school seven shadow silver simple spring station stone summer table thread ticket travel "
    "valley window winter"
)


class CalibrationError(Exception):
    """No baseline was made; the message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask of a server."""

    metrics_url: str
    concurrency: tuple[int, ...]
    seconds: float
    """At each concurrency, without warm-up and drain."""
    model_name: str = ""
    """Empty where the server has one model only."""
    prompts: tuple[str, ...] = ()
    """Empty: made up here, each different from its first word on."""
    max_tokens: int = 256
    """Mean length of an answer; they vary by half, or all would begin and end together."""
    metric_prefix: str = ""


@dataclass(slots=True)
class _Track:
    name: str
    points: list[Point] = field(default_factory=list)


class _Collector:
    """Snapshots of one server to tracks, every scrape kept."""

    def __init__(self, name: str) -> None:
        self.tracks: list[_Track] = []
        self.models: set[str] = set()
        self._name = name
        self._history = History()
        self._open: dict[tuple[str, int], _Track] = {}

    def add(self, snapshot: Snapshot) -> None:
        self._history.add(snapshot)
        for window in self._history.last_interval():
            self.models.add(window.model_name)
            for number, ends in enumerate(window.tracks):
                track = self._open.get((window.engine, number))
                # What does not go on from the last scrape begins anew, as after a change of k.
                if track is None or ends[0] != track.points[-1]:
                    track = self._open[window.engine, number] = _Track(self._name)
                    self.tracks.append(track)
                track.points.append(ends[-1])


def from_recordings(paths: Iterable[tuple[Path, str]]) -> tuple[Baseline, tuple[str, ...]]:
    """A baseline of recorded scrapes of one model, and in words what was left out.

    Args:
        paths: recordings, as `replay` takes them, each with its metric prefix.

    Raises:
        CalibrationError: there is no steady load in them, or it is not one model's.
        RecordingError: a path is no recording.
    """
    collectors, left_out, taken_at = [], [], 0.0
    for path, prefix in paths:
        collector = _Collector(str(path))
        collectors.append(collector)
        for recorded in read_recording(path):
            if isinstance(recorded, Rejected):
                left_out.append(str(recorded))
                continue
            taken_at = max(taken_at, recorded.t)
            try:
                collector.add(
                    parse(
                        recorded.page,
                        t=recorded.t,
                        metric_prefix=prefix,
                        excerpt=recorded.excerpt,
                    )
                )
            except ScrapeError as error:
                left_out.append(f"{recorded.place}: {error}")
    models = sorted(set().union(*(collector.models for collector in collectors)))
    if len(models) != 1:
        shown = ", ".join(models) or "none"
        raise CalibrationError(f"the recordings must be of one model, and they are of {shown}")
    tracks = [track for collector in collectors for track in collector.tracks]
    baseline, words = _learn(tracks, models[0], "", taken_at)
    return baseline, (*left_out, *words)


def _learn(
    tracks: Sequence[_Track], model_name: str, engine_version: str, taken_at: float
) -> tuple[Baseline, tuple[str, ...]]:
    try:
        baseline, left_out = learn(
            [track.points for track in tracks],
            source="measured",
            model_name=model_name,
            engine_version=engine_version,
            taken_at=taken_at,
        )
    except BaselineError as error:
        raise CalibrationError(str(error)) from error
    words = tuple(f"{tracks[number].name}: {text}" for number, text in left_out)
    if baseline is None:
        raise CalibrationError("; ".join((*words, "no steady load: nothing to make a curve of")))
    return baseline, words


async def measure(plan: Plan) -> tuple[Baseline, tuple[str, ...]]:
    """Drive a server at each concurrency; a baseline, and in words what was left out.

    Clients in a closed loop stream completions: each asks again as soon as it has an answer.

    Raises:
        CalibrationError: the server speculates, fails, or cannot be reached.
    """
    tls = plan.metrics_url.startswith("https")
    try:
        async with new_client(tls=tls) as client:
            first = await _scrape(client, plan)
            plan = replace(plan, model_name=_one_model(first, plan.model_name))
            version = await fetch_version(client, plan.metrics_url, TIMEOUT_SECONDS)
            tracks = []
            with _progress() as bar:
                task = bar.add_task("", total=len(plan.concurrency) * plan.seconds)
                for concurrency in plan.concurrency:
                    collector = _Collector(f"concurrency {concurrency}")

                    async def scrape(collector: _Collector = collector) -> None:
                        snapshot = await _scrape(client, plan)
                        engines = (e for e in snapshot.engines if e.model_name == plan.model_name)
                        collector.add(replace(snapshot, engines=tuple(engines)))

                    def show(
                        what: str, seconds: float = 0.0, concurrency: int = concurrency
                    ) -> None:
                        bar.update(task, description=f"{concurrency} at a time: {what}")
                        bar.advance(task, seconds)

                    await _phase(plan, concurrency, scrape, show)
                    tracks += collector.tracks
    except ScrapeError as error:
        raise CalibrationError(str(error)) from error
    return _learn(tracks, plan.model_name, version, time.time())


async def _scrape(client: httpx.AsyncBaseTransport, plan: Plan) -> Snapshot:
    page = await fetch(
        client, plan.metrics_url, timeout=TIMEOUT_SECONDS, max_page_bytes=MAX_PAGE_BYTES
    )
    return parse(page, t=time.time(), metric_prefix=plan.metric_prefix)


def _one_model(snapshot: Snapshot, wanted: str) -> str:
    models = sorted({sample.model_name for sample in snapshot.engines})
    if not wanted and len(models) > 1:
        raise CalibrationError(f"the server has several models: give --model, {', '.join(models)}")
    model = wanted or models[0]
    if model not in models:
        raise CalibrationError(f"the server has no model {model!r}; there is {', '.join(models)}")
    for sample in snapshot.engines:
        if sample.model_name == model and speculates(sample.counters):
            raise CalibrationError(
                f"the server speculates (k = {sample.num_speculative_tokens}), and a baseline is "
                "without: start it without --speculative-config"
            )
    return model


async def _phase(
    plan: Plan,
    concurrency: int,
    scrape: Callable[[], Awaitable[None]],
    show: Callable[..., None],
) -> None:
    """Load the server; scrape it once it is warm, and until the load is let out."""
    load = _Load(plan, concurrency)
    https = plan.metrics_url.startswith("https")
    unlimited = httpx.Timeout(None, connect=TIMEOUT_SECONDS)
    connections = httpx.Limits(max_connections=None)
    try:
        async with (
            httpx.AsyncClient(
                verify=https, trust_env=False, timeout=unlimited, limits=connections
            ) as client,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(concurrency):
                clients.create_task(load.run(client))
            show("warming up")
            await asyncio.gather(load.warm.wait(), asyncio.sleep(WARM_UP_SHARE * plan.seconds))
            interval = min(INTERVAL_SECONDS, plan.seconds / LEAST_INTERVALS)
            begin = time.monotonic()
            await scrape()
            for number in range(1, round(plan.seconds / interval) + 1):
                await asyncio.sleep(max(0.0, begin + number * interval - time.monotonic()))
                await scrape()
                show("measuring", interval)
            show("letting it drain")
            load.ending = True
    except* (CalibrationError, ScrapeError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise CalibrationError(f"at concurrency {concurrency}: {first}") from first


class _Load:
    """Clients that keep asking until they are told to end."""

    def __init__(self, plan: Plan, concurrency: int) -> None:
        self.ending = False
        self.warm = asyncio.Event()
        """As many answers as clients are there."""
        self._missing = concurrency
        self._plan = plan
        self._url = urljoin(plan.metrics_url, "v1/completions")
        self._chance = random.Random()
        self._prompts = self._all_prompts()

    async def run(self, client: httpx.AsyncClient) -> None:
        while not self.ending:
            await self._ask(client)
            self._missing -= 1
            if self._missing == 0:
                self.warm.set()

    async def _ask(self, client: httpx.AsyncClient) -> None:
        spread = self._plan.max_tokens // 2
        body = {
            "model": self._plan.model_name,
            "prompt": next(self._prompts),
            "max_tokens": self._chance.randint(
                self._plan.max_tokens - spread, self._plan.max_tokens + spread
            ),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with client.stream("POST", self._url, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    said = (await response.aread())[:200].decode(errors="replace")
                    raise CalibrationError(
                        f"the server answered a completion with {response.status_code}: "
                        f"{' '.join(said.split())}"
                    )
                async for _ in response.aiter_raw():
                    pass
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise CalibrationError(f"a completion failed ({error!r:.120})") from error

    def _all_prompts(self) -> Iterator[str]:
        words = _WORDS.split()
        while True:
            yield from self._plan.prompts
            if not self._plan.prompts:
                yield " ".join(self._chance.choices(words, k=self._chance.randint(50, 150)))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:32}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def describe(baseline: Baseline) -> Iterator[str]:
    """What a baseline says, in lines for a person."""
    version = f", version {baseline.engine_version}" if baseline.engine_version else ""
    yield f"{baseline.model_name}{version}, without speculation:"
    for point in baseline.points:
        yield (
            f"  {point.decode_concurrency:6.1f} in decode  {1000 * point.tpot_seconds:7.2f} ms "
            f"± {1960 * point.tpot_stderr:.2f} a token  ({point.decode_tokens:.0f} tokens)"
        )
    known = baseline.conditions
    for what, value, digits in (
        ("tokens of context", known.context_tokens, 0),
        ("prefill tokens per decoded token", known.prefill_tokens_per_step, 2),
        ("prefix hit ratio", known.prefix_hit_ratio, 2),
    ):
        yield f"  {what}: {'unknown' if value is None else f'{value:.{digits}f}'}"
