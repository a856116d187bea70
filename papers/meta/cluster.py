"""Parts that the context parallelism paper's figures share: its model, its hosts, and a prompt served there alone.

The paper's hosts are the presets `meta-gtt` (RDMA) and `meta-gti` (TCP), of 8 H100 each (section 4.1). Prompts and
decodes are served by the engine's core, a whole prompt in one step, as the paper has no chunks. Partial results have 2
bytes, as the All2All of its table 5.
"""

import dataclasses
import functools
from typing import NamedTuple

from longctx.parallel import Topology
from longctx.parallel.cost import LLAMA3_405B
from longctx.serving import EngineConfig, ParallelPlan
from longctx.serving.predictor import CurvePredictor
from longctx.simulation import Instance, Simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.workloads import WorkloadRequest
from papers.figures.figure import Statement

LLAMA = MODELS["llama-3-405b-fp8"]
LAYERS = LLAMA.num_layers
GPU = LLAMA3_405B.split(8)
"""The heads of one GPU of a host."""
HARDWARE = Topology.preset("meta-gtt").hardware("context", partial_bytes=2)
K = 1024
M = 1_000_000
"""Tokens of "1M" (appendix A)."""
PAGE = 128
FIXED = (
    "the paper's prefills take longer than their parts by about the same whatever T: 0.5 to 0.9 s on 4 hosts (table 4, "
    "to 64,000 tokens), 1.2 s on 16; a fixed cost of which no table has a part"
)


def number(
    figure: str, text: str, paper: float, ours: float, unit: str = "", why: str = "", basis: str = "predicted"
) -> Statement:
    """A statement, which says why only where the two differ."""
    stated = Statement(figure, text, paper, ours, unit, why, basis)
    return dataclasses.replace(stated, why="") if stated.is_near else stated


class Times(NamedTuple):
    """Seconds to the first token, and to each further one (0: there is none)."""

    ttft: float
    ttit: float


def meta_predictor(topology: str, context: int = 1, tensor: int = 8, max_rows: int = 4096) -> CurvePredictor:
    """The calibrated predictor, with partial results of 2 bytes."""
    found = predictor(LLAMA, topology, ParallelPlan.meta(context, tensor), max_rows=max_rows)
    if found.exchange is None:
        return found
    hardware = dataclasses.replace(found.exchange.hardware, partial_bytes=2)
    return dataclasses.replace(found, exchange=dataclasses.replace(found.exchange, hardware=hardware))


@functools.cache
def serve(prompt: int, context: int = 1, tensor: int = 8, topology: str = "meta-gtt", outputs: int = 1) -> Times:
    """One request, alone, on `context` hosts, or with `tensor` GPUs in all where it is more than a host's."""
    plan = ParallelPlan.meta(context, tensor)
    rows = -(-prompt // context // PAGE) * PAGE
    pages = -(-(prompt + outputs) // PAGE // context) + 2
    config = EngineConfig(num_pages=pages, page_size=PAGE, token_budget=rows, max_running=8, chunking="static")
    engine = Instance(LLAMA, config, meta_predictor(topology, context, tensor, rows), plan)
    record = Simulation([engine]).run([WorkloadRequest(0.0, prompt, outputs)])
    return Times(record.served[0].ttft, record.served[0].tpot or 0.0)
