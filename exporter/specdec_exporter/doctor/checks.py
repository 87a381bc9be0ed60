"""What is wrong with a launch, whatever became of it: pure, one function for each check.

Each check names in its reason what vLLM 0.32 does, or what was measured where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specdec_exporter.act.errors import Refused
from specdec_exporter.act.vllm_config import read_k
from specdec_exporter.doctor.finding import Check, Finding, Severity
from specdec_exporter.doctor.gemma4 import ADVISED_K, FIRST_VERSION, Checkpoint, by_name
from specdec_exporter.doctor.launch import (
    CONFIG,
    SCHEDULE,
    SHORT,
    TOKENS,
    Fact,
    Given,
    Launch,
    whole_number,
)

_GONE = re.compile(
    r"speculative-.+|num-speculative-tokens|ngram-prompt-lookup-.+|spec-decoding-.+|"
    r"num-lookahead-slots"
)
_NO_DRAFTER = ("ngram", "[ngram]", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")


@dataclass(frozen=True, slots=True)
class Files:
    """What a checkpoint's config.json says; None is not known."""

    model_type: str | None = None
    max_length: int | None = None
    """Tokens."""
    hidden_size: int | None = None
    backbone_hidden_size: int | None = None
    """Of an assistant: the hidden size of the target that it was made for."""

    @classmethod
    def of(cls, config: Any) -> Files:
        """Of a config.json; the text model's part where there is one."""
        if not isinstance(config, dict):
            return cls()
        text = config.get("text_config")
        text = text if isinstance(text, dict) else config
        sizes = (
            text.get("max_position_embeddings"),
            text.get("hidden_size"),
            config.get("backbone_hidden_size"),
        )
        kind = config.get("model_type")
        return cls(
            kind if isinstance(kind, str) else None,
            *(size if isinstance(size, int) else None for size in sizes),
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A launch with what is known of its models and its vLLM."""

    launch: Launch
    target_files: Files = Files()
    drafter_files: Files = Files()
    version: str = ""
    """Of vLLM; empty if not known."""

    @property
    def target(self) -> Checkpoint | None:
        """The target, if it is a Gemma 4 by its name."""
        return by_name(self.launch.model.value) if self.launch.model else None

    @property
    def method(self) -> str | None:
        """The method as it is written."""
        found = self.launch.speculation.get("method")
        return None if found is None else str(found.value)

    @property
    def drafter(self) -> Fact | None:
        """The drafter's name, where it is a checkpoint of its own."""
        found = self.launch.speculation.get("model")
        named = found is not None and self.method not in _NO_DRAFTER
        return found if named and found and str(found.value) not in _NO_DRAFTER else None

    @property
    def assistant(self) -> Fact | None:
        """The drafter, if it is a Gemma 4 assistant by its files or its name."""
        if self.drafter is None:
            return None
        if (self.drafter_files.model_type or "").endswith("_assistant"):
            return self.drafter
        named = by_name(str(self.drafter.value))
        return self.drafter if named and named.assistant else None


def launch_findings(case: Case) -> list[Finding]:
    """Everything that is wrong with a launch."""
    return [finding for check in CHECKS for finding in check(case)]


def gone_flags(case: Case) -> Iterator[Finding]:
    """Flags of vLLM's first engine, which later ones refuse."""
    for one in case.launch.given:
        if _GONE.fullmatch(one.name) and one.name != CONFIG:
            yield Finding(
                Severity.ERROR,
                Check.FLAG_GONE,
                f"{one.name} is no longer a flag of vLLM, which will not start with it",
                one.where,
                "the flags of a draft model were replaced by one speculative config",
                "give spec-method, spec-model and spec-tokens instead",
            )


def given_twice(case: Case) -> Iterator[Finding]:
    """A short flag for what the speculative config has as well, or a config that is replaced."""
    configs = case.launch.all(CONFIG)
    for flag, key in SHORT.items():
        short = case.launch.last(flag)
        if short and configs and key in configs[-1].value:
            yield Finding(
                Severity.ERROR,
                Check.GIVEN_TWICE,
                f"{flag} stands beside {key} in {CONFIG}, and vLLM will not start",
                short.where,
                f"they exclude each other; the other one is in {configs[-1].value[key].where}",
                "keep one; spec-method, spec-model and spec-tokens in the --config file are best",
            )
        elif short and configs:
            yield Finding(
                Severity.WARNING,
                Check.GIVEN_TWICE,
                f"{flag} stands beside {CONFIG} ({configs[-1].where})",
                short.where,
                "vLLM 0.32 puts them together; the exporter does not rewrite k in such a file",
                f"move all of it into {CONFIG}, or into spec-method, spec-model and spec-tokens",
            )
    for replaced, winner in pairwise(configs):
        lost = sorted(replaced.value.keys() - winner.value.keys())
        if lost:
            yield Finding(
                Severity.ERROR if {"method", "model"} & set(lost) else Severity.WARNING,
                Check.CONFIG_REPLACED,
                f"{winner.where} replaces the {CONFIG} of {replaced.where}: "
                f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost",
                winner.where,
                "a speculative config is replaced whole and never merged",
                "write spec-method, spec-model and spec-tokens, of which each can be replaced "
                "alone",
            )


def config_not_read(case: Case) -> Iterator[Finding]:
    """A `--config` that vLLM passes over or refuses."""
    found = case.launch.last("config")
    if found and found.equals:
        yield Finding(
            Severity.ERROR,
            Check.CONFIG_NOT_READ,
            f"vLLM does not read --config={found.value}, and says nothing of it",
            found.where,
            "it looks for the word --config by itself",
            f"write --config {found.value}",
        )
    elif found and not str(found.value).endswith((".yaml", ".yml")):
        yield Finding(
            Severity.ERROR,
            Check.CONFIG_NOT_READ,
            f"vLLM does not read {found.value}, and will not start",
            found.where,
            "the file's name has to end in .yaml or .yml",
            "rename it",
        )


def k_out_of_reach(case: Case) -> Iterator[Finding]:
    """A k on the command line over one in the file, which the tuner then rewrites in vain."""
    for name in ("spec-tokens", CONFIG):
        in_file = [one for one in case.launch.all(name) if one.in_file]
        over = [one for one in case.launch.all(name) if not one.in_file]
        if in_file and over and (name != CONFIG or TOKENS in over[-1].value):
            yield Finding(
                Severity.WARNING,
                Check.K_OUTRANKED,
                f"k in {in_file[-1].where} has no effect",
                over[-1].where,
                "the command line outranks the --config file, also after k was tuned there",
                f"remove {name} from the command line",
            )


def k_missing(case: Case) -> Iterator[Finding]:
    """Speculation without a k."""
    launch = case.launch
    if launch.speculation and TOKENS not in launch.speculation and case.method != "suffix":
        where = launch.last(CONFIG) or launch.last("spec-method") or launch.last("spec-model")
        yield Finding(
            Severity.WARNING,
            Check.K_MISSING,
            "no k is written down",
            where.where if where else CONFIG,
            "vLLM takes the drafter's own (1 for Gemma 4), and does not start where it has none",
            "write spec-tokens; the exporter can tune what is written",
        )
    elif launch.speculation and launch.k is not None and launch.k < 1:
        yield Finding(
            Severity.ERROR,
            Check.K_MISSING,
            f"k is {launch.k}, and vLLM will not start",
            launch.speculation[TOKENS].where,
            "a speculative config has to speculate",
            "remove the speculation, or write 1 or more",
        )


def k_too_deep(case: Case) -> Iterator[Finding]:
    """A k above the one that is advised for the model."""
    target, k = case.target, case.launch.k
    if target and case.assistant and k and k > ADVISED_K[target.size]:
        yield Finding(
            Severity.WARNING,
            Check.K_TOO_DEEP,
            f"k = {k}; for Gemma 4 {target.size} at most {ADVISED_K[target.size]} is advised",
            case.launch.speculation[TOKENS].where,
            "each position is accepted less often than the one before it and costs as much: on an "
            "H200 k = 4 was 16 to 58 % slower than no speculation where k = 1 was faster",
            f"start with spec-tokens: {ADVISED_K[target.size]}, then measure with specdec-exporter "
            "bench sweep",
        )


def assistant_without_method(case: Case) -> Iterator[Finding]:
    """A Gemma 4 assistant without method mtp."""
    # Names like gemma4_mtp become mtp in vLLM.
    if not case.assistant or (case.method or "").endswith("mtp"):
        return
    known = _version(case.version)
    guessed = case.method in (None, "draft_model")
    recent = guessed and known is not None and known >= FIRST_VERSION
    written = case.launch.speculation.get("method")
    yield Finding(
        Severity.NOTE if recent else Severity.ERROR,
        Check.NO_MTP,
        f"{case.assistant.value} is a Gemma 4 assistant, and the method is "
        f"{case.method or 'not given'}",
        (written or case.assistant).where,
        f"vLLM {case.version} recognises it by its config.json; older ones do not"
        if recent
        else "vLLM before 0.21 takes it for an ordinary draft model, which fails or drafts "
        "nothing that is accepted; later ones recognise it by its config.json alone",
        'write spec-method: mtp (in a speculative config "method": "mtp")',
    )


def base_target(case: Case) -> Iterator[Finding]:
    """An assistant of an -it model with a base target."""
    target, model = case.target, case.launch.model
    if case.assistant and target and model and target.instructed is False:
        yield Finding(
            Severity.ERROR,
            Check.BASE_TARGET,
            f"the target {model.value} is a base model, and the assistant is for the -it model",
            model.where,
            "the assistant has learned what the -it model says: with a base model it was 38 % "
            "slower than no speculation",
            f"serve {model.value}-it, or remove the speculation",
        )


def other_size(case: Case) -> Iterator[Finding]:
    """An assistant of a target of another size."""
    if case.assistant is None or case.launch.model is None:
        return
    target, named = case.target, by_name(str(case.assistant.value))
    hidden, backbone = case.target_files.hidden_size, case.drafter_files.backbone_hidden_size
    by_files = hidden is not None and backbone is not None and hidden != backbone
    if target and named and target.size != named.size:
        difference = f"the assistant is for {named.size}, and the target is {target.size}"
    elif by_files:
        difference = (
            f"the assistant is for a target of hidden size {backbone}, and this has {hidden}"
        )
    else:
        return
    yield Finding(
        Severity.ERROR,
        Check.OTHER_SIZE,
        difference,
        case.assistant.where,
        "an assistant works on the hidden states of the one target that it was trained with",
        f"take {case.launch.model.value}-assistant"
        if target and target.instructed
        else "take the assistant that was published with the target",
    )


def drafter_too_short(case: Case) -> Iterator[Finding]:
    """A drafter that takes shorter sequences than the target."""
    written = case.launch.speculation.get("max_model_len")
    if written:
        drafter, where = whole_number(written.value), written.where
    else:
        drafter = case.drafter_files.max_length
        where = case.drafter.where if case.drafter else ""
    target = case.launch.max_model_len or case.target_files.max_length
    # Of EAGLE vLLM raises the positions to the target's, and leaves the longest sequence.
    if drafter and target and drafter < target:
        yield Finding(
            Severity.WARNING,
            Check.DRAFTER_TOO_SHORT,
            f"the drafter takes {drafter} tokens, and the target serves {target}",
            where,
            "when the longest sequence of a batch is beyond the drafter, vLLM's V1 runner counts "
            "empty drafts for the whole batch: beside one long request position 0 fell from 0.73 "
            "to 0.09",
            f"set max-model-len: {drafter}, or take max_model_len out of the speculative config"
            if written
            else f"set max-model-len: {drafter}",
        )


def no_statistics(case: Case) -> Iterator[Finding]:
    """A server that shows no metrics of its engine."""
    if found := case.launch.last("disable-log-stats"):
        yield Finding(
            Severity.ERROR,
            Check.NO_STATISTICS,
            "disable-log-stats takes every vllm: series off the metrics page",
            found.where,
            "nobody can see then whether speculation pays: not this exporter, not Prometheus",
            "remove it; to keep the log short, raise VLLM_LOG_STATS_INTERVAL",
        )


def schedule(case: Case) -> Iterator[Finding]:
    """A schedule of k by batch size that is not what will run."""
    fact = case.launch.speculation.get(SCHEDULE)
    if fact is None or fact.value is None:
        return
    bands = sorted(case.launch.schedule)
    if trouble := _not_a_schedule(bands):
        yield Finding(
            Severity.ERROR,
            Check.SCHEDULE_REFUSED,
            f"the schedule {trouble}, and vLLM will not start",
            fact.where,
            "it is a list of [first size, last size, k] that begins at size 1 and does not overlap",
            "write it like [[1, 16, 3], [17, 128, 1]]",
        )
        return
    k, engines = case.launch.k, case.launch.data_parallel_size
    if engines > 1:
        yield Finding(
            Severity.ERROR,
            Check.SCHEDULE_DATA_PARALLEL,
            f"with {engines} engines in data parallel the schedule is switched off; k is "
            f"{k or 'the same'} at every load",
            fact.where,
            "engines could choose different k and would wait for each other for ever, so vLLM "
            "drops the schedule with a warning",
            "remove the schedule, or run one server for each engine",
        )
    deepest = max(band[2] for band in bands)
    if k and deepest > k:
        yield Finding(
            Severity.ERROR,
            Check.SCHEDULE_CAPPED,
            f"the schedule asks for k = {deepest}, and {TOKENS} = {k} caps it",
            fact.where,
            "vLLM takes the smaller of the two at every batch size, and says nothing",
            f"set {TOKENS} to {deepest}, or the schedule to {k} at most",
        )
    if any(band[2] == 0 for band in bands):
        yield Finding(
            Severity.NOTE,
            Check.SCHEDULE_ZERO,
            "a band of the schedule has k = 0",
            fact.where,
            "the drafter runs in it all the same, so it costs more than no speculation; it is no "
            "baseline either",
            "measure against a server without speculation",
        )


CHECKS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    gone_flags,
    given_twice,
    config_not_read,
    k_out_of_reach,
    k_missing,
    assistant_without_method,
    base_target,
    other_size,
    k_too_deep,
    drafter_too_short,
    no_statistics,
    schedule,
)
"""All checks of a launch, in the order in which they are told."""


def tunable(text: str, name: str, given: tuple[Given, ...]) -> list[Finding]:
    """Whether the exporter could rewrite k in a `--config` file, where k stands in it.

    Args:
        text: the file.
        name: of the file, for the place.
        given: `from_config` of it.
    """
    if not any(one.name in (CONFIG, *SHORT) for one in given):
        return []
    try:
        read_k(text)
    except Refused as refused:
        return [
            Finding(
                Severity.NOTE,
                Check.NOT_TUNABLE,
                "the exporter cannot change k in this file",
                name,
                str(refused),
                "nothing to do, unless you want k tuned; docs/acting.md has the forms",
            )
        ]
    return []


def _not_a_schedule(bands: list[tuple[int, int, int]]) -> str:
    """What vLLM 0.32 would refuse a schedule for; empty if nothing."""
    if not bands:
        return "is not a list of three numbers each"
    if bands[0][0] != 1:
        return f"begins at size {bands[0][0]}"
    last = 0
    for first, end, k in bands:
        if first <= last:
            return f"has size {first} in two bands"
        if end < first or k < 0:
            return f"has a band [{first}, {end}, {k}]"
        last = end
    return ""


def _version(text: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
