"""Mooncake's testbed: LLaMA2-70B on hosts of 8 A800 with 800 Gb/s each (section 7)."""

import functools

from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import CurvePredictor
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS

MODEL = MODELS["llama-2-70b"]
TOPOLOGY = Topology.preset("a100-800g")
TENSOR = 8  # GPUs of an instance: a host
PLAN = ParallelPlan(tensor=TENSOR)
CHUNK = 4096  # tokens of a chunk of a prompt; "typically larger than 1000" (3)


@functools.cache
def predict() -> CurvePredictor:
    """Seconds of an instance's steps, by the one cost model."""
    return predictor(MODEL, TOPOLOGY, PLAN, max_rows=CHUNK)


def host_bandwidth() -> float:
    """Bytes per second that an instance sends, over all its network cards."""
    link = TOPOLOGY.link("context")
    return TENSOR * link.bandwidth * link.share
