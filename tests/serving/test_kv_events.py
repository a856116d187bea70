"""KV events: who follows them knows what the engine can find, also after gaps, and the engine never waits."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fake_device import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plans import PLANS
from workload import Workload

from longctx.serving import Engine, ParallelPlan, Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.scheduler.look_ahead import copy_scheduler
from longctx.serving.server.kv_events import KvEvents, block_hash
from longctx.serving.server.kv_publisher import LAST, KvPublisher

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
ANY = "tcp://127.0.0.1:*"


class Index:
    """What a router makes of the events: pages by hash, with their tokens and the page before them."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        self.names: list[str] = []

    def take(self, payload: bytes) -> None:
        now, events, rank = msgspec.msgpack.decode(payload)
        assert abs(now - time.time()) < 60
        assert rank == 0
        for event in events:
            name = event.pop("type")
            self.names.append(name)
            if name == "BlockStored":
                self.store(**event)
            elif name == "BlockRemoved":
                assert event["medium"] == "GPU"
                for page in event["block_hashes"]:
                    del self.pages[page]
            else:
                assert name == "AllBlocksCleared"
                assert not event
                self.pages.clear()

    def store(self, block_hashes: list[int], parent_block_hash: int | None, token_ids: list[int], **rest: Any) -> None:
        size, extra = rest["block_size"], rest.get("extra_keys")
        assert len(token_ids) == size * len(block_hashes) > 0
        assert (rest["medium"], rest["lora_id"], rest["lora_name"], rest["group_idx"]) == ("GPU", None, None, 0)
        assert extra is None or len(extra) == len(block_hashes)
        for i, page in enumerate(block_hashes):
            assert page not in self.pages
            salt = extra[i][0] if extra is not None and extra[i] else ""
            self.pages[page] = parent_block_hash, tuple(token_ids[i * size : (i + 1) * size]), salt
            parent_block_hash = page


def partial_pages(engine: Engine) -> set[bytes]:
    """Filled with the keys of sessions' partial pages."""
    keys: set[bytes] = set()
    sessions = engine.core.sessions
    assert sessions is not None
    note = sessions.note

    def record(*arguments: Any) -> Any:
        page = note(*arguments)
        if page is not None:
            keys.add(page.key)
        return page

    sessions.note = record  # type: ignore[method-assign]
    return keys


