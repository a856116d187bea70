"""`Server`: an engine in its thread, and what the app's routes share. It has no HTTP in it."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from longctx import __version__
from longctx.models.chat_template import ChatTemplate
from longctx.models.token_bytes import TokenBytes
from longctx.models.tokenizer import Tokenizer
from longctx.serving.engine.admission_control import AdmissionControl, AdmissionLimits
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.connector import PATIENCE
from longctx.serving.server.active_call import ActiveCall
from longctx.serving.server.bodies import Bodies
from longctx.serving.server.caches import Caches
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.migration import Migration
from longctx.serving.server.observers import Observers, ObserverSettings
from longctx.serving.server.preparer import Preparer
from longctx.serving.server.read_call import Call, CallReader, CallRules, Kind, Origin, cache_named
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.streams import Deliveries
from longctx.serving.server.transfers import Received, Transfers

logger = logging.getLogger(__name__)

_WARMING_RETRY = 5.0
_NO_TARGET = 1e9  # seconds: where the engine has no TPOT target, requests have none either


class Server:
    """Serves an engine to the app of one event loop.

    Args:
      engine: with a tokenizer, in the first process of its group. It is the server's from now on.
      model_names: by which clients may call the model; the first one is in the answers.
      limits: of admission. None: the default ones.
      chat_template: instead of the tokenizer's own.
      warm_up: is called with the engine before the first request, in another thread than the event loop's.
      observers: who is told of what the server does. None: metrics have names of our own, and else nobody is.
      make_transfers: makes what moves requests between this engine and others. None: they stay where they are.

    Raises:
      ValueError: the engine has no tokenizer; an observer can't be.
    """

    def __init__(
        self,
        engine: Engine,
        model_names: tuple[str, ...],
        settings: ServerSettings | None = None,
        limits: AdmissionLimits | None = None,
        chat_template: ChatTemplate | None = None,
        warm_up: Callable[[Engine], object] = Engine.warm_up,
        observers: ObserverSettings | None = None,
        make_transfers: Callable[[Engine], Transfers] | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ValueError("engine must have a tokenizer, to be served")
        self.engine, self.settings = engine, settings or ServerSettings()
        self.model_names, self.model_name = model_names, model_names[0]
        self.tokenizer: Tokenizer = engine.tokenizer
        self.token_bytes = TokenBytes(self.tokenizer)
        self.chat_format = ChatFormat(self.tokenizer, chat_template)
        self.thread = EngineThread(engine, AdmissionControl(engine, limits), flush=self._flush)
        self.preparer = Preparer(self._make_reader(), self.settings.prepare_processes)
        self.observers = Observers(self.thread, self.model_name, observers or ObserverSettings())
        self.metrics = self.observers.metrics
        self.bodies = Bodies(self.settings)
        self.caches = Caches(self.thread, self.model_name, self.settings.cache_tokens, self.settings.max_cache_ttl)
        self.metrics.observe_caches(self.caches)
        self.calls: dict[str, ActiveCall] = {}
        self._num_beginning = 0
        self.is_draining = False
        self.version = __version__
        self.warmed: Future[None] = Future()
        self.transfers = None if make_transfers is None else make_transfers(engine)
        if self.transfers is not None:
            self.metrics.observe_transfers(self.transfers.counts, self.transfers.prefills)
        self._warm_up = warm_up
        self._deliveries: Deliveries | None = None
        self.migration: Migration | None = None

    # What routes do.

    def check_accepting(self) -> None:
        """ApiError, unless requests are taken now."""
        if self.is_draining:
            self.metrics.observe_refusal("draining")
            headers = {"connection": "close", DROPPED: "draining"}
            message = "the server is shutting down, and takes no new requests"
            raise ApiError(503, message, None, "server_is_overloaded", 5.0, headers)
        if not self.is_warm:
            if self.warmed.done():
                raise ApiError(500, "the engine could not be started", code="engine_error")
            message = "the server compiles its programs, and is not ready yet: see /ready"
            raise ApiError(503, message, None, "server_is_overloaded", _WARMING_RETRY)

    def note_refusal(self, error: ApiError) -> None:
        """Count a request that is refused, if it could be served at another time."""
        if DROPPED in error.headers:
            self.metrics.observe_refusal(error.headers[DROPPED])

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> Call:
        """Read a body of completions or a chat, with the document of the cache that it names before its prompt."""
        cache_id = cache_named(body)
        if cache_id is not None:
            origin = origin._replace(prefix=self.caches.prefix(origin.tenant, cache_id))
        call: Call = await self.preparer.read(kind, body, origin)
        asked = self.engine.pages.ask_ahead(call.requests)
        if asked:
            await asyncio.wait(map(asyncio.wrap_future, asked), timeout=PATIENCE)
        return call

    async def begin(
        self,
        call_id: str,
        shown_id: str,
        call: Call,
        arrival: float,
        traceparent: str | None = None,
        received: Received | None = None,
    ) -> ActiveCall:
        """Let a call's requests enter the engine; `end` it in any case. ApiError if they can't.

        Args:
          arrival: by the engine's clock.
          traceparent: W3C's header: the trace that the call is part of.
          received: what another engine has computed of the call's one request.
        """
        assert self._deliveries is not None, "the server has not been started"
        if self.observers.tracing is not None and traceparent is not None:
            for prepared in call.requests:
                self.observers.tracing.link(str(prepared.request.request_id), traceparent)
        arguments = self.thread, self._deliveries, call, shown_id, self.settings.stream_buffer, arrival, received
        self._num_beginning += 1
        try:
            if any(prepared.request.ttft_deadline is not None for prepared in call.requests):
                active = await asyncio.to_thread(ActiveCall, *arguments)  # looking ahead may take long
            else:
                active = ActiveCall(*arguments)
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

    # How it is.

    @property
    def has_calls(self) -> bool:
        """Whether some client waits for an answer of the engine."""
        return bool(self.calls or self._num_beginning)

    @property
    def is_warm(self) -> bool:
        """Whether all programs are compiled and the engine runs."""
        return self.warmed.done() and self.warmed.exception() is None

    @property
    def has_failed(self) -> bool:
        """Whether the engine could not be started, or has failed since."""
        return any(end.done() and end.exception() is not None for end in (self.warmed, self.thread.failure))

    @property
    def problem(self) -> str | None:
        """Why the server is not healthy; None: it is."""
        if self.warmed.done() and self.warmed.exception() is not None:
            return "the engine could not be started"
        if self.thread.failure.done():
            return "the engine has failed, or is closed"
        stalled = self.thread.stalled_seconds
        if stalled > self.settings.stall_timeout:
            return f"a step has been running for {stalled:.0f} seconds"
        return None

    # From start to end.

    def start(self) -> None:
        """Begin to warm up; call it in the event loop."""
        loop = asyncio.get_running_loop()
        self._deliveries = Deliveries(loop)
        if self.transfers is not None:
            self.migration = Migration(self.thread, self.transfers, self._deliveries)
        self.preparer.start()
        if self.settings.ping_interval:
            loop.call_later(self.settings.ping_interval, self._nudge)
        # A compilation can't be interrupted, and nothing is to wait for it at the end.
        threading.Thread(target=self._start_engine, name="longctx-warm-up", daemon=True).start()

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.is_draining = True
        self.thread.drain()
        self.caches.close()

    def close(self) -> None:
        """End everything that has not ended; it waits for the step that runs."""
        self.drain()
        self.preparer.close()
        self.thread.close()
        self.engine.pages.close()
        if self.transfers is not None:
            self.transfers.close()
        self.observers.close()

    def _nudge(self) -> None:
        """Let streams to which nothing has come for a while tell their clients that they live: one timer for all."""
        for call in self.calls.values():
            if call.call.body.stream:
                call.stream.nudge()
        asyncio.get_running_loop().call_later(self.settings.ping_interval, self._nudge)

    def _start_engine(self) -> None:
        try:
            self._warm_up(self.engine)
            if not self.is_draining:
                self.thread.start()
        except BaseException as error:
            logger.exception("the engine could not be started")
            self.warmed.set_exception(error)
        else:
            self.warmed.set_result(None)

    def _flush(self) -> None:
        if self._deliveries is not None:
            self._deliveries.flush()

    def _make_reader(self) -> CallReader:
        settings, engine = self.settings, self.engine
        least = engine.config.slo.tpot if settings.min_tpot is None else settings.min_tpot
        rules = CallRules(
            self.model_names,
            engine.max_length,
            engine.model.config.vocab_size,
            settings.default_max_tokens,
            settings.max_prompts,
            settings.max_priority,
            _NO_TARGET if least is None else least,
            engine.config.prefix_cache,
        )
        return CallReader(engine.input_processor, self.tokenizer, self.chat_format, rules)
