"""Systems to compare with, by name: settings of the core that serves, one for each policy or published engine."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from longctx.models.config import LlamaConfig
from longctx.models.validation import check_integer
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor import Predictor
from longctx.simulation.hardware import predictor
from longctx.simulation.instance.host_times import HostTimes
from longctx.simulation.instance.instance import Instance
from longctx.simulation.simulation import Simulation
from longctx.simulation.utilization import max_tokens

HOST = 8  # devices of a host, which tensor parallelism stays in
LONGEST = 1 << 20  # tokens of the longest prompt that is read in one step, where prompts are read whole
_PAGE = 256


class StandardPipeline(Instance):
    """An engine whose stages have chunks of different requests.

    A prompt's next chunk waits until the one before it has left the last stage. Stages are filled by other requests, or
    idle. So prompts are read no faster with more stages, and throughput grows only with several prompts at a time.

    Args:
      *args, **options: as for `Instance`.

    Source:
      Mnemosyne, 4.3 and figure 9 (a); Orca and Sarathi-Serve have such a pipeline.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig, ParallelPlan
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.baselines import StandardPipeline
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> model, plan = LlamaConfig.preset("llama-3-8b"), ParallelPlan(stage=4)
      >>> config = EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", plan, max_rows=config.token_budget)
      >>> for kind in (Instance, StandardPipeline):  # a prompt's chunks follow each other through the stages, or wait
      ...     [served] = Simulation([kind(model, config, seconds, plan)]).run([WorkloadRequest(0.0, 8000, 10)]).served
      ...     print(kind.__name__, round(served.ttft, 2))
      Instance 0.06
      StandardPipeline 0.21
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core.scheduler.steps_between_chunks = self.plan.stage


