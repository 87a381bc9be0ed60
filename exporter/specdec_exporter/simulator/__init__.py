"""A discrete-event model of a vLLM server with speculative decoding, for demos and tests.

It knows nothing of the exporter but the data model: what it serves must be parsed and judged like
a real server's page. `Simulator` runs in virtual time, `SimulatorServer` and `serve` against the
clock.
"""

from specdec_exporter.simulator.scenario import (
    SCENARIOS,
    Acceptance,
    Change,
    Restart,
    Scenario,
    StepTime,
    Traffic,
    statistics_world,
)
from specdec_exporter.simulator.server import SimulatorServer, serve
from specdec_exporter.simulator.simulator import Simulator, Truth

__all__ = [
    "SCENARIOS",
    "Acceptance",
    "Change",
    "Restart",
    "Scenario",
    "Simulator",
    "SimulatorServer",
    "StepTime",
    "Traffic",
    "Truth",
    "serve",
    "statistics_world",
]
