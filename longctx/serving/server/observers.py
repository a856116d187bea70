"""Observers of a server: metrics, KV events, the log of requests, and spans, each of which can be off."""

import contextlib
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Output
from longctx.serving.request.request import Request
from longctx.serving.server import logs, tracing
from longctx.serving.server.kv_events import KvEvents
from longctx.serving.server.kv_publisher import KvPublisher
from longctx.serving.server.metrics import ServerMetrics
from longctx.serving.server.settings import ObserverSettings

logger = logging.getLogger(__name__)


class Observers:
    """Observers of an engine's thread, which hands on what has ended, and never waits.

    Attributes:
      metrics: of the server.
      tracing: makes spans; None: there are none.
    """

    def __init__(
        self, thread: EngineThread, model_name: str, settings: ObserverSettings, stream: TextIO | None = None
    ) -> None:
        self.metrics = ServerMetrics(settings.metrics_prefix, thread, model_name)
        self.tracing: tracing.Tracing | None = None
        self.kv_events: dict[str, str | bool | None] | None = None  # where they are published
        self._worker = ThreadPoolExecutor(1, "longctx-observers")
        with contextlib.ExitStack() as closings:  # events end first, then the worker, then what it writes to
            notes: list[Callable[[Output, Request], object]] = []
            if settings.log_format is not None:
                closings.callback(logs.install(settings.log_format, stream or sys.stderr))
                notes.append(logs.RequestLog(settings.log_prompts).note)
            if settings.otlp is not None:
                exporter = tracing.otlp_exporter(settings.otlp)
                self.tracing = tracing.Tracing(exporter, model_name, thread.engine.now)
                closings.callback(self.tracing.close)
                notes.append(self.tracing.note)
            closings.callback(self._worker.shutdown)
            for note in notes:
                self._hand_on(thread, note)
            if settings.kv_events is not None:
                self._publish_kv_events(thread, settings, settings.kv_events, closings)
            self._closings = closings.pop_all()

    def close(self) -> None:
        """Flush all observers, and end."""
        self._closings.close()

    def _publish_kv_events(
        self, thread: EngineThread, settings: ObserverSettings, endpoint: str, closings: contextlib.ExitStack
    ) -> None:
        publisher = KvPublisher(
            endpoint,
            settings.kv_events_replay,
            settings.kv_events_topic,
            settings.kv_events_secret,
            settings.kv_events_plain,
        )
        closings.callback(publisher.close)
        closings.callback(KvEvents(thread, publisher.publish, settings.kv_events_tokens).close)
        self.kv_events = {
            "endpoint": publisher.endpoint,
            "replay": publisher.replay_endpoint,
            "topic": settings.kv_events_topic,
            "is_encrypted": publisher.is_encrypted,
        }

    def _hand_on(self, thread: EngineThread, note: Callable[[Output, Request], object]) -> None:
        """Note what ends in a thread of its own: writing a line may take long."""

        def tell(output: Output, request: Request) -> None:
            try:
                note(output, request)
            except Exception:
                logger.exception("a request could not be logged or traced")

        thread.on_end.append(lambda output, request: self._worker.submit(tell, output, request))
