"""Requests made from the app's own OpenAPI: whatever is sent, there is no 500, and the engine lives on."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from served import Served, fake_engine, served

from longctx.serving.server.settings import ServerSettings

FAST, MANY = 30, 2000


@pytest.fixture(scope="module")
def running() -> Iterator[Served]:
    with served(fake_engine(max_logprobs=5), ServerSettings(prepare_processes=0)) as server:
        yield server


def check(running: Served, count: int) -> None:
    """Send so many requests at least, valid and not, most of them to what takes a body."""
    document = running.http.config.app.openapi()
    schema = schemathesis.openapi.from_dict(document)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    # What has no body can't be sent wrongly.
    modes = [(o, mode) for o in operations for mode in schemathesis.GenerationMode if o.body or mode.is_positive]
    sent: list[int] = []
    each = -(-count // sum(bool(operation.body) for operation, _ in modes))
    with running.http_client() as client:
        for operation, mode in modes:

            @settings(
                max_examples=each,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                answer = case.call(base_url=running.url, timeout=30)
                sent.append(answer.status_code)
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                if answer.status_code >= 400 and case.method != "HEAD":
                    assert answer.json()["error"]["message"]

            send()
            assert client.get("/health").status_code == 200
    assert len(sent) >= count
    assert {200, 400} <= set(sent)
    running.wait_idle()


def test_generated_requests_find_no_500(running: Served) -> None:
    check(running, FAST)


@pytest.mark.slow
def test_many_generated_requests_find_no_500(running: Served) -> None:
    check(running, MANY)
