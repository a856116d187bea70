"""Instances of a cluster: they begin and go on with requests of a router, which says who reads and who has what."""

import base64
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from cluster.link_proxy import LinkProxy
from disaggregated import (
    body,
    instance,
    make_engine,
    nothing_is_left,
    post,
    resume,
    resumed,
    tokens_of,
    transfers_of,
)
from hypothesis import given
from hypothesis import strategies as st
from serve_process import free_port
from served import Served

from longctx.cluster import prefill
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.predictor.file import predictor_from_dict
from longctx.serving.predictor.work import Work
from longctx.serving.request.grammar import from_choices
from longctx.serving.request.request import Request
from longctx.serving.server.auth import TENANT_HEADER
from longctx.serving.server.kv_events import block_hash
from longctx.serving.server.relay import LineSplitter
from longctx.serving.server.settings import ApiKey

PAGE = 16


@pytest.fixture(scope="module")
def trio() -> Iterator[list[Served]]:
    with instance(make_engine()) as one, instance(make_engine()) as two, instance(make_engine()) as three:
        yield [one, two, three]


@pytest.fixture(autouse=True)
def all_ends(trio: list[Served]) -> Iterator[None]:
    yield
    nothing_is_left(*trio)
    for each in trio:
        each.wait_until("all reading has ended", lambda each=each: not transfers_of(each).prefills.num_requests)


