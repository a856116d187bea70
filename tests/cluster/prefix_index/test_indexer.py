"""The index as a service: hashes by the published rule, and its HTTP API over real publishers."""

import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import xxhash
from cluster.prefix_index.publishers import Instance, keys, removed, stored, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from longctx.cluster.prefix_index.events import MalformedMessage, decode
from longctx.cluster.prefix_index.indexer import app as app_module
from longctx.cluster.prefix_index.indexer.app import make_app
from longctx.cluster.prefix_index.indexer.indexer import Context, InstanceHits, KvIndexer, Publisher
from longctx.cluster.prefix_index.indexer.sequence_hash import sequence_hashes
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving.server.kv_events import KIND, AllBlocksCleared, BlockStored, Event, EventBatch

SIZE = 4


def hashes(tokens: list[int], size: int = SIZE, seed: int = 0) -> list[int]:
    """By the words of the document: local hashes, then pairs of the hash before and the local one."""
    found: list[int] = []
    for i in range(len(tokens) // size):
        local = xxhash.xxh3_64_intdigest(struct.pack(f"<{size}I", *tokens[i * size : (i + 1) * size]), seed)
        pair = struct.pack("<Q", found[-1]) + struct.pack("<Q", local) if found else b""
        found.append(xxhash.xxh3_64_intdigest(pair, seed) if found else local)
    return found


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_sequence_hashes_are_the_published_ones(tokens: list[int], size: int, seed: int) -> None:
    data = np.array(tokens, "<u4").tobytes()
    found = list(sequence_hashes(data, size, seed))
    assert found == hashes(tokens, size, seed)
    if len(found) > 2:
        assert list(sequence_hashes(data[8 * size :], size, seed, found[1])) == found[2:]


def engine_events(tokens: list[int], engine_keys: list[int], first: int = 0, salt: str = "") -> BlockStored:
    """Blocks from `first` on of a prompt."""
    count = len(engine_keys) - first
    extra = [(salt,), *[None] * (count - 1)] if salt and not first else None
    parent = engine_keys[first - 1] if first else None
    own = tokens[SIZE * first : SIZE * len(engine_keys)]
    return BlockStored(engine_keys[first:], parent, own, SIZE, None, "GPU", None, extra, 0, KIND)


class Fed:
    """An indexer with publisher 0 and 1 of instance "a", which are told events directly."""

    def __init__(self) -> None:
        self.indexer = KvIndexer()
        self.publishers = [Publisher("a", "default", rank, "m", SIZE) for rank in range(2)]
        for publisher in self.publishers:
            self.indexer.register(publisher)

    def take(self, *events: Event, rank: int = 0) -> None:
        payload = msgspec.msgpack.encode(EventBatch(0.0, list(events), 0))
        self.indexer.take(self.publishers[rank].name, decode(payload), payload)

    def hits(self, tokens: list[int], salt: str = "", lora: str = "") -> InstanceHits:
        return self.indexer.hits(Context("default", "m", lora, SIZE, salt), hashes(tokens))["a"]


PROMPT = list(range(100, 140))
KEYS = list(range(1, 11))


def test_tiers_and_ranks_are_told_apart() -> None:
    fed = Fed()
    fed.take(engine_events(PROMPT, KEYS[:6]), stored(KEYS[:3], None, "host"), stored(KEYS[:1], None, "disk"))
    fed.take(engine_events(PROMPT, KEYS[:2]), engine_events(PROMPT, KEYS[:9], 2), rank=1)
    assert fed.hits(PROMPT) == (36, {0: 24, 1: 36}, (36, 12, 4))
    fed.take(removed(KEYS[:3]))  # they are in the host's memory still
    assert fed.hits(PROMPT) == (36, {0: 24, 1: 36}, (36, 12, 4))
    fed.take(removed(KEYS[1:2], "host"))
    assert fed.hits(PROMPT).ranks == {0: 4, 1: 36}
    fed.take(stored(KEYS[1:2], KEYS[0], "host"))  # nobody remembers its tokens
    assert fed.hits(PROMPT).ranks == {0: 4, 1: 36}
    assert fed.indexer.unplaced("a|default|0") == 1
    fed.take(AllBlocksCleared(), rank=1)
    assert fed.hits(PROMPT) == (4, {0: 4, 1: 0}, (0, 4, 4))


def test_salts_and_adapters_are_worlds_of_their_own() -> None:
    fed = Fed()
    fed.take(engine_events(PROMPT, KEYS[:4], salt="s"), engine_events(PROMPT, KEYS[:6], 4))
    adapted = msgspec.structs.replace(engine_events(PROMPT, [50, 51]), lora_name="x", extra_keys=[("x",), ("x",)])
    fed.take(adapted)
    assert fed.hits(PROMPT).longest == 0
    assert fed.hits(PROMPT, "s").longest == 24
    assert fed.hits(PROMPT, lora="x").longest == 8


def test_blocks_that_depend_on_what_no_query_says_are_not_found_nor_those_after_them() -> None:
    fed = Fed()
    image = msgspec.structs.replace(engine_events(PROMPT, KEYS[:2]), extra_keys=[None, ("image",)])
    fed.take(image, engine_events(PROMPT, KEYS[:4], 2))
    assert fed.hits(PROMPT).longest == 0
    assert fed.indexer.unplaced("a|default|0") == 4


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], list(range(9)), [-1] * 8, [2**32] * 8, "abcdefgh", [1.5] * 8, [[1]] * 8, {}]
)
def test_tokens_that_are_none_are_malformed(tokens: object) -> None:
    fed = Fed()
    event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": tokens,
             "block_size": SIZE}  # fmt: skip
    payload = msgspec.msgpack.encode([0.0, [event], 0])
    with pytest.raises(MalformedMessage, match="token_ids"):
        fed.indexer.take("a|default|0", decode(payload), payload)
    assert fed.indexer.num_blocks == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 10), st.integers(0, 1)), max_size=30))
