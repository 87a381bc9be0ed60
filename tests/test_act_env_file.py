"""k is exchanged in an environment file as a shell and systemd read it, and nothing else is."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specdec_exporter.act.env_file import read_k, with_k
from specdec_exporter.act.errors import Refused

NUMBER = "# The server's.\nHF_TOKEN=hunter2\nK=2\n\nPORT=8000\n"
QUOTED = 'export A=\'b c\'\n  export K="2"  \nZ="$HOME/it\'s"\n'
SINGLE = 'A=1\nK=\'{"method": "mtp", "num_speculative_tokens": 2}\'\nB=2'
DOUBLE = (
    'export K="{\\"num_speculative_tokens\\":2, \\"model\\":\\"a\\\\\\\\b\\"}"\nPATH=$PATH:/x\n'
)
LINES = 'K=\'{\n  "method": "mtp",\n\n  "num_speculative_tokens": 2}\'\nA=a\\\nb\n'
BARE = '; of systemd\nK={"method":"mtp","num_speculative_tokens":2}\nA=1\n'
NUMBERS = {"number": NUMBER, "quoted": QUOTED}
CONFIGS = {"single": SINGLE, "double": DOUBLE, "lines": LINES, "bare": BARE}
FILES = NUMBERS | CONFIGS
every_file = pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())


def in_a_shell(text: str) -> str:
    """The variable as a shell has it after sourcing the file."""
    shell = shutil.which("sh")
    assert shell is not None
    script = f'set -e\n{text}\nprintf %s "$K"'
    return subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True).stdout


@every_file
def test_only_the_digits_of_k_change(text: str) -> None:
    assert read_k(text, "K") == 2
    changed = with_k(text, "K", 7)
    assert read_k(changed, "K") == 7
    differing = [(a, b) for a, b in zip(text, changed, strict=True) if a != b]
    assert differing == [("2", "7")]


@pytest.mark.parametrize("text", [NUMBER, QUOTED, SINGLE, DOUBLE, LINES])
def test_a_shell_reads_the_new_k(text: str) -> None:
    before, after = in_a_shell(text), in_a_shell(with_k(text, "K", 7))
    if before == "2":
        assert after == "7"
        assert in_a_shell(with_k(text, "K", 0)) == "0"
    else:
        assert json.loads(after) == json.loads(before) | {"num_speculative_tokens": 7}
        assert in_a_shell(with_k(text, "K", 0)) == ""


@every_file
def test_what_was_taken_out_comes_back_byte_for_byte(text: str) -> None:
    off = with_k(text, "K", 0)
    assert read_k(off, "K") == 0
    assert with_k(off, "K", 0) == off
    assert with_k(off, "K", 2) == text
    assert with_k(off, "K", 3) == with_k(text, "K", 3)


@given(st.sampled_from(list(FILES.values())), st.lists(st.integers(0, 8), max_size=8))
def test_any_walk_of_k_ends_where_the_direct_way_ends(text: str, walk: list[int]) -> None:
    walked = text
    for k in walk:
        walked = with_k(walked, "K", k)
        assert read_k(walked, "K") == k
    assert with_k(walked, "K", 1) == with_k(text, "K", 1)


def test_the_variable_of_a_config_that_was_taken_out_is_empty_and_not_gone() -> None:
    off = with_k(SINGLE, "K", 0).splitlines()
    assert off == ["A=1", f"# specdec-exporter k=0: {SINGLE.splitlines()[1]}", "K=''", "B=2"]


def test_names_that_contain_the_variable_are_other_variables() -> None:
    text = "MAX_K=9\nK=2\nKK=3\n# K=4\n"
    assert with_k(text, "K", 1) == "MAX_K=9\nK=1\nKK=3\n# K=4\n"


NOT_UNDERSTOOD = {
    "": "K is not set in it",
    "A=1\n": "K is not set in it",
    "# K=2\n": "K is not set in it",
    "K=2\nK=3\n": "K is set 2 times",
    "K=2\nA=1 K=3\n": "K= stands in it more than once",
    "A='\nK=2\n'\n": "K is not set in it",
    "K = 2\n": "line 1: neither NAME=value nor a comment",
    "set -a\nK=2\n": "line 1: neither NAME=value",
    "A=1\nif true; then\nK=2\nfi\n": "line 2: neither NAME=value",
    "K='2\n": "line 1: neither NAME=value nor a comment, or a quote is open",
    "K=2\r\n": "carriage returns",
    "K=$N\n": r"line 1: K: \$ is in its value",
    'K="${N:-2}"\n': r"\$ is in its value",
    "K=`nproc`\n": "a backtick",
    "A=1\nK=2\\\n\n": "line 2: K: a line that goes on",
    "K='2'1\n": "several parts",
    "K=1'2'\n": "quotes or backslashes in the middle",
    "K=\\2\n": "quotes or backslashes in the middle",
    "K='a''b'\n": "several parts",
    'K="\\x32"\n': "shells and systemd read differently",
    "K=2 # two\n": "neither a number nor a speculative config",
    "K=two\n": "neither a number nor a speculative config as JSON: it is no JSON",
    "K=02\n": "it is no|expected a JSON object",
    "K=-1\n": "expected a JSON object",
    "K='--spec-tokens 2'\n": "neither a number",
    'K=\'{"method": "mtp"}\'\n': "num_speculative_tokens is not in it",
    'K=\'{"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": []}\'\n': "by batch size",
    'export K={"num_speculative_tokens":2}\n': "between single quotes",
    "# specdec-exporter k=0: K='{}'\nK=2\n": "K is set beside lines of",
}


@pytest.mark.parametrize(("text", "message"), NOT_UNDERSTOOD.items())
def test_what_is_not_understood_is_refused_with_one_line_that_says_what_was_seen(
    text: str, message: str
) -> None:
    with pytest.raises(Refused, match=message) as caught:
        with_k(text, "K", 1)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["K=\n", "K=''\n", 'export K=""\n'])
def test_an_empty_variable_is_k_0_and_gets_no_other(text: str) -> None:
    assert read_k(text, "K") == 0
    with pytest.raises(Refused, match="K is empty: there is no speculation to set k = 1 for"):
        with_k(text, "K", 1)


def test_a_change_that_would_reach_further_than_k_is_refused() -> None:
    words = "\nA='one\n# specdec-exporter k=0: two'\n"
    with pytest.raises(Refused, match="would change more than k"):
        with_k(with_k(SINGLE, "K", 0) + words.replace("A=", "C="), "K", 1)


def test_a_value_of_another_variable_is_never_shown() -> None:
    for text in ("TOKEN='hunter2\nK=2\n", "TOKEN=hunter2 `x`\nK=$TOKEN\n", "hunter2\nK=2\n"):
        with pytest.raises(Refused) as caught:
            read_k(text, "K")
        assert "hunter2" not in str(caught.value)


@given(st.text(alphabet="K=2 \n'\"\\#$Aexport{}:", max_size=40))
def test_any_text_is_changed_as_asked_or_refused(text: str) -> None:
    try:
        changed = with_k(text, "K", 7)
    except Refused:
        return
    assert read_k(changed, "K") == 7
