"""A real model's depth: more layers than programs may be in flight, on as many CPU devices as there are threads."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from longctx.parallel import cpu_devices
cpu_devices({devices})
import jax
from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams
model = Llama(LlamaConfig(33, 24, 33, {layers}, 3, 3, 8, max_positions=256))
params = model.init(jax.random.key(0))
config = EngineConfig(num_pages=16, page_size=8, max_length=64, token_budget=16, buckets=(16,), max_running=1)
engine = Engine(model, params, config, plan=ParallelPlan({plan}))
print(len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""


@pytest.mark.slow
def test_layers_beyond_what_may_be_in_flight() -> None:
    """XLA would end the process after 40 seconds in which a device waits for the others."""
    program = PROGRAM.format(devices=3, layers=40, plan="tensor=3")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.stdout == "4\n", result.stderr[-2000:]
