"""`Relay`: a request that has left for another server, whose events are passed on to its client here."""

from collections.abc import AsyncIterator, Callable

from longctx.serving.engine.active_request import MigratedRequest, MigratingRequest
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Event, FinishReason
from longctx.serving.server.event_lines import EventLine
from longctx.serving.server.relayed_outputs import RelayBroken, RelayedOutputs

Lines = AsyncIterator[list[EventLine]]


class Relay:
    """Passes on what another server computes of a request; takes the request back if that ends too early.

    Its methods are for the event loop's thread.

    Args:
      flush: see `EngineThread`.
    """

    def __init__(
        self, thread: EngineThread, migration: MigratingRequest, migrated: MigratedRequest, flush: Callable[[], object]
    ) -> None:
        self._thread, self._migration, self._migrated, self._flush = thread, migration, migrated, flush
        self._relayed = RelayedOutputs(migrated.outputs, migrated.open)

    async def follow(self, lines: Lines) -> None:
        """Pass events on until the last one.

        Raises:
          RelayBroken: they end before, or the other server fails, or they can't be right.
        """
        async for line in lines:
            now = self._thread.engine.now()
            events = [event for entry in line if (event := self._relayed.read(entry, now)) is not None]
            if events:
                self._migrated.sink(events)
                self._flush()
            if not self._relayed.open:
                self._thread.end_migration(self._migration)
                return
        raise RelayBroken("its events ended before the request did")

    def resume_locally(self) -> None:
        """Go on here; the pages that are still in the cache are found there."""
        outputs, handoff = self._relayed.outputs, self._relayed.handoff()
        open_ = self._relayed.open
        skip = _Skip(self._migrated.sink, {output.index: len(output.token_ids) for output in outputs}, open_)
        migrated = self._migrated._replace(outputs=outputs)
        try:
            self._thread.resume_locally(self._migration, migrated, handoff, skip)
        except (RuntimeError, ValueError) as error:
            self.end("error", f"the request could not be moved, nor be taken back: {error}")

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Tell the client that nothing comes any more."""
        self._thread.end_migration(self._migration)
        now = self._thread.engine.now()
        events = [self._relayed.end(index, reason, now, error) for index in sorted(self._relayed.open)]
        self._migrated.sink(events)
        self._flush()


class _Skip:
    """A sink that leaves out what a client has had."""

    def __init__(self, sink: Callable[[list[Event]], object], had: dict[int, int], open_: set[int]) -> None:
        self._sink, self._had, self._open = sink, had, set(open_)

    def __call__(self, events: list[Event]) -> None:
        new = []
        for event in events:
            if event.index not in self._open:
                continue
            if self._had[event.index] and event.token_ids:
                self._had[event.index] -= len(event.token_ids)
            else:
                new.append(event)
        if new:
            self._sink(new)
