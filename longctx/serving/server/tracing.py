"""OpenTelemetry spans of requests, one for each completion, with child spans of its queueing, prefill and decodes.

Attributes are those of OpenTelemetry's conventions for generative AI where they have a name for them. Spans are made
when a completion has ended, of the times that the engine noted.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from longctx import __version__, extras
from longctx.serving.request.output import Output
from longctx.serving.request.request import Request

_PARENTS = 10_000  # traces of requests that are remembered: more than there ever are at a time
_PHASES = (
    ("queue", "arrival", "admitted"),
    ("prefill", "admitted", "first_token"),
    ("decode", "first_token", "last_token"),
)


class Tracing:
    """Makes spans of completions, and sends them in batches from a thread of its own."""

    def __init__(self, exporter: Any, model_name: str, clock: Callable[[], float]) -> None:
        with extras.needed("otlp", "otlp"):
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._trace, self._model_name = trace, model_name
        self._extract = TraceContextTextMapPropagator().extract
        resource = Resource.create({"service.name": "longctx", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("longctx", __version__)
        self._offset = time.time() - clock()
        self._parents: OrderedDict[str, Any] = OrderedDict()

    def link(self, request_id: str, traceparent: str) -> None:
        """Make the spans of a request part of a trace, by W3C's header `traceparent`."""
        self._parents[request_id] = self._extract({"traceparent": traceparent})
        if len(self._parents) > _PARENTS:
            self._parents.popitem(last=False)

    def note(self, output: Output, request: Request) -> None:
        """Make the spans of a completion that has ended."""
        metrics = output.metrics
        end = metrics.arrival if metrics.finished is None else metrics.finished
        root = self._tracer.start_span(
            "llm_request",
            context=self._parents.get(output.request_id) or self._trace.set_span_in_context(self._trace.INVALID_SPAN),
            kind=self._trace.SpanKind.SERVER,
            start_time=self._nanoseconds(metrics.arrival),
            attributes=self._attributes(output, request),
        )
        parent = self._trace.set_span_in_context(root)
        for name, first, last in _PHASES:
            begun, ended = getattr(metrics, first), getattr(metrics, last)
            if begun is not None:
                # One that never came to its end lasted until the request's.
                span = self._tracer.start_span(name, parent, start_time=self._nanoseconds(begun))
                span.end(self._nanoseconds(end if ended is None else ended))
        if output.error is not None:
            root.set_status(self._trace.StatusCode.ERROR, output.error)
        root.end(self._nanoseconds(end))

    def close(self) -> None:
        """Send the remaining spans, and end."""
        self._provider.shutdown()

    def _nanoseconds(self, seconds: float) -> int:
        """Return nanoseconds since 1970 of a time of the engine's clock."""
        return int((self._offset + seconds) * 1e9)

    def _attributes(self, output: Output, request: Request) -> dict[str, Any]:
        metrics, params = output.metrics, request.sampling
        attributes = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.finish_reasons": [output.finish_reason],
            "gen_ai.usage.input_tokens": metrics.prompt_tokens,
            "gen_ai.usage.output_tokens": metrics.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": metrics.cached_tokens,
            # Seconds, by vLLM's names.
            "gen_ai.latency.time_to_first_token": metrics.ttft,
            "gen_ai.latency.time_in_queue": None if metrics.admitted is None else metrics.admitted - metrics.arrival,
            "gen_ai.latency.e2e": None if metrics.finished is None else metrics.finished - metrics.arrival,
            "longctx.completion": output.index,
            "longctx.preemptions": metrics.preemptions,
        }
        return {name: value for name, value in attributes.items() if value is not None}


def otlp_exporter(endpoint: str) -> Any:
    """Return an exporter of spans to a collector over HTTP, such as "http://localhost:4318/v1/traces"."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otlp must be an address such as http://localhost:4318/v1/traces, got {endpoint!r}")
    with extras.needed("otlp", "otlp"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    return OTLPSpanExporter(endpoint=endpoint)
