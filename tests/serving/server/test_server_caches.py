"""`/v1/caches`: documents that are read once, whose pages stay beyond the devices, and that requests name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from letter_tokenizer import LetterTokenizer
from served import NAME, HeldExecutor, Served, served
from tiered_fake import TieredExecutor, make_tiered_engine

from longctx.serving import Engine
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.server.settings import ServerSettings, read_keys

ALICE, BOB = "alice-has-this-key", "bob-has-another-one"
DOCUMENT = "ABCDEFGH" * 10  # 80 tokens, 20 pages
PAGE_BYTES = 32


class HeldTieredExecutor(HeldExecutor, TieredExecutor):
    """Fake devices with tiers, whose steps a test may hold."""


def tiered_engine(pages: int = 400, folder: Path | None = None, num_pages: int = 100, **options: Any) -> Engine:
    disk = {} if folder is None else {"disk_bytes": 2**20, "disk": str(folder)}
    tiers = TierConfig(pages * PAGE_BYTES, **disk)  # type: ignore[arg-type]
    return make_tiered_engine(
        num_pages, executor_of=HeldTieredExecutor, tokenizer=LetterTokenizer(), tiers=tiers, **options
    )


def settings(**options: Any) -> ServerSettings:
    return ServerSettings(prepare_processes=0, **options)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    keys = read_keys([f"alice {ALICE}", f"bob {BOB}"], "api")
    with served(tiered_engine(), settings(api_keys=keys, cache_tokens=200)) as running:
        yield running


@pytest.fixture
def alice(guarded: Served) -> Iterator[httpx.Client]:
    with guarded.http_client(headers={"authorization": f"Bearer {ALICE}"}) as client:
        yield client
        for cache in client.get("/v1/caches").json()["data"]:
            client.delete(f"/v1/caches/{cache['id']}")
    guarded.wait_idle()
    guarded.wait_until("nothing is pinned", lambda: store_of(guarded).stats.host.pinned_bytes == 0)  # between steps


@pytest.fixture
def bob(guarded: Served) -> Iterator[httpx.Client]:
    with guarded.http_client(headers={"authorization": f"Bearer {BOB}"}) as client:
        yield client


def store_of(running: Served) -> TieredStore:
    store = running.server.engine.pages.store
    assert isinstance(store, TieredStore)
    return store


def create(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/caches", json=({"prompt": DOCUMENT} if "messages" not in fields else {}) | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_read(running: Served, client: httpx.Client, cache: dict[str, Any]) -> dict[str, Any]:
    """Until the document is read, and its pages are in host memory."""
    path = f"/v1/caches/{cache['id']}"
    running.wait_until("the document is read", lambda: client.get(path).json()["status"] != "reading")
    assert store_of(running).flush(20)
    return client.get(path).json()


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "WXYZ", "max_tokens": 6, "ignore_eos": True, "temperature": 0, "return_token_ids": True} | fields
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_document_is_read_and_named(guarded: Served, alice: httpx.Client) -> None:
    plain = complete(alice, prompt=DOCUMENT + "WXYZ", cache_salt="apart")
    made = create(alice, ttl=60)
    assert (made["object"], made["tokens"], made["model"]) == ("cache", 80, NAME)
    assert made["expires_at"] - made["created"] == 60
    ready = wait_read(guarded, alice, made)
    assert (ready["status"], ready["read_tokens"]) == ("ready", 80)
    assert ready["pages"] == {"total": 20, "device": 20, "host": 20, "disk": 0}
    assert store_of(guarded).stats.host.pinned_bytes == 20 * PAGE_BYTES
    guarded.server.engine.core.pool.clear()
    assert alice.get(f"/v1/caches/{made['id']}").json()["pages"]["device"] == 0
    # By its id, or just begun alike: the same answer, by the same pages.
    named = complete(alice, cache_id=made["id"])
    assert named["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert named["choices"][0]["prompt_token_ids"] == plain["choices"][0]["prompt_token_ids"]
    assert named["usage"]["prompt_tokens"] == 84
    assert cached(named) == 80
    alike = complete(alice, prompt=DOCUMENT + "WXYZ")
    assert (cached(alike), alike["choices"]) == (80, named["choices"])
    assert [cache["id"] for cache in alice.get("/v1/caches").json()["data"]] == [made["id"]]
    gone = alice.delete(f"/v1/caches/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "cache.deleted", "deleted": True}
    assert store_of(guarded).stats.host.pinned_bytes == 0
    for answer in (
        alice.get(f"/v1/caches/{made['id']}"),
        alice.delete(f"/v1/caches/{made['id']}"),
        alice.post("/v1/completions", json={"prompt": "1", "cache_id": made["id"]}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "cache_not_found")


def test_a_document_is_given_as_tokens_or_as_messages(guarded: Served, alice: httpx.Client) -> None:
    tokens = alice.post("/tokenize", json={"prompt": DOCUMENT}).json()["tokens"]
    as_tokens = wait_read(guarded, alice, create(alice, prompt=tokens))
    assert as_tokens["tokens"] == 80
    system = {"role": "system", "content": DOCUMENT}
    user = {"role": "user", "content": "WHO"}
    chat = wait_read(guarded, alice, create(alice, messages=[system]))
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    whole = alice.post("/v1/chat/completions", json=body | {"messages": [system, user]}).json()
    named = alice.post("/v1/chat/completions", json=body | {"messages": [user], "cache_id": chat["id"]}).json()
    assert named["choices"] == whole["choices"]
    assert named["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert cached(named) >= 80
    rendered = alice.post("/v1/chat/completions/render", json={"messages": [user], "cache_id": chat["id"]}).json()
    assert rendered["token_ids"][:80] == tokens
    for path, fields, cache in (
        ("/v1/chat/completions", {"messages": [user]}, as_tokens),
        ("/v1/completions", {"prompt": "1"}, chat),
        ("/v1/completions", {"prompt": "1", "echo": True}, as_tokens),
        ("/v1/completions", {"prompt": "1", "cache_salt": "x"}, as_tokens),
    ):
        answer = alice.post(path, json=fields | {"cache_id": cache["id"]})
        assert answer.status_code == 400
        assert "cache" in answer.json()["error"]["message"]


def test_several_prompts_and_streams_name_a_cache(guarded: Served, alice: httpx.Client) -> None:
    made = wait_read(guarded, alice, create(alice))
    both = complete(alice, prompt=["WXYZ", "XYZ"], cache_id=made["id"])
    alone = [complete(alice, prompt=prompt, cache_id=made["id"]) for prompt in ("WXYZ", "XYZ")]
    tokens = [choice["token_ids"] for answer in (both, *alone) for choice in answer["choices"]]
    assert tokens[:2] == tokens[2:]
    body = {"prompt": "WXYZ", "max_tokens": 6, "ignore_eos": True, "temperature": 0, "stream": True}
    text = alice.post("/v1/completions", json=body | {"cache_id": made["id"]}).text
    assert text.rstrip().endswith("[DONE]")


def test_nobody_finds_or_uses_anothers_cache(guarded: Served, alice: httpx.Client, bob: httpx.Client) -> None:
    made = wait_read(guarded, alice, create(alice))
    assert bob.get("/v1/caches").json()["data"] == []
    none = f"cache_{'0' * 32}"
    for method in ("get", "delete"):
        answers = [bob.request(method, f"/v1/caches/{cache}") for cache in (made["id"], none)]
        assert [answer.status_code for answer in answers] == [404, 404]
        texts = {answer.text.replace(made["id"], "").replace(none, "") for answer in answers}
        assert len(texts) == 1
    assert bob.post("/v1/completions", json={"prompt": "1", "cache_id": made["id"]}).status_code == 404
    # Nor does it learn, by tokens or by time, that somebody has read the document.
    assert cached(complete(bob, prompt=DOCUMENT + "WXYZ")) == 0
    assert cached(complete(alice, prompt=DOCUMENT + "WXYZ")) == 80
    assert alice.get(f"/v1/caches/{made['id']}").status_code == 200


def test_quotas_are_of_each_tenant(guarded: Served, alice: httpx.Client, bob: httpx.Client) -> None:
    first = create(alice)
    create(alice, prompt="B" * 100)
    answer = alice.post("/v1/caches", json={"prompt": "C" * 30})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "cache_quota_exceeded")
    assert "200 tokens" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    other = create(bob)
    alice.delete(f"/v1/caches/{first['id']}")
    create(alice, prompt="C" * 30)
    bob.delete(f"/v1/caches/{other['id']}")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": DOCUMENT, "messages": [{"role": "user", "content": "x"}]},
        {"prompt": ""},
        {"prompt": "ABC"},  # less than a page
        {"prompt": []},
        {"prompt": [[1, 2, 3, 4]]},
        {"prompt": [DOCUMENT]},
        {"prompt": [1, 2, 3, 50]},
        {"prompt": "A" * 300},  # longer than the longest sequence
        {"messages": []},
        {"prompt": DOCUMENT, "ttl": 0},
        {"prompt": DOCUMENT, "ttl": -1},
        {"prompt": DOCUMENT, "ttl": "60"},
        {"prompt": DOCUMENT, "ttl": 1e8},
    ],
)
def test_what_is_no_document(alice: httpx.Client, body: dict[str, Any]) -> None:
    answer = alice.post("/v1/caches", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert alice.get("/v1/caches").json()["data"] == []


@pytest.mark.parametrize(
    "name", ["", "cache_", "x" * 2000, "../../etc", "cache_%00", "é", 'a"b', "{}", f"cache_{0:032}"]
)
def test_ids_of_no_cache(alice: httpx.Client, name: str) -> None:
    answer = alice.post("/v1/completions", json={"prompt": "1", "cache_id": name})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    escaped = r'{"prompt": "1", "cache\u005fid": "cache_abc"}'
    answer = alice.post("/v1/completions", content=escaped, headers={"content-type": "application/json"})
    assert answer.status_code == 404
    for value in ("1", "[]", "{}", "true", '"a", "cache_id": "b"'):
        content = f'{{"prompt": "1", "cache_id": {value}}}'
        answer = alice.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 404)
    assert alice.post("/v1/completions", json={"prompt": "1", "max_tokens": 1, "cache_id": None}).status_code == 200


def test_a_cache_ends_with_its_time(guarded: Served, alice: httpx.Client) -> None:
    made = create(alice, ttl=0.2)
    kept = create(alice, prompt=DOCUMENT + "IJKL", ttl=60)
    guarded.wait_until(
        "the cache ends", lambda: [x["id"] for x in alice.get("/v1/caches").json()["data"]] == [kept["id"]]
    )
    assert alice.get(f"/v1/caches/{made['id']}").status_code == 404
    wait_read(guarded, alice, kept)
    assert store_of(guarded).stats.host.pinned_bytes == 21 * PAGE_BYTES  # pages that both had are pinned still


def test_documents_are_read_after_everybody_else(guarded: Served, alice: httpx.Client) -> None:
    """And one that is deleted while it is read is read no further."""
    executor = guarded.executor
    executor.go.clear()
    made = create(alice, prompt="ABCDE" * 38)
    guarded.wait_until("it runs", lambda: guarded.server.engine.core.stats().running == 1)
    steps = guarded.server.engine.core.stats().steps
    order: list[str] = []
    guarded.server.thread.on_end.append(lambda output, request: order.append(str(request.priority)))
    with guarded.http_client(headers={"authorization": f"Bearer {ALICE}"}) as client:
        executor.go.set()
        answer = client.post("/v1/completions", json={"prompt": "Z" * 40, "max_tokens": 1})
        assert answer.status_code == 200
    assert guarded.server.engine.core.stats().steps >= steps
    wait_read(guarded, alice, made)
    assert order[0] == "0"
    executor.go.clear()
    second = create(alice, prompt="D" * 10)
    alice.delete(f"/v1/caches/{second['id']}")
    executor.go.set()
    guarded.wait_idle()
    assert guarded.server.engine.stats().waiting == 0


def test_pinned_pages_stay_where_others_go(tmp_path: Path) -> None:
    with served(tiered_engine(pages=100, folder=tmp_path), settings()) as running, running.http_client() as client:
        made = wait_read(running, client, create(client))
        for number in range(12):
            complete(client, prompt="ABCDEFGHIJKLMNOP"[number] * 60 + "WXYZ")
        assert store_of(running).flush(20)
        pages = client.get(f"/v1/caches/{made['id']}").json()["pages"]
        assert pages["host"] == 20
        assert pages["disk"] >= 10  # its queue has room for 25
        assert store_of(running).stats.host.evicted > 0
        # Half of a tier may be pinned; a document for which there is no room is refused.
        many = client.post("/v1/caches", json={"prompt": [1] * 250})
        assert many.status_code == 200
        stats = store_of(running).stats.host
        assert stats.pinned_bytes <= 50 * PAGE_BYTES
        # Requests run on whatever is pinned, as nothing is on the devices.
        assert len(complete(client, prompt="Q" * 200)["choices"][0]["token_ids"]) == 6
    # A restart has no caches; the pages of a document are found, so it is read in no time.
    with served(tiered_engine(pages=100, folder=tmp_path), settings()) as running, running.http_client() as client:
        assert client.get("/v1/caches").json()["data"] == []
        assert client.get(f"/v1/caches/{made['id']}").status_code == 404
        again = wait_read(running, client, create(client))
        assert running.server.engine.stats().loaded_tokens >= 40
        assert cached(complete(client, cache_id=again["id"])) == 80


def test_all_documents_have_half_of_a_tier() -> None:
    with served(tiered_engine(pages=60), settings(max_cache_ttl=100.0)) as running, running.http_client() as client:
        create(client, ttl=100)
        answer = client.post("/v1/caches", json={"prompt": "B" * 48, "ttl": 10})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "caches_are_full")
        create(client, prompt="B" * 40, ttl=10)
        long = client.post("/v1/caches", json={"prompt": "B" * 8, "ttl": 101})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "ttl")
        running.wait_until("they are counted", lambda: "kv_cache_tokens{" in client.get("/metrics").text)


def test_without_tiers_there_are_no_caches(letters: Served) -> None:
    with letters.http_client() as client:
        answer = client.post("/v1/caches", json={"prompt": DOCUMENT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "caches_are_off")
        assert "--kv-host-bytes" in answer.json()["error"]["message"]
        assert client.get("/v1/caches").json() == {"data": [], "object": "list"}


def test_a_document_whose_reading_fails_says_so() -> None:
    with served(tiered_engine(), settings()) as running, running.http_client() as client:
        running.executor.go.clear()
        made = create(client)
        running.server.thread.cancel(next(iter(running.server.engine.requests)))
        running.executor.go.set()
        path = f"/v1/caches/{made['id']}"
        running.wait_until("it has ended", lambda: client.get(path).json()["status"] == "failed")
        assert "cancelled" in client.get(path).json()["error"]
        assert len(complete(client, cache_id=made["id"])["choices"][0]["token_ids"]) == 6


def test_a_server_that_ends_reads_no_further() -> None:
    with served(tiered_engine(), settings()) as running, running.http_client() as client:
        running.executor.pause = 0.05
        create(client, prompt="AB" * 100)


def test_sizes_of_tiers_are_told_and_no_path(alice: httpx.Client) -> None:
    answer = alice.get("/server_info")
    assert answer.status_code == 200
    assert answer.json()["engine"]["tiers"] == {"host_bytes": 400 * PAGE_BYTES, "disk_bytes": 0}


# Prompts that requests ask to keep.


def pinned(running: Served) -> int:
    """Pages, once all that is on its way has been written."""
    running.wait_idle()
    assert store_of(running).flush(20)
    return store_of(running).stats.host.pinned_bytes // PAGE_BYTES


def chat(client: httpx.Client, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    answer = client.post("/v1/chat/completions", json=body | {"messages": list(messages)})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "hint",
    [
        {"cache_control": {"type": "ephemeral"}},
        {"cache_control": {"ttl": "1h"}},
        {"cache_control": {"ttl": 60}},
        {"prompt_cache_retention": "24h"},
    ],
)
def test_prompts_are_kept_where_others_go(hint: dict[str, Any]) -> None:
    with served(tiered_engine(pages=100), settings()) as running, running.http_client() as client:
        plain = complete(client, prompt=DOCUMENT + "WXYZ", cache_salt="apart")
        assert pinned(running) == 0  # and the queue into host memory has room again
        kept = complete(client, prompt=DOCUMENT + "WXYZ", **hint)
        assert kept["choices"] == plain["choices"]
        assert pinned(running) == 21
        for number in range(12):
            complete(client, prompt="ABCDEFGHIJKLMNOP"[number] * 60 + "WXYZ")
        assert (pinned(running), store_of(running).stats.host.evicted > 0) == (21, True)
        running.server.engine.core.pool.clear()
        assert cached(complete(client, prompt=DOCUMENT + "WXYZ")) >= 80
        count = re.compile(r"^longctx:kv_retained_tokens\{.*\} 84(\.0)?$", re.MULTILINE)
        running.wait_until("they are counted", lambda: count.search(client.get("/metrics").text))


def test_what_is_kept_ends_with_its_time() -> None:
    with served(tiered_engine(), settings(max_cache_ttl=1.0)) as running, running.http_client() as client:
        complete(client, prompt=DOCUMENT, cache_control={"ttl": 5000})  # for no longer than the server allows
        assert pinned(running) == 20
        complete(client, prompt=DOCUMENT + "IJKL", cache_control={"ttl": 0.01})
        caches = running.server.caches
        running.wait_until("nothing is counted", lambda: caches.num_kept_tokens == 0)

        def is_unpinned() -> bool:
            complete(client, prompt="Z")  # pins end when something is looked up
            return store_of(running).stats.host.pinned_bytes == 0

        running.wait_until("nothing is pinned", is_unpinned)


def test_marked_messages_are_kept_and_no_others(guarded: Served, alice: httpx.Client) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": 60}}
    system = {"role": "system", "content": [{"type": "text", "text": DOCUMENT} | mark]}
    user = {"role": "user", "content": "WHO" * 20}
    plain = chat(alice, {"role": "system", "content": DOCUMENT}, user, cache_salt="apart")
    assert chat(alice, system, user)["choices"][0]["message"] == plain["choices"][0]["message"]
    count = pinned(guarded)
    assert 20 <= count <= 22  # of the system's text, and what the template has before the user's
    assert guarded.server.caches.release(lambda key: True) == count
    guarded.wait_until("nothing is pinned", lambda: pinned(guarded) == 0)
    whole = chat(alice, system, user | mark)["usage"]["prompt_tokens"]
    assert pinned(guarded) == whole // 4
    guarded.server.caches.release(lambda key: True)
    five = alice.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "A"} | mark] * 5})
    assert (five.status_code, "4 times" in five.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    "control", [{"ttl": 0}, {"ttl": "2h"}, {"type": "persistent"}, "1h", {"ttl": -5}, {"ttl": 1e12}]
)
def test_hints_that_are_none(alice: httpx.Client, control: Any) -> None:
    answer = alice.post("/v1/completions", json={"prompt": "A", "cache_control": control})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_control")


def test_hints_count_for_the_quota_of_their_tenant(guarded: Served, alice: httpx.Client, bob: httpx.Client) -> None:
    made = wait_read(guarded, alice, create(alice))  # 80 of 200 tokens
    kept = complete(alice, prompt="B" * 160, cache_control={"ttl": 60})
    assert len(kept["choices"][0]["token_ids"]) == 6  # what is too much is left out, and the answer is none the worse
    assert pinned(guarded) == 20 + 30
    answer = alice.post("/v1/caches", json={"prompt": "C" * 8})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "cache_quota_exceeded")
    complete(bob, prompt="B" * 40, cache_control={"ttl": 60})
    assert pinned(guarded) == 60
    complete(alice, prompt="B" * 160, cache_control={"ttl": 60})  # the same pages again
    assert pinned(guarded) == 60
    # What a cache and a prompt have together stays until both let it go.
    alice.delete(f"/v1/caches/{made['id']}")
    guarded.wait_until("its pages go", lambda: pinned(guarded) == 40)
    complete(alice, prompt=DOCUMENT[:40], cache_control={"ttl": 60})
    made = create(alice, prompt=DOCUMENT[:40])
    alice.delete(f"/v1/caches/{made['id']}")
    assert pinned(guarded) == 50
    guarded.server.caches.release(lambda key: True)


def test_hints_without_tiers_change_nothing(letters: Served) -> None:
    with letters.http_client() as client:
        assert complete(client, cache_control={"ttl": "1h"})["choices"] == complete(client)["choices"]
