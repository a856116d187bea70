"""What a cluster answers when it can't serve a request, and what else it is asked."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from disaggregated import body
from routed import TEXT, Door, Liar, Routed, members_of, routed
from served import Served

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.launcher.launcher import Address
from longctx.serving.server.settings import ApiKey, ServerSettings


@pytest.fixture(scope="module")
def router(three: list[Served]) -> Iterator[Routed]:
    with routed(members_of(three[:2], "pd")) as running:
        yield running


def post(router: Routed, sent: dict[str, Any], **headers: str) -> httpx.Response:
    return router.client().post("/v1/completions", json=sent, headers=headers)


def test_a_request_that_would_come_too_late_is_told_when(three: list[Served]) -> None:
    with routed(members_of(three[:2], "pd"), ConductorConfig(admission="early_rejection", ttft=1e-9)) as router:
        for sent in (body(), body(stream=True)):
            answer = post(router, sent)
            assert answer.status_code == 429, answer.text
            error = answer.json()["error"]
            assert error["code"] == "slow_down"
            assert "the first token would come after" in error["message"]
            assert answer.headers["x-llm-d-request-dropped-reason"] == "ttft"
        router.server.metrics.render(max_age=0)
        text = router.client().get("/metrics").text
        labels = 'model_name="tiny"'
        assert f'cluster_rejections_total{{bound="ttft",engine="cluster",{labels},stage="prefill"}} 2.0' in text
        assert f'requests_refused_total{{engine="cluster",{labels},reason="ttft"}} 2.0' in text
        answer = post(router, body(), **{"x-llm-d-slo-ttft-ms": "1e6"})  # its own target counts
        assert answer.status_code == 200, answer.text
        router.wait_idle()


def test_without_admission_a_request_waits_for_room(three: list[Served]) -> None:
    with routed(members_of(three[:2], "pd")) as router, ThreadPoolExecutor(1) as pool:
        decode = next(each for each in router.server.conductor.state.instances.values() if each.role == "decode")
        decode.spec = dataclasses.replace(decode.spec, max_running=1)
        with router.client().stream("POST", "/v1/completions", json=body(stream=True, max_tokens=400)) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()  # which closes the stream when it is dropped
            next(lines)
            answer = pool.submit(post, router, body())
            router.wait_until("it waits", lambda: router.server.cluster.num_requests == 2 or answer.done())
            assert not answer.done(), answer.result().text
            del lines
        assert answer.result().status_code == 200, answer.result().text
        router.wait_idle()
    for each in three[:2]:
        each.wait_idle()


def test_a_rejection_after_prefill_is_an_answer_too(three: list[Served]) -> None:
    with routed(members_of(three[:2], "pd"), ConductorConfig(admission="baseline", tpot=1e-9)) as router:
        answer = post(router, body())
        assert answer.status_code == 429, answer.text
        assert "read in vain" in answer.json()["error"]["message"]
        with router.client().stream("POST", "/v1/completions", json=body(stream=True)) as stream:
            assert stream.status_code == 200  # it had begun
            last = [line for line in stream.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "slow_down"
        router.wait_idle()
    for each in three[:2]:
        each.wait_idle()


def test_a_deferred_request_is_kept_and_asked_for_again(three: list[Served]) -> None:
    config = ConductorConfig(admission="early_rejection", ttft=1e-9, defer_seconds=0.5)
    with routed(members_of(three[:1]), config) as router:
        answer = post(router, body())
        assert answer.status_code == 429
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(router, body(), **{"x-slo-ttft-ms": "1e6"})))
        thread.start()
        thread.join(20)
        assert answers[0].status_code == 200
        router.wait_idle()


def test_without_instances_nothing_is_taken() -> None:
    with routed([]) as router:
        assert router.client().get("/health").status_code == 200
        assert router.client().get("/ready").status_code == 503
        answer = post(router, body())
        assert answer.status_code == 503
        assert answer.headers["x-llm-d-request-dropped-reason"] == "no_instance"
        assert "retry-after" in answer.headers


def test_an_instance_that_decodes_is_needed(three: list[Served]) -> None:
    with routed(
        [*members_of(three[:1], "p"), Address("gone", "decode", "http://127.0.0.1:9")], is_ready=False
    ) as router:
        router.wait_state("p0", "open")
        assert router.client().get("/ready").status_code == 503
        answer = post(router, body())
        assert answer.status_code == 503, answer.text
        assert answer.headers["x-llm-d-request-dropped-reason"] == "no_instance"
        assert answer.headers["retry-after"] == "2"
        assert "no instance is open that writes answers: gone (decode) is joining" in answer.json()["error"]["message"]
        assert router.client().get("/load").json()["loads"]["decode"] is None


def test_instances_that_decode_answer_alone_where_none_reads_prompts(three: list[Served]) -> None:
    members = [Address("p0", "prefill", (door := Door(three[0])).url), *members_of(three[1:2], "d")]
    with routed(members) as router:
        expected = post(router, body()).json()["choices"]
        door.kill()
        answers = [post(router, body()) for _ in range(4)]  # before and after the router knows it
        router.wait_state("p0", "dead")
        assert router.client().get("/ready").status_code == 200
        answers.append(post(router, body()))
        assert [each.status_code for each in answers] == [200] * 5, [each.text for each in answers]
        assert all(each.json()["choices"] == expected for each in answers)
        door.revive()
        router.wait_state("p0", "open")
        assert post(router, body()).json()["choices"] == expected
        door.kill()
        router.wait_idle()


def test_who_refuses_is_not_asked_again_at_once(three: list[Served]) -> None:
    """Where nobody takes a request in the end, its client is told, once."""
    with Liar(three[0]) as liar, routed([Address("full", "both", liar.url)]) as router:
        liar.status = 429
        answer = post(router, body())
        assert answer.status_code == 429, answer.text
        assert "no instance takes it now; full: it answers 429" in answer.json()["error"]["message"]
        assert answer.headers["x-llm-d-request-dropped-reason"] == "queue"
        assert len(liar.asked) == 1
        liar.status, liar.asked = 400, []
        answer = post(router, body())
        assert answer.status_code == 400
        assert len(liar.asked) == 1
        router.wait_idle()


def test_clients_that_leave_end_their_requests(router: Routed, three: list[Served]) -> None:
    decoder, most = three[1].server.engine, 3000
    for is_stream in (True, False):
        before = decoder.stats().output_tokens
        sent = body(TEXT * 2, max_tokens=most, stream=is_stream)
        with router.client(timeout=30 if is_stream else 0.3) as client:
            if is_stream:
                with client.stream("POST", "/v1/completions", json=sent) as stream:
                    assert stream.status_code == 200, stream.read()
                    assert "error" not in next(stream.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=sent)
        router.wait_idle()
        three[0].wait_idle()
        three[1].wait_idle()
        assert decoder.stats().output_tokens - before < most


def test_requests_are_aborted_by_their_names(router: Routed, three: list[Served]) -> None:
    sent = body(max_tokens=1500, stream=True, n=2, temperature=1.0)
    with router.client() as client:
        with client.stream("POST", "/v1/completions", json=sent, headers={"x-request-id": "mine"}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert router.client().post("/abort_requests", json={"request_ids": ["mine"]}).json() == {
                "aborted": ["mine"]
            }
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert {choice["finish_reason"] for chunk in last[-2:] for choice in chunk["choices"]} == {"abort"}
    router.wait_idle()
    for each in three[:2]:
        each.wait_idle()


def test_what_is_asked_of_a_server_is_answered(router: Routed) -> None:
    client = router.client()
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 4
    rendered = client.post("/v1/completions/render", json=body("abc")).json()
    assert rendered[0]["prompt"].endswith("abc")
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] <= 3
    named = client.post("/v1/completions", json=body("abc", max_tokens=2, made_up=1, cache_prompt=True))
    assert named.headers["x-longctx-ignored-fields"] == "made_up"
    refused = client.post("/v1/completions", json=body("abc", do_sample=False))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "do_sample")
    assert client.get("/server_info").json()["policy"] == "kvcache_centric"
    load = client.get("/load").json()
    assert {each["name"]: each["state"] for each in load["instances"]} == {"p0": "open", "d1": "open"}
    assert client.post("/v1/caches", json={"prompt": "a"}).json()["error"]["code"] == "caches_are_off"
    assert client.get("/page/model").json()["is_cluster"]
    assert "/cluster/register" in client.get("/openapi.json").json()["paths"]
    with client.stream("GET", "/page/events") as stream:
        message = json.loads(next(line for line in stream.iter_lines() if line.startswith("data"))[5:])
    assert [each["name"] for each in message["instances"]] == ["p0", "d1"]


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("register", {"url": "ftp://host"}, 400),
        ("register", {"url": "http://host:1/?a"}, 400),
        ("register", {"url": "http://127.0.0.1:9", "role": "cook"}, 400),
        ("register", {"url": "http://127.0.0.1:9", "name": "p0"}, 400),
        ("drain", {"name": "nobody"}, 404),
        ("role", {"name": "p0", "role": "cook"}, 400),
        ("remove", {"url": "http://127.0.0.1:9"}, 404),
    ],
)
def test_bad_commands_change_nothing(router: Routed, path: str, sent: dict[str, Any], status: int) -> None:
    before = router.instances().keys()
    answer = router.register(**sent) if path == "register" else router.client().post(f"/cluster/{path}", json=sent)
    assert answer.status_code == status, answer.text
    assert router.instances().keys() == before


def test_administrators_alone_change_a_cluster(three: list[Served]) -> None:
    keys, admins = (ApiKey("user", "k" * 16),), (ApiKey("admin", "a" * 16),)
    settings = ServerSettings(prepare_processes=0, api_keys=keys, admin_keys=admins)
    with routed([], settings=settings) as router:
        register = {"url": three[0].url, "name": "b0"}
        for key, status in ((None, 401), ("k" * 16, 403), ("a" * 16, 200)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            client = router.client(headers=headers)
            assert client.get("/cluster/instances").status_code == status
            assert router.register(**register, headers=headers).status_code == status
        router.wait_state("b0", "open")
        user = router.client(headers={"authorization": "Bearer " + "k" * 16})
        assert user.post("/v1/completions", json=body()).status_code == 200
