"""Engines to simulate, ours and those of baselines: a model on the devices of a plan, with as many pages as fit."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.models.config import LlamaConfig
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.validation import check_integer
from longctx.simulation.baselines import BASELINES, make_simulation
from longctx.simulation.hardware import predictor
from longctx.simulation.instance.instance import Instance
from longctx.simulation.record import Record
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.simulation import Simulation
from longctx.simulation.utilization import device_memory, max_tokens
from longctx.simulation.workloads import WorkloadRequest


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Instances of one engine. Plain data, so that other processes can simulate it.

    Attributes:
      model: its sizes.
      topology: what devices and links can do.
      plan: of parallelism, of each instance.
      config: of each engine; without `num_pages` there are as many as fit beside weights and activations.
      instances: engines, each with devices of its own; a request goes to the one with least to prefill.
      measured: predicts batches, such as a profile's; None: they are predicted from the topology.

    Raises:
      ValueError: the plan doesn't suit the model or the topology, or its weights don't fit into the devices' memory.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import EngineConfig, ParallelPlan
      >>> from longctx.simulation.deployment import Deployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> plan, config = ParallelPlan(tensor=8), EngineConfig(page_size=256)
      >>> deployment = Deployment(MODELS["llama-3-8b"], Topology.preset("h100-rdma"), plan, config)
      >>> record = deployment.run(arrive_at_rate(make_mix("sharegpt4", 10), rate=2.0))
      >>> len(record.served)
      10
    """

    model: LlamaConfig
    topology: Topology
    plan: ParallelPlan
    config: EngineConfig
    instances: int = 1
    measured: Predictor | None = None

    def __post_init__(self) -> None:
        check_integer("instances", self.instances, 1)
        self.plan.check(self.model, self.plan.num_devices)
        self.topology.check(**{axis: getattr(self.plan, axis) for axis in AXES})
        self.num_pages  # noqa: B018  which are known only if the weights fit

    @property
    def num_devices(self) -> int:
        """Devices of all instances together."""
        return self.instances * self.plan.num_devices

    @property
    def num_pages(self) -> int:
        """Pages of each context rank of an instance."""
        if self.config.num_pages is not None:
            return self.config.num_pages
        rows, page = self.config.token_budget, self.config.page_size
        made, kv_dtype = (self.model, self.plan, self.topology.device), self.config.kv_dtype
        pages = max_tokens(*made, rows, kv_dtype=kv_dtype) // self.plan.context // page
        if not pages:
            device_memory(*made, page * self.plan.context, rows, kv_dtype=kv_dtype).check()
        return pages

    def predictor(self) -> Predictor:
        """Return the predictor of batches in one stage of an instance."""
        if self.measured is not None:
            return self.measured
        config = self.config
        return predictor(self.model, self.topology, self.plan, max_rows=config.token_budget, kv_dtype=config.kv_dtype)

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Callable[[Record], object] | None = None,
        keep_steps: bool = True,
        traces: list[StageTrace] | None = None,
        keep_ticks: bool = False,
    ) -> Record:
        """Serve requests in virtual time.

        Args:
          requests: when they come, and how long they are.
          seed: of prompts' pages that no hash id names.
          until: seconds after which the window closes.
          progress: is called after every event.
          keep_steps: whether the record has every step; they take memory.
          traces: a trace of each instance is appended to it; None: nothing is traced.
          keep_ticks: whether these have all ticks.

        Returns:
          What happened: each request and each step.

        Raises:
          ValueError: a request can't be served, such as one that is longer than the cache.
        """
        config, plan = dataclasses.replace(self.config, num_pages=self.num_pages), self.plan
        predicted = self.predictor()
        instances = []
        for number in range(self.instances):
            logs = []
            if traces is not None:
                logs = [StageTrace(lambda batch: predicted.seconds(batch.work), plan.stage, plan.context, keep_ticks)]
                traces += logs
            instance = Instance(
                self.model, config, predicted, plan, topology=self.topology, name=str(number), logs=logs
            )
            for log in logs:
                log.watch(instance)
            instances.append(instance)
        return Simulation(instances).run(requests, seed, until, progress, keep_steps)


@dataclasses.dataclass(frozen=True)
class BaselineDeployment(Deployment):
    """A system on as many devices as a plan has; ours and Sarathi's have that plan, others one of their own.

    Attributes:
      baseline: a name of `BASELINES`. Of the configuration it takes the SLO and whether prefixes are shared; all else
        is the system's own.

    Raises:
      ValueError: there is no such system, or several instances, or a `kv_dtype`.
    """

    baseline: str = "medha"

    def __post_init__(self) -> None:
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {self.baseline!r}")
        if self.instances != 1:
            raise ValueError(f"baseline has instances of its own: instances must be 1, got {self.instances}")
        if self.config.kv_dtype is not None:
            raise ValueError(
                f"kv_dtype must be None with a baseline, whose systems had none, got {self.config.kv_dtype!r}"
            )
        super().__post_init__()

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Callable[[Record], object] | None = None,
        keep_steps: bool = True,
        traces: list[StageTrace] | None = None,
        keep_ticks: bool = False,
    ) -> Record:
        """See `Deployment.run`; ValueError if traces are wanted, which baselines don't have."""
        if traces is not None:
            raise ValueError("baseline has no trace of stages and pages, which drawings need")
        plan = None if self.baseline == "striped" else self.plan
        config = self.config
        simulation = make_simulation(
            self.baseline,
            self.model,
            self.topology,
            self.num_devices,
            plan,
            slo=config.slo,
            prefix_cache=config.prefix_cache,
            max_length=config.max_length,
        )
        return simulation.run(requests, seed, until, progress, keep_steps)
