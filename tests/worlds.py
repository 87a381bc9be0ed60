"""What servers count and what then fires: worlds for the rules, played to the judge and as series.

A world is one scrape after another of one server. It is seen three ways: by the judge, over figures
measured here; as the exporter's series, as they would be served; and as the server's own series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from prometheus_client.parser import text_string_to_metric_families
from specdec_exporter.config import Settings, Target
from specdec_exporter.expose import registry
from specdec_exporter.judge import Judge, facts
from specdec_exporter.loop import Monitor
from specdec_exporter.model import Counters, ExporterStatus, Reason, RuleState, ScrapeError
from specdec_exporter.parse import VLLM
from specdec_exporter.rules import rule_table

from tests.pages import lines

MODEL = "m"
LABELS = {
    "vllm": 'job="vllm",instance="127.0.0.1:8000"',
    "exporter": 'job="specdec",instance="127.0.0.1:19185"',
}
KNOWN_ELSEWHERE: dict[str, Sequence[tuple[str, str]]] = {
    "tpot_gain": [("specdec_tpot_gain_ratio", 'match="concurrency"')],
    "tpot_gain_stderr": [("specdec_tpot_gain_ratio_stderr", 'match="concurrency"')],
    "baseline_covered": [("specdec_baseline_covered", "")],
    "drift_score": [("specdec_drift_score", "")],
    "last_position_gain": [("specdec_last_position_gain_ratio", "")],
    "last_position_gain_stderr": [("specdec_last_position_gain_ratio_stderr", "")],
    "reference_front": [
        ("specdec_reference_position_acceptance_ratio", f'position="{i}"') for i in range(2)
    ],
}
"""Facts that no counter shows, and the gauges that serve them."""

Firing = frozenset[tuple[str, str]]
"""Alerts that fire, each with the model it speaks of; empty for the target itself."""


@dataclass
class World:
    """One server, scraped on a grid of `step` seconds from the time 0 on.

    Args:
        k: tokens of a draft, and how many positions the server shows.
        engines: of one model, each with counters of its own.
        step: seconds between scrapes.
    """

    k: int = 2
    engines: int = 1
    step: float = 15.0
    pages: list[str | None] = field(default_factory=list)
    """None is a scrape that failed."""
    known: list[Mapping[str, float]] = field(default_factory=list)
    """What is known from elsewhere, by the name of the rules' symbol."""

    def __post_init__(self) -> None:
        self._start = 0.0
        self._zero()
        self._scrape({})

    def _zero(self) -> None:
        nothing = Counters(
            drafts=0.0,
            draft_tokens=0.0,
            accepted_tokens=0.0,
            accepted_per_position=(0.0,) * self.k,
            generation_tokens=0.0,
            first_tokens=0.0,
            decode_seconds=0.0,
            decode_steps=0.0,
        )
        if not self.k:
            nothing = replace(nothing, drafts=None, draft_tokens=None, accepted_tokens=None)
        self._engines = [nothing] * self.engines

    def _scrape(self, known: Mapping[str, float]) -> None:
        page = "".join(
            f"{line}\n"
            for i, counters in enumerate(self._engines)
            for line in lines(counters, str(i), MODEL)
        )
        self.pages.append(page + f"process_start_time_seconds {1e9 + self._start}\n")
        self.known.append(known)

    def run(
        self,
        minutes: float,
        rates: Sequence[float] = (0.47, 0.24),
        *,
        drafts: float | Sequence[float] = 20.0,
        mean_length: float | None = None,
        steps_per_draft: float = 1.0,
        steps: float = 0.0,
        concurrency: float = 4.0,
        accepted_factor: float = 1.0,
        known: Mapping[str, float] | None = None,
    ) -> Self:
        """Let time pass.

        Args:
            minutes: of scrapes.
            rates: of acceptance at each position; positions beyond them accept nothing.
            drafts: a second, of each engine.
            mean_length: tokens of a draft; k unless given.
            steps_per_draft: below 1 some drafts are padding.
            steps: a second, that have no draft.
            concurrency: requests in decode, over all engines.
            accepted_factor: accepted tokens, over the sum of the positions.
            known: what is known from elsewhere meanwhile.
        """
        per_engine = [drafts] * self.engines if isinstance(drafts, float | int) else drafts
        for _ in range(round(minutes * 60 / self.step)):
            self._engines = [
                counters
                + self._counted(
                    d * self.step,
                    [*rates, *[0.0] * self.k][: self.k],
                    length=self.k if mean_length is None else mean_length,
                    steps=(d * steps_per_draft + steps) * self.step,
                    seconds=concurrency / self.engines * self.step,
                    accepted_factor=accepted_factor,
                )
                for counters, d in zip(self._engines, per_engine, strict=True)
            ]
            self._scrape(known or {})
        return self

    def _counted(
        self,
        drafts: float,
        rates: Sequence[float],
        *,
        length: float,
        steps: float,
        seconds: float,
        accepted_factor: float,
    ) -> Counters:
        real = min(drafts, steps)
        positions = tuple(real * p for p in rates)
        counted = Counters(
            drafts=drafts,
            draft_tokens=real * length + (drafts - real) * self.k,
            accepted_tokens=sum(positions) * accepted_factor,
            accepted_per_position=positions,
            generation_tokens=steps * 1.05 + sum(positions),
            first_tokens=steps * 0.05,
            decode_seconds=seconds if steps else 0.0,
            decode_steps=steps,
        )
        if not self.k:
            counted = replace(counted, drafts=None, draft_tokens=None, accepted_tokens=None)
        return counted

    def fail(self, scrapes: int = 1) -> Self:
        """Let scrapes fail; what the server would count meanwhile is left out."""
        self.pages += [None] * scrapes
        self.known += [{}] * scrapes
        return self

    def restart(self, *, k: int | None = None, scrapes_lost: int = 1) -> Self:
        """A new process, which counts from 0."""
        self.fail(scrapes_lost)
        self.k = self.k if k is None else k
        self._start = self.step * len(self.pages)
        self._zero()
        return self

    @property
    def seconds(self) -> float:
        """Time of the last scrape."""
        return self.step * (len(self.pages) - 1)


