"""Whether Prometheus, over either source, has firing what the judge has firing, at every evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from specdec_exporter.config import Settings
from specdec_exporter.duration import format_duration
from specdec_exporter.promql import SOURCES, inexpressible, rule_file
from specdec_exporter.rules import rule_table

from tests.real.promtool_bed import firing
from tests.worlds import Firing, Played, World, play


def rendered(source: str, settings: Settings) -> str:
    """The rule file of a source under settings."""
    return _rendered(source, settings.model_dump_json())


@lru_cache(maxsize=4)
def _rendered(source: str, settings_json: str) -> str:
    settings = Settings.model_validate_json(settings_json)
    window = settings.windows[0]
    return rule_file(settings, SOURCES[source](settings.rules, window), window)


def expressible(source: str, settings: Settings) -> frozenset[str]:
    """The alerts that a source can express."""
    window = settings.windows[0]
    missing = inexpressible(settings, SOURCES[source](settings.rules, window), window)
    return frozenset(rule.alert for rule in rule_table(settings) if rule.name not in missing)


def by_prometheus(
    promtool: Path, folder: Path, played: Played, source: str, settings: Settings, rules: str = ""
) -> list[Firing]:
    """What Prometheus has firing at each evaluation."""
    return firing(
        promtool,
        folder,
        played.series[source],
        played.evaluations,
        step_seconds=played.step,
        rules=rules or rendered(source, settings),
        evaluation_seconds=settings.rules.evaluation_interval,
    )


def differences(
    played: Played, source: str, settings: Settings, found: Sequence[Firing]
) -> Iterator[str]:
    """A line for each span of time in which the two differ."""
    can = expressible(source, settings)
    open_since: dict[tuple[str, str, str], float] = {}
    last = 0.0
    for t, judged, prometheus in zip(
        [*played.evaluations, played.evaluations[-1] + 1],
        [*played.judged, frozenset()],
        [*found, frozenset()],
        strict=True,
    ):
        expected = {one for one in judged if one[0] in can}
        now = {("judge alone", *one) for one in expected - prometheus}
        now |= {("Prometheus alone", *one) for one in prometheus - expected}
        for one in sorted(open_since.keys() - now):
            since = format_duration(open_since.pop(one))
            yield f"{source:<8} {one[1]:<28} {one[0]:<16} {since} to {format_duration(last)}"
        for one in now:
            open_since.setdefault(one, t)
        last = t


def fires(
    promtool: Path,
    folder: Path,
    world: World,
    settings: Settings,
    *,
    sources: Sequence[str] = tuple(SOURCES),
) -> list[frozenset[str]]:
    """The alerts that fire at each evaluation, about which all that judge agree."""
    played = play(world.pages, world.step, settings, world.known)
    lines = [
        line
        for source in sources
        for line in differences(
            played,
            source,
            settings,
            by_prometheus(promtool, folder, played, source, settings),
        )
    ]
    assert not lines, "\n".join(["they differ:", *lines])
    return [frozenset(alert for alert, _ in judged) for judged in played.judged]
