"""Systems to simulate, as plain data: engines of ours or of others, and clusters, each of one model."""

import abc
import copy
import dataclasses

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.config import LlamaConfig
from longctx.models.validation import check_bool, check_integer, check_kv_dtype, check_real
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.slo import Slo
from longctx.simulation.baselines import BASELINES, make_simulation
from longctx.simulation.cluster.cluster_instance import NIC_BANDWIDTH, ClusterInstance
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.hardware import predictor
from longctx.simulation.instance.instance import Instance
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.simulation import Simulation
from longctx.simulation.utilization import device_memory, max_tokens


@dataclasses.dataclass(frozen=True)
class _System(abc.ABC):
    """Instances of one model, each on the devices of a plan. Plain data, so that other processes can simulate it."""

    model: LlamaConfig
    topology: Topology
    plan: ParallelPlan

    def __post_init__(self) -> None:
        self.plan.check(self.model, self.plan.num_devices)
        self.topology.check(**{axis: getattr(self.plan, axis) for axis in AXES})

    @property
    @abc.abstractmethod
    def num_instances(self) -> int:
        """Number of instances."""

    @property
    def num_devices(self) -> int:
        """Devices of all instances together."""
        return self.num_instances * self.plan.num_devices

    @abc.abstractmethod
    def simulation(self) -> Simulation:
        """Return what serves workloads on new instances."""


@dataclasses.dataclass(frozen=True)
class Deployment(_System):
    """Instances of one engine, or of a system to compare with. Plain data, so that other processes can simulate it.

    Attributes:
      model: its sizes.
      topology: what devices and links can do.
      plan: of parallelism, of each instance.
      config: of each engine; without `num_pages` there are as many as fit beside weights and activations.
      instances: engines, each with devices of its own; a request goes to the one with least to prefill.
      measured: predicts batches, such as a profile's; None: they are predicted from the topology.
      baseline: a name of `BASELINES`: a system on as many devices as the plan has. Ours and Sarathi's have that plan,
        others one of their own. Of the configuration it takes the SLO, `max_length` and whether prefixes are shared.

    Raises:
      ValueError: the plan doesn't suit the model or the topology, or its weights don't fit into the devices' memory;
        there is no such baseline, or it is given several instances or a `kv_dtype`.

    Examples:
      >>> from longctx.parallel import Topology
      >>> from longctx.serving import EngineConfig, ParallelPlan
      >>> from longctx.simulation.deployment import Deployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> plan, config = ParallelPlan(tensor=8), EngineConfig(page_size=256)
      >>> deployment = Deployment(MODELS["llama-3-8b"], Topology.preset("h100-rdma"), plan, config)
      >>> record = deployment.simulation().run(arrive_at_rate(make_mix("sharegpt4", 10), rate=2.0))
      >>> len(record.served)
      10
    """

    config: EngineConfig
    instances: int = 1
    measured: Predictor | None = None
    baseline: str | None = None

    def __post_init__(self) -> None:
        check_integer("instances", self.instances, 1)
        if self.baseline is not None:
            if self.baseline not in BASELINES:
                raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {self.baseline!r}")
            if self.instances != 1:
                raise ValueError(f"baseline has instances of its own: instances must be 1, got {self.instances}")
            if self.config.kv_dtype is not None:
                raise ValueError(
                    f"kv_dtype must be None with a baseline, whose systems had none, got {self.config.kv_dtype!r}"
                )
        super().__post_init__()
        self.num_pages  # noqa: B018  which are known only if the weights fit

    @property
    def num_instances(self) -> int:
        """Number of instances."""
        return self.instances

    @property
    def kv_dtype(self) -> str | None:
        """Dtype of the caches, as of `EngineConfig`."""
        return self.config.kv_dtype

    @property
    def num_pages(self) -> int:
        """Pages of each context rank of an instance."""
        if self.config.num_pages is not None:
            return self.config.num_pages
        rows, page = self.config.token_budget, self.config.page_size
        made, kv_dtype = (self.model, self.plan, self.topology.device), self.config.kv_dtype
        pages = max_tokens(*made, rows, kv_dtype=kv_dtype, config=self.config) // self.plan.context // page
        if not pages:
            device_memory(*made, page * self.plan.context, rows, kv_dtype=kv_dtype, config=self.config).check()
        return pages

    def predictor(self) -> Predictor:
        """Return the predictor of batches in one stage of an instance."""
        if self.measured is not None:
            return self.measured
        config = self.config
        return predictor(self.model, self.topology, self.plan, max_rows=config.token_budget, kv_dtype=config.kv_dtype)

    def simulation(self, traces: list[StageTrace] | None = None, keep_ticks: bool = False) -> Simulation:
        """Return what serves workloads on new instances.

        Args:
          traces: a trace of each instance is appended to it; None: nothing is traced.
          keep_ticks: whether these have all ticks.

        Raises:
          ValueError: traces are wanted of a baseline.
        """
        model, topology, plan = self.model, self.topology, self.plan
        if self.baseline is not None:
            if traces is not None:
                raise ValueError("baseline has no trace of stages and pages, which drawings need")
            given = {name: getattr(self.config, name) for name in ("slo", "prefix_cache", "max_length")}
            own = None if self.baseline == "striped" else plan
            return make_simulation(self.baseline, model, topology, self.num_devices, own, **given)
        config, predicted = dataclasses.replace(self.config, num_pages=self.num_pages), self.predictor()
        instances = []
        for number in range(self.instances):
            logs = []
            if traces is not None:
                logs = [StageTrace(lambda batch: predicted.seconds(batch.work), plan.stage, plan.context, keep_ticks)]
                traces += logs
            instance = Instance(model, config, predicted, plan, topology=topology, name=str(number), logs=logs)
            for log in logs:
                log.watch(instance)
            instances.append(instance)
        return Simulation(instances)