@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**20),
    plan=PLANS,
    num_pages=st.integers(33, 60),
    page_size=st.sampled_from([2, 4, 8]),
    admission=st.sampled_from(["reserve", "optimistic"]),
)
def test_an_index_made_of_events_is_the_engines_own(
    seed: int, plan: ParallelPlan, num_pages: int, page_size: int, admission: str
) -> None:
    """With little memory pages are evicted and stored again; what is told of them hashes to their keys."""
    engine = make_engine(num_pages * 4 // min(page_size, 4), page_size, plan, buckets=(4, 16), admission=admission)
    thread, index = EngineThread(engine), Index()
    events, partial = KvEvents(thread, lambda encode: index.take(encode()), with_tokens=True), partial_pages(engine)
    page_hash, pool = PageHash(bytes(16), page_size), engine.core.pool
    roots = {(tenant, salt): page_hash.root(tenant, salt) for tenant in ("0", "1") for salt in ("", "salt")}

    class Checked(Workload):
        def check_scheduler(self) -> None:
            super().check_scheduler()
            events.flush()
            found = {block_hash(key): key for key in pool.keys if key not in partial}
            assert set(index.pages) == set(found)
            for page, (parent, tokens, salt) in index.pages.items():
                before = [found.get(parent)] if parent is not None else [roots[tenant, salt] for tenant in ("0", "1")]
                hashes: list[bytes] = []
                for key in before:
                    if key is not None:
                        own: list[bytes] = []
                        page_hash.extend(own, np.array(tokens, np.int32), key)
                        hashes += own
                # The page before may have been evicted and its rank's neighbours not.
                assert found[page] in hashes or before == [None]

    Checked(engine, seed).run(80)
    events.flush()
    assert not index.pages  # the workload clears the cache in the end
    assert "BlockStored" in index.names
    assert index.names[-1] == "AllBlocksCleared"


def test_one_event_tells_of_all_new_pages_of_a_chunk() -> None:
    thread, index = EngineThread(make_engine(page_size=4)), Index()
    KvEvents(thread, lambda encode: index.take(encode()), with_tokens=True)
    thread.engine.generate(Request(list(range(16)), FIVE, cache_salt="s"))
    thread.engine.generate(Request([*range(8), 9, 9, 9, 9, 9], FIVE, cache_salt="s"))
    assert index.names == ["BlockStored"] * 4  # of a prompt, and of its answer
    firsts = [page for page in index.pages.values() if page[0] is None]
    assert firsts == [(None, (0, 1, 2, 3), "s")]
    assert len(index.pages) == (4 + 1) + (1 + 1)


def test_looking_ahead_tells_nobody() -> None:
    thread = EngineThread(make_engine(page_size=4))
    KvEvents(thread, lambda encode: pytest.fail("nothing has changed"))
    thread.engine.submit(Request(list(range(16)), FIVE))
    twin = copy_scheduler(thread.engine.scheduler)
    assert twin.schedule(0.0) is not None
    assert twin.pool.num_cached > 0
    assert twin.pool.listener is None


def test_engines_without_a_prefix_cache_or_with_a_listener_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_events need prefix_cache=True"):
        KvEvents(EngineThread(make_engine(prefix_cache=False)), print)
    thread = EngineThread(make_engine())
    KvEvents(thread, print)
    with pytest.raises(ValueError, match="have a listener already"):
        KvEvents(thread, print)


# The sockets.


class Client:
    """Sockets of subscribers and readers, closed in the end."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._sockets: list[zmq.Socket] = []

    def open(self, kind: int, endpoint: str | None, **options: int) -> zmq.Socket:
        assert endpoint is not None
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        for name, value in ({"rcvtimeo": 10_000} | options).items():
            setattr(socket, name, value)
        socket.connect(endpoint)
        return socket

    def subscribe(self, publisher: KvPublisher) -> zmq.Socket:
        socket = self.open(zmq.SUB, publisher.endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        wait_for(lambda: publisher.publish(lambda: b"hello") or socket.poll(20) > 0)
        return socket

    def ask(self, publisher: KvPublisher, first: int, *before: bytes, **options: int) -> zmq.Socket:
        socket = self.open(zmq.DEALER, publisher.replay_endpoint, **options)
        socket.send_multipart([*(before or (b"",)), first.to_bytes(8, "big")])
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    publisher = KvPublisher(ANY, ANY, "kv@pod@model")
    yield publisher
    publisher.close()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


def wait_for(holds: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def replayed(socket: zmq.Socket) -> list[tuple[int, bytes]]:
    messages = []
    while True:
        empty, topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == LAST:
            assert topic == payload == b""
            return messages
        assert topic == b"kv@pod@model"
        messages.append((int.from_bytes(number, "big"), payload))


def test_numbers_have_no_gaps_and_missed_messages_are_replayed(publisher: KvPublisher, client: Client) -> None:
    socket = client.subscribe(publisher)
    for number in range(50):
        publisher.publish(lambda number=number: b"%d" % number)
    got = [socket.recv_multipart()]
    while got[-1][2] != b"49":
        got.append(socket.recv_multipart())
    numbers = [int.from_bytes(number, "big") for _, number, _ in got]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {topic for topic, _, _ in got} == {b"kv@pod@model"}
    everything = replayed(client.ask(publisher, 0))
    assert [number for number, _ in everything] == list(range(numbers[-1] + 1))
    assert [payload for _, payload in everything][-50:] == [b"%d" % number for number in range(50)]
    assert replayed(client.ask(publisher, numbers[-1] - 9)) == everything[-10:]
    assert replayed(client.ask(publisher, 10**9)) == []
    assert replayed(client.ask(publisher, 2**64 - 1)) == []


def test_readers_that_take_nothing_block_neither_events_nor_replays(publisher: KvPublisher, client: Client) -> None:
    for number in range(9_000):
        publisher.publish(lambda number=number: b"%d" % number * 100)
    publisher.publish(lambda: b"end")
    wait_for(lambda: replayed(client.ask(publisher, 9_000)))
    stuck = [client.ask(publisher, 0, rcvhwm=1) for _ in range(3)]
    stuck.pop().close(linger=0)
    slow = client.ask(publisher, 0, rcvhwm=1, rcvtimeo=20_000)
    live = client.subscribe(publisher)
    publisher.publish(lambda: b"live")
    while live.recv_multipart()[2] != b"live":
        pass
    assert [number for number, _ in replayed(slow)][:9_000] == list(range(9_000))
    assert [number for number, _ in replayed(client.ask(publisher, 8_990))][:10] == list(range(8_990, 9_000))


def test_malformed_requests_are_ignored(publisher: KvPublisher, client: Client) -> None:
    publisher.publish(lambda: b"x")
    wait_for(lambda: replayed(client.ask(publisher, 0)))
    sockets = [client.ask(publisher, 0, *before) for before in ((b"junk",), (b"", b"more"), (b"",) * 9)]
    no_number = client.open(zmq.DEALER, publisher.replay_endpoint)
    for frames in ([b""], [b"", b""], [b"", b"123"], [b"", bytes(9)], [b"x" * 1_000]):
        no_number.send_multipart(frames)
    assert [payload for _, payload in replayed(client.ask(publisher, 0))] == [b"x"]
    assert not any(socket.poll(50) for socket in (*sockets, no_number))


def test_a_follower_with_gaps_recovers_by_the_replay(client: Client) -> None:
    """Through the sockets, from an engine in its thread; every third message is lost."""
    engine = make_engine(40, page_size=4)
    thread = EngineThread(engine)
    publisher = KvPublisher(ANY, ANY, "kv@pod@model")
    KvEvents(thread, publisher.publish, with_tokens=True)
    socket = client.subscribe(publisher)
    rng = np.random.default_rng(0)
    with thread:
        for _ in range(60):
            prompt = rng.integers(0, 4, rng.integers(1, 60)).tolist()
            thread.submit(engine.prepare(Request(prompt, FIVE)), lambda events: None)
        assert thread.wait_idle(30)
    publisher.publish(lambda: b"end")
    index, due, lost = Index(), 0, 0
    while True:
        _, number_bytes, payload = socket.recv_multipart()
        number = int.from_bytes(number_bytes, "big")
        if number % 3 == 1 and payload != b"end":
            lost += 1
            continue
        if number > due:
            messages = dict(replayed(client.ask(publisher, due)))
            for missed in range(due, number):
                if messages[missed] != b"hello":
                    index.take(messages[missed])
        due = number + 1
        if payload == b"end":
            break
        if payload != b"hello":
            index.take(payload)
    assert lost > 5
    assert "BlockRemoved" in index.names
    assert set(index.pages) == set(map(block_hash, engine.core.pool.keys))
    publisher.close()


@pytest.mark.parametrize(
    "endpoint", ["", "nothing", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "http://a:1"]
)
def test_invalid_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"kv_events=.* can't be used"):
        KvPublisher(endpoint)
    with pytest.raises(ValueError, match=r"kv_events_replay=.* can't be used"):
        KvPublisher(ANY, endpoint)


def test_an_endpoint_in_use_is_refused(publisher: KvPublisher) -> None:
    with pytest.raises(ValueError, match=r"kv_events='tcp://127.0.0.1:\d+' can't be used: Address already in use"):
        KvPublisher(publisher.endpoint)


def test_other_hosts_are_connected_to() -> None:
    publisher = KvPublisher("tcp://192.0.2.1:5557", is_plain=True)
    assert publisher.endpoint == "tcp://192.0.2.1:5557"
    publisher.close()
