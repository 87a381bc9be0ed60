"""What doctor says of a real vLLM: of its log, of its page, and of what it was started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from specdec_exporter.doctor.finding import Check, Severity
from specdec_exporter.doctor.run import Inputs, examine

from tests.real.conftest import Start
from tests.real.vllm_bed import MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SETTINGS = """\
model: {models}/gemma4-tiny
max-model-len: 1024
spec-model: {models}/gemma4-tiny-assistant
spec-tokens: {k}
"""


def test_a_real_server_is_as_its_settings_say_and_another_k_is_seen_in_log_and_page(
    start: Start, tmp_path: Path
) -> None:
    good, other = tmp_path / "good.yaml", tmp_path / "other.yaml"
    good.write_text(SETTINGS.format(models=MODELS, k=2) + "spec-method: mtp\n")
    other.write_text(SETTINGS.format(models=MODELS, k=3))
    speculation = {"model": "gemma4-tiny-assistant", "num_speculative_tokens": 2}
    with start("gemma4-tiny", speculation) as server:
        assert examine(Inputs(log=server.log, url=server.url, config=good)) == ()
        # The log's own arguments have no method, and its version is one that finds out by itself.
        alone = examine(Inputs(log=server.log, url=server.url))
        told = examine(Inputs(log=server.log, url=server.url, config=other))
    assert [(f.severity, f.check) for f in alone] == [(Severity.NOTE, Check.NO_MTP)]
    assert [(f.severity, f.check) for f in told] == [
        (Severity.ERROR, Check.OTHER_K),
        (Severity.ERROR, Check.OTHER_K),
        (Severity.NOTE, Check.NO_MTP),
    ]
    assert told[0].where.startswith(str(server.log))
    assert told[1].where == f"{server.url}/metrics"
