"""What came of a workload: its requests, and the engine after each step."""

from dataclasses import dataclass, field
from typing import Self

from longctx.serving.engine.metrics import EngineStats, StepMetrics
from longctx.serving.request.output import Metrics


@dataclass(frozen=True)
class Served:
    """A request that has ended; seconds from the beginning of the workload. `ttft` counts from when it was due."""

    due: float
    metrics: Metrics
    ttft: float
    tpot: float | None

    @classmethod
    def of(cls, metrics: Metrics, due: float, start: float) -> Self:
        """Of a request that was due so many seconds after `start`."""
        assert metrics.first_token is not None
        return cls(due, metrics, metrics.first_token - start - due, metrics.tpot)

    @property
    def kept_ttft(self) -> bool | None:
        """Whether the first token came in time, from when the request was due."""
        return None if self.metrics.ttft_deadline is None else self.ttft <= self.metrics.ttft_deadline


@dataclass
class Record:
    """What a workload came to: its requests in the order in which they ended, and the engine after each step."""

    seconds: float = 0.0
    failed: int = 0  # requests that ended with an error; they are not among those served
    served: list[Served] = field(default_factory=list)
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, running, waiting
    stats: EngineStats | None = None
    steps: list[StepMetrics] = field(default_factory=list)  # of an engine, where its monitor appends to it