def test_an_indexer_finds_what_engines_have(steps: list[tuple[int, int, int, int]]) -> None:
    """Against a set of block numbers for each rank: blocks come with tokens and go in any order."""
    fed, held = Fed(), [set[int](), set[int]()]
    for action, first, count, rank in steps:
        stop = min(10, first + count)
        if action < 2 and (first == 0 or first - 1 in held[rank]):
            fed.take(engine_events(PROMPT, KEYS[:stop], first), rank=rank)
            held[rank] |= set(range(first, stop))
        elif action == 2:
            fed.take(removed(KEYS[first:stop]), rank=rank)
            held[rank] -= set(range(first, stop))
    ranks = [next(i for i in range(11) if i not in held[rank]) for rank in range(2)]
    assert fed.hits(PROMPT).ranks == {0: SIZE * ranks[0], 1: SIZE * ranks[1]}
    fed.indexer.clear("a|default|0")
    fed.indexer.clear("a|default|1")
    assert fed.indexer.num_blocks == 0


def test_two_hashes_of_the_same_tokens_may_both_go() -> None:
    """As of prompts of two users, whom an engine keeps apart."""
    fed = Fed()
    fed.take(engine_events(PROMPT, [1, 2]), engine_events(PROMPT, [3, 4]))
    fed.take(removed([1, 2]), removed([3, 4]))
    assert (fed.hits(PROMPT).longest, fed.indexer.num_blocks) == (0, 0)


def test_a_hash_that_stands_for_other_tokens_now_is_not_found_by_the_old_ones() -> None:
    fed = Fed()
    fed.take(engine_events(PROMPT, [1, 2]), engine_events(PROMPT[::-1], [1, 2]))
    assert (fed.hits(PROMPT).longest, fed.hits(PROMPT[::-1]).longest) == (0, 2 * SIZE)
    fed.take(removed([1, 2]))
    assert (fed.hits(PROMPT[::-1]).longest, fed.indexer.num_blocks) == (0, 0)


