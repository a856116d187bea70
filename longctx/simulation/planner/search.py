"""Searches plans: all layouts of stage, context and tensor with one way to chunk, then the best of them with others."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from longctx.models.config import LlamaConfig
from longctx.models.validation import check_integer, check_real
from longctx.parallel.device_tables import Link
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.work import Work
from longctx.serving.scheduler.slo import Slo
from longctx.simulation import utilization
from longctx.simulation.deployment import Deployment
from longctx.simulation.planner.prompt import Prompt, PromptPredictor

CHUNKS = ("adaptive", "static:256", "static:512", "static:1024", "static:2048", "static:4096")
BUDGETS = (1024, 2048, 4096, 8192)  # rows of a step, of adaptive chunks
_FIRST = ("adaptive", 4096)
_PARTS = (1, 4)  # a limit of tokens on a rank is this part of its even share: smaller ones let a request grow earlier
_REFINED = 12  # layouts that other chunks are tried with
_PAGE, _RUNNING = 64, 64


@dataclasses.dataclass(frozen=True)
class Goal:
    """Target of a plan: a request of `context` tokens, while others decode.

    Attributes:
      context: tokens of the prompt.
      ttft, tpot: seconds at most, of that request, and the latter of those beside it too.
      output_tokens: of the request.

    Raises:
      TypeError, ValueError: a number is out of range.

    Examples:
      >>> from longctx.simulation.planner.search import Goal
      >>> Goal(context=1_000_000, ttft=120, tpot=0.03)
      Goal(context=1000000, ttft=120, tpot=0.03, output_tokens=256)
    """

    context: int
    ttft: float
    tpot: float
    output_tokens: int = 256

    def __post_init__(self) -> None:
        check_integer("context", self.context, 1)
        check_integer("output_tokens", self.output_tokens, 1)
        for name in ("ttft", "tpot"):
            if check_real(name, getattr(self, name), 0) == 0:
                raise ValueError(f"{name} must be above 0")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan that meets a goal, with its predicted latency, memory and cost.

    Attributes:
      deployment: as many instances as there are devices for.
      prompt: seconds of the request, alone on an instance but for another one that decodes.
      memory: bytes on each device.
      usable: bytes that may be used of each.
      mfu: of the prompt, causal pairs counted once.
      gpu_seconds: of the prompt: its seconds times the instance's devices.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.planner.search import Goal, Planned, evaluate
      >>> goal, topology = Goal(context=1_000_000, ttft=120, tpot=0.03), Topology.preset("h100-nvlink")
      >>> planned = evaluate(MODELS["llama-3-8b"], topology, 8, goal, ParallelPlan(tensor=8), "adaptive", 4096)
      >>> isinstance(planned, Planned), planned.devices, planned.memory < planned.usable
      (True, 8, True)
    """

    deployment: Deployment
    prompt: Prompt
    memory: float
    usable: float
    mfu: float
    gpu_seconds: float

    @property
    def devices(self) -> int:
        """Devices of an instance."""
        return self.deployment.plan.num_devices


class RejectedPlan(NamedTuple):
    """A plan that misses the goal.

    Attributes:
      plan: of parallelism.
      chunking: as of `EngineConfig`.
      reason: `"memory"`, `"link"`, `"TPOT"` or `"TTFT"`.
      text: the reason with its numbers.
      excess: by which factor it misses.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.planner.search import RejectedPlan, Goal, evaluate
      >>> goal, topology = Goal(context=1_000_000, ttft=120, tpot=0.03), Topology.preset("h100-nvlink")
      >>> rejected = evaluate(MODELS["llama-3-8b"], topology, 8, goal, ParallelPlan(tensor=1), "adaptive", 4096)
      >>> isinstance(rejected, RejectedPlan), rejected.reason
      (True, 'memory')
    """

    plan: ParallelPlan
    chunking: str
    reason: str
    text: str
    excess: float


class SearchResult(NamedTuple):
    """Plans that a search has looked at.

    Attributes:
      plans: those that meet the goal, the cheapest first.
      rejected: those that do not, the nearest first.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.planner.search import Goal, search
      >>> goal = Goal(context=32_768, ttft=30, tpot=0.05)
      >>> found = search(MODELS["llama-3-8b"], Topology.preset("h100-nvlink"), gpus=2, goal=goal)
      >>> found.plans[0].gpu_seconds <= found.plans[-1].gpu_seconds
      True
    """

    plans: list[Planned]
    rejected: list[RejectedPlan]

    @property
    def best_of_each(self) -> list[Planned]:
        """The best plan of each layout and placement, the cheapest first; others differ in their chunks alone."""
        best: dict[ParallelPlan, Planned] = {}
        for planned in self.plans:
            best.setdefault(planned.deployment.plan, planned)
        return list(best.values())


