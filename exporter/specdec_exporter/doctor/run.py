"""The `doctor` command: reads what it is given, and tells what is wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specdec_exporter.config import Target, load
from specdec_exporter.doctor.checks import Case, Files, launch_findings, tunable
from specdec_exporter.doctor.finding import Check, Finding, Severity, in_order
from specdec_exporter.doctor.launch import Given, Launch, Unreadable, from_command, from_config
from specdec_exporter.doctor.launch import merged as put_together
from specdec_exporter.doctor.log import StartUp, log_findings, read_log
from specdec_exporter.doctor.queries import query_findings, read_queries
from specdec_exporter.doctor.server import Server, ask, server_findings


@dataclass(frozen=True, slots=True)
class Inputs:
    """What there is to look at; at least one of it."""

    config: Path | None = None
    command: str | None = None
    url: str | None = None
    log: Path | None = None
    rules: Sequence[Path] = ()


def examine(inputs: Inputs) -> tuple[Finding, ...]:
    """Everything that is wrong, the worst first.

    Raises:
        OSError: a file cannot be read.
            ConfigError: the address is none.
    """
    findings: list[Finding] = []
    configured = _configured(inputs, findings)
    start, log = StartUp(None), ""
    if inputs.log is not None:
        log = inputs.log.read_text(encoding="utf-8", errors="replace")
        start = read_log(log, str(inputs.log))
    server = None
    if inputs.url is not None:
        target = _target(inputs.url)
        server = asyncio.run(ask(target.url, target.shown_url))

    launch = configured or start.launch
    if launch is not None:
        findings += launch_findings(_case(launch, start, server))
    if inputs.log is not None:
        findings += log_findings(log, str(inputs.log), start, configured)
    if server is not None:
        findings += server_findings(server, launch)
    for path in inputs.rules:
        try:
            findings += query_findings(read_queries(_text(path), str(path)))
        except Unreadable as error:
            findings.append(_unreadable(error))
    return in_order(findings)


def _configured(inputs: Inputs, findings: list[Finding]) -> Launch | None:
    """What the server is to be started with; None if neither file nor command is given."""
    command: tuple[Given, ...] = ()
    file: tuple[Given, ...] = ()
    path, complete = inputs.config, True
    try:
        if inputs.command is not None:
            command = from_command(inputs.command)
            named = Launch(command).last("config")
            # What vLLM does not read is not looked at either.
            if path is None and named and not named.equals:
                path = Path(str(named.value))
                complete = path.is_file()
                if not complete:
                    findings.append(_elsewhere(path))
        if path is not None and complete:
            text = _text(path)
            file = from_config(text, str(path))
            findings += tunable(text, str(path), file)
    except Unreadable as error:
        findings.append(_unreadable(error))
        complete = False
    launch = put_together(file, command)
    return replace(launch, complete=complete) if launch.given else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(str(path), "not UTF-8") from error


def _elsewhere(path: Path) -> Finding:
    return Finding(
        Severity.NOTE,
        Check.CONFIG_NOT_READ,
        f"{path} is not on this machine",
        "--config",
        "what is in it is not known here, so nothing is said of it",
        "run doctor where it is, or give a copy by doctor's own --config",
    )


def _case(launch: Launch, start: StartUp, server: Server | None) -> Case:
    version = start.version or (server.version if server else "")
    if launch.length is None and server is not None:
        launch = replace(launch, length=server.max_model_len)
    case = Case(launch, version=version)
    target, drafter = case.launch.model, case.drafter
    return replace(
        case,
        target_files=_files(target.value) if target else Files(),
        drafter_files=_files(drafter.value) if drafter else Files(),
    )


def _files(model: Any) -> Files:
    """What the config.json in a model's folder says, if the model is a folder here."""
    try:
        text = (Path(str(model)) / "config.json").read_text(encoding="utf-8")
        return Files.of(json.loads(text))
    except (OSError, ValueError, RecursionError):
        return Files()


def _target(url: str) -> Target:
    (target,) = load(flags={"targets": [url]}, environ={}).targets
    return target


def _unreadable(error: Unreadable) -> Finding:
    return Finding(
        Severity.ERROR,
        Check.UNREADABLE,
        f"not understood: {error.what}",
        error.where,
        "nothing in it could be checked",
        "correct it, and ask again",
    )


def _printable(text: str) -> str:
    """What a file says must not steer the terminal, nor fail to print."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """As a plain list, or as one JSON object."""
    counts = {s: sum(f.severity is s for f in findings) for s in Severity}
    if as_json:
        counted = {f"{severity}s": count for severity, count in counts.items()}
        print(json.dumps({**counted, "findings": [asdict(f) for f in findings]}, indent=2))
        return
    for finding in findings:
        print(_printable(f"{finding.severity.upper()}  {finding.where}: {finding.what}"))
        print(_printable(f"    why:  {finding.why}"))
        print(_printable(f"    mend: {finding.mend}"), end="\n\n")
    told = [f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items() if n]
    print(", ".join(told) if told else "Nothing wrong was found.")