# Over HTTP


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    indexer = KvIndexer()
    with TestClient(make_app(indexer, KvEventReader(indexer))) as client:
        yield client


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    instance = Instance()
    yield instance
    instance.close()


def registration(instance: Instance, **others: object) -> dict[str, object]:
    endpoint, replay = instance.endpoints
    fields = {"endpoint": endpoint, "replay_endpoint": replay, "type": "vLLM", "modelname": "m", "instance_id": "i",
              "block_size": SIZE, "dp_rank": 0}  # fmt: skip
    return {**fields, **others}


def test_registered_publishers_are_found_by_tokens_and_by_hashes_until_they_leave(
    client: TestClient, instance: Instance
) -> None:
    engine_keys = keys(0, 10)
    instance.publish(engine_events(PROMPT, engine_keys[:5]))
    answer = client.post("/register", json=registration(instance))
    assert (answer.status_code, answer.json()) == (200, {"status": "registered successfully", "instance_id": "i"})
    assert client.post("/register", json=registration(instance, dp_rank=1, additionalsalt="w8a8")).status_code == 200
    question = {"model": "m", "token_ids": [*PROMPT, 7], "block_size": SIZE}

    def found() -> dict:
        return client.post("/query", json=question).json()

    expected = {"longest_matched": 20, "GPU": 20, "DP": {"0": 20, "1": 0}, "CPU": 0, "DISK": 0}
    wait_for(lambda: found() == {"default": {"i": expected}})
    instance.publish(engine_events(PROMPT, engine_keys[:10], 5), stored(engine_keys[:2], None, "host"))
    expected = {"longest_matched": 40, "GPU": 40, "DP": {"0": 40, "1": 0}, "CPU": 8, "DISK": 0}
    wait_for(lambda: found() == {"default": {"i": expected}})
    by_hash = {"model": "m", "block_size": SIZE}
    for name in ("seq_hashes", "block_hash"):
        assert client.post("/query_by_hash", json={**by_hash, name: hashes(PROMPT)}).json() == found()
    salted = {**question, "cache_salt": "w8a8"}
    wait_for(lambda: client.post("/query", json=salted).json()["default"]["i"]["DP"] == {"0": 0, "1": 40})
    for other in ({"model": "n"}, {"block_size": 8}, {"tenant_id": "t"}, {"instance_id": "j"}):
        tenant = other.get("tenant_id", "default")
        assert client.post("/query", json={**question, **other}).json() == {tenant: {}}
    assert client.post("/query", json={**question, "token_ids": []}).json()["default"]["i"]["longest_matched"] == 0
    state = client.get("/health").json()["publishers"]["i|default|0"]
    assert state["is_whole"]
    assert not state["unplaced_blocks"]
    for rank in (0, 1):
        answer = client.post("/unregister", json=registration(instance, dp_rank=rank))
        assert answer.json() == {"status": "unregistered successfully", "removed_instances": [f"i|default|{rank}"]}
    assert found() == {"default": {}}
    wait_for(lambda: client.get("/health").json() == {"status": "ok", "num_blocks": 0, "publishers": {}})
    assert client.post("/unregister", json=registration(instance)).status_code == 404


def test_a_publisher_of_sequence_hashes_needs_no_tokens(client: TestClient) -> None:
    master = Instance()
    try:
        master.publish(stored(hashes(PROMPT)[:3], None, "host"))
        client.post("/register", json=registration(master, instance_id="store", type="Mooncake"))
        question = {"model": "m", "token_ids": PROMPT, "block_size": SIZE, "instance_id": "store"}
        wait_for(lambda: client.post("/query", json=question).json()["default"]["store"]["CPU"] == 12)
        client.post("/unregister", json=registration(master, instance_id="store"))
    finally:
        master.close()


