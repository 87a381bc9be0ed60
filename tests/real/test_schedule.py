"""The batch-size schedule that is recommended is one that vLLM itself takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec_exporter.cost import Acceptance, CostModel, Sample
from specdec_exporter.recommend import Recorded, read_recordings, recommend
from specdec_exporter.thresholds import Thresholds
from specdec_exporter.tuner_settings import TunerSettings

from tests.real.vllm_bed import ask

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

H200 = Path(__file__).parents[1] / "data" / "vllm-0.24-h200"
LARGEST_BATCH = 256
ASK = f"""
from vllm.config import SpeculativeConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
answers = []
for given in asked:
    try:
        config = SpeculativeConfig(method="ngram", prompt_lookup_max=4, **given)
        answers.append(build_dynamic_sd_schedule_lookup(
            config.num_speculative_tokens_per_batch_size, {LARGEST_BATCH},
            config.num_speculative_tokens))
    except ValueError as error:
        answers.append(str(error))
"""
"""For each configuration the k of every batch size, from 0 on, or why vLLM refuses it."""


def banded() -> Recorded:
    """Deep drafts are all but free with few requests, and dear with many."""
    costs = CostModel()
    for k, few, many in ((0, 1.0, 2.0), (1, 1.1, 2.2), (2, 1.15, 6.0), (3, 1.2, 9.0)):
        for c, step in ((1.0, few), (100.0, many)):
            costs = costs.observe(Sample(k, float(k), 60.0, c, step))
    acceptance = Acceptance((0.8, 0.68, 0.58), (0.01,) * 3, 1e6)
    return Recorded("m", costs, acceptance, ((1.0, 1.0), (100.0, 1.0)), 0.0)


def test_vllm_reads_every_recommended_schedule_as_it_is_meant_and_refuses_a_wrong_one(
    venv: Path,
) -> None:
    h200 = read_recordings(
        [H200 / f"series_{name}.jsonl" for name in ("k0", "k1", "k2", "k4")],
        variance_inflation=13.0,
        metric_prefix=lambda _: "",
    )
    settings = TunerSettings(steps_above_measured=0)
    recommendations = [recommend(one, settings, Thresholds()) for one in (h200, banded())]
    assert len(recommendations[1].schedule) > 1
    wrong = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[2, 16, 3]]}
    configs = [*(one.speculative_config for one in recommendations), wrong]
    *answers, refused = ask(venv, ASK, configs)
    for recommendation, answer in zip(recommendations, answers, strict=True):
        meant = {
            size: k for first, last, k in recommendation.schedule for size in range(first, last + 1)
        }
        assert {size: answer[size] for size in meant} == meant
        assert set(answer[max(meant) :]) == {recommendation.schedule[-1][2]}
    assert "must start at 1" in refused
