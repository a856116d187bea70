"""Base of the servers of HTTP routes: of one engine (`Server`), and of many (`longctx.cluster.router`).

A frontend parses calls, holds the active ones, and ends them. A `Backend` computes their requests.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol, runtime_checkable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from longctx import __version__
from longctx.models.tokenizer import TokenBytes
from longctx.serving.engine.active_request import Sink
from longctx.serving.engine.admission_control import check_logprobs
from longctx.serving.request.output import Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.access import HttpRequests, Usage
from longctx.serving.server.auth import KeyRing
from longctx.serving.server.caches import Caches
from longctx.serving.server.calls import Kind, Origin, ParsedCall
from longctx.serving.server.errors import DROPPED, ApiError, refusals_answered
from longctx.serving.server.logs import AuditLog
from longctx.serving.server.preparer import Bodies, Preparer
from longctx.serving.server.request_parser import RequestParser, cache_named
from longctx.serving.server.responses_body import response_id, stored_names
from longctx.serving.server.responses_store import ResponseStore
from longctx.serving.server.series import RenderedMetrics
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.streams import Delivery, EventDispatcher, Stream
from longctx.serving.server.transfers import Received, Transfers


@runtime_checkable
class Backend(Protocol):
    """Computation of requests: an engine's thread, or a cluster."""

    def submit(
        self, prepared: PreparedRequest, sink: Sink, arrival: float | None = None, received: Received | None = None
    ) -> str:
        """Begin a request, and return its id. See `EngineThread.submit`; it may raise ApiError, too."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End a request; its sink still gets its last events."""
        ...


