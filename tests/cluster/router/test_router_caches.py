"""Requests go where their prefixes are, which routers learn from KV events."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from disaggregated import body, instance, make_engine, post
from routed import TEXT, Routed, members_of, routed
from served import Served

from longctx.cluster.conductor.config import ConductorConfig
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.server.settings import ObserverSettings

PAGE = 16


@pytest.fixture(scope="module")
def router(three: list[Served]) -> Iterator[Routed]:
    with routed(members_of(three, "bbb")) as running:
        yield running


def ask(router: Routed, prompt: str, **more: Any) -> dict[str, Any]:
    answer = router.client().post("/v1/completions", json=body(prompt, **more))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def wait_indexed(router: Routed, three: list[Served]) -> None:
    """Wait until the router knows what instances have."""
    index = router.server.index

    def is_known() -> bool:
        return all(
            index.blocks(name, "device") == each.server.engine.stats().pages_cached
            for name, each in zip(("b0", "b1", "b2"), three, strict=True)
        )

    router.wait_until("the index is right", is_known)


def test_a_prompt_goes_where_its_prefix_is(router: Routed, three: list[Served]) -> None:
    long = "caches " + TEXT * 6
    first = ask(router, long)
    assert cached(first) == 0
    wait_indexed(router, three)
    before = [each.server.engine.stats().prompt_tokens for each in three]
    again = ask(router, long)
    total = first["usage"]["prompt_tokens"]
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert cached(again) == (total - 1) // PAGE * PAGE
    computed = [each.server.engine.stats().prompt_tokens - b for each, b in zip(three, before, strict=True)]
    # Where another instance decodes, by load, it has the first token of the answer to compute as well.
    assert sum(computed) == total - cached(again) + (sum(map(bool, computed)) > 1)


def test_a_router_that_comes_later_knows_what_there_is(router: Routed, three: list[Served]) -> None:
    long = "later " + TEXT * 6
    first = ask(router, long)
    wait_indexed(router, three)
    with routed(members_of(three, "bbb")) as other:  # two routers side by side
        wait_indexed(other, three)
        again = ask(other, long)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert cached(again) == (first["usage"]["prompt_tokens"] - 1) // PAGE * PAGE
        assert cached(ask(router, long)) == cached(again)


def test_prefill_and_decode_are_apart(three: list[Served]) -> None:
    long = "apart " + TEXT * 6
    with routed(members_of(three, "pdd")) as router:
        before = [each.server.engine.stats().prompt_tokens for each in three]
        found = ask(router, long)
        computed = [each.server.engine.stats().prompt_tokens - b for each, b in zip(three, before, strict=True)]
        total = found["usage"]["prompt_tokens"]
        assert computed[0] == total
        assert sum(computed[1:]) == total - (total - 1) // PAGE * PAGE  # what follows the last full page
        assert cached(found) == 0  # what another instance has just computed was not cached
        expected = post(three[1], body(long, cache_salt="alone")).json()
        assert found["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert router.server.cluster.stats.assignments.total() == 1


def test_a_prefix_comes_from_who_has_it(three: list[Served]) -> None:
    """One has the prefix, and takes no new requests: whoever prefills gets it from there (5.2)."""
    long = "fetched " + TEXT * 8
    with routed(members_of(three, "ppd")) as router:
        index = router.server.index
        first = ask(router, long)
        router.wait_until("it is known who has it", lambda: max(index.blocks(n, "device") for n in ("p0", "p1")) > 0)
        [(holder, _)] = router.server.cluster.stats.assignments
        other = "p1" if holder == "p0" else "p0"
        router.client().post("/cluster/drain", json={"name": holder})
        again = ask(router, long + "more")
        assert router.server.cluster.stats.transfers[holder, other] == 1
        assert again["choices"][0]["text"] != ""
        expected = post(three[2], body(long + "more", cache_salt="alone")).json()
        assert again["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert first["choices"][0]["token_ids"]


def test_cold_blocks_leave_instances_that_are_full() -> None:
    """Blocks that nobody has used for a while are taken from the devices to host memory, before room is needed."""
    anywhere = "tcp://127.0.0.1:*"
    engine = make_engine(num_pages=64, tiers=TierConfig(64 << 20))
    config = ConductorConfig(admission="none", swap_above=0.5, swap_below=0.25, swap_seconds=0.0)
    with (
        instance(engine, observers=ObserverSettings(kv_events=anywhere, kv_events_replay=anywhere)) as running,
        routed(members_of([running]), config) as router,
    ):
        first = ask(router, "cold " + TEXT * 6, max_tokens=2)
        ask(router, "others " + TEXT * 6, max_tokens=2)
        index = router.server.index
        router.wait_until("host memory has them", lambda: index.blocks("b0", "host") >= 40)
        router.wait_until("the devices have room", lambda: index.blocks("b0", "device") <= 32)
        router.wait_until("it is counted", lambda: router.server.cluster.stats.swapped_blocks > 0)
        again = ask(router, "cold " + TEXT * 6, max_tokens=2)
        assert cached(again) == (first["usage"]["prompt_tokens"] - 1) // PAGE * PAGE
        assert again["choices"][0]["text"] == first["choices"][0]["text"]


@contextlib.contextmanager
def kept(roles: str) -> Iterator[tuple[Routed, list[Served]]]:
    """A router over instances with tiers."""
    anywhere = "tcp://127.0.0.1:*"
    events = ObserverSettings(kv_events=anywhere, kv_events_replay=anywhere)
    with contextlib.ExitStack() as stack:
        engines = [make_engine(tiers=TierConfig(64 << 20)) for _ in roles]
        running = [stack.enter_context(instance(engine, observers=events)) for engine in engines]
        yield stack.enter_context(routed(members_of(running, roles))), running


def pinned(instances: list[Served]) -> list[int]:
    """Bytes that are pinned on each instance, once all that is on its way has been written."""
    found = []
    for each in instances:
        store = each.server.engine.pages.store
        assert isinstance(store, TieredStore)
        assert store.flush(20)
        found.append(store.stats.host.pinned_bytes)
    return found


@pytest.mark.parametrize("roles", ["bb", "pd"])
def test_documents_are_kept_by_an_instance(roles: str) -> None:
    long = "document " + TEXT * 6
    with kept(roles) as (router, instances):
        client = router.client()
        made = client.post("/v1/caches", json={"prompt": long, "ttl": 60}).json()
        path = f"/v1/caches/{made['id']}"
        router.wait_until("it is read", lambda: client.get(path).json()["status"] == "ready")
        pages = made["tokens"] // PAGE
        index, [(reader, _)] = router.server.index, router.server.cluster.stats.assignments
        router.wait_until("its pages are known", lambda: client.get(path).json()["pages"]["host"] == pages)
        router.wait_until("who has read it is known", lambda: index.blocks(reader, "device") >= pages)
        ready = client.get(path).json()
        assert (ready["read_tokens"], ready["pages"]["total"]) == (made["tokens"], pages)
        assert sum(size > 0 for size in pinned(instances)) == 1
        named = ask(router, " who?", cache_id=made["id"])
        assert cached(named) >= (made["tokens"] - 1) // PAGE * PAGE
        expected = post(instances[0], body(long + " who?", cache_salt="alone")).json()
        assert named["usage"]["prompt_tokens"] == made["tokens"] + 5
        assert [each["id"] for each in client.get("/v1/caches").json()["data"]] == [made["id"]]
        tokens = client.post("/tokenize", json={"prompt": long + " who?"}).json()["tokens"]
        if tokens[: made["tokens"]] == client.post("/tokenize", json={"prompt": long}).json()["tokens"]:
            assert named["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert client.delete(path).json()["deleted"]
        router.wait_until("nothing is pinned", lambda: not any(pinned(instances)))
        assert client.get(path).status_code == 404
        assert client.post("/v1/completions", json=body("x", cache_id=made["id"])).status_code == 404
        too_long = client.post("/v1/caches", json={"prompt": long, "ttl": 1e8})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "ttl")


def test_hints_of_prompts_reach_an_instance() -> None:
    long = "hint " + TEXT * 6
    with kept("bb") as (router, instances):
        plain = ask(router, long, cache_salt="alone")
        hinted = ask(router, long, cache_control={"ttl": "1h"})
        assert hinted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        router.wait_until("its pages are pinned", lambda: sum(pinned(instances)) > 0)
        assert [each.server.caches.num_kept_tokens for each in instances].count(0) == 1
        assert router.server.caches.num_kept_tokens == sum(each.server.caches.num_kept_tokens for each in instances) > 0


def test_a_document_that_goes_leaves_pages_that_a_prompt_keeps() -> None:
    long = "both " + TEXT * 6
    with kept("b") as (router, instances):
        client = router.client()
        made = client.post("/v1/caches", json={"prompt": long, "ttl": 60}).json()
        path = f"/v1/caches/{made['id']}"
        router.wait_until("it is read", lambda: client.get(path).json()["status"] == "ready")
        ask(router, long, cache_control={"ttl": "1h"})
        before = pinned(instances)
        assert client.delete(path).json()["deleted"]
        ask(router, "others", max_tokens=1)
        assert pinned(instances) == before != [0]