@dataclasses.dataclass(frozen=True)
class ClusterDeployment(_System):
    """Instances behind a conductor: they prefill, decode or do both. Plain data, so other processes can simulate it.

    Attributes:
      model: what is served.
      topology: devices and links of each instance.
      plan: of each instance.
      prefill, decode, coupled: how many instances of each kind. A coupled one prefills and decodes, and lets requests
        wait that it has no room for, as decode instances do where the conductor's `admission` is `"none"`.
      config: of the conductor.
      settings: of the simulation.
      page_size: tokens of a page, which is the conductor's block: 512 in Mooncake's traces.
      chunk: the most tokens of prompts that a prefill instance computes in a step (Mooncake's `prefill_chunk`).
      coupled_chunk: so of a coupled instance, beside its decodes; as many as the longest prompt: prompts are read
        whole, as vLLM did when the paper was written.
      max_running: of decode and coupled instances. With 1, coupled ones serve one request after the other (7.1.2).
      host_bytes: of each prefill instance's host memory that keep pages; 0: only its devices do.
      coupled_host_bytes: so of each coupled instance; 0, as of vLLM.
      prefix_cache: whether prefill and coupled instances find the pages of prefixes.
      roles_change: whether any instance may get any role: then decode instances are made as prefill instances are.
      kv_dtype: of the caches, as of `EngineConfig`.
      bandwidth: bytes per second at which an instance sends.
      latency: seconds from the last byte that it sends to its arrival.
      names: of prefill instances, then of decode, then of coupled ones; empty: `prefill-0`, `decode-0`, `coupled-0` and
        so on.
      changes: see `Change`.

    Raises:
      ValueError: the plan doesn't suit the model or the topology, or no instance prefills or decodes.

    Source:
      Mooncake, 3 (prefill and decode apart) and 7 (such clusters beside coupled ones).

    Examples:
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.deployment import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> requests = arrive_at_rate(make_mix("sharegpt4", 100), rate=4.0)
      >>> record = ClusterDeployment(model, topology, plan, prefill=2, decode=1).simulation().run(requests)
      >>> sorted({(placed.assignment.prefill, placed.assignment.decode) for placed in record.placed})
      [('decode-0', 'decode-0'), ('prefill-0', 'decode-0'), ('prefill-1', 'decode-0')]
    """

    prefill: int = 0
    decode: int = 0
    coupled: int = 0
    config: ConductorConfig = dataclasses.field(default_factory=ConductorConfig)
    settings: ClusterSettings = dataclasses.field(default_factory=ClusterSettings)
    page_size: int = 512
    chunk: int = 2048
    coupled_chunk: int = 1 << 20
    max_running: int = 256
    host_bytes: int = 10**12
    coupled_host_bytes: int = 0
    prefix_cache: bool = True
    roles_change: bool = False
    kv_dtype: str | None = None
    bandwidth: float = NIC_BANDWIDTH
    latency: float = 0.0
    names: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)
        for name in ("prefill", "decode", "coupled", "host_bytes", "coupled_host_bytes"):
            check_integer(name, getattr(self, name), 0)
        for name in ("page_size", "chunk", "coupled_chunk", "max_running"):
            check_integer(name, getattr(self, name), 1)
        for name, low in (("bandwidth", 1), ("latency", 0)):
            check_real(name, getattr(self, name), low)
        for name in ("prefix_cache", "roles_change"):
            check_bool(name, getattr(self, name))
        if not (self.coupled or (self.prefill and self.decode)):
            raise ValueError("prefill and decode must both be at least 1, or coupled must be")
        if self.names and len(self.names) != self.num_instances:
            raise ValueError(f"names must be of all {self.num_instances} instances, got {len(self.names)}")
        super().__post_init__()

    @property
    def num_instances(self) -> int:
        """Number of instances of all kinds."""
        return self.prefill + self.decode + self.coupled

    def instances(self) -> list[ClusterInstance]:
        """Return the instances, in the order in which they join."""
        kept = self._tiers(self.host_bytes)
        prefill = self._config(token_budget=max(self.chunk, self.max_running), max_running=min(64, self.max_running))
        prefill = dataclasses.replace(prefill, chunking=f"static:{self.chunk}", tiers=kept)
        decode = self._config(token_budget=self.max_running, max_running=self.max_running, prefix_cache=False)
        if self.roles_change:
            prefill = decode = dataclasses.replace(prefill, max_running=self.max_running)
        rows = self.coupled_chunk + self.max_running
        coupled = self._config(token_budget=rows, max_running=self.max_running)
        coupled = dataclasses.replace(coupled, tiers=self._tiers(self.coupled_host_bytes))
        found: list[ClusterInstance] = []
        for role, name, count, config in (
            ("prefill", "prefill", self.prefill, prefill),
            ("decode", "decode", self.decode, decode),
            ("both", "coupled", self.coupled, coupled),
        ):
            if count:
                found += self._copies(role, name, count, config)  # type: ignore[arg-type]
        if self.names:
            found = [dataclasses.replace(each, name=name) for each, name in zip(found, self.names, strict=True)]
        return found

    def simulation(self) -> Simulation:
        """Return what serves workloads on new instances behind a new conductor."""
        conductor = Conductor(copy.deepcopy(self.config), PrefixIndex())  # a policy of one's own may remember things
        return Simulation(self.instances(), conductor, self.settings, self.changes)

    def _config(self, token_budget: int, max_running: int, prefix_cache: bool | None = None) -> EngineConfig:
        rows = min(token_budget, self.chunk)
        config = EngineConfig(
            page_size=self.page_size,
            max_running=max_running,
            token_budget=token_budget,
            policy="fcfs",
            chunking="static",
            slo=Slo(tpot=self.config.tpot),
            run_ahead=1,
            prefix_cache=self.prefix_cache if prefix_cache is None else prefix_cache,
            kv_dtype=self.kv_dtype,
        )
        made = self.model, self.plan, self.topology.device
        tokens = max_tokens(*made, rows, kv_dtype=self.kv_dtype, config=config)
        return dataclasses.replace(config, num_pages=max(1, tokens // self.plan.context // self.page_size))

    def _tiers(self, num_bytes: int) -> TierConfig | None:
        return TierConfig(host_bytes=num_bytes) if num_bytes and self.prefix_cache else None

    def _copies(self, role: Role, name: str, count: int, config: EngineConfig) -> list[ClusterInstance]:
        rows, kv_dtype = config.token_budget, config.kv_dtype
        seconds = predictor(self.model, self.topology, self.plan, max_rows=rows, kv_dtype=kv_dtype)
        first = ClusterInstance(
            name=f"{name}-0",
            role=role,
            model=self.model,
            config=config,
            predictor=seconds,
            plan=self.plan,
            topology=self.topology,
            bandwidth=self.bandwidth,
            latency=self.latency,
            is_patient=role == "both" or self.config.admission == "none",
        )
        return [dataclasses.replace(first, name=f"{name}-{number}") for number in range(count)]
