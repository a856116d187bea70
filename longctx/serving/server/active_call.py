"""`ActiveCall`: a call that runs, from the first of its requests that is submitted to its client's end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from longctx.serving.engine.admission_control import Refused
from longctx.serving.request.output import Event, Output
from longctx.serving.server.errors import DROPPED, ApiError, not_servable
from longctx.serving.server.read_call import Call
from longctx.serving.server.streams import Deliveries, Delivery, Stream
from longctx.serving.server.transfers import Received

if TYPE_CHECKING:
    from longctx.serving.server.frontend import Backend


class Limits(NamedTuple):
    """Of one call: completions of a prompt, and those of all its prompts, which have to wait together."""

    most: int
    most_waiting: int


class ActiveCall:
    """Submits the requests of a call, all or none, and reads what comes of them; for the event loop's thread.

    Args:
      shown_id: by which the client knows the call.
      buffer: steps' tokens of each request that may wait for the client.
      arrival: by the backend's clock.
      received: what another engine has computed of the call's one request.
      failures: see `Frontend`.

    Attributes:
      submitted: ids of all its requests.

    Raises:
      ApiError: a request can never be served, or not now, or the engine has failed.
    """

    def __init__(
        self,
        backend: "Backend",
        deliveries: Deliveries,
        call: Call,
        shown_id: str,
        buffer: int,
        limits: Limits,
        arrival: float | None = None,
        received: Received | None = None,
        failures: Mapping[str, ApiError] | None = None,
    ) -> None:
        self.call, self.shown_id, self._backend, self._received = call, shown_id, backend, received
        self._failures = {} if failures is None else failures
        self.submitted: list[str] = []
        self._open: dict[int, tuple[str, set[int]]] = {}  # requests that have not ended, and completions that have not
        self.stream = Stream(buffer * len(call.requests), self.cancel)
        is_whole = not call.body.stream
        most, most_waiting = limits
        count = len(call.requests) * call.num_choices
        if call.num_choices > most:
            raise ApiError(400, f"n must be at most {most:,}, got {call.num_choices:,}", "n")
        if count > most_waiting:  # it could never be let in whole
            raise ApiError(400, f"the prompts ask for {count:,} completions, and {most_waiting:,} may wait", "n")
        try:
            for number, prepared in enumerate(call.requests):
                sink = deliveries.sink(self.stream, number, is_whole)
                request_id = backend.submit(prepared, sink, arrival, received)
                self.submitted.append(request_id)
                self._open[number] = request_id, set(range(prepared.request.sampling.n))
        except BaseException as error:
            self.close()
            answer = refusal(error)
            if answer is None:
                raise
            raise answer from error

    @property
    def request_ids(self) -> list[str]:
        return [request_id for request_id, _ in self._open.values()]

    @property
    def is_open(self) -> bool:
        """Whether some event has not been read."""
        return bool(self._open)

    async def take(self) -> list[Delivery]:
        """Wait for events, and take all that are there, with the number of each request; none: the stream was nudged.

        Raises:
          ApiError: a request has failed, or the client reads too slowly.
        """
        taken = await self.stream.take()
        if self.stream.has_ended:
            raise ApiError(408, "the client reads too slowly: its request was cancelled", code="slow_reader")
        for number, events in taken:
            self._note_ends(number, events)
        return taken

    async def outputs(self) -> dict[tuple[int, int], Output]:
        """All outputs, by the number of the request and their index, when all are there; ApiError as from `take`."""
        outputs: dict[tuple[int, int], Output] = {}
        while self._open:
            for number, events in await self.take():
                outputs |= {(number, event.index): event.output for event in events if event.output is not None}
        return outputs

    def cancel(self) -> None:
        """End what has not ended; the last events still come."""
        for request_id in self.request_ids:
            self._backend.cancel(request_id)

    def close(self) -> None:
        """End what has not ended, since nobody reads any more."""
        self.stream.close()
        self.cancel()
        self._open.clear()
        if self._received is not None:
            self._received.release()

    def _note_ends(self, number: int, events: list[Event]) -> None:
        request_id, indices = self._open[number]
        for event in events:
            if event.output is not None:
                if event.output.finish_reason == "error":
                    if request_id in self._failures:
                        raise self._failures[request_id]
                    raise ApiError(500, event.output.error or "the request failed", code="engine_error")
                indices.discard(event.index)
        if not indices:
            del self._open[number]


def refusal(error: BaseException) -> ApiError | None:
    """The answer to what `EngineThread.submit` raises; None: it is no answer to a client."""
    if isinstance(error, Refused):
        dropped: dict[str, str] = {DROPPED: error.reason}
        if error.reason == "draining":
            dropped["connection"] = "close"
            return ApiError(503, str(error), None, "server_is_overloaded", error.retry_after, dropped)
        return ApiError(429, str(error), None, "slow_down", error.retry_after, dropped)
    if isinstance(error, TypeError | ValueError):
        return not_servable(error)
    if isinstance(error, RuntimeError):
        return ApiError(500, str(error), code="engine_error")
    return None
