"""Logs of requests, OpenTelemetry spans, and what attaches them to a server."""

import contextlib
import io
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake_device import VOCAB, expected_tokens, make_engine
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from longctx.serving import Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.request.output import Output
from longctx.serving.server import logs
from longctx.serving.server.observers import Observers
from longctx.serving.server.settings import ObserverSettings
from longctx.serving.server.tracing import Tracing, otlp_exporter

SECRET = [11, 12, 13, 14, 15]
FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
TWICE = SamplingParams(max_tokens=4, temperature=1.0, n=2, seed=1, ignore_eos=True)


@contextlib.contextmanager
def observed(**settings: Any) -> Iterator[tuple[EngineThread, io.StringIO, Observers]]:
    """An engine's thread that runs, and the log of it, which is complete at the end."""
    thread, stream = EngineThread(make_engine(num_pages=100)), io.StringIO()
    observers = Observers(thread, "some/model", ObserverSettings(**settings), stream)
    try:
        with thread:
            yield thread, stream, observers
    finally:
        observers.close()


def run(thread: EngineThread, *requests: Request) -> list[Output]:
    outputs: list[Output] = []
    for request in requests:
        sink = lambda events: outputs.extend(event.output for event in events if event.output is not None)  # noqa: E731
        thread.submit(thread.engine.prepare(request), sink)
    assert thread.wait_idle(30)
    return outputs


def test_a_line_of_json_tells_of_each_request() -> None:
    with observed(log_format="json") as (thread, stream, _):
        (output,) = run(thread, Request(SECRET, FIVE, request_id="mine", tenant="t"))
        run(thread, Request(SECRET, TWICE, request_id="two"))
        thread.submit(thread.engine.prepare(Request([3], SamplingParams(max_tokens=200), request_id="c")), print)
        thread.cancel("c")
        assert thread.wait_idle(30)
    lines = {line["id"]: line for line in map(json.loads, stream.getvalue().splitlines())}
    assert set(lines) == {"mine", "two", "c"}
    line, metrics = lines["mine"], output.metrics
    assert (line["logger"], line["level"], line["message"]) == ("longctx.requests", "info", "request")
    assert (line["reason"], line["prompt_tokens"], line["output_tokens"], line["tenant"]) == ("length", 5, 5, "t")
    assert line["ttft"] == pytest.approx(metrics.ttft, abs=1e-6)
    assert line["tpot"] == pytest.approx(metrics.tpot, abs=1e-6)
    assert line["queue"] == pytest.approx(metrics.admitted - metrics.arrival, abs=1e-6)  # type: ignore[operator]
    assert line["seconds"] == pytest.approx(metrics.finished - metrics.arrival, abs=1e-6)  # type: ignore[operator]
    assert (lines["two"]["n"], lines["two"]["output_tokens"]) == (2, 8)
    assert lines["c"]["reason"] == "cancelled"
    assert not {"prompt", "answers", "text", "tokens"} & {name for line in lines.values() for name in line}


def test_prompts_are_logged_if_asked_for() -> None:
    with observed(log_format="json", log_prompts=True) as (thread, stream, _):
        run(thread, Request(SECRET, FIVE))
    line = json.loads(stream.getvalue())
    assert line["prompt"] == SECRET
    assert [answer["tokens"] for answer in line["answers"]] == [expected_tokens(SECRET, FIVE)]


def test_text_lines_stay_lines_whatever_they_hold() -> None:
    with observed(log_format="text") as (thread, stream, _):
        run(thread, Request(SECRET, FIVE, request_id='a b\n"c" \x1b[31m'))
    (line,) = stream.getvalue().splitlines()
    assert r'id="a b\n\"c\" \u001b[31m" reason=length prompt_tokens=5 ' in line
    assert line.isprintable()


def test_other_records_and_their_exceptions_are_logged_alike() -> None:
    stream, logger = io.StringIO(), logging.getLogger("longctx.test")
    uninstall = logs.install("json", stream)
    try:
        try:
            raise ValueError("bad")
        except ValueError:
            logger.exception("it %s", "failed")
    finally:
        uninstall()
    logger.error("nobody hears this here")
    line = json.loads(stream.getvalue())
    assert (line["message"], line["level"]) == ("it failed", "error")
    assert line["exception"].endswith("ValueError: bad")


def test_nothing_is_logged_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with observed() as (thread, stream, _):
        run(thread, Request(SECRET, FIVE))
    assert stream.getvalue() == capsys.readouterr().err == ""


def test_a_blocked_log_holds_no_step_up() -> None:
    class Blocked(io.StringIO):
        free = threading.Event()

        def write(self, text: str) -> int:
            assert self.free.wait(60)
            return super().write(text)

    thread, stream = EngineThread(make_engine(num_pages=100)), Blocked()
    observers = Observers(thread, "m", ObserverSettings(log_format="json"), stream)
    with thread:
        outputs = run(thread, *[Request([i % VOCAB, 2], FIVE) for i in range(20)])
    assert len(outputs) == 20
    assert not stream.getvalue()
    stream.free.set()
    observers.close()
    assert len(stream.getvalue().splitlines()) == 20


