"""Pages and counters for tests: small ones written out, and the recorded ones by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec_exporter.model import Counters, EngineSample, Snapshot

DATA = Path(__file__).parent / "data"
H200 = DATA / "vllm-0.24-h200"
CPU = DATA / "vllm-0.32-cpu"
PAGES = sorted(DATA.glob("*/*.prom"))
SERIES = sorted(DATA.glob("*/series_*.jsonl"))


def recording(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counters(
    drafts: float = 100,
    per_position: tuple[float, ...] = (47, 24),
    *,
    steps: float | None = None,
    first: float = 10,
    seconds: float = 1.0,
    draft_tokens: float | None = None,
) -> Counters:
    """Counters that agree with each other: every step has a draft and delivers what it accepts."""
    accepted = sum(per_position)
    steps = drafts if steps is None else steps
    return Counters(
        drafts=drafts,
        draft_tokens=drafts * len(per_position) if draft_tokens is None else draft_tokens,
        accepted_tokens=accepted,
        accepted_per_position=per_position,
        generation_tokens=first + steps + accepted,
        first_tokens=first,
        decode_seconds=seconds,
        decode_steps=steps,
    )


def snapshot(
    t: float, *engines: Counters, start: float | None = None, model_name: str = "m"
) -> Snapshot:
    return Snapshot(
        t=t,
        engines=tuple(
            EngineSample(model_name=model_name, engine=str(i), counters=c)
            for i, c in enumerate(engines)
        ),
        process_start_time=start,
    )


def lines(
    counted: Counters, engine: str = "0", model_name: str = "m", prefix: str = ""
) -> Iterator[str]:
    """The counters as lines of vLLM's page."""
    labels = f'engine="{engine}",model_name="{model_name}"'
    for name, value in (
        ("spec_decode_num_drafts_total", counted.drafts),
        ("spec_decode_num_draft_tokens_total", counted.draft_tokens),
        ("spec_decode_num_accepted_tokens_total", counted.accepted_tokens),
        ("generation_tokens_total", counted.generation_tokens),
        ("time_to_first_token_seconds_count", counted.first_tokens),
        ("inter_token_latency_seconds_sum", counted.decode_seconds),
        ("inter_token_latency_seconds_count", counted.decode_steps),
    ):
        if value is not None:
            yield f"{prefix}vllm:{name}{{{labels}}} {value}"
    for i, value in enumerate(counted.accepted_per_position):
        yield (
            f"{prefix}vllm:spec_decode_num_accepted_tokens_per_pos_total"
            f'{{{labels},position="{i}"}} {value}'
        )


def page(*engines: Counters, prefix: str = "") -> bytes:
    return "".join(
        f"{line}\n" for i, c in enumerate(engines) for line in lines(c, str(i), prefix=prefix)
    ).encode()
