"""Clusters to simulate: prefill, decode and coupled instances of one model, each on the devices of a plan."""

import copy
import dataclasses
import math
from collections.abc import Sequence as List

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.models.config import LlamaConfig
from longctx.models.validation import check_kv_dtype
from longctx.parallel.topology import AXES, Topology
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.scheduler.slo import Slo
from longctx.serving.validation import check_integer
from longctx.simulation.cluster.cluster_instance import NIC_BANDWIDTH, ClusterInstance
from longctx.simulation.cluster.cluster_record import ClusterRecord
from longctx.simulation.cluster.conductor_run import Priority
from longctx.simulation.cluster.settings import Change, ClusterSettings
from longctx.simulation.hardware import predictor
from longctx.simulation.run import Progress
from longctx.simulation.simulation import Simulation
from longctx.simulation.utilization import max_tokens
from longctx.simulation.workloads import WorkloadRequest


@dataclasses.dataclass(frozen=True)
class ClusterDeployment:
    """A cluster. Plain data, so that other processes can simulate it.

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
      >>> from longctx.simulation.cluster import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> requests = arrive_at_rate(make_mix("sharegpt4", 100), rate=4.0)
      >>> record = ClusterDeployment(model, topology, plan, prefill=2, decode=1).run(requests)
      >>> sorted({(placed.assignment.prefill, placed.assignment.decode) for placed in record.placed})
      [('decode-0', 'decode-0'), ('prefill-0', 'decode-0'), ('prefill-1', 'decode-0')]
    """

    model: LlamaConfig
    topology: Topology
    plan: ParallelPlan
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
        if not (self.coupled or (self.prefill and self.decode)):
            raise ValueError("prefill and decode must both be at least 1, or coupled must be")
        if self.names and len(self.names) != self.num_instances:
            raise ValueError(f"names must be of all {self.num_instances} instances, got {len(self.names)}")
        self.plan.check(self.model, self.plan.num_devices)
        self.topology.check(**{axis: getattr(self.plan, axis) for axis in AXES})

    @property
    def num_instances(self) -> int:
        """Number of instances of all kinds."""
        return self.prefill + self.decode + self.coupled

    @property
    def num_devices(self) -> int:
        """Number of devices of all instances."""
        return self.num_instances * self.plan.num_devices

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

    def run(
        self,
        requests: List[WorkloadRequest],
        seed: int = 0,
        until: float = math.inf,
        progress: Progress | None = None,
        priority: Priority | None = None,
        keep_steps: bool = False,
    ) -> ClusterRecord:
        """Serve a workload on new instances behind a new conductor, see `Simulation.run`.

        Args:
          requests, seed, until, progress, keep_steps, priority: as for `Simulation.run`.

        Returns:
          What came of it.
        """
        conductor = Conductor(copy.deepcopy(self.config), PrefixIndex())  # a policy of one's own may remember things
        simulation = Simulation(self.instances(), conductor, self.settings, self.changes)
        record = simulation.run(requests, seed, until, progress, keep_steps, priority)
        assert isinstance(record, ClusterRecord)
        return record

    def _config(self, token_budget: int, max_running: int, prefix_cache: bool | None = None) -> EngineConfig:
        rows = min(token_budget, self.chunk)
        tokens = max_tokens(self.model, self.plan, self.topology.device, rows, kv_dtype=self.kv_dtype)
        return EngineConfig(
            page_size=self.page_size,
            num_pages=max(1, tokens // self.plan.context // self.page_size),
            max_running=max_running,
            token_budget=token_budget,
            policy="fcfs",
            chunking="static",
            slo=Slo(tpot=self.config.tpot),
            run_ahead=1,
            prefix_cache=self.prefix_cache if prefix_cache is None else prefix_cache,
            kv_dtype=self.kv_dtype,
        )

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