def prompt_of(seed: int, num_tokens: int = 700) -> list[int]:
    return [(i * i + seed * 37 + i // 5) % 250 for i in range(num_tokens)]


def request_of(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    request: dict[str, Any] = resumed(prompt, None, **sampling)["request"]
    return request


def alone(server: Served, prompt: list[int], **sampling: Any) -> list[list[int]]:
    """The tokens of each completion, where one engine computes all."""
    options = {"temperature": 1.0, "seed": 11, "cache_salt": f"alone {sampling}"} | sampling
    return [choice["token_ids"] for choice in post(server, body(prompt, **options)).json()["choices"]]


def computed(*servers: Served) -> list[int]:
    """Tokens of prompts that each has computed."""
    return [server.server.engine.stats().prompt_tokens for server in servers]


def loaded(server: Served) -> int:
    """Pages that a server has fetched."""
    pages: int = server.server.engine.executor.mover.stats.loaded_pages
    return pages


def test_a_request_without_pages_begins(trio: list[Served]) -> None:
    events = resume(trio[0], {"request": request_of(prompt_of(1))})
    assert [tokens_of(events)] == alone(trio[1], prompt_of(1))
    end = events[-1].end
    assert end is not None
    assert (end.reason, end.cached_tokens) == ("length", 0)


def test_another_one_goes_on_from_tokens_alone(trio: list[Served]) -> None:
    [expected] = alone(trio[1], prompt_of(2))
    progress = {"lease": None, "length": 0, "tokens": expected[:5], "logprobs": []}
    handoff = {"seed": 11, "completions": [progress], "prompt_logprobs": None}
    sent = {"request": request_of(prompt_of(2)), "kv_transfer_params": {"handoff": handoff}}
    assert tokens_of(resume(trio[0], sent)) == expected
    # Its prompt may be read elsewhere, too.
    before, (read,) = loaded(trio[0]), computed(trio[2])
    again = sent | {"prefill": {"url": trio[2].url, "prefix": None, "seconds": 1.0}}
    again["request"] = again["request"] | {"cache_salt": "again"}
    assert tokens_of(resume(trio[0], again)) == expected
    assert (loaded(trio[0]) - before, computed(trio[2])[0] - read) == (700 // PAGE, 700)


@pytest.mark.parametrize("n", [1, 2])
def test_the_named_server_reads_the_prompt(trio: list[Served], n: int) -> None:
    p, d, other = trio
    prompt, before, pages = prompt_of(10 + n), computed(p, d), loaded(d)
    sent = {"request": request_of(prompt, n=n), "prefill": {"url": p.url, "prefix": None}}
    events = resume(d, sent)
    assert [tokens_of(events, index) for index in range(n)] == alone(other, prompt, n=n)
    after = computed(p, d)
    assert after[0] - before[0] == 700
    assert after[1] - before[1] == n * (700 - 688)  # what follows the last full page
    assert loaded(d) - pages == 688 // PAGE
    assert httpx.get(f"{d.url}/server_info").json()["kv_transfer"]["answers"]["done"] >= 1


def test_a_prefix_comes_from_who_has_it_and_stays_there(trio: list[Served]) -> None:
    p, d, holder = trio
    prompt = prompt_of(20)
    shared = prompt[: 20 * PAGE]
    post(holder, body([*shared, 1, 2, 3]))
    before, pages = computed(p, d, holder), (loaded(p), loaded(d))
    prefix = {"url": holder.url, "tokens": 20 * PAGE}
    sent = {"request": request_of(prompt), "prefill": {"url": p.url, "prefix": prefix}}
    got = tokens_of(resume(d, sent))
    after = computed(p, d, holder)
    assert [got] == alone(holder, prompt)
    assert after[0] - before[0] == 700 - 20 * PAGE, "p computes what the holder does not have"
    assert after[2] - before[2] == 1, "the holder computes nothing but a last row"
    assert (loaded(p) - pages[0], loaded(d) - pages[1]) == (20, 688 // PAGE)
    # Now p has the prefix too: the block is replicated.
    before = computed(p)
    assert post(p, body([*shared, 9])).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 20 * PAGE


def test_who_decodes_gets_a_prefix_for_itself(trio: list[Served]) -> None:
    d, holder = trio[:2]
    prompt = prompt_of(30)
    post(holder, body(prompt))
    (before,), pages = computed(d), loaded(d)
    sent = {"request": request_of(prompt), "prefill": {"url": None, "prefix": {"url": holder.url, "tokens": 320}}}
    assert [tokens_of(resume(d, sent))] == alone(holder, prompt)
    assert (computed(d)[0] - before, loaded(d) - pages) == (700 - 320, 20)
    # What is there is not fetched again.
    pages = loaded(d)
    assert [tokens_of(resume(d, sent))] == alone(holder, prompt)
    assert loaded(d) == pages


def test_a_holder_that_has_dropped_its_pages_computes_none(trio: list[Served]) -> None:
    p, d, holder = trio
    before = computed(p, holder)
    prefix = {"url": holder.url, "tokens": 320}
    got = resume(d, {"request": request_of(prompt_of(35)), "prefill": {"url": p.url, "prefix": prefix}})
    after = computed(p, holder)
    assert (after[0] - before[0], after[1] - before[1]) == (700, 0)
    assert [tokens_of(got)] == alone(holder, prompt_of(35))
    assert transfers_of(p).prefills.answers["failed"] == 1


def test_whoever_is_not_there_costs_time_only(trio: list[Served]) -> None:
    d, other = trio[:2]
    nobody = f"http://127.0.0.1:{free_port()}"
    for seed, named in (
        (40, {"url": nobody, "prefix": None}),
        (41, {"url": None, "prefix": {"url": nobody, "tokens": 320}}),
        (42, {"url": other.url, "prefix": {"url": nobody, "tokens": 320}}),
    ):
        events = resume(d, {"request": request_of(prompt_of(seed)), "prefill": named})
        assert [tokens_of(events)] == alone(other, prompt_of(seed))
    other.server.is_draining = True
    try:
        events = resume(d, {"request": request_of(prompt_of(43)), "prefill": {"url": other.url}})
    finally:
        other.server.is_draining = False
    assert [tokens_of(events)] == alone(other, prompt_of(43))


@pytest.mark.parametrize("what", ["requests", "pages"])
def test_a_link_that_is_cut_costs_time_only(trio: list[Served], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_LATER_BYTES", 0)  # pages come while the prompt is read
    p, d, other = trio
    prompt, executor = prompt_of(44 if what == "pages" else 45, 1600), p.server.engine.executor
    wait, is_cut = executor.wait, threading.Event()
    stats, port = d.server.engine.executor.mover.stats, transfers_of(p).port
    before, short = stats.loaded_bytes, stats.short_loads

    def hold(pending: Any) -> Any:
        if stats.loaded_bytes > before:
            is_cut.wait(10)  # it is not to be read before the link is cut
        time.sleep(0.1)
        return wait(pending)

    monkeypatch.setattr(executor, "wait", hold)
    with LinkProxy(f"127.0.0.1:{p.port if what == 'requests' else port}") as link:
        if what == "pages":
            transfers_of(p).port = int(link.address.rpartition(":")[2])  # what it tells others
        url = f"http://{link.address}" if what == "requests" else p.url.replace("127.0.0.1", "localhost")
        link.bytes_per_second = 1e6
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(resume, d, resumed(prompt, url))
            d.wait_until("pages come", lambda: stats.loaded_bytes > before, 30)
            link.cut()
            is_cut.set()
            assert [tokens_of(answer.result())] == alone(other, prompt)
    transfers_of(p).port = port
    assert stats.short_loads == short + 1


def test_one_that_hangs_is_given_up_soon(trio: list[Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_LOOK_SECONDS", 0.2)
    p, d, other = trio
    prompt = prompt_of(48)
    with LinkProxy(f"127.0.0.1:{p.port}") as link:
        link.is_stalled = True
        since = time.monotonic()
        assert [tokens_of(resume(d, resumed(prompt, f"http://{link.address}")))] == alone(other, prompt)
        assert time.monotonic() - since < 30  # of the 60 for which a prompt may be read
        link.cut()  # what is held back never comes: a prompt that comes late is kept until its lease ends
        link.is_stalled = False


def test_a_client_that_goes_away_ends_the_reading(trio: list[Served]) -> None:
    p, d = trio[:2]
    (before,), cancelled = computed(p), transfers_of(d).prefills.answers["cancelled"]
    with httpx.stream("POST", f"{d.url}/resume", json=resumed(prompt_of(46, 3900), p.url), timeout=60):
        d.wait_until("it is read", lambda: p.server.engine.stats().running)
    d.wait_until("it is read no more", lambda: transfers_of(d).prefills.answers["cancelled"] > cancelled)
    nothing_is_left(p, d)
    assert computed(p)[0] - before < 3900


FIRST: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "with log probabilities": {"logprobs": 3},
    "with penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "temperature": 0.0},
    "of some tokens": {"allowed_token_ids": [70, 71, 72], "logit_bias": [[71, 2.0]]},
    "by a grammar": {"grammar": from_choices(["yes, and", "no"]), "ignore_eos": False},
    "that may be the last": {"max_tokens": 1},
    "before which none ends": {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": list(range(0, 250, 2))},
    "that may end it": {"ignore_eos": False, "stop_token_ids": list(range(250))},
    "that may end it by a text": {"stop": list("aeiou tsnrl"), "temperature": 1.5},
}


@pytest.mark.parametrize("way", ["after the answer", "to host memory", "while it is read"])
def test_the_first_token_comes_from_who_reads_the_prompt(
    trio: list[Served], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d, other = trio
    if way == "while it is read":
        monkeypatch.setattr(prefill, "_LATER_BYTES", 0)
    with contextlib.ExitStack() as stack:
        if way == "to host memory":
            d = stack.enter_context(instance(make_engine(tiers=TierConfig(64 << 20))))
        for number, (name, sampling) in enumerate(FIRST.items()):
            prompt = prompt_of(100 + number, 97 + 7 * number)
            before = computed(d)
            answer = resume(d, resumed(prompt, p.url, **sampling))
            expected = resume(other, resumed([*prompt], None, **sampling))
            assert tokens_of(answer) == tokens_of(expected), name
            assert "".join(each.text for each in answer) == "".join(each.text for each in expected), name
            values = [[x.logprob for each in events for x in each.logprobs] for events in (answer, expected)]
            assert values[0] == pytest.approx(values[1], abs=1e-4), name
            assert (answer[-1].end and answer[-1].end.reason) == (expected[-1].end and expected[-1].end.reason), name
            again = computed(d)[0] - before[0]
            tail = (len(prompt) - 1) % PAGE + 1
            most = {"after the answer": 1, "to host memory": tail + 1, "while it is read": tail}[way]
            assert again == (0 if len(tokens_of(expected)) == 1 and way != "while it is read" else most), name


@pytest.mark.parametrize(
    "sampling", [{"logprobs": 100}, {"logit_bias": [[10**6, 1.0]]}, {"top_p": 7}, {"grammar": "x"}]
)
def test_what_no_first_token_is_drawn_by_is_refused(trio: list[Served], sampling: dict[str, Any]) -> None:
    params = {"do_remote_decode": True, "sampling": {"max_tokens": 5, "seed": 1} | sampling}
    answer = post(trio[0], body([1, 2, 3], max_tokens=1, kv_transfer_params=params))
    assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True)


@pytest.mark.parametrize("sampling", [{"n": 2}, {"prompt_logprobs": 1}, {"pooling": "mean", "max_tokens": 1}])
def test_some_first_tokens_are_drawn_by_who_decodes(trio: list[Served], sampling: dict[str, Any]) -> None:
    p, d, other = trio
    prompt = prompt_of(130, 90)
    answer, expected = (resume(each, resumed(prompt, url, **sampling)) for each, url in ((d, p.url), (other, None)))
    for index in range(sampling.get("n", 1)):
        assert tokens_of(answer, index) == tokens_of(expected, index)


def test_a_prompt_that_was_read_for_a_client_that_left_is_let_go(trio: list[Served]) -> None:
    p, d = trio[:2]
    resume(d, resumed(prompt_of(49, 100), p.url))
    leases = p.server.engine.core.leases
    with LinkProxy(f"127.0.0.1:{p.port}") as link:
        sent = resumed(prompt_of(50, 200), f"http://{link.address}")
        with httpx.stream("POST", f"{d.url}/resume", json=sent, timeout=60):
            p.wait_until("it is being read", lambda: p.server.engine.stats().running or leases.over())
            link.is_stalled = True
            p.wait_until("it has been read", leases.over)
        d.wait_until("d has given it up", lambda: not d.server.calls)
        link.is_stalled = False
        nothing_is_left(p, d)


@pytest.mark.parametrize("has_room", [True, False])
def test_pages_come_to_host_memory_before_a_request_enters_the_engine(trio: list[Served], has_room: bool) -> None:
    """Mooncake, section 3, steps 3 and 4. `tests/serving/test_engine_thread.py` has when a slot is taken."""
    p, _, other = trio
    page_bytes = other.server.engine.page_identity[0].page_bytes
    tiers = TierConfig((200 if has_room else 43) * page_bytes)  # half of it may be kept for some
    with instance(make_engine(tiers=tiers)) as d:
        prompt, store = prompt_of(47 + has_room), d.server.engine.pages.store
        assert [tokens_of(resume(d, resumed(prompt, p.url)))] == alone(other, prompt)
        assert store is not None
        assert store.stats.host.hits == (688 // PAGE if has_room else 0)
        assert d.server.engine.pages.recomputed == {"tiers": 0, "transfers": 0}
        assert computed(d) == [701 - 688 if has_room else 1]  # the partial last page is in no tier
        nothing_is_left(d)


def test_a_prompt_may_be_sent_as_the_bytes_of_its_tokens(trio: list[Served]) -> None:
    prompt = prompt_of(51)
    sent = resumed(prompt, None)
    expected = tokens_of(resume(trio[0], sent))
    sent["request"]["prompt"] = ""
    encoded = base64.b64encode(np.array(prompt, "<i4").tobytes()).decode()
    assert tokens_of(resume(trio[0], sent | {"tokens": encoded})) == expected
    answer = httpx.post(f"{trio[0].url}/resume", json=sent | {"tokens": "AAAA"})  # three bytes
    assert (answer.status_code, "tokens must be base64 of int32" in answer.text) == (400, True)
    for wrong in ("no base64!", "", base64.b64encode(b"\xff" * 8).decode()):  # -1 is no token
        assert httpx.post(f"{trio[0].url}/resume", json=sent | {"tokens": wrong}).status_code == 400


def test_hosts_that_are_no_peers_are_not_asked(trio: list[Served]) -> None:
    for named in (
        {"url": "http://10.1.2.3:80"},
        {"url": trio[1].url, "prefix": {"url": "http://10.1.2.3:80", "tokens": 16}},
        {"url": None, "prefix": {"url": "http://10.1.2.3:80", "tokens": 16}},
    ):
        sent = {"request": request_of(prompt_of(50)), "prefill": named}
        answer = httpx.post(f"{trio[0].url}/resume", json=sent)
        assert answer.status_code == 403, answer.text
        assert "--kv-peer" in answer.json()["error"]["message"]
    sent["prefill"] = {"url": "file:///etc/passwd"}
    assert httpx.post(f"{trio[0].url}/resume", json=sent).status_code == 400


def test_tenants_stay_apart_and_need_an_administrator(trio: list[Served]) -> None:
    keys, admin = (ApiKey("ann", "key-of-ann"),), {"authorization": "Bearer key-of-router"}
    admins = (ApiKey("router", "key-of-router"),)
    with (
        instance(make_engine(), keys=keys, admin_keys=admins) as p,
        instance(make_engine(), keys=keys, admin_keys=admins) as d,
    ):
        sent = {"request": request_of(prompt_of(60)) | {"tenant": "ann"}, "prefill": {"url": p.url}}
        assert [tokens_of(resume(d, sent, **admin))] == alone(trio[0], prompt_of(60))
        assert loaded(d) == 688 // PAGE
        ann = {"authorization": "Bearer key-of-ann"}
        for server in (p, d):  # the pages are hers
            answer = httpx.post(f"{server.url}/v1/completions", json=body(prompt_of(60)), headers=ann, timeout=60)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 688
        for headers, more in (
            (ann | {TENANT_HEADER: "bob"}, {}),
            (ann, {"kv_transfer_params": {"do_remote_decode": True, "prefix": {"url": p.url, "tokens": 16}}}),
            (ann, {"kv_transfer_params": {"do_remote_decode": True, "is_cached": True}}),
            (ann, {"kv_transfer_params": {"do_remote_decode": True, "sampling": {"seed": 1}}}),
        ):
            asked = body(prompt_of(61)) | more
            assert httpx.post(f"{d.url}/v1/completions", json=asked, headers=headers).status_code == 403
        for path in ("/drain", "/kv_swap", "/resume", "/loads"):
            assert httpx.post(f"{d.url}{path}", json={}, headers=ann).status_code == 403
        nothing_is_left(p, d)


def test_what_a_router_is_told(trio: list[Served]) -> None:
    infos = [httpx.get(f"{each.url}/server_info").json() for each in trio]
    assert len({info["kv_transfer"]["fingerprint"] for info in infos}) == 1
    assert len({info["keys"] for info in infos}) == 1
    assert len({info["instance"] for info in infos}) == 3
    engine = trio[0].server.engine
    assert (infos[0]["page_size"], infos[0]["max_running"]) == (PAGE, 8)
    assert infos[0]["kv_bytes_per_token"] * PAGE == engine.page_identity.layout.page_bytes
    found = httpx.get(f"{trio[0].url}/predictor").json()
    predictor, work = predictor_from_dict(found["predictor"]), Work().with_chunk(100, 50, True)
    assert predictor.seconds(work) * found["prompt_factor"] == pytest.approx(engine.predictor.seconds(work))
    load = httpx.get(f"{trio[0].url}/load").json()
    assert (load["decoding"], load["decode_tokens"], load["request_ids"]) == (0, 0, [])
    sent = body(prompt_of(70), max_tokens=3000, stream=True)
    with httpx.stream("POST", f"{trio[0].url}/v1/completions", json=sent, headers={"x-request-id": "mine"}) as answer:
        lines = answer.iter_lines()  # whoever drops it leaves
        next(lines)
        trio[0].wait_until("it decodes", lambda: httpx.get(f"{trio[0].url}/load").json()["decoding"])
        load = httpx.get(f"{trio[0].url}/load").json()
        assert load["request_ids"] == ["mine"]
        assert load["decode_tokens"] >= 700
        assert load["backlog_seconds"] == 0


def test_corrections_far_from_1_are_some_that_a_router_takes(
    trio: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = trio[0].server.engine.predictor
    monkeypatch.setattr(predictor, "prompt_factor", 3.14159e-4)
    monkeypatch.setattr(predictor, "decode_factor", 0.0)  # of 2e6 times what was predicted
    assert httpx.get(f"{trio[0].url}/load").json()["factors"] == [3.1e-4, 1e-6]


def test_a_server_says_how_busy_it_is_whenever_that_changes(trio: list[Served]) -> None:
    server, lines = trio[0], queue.Queue[dict[str, Any]]()

    def follow() -> None:
        headers = {"accept": "application/x-ndjson"}
        with httpx.stream("GET", f"{server.url}/load?every=0.02", headers=headers, timeout=10) as answer:
            for line in answer.iter_lines():
                lines.put(json.loads(line))

    def wait_for(condition: Callable[[dict[str, Any]], bool]) -> None:
        while not condition(lines.get(timeout=10)):
            pass

    thread = threading.Thread(target=follow)
    thread.start()
    wait_for(lambda load: load["decoding"] == 0 and load["problem"] is None and len(load["factors"]) == 2)
    since = time.monotonic()
    lines.get(timeout=10)
    assert time.monotonic() - since > 0.5  # nothing has changed
    sent = body(prompt_of(71), max_tokens=3000, stream=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=sent, headers={"x-request-id": "mine"}) as answer:
        pieces = answer.iter_lines()
        next(pieces)
        wait_for(lambda load: load["decoding"] == 1 and load["request_ids"] == ["mine"])
    wait_for(lambda load: load["decoding"] == 0)
    with server.http_client() as client:
        client.post("/drain", json={})
        thread.join(10)
        assert not thread.is_alive()  # it may be about to end, and has no request
        wait_for(lambda load: load["draining"])
        assert client.get("/load", params={"every": 0}).status_code == 400
        client.post("/drain", json={"drain": False})


def test_drained_servers_take_requests_again(trio: list[Served]) -> None:
    with trio[0].http_client() as client:
        assert client.post("/drain", json={}).json() == {"draining": True, "requests": 0}
        assert client.get("/load").json()["draining"]
        assert post(trio[0], body()).status_code == 503
        assert client.get("/ready").status_code == 503
        assert client.post("/drain", json={"drain": False}).json() == {"draining": False, "requests": 0}
    assert post(trio[0], body()).status_code == 200


def test_cold_blocks_leave(trio: list[Served]) -> None:
    server, prompt = trio[0], prompt_of(80)
    post(server, body(prompt))
    engine = server.server.engine
    server.wait_idle()
    keys = engine.input_processor.prepare(Request(prompt)).keys
    swap = {"keys": [block_hash(key) for key in keys[10:]] + [5], "tier": "device"}
    assert httpx.post(f"{server.url}/kv_swap", json=swap).json() == {"evicted": len(keys) - 10}
    assert engine.scheduler.count_cached(keys) == 10 * PAGE
    usage = post(server, body(prompt)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 10 * PAGE
    assert httpx.post(f"{server.url}/kv_swap", json=swap | {"tier": "tape"}).status_code == 400


@given(st.lists(st.text(st.sampled_from("ab\u2028\u2029\x85\r\v"), min_size=1)), st.integers(1, 7))
def test_only_line_feeds_end_lines(lines: list[str], size: int) -> None:
    sent = "".join(f"{line}\n\n" for line in lines).encode()

    splitter = LineSplitter()
    parts = [sent[i : i + size] for i in range(0, len(sent), size)]
    assert [line.decode() for part in parts for line in splitter.push(part)] == lines


def resume_body(lease: str | None = None, **more: Any) -> dict[str, Any]:
    handoff = {"seed": 1, "completions": [{"lease": lease, "length": 0, "tokens": [5]}]}
    params = {"remote_host": "127.0.0.1", "remote_port": 9, "handoff": handoff}
    return {"request": {"prompt": [1, 2, 3]}, "kv_transfer_params": params} | more


@pytest.mark.parametrize(
    "body",
    [
        {},
        resume_body(request={"prompt": [1, 2, 3], "sampling": {"top_k": 2**31}}),
        resume_body(request={"prompt": [10**9]}),
        resume_body(request={"prompt": []}),
        resume_body(kv_transfer_params={"handoff": {}}),
        resume_body(lease="0" * 32),  # no fingerprint
    ],
)
def test_bad_requests_are_not_resumed(trio: list[Served], body: dict[str, Any]) -> None:
    assert httpx.post(f"{trio[0].url}/resume", json=body, timeout=20).status_code in (400, 409)
