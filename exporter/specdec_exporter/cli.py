"""The command line: what each command is called and takes, and how its trouble is told.

Commands import what they need when they run, so that none waits for another's libraries.
"""

from __future__ import annotations

import asyncio
import os
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
from specdec_exporter.config import ConfigError, Problem, Settings, load, parse_duration

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


class _CannotRun(Exception):
    """Ends a command with one line on standard error."""


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

    settings = read()
    from specdec_exporter.log import configure
    from specdec_exporter.service import Exporter, bind

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
    asyncio.run(Exporter(settings, read).run(listener))


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
    output: Annotated[
        Format, typer.Option("--format", help="How to print the figures.")
    ] = Format.TABLE,
) -> None:
    """Measure recorded scrapes, with the recorded time as the clock."""
    from specdec_exporter.replay import RecordingError, Rejected
    from specdec_exporter.replay import replay as measure
    from specdec_exporter.report import print_json, print_table

    settings = load(config)
    try:
        windows = tuple(dict.fromkeys(map(parse_duration, window))) if window else settings.windows
    except ValueError as error:
        raise _CannotRun(f"--window: {error}") from error
    prefixes = {target.name: target.metric_prefix for target in settings.targets}
    # One server in the settings is the one that was recorded; of several, the one of its name.
    usual = next(iter(prefixes.values())) if len(prefixes) == 1 else ""

    def measured() -> Iterator[Any]:
        for path in paths:
            for result in measure(
                path,
                windows,
                variance_inflation=settings.variance_inflation,
                metric_prefix=prefixes.get(path.stem, usual),
            ):
                if isinstance(result, Rejected):
                    print(result, file=sys.stderr)
                else:
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


@app.command()
def version() -> None:
    """Print the version."""
    print(f"specdec-exporter {__version__}")


def main() -> None:
    """Entry point of the `specdec-exporter` command."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except TyperException as error:
        if message := " ".join(error.format_message().split()):
            print(f"specdec-exporter: {message.rstrip('.')}; see --help", file=sys.stderr)
        sys.exit(2)
    except Abort:
        sys.exit(130)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except (_CannotRun, BenchError) as error:
        print(f"specdec-exporter: {error}", file=sys.stderr)
        sys.exit(1)
