"""Keys of a cluster: each instance has its own, with which it speaks for itself and for the requests that it has."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from disaggregated import CONFIG, instance, make_engine
from routed import TEXT, Routed, routed
from served import Served

from longctx.cluster.launcher.launcher import Address
from longctx.cluster.router.server import RouterSettings
from longctx.serving.server.settings import ApiKey, ObserverSettings, ServerSettings

OWN = {"p": "the-own-key-of-p", "d": "the-own-key-of-d"}
ANN = "the-key-of-ann"


class Cluster(NamedTuple):
    router: Routed
    p: Served
    d: Served


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A prefill and a decode instance, each with a key of its own, behind a router."""
    events = ObserverSettings(kv_events="tcp://127.0.0.1:*", kv_events_replay="tcp://127.0.0.1:*")
    with contextlib.ExitStack() as stack:
        running = {}
        for name, key in OWN.items():
            user, scopes = ApiKey("ann", f"ann-at-{name}-alone"), frozenset({"migrate", "metrics"})
            admins = (ApiKey("router", key, scopes),)
            running[name] = stack.enter_context(
                instance(make_engine(), keys=(user,), admin_keys=admins, observers=events)
            )
        members = [Address("p", "prefill", running["p"].url), Address("d", "decode", running["d"].url)]
        settings = ServerSettings(
            api_keys=(ApiKey("ann", ANN),), admin_keys=(ApiKey("boss", "the-boss-key"),), prepare_processes=0
        )
        joiners = [ApiKey(name, key) for name, key in OWN.items()]
        router = RouterSettings(instance_keys=OWN, joiners=joiners)
        yield Cluster(stack.enter_context(routed(members, settings=settings, router=router)), *running.values())


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | more


def test_prompts_are_read_elsewhere_by_a_grant_of_the_router(cluster: Cluster) -> None:
    body = {"prompt": TEXT * 12, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = cluster.router.client(headers=bearer(ANN)).post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    prefills = cluster.d.server.transfers.prefills.answers  # type: ignore[union-attr]
    cluster.router.wait_until("the other has answered", lambda: sum(prefills.values()))
    assert prefills == {"done": 1}
    pages = answer.json()["usage"]["prompt_tokens"] // CONFIG.page_size
    assert cluster.d.server.engine.stats().loaded_tokens >= (pages - 1) * CONFIG.page_size
    # They are ann's pages, on the instance that has read them.
    with cluster.p.http_client(headers=bearer("ann-at-p-alone")) as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= (pages - 1) * CONFIG.page_size


def test_an_instance_s_key_opens_no_other_instance(cluster: Cluster) -> None:
    with cluster.p.http_client() as client:
        for path in ("/resume", "/kv_swap", "/v1/completions"):
            sent = bearer(OWN["d"], **{"x-longctx-tenant": "ann"})
            assert client.post(path, json={"prompt": "x"}, headers=sent).status_code == 401, path


def test_an_instance_speaks_for_itself_alone_at_the_router(cluster: Cluster) -> None:
    client, own = cluster.router.client(), bearer(OWN["d"])
    for path, sent in (
        ("/v1/completions", {"prompt": "x"}),
        ("/cluster/remove", {"name": "p"}),
        ("/cluster/drain", {"name": "d"}),
        ("/cluster/role", {"name": "d", "role": "both"}),
    ):
        assert client.post(path, json=sent, headers=own).status_code == 403, (path, sent)
    tenant = bearer(OWN["d"], **{"x-longctx-tenant": "ann"})
    assert client.get("/version", headers=tenant).status_code == 403
    for name in ("p", "other"):
        assert cluster.router.register("http://127.0.0.1:9", name, headers=own).status_code == 403, name
    known = cluster.router.register(cluster.d.url, headers=own)
    assert (known.status_code, known.json()["name"]) == (200, "d")
    assert client.get("/load", headers=own).json()["request_ids"] == []
    listed = httpx.get(f"{cluster.router.url}/cluster/instances", headers=bearer("the-boss-key")).json()["instances"]
    assert {each["name"]: each["state"] for each in listed} == {"p": "open", "d": "open"}
