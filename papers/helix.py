"""Helix on H100: predicted memory and seconds a token of requests of 1M tokens, by plan: `python -m papers.helix`.

Source: Helix Parallelism (Bhatia et al. 2025, arXiv:2507.07120), section 3.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from longctx.models import LlamaConfig
from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.serving.predictor import Work
from longctx.simulation.hardware import predictor
from longctx.simulation.models import MODELS
from longctx.simulation.utilization import device_memory, max_tokens

TOKENS, TPOT, ROWS = 1_000_000, 0.1, 256
CASES = [
    *(("llama-3-70b", gpus, "h100-nvlink" if gpus == 8 else "h100-rdma") for gpus in (8, 16, 32, 64)),
    *(("llama-3-405b", gpus, "h100-rdma") for gpus in (16, 32, 64)),
    *((name, 64, "h100-nvlink") for name in ("llama-3-70b", "llama-3-405b")),
]
HEAD = ("model, GPUs, topology", "plan", "weights", "requests that fit", "TPOT of 1", "of 8", "within 100 ms")


class Row(NamedTuple):
    """A plan: bytes of weights on a GPU, requests whose keys and values fit, and seconds of a token by requests."""

    plan: ParallelPlan
    weights: float
    fits: int
    tpot: dict[int, float]

    @property
    def in_time(self) -> int:
        """Requests that fit and decode within the target."""
        return sum(seconds <= TPOT for requests, seconds in self.tpot.items() if requests <= self.fits)


def kinds(gpus: int) -> dict[str, Iterator[ParallelPlan]]:
    """The plans of each kind; `tensor` takes the GPUs of a host first, `context` and `stage` go over hosts."""
    sizes = [1 << i for i in range(gpus.bit_length()) if gpus == 8 or 1 << i >= 8]
    meshes = [(gpus // tensor, tensor) for tensor in sizes if tensor < gpus]
    return {
        "TP": iter([ParallelPlan(tensor=gpus)]),
        "SPP": (ParallelPlan(outer, 1, tensor) for outer, tensor in meshes),
        "KVP": (ParallelPlan(1, outer, tensor, "kvp", "interleave") for outer, tensor in meshes),
        "Helix": (ParallelPlan(1, outer, tensor, "kvp", "interleave", ffn="all") for outer, tensor in meshes),
    }


def row(model: LlamaConfig, topology: Topology, plan: ParallelPlan) -> Row:
    """Predict a plan, whose ranks and stages have equally many keys and requests."""
    fits = max_tokens(model, plan, topology.device, ROWS) // TOKENS
    stage = predictor(model, topology, plan)
    tpot = {}
    for requests in {*range(1, fits + 1), 1, 8}:
        rows = math.ceil(requests / plan.stage)
        keys = rows * math.ceil(TOKENS / plan.context)
        work = Work(rows, rows, keys, replicated=rows if plan.context > 1 else 0)
        tpot[requests] = plan.stage * stage.seconds(work)
    return Row(plan, device_memory(model, plan, topology.device, 0, ROWS).weights, fits, tpot)


def table() -> Iterator[tuple[str, ...]]:
    """Yield the rows: of each case and kind the plan that fits most requests, of equals the one with least TPOT."""
    yield HEAD
    yield ("---",) * len(HEAD)
    for name, gpus, topology in CASES:
        for number, (kind, plans) in enumerate(kinds(gpus).items()):
            rows = [row(MODELS[name], Topology.preset(topology), plan) for plan in plans]
            best = max(rows, key=lambda row: (row.fits, row.in_time, -row.tpot[1]))
            sizes = f"{kind} {best.plan.stage} x {best.plan.context} x {best.plan.tensor}"
            times = (f"{1e3 * best.tpot[requests]:.1f} ms" if best.fits >= requests else "-" for requests in (1, 8))
            case = "" if number else f"{name}, {gpus}, {topology}"
            yield (case, sizes, f"{best.weights / 1e9:.1f} GB", str(best.fits), *times, str(best.in_time))


if __name__ == "__main__":
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table()))
