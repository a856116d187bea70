"""Calls users' functions with the figures of every step."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import EndedStep

logger = logging.getLogger(__name__)

StepMonitor = Callable[[StepMetrics], object]


class Monitor:
    """Calls functions with every ended step, in order; one that raises is not called any more."""

    def __init__(self, call: StepMonitor | None) -> None:
        self._calls: list[StepMonitor] = [] if call is None else [call]
        self._ended: deque[StepMetrics] = deque()
        self._calling = threading.Lock()

    def add(self, call: StepMonitor) -> None:
        """Call one more function from the next step on."""
        self._calls.append(call)

    def note(self, step: EndedStep) -> None:
        """Keep a step for `catch_up`."""
        if self._calls:
            self._ended.append(StepMetrics.of(step))

    def catch_up(self) -> None:
        """Tell of the steps that were noted. Whoever comes while another thread does leaves it to that one."""
        while self._ended and self._calling.acquire(blocking=False):
            try:
                while self._ended:
                    step = self._ended.popleft()
                    for call in tuple(self._calls):
                        self._tell(call, step)
            finally:
                self._calling.release()

    def _tell(self, call: StepMonitor, step: StepMetrics) -> None:
        try:
            call(step)
        except Exception:
            self._calls.remove(call)
            logger.exception("the engine's monitor raised in step %d, and is not called any more", step.number)
