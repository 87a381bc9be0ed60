"""The simulated server in virtual time: engines, the script, restarts, and what can be seen of it.

It must not know HTTP or a clock: time is the argument of `advance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, zip_longest
from random import Random

from specdec_exporter.model import Counters, EngineSample, Reason, ScrapeError, Snapshot
from specdec_exporter.simulator.acceptance import AcceptanceLaw, acceptance_law, solve_spread
from specdec_exporter.simulator.engine import Engine
from specdec_exporter.simulator.page import render
from specdec_exporter.simulator.scenario import Change, Restart, Scenario, extended_rates

EPOCH = 1_767_225_600.0
"""Unix time of virtual time 0 unless told otherwise, so that equal seeds give equal pages."""

_RAMP_STEPS = 60
_WANDER_TICK = 60.0


@dataclass(frozen=True, slots=True)
class Truth:
    """What nobody can scrape, summed since the start of the simulation, over engines and restarts.

    Subtract an earlier one for a window.
    """

    t: float
    drafts: float = 0.0
    expected_accepted: tuple[float, ...] = ()
    """Sum over drafts of each position's mean acceptance when the request's drafts were drawn."""
    decode_steps: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: float = 0.0
    """Delivered tokens without first tokens."""
    baseline_decode_seconds: float = 0.0
    """Decode seconds of the same tokens without speculation at the same concurrency, with the same
    prefill running inside the steps. A request's tokens are spread evenly over its steps between
    two looks, so the gain depends on them, by some 1e-5."""

    def __sub__(self, earlier: Truth) -> Truth:
        """The sums of the span between two truths; t stays the later one."""
        return Truth(
            t=self.t,
            drafts=self.drafts - earlier.drafts,
            expected_accepted=tuple(
                a - b
                for a, b in zip_longest(
                    self.expected_accepted, earlier.expected_accepted, fillvalue=0.0
                )
            ),
            decode_steps=self.decode_steps - earlier.decode_steps,
            decode_seconds=self.decode_seconds - earlier.decode_seconds,
            decode_tokens=self.decode_tokens - earlier.decode_tokens,
            baseline_decode_seconds=self.baseline_decode_seconds - earlier.baseline_decode_seconds,
        )

    @property
    def positions(self) -> tuple[float, ...]:
        """Mean acceptance of each position over the drafts.

        Raises:
            ZeroDivisionError: no drafts.
        """
        return tuple(a / self.drafts for a in self.expected_accepted)

    @property
    def tpot_seconds(self) -> float:
        """Seconds per delivered token.

        Raises:
            ZeroDivisionError: no tokens.
        """
        return self.decode_seconds / self.decode_tokens

    @property
    def baseline_tpot_seconds(self) -> float:
        """Seconds per delivered token without speculation, at the same concurrency.

        Raises:
            ZeroDivisionError: no tokens.
        """
        return self.baseline_decode_seconds / self.decode_tokens

    @property
    def gain(self) -> float:
        """Net TPOT gain at equal concurrency, 1 − TPOT / baseline.

        Raises:
            ZeroDivisionError: no tokens.
        """
        return 1.0 - self.decode_seconds / self.baseline_decode_seconds


class Simulator:
    """A server that lives through a scenario in virtual time.

    The same scenario and seed give the same counters, whatever the steps of `advance`. Arrivals and
    lengths do not depend on k: a copy of the scenario with another k serves the same requests.

    Args:
        scenario: what to simulate.
        seed: of all its randomness.
        epoch: unix time, seconds, of virtual time 0.
    """

    def __init__(self, scenario: Scenario, seed: int = 0, *, epoch: float = EPOCH) -> None:
        self.scenario = scenario
        self.now = 0.0
        """Seconds since the start of the simulation."""
        self.k = scenario.k
        """Speculative tokens of the running server, or of the one about to start."""
        self._epoch = epoch
        self._started = 0.0
        self._engines: list[Engine] = []
        self._ended = Truth(0.0)
        self._random = [
            (Random(f"{seed} traffic {i}"), Random(f"{seed} drafter {i}"))
            for i in range(len(scenario.engine_shares))
        ]
        self._wander_random = Random(f"{seed} wander")
        self._rates = scenario.acceptance.rates
        self._ramp: tuple[float, float, tuple[float, ...]] | None = None
        self._drafting = True
        self._requests_per_second = scenario.traffic.requests_per_second
        self._wander = 0.0
        self._shift = 0.0
        self._serial = count()
        self._timeline: list[tuple[float, int, Callable[[], None]]] = []
        for event in scenario.script:
            self._at(event.at, self._action(event))
        acceptance = scenario.acceptance
        if acceptance.daily_logits or acceptance.wander_logits:
            self._wander = self._wander_random.gauss(0.0, acceptance.wander_logits)
            self._shift = self._current_shift()
            self._at(_WANDER_TICK, self._tick)
        self._start()

    @property
    def up(self) -> bool:
        """Whether the server answers."""
        return bool(self._engines)

    @property
    def next_event(self) -> float:
        """Time of the next scripted event, end of a down time, or step of a ramp; inf if none."""
        return self._timeline[0][0] if self._timeline else math.inf

    @property
    def law(self) -> AcceptanceLaw | None:
        """What requests that start now draw their drafts from; None while there are no drafts."""
        return self._current_law()

    def advance(self, t: float) -> None:
        """Move virtual time to t seconds since the start; an earlier t than `now` does nothing."""
        while self._timeline and self._timeline[0][0] <= t:
            at, _, action = heappop(self._timeline)
            self._run(max(at, self.now))
            action()
        self._run(max(t, self.now))

    def snapshot(self) -> Snapshot:
        """The counters now; `t` is virtual time.

        Raises:
            ScrapeError: reason `connect`, while the server is down.
        """
        self._require_up()
        samples = tuple(self._sample(i, engine) for i, engine in enumerate(self._engines))
        start = self._epoch + self._started if len(samples) == 1 else None
        return Snapshot(self.now, samples, start)

    def page(self) -> bytes:
        """The /metrics page, whose values are those of `snapshot`.

        Raises:
            ScrapeError: reason `connect`, while the server is down.
        """
        self._require_up()
        for engine in self._engines:
            engine.count()
        return render(
            self._engines, self.scenario, self._epoch + self._started, self.now - self._started
        )

    def truth(self) -> Truth:
        """What the server did, as no scrape can tell it."""
        total = replace(self._ended, t=self.now)
        for engine in self._engines:
            engine.count()
            tokens = engine.generation_tokens - engine.first_tokens
            total = Truth(
                t=self.now,
                drafts=total.drafts + engine.drafts,
                expected_accepted=tuple(
                    a + b
                    for a, b in zip_longest(
                        total.expected_accepted, engine.expected_accepted, fillvalue=0.0
                    )
                ),
                decode_steps=total.decode_steps + engine.decode_steps,
                decode_seconds=total.decode_seconds + engine.decode_seconds,
                decode_tokens=total.decode_tokens + tokens,
                baseline_decode_seconds=(
                    total.baseline_decode_seconds + engine.baseline_decode_seconds
                ),
            )
        return total

    def restart(self, down_seconds: float = 10.0, k: int | None = None) -> None:
        """End the server now, as an actuator would; a new one starts later, with k if given.

        While it is down already, the new one starts as planned, with that k.

        Raises:
            ValueError: a negative k.
        """
        if k is not None and k < 0:
            raise ValueError(f"k is at least 0, got {k}")
        if k is not None:
            self.k = k
        if not self.up:
            return
        self._ended = self.truth()
        self._engines = []
        self._at(self.now + down_seconds, self._start)

    def _at(self, t: float, action: Callable[[], None]) -> None:
        heappush(self._timeline, (t, next(self._serial), action))

    def _run(self, t: float) -> None:
        for engine in self._engines:
            engine.run_until(t)
        self.now = t

    def _require_up(self) -> None:
        if not self.up:
            raise ScrapeError(Reason.CONNECT, "the simulated server is down")

    def _start(self) -> None:
        self._started = self.now
        traffic = self.scenario.traffic
        self._engines = [
            Engine(self.scenario, self.k, share, self.now, *random)
            for share, random in zip(self.scenario.engine_shares, self._random, strict=True)
        ]
        for engine in self._engines:
            engine.set_law(self._current_law(), redraw=False)
            engine.set_arrivals(self._requests_per_second, self.now)
        for client in range(traffic.clients):
            self._engines[client % len(self._engines)].add_client()

    def _sample(self, index: int, engine: Engine) -> EngineSample:
        engine.count()
        per_position = tuple(float(a) for a in engine.accepted_per_position)
        speculative = engine.k > 0
        return EngineSample(
            model_name=self.scenario.model_name,
            engine=str(index),
            counters=Counters(
                drafts=float(engine.drafts) if speculative else None,
                draft_tokens=float(engine.drafts * engine.k) if speculative else None,
                accepted_tokens=sum(per_position) if speculative else None,
                accepted_per_position=per_position,
                generation_tokens=float(engine.generation_tokens),
                first_tokens=float(engine.first_tokens),
                decode_seconds=engine.decode_seconds,
                decode_steps=float(engine.decode_steps),
                prompt_tokens=float(engine.prompt_tokens),
                cached_prompt_tokens=float(engine.cached_prompt_tokens),
                engine_steps=float(engine.histograms.iteration_tokens_total.count),
                preemptions=0.0,
                failed_requests=0.0,
            ),
        )

    def _action(self, event: Change | Restart) -> Callable[[], None]:
        return (
            (lambda: self._restart(event))
            if isinstance(event, Restart)
            else (lambda: self._change(event))
        )

    def _restart(self, event: Restart) -> None:
        if event.rates is not None:
            self._rates = event.rates
            self._ramp = None
        self.restart(event.down_seconds, event.k)

    def _change(self, event: Change) -> None:
        if event.requests_per_second is not None:
            self._requests_per_second = event.requests_per_second
            for engine in self._engines:
                engine.set_arrivals(event.requests_per_second, self.now)
        if event.drafting is not None:
            self._drafting = event.drafting
        if event.rates is not None:
            share, start, end = self._ramp_state()
            self._rates = tuple(_between(a, b, share) for a, b in zip(start, end, strict=True))
            self._ramp = (self.now, event.over, event.rates)
            if event.over > 0.0:
                for i in range(1, _RAMP_STEPS + 1):
                    self._at(self.now + event.over * i / _RAMP_STEPS, self._apply_law)
        self._apply_law(redraw=event.over == 0.0)

    def _tick(self) -> None:
        acceptance = self.scenario.acceptance
        keep = math.exp(-_WANDER_TICK / acceptance.wander_seconds)
        self._wander = keep * self._wander + math.sqrt(1.0 - keep * keep) * (
            self._wander_random.gauss(0.0, acceptance.wander_logits)
        )
        self._shift = self._current_shift()
        self._apply_law()
        self._at(self.now + _WANDER_TICK, self._tick)

    def _current_shift(self) -> float:
        phase = 2.0 * math.pi * self.now / self.scenario.day_seconds
        return self.scenario.acceptance.daily_logits * math.sin(phase) + self._wander

    def _apply_law(self, *, redraw: bool = False) -> None:
        law = self._current_law()
        for engine in self._engines:
            engine.set_law(law, redraw=redraw)

    def _current_law(self) -> AcceptanceLaw | None:
        if self.k == 0 or not self._drafting:
            return None
        rates, spread = self._current_rates()
        # Rounded so that a day of wander meets a few dozen laws, which are cached.
        return acceptance_law(rates, spread, self.scenario.traffic.stop, round(self._shift, 2))

    def _current_rates(self) -> tuple[tuple[float, ...], float]:
        """Rates for k and the spread between requests; on a ramp both are between its ends."""
        share, start, end = self._ramp_state()
        start, end = start[: self.k], end[: self.k]
        spread = _between(self._spread(start), self._spread(end), share)
        return tuple(_between(a, b, share) for a, b in zip(start, end, strict=True)), spread

    def _ramp_state(self) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """How far the ramp is, 0..1, and the rates at its ends, for equally many positions."""
        if self._ramp is None:
            rates = extended_rates(self._rates, max(self.k, len(self._rates)))
            return 1.0, rates, rates
        began, over, target = self._ramp
        positions = max(self.k, len(self._rates), len(target))
        share = min(1.0, (self.now - began) / over) if over > 0.0 else 1.0
        return share, extended_rates(self._rates, positions), extended_rates(target, positions)

    def _spread(self, rates: tuple[float, ...]) -> float:
        inflation = self.scenario.acceptance.variance_inflation
        return solve_spread(rates, self.scenario.traffic.stop, inflation)


def _between(a: float, b: float, share: float) -> float:
    return b if share >= 1.0 else a + (b - a) * share
