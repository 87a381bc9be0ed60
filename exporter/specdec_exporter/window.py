"""A bounded history of scrapes, and the increases over windows of it.

Each accepted snapshot is normalised at once: what an engine counted since the previous scrape is
added to running totals that never fall, whatever the server's own counters do. A window is then the
difference of two points. This module reads no clock: time comes with the snapshots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from specdec_exporter.model import (
    CIRCUMSTANCES,
    SCALARS,
    Counters,
    EngineSample,
    EngineTotals,
    Point,
    Reason,
    ScrapeError,
    Snapshot,
    Window,
)

DENSE_SECONDS = 300.0
"""Every scrape is kept for this long; before that, one a minute."""
THIN_SECONDS = 60.0
RETIRE_SECONDS = 3600.0
"""An engine that has been gone for so long is a new one if it comes back."""
SAME_START_SECONDS = 0.5
"""Start times this close are of one process; some exporters compute it anew each time."""
EDGE_TOLERANCE_SECONDS = 1e-3
"""A scrape this little after a window's edge counts as being on it: clocks are not exact."""


def increase(before: Counters, after: Counters, *, reset: bool) -> Counters:
    """What was counted between two scrapes of one engine; never negative.

    After a reset the counters began again at 0, so all that they show is new. A family that was not
    there before counts from its first sight on, except after a reset. One that is gone is absent.
    """
    if reset:
        return after
    k = len(after.accepted_per_position)
    base = before.accepted_per_position[:k]
    base += after.accepted_per_position[len(base) :]
    known = {
        name: getattr(after, name) if getattr(before, name) is None else getattr(before, name)
        for name in SCALARS
    }
    return after - Counters(**known, accepted_per_position=base)


def is_reset(before: Counters, after: Counters) -> bool:
    """Whether any counter went down: then the engine began anew, and all its counters did."""
    pairs = [(getattr(before, name), getattr(after, name)) for name in SCALARS]
    pairs += zip(before.accepted_per_position, after.accepted_per_position, strict=False)
    return any(a is not None and b is not None and b < a for a, b in pairs)


_NEEDED = tuple(name for name in SCALARS if name not in CIRCUMSTANCES)


def _shape(counters: Counters) -> tuple[bool | int, ...]:
    present = (getattr(counters, name) is not None for name in _NEEDED)
    return (*present, len(counters.accepted_per_position))


def _lost(before: Counters, after: Counters) -> bool:
    return any(b < a for a, b in zip(_shape(before), _shape(after), strict=True))


@dataclass(slots=True)
class _Engine:
    """One engine's totals and points; the points have one k and one set of families."""

    sample: EngineSample
    totals: Counters
    last_seen: float = 0.0
    restarts: int = 0
    decode_tokens: float = 0.0
    dense: deque[Point] = field(default_factory=deque)
    thin: deque[Point] = field(default_factory=deque)

    def add(self, t: float, sample: EngineSample, *, reset: bool, max_age: float) -> None:
        before, after = self.sample.counters, sample.counters
        step = increase(before, after, reset=reset)
        self.totals = _accumulate(self.totals, step)
        self.restarts += reset
        self.count_decode_tokens()
        if _shape(before) != _shape(after):
            self.forget_points()
        self.sample = sample
        self.append(t, max_age)

    def append(self, t: float, max_age: float) -> None:
        self.last_seen = t
        counters = self.sample.counters
        shown = {
            n: None if getattr(counters, n) is None else getattr(self.totals, n) for n in SCALARS
        }
        k = len(counters.accepted_per_position)
        positions = self.totals.accepted_per_position[:k]
        self.dense.append(Point(t, Counters(**shown, accepted_per_position=positions)))
        while len(self.dense) > 1 and self.dense[1].t <= t - DENSE_SECONDS:
            old = self.dense.popleft()
            if not self.thin or old.t - self.thin[-1].t >= THIN_SECONDS:
                self.thin.append(old)
        while len(self.thin) > 1 and self.thin[1].t <= t - max_age:
            self.thin.popleft()

    def count_decode_tokens(self) -> None:
        generated, first = self.totals.generation_tokens, self.totals.first_tokens
        if generated is not None and first is not None:
            # A request that fails between its first tokens adds to one and not to the other;
            # a counter that is served must not fall.
            self.decode_tokens = max(self.decode_tokens, generated - first)

    def forget_points(self) -> None:
        self.dense.clear()
        self.thin.clear()

    def served(self, model_name: str, engine: str) -> EngineTotals:
        return EngineTotals(model_name, engine, self.totals, self.decode_tokens, self.restarts)

    def track(self, seconds: float) -> tuple[Point, ...]:
        edge = self.dense[-1].t - seconds + EDGE_TOLERANCE_SECONDS
        points = []
        for point in chain(reversed(self.dense), reversed(self.thin)):
            points.append(point)
            if point.t <= edge:
                break
        return tuple(reversed(points))


