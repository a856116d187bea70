"""`Departure`: a request that leaves an engine's thread, while another engine goes on with it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from longctx.serving.request.output import Event, Output
from longctx.serving.request.request import PreparedRequest

Sink = Callable[[list[Event]], object]
"""Is called with the events that a step brought a request. It must not block: the engine waits for it."""


class Departed(NamedTuple):
    """A request that has left.

    Attributes:
      sink: still waits for its events.
      outputs: of all completions, in order; those that had ended before are whole, others say `"moved"`.
    """

    prepared: PreparedRequest
    arrival: float
    sink: Sink
    outputs: list[Output]

    @property
    def open(self) -> set[int]:
        """The completions that have not ended."""
        return {output.index for output in self.outputs if output.finish_reason == "moved"}


class Departure:
    """A request that is leaving, or has left.

    Attributes:
      left: gets what has left between two steps; or None, if the request ended before.
      is_cancelled: nobody wants it any more.
      on_cancel: is called then, by any thread.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.left: Future[Departed | None] = Future()
        self.is_cancelled = False
        self.on_cancel: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        self.is_cancelled = True
        self.on_cancel()
