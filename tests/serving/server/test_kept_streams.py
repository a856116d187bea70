"""Streams that clients resume at one server, and streams that an instance keeps for another router."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from disaggregated import TEXT, instance, make_engine, nothing_is_left, resume, resumed, tokens_of
from served import NAME, Served, fake_engine, served

from longctx.models import load_tokenizer
from longctx.models.builtin import TINY


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with instance(make_engine()) as running:
        yield running


def asked(**more: Any) -> dict[str, Any]:
    sent = resumed(load_tokenizer(TINY).encode(TEXT), None)
    sent["request"] |= {"stream_id": "mine", "tenant": "one"} | more
    return sent


def test_a_kept_stream_is_of_its_tenant_and_request_alone(server: Served) -> None:
    """Others of its name begin anew, and the same one is read again, a finished one too."""
    ended: list[str] = []
    server.server.thread.on_end.append(lambda output, request: ended.append(request.tenant))
    first = resume(server, asked())
    assert resume(server, asked()) == first
    assert ended == ["one"]
    assert httpx.get(f"{server.url}/load").json()["kept_streams"] == ["mine"]
    assert tokens_of(resume(server, asked(tenant="two"))) == tokens_of(first)
    assert ended == ["one", "two"]
    assert len(server.server.kept.names) == 2
    other = asked()
    other["request"]["prompt"].pop()
    resume(server, other)
    assert ended == ["one", "two", "one"]
    assert len(server.server.kept.names) == 2
    # A router whose client has had tokens of another instance wants those, and no others.
    other["kv_transfer_params"]["handoff"]["completions"] = [
        {"lease": None, "length": 0, "tokens": tokens_of(first)[:3], "logprobs": []}
    ]
    assert tokens_of(resume(server, other))[:3] == tokens_of(first)[:3]
    assert ended == ["one", "two", "one", "one"]
    nothing_is_left(server)


def test_a_server_alone_computes_the_rest_again() -> None:
    """Its client sends the same body with the last id: events that it has had do not come again."""
    sent = {"model": NAME, "prompt": "lemon", "max_tokens": 20, "stream": True, "stream_options": {"resumable": True}}
    with served(fake_engine()) as running, running.http_client() as client:
        whole = client.post("/v1/completions", json=sent).text.split("\n\n")
        ids = [line[4:] for event in whole for line in event.splitlines() if line.startswith("id: ")]
        assert len(set(ids)) == len(ids) == len(whole) - 2  # the last ones are [DONE], and nothing
        for number, last in enumerate(ids, 1):
            rest = client.post("/v1/completions", json=sent, headers={"last-event-id": last}).text.split("\n\n")
            assert rest == whole[number:]
        running.wait_idle()
