"""What a running server tells its observers: refusals, and traces that clients have begun."""

from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from served import NAME, Served, fake_engine, served

from longctx.serving.config import AdmissionLimits
from longctx.serving.server import tracing
from longctx.serving.server.settings import ObserverSettings

BODY: dict[str, Any] = {"model": NAME, "prompt": "one two", "max_tokens": 4, "ignore_eos": True}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def refusals(running: Served) -> dict[str, float]:
    """How many requests were refused, by reason, as of now."""
    running.server.metrics.render(max_age=0)
    with running.http_client() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {x.labels["reason"]: x.value for x in samples if x.name == "longctx:requests_refused_total"}


def test_refusals_are_counted_by_their_reason() -> None:
    limits = AdmissionLimits(max_waiting=1)
    with served(fake_engine(max_running=1), limits=limits) as running, running.http_client() as client:
        running.executor.pause = 0.02
        slow = BODY | {"max_tokens": 50, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=slow) as stream:
            running.wait_until(
                "one runs", lambda: running.pages_held() and not running.server.thread.control.num_waiting
            )
            with client.stream("POST", "/v1/completions", json=slow):
                assert client.post("/v1/completions", json=BODY).status_code == 429
                assert refusals(running)["queue"] == 1
            running.executor.pause = 0.0
            assert "data: [DONE]" in list(stream.iter_lines())
        running.server.drain()
        assert client.post("/v1/completions", json=BODY).status_code == 503
        assert refusals(running) == {"queue": 1, "tokens": 0, "deadline": 0, "draining": 1, "tpot": 0}


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}-01", None, "nonsense"])
def test_spans_are_part_of_the_clients_trace(header: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: exporter)
    headers = {"x-request-id": "mine"} | ({} if header is None else {"traceparent": header})
    settings = ObserverSettings(otlp="http://nowhere")
    with served(fake_engine(), observers=settings) as running, running.http_client() as client:
        two = BODY | {"prompt": ["one", "two"]}
        assert client.post("/v1/completions", json=two, headers=headers).status_code == 200
    roots = [span for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert len(roots) == 2
    for root in roots:
        assert root.attributes is not None
        assert str(root.attributes["gen_ai.request.id"]).startswith("mine")
        if header is not None and TRACE in header:
            assert f"{root.context.trace_id:032x}" == TRACE
            assert root.parent is not None
            assert f"{root.parent.span_id:016x}" == SPAN
        else:
            assert root.parent is None
    assert len({root.context.trace_id for root in roots}) == (1 if header is not None and TRACE in header else 2)