class Frontend(ABC):
    """Serves calls to the app of one event loop.

    Attributes:
      backend: computes requests. A subclass sets it.
      max_waiting: completions that one call may ask for, as all of them have to wait together. A subclass sets it.
      max_logprob_bytes: bytes of the log probabilities of a call, about. A subclass sets it.
      metrics: of this server. A subclass sets them.
      keys: that open it.
      audit: log of what its administrators do, and of who is refused.
      http: log and metrics of HTTP requests.
      calls: the active ones, by id.
      responses: of `/v1/responses`, that are kept.
      failures: answers to requests that failed after they had begun, by id, where they are not an engine's errors.
      caches: documents that are kept. A subclass sets them.
      transfers: move requests between this engine and others; None: requests stay.
    """

    backend: Backend
    max_waiting: int
    max_logprob_bytes: int
    metrics: RenderedMetrics
    caches: Caches
    transfers: Transfers | None = None

    def __init__(self, parser: RequestParser, settings: ServerSettings) -> None:
        self.settings, self.model_names, self.model_name = settings, parser.names, parser.names[0]
        self.max_length, self.vocab_size = parser.max_length, parser.vocab_size
        self.tokenizer, self.chat_format = parser.tokenizer, parser.chat_format
        self.token_bytes = TokenBytes(parser.tokenizer)
        self.preparer = Preparer(parser, settings.prepare_processes)
        self.keys, self.audit = KeyRing(settings.keys, needs_key=bool(settings.api_keys)), AuditLog(settings.audit_log)
        self.http = HttpRequests(settings.access_log)
        self.bodies = Bodies(settings, parser.max_length)
        self.calls: dict[str, ActiveCall] = {}
        self.responses = ResponseStore()
        self.failures: dict[str, ApiError] = {}
        self._num_starting = 0
        self.is_draining = False
        self.version = __version__
        self._dispatcher: EventDispatcher | None = None

    @abstractmethod
    def now(self) -> float:
        """Return seconds by the backend's clock."""

    @property
    @abstractmethod
    def is_warm(self) -> bool:
        """Whether requests can be answered."""

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Reason why the server is not healthy; None: it is."""

    @property
    @abstractmethod
    def not_ready(self) -> ApiError:
        """Answer while it is not warm."""

    def check_accepting(self) -> None:
        """Raise ApiError, unless requests are taken now."""
        if self.is_draining:
            self.metrics.observe_refusal("draining")
            headers = {"connection": "close", DROPPED: "draining"}
            message = "the server is shutting down, and takes no new requests"
            raise ApiError(503, message, None, "server_is_overloaded", 5.0, headers)
        if not self.is_warm:
            raise self.not_ready

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that is refused, if it could be served at another time."""
        if DROPPED in error.headers:
            self.metrics.observe_refusal(error.headers[DROPPED])

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body that is answered by generated tokens, after the conversation or the document that it names."""
        cache_id = cache_named(body)
        if cache_id is not None:
            origin = origin._replace(prefix=self.caches.prefix(origin.tenant, cache_id))
        if kind == "responses":
            origin = origin._replace(history=self.responses.history(origin.tenant, *stored_names(body)))
        call: ParsedCall = await self.preparer.read(kind, body, origin)
        return call

    async def start_call(
        self,
        call_id: str,
        shown_id: str,
        call: ParsedCall,
        arrival: float,
        headers: Mapping[str, str] | None = None,
        received: Received | None = None,
    ) -> "ActiveCall":
        """Submit a call's requests to the backend; `end_call` has to follow."""
        self._num_starting += 1
        call = call._replace(requests=list(map(self.caches.admit, call.requests)))
        try:
            async with self._starting(call, headers or {}):
                if self._takes_long(call):
                    active = await asyncio.to_thread(ActiveCall, self, call, shown_id, arrival, received)
                else:
                    active = ActiveCall(self, call, shown_id, arrival, received)
        except BaseException as error:
            if received is not None:
                received.release()
            if isinstance(error, ApiError):
                self.count_refusal(error)
            raise
        finally:
            self._num_starting -= 1
        self.calls[call_id] = active
        return active

    def end_call(self, call_id: str) -> None:
        """Cancel what has not ended of a call, whose events are no longer read."""
        active = self.calls.pop(call_id, None)
        if active is not None:
            if not active.is_open:
                active.settle(active.num_tokens)
            active.close()
            for request_id in active.submitted:
                self.failures.pop(request_id, None)

    def abort(self, name: str, tenant: str | None) -> bool:
        """Cancel a client's request; return False if there is none of this name, or it is another tenant's."""
        found = [call for call in self.find(name) if tenant in (None, call.call.requests[0].request.tenant)]
        for active in found:
            active.cancel()
        return bool(found)

    def find(self, name: str) -> "list[ActiveCall]":
        """Return the calls of a name: the id that the client sent, or that stands in its answer."""
        return [
            active
            for call_id, active in self.calls.items()
            if name == active.shown_id
            or name == response_id(call_id)
            or name in (call_id, f"cmpl-{call_id}", f"chatcmpl-{call_id}", f"msg_{call_id}")
        ]

    @property
    def has_calls(self) -> bool:
        """Whether some client waits for an answer of the backend."""
        return bool(self.calls or self._num_starting)

    def start(self) -> None:
        """Begin to serve; call it in the event loop."""
        self.metrics.more = self.http.collect
        loop = asyncio.get_running_loop()
        self._dispatcher = EventDispatcher(loop)
        self.preparer.start()
        if self.settings.ping_interval:
            loop.call_later(self.settings.ping_interval, self._nudge)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.is_draining = True

    async def finish(self) -> None:
        """End everything that has not ended."""
        await asyncio.to_thread(self.close)
        await asyncio.to_thread(self.audit.close)

    @abstractmethod
    def close(self) -> None:
        """End everything that has not ended, in another thread than the event loop's."""

    @property
    def dispatcher(self) -> EventDispatcher:
        """Dispatcher of events to the event loop, once the server has been started."""
        assert self._dispatcher is not None, "the server has not been started"
        return self._dispatcher

    def _starting(self, call: ParsedCall, headers: Mapping[str, str]) -> AbstractAsyncContextManager[None]:
        """Return the context in which a call's requests are submitted, by the headers that it came with."""
        return nullcontext()

    def _takes_long(self, call: ParsedCall) -> bool:
        """Return whether the backend may take long to admit a call."""
        return False

    def _nudge(self) -> None:
        """Let streams without recent events send their clients a comment: one timer serves all."""
        for call in self.calls.values():
            if call.call.body.stream:
                call.stream.nudge()
        asyncio.get_running_loop().call_later(self.settings.ping_interval, self._nudge)

    def _flush(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.flush()


class ActiveCall:
    """A call from the submission of its requests, all or none, until its client has read their last event.

    Its methods are for the event loop's thread.

    Attributes:
      submitted: ids of all its requests.
      num_tokens: of its prompts, and of its completions that have ended.
      usage: of its requests.
      settle: is called with them at the end, if all have.
    """

    def __init__(
        self,
        server: Frontend,
        call: ParsedCall,
        shown_id: str,
        arrival: float | None = None,
        received: Received | None = None,
    ) -> None:
        self.call, self.shown_id, self._server, self._received = call, shown_id, server, received
        self.submitted: list[str] = []
        self.num_tokens = sum(len(prepared.tokens) for prepared in call.requests)
        self.usage = Usage(self.num_tokens)
        self.settle: Callable[[int], object] = lambda used: None
        self._open: dict[int, tuple[str, set[int]]] = {}  # requests that have not ended, and completions that have not
        self.stream = Stream(server.settings.stream_buffer * len(call.requests), self.cancel)
        count = len(call.requests) * call.num_choices
        if count > server.max_waiting:  # it could never be admitted whole
            raise ApiError(400, f"the prompts ask for {count:,} completions, and {server.max_waiting:,} may wait", "n")
        try:
            with refusals_answered():
                check_logprobs(call.requests, server.max_logprob_bytes, call.copies)
                for number, prepared in enumerate(call.requests):
                    sink = server.dispatcher.sink(self.stream, number, is_whole=not call.body.stream)
                    request_id = server.backend.submit(prepared, sink, arrival, received)
                    self.submitted.append(request_id)
                    self._open[number] = request_id, set(range(prepared.request.sampling.n))
        except BaseException:
            self.close()
            raise

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [request_id for request_id, _ in self._open.values()]

    @property
    def is_open(self) -> bool:
        """Whether some event has not been read."""
        return bool(self._open)

    async def take(self) -> list[Delivery]:
        """Wait for events, and return all that are there with the numbers of their requests; none after a nudge."""
        taken = await self.stream.take()
        if self.stream.has_ended:
            raise ApiError(408, "the client reads too slowly: its request was cancelled", code="slow_reader")
        for number, events in taken:
            request_id, indices = self._open[number]
            for event in events:
                output = event.output
                if output is None:
                    continue
                if output.finish_reason == "error":
                    if request_id in self._server.failures:
                        raise self._server.failures[request_id]
                    raise ApiError(500, output.error or "the request failed", code="engine_error")
                indices.discard(event.index)
                self.num_tokens += output.metrics.output_tokens
                self.usage.ended.append(output.metrics)
            if not indices:
                del self._open[number]
        return taken

    async def outputs(self) -> dict[tuple[int, int], Output]:
        """Wait for all outputs, and return them by the request's number and their index; ApiError as from `take`."""
        outputs: dict[tuple[int, int], Output] = {}
        while self._open:
            for number, events in await self.take():
                outputs |= {(number, event.index): event.output for event in events if event.output is not None}
        return outputs

    def cancel(self) -> None:
        """Cancel what has not ended; the last events still come."""
        for request_id in self.request_ids:
            self._server.backend.cancel(request_id)

    def close(self) -> None:
        """Cancel what has not ended, as its events are no longer read."""
        self.stream.close()
        self.cancel()
        self._open.clear()
        if self._received is not None:
            self._received.release()


class CallStream(StreamingResponse):
    """Streaming response with the pieces of a call's answer; `end` is called at its end, however it ends."""

    def __init__(
        self,
        end: Callable[[], object],
        pieces: AsyncIterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, headers=headers, media_type=media_type)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
