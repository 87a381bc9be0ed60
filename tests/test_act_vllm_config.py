"""k is exchanged in vLLM's YAML and nothing else is; what is not understood is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from specdec_exporter.act.errors import Refused
from specdec_exporter.act.vllm_config import read_k, with_k

KEYS = """\
# Served since spring.
model: google/gemma-4-E4B-it   # the target

spec-method: mtp
spec_tokens: 2  # tuned by hand
'max-num-seqs': 0o20
spec-model: "google/gemma-4-E4B-it-assistant"
allowed-origins: ["*"]
"""
MAPPING = """\
---
speculative-config:
  method: ngram   # no drafter to load
  # Long prompts repeat themselves.

  num_speculative_tokens: 2
  prompt_lookup_max: 4

# The rest.
api-key: 'yes'
lora-modules:
- a=b
...
"""
JSON = """\
speculative_config: '{"method": "mtp",  "model": "it''s", "num_speculative_tokens":2}'
port: 8000
"""
ESCAPED = (
    'port: 1\nspeculative-config: "{\\"num_speculative_tokens\\": 2, \\"method\\": \\"mtp\\"}"'
)
BLOCK = """\
speculative-config: |-
  {
    "num_speculative_tokens": 2,
    "method": "mtp"
  }

# Nothing else.
"""
FLOW = "a: {b: [1, 2]}\nspeculative-config: {method: suffix, num-speculative-tokens: 2}\nc: 1\n"
CRLF = JSON.replace("\n", "\r\n")
FILES = {
    "keys": KEYS,
    "mapping": MAPPING,
    "json": JSON,
    "escaped": ESCAPED,
    "block": BLOCK,
    "flow": FLOW,
    "crlf": CRLF,
    "alone": "spec-method: mtp\nspec-tokens: 2\n",
    "alone, no line break": "spec-tokens: 2\nspec-method: mtp",
}
every_file = pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())


def loaded(text: str) -> dict[str, object]:
    document = YAML(typ="safe", pure=True).load(text)
    assert isinstance(document, dict)
    return document


@every_file
def test_only_the_digits_of_k_change(text: str) -> None:
    assert read_k(text) == 2
    changed = with_k(text, 13)
    assert read_k(changed) == 13
    assert len(changed) == len(text) + 1
    assert [(a, b) for a, b in zip(text.splitlines(), changed.splitlines(), strict=True) if a != b]
    at = next(i for i, (a, b) in enumerate(zip(text, changed, strict=False)) if a != b)
    assert changed[:at] + "2" + changed[at + 2 :] == text


@every_file
def test_k_0_takes_speculation_out_and_leaves_every_other_setting(text: str) -> None:
    off = with_k(text, 0)
    assert read_k(off) == 0
    others = {key: value for key, value in loaded(text).items() if not key.startswith("spec")}
    assert loaded(off) == others


@every_file
def test_what_was_taken_out_comes_back_byte_for_byte(text: str) -> None:
    assert with_k(with_k(text, 0), 2) == text
    assert with_k(with_k(text, 0), 3) == with_k(text, 3)


@settings(max_examples=30)
@given(st.sampled_from(list(FILES.values())), st.lists(st.integers(0, 8), max_size=8))
def test_any_walk_of_k_ends_where_the_direct_way_ends(text: str, walk: list[int]) -> None:
    walked = text
    for k in walk:
        walked = with_k(walked, k)
        assert read_k(walked) == k
    assert with_k(walked, 1) == with_k(text, 1)


@every_file
def test_the_k_that_is_there_already_changes_nothing(text: str) -> None:
    assert with_k(text, 2) == text
    off = with_k(text, 0)
    assert with_k(off, 0) == off


def test_an_editor_may_have_taken_the_blanks_from_the_ends_of_the_lines() -> None:
    off = "\n".join(line.rstrip() for line in with_k(MAPPING, 0).split("\n"))
    assert with_k(off, 2) == MAPPING


def test_a_comment_behind_what_was_taken_out_stays_where_it_was() -> None:
    off = with_k(MAPPING, 0).splitlines()
    assert off[0] == "---"
    assert off[1] == "# specdec-exporter k=0: speculative-config:"
    assert off[6:] == MAPPING.splitlines()[6:][1:] or off[7:] == MAPPING.splitlines()[7:]


def test_a_file_without_speculation_has_k_0_and_gets_none() -> None:
    assert read_k("model: m\n") == 0
    with pytest.raises(Refused, match="there is no speculation in it to set k = 2 for"):
        with_k("model: m\n", 2)


NOT_UNDERSTOOD = {
    "": "no settings",
    "# nothing\n": "no settings",
    "- a\n- b\n": "line 1: expected settings",
    "{spec-tokens: 2}\n": "line 1: settings between braces",
    "a: [\n": "line 2",
    "a: \x07\n": "not YAML",
    "a: 1\n b: 2\n": "line 2",
    "\tspec-tokens: 2\n": "line 1",
    "a: &x 1\nspec-tokens: 2\n": r"line 1: an anchor or alias",
    "x: &x {a: 1}\nspec-tokens: 2\ny: *x\n": r"line 1: an anchor or alias",
    "a: {<<: {b: 1}}\nspec-tokens: 2\n": "line 1: a merge key",
    "spec-tokens: !!int 2\n": r"line 1: a tag",
    "a: !include other.yaml\nspec-tokens: 2\n": r"line 1: a tag",
    "spec-tokens: 2\n---\nspec-tokens: 3\n": "line 2: a second YAML document",
    "spec-tokens: 2\nspec-tokens: 3\n": "line 2: 'spec-tokens' stands there twice",
    "a: {b: 1, b: 2}\nspec-tokens: 2\n": "line 1: 'b' stands there twice",
    "spec-tokens: 2\nspec_tokens: 3\n": "line 2: spec_tokens stands there twice in two spellings",
    "? [a]\n: 1\nspec-tokens: 2\n": "line 1: a key that is no word",
    "spec-tokens: two\n": "spec-tokens is 'two'; expected a whole number",
    "spec-tokens: '2'\n": "expected a whole number",
    "spec-tokens: 2.0\n": "expected a whole number",
    "spec-tokens: 0\n": "expected a whole number",
    "spec-tokens: 010\n": "expected a whole number",
    "spec-tokens: -1\n": "expected a whole number",
    "spec-tokens:\n": "expected a whole number",
    "spec-tokens: [2]\n": "spec-tokens is a list or mapping",
    "spec-method: mtp\n": "spec-tokens is not in it; write down the k",
    "speculative-model: m\n": "line 1: 'speculative-model' is not understood",
    "speculative-config.num_speculative_tokens: 2\n": "is not understood",
    "num-speculative-tokens: 2\n": "is not understood",
    "spec-tokens: 2\nspeculative-config: {method: mtp}\n": "exclude each other",
    "spec-model: m\nspeculative-config: {num_speculative_tokens: 2}\n": "exclude each other",
    "speculative-config:\n": "line 1: speculative-config: it is empty",
    "speculative-config: ''\n": "it is empty",
    "speculative-config: [1]\n": "a list",
    "speculative-config: mtp\n": "it is no JSON",
    "speculative-config: '[1]'\n": "expected a JSON object",
    'speculative-config: \'{"method": "mtp"}\'\n': "num_speculative_tokens is not in it",
    "speculative-config: {method: mtp}\n": "num_speculative_tokens is not in it",
    "speculative-config: {num_speculative_tokens: '2'}\n": "expected a whole number",
    "speculative-config: {num_speculative_tokens: 2, num-speculative-tokens: 2}\n": "two spellings",
    'speculative-config: \'{"num_speculative_tokens": 2, "num_speculative_tokens": 3}\'\n': "twice",
    'speculative-config: \'{"num_speculative_tokens": 2, "num-speculative-tokens": 3}\'\n': "two spellings",
    "speculative-config: '{\"num_speculative_tokens\": 2.0}'\n": "as a whole number",
    "speculative-config: '{\"num_speculative_tokens\": true}'\n": "as a whole number",
    "speculative-config: '{\"num_speculative_tokens\": 2e0}'\n": "as a whole number",
    'speculative-config: \'{"num_speculative_tokens": 2, "x": {"num_speculative_tokens": 3}}\'\n': "once",
    "speculative-config: '{\"num\\u005fspeculative_tokens\": 2}'\n": "once",
    "speculative-config:\n  num_speculative_tokens: 4\n  num_speculative_tokens_per_batch_size: [[1, 16, 3]]\n": "changes k by batch size itself",
    'speculative-config: \'{"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 16, 3]]}\'\n': "changes k by batch size itself",
    "spec-method: mtp\nspec-tokens: 2\n# specdec-exporter k=0: spec-tokens: 3\n": "beside lines of",
    f"a: {'[' * 60}\n": "line 1: nested too deeply",
}


@pytest.mark.parametrize(("text", "message"), NOT_UNDERSTOOD.items())
def test_what_is_not_understood_is_refused_with_one_line_that_says_what_was_seen(
    text: str, message: str
) -> None:
    for change in (read_k, lambda text: with_k(text, 1)):
        with pytest.raises(Refused, match=message) as caught:
            change(text)
        assert len(str(caught.value).splitlines()) == 1


def test_speculation_whose_drafter_is_named_elsewhere_is_not_taken_out() -> None:
    assert with_k("model: m\nspec-tokens: 2\n", 1) == "model: m\nspec-tokens: 1\n"
    with pytest.raises(Refused, match="spec-method and spec-model are not in it"):
        with_k("model: m\nspec-tokens: 2\n", 0)


def test_lines_that_were_taken_out_and_broken_since_are_not_put_back() -> None:
    off = with_k(KEYS, 0).replace("spec_tokens: 2", "spec_tokens: some")
    assert read_k(off) == 0
    with pytest.raises(Refused, match="expected a whole number"):
        with_k(off, 1)


def test_a_change_that_would_reach_further_than_k_is_refused() -> None:
    words = 'a: "one\n# specdec-exporter k=0: two\n  three"\n'
    with pytest.raises(Refused, match="would change more than k"):
        with_k(with_k(KEYS, 0) + words, 1)


def test_a_value_of_somebody_elses_setting_is_never_shown() -> None:
    for text in ("api-key: hunter2\napi-key: hunter2\n", "api-key: !x hunter2\n", "a: [hunter2\n"):
        with pytest.raises(Refused) as caught:
            read_k(text)
        assert "hunter2" not in str(caught.value)


@given(st.text(alphabet="spec-tokens: 2\n#'\"{}[]|&*!<,", max_size=60))
def test_any_text_is_changed_as_asked_or_refused(text: str) -> None:
    try:
        changed = with_k(text, 7)
    except Refused:
        return
    assert read_k(changed) == 7
