"""The bench commands: what each is called and takes."""

from __future__ import annotations

import asyncio
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_exporter.abtest.errors import BenchError

bench = typer.Typer(
    name="bench",
    help="Measure a server from the client's side, and compare decoding with and without "
    "speculation.",
    no_args_is_help=True,
)


class Format(StrEnum):
    """How a comparison is printed."""

    TABLE = "table"
    JSON = "json"
    HTML = "html"


Prompts = Annotated[
    str, typer.Option(help="YAML file of prompts, or the name of a ready one: default.")
]
Repeat = Annotated[int, typer.Option(min=1, help="Requests for each prompt.")]
Concurrency = Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")]
Seed = Annotated[
    int, typer.Option(help="Of the ids at the head of the prompts; the same for both sides.")
]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before each workload, kept apart.")]
Model = Annotated[str | None, typer.Option(help="Model to ask.", show_default="the server's first")]
ApiKey = Annotated[
    str | None, typer.Option(envvar="VLLM_API_KEY", help="Key of the server.", show_default="none")
]


@bench.command()
def run(
    url: Annotated[str, typer.Option(help="Server, as http://127.0.0.1:8000.")],
    label: Annotated[str, typer.Option(help="What this side is called, as ar or mtp.")],
    prompts: Prompts,
    out: Annotated[Path, typer.Option(help="File of the measurements, JSON lines.")],
    repeat: Repeat = 20,
    concurrency: Concurrency = 1,
    seed: Seed = 1,
    warmup: Warmup = 3,
    model: Model = None,
    api_key: ApiKey = None,
) -> None:
    """Send prompts to a server and record each request; the same command again goes on."""
    from rich.console import Console

    from specdec_exporter.abtest.prompts import load
    from specdec_exporter.abtest.run import Plan, read
    from specdec_exporter.abtest.run import run as measure

    plan = Plan(
        url=_address(url),
        label=label,
        prompts=load(prompts),
        repeat=repeat,
        concurrency=concurrency,
        out=out,
        seed=seed,
        warmup=warmup,
        model=model,
        api_key=api_key,
    )
    try:
        asyncio.run(measure(plan, Console(stderr=True)))
    except KeyboardInterrupt:
        held = len(read(out).requests) if out.exists() else 0
        print(
            f"stopped: {held} requests are kept in {out}, and the same command goes on from there",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


@bench.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Measurements of one side, as without speculation.")],
    b: Annotated[Path, typer.Argument(help="Measurements of the other.")],
    output: Annotated[
        Format, typer.Option("--format", help="How to print; html is one file for a browser.")
    ] = Format.TABLE,
) -> None:
    """Set two measurements side by side; ratios are of the second to the first."""
    from specdec_exporter.abtest.compare import compare as set_side_by_side
    from specdec_exporter.abtest.run import read

    runs = read(a), read(b)
    comparison = set_side_by_side(*runs)
    if not comparison.workloads:
        raise BenchError(f"{a} and {b} have no workload in common")
    if output is Format.JSON:
        print(json.dumps(comparison.to_dict(), indent=1))
    elif output is Format.HTML:
        from specdec_exporter.abtest.html import comparison_page

        print(comparison_page(comparison, *runs))
    else:
        from specdec_exporter.abtest.table import print_comparison
        from specdec_exporter.report import console

        print_comparison(comparison, console())


@bench.command()
def import_csv(
    file: Annotated[Path, typer.Argument(help="CSV file with a row for each request.")],
    mapping: Annotated[
        str,
        typer.Option(
            "--map",
            metavar="COLUMN=FIELD,...",
            help="What each column is: label, workload, prompt, repeat, ttfo_ms, e2e_ms, "
            "completion_tokens, prompt_tokens, finish_reason, valid, problems, …",
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder of the files, one for each label.")] = Path(),
) -> None:
    """Read other people's measurements."""
    from specdec_exporter.abtest.importing import import_csv as convert
    from specdec_exporter.abtest.importing import parse_map

    for written, count in convert(file, parse_map(mapping), out):
        print(f"{written}: {count} requests")


@bench.command()
def sweep(
    k: Annotated[str, typer.Option(help="Values of num_speculative_tokens, as 0,1,2,4.")],
    prompts: Prompts,
    serve_command: Annotated[
        str,
        typer.Option(
            help="Starts the server, as 'vllm serve MODEL {speculative_config}'; the word in "
            "braces becomes --speculative-config with each k, and nothing at 0."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the measurements, sweep.json, sweep.html.")],
    speculative_config: Annotated[
        str, typer.Option(help="JSON, without num_speculative_tokens.", metavar="JSON")
    ] = "{}",
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    starts: Annotated[int, typer.Option(min=1, help="Starts of the server at each k.")] = 3,
    repeat: Repeat = 5,
    concurrency: Concurrency = 1,
    seed: Seed = 1,
    warmup: Warmup = 3,
    api_key: ApiKey = None,
) -> None:
    """Serve at one k after another, and show where drafting deeper stops to pay."""
    from rich.console import Console

    from specdec_exporter.abtest.prompts import load
    from specdec_exporter.abtest.run import Plan
    from specdec_exporter.abtest.sweep_run import SweepPlan, print_sweep
    from specdec_exporter.abtest.sweep_run import sweep as measure
    from specdec_exporter.report import console

    plan = SweepPlan(
        ks=_depths(k),
        starts=starts,
        serve_command=serve_command,
        speculative_config=_configuration(speculative_config),
        folder=out,
        plan=Plan(
            url=_address(url),
            label="",
            prompts=load(prompts),
            repeat=repeat,
            concurrency=concurrency,
            out=out,
            seed=seed,
            warmup=warmup,
            api_key=api_key,
        ),
    )
    try:
        result = measure(plan, Console(stderr=True))
    except KeyboardInterrupt:
        print(
            f"stopped: what was measured is in {out}, and the same command goes on from there",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    print_sweep(result, console())
    print(f"{out / 'sweep.json'} {out / 'sweep.html'}")


def _depths(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < 100 for word in words):
        raise BenchError(f"--k: {text!r} is no list of numbers; expected such as 0,1,2,4")
    return list(dict.fromkeys(map(int, words)))


def _configuration(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise BenchError(f"--speculative-config: not JSON ({error})") from error
    if not isinstance(config, dict) or "num_speculative_tokens" in config:
        raise BenchError(
            "--speculative-config: expected a JSON object without num_speculative_tokens"
        )
    return config


def _address(url: str) -> str:
    """The server's address without a path.

    Raises:
        BenchError: not an address.
    """
    address = url.rstrip("/").removesuffix("/v1")
    if not address.startswith(("http://", "https://")):
        raise BenchError(f"--url: {url!r} is no address; expected http://127.0.0.1:8000")
    return address
