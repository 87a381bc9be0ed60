"""What a vLLM says of its speculation while it starts.

Read by the words of vLLM 0.32's own log lines (`vllm.v1.engine.core`, `vllm.entrypoints`,
`vllm.config`), which earlier versions have in much the same form. Colours, prefixes and dates do
not matter. Text in, values out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from specdec_exporter.doctor.finding import Check, Finding, Severity
from specdec_exporter.doctor.gemma4 import by_name
from specdec_exporter.doctor.launch import (
    CONFIG,
    TOKENS,
    Fact,
    Given,
    Launch,
    Unreadable,
    from_arguments,
)

_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
_ENGINE = re.compile(
    r"Initializing a V1 LLM engine \(v(?P<version>[^)]*)\) with config: "
    r"model='(?P<model>[^']*)', speculative_config="
    r"(?:None|SpeculativeConfig\(method='(?P<method>[^']*)', model=(?:None|'(?P<drafter>[^']*)'), "
    r"num_spec_tokens=(?P<k>\d{1,18})\))"
)
_LENGTH = re.compile(r"\bmax_seq_len=(\d{1,18})")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class StartUp:
    """One start of a server, as its log tells it."""

    launch: Launch | None
    """What it was started with; None where the log does not say."""
    version: str = ""
    engine: bool = False
    """Whether an engine told its configuration; what follows is known only then."""
    where: str = ""
    method: str = ""
    drafter: str = ""
    k: int = 0


def read_log(text: str, name: str) -> StartUp:
    """The last start that a log tells of.

    Args:
        text: the log.
        name: of the file, for the places.
    """
    given: tuple[Given, ...] = ()
    start = StartUp(None)
    for where, line in _lines(text, name):
        if found := _ARGUMENTS.search(line):
            try:
                given = from_arguments(ast.literal_eval(found[1]), where)
            except (
                ValueError,
                SyntaxError,
                TypeError,
                AttributeError,
                MemoryError,
                RecursionError,
                Unreadable,
            ):
                # Values that print as no literal, or a line cut and glued by whoever kept the log;
                # the engine's own line has what matters most.
                given = ()
            start = StartUp(Launch(given) if given else None)
        elif found := _ENGINE.search(line):
            longest = _LENGTH.search(line)
            length = int(longest[1]) if longest else None
            start = StartUp(
                launch=Launch(given or _by_engine(found, where), length),
                version=found["version"],
                engine=True,
                where=where,
                method=found["method"] or "",
                drafter=found["drafter"] or "",
                k=int(found["k"] or 0),
            )
    return start


def _by_engine(found: re.Match[str], where: str) -> tuple[Given, ...]:
    names = {"method": "method", "drafter": "model", "k": TOKENS}
    config = {key: Fact(found[group], where) for group, key in names.items() if found[group]}
    speculation = (Given(CONFIG, config, where),) if config else ()
    return (Given("model", found["model"], where), *speculation)


def log_findings(text: str, name: str, start: StartUp, configured: Launch | None) -> list[Finding]:
    """What the log shows to be wrong.

    Args:
        text: the log.
        name: of the file, for the places.
        start: `read_log` of it.
        configured: what the server should have been started with, where that is known besides.
    """
    findings = list(_of_lines(text, name))
    if start.engine:
        findings += _of_engine(start, configured or start.launch)
    elif not findings and start.launch is None:
        findings.append(_no_start(text, name))
    return findings


def _no_start(text: str, name: str) -> Finding:
    # UTF-16, as some shells redirect: read as anything else, every other character is none.
    why, mend = (
        ("it is not UTF-8 text", "save it as UTF-8")
        if "\0" in text
        else (
            "what a server was started with is in its first lines",
            "give the log from the start of vllm serve on",
        )
    )
    what = "the log tells of no start of vLLM" if text.strip() else "the log is empty"
    return Finding(Severity.WARNING, Check.NO_START, what, name, why, mend)


@dataclass(frozen=True, slots=True)
class _Saying:
    """What a line of the log stands for."""

    words: re.Pattern[str]
    check: Check
    what: str
    why: str
    mend: str


_SAYINGS = (
    _Saying(
        re.compile(r"unrecognized arguments:.*?(--(?:num-)?spec(?:ulative)?-[\w-]+)"),
        Check.FLAG_GONE,
        "vLLM does not know {0}, and has not started",
        "the flags of a draft model were replaced by one speculative config",
        "give --spec-method, --spec-model and --spec-tokens instead",
    ),
    _Saying(
        re.compile(r"(--spec-\w+) and --speculative-config\['(\w+)'\] are mutually exclusive"),
        Check.GIVEN_TWICE,
        "{0} and {1} of the speculative config exclude each other, and vLLM has not started",
        "vLLM does not choose between them",
        "keep one; spec-tokens in the --config file is the one that can be tuned",
    ),
    _Saying(
        re.compile(
            r"Dynamic speculative decoding is not supported with data parallelism.*static "
            r"num_speculative_tokens=(\d+)"
        ),
        Check.SCHEDULE_DATA_PARALLEL,
        "the schedule by batch size was switched off; k is {0} at every load",
        "engines in data parallel could choose different k and would wait for each other for ever",
        "remove the schedule, or run one server for each engine",
    ),
    _Saying(
        re.compile(r"NotImplementedError: Speculative Decoding with draft models .*multimodal"),
        Check.TOO_OLD,
        "this vLLM cannot draft for a multimodal target, and has not started",
        "it takes the drafter for an ordinary draft model: Gemma 4's assistants are known from "
        "0.21 on",
        "run vLLM 0.21 or later, with method mtp",
    ),
    _Saying(
        re.compile(r"NotImplementedError: Unsupported speculative method: '(\w+)'"),
        Check.TOO_OLD,
        "this vLLM cannot use {0} with this drafter, and has not started",
        "the drafter's config.json names a model type that this vLLM does not know",
        "run a later vLLM, and check that the drafter is the one for the target",
    ),
)


def _of_lines(text: str, name: str) -> Iterator[Finding]:
    told = set()
    for where, line in _lines(text, name):
        for saying in _SAYINGS:
            if (found := saying.words.search(line)) and saying not in told:
                told.add(saying)
                what = saying.what.format(*found.groups())
                yield Finding(Severity.ERROR, saying.check, what, where, saying.why, saying.mend)


def _of_engine(start: StartUp, configured: Launch | None) -> Iterator[Finding]:
    drafter = by_name(start.drafter)
    if start.method == "draft_model" and drafter and drafter.assistant:
        yield Finding(
            Severity.ERROR,
            Check.TOO_OLD,
            f"vLLM {start.version} runs the assistant {start.drafter} by method draft_model",
            start.where,
            "an assistant reads the target's own layers; as an ordinary draft model it drafts "
            "nothing that is accepted, or the start fails",
            "run vLLM 0.21 or later, with method mtp",
        )
    if configured is None:
        return
    wanted = configured.k
    fact = configured.speculation.get(TOKENS, Fact(wanted, "the settings"))
    if configured.speculation and not start.method:
        yield Finding(
            Severity.ERROR,
            Check.OFF,
            "speculation is configured, and this start ran without",
            start.where,
            "the engine logs speculative_config=None",
            f"make sure that the server is started with what {fact.where} says",
        )
    elif wanted is not None and wanted != start.k:
        yield Finding(
            Severity.ERROR,
            Check.OTHER_K,
            f"k is {wanted} in {fact.where}, and the engine started with {start.k}",
            start.where,
            "the command line outranks the file, and k changes at a start only",
            "restart the server, and remove spec-tokens and speculative-config from the command "
            "line",
        )


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_COLOUR.sub("", text).splitlines(), 1):
        yield f"{name}:{number}", line
