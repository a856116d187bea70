"""Threads that do jobs in order of urgency."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

URGENT, IN_THE_BACKGROUND = 0, 1
_LAST = 2


class Workers:
    """Threads with one queue of jobs. A job's exception is logged, and ends that job only."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._serials = itertools.count()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], urgency: int = URGENT) -> None:
        """Do a job after those that are as urgent, or more."""
        self._jobs.put((urgency, next(self._serials), job))

    def close(self, timeout: float) -> None:
        """End when all jobs are done; wait so many seconds at most."""
        for _ in self._threads:
            self._jobs.put((_LAST, next(self._serials), None))
        for thread in self._threads:
            thread.join(timeout)

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of %s failed", threading.current_thread().name)