@dataclass(frozen=True)
class Played:
    """What a world looks like to those who judge it."""

    step: float
    evaluations: tuple[float, ...]
    """Times."""
    judged: tuple[Firing, ...]
    """What the judge has firing at each evaluation."""
    series: Mapping[str, Mapping[str, list[float | None]]]
    """By source."""


def play(
    pages: Sequence[str | None],
    step: float,
    settings: Settings | None = None,
    known: Sequence[Mapping[str, float]] | None = None,
) -> Played:
    """Scrape every `step` seconds, and judge at the evaluation interval.

    Args:
        pages: of the server; None is a scrape that failed.
        step: seconds between scrapes.
        settings: with the interval of this grid they are in force.
        known: at each scrape, what is known from elsewhere.
    """
    settings = (settings or Settings()).model_copy(update={"interval": step})
    known = known or [{}] * len(pages)
    monitor = Monitor(Target(url="http://127.0.0.1:8000", name="a"), settings)
    judge = Judge(rule_table(settings))
    alerts = {rule.name: rule.alert for rule in rule_table(settings)}
    every = round(settings.rules.evaluation_interval / step)
    series = {source: _Table(labels) for source, labels in LABELS.items()}
    evaluations, judged = [], []
    for i, (page, more) in enumerate(zip(pages, known, strict=True)):
        t = i * step
        failed = ScrapeError(Reason.CONNECT, "it is not there")
        monitor.observe(failed if page is None else page.encode(), t=t, duration=0.01)
        status = monitor.status
        assert status.last_error in (None, failed.detail), status.last_error
        served = registry(
            lambda status=status: ExporterStatus("0", (status,), False, True)  # type: ignore[misc]
        ).collect()
        series["exporter"].add(i, ((s.name, s.labels, s.value) for f in served for s in f.samples))
        series["exporter"].add(i, _gauges(more))
        series["vllm"].add(i, _samples(_of_interest(page or "")))
        if i % every:
            continue
        window = settings.windows[0]
        verdicts = judge.judge(
            [
                (m.total.model_name, {**facts(m), **more})
                for m in status.measurements
                if m.total.window_seconds == window
            ],
            t,
            target={
                "up": float(status.up),
                "expected_up": status.last_success
                if status.last_success is not None
                else (1.0 if t >= settings.rules.target_down.grace else None),
            },
        )
        evaluations.append(t)
        judged.append(
            frozenset(
                (alerts[v.rule], v.model_name) for v in verdicts if v.state == RuleState.FIRING
            )
        )
    return Played(
        step,
        tuple(evaluations),
        tuple(judged),
        {source: table.filled(len(pages)) for source, table in series.items()},
    )


def _of_interest(page: str) -> str:
    """The lines that a rule could stand on; the rest of a server's page is long."""
    return "".join(f"{line}\n" for line in page.splitlines() if line.startswith(tuple(VLLM.names)))


def _samples(page: str) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _gauges(known: Mapping[str, float]) -> Iterable[tuple[str, Mapping[str, str], float]]:
    for symbol, value in known.items():
        for name, label in KNOWN_ELSEWHERE[symbol]:
            labels = {"target": "a", "model_name": MODEL}
            if label:
                key, _, quoted = label.partition("=")
                labels[key] = quoted.strip('"')
            yield name, labels, value


class _Table:
    """Series by their name and labels, with a place for each scrape."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._series: dict[str, dict[int, float]] = {}

    def add(self, i: int, samples: Iterable[tuple[str, Mapping[str, str], float]]) -> None:
        for name, labels, value in samples:
            own = "".join(f',{key}="{text}"' for key, text in sorted(labels.items()))
            self._series.setdefault(f"{name}{{{self._labels}{own}}}", {})[i] = value

    def filled(self, count: int) -> dict[str, list[float | None]]:
        return {
            name: [values.get(i) for i in range(count)] for name, values in self._series.items()
        }