def search(
    model: LlamaConfig,
    topology: Topology,
    gpus: int,
    goal: Goal,
    host_gpus: int = 8,
    progress: Callable[[int], object] | None = None,
    kv_dtype: str | None = None,
) -> SearchResult:
    """Search the plans of a model on up to `gpus` devices for those that meet a goal with the fewest GPU-seconds.

    A plan may use fewer devices, and then there are more instances of it.

    Args:
      model: its sizes.
      topology: what devices and links can do.
      gpus: devices at most.
      goal: what is to be met.
      host_gpus: devices of a host: `tensor` stays within one.
      progress: is called with how many plans there are still to look at, as far as that is known.
      kv_dtype: of the cache, as of `EngineConfig`.

    Returns:
      All plans that were looked at: those that meet the goal, and those that do not.

    Raises:
      ValueError: a number is out of range, or no layout suits the model.

    Source:
      Mnemosyne, 7: finding a plan for a context and a target.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.planner.search import Goal, search
      >>> goal = Goal(context=32_768, ttft=30, tpot=0.05)
      >>> found = search(MODELS["llama-3-8b"], Topology.preset("h100-nvlink"), gpus=2, goal=goal)
      >>> {planned.devices for planned in found.plans} <= {1, 2}
      True
    """
    check_integer("gpus", gpus, 1)
    check_integer("host_gpus", host_gpus, 1)
    if goal.context + goal.output_tokens > model.max_positions:
        raise ValueError(
            f"context must be at most {model.max_positions - goal.output_tokens:,} tokens beside {goal.output_tokens} "
            f"of output, the model's, got {goal.context:,}"
        )
    plans = list(layouts(model, gpus, goal.context, host_gpus))
    if not plans:
        raise ValueError(f"gpus must be enough for one layout of the model, got {gpus}")
    good: list[Planned] = []
    rejected: list[RejectedPlan] = []

    def look(plan: ParallelPlan, chunking: str, budget: int) -> None:
        result = evaluate(model, topology, gpus, goal, plan, chunking, budget, kv_dtype)
        if isinstance(result, Planned):
            good.append(result)
        else:
            rejected.append(result)

    for number, plan in enumerate(plans):
        look(plan, *_FIRST)
        if progress is not None:
            progress(len(plans) - number - 1 + _REFINED * (len(CHUNKS) + len(BUDGETS) - 2))
    ways = [("adaptive", budget) for budget in BUDGETS if budget != _FIRST[1]]
    ways += [(chunking, int(chunking.partition(":")[2])) for chunking in CHUNKS[1:]]
    best = [planned.deployment.plan for planned in sorted(good, key=_cost)[:_REFINED]]
    if not best:  # one that just misses may do with other chunks
        missed = sorted((each for each in rejected if each.reason in ("TTFT", "TPOT")), key=lambda each: each.excess)
        best = [each.plan for each in missed[:_REFINED]]
    tasks = [(plan, *way) for plan in best for way in ways]
    for number, task in enumerate(tasks):
        look(*task)
        if progress is not None:
            progress(len(tasks) - number - 1)
    return SearchResult(sorted(good, key=_cost), sorted(rejected, key=lambda each: each.excess))


def _cost(planned: Planned) -> tuple[float, float]:
    return planned.gpu_seconds, planned.prompt.ttft


