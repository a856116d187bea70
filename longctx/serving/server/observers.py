"""`Observers`: all that watches a server: metrics, KV events, the log of requests, spans. Each is off by itself."""

import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TextIO

from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Output
from longctx.serving.request.request import Request
from longctx.serving.server import logs, tracing
from longctx.serving.server.kv_events import KvEvents
from longctx.serving.server.kv_publisher import KvPublisher, is_public
from longctx.serving.server.prometheus import ServerMetrics
from longctx.serving.server.rendered_metrics import check_prefix

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObserverSettings:
    """What is observed, and who is told.

    Attributes:
      metrics_prefix: of the metrics that vLLM has too.
      kv_events: endpoint of ZeroMQ at which events of the cache are published, which show prompts; None: nowhere.
      kv_events_replay: endpoint at which missed ones can be asked for.
      kv_events_topic: their first frame.
      log_format: "text" or "json"; None: nothing is logged that is no problem.
      log_prompts: whether the log of requests shows prompts and answers.
      otlp: address to which OpenTelemetry spans are sent; None: there are none.

    Raises:
      ValueError: one needs another that is not given.
    """

    metrics_prefix: str = "longctx"
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    log_format: logs.LogFormat | None = None
    log_prompts: bool = False
    otlp: str | None = None

    def __post_init__(self) -> None:
        check_prefix(self.metrics_prefix)
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ValueError("kv_events_replay and kv_events_topic need kv_events")
        if self.log_prompts and self.log_format is None:
            raise ValueError("log_prompts needs log_format")


class Observers:
    """Watches an engine's thread, which hands on what has ended, and never waits.

    Args:
      stream: for the log; None: standard error.

    Attributes:
      metrics: of the server.
      tracing: where spans are made, if they are.

    Raises:
      ValueError: a setting is out of range, or needs what is not installed.
    """

    def __init__(
        self, thread: EngineThread, model_name: str, settings: ObserverSettings, stream: TextIO | None = None
    ) -> None:
        self.metrics = ServerMetrics(settings.metrics_prefix, thread, model_name)
        self.tracing: tracing.Tracing | None = None
        self.kv_events: dict[str, str | None] | None = None  # where they are published
        self._closings: list[Callable[[], object]] = []
        self._worker = ThreadPoolExecutor(1, "longctx-observers")
        self._closings.append(self._worker.shutdown)
        try:
            if settings.kv_events is not None:
                self._publish_kv_events(thread, settings, settings.kv_events)
            if settings.otlp is not None:
                exporter = tracing.otlp_exporter(settings.otlp)
                self.tracing = tracing.Tracing(exporter, model_name, thread.engine.now)
                self._closings.append(self.tracing.close)
                self._hand_on(thread, self.tracing.note)
            if settings.log_format is not None:
                handler = logs.install(settings.log_format, stream or sys.stderr)
                self._closings.append(lambda: logs.uninstall(handler))
                self._hand_on(thread, logs.RequestLog(settings.log_prompts).note)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Tell all that has been observed, and end."""
        while self._closings:
            self._closings.pop(0)()

    def _publish_kv_events(self, thread: EngineThread, settings: ObserverSettings, endpoint: str) -> None:
        publisher = KvPublisher(endpoint, settings.kv_events_replay, settings.kv_events_topic)
        self._closings.append(publisher.close)
        self._closings.insert(0, KvEvents(thread, publisher.publish).close)
        self.kv_events = {
            "endpoint": publisher.endpoint,
            "replay": publisher.replay_endpoint,
            "topic": settings.kv_events_topic,
        }
        for address in (publisher.endpoint, publisher.replay_endpoint or ""):
            if is_public(address):
                logger.warning("whoever reaches %s reads prompts: it is open to other hosts", address)

    def _hand_on(self, thread: EngineThread, note: Callable[[Output, Request], object]) -> None:
        """Have a thread of its own note what ends: writing a line may take long."""

        def tell(output: Output, request: Request) -> None:
            try:
                note(output, request)
            except Exception:
                logger.exception("a request could not be logged or traced")

        thread.on_end.append(lambda output, request: self._worker.submit(tell, output, request))