# Spans.


def spans_of(*requests: Request, cancels: bool = False) -> tuple[dict[str, list[ReadableSpan]], list[Output]]:
    """The spans of each completion, the root first, by request and index."""
    thread, exporter = EngineThread(make_engine(num_pages=100)), InMemorySpanExporter()
    tracing = Tracing(exporter, "some/model", thread.engine.now)
    thread.on_end.append(tracing.note)
    if cancels:
        thread.on_step.append(lambda step, load: [thread.cancel(row[0]) for row in step.rows])
    with thread:
        outputs = run(thread, *requests)
    tracing.close()
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    found = {}
    for root in roots:
        assert root.attributes is not None
        children = [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]
        assert all(child.context.trace_id == root.context.trace_id for child in children)
        name = f"{root.attributes['gen_ai.request.id']}/{root.attributes['longctx.completion']}"
        found[name] = [root, *sorted(children, key=lambda span: span.start_time or 0)]
    assert sum(map(len, found.values())) == len(spans)
    return found, outputs


def test_spans_have_the_times_of_the_request() -> None:
    found, outputs = spans_of(Request(SECRET, FIVE, request_id="a"), Request(SECRET, TWICE, request_id="b"))
    assert set(found) == {"a/0", "b/0", "b/1"}
    assert len({spans[0].context.trace_id for spans in found.values()}) == 3
    for output in outputs:
        root, *phases = found[f"{output.request_id}/{output.index}"]
        attributes, metrics = root.attributes, output.metrics
        assert attributes is not None
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        times = [metrics.arrival, metrics.admitted, metrics.first_token, metrics.last_token]
        start = root.start_time or 0
        for span, begun, ended in zip(phases, times, times[1:], strict=False):
            assert begun is not None
            assert ended is not None
            assert (span.start_time or 0) - start == pytest.approx((begun - metrics.arrival) * 1e9, abs=2000)
            assert (span.end_time or 0) - start == pytest.approx((ended - metrics.arrival) * 1e9, abs=2000)
        assert root.end_time == pytest.approx(start + (metrics.finished - metrics.arrival) * 1e9, abs=2000)  # type: ignore
        assert attributes["gen_ai.usage.input_tokens"] == 5
        assert attributes["gen_ai.usage.output_tokens"] == len(output.token_ids)
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        assert attributes["gen_ai.latency.time_to_first_token"] == metrics.ttft
        assert not any(str(SECRET)[1:-1] in str(value) for value in attributes.values())


def test_spans_of_cancelled_requests_end() -> None:
    found, outputs = spans_of(Request(list(range(40)), FIVE, request_id="a"), cancels=True)
    assert outputs[0].finish_reason == "cancelled"
    root, *phases = found["a/0"]
    assert [span.name for span in phases] == ["queue", "prefill"]
    assert phases[-1].end_time == root.end_time


def test_spans_arrive_at_a_collector() -> None:
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with observed(otlp=f"http://127.0.0.1:{server.server_port}/v1/traces") as (thread, _, _):
            run(thread, Request(SECRET, FIVE))
        server.shutdown()
    names = []
    for body in received:
        message = ExportTraceServiceRequest.FromString(_inflated(body))
        for resource in message.resource_spans:
            assert any(
                x.key == "service.name" and x.value.string_value == "longctx" for x in resource.resource.attributes
            )
            names += [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["decode", "llm_request", "prefill", "queue"]


def _inflated(body: bytes) -> bytes:
    import gzip

    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


# What attaches them.


def test_invalid_settings_are_refused() -> None:
    for settings, message in (
        ({"log_prompts": True}, "log_prompts needs log_format"),
        ({"kv_events_topic": "x"}, "kv_events_topic needs kv_events"),
        ({"metrics_prefix": "a b"}, "metrics_prefix must be of letters"),
        ({"log_format": "xml"}, "log_format must be"),
        ({"otlp": "localhost:4317"}, "otlp must be an address such as http://"),
        ({"kv_events": "tcp://nowhere"}, "kv_events='tcp://nowhere' can't be used"),
    ):
        with pytest.raises(ValueError, match=message):
            Observers(EngineThread(make_engine()), "m", ObserverSettings(**settings)).close()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="otlp must be an address"):
        otlp_exporter("")


def test_events_that_other_hosts_could_read_need_a_secret() -> None:
    anywhere = {"kv_events": "tcp://*:*", "kv_events_replay": "tcp://127.0.0.1:*"}
    with (
        pytest.raises(ValueError, match=r"kv_events at tcp://\*:\* may be reached from other machines"),
        observed(**anywhere),
    ):
        pass
    for more, is_encrypted in (
        ({"kv_events_secret": "0123456789abcdef" * 2}, True),
        ({"kv_events_plain": True}, False),
    ):
        with observed(**anywhere, **more) as (_, _, observers):
            assert observers.kv_events is not None
            assert observers.kv_events["is_encrypted"] == is_encrypted
