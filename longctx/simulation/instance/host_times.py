"""What the thread of an engine takes beside its devices, as a parameter of simulated ones."""

from dataclasses import dataclass

from longctx.serving.validation import check_bool, check_real


@dataclass(frozen=True)
class HostTimes:
    """Seconds of an engine's thread, which plans one batch while the devices run another.

    A step is longer for it only where the devices have nothing to do meanwhile: before the first batch after idle time,
    where no batch is planned ahead, and where the devices take less for a batch than the thread.

    Attributes:
      request: to let a request enter, before the next batch is planned.
      batch: to plan a batch and to submit it, before the devices begin it.
      results: to make events of a batch's results, before the next batch is planned.
      shares_cores: whether the devices are the processors that the thread runs on, as of a CPU: then `results` is never
        hidden, and makes every batch longer. (`batch` is in the times of `longctx profile`.)

    Raises:
      TypeError, ValueError: a time is no finite number of at least 0.
    """

    request: float = 0.0
    batch: float = 0.0
    results: float = 0.0
    shares_cores: bool = False

    def __post_init__(self) -> None:
        for name in ("request", "batch", "results"):
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0))
        check_bool("shares_cores", self.shares_cores)

    @property
    def hidden(self) -> float:
        """The part of `results` that devices which are busy hide."""
        return 0.0 if self.shares_cores else self.results

    @property
    def shared(self) -> float:
        """The part that makes every batch longer."""
        return self.results - self.hidden
