"""Server of one engine, which runs in a thread: the state that the app's routes share, without HTTP."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager

from longctx.models.chat_template import ChatTemplate
from longctx.serving.config import AdmissionLimits
from longctx.serving.engine.admission_control import AdmissionControl
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.metrics import EngineStats
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.connector import LOOKUP_TIMEOUT
from longctx.serving.server.caches import EngineCaches
from longctx.serving.server.calls import Kind, Origin, ParsedCall
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.errors import ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.metrics import ServerMetrics
from longctx.serving.server.observers import Observers
from longctx.serving.server.request_parser import RequestParser
from longctx.serving.server.resumption import KeptStreams
from longctx.serving.server.settings import ObserverSettings, ServerSettings
from longctx.serving.server.transfers import Transfers

logger = logging.getLogger(__name__)

_WARMING_RETRY = 5.0
_REPORT_SECONDS = 10.0  # between two lines of the log about the load


class Server(Frontend):
    """Serves an engine to the app of one event loop.

    Args:
      engine: with a tokenizer, in the first process of its group. It is the server's from now on.
      model_names: by which clients may call the model; the first one is in the answers.
      limits: of admission. None: the default ones.
      chat_template: instead of the tokenizer's own.
      warm_up: is called with the engine before the first request, in another thread than the event loop's.
      observers: settings of metrics, events, logs and spans. None: metrics with names of our own alone.
      make_transfers: makes the transfers of requests between this engine and others. None: requests stay.

    Attributes:
      instance: another one whenever a server starts.
      kept: streams of requests for routers, which another router may ask for.

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
        settings = settings or ServerSettings()
        parser = RequestParser(
            engine.input_processor,
            ChatFormat(engine.tokenizer, chat_template, settings.tool_call_parser),
            model_names,
            settings,
            engine.config,
            engine.max_length,
            engine.model.config.vocab_size,
            engine.config.slo.per_token(engine.plan.stage).tpot,
        )
        super().__init__(parser, settings)
        self.engine, self.instance = engine, secrets.token_hex(8)
        self.thread = EngineThread(engine, AdmissionControl(engine, limits), flush=self._flush)
        self.backend, limits = self.thread, self.thread.control.limits
        self.max_waiting, self.max_logprob_bytes = limits.max_waiting, limits.max_logprob_bytes
        self.observers = Observers(self.thread, self.model_name, observers or ObserverSettings())
        self.metrics: ServerMetrics = self.observers.metrics
        self.caches: EngineCaches = EngineCaches(
            self.thread, self.model_name, self.settings.cache_tokens, self.settings.max_cache_ttl
        )
        self.metrics.caches, self.metrics.responses = self.caches, self.responses
        self.kept = KeptStreams(settings.resume_seconds, self.end_call)
        self.warmed: Future[None] = Future()
        self.transfers = None if make_transfers is None else make_transfers(engine)
        if self.transfers is not None:
            self.metrics.transfers = self.transfers.counts
        self._warm_up = warm_up

    async def read(self, kind: Kind, body: bytes, origin: Origin) -> ParsedCall:
        """Parse a body, see `Frontend.read`, while a remote store is asked for the pages of its prompts."""
        call = await super().read(kind, body, origin)
        asked = self.engine.pages.ask_ahead(call.requests)
        if asked:
            await asyncio.wait(map(asyncio.wrap_future, asked), timeout=LOOKUP_TIMEOUT)
        return call

    def _starting(self, call: ParsedCall, headers: Mapping[str, str]) -> AbstractAsyncContextManager[None]:
        """Note the trace that a header `traceparent` (W3C's) names."""
        traceparent = headers.get("traceparent")
        if self.observers.tracing is not None and traceparent is not None:
            for prepared in call.requests:
                self.observers.tracing.link(str(prepared.request.request_id), traceparent)
        return super()._starting(call, headers)

    @property
    def request_ids(self) -> list[str]:
        """Ids that clients sent with those requests that have not ended."""
        return [call.shown_id for call in self.calls.values()]

    def set_draining(self, is_draining: bool) -> None:
        """Take no new requests from now on, or take some again; raise ApiError if the server shuts down."""
        if self.thread.is_draining and not is_draining:
            raise ApiError(409, "the server is shutting down", "drain", "shutting_down")
        self.is_draining = is_draining

    def now(self) -> float:
        return self.engine.now()

    @property
    def is_warm(self) -> bool:
        """Whether all programs are compiled and the engine runs."""
        return self.warmed.done() and self.warmed.exception() is None

    @property
    def is_open(self) -> bool:
        """Whether requests are taken now."""
        return self.is_warm and not self.is_draining and not self.has_failed

    @property
    def not_ready(self) -> ApiError:
        if self.warmed.done():
            return ApiError(500, "the engine could not be started", code="engine_error")
        message = "the server compiles its programs, and is not ready yet: see /ready"
        return ApiError(503, message, None, "server_is_overloaded", _WARMING_RETRY)

    @property
    def has_failed(self) -> bool:
        """Whether the engine could not be started, or has failed since."""
        return any(end.done() and end.exception() is not None for end in (self.warmed, self.thread.failure))

    @property
    def problem(self) -> str | None:
        if self.warmed.done() and self.warmed.exception() is not None:
            return "the engine could not be started"
        if self.thread.failure.done():
            return "the engine has failed, or is closed"
        stalled = self.thread.stalled_seconds
        if stalled > self.settings.stall_timeout:
            return f"a step has been running for {stalled:.0f} seconds"
        return None

    def start(self) -> None:
        """Begin to warm up; call it in the event loop."""
        super().start()
        # A compilation can't be interrupted, and nothing is to wait for it at the end.
        threading.Thread(target=self._start_engine, name="longctx-warm-up", daemon=True).start()
        asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._report, self.engine.stats(), self.now())

    def _report(self, since: EngineStats, then: float) -> None:
        """Log the load now and then."""
        stats, now = self.engine.stats(), self.now()
        if now > then:
            self.http.report_load(stats, since, now - then, self.engine.num_pages * self.engine.plan.context)
        asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._report, stats, now)

    def drain(self) -> None:
        super().drain()
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

    def _takes_long(self, call: ParsedCall) -> bool:
        return any(prepared.request.ttft_deadline is not None for prepared in call.requests)  # looking ahead

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
