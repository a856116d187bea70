"""Events on their way from the engine's thread to the clients' coroutines: pushed, and woken for once a step."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from longctx.serving.request.output import Event

Delivery = tuple[int, list[Event]]
"""The number of a request among those of its call, and its events of a step."""


class Stream:
    """Stream of the events of one call's requests, read by one coroutine. Its methods are for the event loop's thread.

    Attributes:
      has_ended: the stream has overflowed, or is closed.
    """

    __slots__ = ("_deliveries", "_is_nudged", "_is_silent", "_limit", "_overflow", "_waiter", "has_ended")

    def __init__(self, limit: int, overflow: Callable[[], object]) -> None:
        self._deliveries: list[Delivery] = []
        self._limit, self._overflow = limit, overflow
        self._waiter: asyncio.Future[None] | None = None  # of the reader
        self._is_silent = self._is_nudged = self.has_ended = False

    def add(self, delivery: Delivery) -> None:
        """Hand a delivery over to the reader."""
        if self.has_ended:
            return
        self._is_silent = False
        if len(self._deliveries) == self._limit:
            self.close()
            self._overflow()
        else:
            self._deliveries.append(delivery)
            self._wake()

    def nudge(self) -> None:
        """Let the reader take nothing, if nothing has come since the last call: it may then send a comment."""
        if self._is_silent:
            self._is_nudged = True
            self._wake()
        self._is_silent = True

    def close(self) -> None:
        """End the stream, which has no reader any more."""
        self.has_ended = True
        self._deliveries.clear()
        self._wake()

    async def take(self) -> list[Delivery]:
        """Wait for events, and take all that are there: none if the stream was nudged, or has ended."""
        if not (self._deliveries or self._is_nudged or self.has_ended):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_nudged = False
        taken, self._deliveries = self._deliveries, []
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EventDispatcher:
    """Dispatcher of events from the engine's thread to an event loop, with one wake-up a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Stream, Delivery]] = deque()
        self._is_woken = False

    def sink(self, stream: Stream, number: int, is_whole: bool) -> Callable[[list[Event]], None]:
        """Return the sink that the engine's thread calls with the events of a call's request."""
        append = self._queue.append

        def push(events: list[Event]) -> None:
            append((stream, (number, events)))

        def push_ends(events: list[Event]) -> None:
            ends = [event for event in events if event.output is not None]
            if ends:
                append((stream, (number, ends)))

        return push_ends if is_whole else push

    def flush(self) -> None:
        """Wake the event loop, if there is something for it. Any thread may call it."""
        if self._queue and not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """Hand over what there is; for the event loop's thread."""
        self._is_woken = False  # before the queue is emptied, so that what comes later wakes it again
        while self._queue:
            stream, delivery = self._queue.popleft()
            stream.add(delivery)
