from __future__ import annotations

from dataclasses import replace

import pytest
from specdec_exporter.demo import baseline_of
from specdec_exporter.simulator import SCENARIOS, Simulator

HEALTHY = SCENARIOS["healthy"]


@pytest.mark.parametrize("clients", [1, 4, 16, 32])
def test_the_demos_baseline_is_what_its_server_does_without_speculation(clients: int) -> None:
    traffic = replace(HEALTHY.traffic, requests_per_second=0.0, clients=clients)
    simulator = Simulator(replace(HEALTHY, k=0, traffic=traffic), seed=1)
    simulator.advance(60.0)
    before = simulator.truth()
    simulator.advance(360.0)
    seen = simulator.truth() - before
    concurrency = seen.decode_seconds / 300.0
    expected = baseline_of(HEALTHY, taken_at=0.0).tpot_seconds(concurrency)
    assert seen.tpot_seconds == pytest.approx(expected, rel=0.005)
