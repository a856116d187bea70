"""Deployments of the systems that the papers compare with."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as List

from longctx.simulation.baselines import BASELINES, make_simulation
from longctx.simulation.deployment import Deployment
from longctx.simulation.record import Record
from longctx.simulation.reports.stage_trace import StageTrace
from longctx.simulation.workloads import WorkloadRequest


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
