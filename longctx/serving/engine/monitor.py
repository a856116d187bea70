"""Calls a user's function with the figures of every step."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from longctx.serving.engine.metrics import StepMetrics
from longctx.serving.executor.submit_queue import EndedStep

logger = logging.getLogger(__name__)


class Monitor:
    """Calls a function with every ended step, in order, until it raises; None: there is nobody to tell."""

    def __init__(self, call: Callable[[StepMetrics], object] | None) -> None:
        self._call = call
        self._ended: deque[StepMetrics] = deque()
        self._calling = threading.Lock()

    def note(self, step: EndedStep) -> None:
        """Keep a step for `catch_up`."""
        if self._call is not None:
            self._ended.append(StepMetrics.of(step))

    def catch_up(self) -> None:
        """Tell of the steps that were noted. Whoever comes while another thread does leaves it to that one."""
        while self._ended and self._calling.acquire(blocking=False):
            try:
                while self._ended:
                    step = self._ended.popleft()
                    if self._call is not None:
                        self._call(step)
            except Exception:
                self._call = None
                logger.exception("the engine's monitor raised in step %d, and is not called any more", step.number)
            finally:
                self._calling.release()