class PrefillFirst(Instance):
    """An engine that reads all prompts for which it has room before it decodes again.

    A step has prompts or decodes, never both.

    Args:
      *args, **options: as for `Instance`.

    Source:
      SGLang's scheduler without `--enable-mixed-chunk`, as is its default.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.baselines import PrefillFirst
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000, policy="fcfs")
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> requests = [WorkloadRequest(0.0, 100, 20), WorkloadRequest(0.05, 5000, 2, number=1)]
      >>> for kind in (Instance, PrefillFirst):  # the first request decodes beside the second one's prompt, or after it
      ...     record = Simulation([kind(model, config, seconds)]).run(requests)
      ...     print(kind.__name__, [served.number for served in record.served])
      Instance [0, 1]
      PrefillFirst [1, 0]
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core.scheduler.mixes_decodes = False


class Setting(NamedTuple):
    """Settings that a system is made for.

    Attributes:
      devices: in all; a multiple of 8 if there are more.
      plan: of a system that is one engine on all devices; None: sequence pipeline over hosts, tensor within.
      overrides: arguments of `EngineConfig` that come before the system's own; other systems have no use for them.
      host: what an engine takes beside its devices.
      predict: makes the predictor of an engine, as `longctx.simulation.hardware.predictor` does.
    """

    model: LlamaConfig
    topology: Topology
    devices: int
    plan: ParallelPlan | None
    overrides: dict[str, Any]
    host: HostTimes | None = None
    predict: Callable[..., Predictor] = predictor

    @property
    def tensor(self) -> int:
        """Devices of a host that are used."""
        return min(self.devices, HOST)

    def engine(
        self,
        config: Callable[..., EngineConfig],
        plan: ParallelPlan,
        kind: type[Instance] = Instance,
        name: str = "0",
        max_running: int = 64,
    ) -> Instance:
        """An engine with a preset's rules, and as many pages as fit into memory."""
        kv_dtype = self.overrides.get("kv_dtype")
        tokens = max_tokens(self.model, plan, self.topology.device, kv_dtype=kv_dtype)
        sizes = {"page_size": _PAGE, "max_running": max_running, "run_ahead": 1} | self.overrides
        made = config(**{"num_pages": max(1, tokens // plan.context // sizes["page_size"])} | sizes)
        seconds = self.predict(self.model, self.topology, plan, max_rows=made.token_budget, kv_dtype=made.kv_dtype)
        return kind(self.model, made, seconds, plan, topology=self.topology, name=name, host=self.host)


def _ours(policy: str) -> Callable[[Setting], list[Instance]]:
    def make(setting: Setting) -> list[Instance]:
        plan = setting.plan or ParallelPlan.medha(stage=setting.devices // setting.tensor, tensor=setting.tensor)
        return [setting.engine(lambda **sizes: EngineConfig.medha(**{"policy": policy} | sizes), plan)]

    return make


def _sarathi(chunk: int) -> Callable[[Setting], list[Instance]]:
    def make(setting: Setting) -> list[Instance]:
        plan = setting.plan or ParallelPlan(stage=setting.devices // setting.tensor, tensor=setting.tensor)
        # With one bucket no chunk is smaller than it may be: rows would have to grow again after every idle step.
        rows = {"buckets": (chunk,)}
        return [setting.engine(lambda **sizes: EngineConfig.sarathi(chunk, **rows | sizes), plan, StandardPipeline)]

    return make


def _whole_prompts(setting: Setting, plan: ParallelPlan, name: str = "0") -> Instance:
    rows = -(-LONGEST // plan.context) + 64  # beside them, a row for every decode
    return setting.engine(lambda **sizes: EngineConfig.meta(rows, **sizes), plan, name=name)


def _vllm(setting: Setting) -> list[Instance]:
    copies = range(setting.devices // setting.tensor)
    return [_whole_prompts(setting, ParallelPlan(tensor=setting.tensor), str(copy)) for copy in copies]


def _striped(setting: Setting) -> list[Instance]:
    hosts = setting.devices // setting.tensor
    plan = setting.plan or ParallelPlan.meta(hosts, setting.tensor, exchange="pass_kv")
    return [_whole_prompts(setting, plan)]


def _engine(
    kind: type[Instance] = Instance, admission: Literal["reserve", "optimistic"] = "optimistic"
) -> Callable[[Setting], list[Instance]]:
    """Engines of today with their default settings: 8,192 tokens a step, requests in order of arrival."""

    def make(setting: Setting) -> list[Instance]:
        plan = setting.plan or ParallelPlan(tensor=setting.tensor)
        config = functools.partial(EngineConfig.sarathi, 8192, admission=admission)
        return [
            setting.engine(config, plan, kind, str(copy), 256) for copy in range(setting.devices // plan.num_devices)
        ]

    return make


BASELINES: dict[str, Callable[[Setting], list[Instance]]] = {
    "medha": _ours("ilrs"),  # relative slack, shared steps, adaptive chunks, SPP
    "medha-fcfs": _ours("fcfs"),  # first come first served, and no shared steps (5.1)
    "edf": _ours("edf"),  # earliest deadline first (5.4)
    "srpf": _ours("srpf"),  # shortest remaining prefill first
    "lrs": _ours("lrs_relative"),  # least remaining slack, relative to the deadline (5.4)
    "sarathi-512": _sarathi(512),  # Sarathi-Serve: chunks of 512, first come first served, standard pipeline
    "sarathi-2048": _sarathi(2048),
    "vllm": _vllm,  # whole prompts as soon as they come, a copy of the engine on every host
    "vllm-mixed": _engine(),
    "sglang": _engine(PrefillFirst),
    "trtllm": _engine(admission="reserve"),
    "striped": _striped,  # striped attention: whole prompts over all hosts, keys go round in a ring
}
"""The systems by name: what makes the engines of each, for `make_simulation`. A request goes to the one with least to
prefill.

Source:
  Medha, 5.1 to 5.4.

Examples:
  >>> from longctx.simulation.baselines import BASELINES
  >>> [name for name in BASELINES if name.startswith("medha")]
  ['medha', 'medha-fcfs']
"""


def make_simulation(
    name: str,
    model: LlamaConfig,
    topology: Topology,
    devices: int,
    plan: ParallelPlan | None = None,
    host: HostTimes | None = None,
    predict: Callable[..., Predictor] = predictor,
    **overrides: Any,
) -> Simulation:
    """Make a system on `devices` devices, ready to serve workloads.

    All have the same cost model and as much memory. `vllm` and `striped` compute whole prompts of up to 1M tokens in
    one step, and decodes beside them, where vLLM has steps for prompts alone: both wait alike.

    Args:
      name: of `BASELINES`.
      model: what is served.
      topology: its devices and links.
      devices: how many; a multiple of 8 if there are more than 8.
      plan: for ours, `sarathi` and `striped`; None: stages (context ranks for `striped`) are hosts of 8 devices.
      host: what each engine of ours takes beside its devices.
      predict: makes an engine's predictor, with the arguments of `longctx.simulation.hardware.predictor`.
      **overrides: arguments of `EngineConfig`, such as `prefix_cache`, where the system is an engine of ours.

    Returns:
      Ready for `run`.

    Raises:
      TypeError, ValueError: there is no such system, or it can't be made of these devices.

    Source:
      Medha, 5.1 to 5.4.

    Examples:
      >>> import statistics
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.simulation.baselines import make_simulation
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> topology, requests = Topology.preset("medha-a100"), arrive_at_rate(make_mix("sharegpt4-5-long", 30), rate=0.5)
      >>> for name in ("medha", "vllm"):
      ...     record = make_simulation(name, MODELS["llama-3-8b"], topology, devices=16).run(requests, keep_steps=False)
      ...     print(name, round(statistics.median(served.ttft for served in record.served), 1))
      medha 0.2
      vllm 6.7
    """
    if name not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {name!r}")
    check_integer("devices", devices, 1)
    if devices > HOST and devices % HOST:
        raise ValueError(f"devices must be at most {HOST} or a multiple of it, got {devices}")
    if plan is not None and plan.num_devices != devices:
        raise ValueError(f"plan must be of {devices} devices, it is of {plan.num_devices}")
    return Simulation(BASELINES[name](Setting(model, topology, devices, plan, overrides, host, predict)))
