"""`Frontend`: what HTTP routes ask of whoever serves, an engine (`Server`) or many (`longctx.cluster.router`).

It reads calls, keeps those that run, and ends them. What it hands their requests to is a `Backend`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from longctx import __version__
from longctx.models.tokenizer import TokenBytes, Tokenizer
from longctx.serving.engine.departure import Sink
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.active_call import ActiveCall, Limits
from longctx.serving.server.bodies import Bodies
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.preparer import Preparer
from longctx.serving.server.read_call import Call, CallReader, Kind, Origin
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.streams import Deliveries
from longctx.serving.server.transfers import Received, Transfers


@runtime_checkable
class Backend(Protocol):
    """What answers requests: an engine's thread, or a cluster."""

    def submit(
        self, prepared: PreparedRequest, sink: Sink, arrival: float | None = None, received: Received | None = None
    ) -> str:
        """Begin a request; its id. See `EngineThread.submit`; ApiError is an answer too."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End a request; its sink still gets its last events."""
        ...


@runtime_checkable
class FrontendMetrics(Protocol):
    """What routes ask of metrics."""

    def render(self) -> bytes: ...

    def observe_refusal(self, reason: str) -> None: ...


class Frontend(ABC):
    """Serves calls to the app of one event loop.

    Args:
      model_names: by which clients may call the model; the first one is in the answers.
      reader: of calls.

    Attributes:
      calls: that have not ended, by id.
      failures: answers to requests that failed after they had begun, by id, where they are not an engine's errors.
      transfers: what moves requests between this engine and others, if anything does.
    """

    metrics: FrontendMetrics
    transfers: Transfers | None = None

    def __init__(
        self,
        model_names: tuple[str, ...],
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        reader: CallReader,
        settings: ServerSettings,
    ) -> None:
        self.settings, self.model_names, self.model_name = settings, model_names, model_names[0]
        self.tokenizer, self.token_bytes, self.chat_format = tokenizer, TokenBytes(tokenizer), chat_format
        self.preparer = Preparer(reader, settings.prepare_processes)
        self.bodies = Bodies(settings)
        self.calls: dict[str, ActiveCall] = {}
        self.failures: dict[str, ApiError] = {}
        self._num_beginning = 0
        self.is_draining = False
        self.version = __version__
        self._deliveries: Deliveries | None = None

    # What differs.

    @property
    @abstractmethod
    def backend(self) -> Backend:
        """What answers requests."""

    @property
    @abstractmethod
    def limits(self) -> Limits:
        """Of one call."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of a prompt and its answer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Of the model."""

    @abstractmethod
    def now(self) -> float:
        """Seconds by the backend's clock."""

    @property
    @abstractmethod
    def is_warm(self) -> bool:
        """Whether requests can be answered."""

    @property
    @abstractmethod
    def problem(self) -> str | None:
        """Why the server is not healthy; None: it is."""

    @property
    @abstractmethod
    def not_ready(self) -> ApiError:
        """The answer while it is not warm."""

    # What routes do.

    def check_accepting(self) -> None:
        """ApiError, unless requests are taken now."""
        if self.is_draining:
            self.metrics.observe_refusal("draining")
            headers = {"connection": "close", DROPPED: "draining"}
            message = "the server is shutting down, and takes no new requests"
            raise ApiError(503, message, None, "server_is_overloaded", 5.0, headers)
        if not self.is_warm:
            raise self.not_ready

    def note_refusal(self, error: ApiError) -> None:
        """Count a request that is refused, if it could be served at another time."""
        if DROPPED in error.headers:
            self.metrics.observe_refusal(error.headers[DROPPED])

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Call:
        """Read a body of completions or a chat."""
        call: Call = await self.preparer.read(kind, body, origin)
        return call

    async def begin(
        self,
        call_id: str,
        shown_id: str,
        call: Call,
        arrival: float,
        headers: Mapping[str, str] | None = None,
        received: Received | None = None,
    ) -> ActiveCall:
        """Let a call's requests enter the backend; `end` it in any case. ApiError if they can't.

        Args:
          arrival: by the backend's clock.
          headers: of the request.
          received: what another engine has computed of the call's one request.
        """
        assert self._deliveries is not None, "the server has not been started"
        backend, deliveries, buffer, limits = self.backend, self._deliveries, self.settings.stream_buffer, self.limits

        def make() -> ActiveCall:
            return ActiveCall(backend, deliveries, call, shown_id, buffer, limits, arrival, received, self.failures)

        self._num_beginning += 1
        try:
            active = await asyncio.to_thread(make) if self._takes_long(call) else make()
        except BaseException as error:
            if received is not None:
                received.release()
            if isinstance(error, ApiError):
                self.note_refusal(error)
            raise
        finally:
            self._num_beginning -= 1
        self.calls[call_id] = active
        return active

    def end(self, call_id: str) -> None:
        """Nobody reads a call's events any more: what has not ended of it is cancelled."""
        active = self.calls.pop(call_id, None)
        if active is not None:
            active.close()
            for request_id in active.submitted:
                self.failures.pop(request_id, None)

    def abort(self, name: str, tenant: str | None) -> bool:
        """End a client's request; False if there is none of this name, or it is another tenant's.

        Args:
          name: the id that the client sent, or that stands in its answer.
          tenant: whose requests may be ended; None: anybody's.
        """
        found = [call for call in self.find(name) if tenant in (None, call.call.requests[0].request.tenant)]
        for active in found:
            active.cancel()
        return bool(found)

    def find(self, name: str) -> list[ActiveCall]:
        """The calls of this name: the id that the client sent, or that stands in its answer."""
        return [
            active
            for call_id, active in self.calls.items()
            if name in (active.shown_id, call_id, f"cmpl-{call_id}", f"chatcmpl-{call_id}")
        ]

    @property
    def has_calls(self) -> bool:
        """Whether some client waits for an answer of the backend."""
        return bool(self.calls or self._num_beginning)

    # From start to end.

    def start(self) -> None:
        """Begin; call it in the event loop."""
        loop = asyncio.get_running_loop()
        self._deliveries = Deliveries(loop)
        self.preparer.start()
        if self.settings.ping_interval:
            loop.call_later(self.settings.ping_interval, self._nudge)

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.is_draining = True

    async def finish(self) -> None:
        """End everything that has not ended."""
        await asyncio.to_thread(self.close)

    @abstractmethod
    def close(self) -> None:
        """End everything that has not ended, in another thread than the event loop's."""

    def _takes_long(self, call: Call) -> bool:
        """Whether it may take long until the backend knows whether it lets a call in."""
        return False

    def _nudge(self) -> None:
        """Let streams to which nothing has come for a while tell their clients that they live: one timer for all."""
        for call in self.calls.values():
            if call.call.body.stream:
                call.stream.nudge()
        asyncio.get_running_loop().call_later(self.settings.ping_interval, self._nudge)

    def _flush(self) -> None:
        if self._deliveries is not None:
            self._deliveries.flush()