def _merge(a: EngineTotals | None, b: EngineTotals) -> EngineTotals:
    """Two of one model and engine as one."""
    if a is None:
        return b
    return replace(
        b,
        counters=_accumulate(a.counters, b.counters),
        decode_tokens=a.decode_tokens + b.decode_tokens,
        restarts=a.restarts + b.restarts,
    )


def _accumulate(totals: Counters, step: Counters) -> Counters:
    """Add a step, keeping the totals of families that the step lacks."""
    filled = {
        name: getattr(totals, name) or 0.0
        for name in SCALARS
        if getattr(totals, name) is not None or getattr(step, name) is not None
    }
    added = {name: value + (getattr(step, name) or 0.0) for name, value in filled.items()}
    positions = (
        Counters(accepted_per_position=totals.accepted_per_position) + step
    ).accepted_per_position
    return Counters(**added, accepted_per_position=positions)


_Identity = tuple[str, str, tuple[tuple[str, str], ...]]


def _identity(sample: EngineSample) -> _Identity:
    return sample.model_name, sample.engine, sample.extra_labels


class History:
    """The scrapes of one target, as far back as its longest window.

    Args:
        max_age: seconds that the longest window spans; may be changed at any time.
    """

    def __init__(self, max_age: float = DENSE_SECONDS) -> None:
        self.max_age = max_age
        self.restarts = 0
        """Of engines, ever seen."""
        self._retired: dict[tuple[str, str], EngineTotals] = {}
        self._engines: dict[_Identity, _Engine] = {}
        self._current: tuple[_Identity, ...] = ()
        self._last_t: float | None = None
        self._process_start: float | None = None
        self._earlier_starts: deque[float] = deque(maxlen=16)
        self._doubted: tuple[ScrapeError, float] | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Take in one snapshot.

        One that contradicts the last (an earlier time, another process, or series gone without a
        restart) is refused once, since it is most often a bad page; a second in a row that says the
        same is the new truth.

        Raises:
            ScrapeError: the snapshot was refused; nothing was changed.
        """
        restarted = self._restarted(snapshot)
        resets = {
            identity: restarted or is_reset(known.sample.counters, sample.counters)
            for sample in snapshot.engines
            if (known := self._engines.get(identity := _identity(sample))) is not None
        }
        problem = self._contradiction(snapshot, restarted or any(resets.values()))
        if problem is not None and not self._said_before(problem, snapshot.t):
            self._doubted = problem, snapshot.t
            raise problem
        self._doubted = None
        if problem is not None and problem.reason is Reason.CLOCK:
            self.forget_points()
        if problem is not None and problem.reason is Reason.OTHER_PROCESS:
            self._change_process(snapshot)
            resets = dict.fromkeys(resets, False)
        self.restarts += sum(resets.values())
        self._last_t = snapshot.t
        self._remember_start(snapshot.process_start_time, reset=any(resets.values()))
        self._current = tuple(_identity(sample) for sample in snapshot.engines)
        for sample in snapshot.engines:
            identity = _identity(sample)
            known = self._engines.get(identity)
            if known is None:
                # What a process that has just started shows is new; of others the past is unknown.
                totals = increase(sample.counters, sample.counters, reset=restarted)
                known = self._engines[identity] = _Engine(sample, totals)
                known.count_decode_tokens()
                known.append(snapshot.t, self.max_age)
            else:
                known.add(snapshot.t, sample, reset=resets[identity], max_age=self.max_age)
        self._retire(snapshot.t)

    def forget_points(self) -> None:
        """Begin all windows anew, as after a time without scrapes; totals stay."""
        for engine in self._engines.values():
            engine.forget_points()

    def _restarted(self, snapshot: Snapshot) -> bool:
        """Whether the process is one that has started since; an earlier one is another server."""
        old, new = self._process_start, snapshot.process_start_time
        return (
            old is not None
            and new is not None
            and new > old + SAME_START_SECONDS
            and not self._seen_start(new)
        )

    def _seen_start(self, start: float) -> bool:
        return any(abs(start - seen) <= SAME_START_SECONDS for seen in self._earlier_starts)

    def _remember_start(self, start: float | None, *, reset: bool) -> None:
        if start is None:
            # A restart whose start time was not shown must not be counted when it is.
            self._process_start = None if reset else self._process_start
        else:
            self._process_start = start
            if not self._seen_start(start):
                self._earlier_starts.append(start)

    def _change_process(self, snapshot: Snapshot) -> None:
        """Go on with another server's counters, of which nothing is known to be new."""
        self.forget_points()
        for sample in snapshot.engines:
            if (known := self._engines.get(_identity(sample))) is not None:
                known.sample = sample

    def _said_before(self, problem: ScrapeError, t: float) -> bool:
        if self._doubted is None:
            return False
        before, then = self._doubted
        same = before.reason is problem.reason and (
            problem.reason is Reason.CLOCK or before.detail == problem.detail
        )
        return same and t > then

    def _contradiction(self, snapshot: Snapshot, restarted: bool) -> ScrapeError | None:
        if self._last_t is not None and snapshot.t <= self._last_t:
            return ScrapeError(
                Reason.CLOCK,
                f"time went from {self._last_t:.3f} to {snapshot.t:.3f}; is the clock being set?",
            )
        old, new = self._process_start, snapshot.process_start_time
        changed = old is not None and new is not None and abs(new - old) > SAME_START_SECONDS
        if changed and not self._restarted(snapshot):
            return ScrapeError(
                Reason.OTHER_PROCESS,
                f"a process of another start time ({new:.0f}) answered, as behind a load balancer; "
                "make each server a target of its own",
            )
        if restarted:
            return None
        samples = {_identity(sample): sample for sample in snapshot.engines}
        for identity in self._current:
            name = f"engine {identity[1]!r} of model {identity[0]!r}"
            if identity not in samples:
                return ScrapeError(Reason.MISSING_SERIES, f"{name} is gone from the page")
            if _lost(self._engines[identity].sample.counters, samples[identity].counters):
                return ScrapeError(
                    Reason.MISSING_SERIES, f"{name} lost series that it had, without a restart"
                )
        return None

    def _retire(self, t: float) -> None:
        """Keep of engines that are long gone their counters only.

        Replicas behind a proxy come and go under ever new labels.
        """
        current = set(self._current)
        for identity, state in list(self._engines.items()):
            if identity not in current and t - state.last_seen > RETIRE_SECONDS:
                key = identity[:2]
                self._retired[key] = _merge(self._retired.get(key), state.served(*key))
                del self._engines[identity]

    def totals(self) -> tuple[EngineTotals, ...]:
        """Totals since the first snapshot, by model and engine, for every engine ever seen."""
        merged = dict(self._retired)
        for identity, state in self._engines.items():
            key = identity[:2]
            merged[key] = _merge(merged.get(key), state.served(*key))
        return tuple(merged[key] for key in sorted(merged))

    def last_interval(self) -> tuple[Window, ...]:
        """The windows from the last scrape but one to the last, one for each engine."""
        return self._windows(0.0, lambda e: (*islice(reversed(e.dense), 2),)[::-1])

    def windows(self, seconds: float) -> tuple[Window, ...]:
        """The windows that end at the last snapshot, one for each of its engines.

        Each starts at the last scrape at or before its edge; with less history, or after a change
        of k, it is shorter and says so in `covered_seconds`.
        """
        return self._windows(seconds, lambda engine: engine.track(seconds))

    def _windows(
        self, seconds: float, track: Callable[[_Engine], tuple[Point, ...]]
    ) -> tuple[Window, ...]:
        merged: dict[tuple[str, str], Window] = {}
        for identity in self._current:
            state = self._engines[identity]
            if not state.dense:
                continue
            key = identity[:2]
            window = Window(
                model_name=key[0],
                engine=key[1],
                seconds=seconds,
                tracks=(track(state),),
            )
            merged[key] = window if key not in merged else combine((merged[key], window), key[1])
        return tuple(merged.values())


def combine(windows: tuple[Window, ...], engine: str = "all") -> Window:
    """Several engines of one model as one: their increases add up, their ratios do not."""
    return replace(
        windows[0], engine=engine, tracks=tuple(track for w in windows for track in w.tracks)
    )
