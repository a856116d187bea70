"""Seconds that the thread of an engine takes beside its devices, as a parameter of simulated ones."""

from dataclasses import dataclass

from longctx.models.validation import check_bool, check_real


@dataclass(frozen=True)
class HostTimes:
    """Seconds of an engine's thread, which plans one batch while the devices run another.

    A step is longer for it only where the devices have nothing to do meanwhile: before the first batch after idle time,
    where no batch is planned ahead, and where the devices take less for a batch than the thread.

    Attributes:
      front_end: that a request takes before the engine's thread has it: one request after the other, beside all steps.
      request: to let a request enter, before the next batch is planned.
      batch: to plan a batch and to submit it, before the devices begin it.
      results: to make events of a batch's results, before the next batch is planned.
      shares_cores: whether the devices are the processors that the thread runs on, as of a CPU: then `results` is never
        hidden, and makes every batch longer. (`batch` is in the times of `longctx profile`.)

    Raises:
      TypeError, ValueError: a time is no finite number of at least 0.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import HostTimes, Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import Lengths, synthesize
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=2000)
      >>> seconds = predictor(model, "h100-nvlink", max_rows=config.token_budget)
      >>> for host in (None, HostTimes(batch=0.02)):  # 20 ms to plan a step, where devices take less for it
      ...     instance = Instance(model, config, seconds, host=host)
      ...     [served] = Simulation([instance]).run(synthesize(1, Lengths(100, 100), Lengths(50, 50))).served
      ...     print(round(served.tpot, 4))
      0.0062
      0.0197
    """

    request: float = 0.0
    batch: float = 0.0
    results: float = 0.0
    shares_cores: bool = False
    front_end: float = 0.0

    def __post_init__(self) -> None:
        for name in ("request", "batch", "results", "front_end"):
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0))
        check_bool("shares_cores", self.shares_cores)

    @property
    def is_of_steps(self) -> bool:
        """Whether some time belongs to steps, which then are not all alike."""
        return self.request > 0 or self.batch > 0 or self.results > 0

    @property
    def hidden(self) -> float:
        """The part of `results` that devices which are busy hide."""
        return 0.0 if self.shares_cores else self.results

    @property
    def shared(self) -> float:
        """The part that makes every batch longer."""
        return self.results - self.hidden
