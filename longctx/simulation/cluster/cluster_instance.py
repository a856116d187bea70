"""`ClusterInstance`: what an instance of a simulated cluster is made of."""

import functools
import sys
from dataclasses import dataclass, field

from longctx.cluster.conductor.config import ROLES, Role
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.conductor.instance import InstanceSpec
from longctx.models.config import LlamaConfig
from longctx.models.footprint import cache_bytes
from longctx.models.validation import check_real
from longctx.parallel.topology import Topology
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.runtime import Predictor
from longctx.serving.scheduler.chunking import Chunking
from longctx.serving.validation import check_text
from longctx.simulation.cluster.settings import ServerTimes
from longctx.simulation.instance.host_times import HostTimes
from longctx.simulation.instance.virtual_tier import HOST_BANDWIDTH

NIC_BANDWIDTH = 100e9
"""Bytes per second of a host's network cards: Mooncake's 800 Gb/s (7.1)."""


@dataclass(frozen=True)
class ClusterInstance:
    """An instance; plain data.

    Attributes:
      name: that no other instance of the cluster has.
      role: at first.
      model: what it serves.
      config: of its engine, with `num_pages`; `tiers.host_bytes` is the host memory that keeps pages of prefixes.
      predictor: of its batches: how long they take, and what the conductor goes by.
      plan: of its devices.
      topology: of these, where exchanges are chosen by it.
      bandwidth: bytes per second at which it sends to others, shared by all that it sends.
      latency: seconds from the last byte that it sends to its arrival.
      host_bandwidth: bytes per second between each device and its host.
      host: what its thread takes beside the devices. None: no time.
      core: of a processor, by any name, that computes its steps and runs its server, and is shared by all that have the
        same one; what computes there at a time gets equal parts of it. Empty: its devices and its server are its own.
      server: what its server takes for requests beside the engine.
      is_patient: whether requests that it has no room for may wait there, so that the conductor is told of no limit: as
        engines with queues of their own are used behind plain routers.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Source:
      Mooncake, 3: each host's memory and network cards take part in the cache.

    Examples:
      >>> from longctx.parallel.topology import Topology
      >>> from longctx.serving import ParallelPlan
      >>> from longctx.simulation.deployment import ClusterDeployment
      >>> from longctx.simulation.models import MODELS
      >>> model, topology, plan = MODELS["llama-3-8b"], Topology.preset("h100-rdma"), ParallelPlan(tensor=8)
      >>> deployment = ClusterDeployment(model, topology, plan, prefill=1, decode=1, host_bytes=10**12)
      >>> for instance in deployment.instances():
      ...     print(instance.name, instance.role, instance.config.num_pages, instance.host_pages)
      prefill-0 prefill 8332 14901
      decode-0 decode 8342 0
    """

    name: str
    role: Role
    model: LlamaConfig
    config: EngineConfig
    predictor: Predictor
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    topology: Topology | None = None
    bandwidth: float = NIC_BANDWIDTH
    latency: float = 0.0
    host_bandwidth: float = HOST_BANDWIDTH
    host: HostTimes | None = None
    is_patient: bool = False
    core: str = ""
    server: ServerTimes = field(default_factory=ServerTimes)

    def __post_init__(self) -> None:
        check_text("name", self.name)
        if self.role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, got {self.role!r}")
        if self.config.num_pages is None:
            raise ValueError("config must have num_pages: there is no device whose memory would say it")
        for name in ("bandwidth", "host_bandwidth"):
            if not check_real(name, getattr(self, name), 0) > 0:
                raise ValueError(f"{name} must be bytes per second, more than 0, got {getattr(self, name)}")
        check_real("latency", self.latency, 0)
        if self.core and self.host is not None and self.host.hidden:
            raise ValueError("host must say that it shares cores, as core is given")

    @functools.cached_property
    def costs(self) -> PredictorCosts:
        """Costs of its work, by which the conductor decides."""
        config, plan = self.config, self.plan
        chunk = Chunking.parse(config.chunking, config.token_budget, config.max_running).tokens
        return PredictorCosts.of_model(self.predictor, self.model, chunk, plan, kv_dtype=config.kv_dtype)

    def spec(self, role: Role, swaps: bool) -> InstanceSpec:
        """Return what the conductor is told of it.

        Args:
          role: with which it joins.
          swaps: whether that has it drop cold blocks.
        """
        config = self.config
        assert config.num_pages is not None
        return InstanceSpec(
            name=self.name,
            role=role,
            costs=self.costs,
            block_size=config.page_size,
            decode_tokens=sys.maxsize if self.is_patient else config.num_pages * self.plan.context * config.page_size,
            max_running=sys.maxsize if self.is_patient else config.max_running,
            bandwidth=self.bandwidth,
            latency=self.latency,
            cache_blocks=(0, self.host_pages if swaps else 0, 0),
        )

    @property
    def host_pages(self) -> int:
        """Pages that the host's memory keeps."""
        config, tiers = self.config, self.config.tiers
        page_bytes = config.page_size * cache_bytes(self.model, 1, kv_dtype=config.kv_dtype)
        return 0 if tiers is None else int(tiers.host_bytes // page_bytes)
