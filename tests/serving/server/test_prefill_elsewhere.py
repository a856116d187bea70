"""A server that has others read long prompts for it: the answers are its own, whatever becomes of the others."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from cluster.link_proxy import LinkProxy
from disaggregated import body, instance, make_engine, nothing_is_left, post, streamed, transfers_of
from serve_process import free_port
from served import Served

from longctx.cluster.prefill.dispatcher import PrefillDispatcher
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.scheduler.slo import Slo
from longctx.serving.server.settings import ApiKey

INLINE = 64  # tokens


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Served]]:
    with instance(make_engine(), "prefill") as one, instance(make_engine(), "prefill") as other:
        yield [one, other]


@contextlib.contextmanager
def decoding(urls: list[str], **options: Any) -> Iterator[Served]:
    with instance(make_engine(**options), "decode", prefill_from=urls, inline_tokens=INLINE) as server:
        instances = dispatcher_of(server).instances
        server.wait_until("the others are found", lambda: all(each.addresses for each in instances))
        yield server


@pytest.fixture(scope="module")
def decoder(readers: list[Served]) -> Iterator[Served]:
    with decoding([reader.url for reader in readers]) as server:
        yield server


def dispatcher_of(server: Served) -> PrefillDispatcher:
    return transfers_of(server).dispatcher


@pytest.fixture(autouse=True)
def all_ends(readers: list[Served], decoder: Served) -> Iterator[None]:
    before = dict(dispatcher_of(decoder).decisions)
    yield
    nothing_is_left(*readers, decoder)
    decoder.wait_until("all reading has ended", lambda: not dispatcher_of(decoder).num_requests)
    assert dict(dispatcher_of(decoder).decisions) != before, "the test asked nothing"


def counts(server: Served) -> tuple[int, int]:
    """Tokens of prompts that a server has computed, and how many it has had read elsewhere."""
    return server.server.engine.stats().prompt_tokens, dispatcher_of(server).decisions["remote"]


def long(seed: int, num_tokens: int = 700) -> list[int]:
    return [(i * i + seed * 31 + i // 7) % 250 for i in range(num_tokens)]


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "temperature": 1.0, "seed": 2},
    "n": {"temperature": 1.5, "seed": 3, "n": 3},
    "another salt": {"cache_salt": "salt"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_its_own(readers: list[Served], decoder: Served, name: str) -> None:
    sent = body(long([*OPTIONS].index(name)), **OPTIONS[name])
    computed, remote = counts(decoder)
    got = post(decoder, sent).json()
    expected = post(readers[0], sent | {"cache_salt": "read anew"}).json()
    for one, other in zip(got["choices"], expected["choices"], strict=True):
        assert (one["token_ids"], one["text"]) == (other["token_ids"], other["text"])
        assert one["finish_reason"] == other["finish_reason"]
    now = counts(decoder)
    assert now[1] == remote + 1
    assert now[0] - computed == sent.get("n", 1) * (700 - 688)  # what follows the last full page
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= 688


def test_prompts_that_are_read_here(decoder: Served) -> None:
    decisions, prompt = dispatcher_of(decoder).decisions, long(100)
    before = decisions["short"], decisions["remote"]
    post(decoder, body(prompt))
    for sent in (
        body([*prompt, 1, 2, 3]),  # most of it is in the cache
        body(long(101, INLINE)),
        body(long(102), echo=True, logprobs=1),  # all of it is needed
        body([long(103), long(104)]),  # two prompts are none of its business
    ):
        assert post(decoder, sent).status_code == 200
    assert (decisions["short"], decisions["remote"]) == (before[0] + 3, before[1] + 1)


def test_pages_come_while_later_ones_are_computed(readers: list[Served], decoder: Served) -> None:
    loaded = decoder.server.engine.executor.mover.stats.loaded_bytes
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, decoder, body(long(200, 3500)))
        came_early = False
        while not answer.done() and not came_early:
            reading = any(each.server.engine.stats().running for each in readers)
            came_early = reading and decoder.server.engine.executor.mover.stats.loaded_bytes > loaded
        tokens = [token for piece in answer.result() for token in piece["token_ids"]]
    assert came_early
    assert tokens == post(readers[0], body(long(200, 3500), cache_salt="anew")).json()["choices"][0]["token_ids"]


def test_prompts_are_spread_over_those_that_read(readers: list[Served], decoder: Served) -> None:
    before = [reader.server.engine.stats().prompt_tokens for reader in readers]
    instances = dispatcher_of(decoder).instances
    decoder.wait_until("they are known to be idle", lambda: all(each.wait == 0 for each in instances))
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: post(decoder, body(long(300 + i))).json(), range(6)))
    assert all(reader.server.engine.stats().prompt_tokens > n for reader, n in zip(readers, before, strict=True))
    for i, answer in enumerate(answers):
        expected = post(readers[0], body(long(300 + i), cache_salt="anew")).json()
        assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


def test_one_that_refuses_is_passed_over(readers: list[Served], decoder: Served) -> None:
    dispatcher = dispatcher_of(decoder)
    refused, done = dispatcher.answers["refused"], dispatcher.answers["done"]
    expected = [post(readers[0], body(long(400 + i), cache_salt="anew")).json()["choices"] for i in range(4)]
    try:
        readers[0].server.is_draining = True
        for i in range(2):
            assert post(decoder, body(long(400 + i))).json()["choices"][0]["text"] == expected[i][0]["text"]
        assert (dispatcher.answers["refused"], dispatcher.answers["done"]) == (refused + 1, done + 2)
        # Where all refuse, the prompt is read here.
        readers[1].server.is_draining = True
        for i in range(2, 4):
            assert post(decoder, body(long(400 + i))).json()["choices"][0]["text"] == expected[i][0]["text"]
        assert dispatcher.decisions["nobody"] >= 1
    finally:
        for reader in readers:
            reader.server.is_draining = False
        decoder.wait_until("they are asked again", lambda: all(each.is_open for each in dispatcher.instances))


def test_a_client_that_goes_away_ends_the_reading(readers: list[Served], decoder: Served) -> None:
    cancelled = dispatcher_of(decoder).answers["cancelled"]
    sent = body(long(500, 3900), stream=True)
    computed = [reader.server.engine.stats().prompt_tokens for reader in readers]
    with httpx.stream("POST", f"{decoder.url}/v1/completions", json=sent, timeout=60):
        decoder.wait_until("it is read", lambda: any(each.server.engine.stats().running for each in readers))
    decoder.wait_until("it is not read any more", lambda: dispatcher_of(decoder).answers["cancelled"] > cancelled)
    nothing_is_left(*readers, decoder)
    done = [reader.server.engine.stats().prompt_tokens - n for reader, n in zip(readers, computed, strict=True)]
    assert sum(done) < 3900


@pytest.mark.parametrize("what", ["requests", "pages"])
def test_a_link_that_is_cut_costs_time_only(readers: list[Served], decoder: Served, what: str) -> None:
    expected = post(readers[0], body(long(600, 3000), cache_salt="anew")).json()["choices"][0]["token_ids"]
    address = f"127.0.0.1:{readers[0].port}" if what == "requests" else f"127.0.0.1:{transfers_of(readers[0]).port}"
    post(decoder, body(long(601)))
    with LinkProxy(address) as link, decoding([readers[0].url]) as server:
        dispatcher = dispatcher_of(server)
        if what == "requests":
            dispatcher.instances[0].url = f"http://{link.address}"
        else:
            dispatcher.instances[0].addresses = [link.address]
        link.bytes_per_second = 2e6
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, server, body(long(600, 3000)))
            loaded = server.server.engine.executor.mover.stats
            server.wait_until("pages come", lambda: loaded.loaded_bytes, 30)
            link.cut()
            assert answer.result().json()["choices"][0]["token_ids"] == expected
        assert loaded.short_loads == 1
        nothing_is_left(server, readers[0])


def test_prompts_whose_pages_are_in_a_tier_are_read_here(readers: list[Served], decoder: Served) -> None:
    post(decoder, body(long(950)))
    with decoding([readers[0].url], tiers=TierConfig(64 << 20)) as server:
        engine, sent = server.server.engine, body(long(951))
        tokens = post(server, sent).json()["choices"][0]["token_ids"]
        assert engine.pages.store is not None
        assert engine.pages.store.flush(20)
        server.wait_idle()
        engine.core.pool.clear()
        assert post(server, sent).json()["choices"][0]["token_ids"] == tokens
        assert dispatcher_of(server).decisions == {"remote": 1, "short": 1}
        assert engine.executor.mover.stats.loaded_pages == 2 * 43
        nothing_is_left(server, readers[0])


@pytest.mark.parametrize("name", ["n"])
def test_pages_come_to_host_memory_before_a_request_enters_the_engine(
    readers: list[Served], decoder: Served, name: str
) -> None:
    """Mooncake, section 3, steps 3 and 4. `tests/serving/test_engine_thread.py` has when a slot is taken."""
    sent = body(long(960), **OPTIONS[name])
    post(decoder, sent)
    with decoding([readers[1].url], tiers=TierConfig(64 << 20)) as server:
        engine = server.server.engine
        got = post(server, sent).json()
        expected = post(readers[0], sent | {"cache_salt": "read anew"}).json()
        assert [each["token_ids"] for each in got["choices"]] == [each["token_ids"] for each in expected["choices"]]
        assert engine.pages.store is not None
        stats = engine.pages.store.stats
        assert (stats.host.hits, stats.host.misses) == (43, 0)  # 43 full pages of 16 tokens
        assert engine.pages.recomputed == {"tiers": 0, "transfers": 0}
        assert engine.stats().prompt_tokens == sent.get("n", 1) * (700 - 688)
        nothing_is_left(server, readers[1])


def test_an_engine_with_little_host_memory_gets_pages_in_its_slots(readers: list[Served], decoder: Served) -> None:
    post(decoder, body(long(970)))
    page_bytes = decoder.server.engine.page_identity[0].page_bytes
    with decoding([readers[1].url], tiers=TierConfig(43 * page_bytes)) as server:  # half of it may be kept for some
        tokens = post(server, body(long(970))).json()["choices"][0]["token_ids"]
        assert tokens == post(readers[0], body(long(970), cache_salt="anew")).json()["choices"][0]["token_ids"]
        assert server.server.engine.stats().prompt_tokens == 700 - 688
        nothing_is_left(server, readers[1])


def test_tenants_stay_apart_elsewhere_too(decoder: Served) -> None:
    """A client's key goes along: pages are found by the same tenant alone."""
    post(decoder, body(long(900)))
    keys = (ApiKey("ann", "a-key-of-ann"), ApiKey("bob", "a-key-of-bob"), ApiKey("decoder", "a-key-of-it"))
    with instance(make_engine(), "prefill", keys) as reader:
        options = {"prefill_from": [reader.url], "prefill_key": "a-key-of-it", "inline_tokens": INLINE}
        with instance(make_engine(), "decode", keys, **options) as server:
            [found] = dispatcher_of(server).instances
            server.wait_until("the other is found", lambda: found.addresses)
            loaded = server.server.engine.executor.mover.stats
            for name, pages in (("ann", 43), ("bob", 86)):
                headers = {"authorization": f"Bearer a-key-of-{name}"}
                sent = {"json": body(long(901)), "headers": headers, "timeout": 60}
                for cached in (0, 688):
                    answer = httpx.post(f"{server.url}/v1/completions", **sent).json()
                    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached
                assert loaded.loaded_pages == pages
            assert dispatcher_of(server).answers == {"done": 2}
            assert reader.server.engine.stats().prompt_tokens == 1400


