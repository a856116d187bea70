"""`Journal`: what hears of all that an engine's decisions follow from, and of the decisions."""

from collections.abc import Sequence as List
from typing import Protocol, runtime_checkable

import numpy as np

from longctx.serving.executor.submit_queue import EndedStep
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.request.output import Event
from longctx.serving.request.request import Request
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.sequence import Sequence


@runtime_checkable
class Journal(Protocol):
    """An engine calls it in the order in which things happen, under its lock: from one thread at a time.

    `Lockstep` sends what it hears to other processes, `Recorder` writes it to a file.
    """

    def note_arrival(
        self, request: Request, tokens: np.ndarray, request_id: str, now: float, sequences: list[Sequence]
    ) -> None:
        """A request has entered, as sequences that are about to be added to the core; its prompt is `tokens` `[T]`."""
        ...

    def note_cancel(self, request_id: str, now: float, lease: str | None = None) -> None:
        """A request has been cancelled, or ended for another engine, for which its pages are kept under `lease`."""
        ...

    def note_release(self, lease_id: str) -> None:
        """Nobody needs a lease any more."""
        ...

    def note_forgotten(self, keys: list[Key]) -> None:
        """Pages are to be found no more: they were wrong."""
        ...

    def note_pinned(self, keys: list[Key], seconds: float) -> None:
        """Tiers keep pages for some seconds; 0: they may go."""
        ...

    def note_load(self, loaded: Loaded, now: float) -> None:
        """A load has ended."""
        ...

    def note_step(self, now: float) -> None:
        """A step is about to be planned."""
        ...

    def note_plan(self, batch: Batch) -> None:
        """A batch has been planned; there may be none or several in a step."""
        ...

    def note_draw(self, batch: Batch, tokens: List[int]) -> None:
        """The tokens sampled from a batch have come."""
        ...

    def note_end(self, step: EndedStep | None, events: list[Event]) -> None:
        """The core has taken the results of the step's oldest batch, and made these events; None: none had begun."""
        ...

    def note_clear(self) -> None:
        """The cache has forgotten what it held."""
        ...

    def note_failure(self, cause: str) -> None:
        """The engine has failed; nothing comes after it."""
        ...
