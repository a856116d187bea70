"""`Relay`: a request that has left for another server, whose events are passed on to its client here."""

import dataclasses
from collections.abc import AsyncIterator, Callable

from longctx.serving.engine.departure import Departed, Departure
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, FinishReason, Output
from longctx.serving.server.event_lines import EventLine

Lines = AsyncIterator[list[EventLine]]


class RelayBroken(RuntimeError):
    """The other server refuses a request, or does not go on with it."""


class Relay:
    """Passes on what another server computes of a request; takes the request back if that ends too early.

    Its methods are for the event loop's thread.

    Args:
      flush: see `EngineThread`.
    """

    def __init__(
        self, thread: EngineThread, departure: Departure, departed: Departed, flush: Callable[[], object]
    ) -> None:
        self._thread, self._departure, self._departed, self._flush = thread, departure, departed, flush
        self._outputs = {output.index: _copied(output) for output in departed.outputs}
        self._open = departed.open
        # What the client has had, which comes again from whoever goes on with the request.
        self._repeated = {output.index: len(output.token_ids) for output in departed.outputs}

    async def follow(self, lines: Lines) -> None:
        """Pass events on until the last one.

        Raises:
          RelayBroken: they end before, or the other server fails, or they can't be right.
        """
        async for line in lines:
            events = [event for entry in line for event in self._read(entry)]
            if events:
                self._departed.sink(events)
                self._flush()
            if not self._open:
                self._thread.forget_departure(self._departure)
                return
        raise RelayBroken("its events ended before the request did")

    def take_back(self) -> None:
        """Go on here; the pages that are still in the cache are found there."""
        outputs = list(self._outputs.values())
        handoff = Handoff.of(outputs)
        handoff = handoff._replace(completions=tuple(each._replace(lease=None) for each in handoff.completions))
        skip = _Skip(self._departed.sink, {output.index: len(output.token_ids) for output in outputs}, self._open)
        departed = self._departed._replace(outputs=outputs)
        try:
            self._thread.take_back(self._departure, departed, handoff, skip)
        except (RuntimeError, ValueError) as error:
            self.end("error", f"the request could not be moved, nor be taken back: {error}")

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Tell the client that nothing comes any more."""
        self._thread.forget_departure(self._departure)
        events = [self._end(index, (), "", reason, error) for index in sorted(self._open)]
        self._departed.sink(events)
        self._flush()

    def _read(self, entry: EventLine) -> list[Event]:
        """The client's event of one of the other server's: none if it has had it."""
        index, tokens = entry.index, entry.token_ids
        if index not in self._repeated or len(tokens) > 1:
            raise RelayBroken("its events are not of this request")
        if self._repeated[index] and tokens:
            if tokens[0] != self._outputs[index].token_ids[-self._repeated[index]]:
                raise RelayBroken("it does not repeat the tokens that it was given")
            self._repeated[index] -= 1
            return []
        if index not in self._open:
            return []
        end = entry.end
        if end is not None and end.reason not in ("stop", "length"):
            raise RelayBroken(end.error or f"it ended the request: {end.reason}")
        output = self._outputs[index]
        output.token_ids.extend(tokens)
        if output.logprobs is not None:
            output.logprobs.extend(entry.logprobs)
        if end is None:
            self._outputs[index] = dataclasses.replace(output, text=output.text + entry.text)
            return [Event(output.request_id, index, tokens, entry.text, entry.logprobs)]
        if output.prompt_logprobs is not None and end.prompt_logprobs is not None:
            output.prompt_logprobs[:] = end.prompt_logprobs
        return [dataclasses.replace(self._end(index, tokens, entry.text, end.reason), logprobs=entry.logprobs)]

    def _end(
        self, index: int, tokens: tuple[int, ...], text: str, reason: FinishReason, error: str | None = None
    ) -> Event:
        """The last event of a completion."""
        output, now = self._outputs[index], self._thread.engine.now()
        first = output.metrics.first_token
        metrics = dataclasses.replace(
            output.metrics,
            output_tokens=len(output.token_ids),
            first_token=now if first is None and output.token_ids else first,
            last_token=now,
            finished=now,
        )
        output = dataclasses.replace(
            output, text=output.text + text, finish_reason=reason, error=error, metrics=metrics, lease=None
        )
        self._outputs[index] = output
        self._open.discard(index)
        return Event(output.request_id, index, tokens, text, (), output)


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


def _copied(output: Output) -> Output:
    """An output whose lists grow by themselves."""
    return dataclasses.replace(
        output,
        token_ids=[*output.token_ids],
        logprobs=None if output.logprobs is None else [*output.logprobs],
        prompt_logprobs=None if output.prompt_logprobs is None else [*output.prompt_logprobs],
    )