def test_nobody_reads_where_nobody_is(decoder: Served) -> None:
    post(decoder, body(long(700)))
    url = f"http://127.0.0.1:{free_port()}"
    with instance(make_engine(), "both", prefill_from=[url], inline_tokens=INLINE) as server:
        assert post(server, body(long(701))).status_code == 200
        assert dispatcher_of(server).decisions == {"nobody": 1}
        info = httpx.get(f"{server.url}/server_info").json()["kv_transfer"]["prefill_from"]
        assert info["instances"] == [{"url": url, "is_open": False}]
        line = 'longctx:prefill_decisions_total{decision="nobody",engine="0",model_name="tiny"} 1.0'
        # A rendering is up to a quarter of a second old.
        server.wait_until("it is counted", lambda: line in httpx.get(f"{server.url}/metrics").text)


def test_a_prompt_that_keeps_the_tpot_of_others_is_read_here(readers: list[Served], decoder: Served) -> None:
    post(decoder, body(long(800)))
    with decoding([readers[0].url], slo=Slo(tpot=5.0), token_budget=256, buckets=(64, 256)) as server:
        for count in (200, 300):  # one step has room for the first
            assert post(server, body(long(count, count))).status_code == 200
        assert dispatcher_of(server).decisions == {"quick": 1, "remote": 1}
        nothing_is_left(server, readers[0])
