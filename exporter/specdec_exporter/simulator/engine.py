"""One engine: a discrete-event model of continuous batching with speculative decoding.

Requests wait, are prefilled inside a step, then decode together, one draft of k tokens per request
and step, until their output is complete. It must not know scripts, HTTP or the text page.

Speed comes from drawing all of a request's drafts when its decode begins. Its last step is then
known, steps of an unchanged batch are leapt over at once, and what a request has contributed so far
is counted only when somebody looks. Consequences: a request keeps the acceptance that it started
with unless `set_law` redraws it, and `iteration_tokens` puts a step into the bucket of the batch's
mean tokens (its sum is exact).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from random import Random

from specdec_exporter.simulator.acceptance import AcceptanceLaw, Level
from specdec_exporter.simulator.scenario import Scenario

_ROUNDING = 1e-9
"""Of a step: boundaries this close to a time count as reached."""

_STOP_SHARE = 0.7
"""Of requests that end by a stop token rather than at their max_tokens."""

_DEFAULT_MAX_TOKENS = 4096
"""The max_tokens of a request that ends by a stop token."""

# The bounds are vLLM's; those of lengths go up to the longest context, here 128 Ki tokens.
_LENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_MINUTES = (1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_LATENCY = (0.3, 0.5, 0.8, *_MINUTES, 960.0, 1920.0, 7680.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_TOKEN_LATENCY = (*_TOKEN, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_HTTP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)


class Histogram:
    """Bucket counts by increasing upper bounds, the last one infinite."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class Histograms:
    """All histograms of one engine, named as on the page without prefix."""

    def __init__(self) -> None:
        self.request_prompt_tokens = Histogram(_LENGTHS)
        self.request_generation_tokens = Histogram(_LENGTHS)
        self.iteration_tokens_total = Histogram((1.0, *(float(2**i) for i in range(3, 15))))
        self.request_max_num_generation_tokens = Histogram(_LENGTHS)
        self.request_params_n = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.request_params_max_tokens = Histogram(_LENGTHS)
        self.time_to_first_token_seconds = Histogram(
            (*_FIRST, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
        )
        self.inter_token_latency_seconds = Histogram(_TOKEN_LATENCY)
        self.request_time_per_output_token_seconds = Histogram(_TOKEN_LATENCY)
        self.e2e_request_latency_seconds = Histogram(_LATENCY)
        self.request_queue_time_seconds = Histogram(_LATENCY)
        self.request_inference_time_seconds = Histogram(_LATENCY)
        self.request_prefill_time_seconds = Histogram(_LATENCY)
        self.request_decode_time_seconds = Histogram(_LATENCY)
        self.request_num_preemptions = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.request_prefill_kv_computed_tokens = Histogram(_LENGTHS)
        self.http_request_duration_highr_seconds = Histogram((*_HTTP, 5.0, 7.5, 10.0, 30.0, 60.0))
        self.http_request_duration_seconds = Histogram((0.1, 0.5, 1.0))


@dataclass(slots=True)
class _Request:
    """One request; times in seconds, lengths in tokens."""

    arrival: float
    prompt: int
    cached: int
    output: int
    stopped: bool
    """Ends by a stop token; otherwise at its max_tokens."""
    quality: float
    """Uniform in 0..1: its place among arriving requests by acceptance."""
    client: bool
    to_prefill: int
    remaining: int
    """Tokens not yet delivered, as far as counted."""
    admitted: float = 0.0
    first_token: float = 0.0
    level: int = -1
    law: AcceptanceLaw | None = None
    """What its drafts were drawn from; None decodes without drafts."""
    yields: bytes = b""
    """1 + accepted tokens of each step since `first_step`."""
    totals: list[int] | None = None
    """Running sum of `yields`."""
    first_step: int = 0
    counted: int = 0
    """Steps since `first_step` that the engine's counters have."""
    base_mark: float = 0.0


class Engine:
    """The state and the counters of one engine.

    Args:
        scenario: the server; its `k` and rates are not read, since restarts change them.
        k: speculative tokens per draft.
        share: of the scenario's traffic.
        start: seconds since the start of the simulation.
        traffic: draws arrivals and lengths; the same whatever is accepted.
        drafter: draws acceptance.
    """

    def __init__(
        self,
        scenario: Scenario,
        k: int,
        share: float,
        start: float,
        traffic: Random,
        drafter: Random,
    ) -> None:
        self.k = k
        self.now = start
        self.drafts = 0
        self.accepted_per_position = [0] * k
        self.generation_tokens = 0
        self.first_tokens = 0
        self.decode_seconds = 0.0
        self.decode_steps = 0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.finished = {"stop": 0, "length": 0}
        self.request_bytes = 0
        self.response_bytes = 0
        self.histograms = Histograms()
        self.expected_accepted = [0.0] * k
        """Sum over drafts of each position's mean acceptance at that time: a truth, no series."""
        self.baseline_decode_seconds = 0.0
        """What the delivered tokens would have cost without speculation at the same concurrency."""

        self._scenario = scenario
        self._share = share
        self._traffic = traffic
        self._drafter = drafter
        self._law: AcceptanceLaw | None = None
        self._step = 0
        self._origin = start
        self._origin_step = 0
        self._origin_batch = -1
        self._base_integral = 0.0
        self._serial = count()
        self._running: dict[int, _Request] = {}
        self._finishes: list[tuple[int, int]] = []
        self._prefilling: list[_Request] = []
        self._waiting: list[_Request] = []
        self._waiting_from = 0
        self._requests_per_second = 0.0
        self._next_arrival = math.inf
        self._costs: dict[int, tuple[float, float]] = {}

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting) - self._waiting_from

    def kv_cache_usage(self) -> float:
        """Share of the cache that the batch's tokens fill, 0..1; call `count` first."""
        tokens = sum(r.prompt + r.output - r.remaining for r in self._running.values())
        tokens += sum(r.prompt for r in self._prefilling)
        return min(1.0, tokens / self._scenario.kv_cache_tokens)

    def set_arrivals(self, requests_per_second: float, t: float) -> None:
        """A new rate of all the server's arrivals, from time t on."""
        self._requests_per_second = requests_per_second * self._share
        self._schedule_arrival(t)

    def add_client(self) -> None:
        """One more client that always has one request open."""
        self._waiting.append(self._new_request(self.now, client=True))

    def set_law(self, law: AcceptanceLaw | None, *, redraw: bool) -> None:
        """A new law of acceptance; None decodes without drafts.

        Args:
            law: for `k` positions.
            redraw: whether requests in the batch take it too, from their next step on.
        """
        self._law = law
        self._costs.clear()
        self._origin_batch = -1
        if not redraw:
            return
        self.count()
        self._finishes.clear()
        for serial, request in self._running.items():
            self._finishes.append((self._draw(request), serial))
        heapify(self._finishes)

    def run_until(self, t: float) -> None:
        """Complete all steps that end at or before t."""
        while True:
            self._take_arrivals()
            self._admit()
            if self._prefilling:
                if not self._prefill_step(t):
                    return
            elif self._running:
                if not self._leap(t):
                    return
            elif self._next_arrival <= t:
                self.now = max(self.now, self._next_arrival)
            else:
                self.now = max(self.now, t)
                return

    def count(self) -> None:
        """Bring the counters up to the last completed step."""
        for request in self._running.values():
            self._count(request)

    # The daily cycle of arrivals is thinned from its peak, so that the traffic's random numbers do
    # not depend on when somebody looks.
    def _schedule_arrival(self, after: float) -> None:
        amplitude = self._scenario.traffic.daily_amplitude
        peak = self._requests_per_second * (1.0 + amplitude)
        if peak <= 0.0:
            self._next_arrival = math.inf
            return
        t = after
        while True:
            t += self._traffic.expovariate(peak)
            if amplitude == 0.0:
                break
            phase = 2.0 * math.pi * t / self._scenario.day_seconds
            if self._traffic.random() * (1.0 + amplitude) < 1.0 - amplitude * math.sin(phase):
                break
        self._next_arrival = t

    def _new_request(self, t: float, *, client: bool = False) -> _Request:
        traffic = self._scenario.traffic
        prompt = _geometric(self._traffic, traffic.prompt_tokens)
        output = 1 + _geometric(self._traffic, traffic.output_tokens - 1.0)
        cached = min(int(prompt * traffic.prefix_hit_ratio), prompt - 1)
        return _Request(
            arrival=t,
            prompt=prompt,
            cached=cached,
            output=output,
            stopped=self._traffic.random() < _STOP_SHARE,
            quality=self._traffic.random(),
            client=client,
            to_prefill=prompt - cached,
            remaining=output,
        )

    def _take_arrivals(self) -> None:
        while self._next_arrival <= self.now:
            arrival = self._next_arrival
            self._waiting.append(self._new_request(arrival))
            self._schedule_arrival(arrival)

    def _admit(self) -> None:
        while self.num_waiting and self.num_running < self._scenario.max_num_seqs:
            request = self._waiting[self._waiting_from]
            self._waiting_from += 1
            request.admitted = self.now
            self._prefilling.append(request)
        if self._waiting_from > 1000 or self._waiting_from == len(self._waiting):
            del self._waiting[: self._waiting_from]
            self._waiting_from = 0

    def _cost(self, batch: int) -> tuple[float, float]:
        """Seconds of a step with so many requests in decode, and of one without speculation."""
        if batch not in self._costs:
            model = self._scenario.step_time
            k = 0 if self._law is None else self.k
            self._costs[batch] = (model.seconds(k, batch), model.base_seconds(batch))
        return self._costs[batch]

    def _leap(self, t: float) -> bool:
        """Steps of the batch as it is, until it changes or t; False where none ends by t."""
        batch = len(self._running)
        seconds, base_seconds = self._cost(batch)
        if batch != self._origin_batch:
            self._origin, self._origin_step, self._origin_batch = self.now, self._step, batch
        # All limits count from the origin, so that results do not depend on who looks when.
        done = self._step - self._origin_step
        limit = math.floor((t - self._origin) / seconds + _ROUNDING)
        limit = min(limit, self._finishes[0][0] - self._origin_step)
        if self._next_arrival < math.inf:
            arrival = math.ceil((self._next_arrival - self._origin) / seconds - _ROUNDING)
            limit = min(limit, max(arrival, done + 1))
        steps = limit - done
        if steps <= 0:
            return False
        self.now = self._origin + limit * seconds
        self._complete_steps(batch, seconds, base_seconds, steps, 0)
        return True

    def _prefill_step(self, t: float) -> bool:
        """One step with prefill in it; False where it does not end by t."""
        batch = len(self._running)
        budget = self._scenario.max_num_batched_tokens - batch * (1 + self.k)
        prefill = min(budget, sum(r.to_prefill for r in self._prefilling))
        seconds, base_seconds = self._cost(batch)
        added = prefill * self._scenario.step_time.seconds_per_prefill_token
        if self.now + seconds + added > t:
            return False
        self.now += seconds + added
        self._origin_batch = -1
        self.baseline_decode_seconds += batch * added
        self._complete_steps(batch, seconds + added, base_seconds, 1, prefill)
        unfinished = []
        for request in self._prefilling:
            tokens = min(request.to_prefill, prefill)
            request.to_prefill -= tokens
            prefill -= tokens
            if request.to_prefill:
                unfinished.append(request)
            else:
                self._first_token(request)
        self._prefilling = unfinished
        return True

    def _complete_steps(
        self, batch: int, seconds: float, base_seconds: float, steps: int, prefill: int
    ) -> None:
        """Count steps that end now, and the requests that end with the last of them."""
        self._step += steps
        self._base_integral += steps * base_seconds
        per_request = 1.0 if self._law is None else 1.0 + self._law.mean_accepted
        self.histograms.iteration_tokens_total.observe(prefill + batch * per_request, steps)
        if batch:
            self.decode_seconds += batch * steps * seconds
            self.decode_steps += batch * steps
            self.histograms.inter_token_latency_seconds.observe(seconds, batch * steps)
        while self._finishes and self._finishes[0][0] <= self._step:
            self._finish(self._running.pop(heappop(self._finishes)[1]))

    def _first_token(self, request: _Request) -> None:
        self.first_tokens += 1
        self.generation_tokens += 1
        self.prompt_tokens += request.prompt
        self.cached_prompt_tokens += request.cached
        request.first_token = self.now
        request.remaining -= 1
        self.histograms.time_to_first_token_seconds.observe(self.now - request.arrival)
        serial = next(self._serial)
        self._running[serial] = request
        heappush(self._finishes, (self._draw(request), serial))

    def _draw(self, request: _Request) -> int:
        """Draw all further steps of a request; returns the number of the step that ends it."""
        request.first_step = self._step
        request.counted = 0
        request.base_mark = self._base_integral
        law = request.law = self._law
        if law is None:
            return self._step + request.remaining
        if request.level < 0:
            request.level = bisect_left(law.arrival_weights, request.quality)
        level = law.levels[request.level]
        likely = int(1.1 * request.remaining / (1.0 + sum(level.positions))) + 8
        drawn = b""
        while True:
            drawn += _draw_yields(level, likely, self._drafter)
            totals = list(accumulate(drawn))
            if totals[-1] >= request.remaining:
                break
        request.yields = drawn
        request.totals = totals
        return self._step + 1 + bisect_left(totals, request.remaining)

    def _count(self, request: _Request) -> None:
        done = self._step - request.first_step
        counted = request.counted
        steps = done - counted
        if steps <= 0:
            return
        if request.law is None or request.totals is None:
            delivered = steps
        else:
            tokens = request.totals[done - 1] - (request.totals[counted - 1] if counted else 0)
            per_position = self.accepted_per_position
            front = tokens - steps
            reached = 0
            for position in range(self.k - 1, 0, -1):
                reached += request.yields.count(position + 2, counted, done)
                per_position[position] += reached
                front -= reached
            per_position[0] += front
            self.drafts += steps
            for position, rate in enumerate(request.law.positions):
                self.expected_accepted[position] += steps * rate
            # What is accepted past the end of a request counts as accepted, and is not delivered.
            delivered = min(tokens, request.remaining)
        request.remaining -= delivered
        request.counted = done
        self.generation_tokens += delivered
        self.baseline_decode_seconds += (
            delivered * (self._base_integral - request.base_mark) / steps
        )
        request.base_mark = self._base_integral

    def _finish(self, request: _Request) -> None:
        self._count(request)
        self.finished["stop" if request.stopped else "length"] += 1
        max_tokens = _DEFAULT_MAX_TOKENS if request.stopped else request.output
        self.request_bytes += 200 + 4 * request.prompt
        self.response_bytes += 300 + 4 * request.output
        h = self.histograms
        e2e = self.now - request.arrival
        decode = self.now - request.first_token
        h.request_prompt_tokens.observe(request.prompt)
        h.request_generation_tokens.observe(request.output)
        h.request_max_num_generation_tokens.observe(request.output)
        h.request_params_n.observe(1.0)
        h.request_params_max_tokens.observe(max(max_tokens, request.output))
        h.request_time_per_output_token_seconds.observe(decode / (request.output - 1))
        h.e2e_request_latency_seconds.observe(e2e)
        h.request_queue_time_seconds.observe(request.admitted - request.arrival)
        h.request_inference_time_seconds.observe(self.now - request.admitted)
        h.request_prefill_time_seconds.observe(request.first_token - request.admitted)
        h.request_decode_time_seconds.observe(decode)
        h.request_num_preemptions.observe(0.0)
        h.request_prefill_kv_computed_tokens.observe(request.prompt - request.cached)
        h.http_request_duration_highr_seconds.observe(e2e)
        h.http_request_duration_seconds.observe(e2e)
        if request.client:
            self._waiting.append(self._new_request(self.now, client=True))


def _geometric(random: Random, mean: float) -> int:
    """A geometric number from 1 on; 1 where the mean is not above it."""
    if mean <= 1.0:
        return 1
    return 1 + int(math.log(1.0 - random.random()) / math.log1p(-1.0 / mean))


def _draw_yields(level: Level, steps: int, random: Random) -> bytes:
    """1 + accepted tokens of so many drafts."""
    parts = random.randbytes(steps)
    drawn = bytearray(parts.translate(level.yields))
    at = drawn.find(0)
    while at >= 0:
        drawn[at] = 1 + bisect_right(level.cumulative, (parts[at] + random.random()) / 256)
        at = drawn.find(0, at + 1)
    return bytes(drawn)