REGISTER = {"endpoint": "tcp://127.0.0.1:1", "type": "vLLM", "modelname": "m", "instance_id": "i", "block_size": 4,
            "dp_rank": 0}  # fmt: skip
QUERY = {"model": "m", "token_ids": [1, 2, 3, 4], "block_size": 4}
BY_HASH = {"model": "m", "seq_hashes": [1], "block_size": 4}
WRONG = [
    *((("/register", REGISTER, name, wrong)) for name, wrong in [
        ("endpoint", None), ("endpoint", "x"), ("endpoint", "tcp://*:5"), ("endpoint", ""), ("endpoint", "tcp://a:1\n"),
        ("endpoint", "tcp://a:1" + "0" * 600),
        ("replay_endpoint", "x"), ("replay_endpoint", 5), ("type", "other"), ("type", 5), ("modelname", ""),
        ("modelname", []), ("instance_id", ""), ("instance_id", "a|b"), ("tenant_id", "a|b"), ("tenant_id", None),
        ("instance_id", "x" * 501), ("block_size", 0), ("block_size", -1), ("block_size", 2**80), ("block_size", 1.5),
        ("block_size", "4"), ("block_size", True), ("dp_rank", -1), ("dp_rank", 2**40), ("lora_name", 5),
        ("additionalsalt", {}),
    ]),
    *((("/unregister", REGISTER, name, wrong)) for name, wrong in [
        ("instance_id", None), ("dp_rank", "0"), ("tenant_id", 7), ("block_size", "x"),
    ]),
    *((("/query", QUERY, name, wrong)) for name, wrong in [
        ("model", None), ("model", ""), ("token_ids", None), ("token_ids", "abc"), ("token_ids", [-1]),
        ("token_ids", [2**32]), ("token_ids", [1.5]), ("token_ids", [True]), ("token_ids", [[1]]), ("block_size", 0),
        ("block_size", 2**63), ("tenant_id", ""), ("instance_id", 5), ("cache_salt", 5), ("lora_name", []),
        ("lora_id", "x"), ("lora_id", 3),
    ]),
    *((("/query_by_hash", BY_HASH, name, wrong)) for name, wrong in [
        ("seq_hashes", None), ("seq_hashes", [-1]), ("seq_hashes", [2**64]), ("seq_hashes", ["1"]), ("seq_hashes", 5),
        ("block_hash", [1.5]), ("block_size", None),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "name", "wrong"), WRONG)
def test_wrong_fields_are_named(client: TestClient, route: str, body: dict, name: str, wrong: object) -> None:
    answer = client.post(route, json={**body, name: wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b'"x"', b"null", b"\xff\xfe", b"{" * 100_000, b'{"model": "\xc3"}', b"[" * 100_000,
     b'{"a":' * 50_000],
)  # fmt: skip
@pytest.mark.parametrize("route", ["/register", "/unregister", "/query", "/query_by_hash"])
def test_bodies_that_are_no_objects_are_refused(client: TestClient, route: str, content: bytes) -> None:
    assert client.post(route, content=content).status_code == 400


def test_missing_fields_large_bodies_and_too_many_publishers(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for route, body in (("/register", REGISTER), ("/query", QUERY)):
        for name in body:
            answer = client.post(route, json={key: value for key, value in body.items() if key != name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert client.post("/query_by_hash", json={"model": "m", "block_size": 4}).status_code == 400
    assert client.post("/query_by_hash", json={**BY_HASH, "block_hash": [1]}).status_code == 400
    monkeypatch.setattr(app_module, "_LARGEST", 100)
    assert client.post("/query", json={**QUERY, "token_ids": [1] * 100}).status_code == 413
    monkeypatch.setattr(app_module, "_LARGEST", 1000)
    monkeypatch.setattr(app_module, "_MOST_PUBLISHERS", 0)
    assert client.post("/register", json=REGISTER).status_code == 429
    assert client.get("/health").json()["publishers"] == {}
