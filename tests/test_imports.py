"""The parts that decide and simulate load no JAX, in fresh processes."""

import subprocess
import sys

import pytest

PURE = [
    "longctx",
    "longctx.parallel.cost",
    "longctx.serving.scheduler.scheduler",
    "longctx.serving.kv_cache.page_pool",
    "longctx.serving.engine.core",
    "longctx.serving.engine.build",
    "longctx.serving.executor.interface",
    "longctx.simulation.event_loop",
    "longctx.simulation.replay",
    "longctx.simulation.report",
]


@pytest.mark.parametrize("module", [*PURE, "longctx.serving.scheduler, longctx.simulation"])
def test_deciding_and_simulating_modules_load_no_jax(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys, {module}; sys.exit('jax' in sys.modules)"], check=True)


def test_a_simulation_loads_no_jax() -> None:
    program = """
import sys
from longctx.models import LlamaConfig
from longctx.serving import EngineConfig
from longctx.serving.predictor.roofline import GPUS, roofline
from longctx.simulation import Simulation
from longctx.simulation.workloads import WorkloadRequest

model = LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, max_positions=131072)
simulation = Simulation(model, EngineConfig(num_pages=4096), roofline(model, GPUS["H100"], 512))
record = simulation.run([WorkloadRequest(0.0, 5000, 20), WorkloadRequest(0.1, 100, 20, number=1)])
assert len(record.served) == 2
sys.exit("jax" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
