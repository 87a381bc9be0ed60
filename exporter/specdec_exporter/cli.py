"""The command line: what each command is called and takes, and how its trouble is told.

Commands import what they need when they run, so that none waits for another's libraries.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from specdec_exporter import __version__
from specdec_exporter.abtest.cli import bench
from specdec_exporter.abtest.errors import BenchError
from specdec_exporter.config import ConfigError, Problem, Settings, load
from specdec_exporter.duration import parse_duration

app = typer.Typer(
    name="specdec-exporter",
    help="Prometheus exporter for speculative decoding: acceptance, mean acceptance length, "
    "per-position decay and live TPOT.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench)


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


class ListFormat(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"


class RuleSource(StrEnum):
    """Whose series rules stand on."""

    EXPORTER = "exporter"
    VLLM = "vllm"


class RuleFormat(StrEnum):
    """How rules are printed."""

    PROMETHEUS = "prometheus"
    PROMETHEUSRULE = "prometheusrule"


class _CannotRun(Exception):
    """Ends a command with one line on standard error."""

    exit_code = 1


class _Misused(_CannotRun):
    """It cannot begin as it was called, where 1 says what it found."""

    exit_code = 2


Config = Annotated[
    Path | None, typer.Option("--config", envvar="SPECDEC_CONFIG", help="YAML file of settings.")
]
Listen = Annotated[
    str | None, typer.Option(help="HOST:PORT to serve on.", show_default="127.0.0.1:19185")
]


@app.command()
def serve(
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="Server to watch; repeat for more."),
    ] = None,
    config: Config = None,
    listen: Listen = None,
    interval: Annotated[
        str | None, typer.Option(help="Time between scrapes.", show_default="5s")
    ] = None,
) -> None:
    """Watch servers and serve their figures to Prometheus."""

    def read() -> Settings:
        flags = {"targets": target or None, "listen": listen, "interval": interval}
        settings = load(config, flags)
        if not settings.targets:
            advice = "none; give --target http://127.0.0.1:8000, SPECDEC_TARGETS or a --config FILE"
            raise ConfigError([Problem("targets", advice)])
        return settings

    # Until the loop runs and reloads, a SIGHUP must not end a process that has just read its
    # settings; to systemd it would have ended well, and would not be started again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = read()
    from specdec_exporter.log import configure
    from specdec_exporter.service import Exporter, bind, open_store
    from specdec_exporter.store import StoreError

    configure(settings.log_level)
    try:
        listener = bind(settings.listen)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _CannotRun(
            f"cannot listen on {settings.listen} ({why}); choose another --listen"
        ) from error
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"specdec-exporter {__version__} on http://{shown}:{port}", file=sys.stderr, flush=True)
    try:
        store = open_store(settings, port, os.environ)
    except StoreError as error:
        raise _CannotRun(str(error)) from error
    asyncio.run(Exporter(settings, read, store).run(listener))
    store.close()


@app.command()
def demo(
    listen: Listen = None,
    duration: Annotated[
        str | None, typer.Option(help="Stop after this long.", show_default="until Ctrl-C")
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="What the simulated server goes through; `list` shows all.")
    ] = "healthy",
) -> None:
    """Run the exporter on a simulated vLLM, with a live table."""
    from specdec_exporter.demo import DemoError, run

    try:
        asyncio.run(run(scenario, listen, parse_duration(duration) if duration else None))
    except (DemoError, ValueError) as error:
        raise _CannotRun(str(error)) from error


@app.command()
def check_config(file: Annotated[Path, typer.Argument(help="YAML file of settings.")]) -> None:
    """Check a file of settings; exit 1 and the place of each mistake if it is wrong."""
    settings = load(file)
    from specdec_exporter.references import check

    check(settings)
    count = len(settings.targets)
    print(f"{file}: good, {count} target{'' if count == 1 else 's'}")


@app.command()
def replay(
    paths: Annotated[list[Path], typer.Argument(help="Recordings: .jsonl files or page folders.")],
    config: Config = None,
    window: Annotated[
        list[str] | None,
        typer.Option(help="Span of the figures; repeat for more.", show_default="5m"),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="File of take-reference to look for drift against.")
    ] = None,
    output: Annotated[
        Format, typer.Option("--format", help="How to print the figures.")
    ] = Format.TABLE,
    baseline: Annotated[
        Path | None, typer.Option(help="File of `calibrate`, to show the net gain against.")
    ] = None,
) -> None:
    """Measure recorded scrapes, with the recorded time as the clock."""
    from specdec_exporter.references import UnusableReference, read_baseline, read_reference
    from specdec_exporter.replay import RecordingError, Rejected
    from specdec_exporter.replay import replay as measure
    from specdec_exporter.report import print_json, print_table

    settings = load(config)
    try:
        windows = tuple(dict.fromkeys(map(parse_duration, window))) if window else settings.windows
    except ValueError as error:
        raise _CannotRun(f"--window: {error}") from error
    try:
        frozen = None if reference is None else read_reference(reference)
        against = None if baseline is None else read_baseline(baseline)
    except UnusableReference as error:
        raise _CannotRun(str(error)) from error

    def measured() -> Iterator[Any]:
        refused: set[str] = set()
        for path in paths:
            for result in measure(
                path,
                windows,
                settings,
                metric_prefix=_recorded_prefix(settings, path),
                reference=frozen,
                baseline=against,
            ):
                if isinstance(result, Rejected):
                    print(result, file=sys.stderr)
                    continue
                if result.refused and result.refused not in refused:
                    refused.add(result.refused)
                    print(f"{path}: {result.refused}", file=sys.stderr)
                yield result

    try:
        count = (print_json if output is Format.JSON else print_table)(measured())
        sys.stdout.flush()
    except RecordingError as error:
        raise _CannotRun(str(error)) from error
    except BrokenPipeError:
        # The reader has gone, as `head` does; nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if not count:
        raise _CannotRun("no scrape could be used")


def _recorded_prefix(settings: Settings, path: Path) -> str:
    """One server in the settings is the one that was recorded; of several, the one of its name."""
    prefixes = {target.name: target.metric_prefix for target in settings.targets}
    usual = next(iter(prefixes.values())) if len(prefixes) == 1 else ""
    return prefixes.get(path.stem, usual)


@app.command()
def calibrate(
    more: Annotated[
        list[Path] | None, typer.Argument(help="More recordings.", metavar="[PATHS]...")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Server without speculation, to drive and measure.")
    ] = None,
    from_series: Annotated[
        list[Path] | None,
        typer.Option(help="Recordings of one in its place, as replay takes them.", metavar="PATHS"),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("baseline.json"),
    model: Annotated[
        str, typer.Option(help="Of several models that the server has.", show_default=False)
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, one by one.")] = "1,8,32",
    duration: Annotated[str, typer.Option(help="Time to measure at each.")] = "20s",
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text file of a prompt a line.", show_default="made up"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Mean length of an answer.")] = 256,
    config: Config = None,
) -> None:
    """Measure what a token costs without speculation, for the net gain."""
    from specdec_exporter.calibrate import (
        CalibrationError,
        Plan,
        describe,
        from_recordings,
        measure,
    )
    from specdec_exporter.replay import RecordingError

    recordings = [*(from_series or ()), *(more or ())]
    if bool(url) == bool(recordings) or (more and not from_series):
        raise _CannotRun("calibrate needs either --url URL or --from-series PATHS")
    settings = load(config)
    try:
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise _CannotRun(f"--out {out}: there is no such folder to write a file to")
        if recordings:
            made = from_recordings((p, _recorded_prefix(settings, p)) for p in recordings)
        else:
            (target,) = load(flags={"targets": [url]}).targets
            known = (t.metric_prefix for t in settings.targets if t.url == target.url)
            plan = Plan(
                metrics_url=target.url,
                concurrency=_counts(concurrency),
                seconds=parse_duration(duration),
                model_name=model,
                prompts=_lines(prompts) if prompts else (),
                max_tokens=max_tokens,
                metric_prefix=next(known, ""),
            )
            made = asyncio.run(measure(plan))
        baseline, left_out = made
        out.write_text(baseline.to_json() + "\n")
    except (CalibrationError, RecordingError, ValueError) as error:
        raise _CannotRun(str(error)) from error
    except OSError as error:
        raise _CannotRun(f"{error.filename}: {error.strerror}") from error
    for words in left_out:
        print(words, file=sys.stderr)
    print(*describe(baseline), f"written to {out}", sep="\n")


def _counts(value: str) -> tuple[int, ...]:
    try:
        counts = sorted({int(part) for part in value.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise ValueError(f"--concurrency {value}: expected numbers from 1 on, like 1,8,32")
    return tuple(counts)


def _lines(file: Path) -> tuple[str, ...]:
    prompts = tuple(line for line in file.read_text().splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"--prompts {file}: there is no prompt in it")
    return prompts


@app.command()
def take_reference(
    path: Annotated[Path, typer.Argument(help="Recording: a .jsonl file or a page folder.")],
    out: Annotated[Path, typer.Option(help="File to write the reference to.")],
    begin: Annotated[str, typer.Option(help="Where in the recording the span begins.")] = "0s",
    duration: Annotated[
        str | None, typer.Option(help="How long the span is.", show_default="to the end")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Which model, if the recording has several.")
    ] = None,
    config: Config = None,
) -> None:
    """Freeze the acceptance of a recorded span, to be compared with from now on."""
    from specdec_exporter.duration import parse_duration_or_zero
    from specdec_exporter.references import UnusableReference, write_reference
    from specdec_exporter.replay import RecordingError, take_reference

    settings = load(config)
    try:
        reference = take_reference(
            path,
            begin=parse_duration_or_zero(begin),
            duration=None if duration is None else parse_duration(duration),
            model_name=model,
            variance_inflation=settings.variance_inflation,
        )
        write_reference(out, reference)
    except (RecordingError, UnusableReference, ValueError) as error:
        raise _CannotRun(str(error)) from error
    positions = " ".join(f"{100 * p:.1f}" for p in reference.position_acceptance_ratio)
    print(
        f"{out}: {reference.fingerprint.model_name}, k = "
        f"{reference.fingerprint.num_speculative_tokens}, positions {positions} %, "
        f"{reference.drafts:.0f} drafts in {reference.span_seconds:.0f} s; "
        f"a fall by less than {100 * reference.margin:.1f} % is not told from chance"
    )


@app.command()
def recommend(
    series: Annotated[
        list[Path] | None,
        typer.Option(help="Recording: a .jsonl file or a page folder; more may follow."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A running exporter, to ask for what it recommends.")
    ] = None,
    more: Annotated[list[Path] | None, typer.Argument(metavar="[PATH]...", help="")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Baseline file, in place of a recording of k = 0.")
    ] = None,
    config: Config = None,
    output: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Recommend k: from recorded scrapes by load, or as a running exporter does."""
    if bool(url) == bool(series):
        raise _CannotRun("recommend needs either --series PATH or --url URL")
    if url is not None:
        from specdec_exporter.remote import Unreachable, print_recommendations, recommendations

        try:
            print_recommendations(recommendations(url), as_json=output is Format.JSON)
        except Unreachable as error:
            raise _CannotRun(str(error)) from error
        return
    from specdec_exporter import recommend as tuning
    from specdec_exporter.replay import RecordingError

    settings = load(config)
    prefixes = {target.name: target.metric_prefix for target in settings.targets}
    usual = next(iter(prefixes.values())) if len(prefixes) == 1 else ""
    try:
        recorded = tuning.read_recordings(
            [*(series or ()), *(more or ())],
            variance_inflation=settings.variance_inflation,
            metric_prefix=lambda path: prefixes.get(path.stem, usual),
        )
        if baseline is not None:
            recorded = tuning.with_baseline(recorded, baseline.read_text(encoding="utf-8"))
        recommendation = tuning.recommend(recorded, settings.tuner, settings.rules)
    except RecordingError as error:
        raise _CannotRun(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise _CannotRun(f"{baseline}: {why}") from error
    for trouble in recorded.rejected:
        print(trouble, file=sys.stderr)
    tuning.print_recommendation(recommendation, as_json=output is Format.JSON)


@app.command()
def history(
    url: Annotated[str, typer.Option(help="The running exporter.")] = "http://127.0.0.1:19185",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many entries.")] = 100,
    output: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
) -> None:
    """Print the audit log: what was decided about k, when, why, and what came of it."""
    from specdec_exporter.remote import Unreachable, ask, print_audit

    try:
        entries = ask(url, f"/api/v1/audit?limit={limit}")
    except Unreachable as error:
        raise _CannotRun(str(error)) from error
    print_audit(entries, as_json=output is Format.JSON)


@app.command()
def rules(
    config: Config = None,
    source: Annotated[
        RuleSource, typer.Option(help="Whose series the rules stand on.")
    ] = RuleSource.EXPORTER,
    output: Annotated[
        RuleFormat, typer.Option("--format", help="A rule file, or a Kubernetes resource.")
    ] = RuleFormat.PROMETHEUS,
) -> None:
    """Print the alerting and recording rules for Prometheus, with the thresholds in force."""
    from specdec_exporter.promql import SOURCES, rule_file

    settings = load(config)
    window = settings.windows[0]
    print(
        rule_file(
            settings,
            SOURCES[source](settings.rules, window),
            window,
            kubernetes=output is RuleFormat.PROMETHEUSRULE,
        ),
        end="",
    )


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The YAML file of `vllm serve --config`.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(metavar="'vllm serve ...'", help="The command that starts vLLM.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="A running vLLM.")] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What vLLM logged when it started.")
    ] = None,
    rules: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prometheus rules or a Grafana board; repeat for more."),
    ] = None,
    output: Annotated[
        ListFormat, typer.Option("--format", help="How to print it.")
    ] = ListFormat.TEXT,
) -> None:
    """Tell what is wrong with a vLLM's speculation; exit 1 if there are errors."""
    from specdec_exporter.doctor.finding import Severity
    from specdec_exporter.doctor.run import Inputs, examine, print_findings

    inputs = Inputs(config, command, url, log, tuple(rules or ()))
    if inputs == Inputs():
        raise _Misused("doctor needs --config, --command, --url, --log or --rules")
    try:
        findings = examine(inputs)
    except OSError as error:
        raise _Misused(f"{error.filename}: {error.strerror}") from error
    except ConfigError as error:
        raise _Misused(f"--url: {error.problems[0].message}") from error
    print_findings(findings, as_json=output is ListFormat.JSON)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"specdec-exporter {__version__}")


def _version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit()


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `specdec-exporter` command."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TyperException as error:
        if message := " ".join(error.format_message().split()):
            message = message.replace("Value error, ", "").rstrip(".")
            print(f"specdec-exporter: {message}; see --help", file=sys.stderr)
        sys.exit(2)
    except Abort:
        sys.exit(130)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except (_CannotRun, BenchError) as error:
        print(f"specdec-exporter: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, _CannotRun) else 1)
