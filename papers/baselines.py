"""Systems that the papers compare with: those of `longctx.simulation.baselines`, and LoongServe."""

from collections.abc import Sequence
from typing import Any

from longctx.models import LlamaConfig
from longctx.parallel import Topology
from longctx.serving import ParallelPlan
from longctx.simulation import Server, Simulation, baselines
from longctx.simulation.workloads import WorkloadRequest
from papers.loongserve import LoongServe

LOONGSERVE = ("loongserve", "loongserve-reserved")
BASELINES = (*baselines.BASELINES, *LOONGSERVE)
SHORT = 8192  # tokens below which a prompt goes to a reserved pool (Medha, 5.4)


def make_simulation(
    name: str, model: LlamaConfig, topology: Topology, devices: int, plan: ParallelPlan | None = None, **overrides: Any
) -> Simulation:
    """Make a system on `devices` devices, ready to serve workloads.

    `"loongserve"` is `LoongServe` with instances of two devices; `"loongserve-reserved"` keeps a quarter of these for
    prompts below 8,192 tokens. Neither has a use for `plan` and `overrides`.

    Args:
      name: one of `BASELINES`.
      model, topology, devices, plan, **overrides: as for `longctx.simulation.baselines.make_simulation`.

    Returns:
      A simulation, ready for `run`.

    Raises:
      TypeError, ValueError: there is no such system, or it can't be made of these devices.

    Source:
      Medha, 5.1 to 5.4.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> from papers.baselines import make_simulation
      >>> simulation = make_simulation("loongserve", MODELS["llama-3-8b"], Topology.preset("medha-a100"), devices=16)
      >>> [served] = simulation.run([WorkloadRequest(0.0, 100_000, 10)]).served
      >>> round(served.ttft, 1)
      2.7
    """
    if name not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {name!r}")
    if name not in LOONGSERVE:
        return baselines.make_simulation(name, model, topology, devices, plan, **overrides)
    if devices < 2 or devices % 2:
        raise ValueError(f"devices must be instances of 2, got {devices}")
    instances = devices // 2
    if name == "loongserve":
        return Simulation([LoongServe(model, topology, instances)])
    reserved = max(1, instances // 4)
    short = LoongServe(model, topology, reserved, name="short")
    long = LoongServe(model, topology, instances - reserved, name="long")

    def route(request: WorkloadRequest, servers: Sequence[Server], now: float) -> Server:
        return servers[request.prompt_tokens >= SHORT]

    return Simulation([short, long], route)