def layouts(model: LlamaConfig, gpus: int, context: int, host_gpus: int) -> Iterator[ParallelPlan]:
    """Plans that suit a model, of sizes that are powers of two or divide the devices."""
    for tensor in _sizes(gpus, min(gpus, host_gpus)):
        for stage in _sizes(gpus // tensor, min(gpus // tensor, model.num_layers)):
            for ranks in _sizes(gpus // tensor // stage, gpus // tensor // stage):
                for plan in _placements(stage, ranks, tensor, context):
                    try:
                        plan.check(model, gpus)
                    except ValueError:  # heads that tensor does not divide
                        continue
                    yield plan


def _sizes(devices: int, most: int) -> list[int]:
    powers = {1 << i for i in range(most.bit_length()) if 1 << i <= most}
    return sorted(powers | {size for size in range(1, most + 1) if devices % size == 0})


def _placements(stage: int, ranks: int, tensor: int, context: int) -> Iterator[ParallelPlan]:
    """Ways to place pages: on one rank after the other with different limits, or round robin; with Helix too."""
    if ranks == 1:
        yield ParallelPlan(stage, 1, tensor)
        return
    share = -(-context // ranks)
    for part in _PARTS:
        limit = -(-share // part // _PAGE) * _PAGE
        if limit >= _FIRST[1]:
            for exchange in ("kvp", "auto"):
                yield ParallelPlan(stage, ranks, tensor, exchange, rank_tokens=limit)
            yield ParallelPlan(stage, ranks, tensor, rank_tokens=limit, ffn="all")
    yield ParallelPlan(stage, ranks, tensor, placement="interleave")
    yield ParallelPlan(stage, ranks, tensor, "kvp", "interleave", ffn="all")


def evaluate(
    model: LlamaConfig,
    topology: Topology,
    gpus: int,
    goal: Goal,
    plan: ParallelPlan,
    chunking: str,
    budget: int,
    kv_dtype: str | None = None,
) -> Planned | RejectedPlan:
    """Predict what a plan does with one long prompt while another request decodes.

    Args:
      model: its sizes.
      topology: what devices and links can do.
      gpus: devices; there are as many instances as fit.
      goal: what is to be met.
      plan: of parallelism, of an instance.
      chunking: as of `EngineConfig`.
      budget: rows of a step.
      kv_dtype: of the cache, as of `EngineConfig`.

    Returns:
      A `Planned`, or a `RejectedPlan` with the limit that is missed.

    Raises:
      ValueError: the plan doesn't suit the model.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.planner.search import Goal, evaluate
      >>> goal, topology = Goal(context=1_000_000, ttft=120, tpot=0.03), Topology.preset("h100-nvlink")
      >>> planned = evaluate(MODELS["llama-3-8b"], topology, 8, goal, ParallelPlan(tensor=8), "adaptive", 4096)
      >>> f"TTFT {planned.prompt.ttft:.1f} s, TPOT {1e3 * planned.prompt.tpot:.1f} ms"
      'TTFT 59.0 s, TPOT 7.7 ms'
    """
    try:
        topology.check(**{axis: getattr(plan, axis) for axis in AXES})
    except ValueError as error:
        return RejectedPlan(plan, chunking, "link", str(error), math.inf)
    length = goal.context + goal.output_tokens
    config = EngineConfig(
        page_size=_PAGE,
        max_running=_RUNNING,
        max_length=length,
        token_budget=budget,
        chunking=chunking,
        slo=Slo(tpot=goal.tpot, tpot_factor=1.0, step_seconds=goal.tpot),
        kv_dtype=kv_dtype,
    )
    memory = utilization.device_memory(model, plan, topology.device, length, budget, kv_dtype=kv_dtype, config=config)
    if not memory.fits:
        text = f"{memory.total / 1e9:,.0f} GB on each device, of {memory.usable / 1e9:.0f}"
        return RejectedPlan(plan, chunking, "memory", text, memory.total / memory.usable)
    deployment = Deployment(model, topology, plan, config, gpus // plan.num_devices)
    prompt = _predict(deployment, goal)
    missed = _missed(goal, prompt)
    if missed is not None:
        reason, text, excess = missed
        if plan.num_devices > 1:
            free = dataclasses.replace(topology, links=dict.fromkeys(AXES, _FREE))
            if _missed(goal, _predict(dataclasses.replace(deployment, topology=free), goal)) is None:
                reason, text = "link", f"{text}; it would do without exchanges"
        return RejectedPlan(plan, chunking, reason, text, excess)
    return Planned(
        deployment,
        prompt,
        memory.total,
        memory.usable,
        prompt_mfu(deployment, goal.context, prompt.ttft),
        prompt.ttft * plan.num_devices,
    )


_FREE = Link("free", 1e18, 0.0, share=1.0)


def _predict(deployment: Deployment, goal: Goal) -> Prompt:
    return PromptPredictor(deployment).predict(goal.context, goal.output_tokens)


def _missed(goal: Goal, prompt: Prompt) -> tuple[str, str, float] | None:
    """Return the limit that a prompt misses, in words, and by which factor; None if it meets the goal."""
    if prompt.tpot > goal.tpot:
        return "TPOT", f"{1e3 * prompt.tpot:.1f} ms a token after the prompt", prompt.tpot / goal.tpot
    if prompt.beside > goal.tpot * (1 + 1e-9):
        text = f"{1e3 * prompt.beside:.1f} ms a token beside the prompt, in chunks of {prompt.smallest} tokens or more"
        return "TPOT", text, prompt.beside / goal.tpot
    if prompt.ttft > goal.ttft:
        return "TTFT", f"{prompt.ttft:,.1f} s to the first token", prompt.ttft / goal.ttft
    return None


def prompt_mfu(deployment: Deployment, tokens: int, seconds: float) -> float:
    """Compute the MFU of a prompt, causal pairs counted once."""
    work, devices = Work.of([(0, tokens, True)]), deployment.plan.num_devices
    return utilization.mfu(deployment.model, work, deployment.topology.device, devices, seconds)
