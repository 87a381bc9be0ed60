"""k in an environment file, as a shell sources it or systemd reads it: text in, text out.

One variable holds either the number (`K=2`) or vLLM's speculative config (`SPEC='{"method": …}'`).
Only the digits of k are exchanged. With k = 0 the number becomes 0, which the command that starts
the server has to understand; a config becomes a comment, and the variable is left empty, which
vLLM's `--speculative-config` takes for none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdec_exporter.act.errors import Refused
from specdec_exporter.act.speculative_config import find_k

OUT = "# specdec-exporter k=0: "
"""What stands before each line that was taken out."""
_OUT_LINES = re.compile("^# specdec-exporter k=0:( |$)", re.M)

# The alternatives begin with different characters, so there is one way to read a line.
_WORD = r"""(?:[^'"\\\n]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")*"""
_LINE = re.compile(
    rf"[ \t]*(?:[#;][^\n]*|(?:(?P<export>export[ \t]+)?(?P<name>[A-Za-z_]\w*)=(?P<value>{_WORD}))?)"
    r"(?:\n|\Z)",
    re.S | re.A,
)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,2}")


def read_k(text: str, variable: str) -> int:
    """The k that the variable stands for; 0 is no speculation.

    Raises:
        Refused: the file is not understood.
    """
    return _read(text, variable).k


def with_k(text: str, variable: str, k: int) -> str:
    """The same file with another k.

    Raises:
        Refused: the file is not understood, or there is no speculation to set a k for.
    """
    before = _read(text, variable)
    if k == before.k:
        return text
    if k == 0 and before.drafter is not None:
        new = _taken_out(text, before)
    else:
        put_back = text if before.digits else _put_back(text, before)
        digits = _read(put_back, variable).digits
        if digits is None:
            raise Refused(f"{variable} is empty: there is no speculation to set k = {k} for")
        new = f"{put_back[: digits[0]]}{k}{put_back[digits[1] :]}"
    after = _read(new, variable)
    same_drafter = 0 in (k, before.k) or after.drafter == before.drafter
    if after.k != k or after.others != before.others or not same_drafter:
        raise Refused("changing k in it would change more than k; write it more plainly")
    return new


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What the variable is set to, and where."""

    k: int
    digits: tuple[int, int] | None
    """Where k stands in the text; None where the variable is empty."""
    drafter: dict[str, Any] | None
    """The config but for its k; None where there is only a number."""
    start: int
    end: int
    """Of the assignment, the line break left out."""
    set_empty: str
    """The assignment of nothing, in the same form."""
    others: tuple[tuple[str, str], ...]
    """All other variables, as they are written."""


def _read(text: str, variable: str) -> _Assignment:
    if "\r" in text:
        raise Refused("lines end in carriage returns, which would be part of the values")
    assignments = list(_assignments(text))
    found = [a for a in assignments if a["name"] == variable]
    if len(found) != 1:
        seen = "is not set in it" if not found else f"is set {len(found)} times in it"
        raise Refused(f"{variable} {seen}; expected one line {variable}=…")
    (line,) = found
    if len(re.findall(rf"(?<!\w){variable}=", _code(text))) > 1:
        raise Refused(f"{variable}= stands in it more than once; keep one line")
    where = f"line {text.count(chr(10), 0, line.start('value')) + 1}: {variable}"
    try:
        k, digits, drafter = _value(text, line)
    except Refused as error:
        raise Refused(f"{where}: {error}") from error
    if digits and _OUT_LINES.search(text):
        raise Refused(
            f"{where} is set beside lines of {OUT.strip()!r}, which would be put back; "
            "remove those lines, or empty it"
        )
    return _Assignment(
        k=k,
        digits=digits,
        drafter=drafter,
        start=text.rfind("\n", 0, line.start("name")) + 1,
        end=line.end("value"),
        set_empty=f"{line['export'] or ''}{variable}=''",
        others=tuple((a["name"], a["value"]) for a in assignments if a["name"] != variable),
    )


def _assignments(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        line = _LINE.match(text, at)
        if line is None:
            number = text.count("\n", 0, at) + 1
            raise Refused(f"line {number}: neither NAME=value nor a comment, or a quote is open")
        if line["name"]:
            yield line
        at = line.end()


def _code(text: str) -> str:
    """The text without its whole-line comments."""
    return "\n".join(x for x in text.split("\n") if not x.lstrip(" \t").startswith(("#", ";")))


def _value(
    text: str, line: re.Match[str]
) -> tuple[int, tuple[int, int] | None, dict[str, Any] | None]:
    """k, where it stands, and the drafter."""
    written = line["value"].rstrip(" \t")
    start, end = line.start("value"), line.start("value") + len(written)
    for sign, what in (("$", "$"), ("`", "a backtick"), ("\\\n", "a line that goes on")):
        if sign in written:
            raise Refused(f"{what} is in its value; write the value out")
    quote = written[:1] if written[:1] in ("'", '"') else ""
    value = written
    if quote:
        value = written[1:-1]
        if len(written) < 2 or written[-1] != quote or quote in value.replace('\\"', ""):
            raise Refused("its value is put together of several parts; write it between one pair")
        if quote == '"':
            value = _unescaped(value)
    elif "\\" in value or "'" in value:
        raise Refused("its value has quotes or backslashes in the middle; put it between quotes")
    if not value:
        return 0, None, None
    if _NUMBER.fullmatch(value):
        return int(value), (start + len(quote), end - len(quote)), None
    if not quote and line["export"]:
        raise Refused("neither a number nor JSON between single quotes")
    try:
        first, last, drafter = find_k(text, start, end, value)
    except Refused as error:
        raise Refused(f"neither a number nor a speculative config as JSON: {error}") from error
    return int(text[first:last]), (first, last), drafter


def _unescaped(value: str) -> str:
    if re.search(r'\\[^"\\]', value.replace("\\\\", "")):
        raise Refused("there is a backslash in its value that shells and systemd read differently")
    return re.sub(r'\\(["\\])', r"\1", value)


def _taken_out(text: str, line: _Assignment) -> str:
    kept = re.sub("^", OUT, text[line.start : line.end], flags=re.M)
    return f"{text[: line.start]}{kept}\n{line.set_empty}{text[line.end :]}"


def _put_back(text: str, line: _Assignment) -> str:
    """With the lines back that were taken out, and without the one that sets nothing."""
    before = text[: line.start]
    if not _OUT_LINES.search(text):
        return text
    # The last line break before it came with it.
    return _OUT_LINES.sub("", before.removesuffix("\n") + text[line.end :])
