"""`AuditProcess`: a process of low priority that runs the samples of a shadow audit forward."""

import contextlib
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from longctx.cluster.conductor.audit import Forward, Outcome, ShadowAudit
from longctx.cluster.conductor.snapshot import Snapshot
from longctx.serving.worker_process import follow_parent

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2  # between two looks for samples
_NICE = 19
_forward: Forward | None = None  # of this process


class AuditProcess:
    """Takes an audit's samples, and notes their outcomes, from a thread of its own.

    A sample whose run fails is left out, with a line in the log. A process that died is started anew for the next one.

    Args:
      make_forward: makes what runs them; it is called in the process, so it must be picklable.
    """

    def __init__(self, audit: ShadowAudit, make_forward: Callable[[], Forward]) -> None:
        self._audit, self._make_forward = audit, make_forward
        self._pool: ProcessPoolExecutor | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="longctx audit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process and the thread; a run that is under way is given up."""
        self._ended.set()
        self._stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            snapshot = self._audit.take()
            if snapshot is None:
                self._ended.wait(_LOOK_SECONDS)
                continue
            try:
                self._audit.note(snapshot, self._outcome(snapshot))
            except Exception as error:
                if not self._ended.is_set():
                    logger.warning("longctx: a sample of the audit could not be run: %r", error)
                if isinstance(error, BrokenProcessPool):
                    self._stop()

    def _outcome(self, snapshot: Snapshot) -> Outcome:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(self._make_forward,))
        return self._pool.submit(_run_forward, snapshot).result()

    def _stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(make_forward: Callable[[], Forward]) -> None:
    """In a new process."""
    global _forward
    follow_parent()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    _forward = make_forward()


def _run_forward(snapshot: Snapshot) -> Outcome:
    assert _forward is not None
    return _forward(snapshot)
