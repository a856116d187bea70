"""`KvEventReader` over real sockets: from our publisher, from others' forms, and from publishers that lie."""

import struct
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from cluster.prefix_index.publishers import ANY, Instance, held_by, keys, removed, stored, wait_for

from longctx.cluster.prefix_index import reader as reader_module
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving.server import kv_publisher
from longctx.serving.server.kv_events import AllBlocksCleared


class Read:
    """An index, its reader, and instances that end with the test."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.reader = KvEventReader(self.index, most_blocks=100_000)
        self.context = zmq.Context()
        self.instances: list[Instance] = []
        self.sockets: list[zmq.Socket] = []

    def instance(self, *arguments: str | None) -> Instance:
        self.instances.append(Instance(*arguments))
        return self.instances[-1]

    def raw(self) -> tuple[zmq.Socket, str]:
        """A PUB socket of somebody else."""
        socket = self.context.socket(zmq.PUB)
        self.sockets.append(socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        return socket, f"tcp://127.0.0.1:{port}"

    def agrees(self, name: str, instance: Instance) -> bool:
        state = self.reader.publishers.get(name)
        return state is not None and state.is_live and held_by(self.index, name) == instance.held

    def close(self) -> None:
        self.reader.close()
        for instance in self.instances:
            instance.close()
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def read() -> Iterator[Read]:
    read = Read()
    yield read
    read.close()


def message(number: int, *events: object) -> list[bytes]:
    return [b"", struct.pack(">Q", number), msgspec.msgpack.encode([time.time(), list(events), 0])]


def test_an_index_follows_instances_and_has_what_was_before_it(read: Read) -> None:
    first, second = read.instance(), read.instance()
    chain = keys(0, 40)
    first.publish(stored(chain[:20]), stored(chain[20:], chain[19]))
    first.publish(stored(chain[:10], tier="host"), removed(chain[:5]))
    for name, instance in (("a", first), ("b", second)):
        read.reader.add(name, *instance.endpoints)
    wait_for(lambda: read.agrees("a", first) and read.agrees("b", second))
    assert read.reader.publishers["a"].is_whole
    second.publish(stored(chain[:7]))
    first.publish(removed(chain[30:31]))
    wait_for(lambda: read.agrees("a", first) and read.agrees("b", second))
    matches = read.index.match(np.array(chain, np.uint64))
    assert matches == {"a": 30, "b": 7}
    first.publish(AllBlocksCleared())
    wait_for(lambda: read.agrees("a", first))
    assert set(read.index.match(np.array(chain, np.uint64))) == {"b"}
    read.reader.remove("b")
    wait_for(lambda: not read.index.num_blocks)
    assert set(read.reader.publishers) == {"a"}


def test_what_a_publisher_no_longer_keeps_is_unknown(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "_KEPT", 10)
    instance = read.instance()
    chain = keys(1, 40)
    for key in chain:
        instance.publish(stored([key]))
    time.sleep(0.2)  # all are published, which only who reads from now on can tell
    read.reader.add("a", *instance.endpoints)
    wait_for(lambda: set(read.index.keys("a", "device").tolist()) == set(chain[30:]))
    state = read.reader.publishers["a"]
    assert (state.is_live, state.is_whole, state.errors) == (True, False, 0)


def test_missed_messages_are_asked_for(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is slow, and the publisher drops what it has no room for."""
    monkeypatch.setattr(kv_publisher, "_SUBSCRIBER", 5)
    monkeypatch.setattr("longctx.cluster.prefix_index.reader._WAITING", 5)
    instance = read.instance()
    read.reader.add("a", *instance.endpoints)
    wait_for(lambda: read.agrees("a", instance))
    chain = keys(2, 1000)
    for key in chain:
        instance.publish(stored([key] * 1))
    instance.publish(removed(chain[:100]))
    # A last message shows what is missing.
    wait_for(lambda: instance.publish(stored(chain[:1])) or time.sleep(0.02) or read.agrees("a", instance))
    assert read.reader.publishers["a"].restarts == 0


def test_a_new_publisher_at_the_same_address_is_read_from_its_beginning(read: Read) -> None:
    old = read.instance()
    read.reader.add("a", *old.endpoints)
    old.publish(stored(keys(3, 10)))
    wait_for(lambda: read.agrees("a", old))
    endpoints = old.endpoints
    for count in (0, 1, 4):  # messages of the new one: fewer than, as many as, and more than the old one's
        old.close()
        old = read.instance(*endpoints)
        for i in range(count):
            old.publish(stored(keys(100 * count + i, 5)))
        wait_for(lambda old=old: read.agrees("a", old))
        assert read.reader.publishers["a"].is_whole


def test_an_instance_may_start_after_it_was_added(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_REPLAY_TIMEOUT", 0.05)
    first = read.instance()
    endpoints = first.endpoints
    first.close()
    read.reader.add("a", *endpoints)
    time.sleep(0.5)
    later = read.instance(*endpoints)
    later.publish(stored(keys(6, 5)))
    wait_for(lambda: read.agrees("a", later))
    assert read.reader.publishers["a"].is_whole


def test_without_replay_what_is_missed_is_forgotten(read: Read) -> None:
    socket, endpoint = read.raw()
    read.reader.add("a", endpoint)
    wait_for(lambda: read.reader.publishers.get("a") and read.reader.publishers["a"].is_connected)
    time.sleep(0.1)
    socket.send_multipart(message(7, {**EVENT, "block_hashes": [1]}))
    socket.send_multipart(message(8, {**EVENT, "block_hashes": [2]}))
    wait_for(lambda: set(read.index.keys("a", "device").tolist()) == {1, 2})
    socket.send_multipart(message(10, {**EVENT, "block_hashes": [3]}))
    wait_for(lambda: set(read.index.keys("a", "device").tolist()) == {3})
    state = read.reader.publishers["a"]
    assert (state.gaps, state.is_whole, state.messages) == (1, False, 3)


EVENT = {"type": "BlockStored", "block_hashes": [5], "medium": "GPU", "token_ids": [], "block_size": 4, "new_field": {}}


NONSENSE = [
    [b""],
    [b"", b"", b""],
    [b"", bytes(7), b"\x90"],
    [b"", b"\xff" * 8, b"\x90"],
    [b"", bytes(8), b""],
    [b"", bytes(8), b"\xc1" * 100],
    [b"", bytes(8), b"\x93"],
    [b"", bytes(8), msgspec.msgpack.encode([0.0, 5, 0])],
    [b"", bytes(8), msgspec.msgpack.encode({"a": 1})],
    [b"", bytes(8), b"\xdd\xff\xff\xff\xff"],
    [b"", bytes(8), b"\x91" * 100_000],
    [b"", bytes(8), b"x", b"x"],
    *(
        message(0, event)
        for event in (
            None,
            7,
            [],
            {},
            {"type": 5},
            {"type": ["BlockStored"]},
            {"type": "BlockStored"},
            *(EVENT | wrong for wrong in (
                {"block_hashes": "abc"}, {"block_hashes": [1.5]}, {"block_hashes": [-1]}, {"block_hashes": [b"x" * 8]},
                {"medium": "TAPE"}, {"type": "BlockMoved"}, {"block_hashes": list(range(200_000))},
            )),
            {"type": "BlockRemoved", "block_hashes": [None]},
            {"type": "BlockRemoved", "block_hashes": [[1]]},
            {"type": "BlockRemoved", "block_hashes": [1], "medium": 5},
            {"type": "BlockRemoved", "block_hashes": [1]},
            ["BlockStored", [1], None, [], 4, None, "GPU"],
            [["BlockRemoved"], []],
        )
    ),
]  # fmt: skip


def test_a_lying_publisher_is_excluded_and_the_others_are_read_on(read: Read) -> None:
    """Each kind of nonsense counts as an error, after which what was said before is believed no more."""
    good = read.instance()
    read.reader.add("good", *good.endpoints)
    sockets = {}
    for i in range(len(NONSENSE)):
        sockets[f"bad-{i}"], endpoint = read.raw()
        read.reader.add(f"bad-{i}", endpoint)
    wait_for(lambda: len(read.reader.publishers) == len(NONSENSE) + 1)
    wait_for(lambda: all(state.is_connected for state in read.reader.publishers.values()))
    time.sleep(0.2)
    chain = keys(4, 50)
    for i, socket in enumerate(sockets.values()):
        socket.send_multipart(message(0, {**EVENT, "block_hashes": [i]}))
        for _ in range(5):
            socket.send_multipart(NONSENSE[i])
        socket.send_multipart(NONSENSE[i])
    for i in range(50):
        good.publish(stored([chain[i]], chain[i - 1] if i else None))
    wait_for(lambda: read.agrees("good", good))
    wait_for(lambda: all(read.reader.publishers[name].excluded for name in sockets))
    assert {read.reader.publishers[name].errors for name in sockets} == {5}
    assert read.index.instances == ["good"]
    assert read.index.num_blocks == 50


def test_a_publisher_whose_numbers_always_go_back_is_excluded(read: Read) -> None:
    socket, endpoint = read.raw()
    read.reader.add("a", endpoint)
    wait_for(lambda: read.reader.publishers.get("a") and read.reader.publishers["a"].is_connected)
    wait_for(lambda: socket.send_multipart(message(0, EVENT)) or read.reader.publishers["a"].excluded)
    assert "went back" in read.reader.publishers["a"].excluded
    wait_for(lambda: not read.index.instances)


def test_an_excluded_publisher_is_read_again_once_it_is_added_again(read: Read) -> None:
    socket, endpoint = read.raw()
    read.reader.add("a", endpoint)
    wait_for(lambda: read.reader.publishers.get("a") and read.reader.publishers["a"].is_connected)
    wait_for(lambda: socket.send_multipart(NONSENSE[0]) or read.reader.publishers["a"].excluded)
    read.reader.add("a", endpoint)
    wait_for(lambda: read.reader.publishers["a"].is_connected and not read.reader.publishers["a"].excluded)


def test_a_frame_that_is_too_large_is_never_read(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.prefix_index.reader._LARGEST", 10_000)
    good = read.instance()
    read.reader.add("good", *good.endpoints)
    socket, endpoint = read.raw()
    read.reader.add("bad", endpoint)
    wait_for(lambda: len(read.reader.publishers) == 2 and read.reader.publishers["bad"].is_connected)
    time.sleep(0.1)
    socket.send_multipart([b"", bytes(8), bytes(1_000_000)])
    good.publish(stored(keys(5, 3)))
    wait_for(lambda: read.agrees("good", good))
    assert read.reader.publishers["bad"].messages == 0


def test_a_replay_that_nobody_answers_is_given_up(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_REPLAY_TIMEOUT", 0.1)
    socket, endpoint = read.raw()
    silent = read.context.socket(zmq.ROUTER)
    read.sockets.append(silent)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    read.reader.add("a", endpoint, f"tcp://127.0.0.1:{port}")
    wait_for(lambda: read.reader.publishers.get("a") and read.reader.publishers["a"].is_live)
    socket.send_multipart(message(3, EVENT))
    wait_for(lambda: read.index.num_blocks == 1)
    assert not read.reader.publishers["a"].is_whole


@pytest.mark.parametrize("kept", [[(0, 7)], []])
def test_a_message_that_no_replay_has_is_given_up(read: Read, kept: list[tuple[int, int]]) -> None:
    """After three replays without it, what comes is taken from there on; a next gap is asked for again."""
    socket, endpoint = read.raw()
    router = read.context.socket(zmq.ROUTER)
    read.sockets.append(router)
    read.reader.add("a", endpoint, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")

    def answer(count: int) -> None:
        for _ in range(count):
            assert router.poll(5000)
            reader, *_ = router.recv_multipart()
            for number, key in kept:
                router.send_multipart([reader, b"", *message(number, EVENT | {"block_hashes": [key]})])
            router.send_multipart([reader, b"", b"", b"\xff" * 8, b""])

    answer(1)
    wait_for(lambda: read.reader.publishers["a"].is_whole)
    time.sleep(0.2)  # until it has subscribed
    for number, gaps in ((5, 1), (9, 2)):
        socket.send_multipart(message(number, EVENT | {"block_hashes": [number]}))
        answer(3)
        wait_for(lambda number=number: read.index.keys("a", "device").tolist() == [number])
        state = read.reader.publishers["a"]
        assert (state.gaps, state.is_live, state.is_whole, state.errors, state.restarts) == (gaps, True, False, 0, 0)
    assert not router.poll(200)


@pytest.mark.parametrize("numbers", [(0, 2), (4, 3)])
def test_a_replay_with_a_gap_is_malformed(read: Read, numbers: tuple[int, int]) -> None:
    _, endpoint = read.raw()
    router = read.context.socket(zmq.ROUTER)
    read.sockets.append(router)
    read.reader.add("a", endpoint, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    reader, *_ = router.recv_multipart()
    for number in numbers:
        router.send_multipart([reader, b"", *message(number, EVENT)])
    wait_for(lambda: read.reader.publishers["a"].errors == 1)
    assert read.index.num_blocks == 0


@pytest.mark.parametrize(
    "endpoint",
    ["", "tcp://", "tcp://*:5557", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://host:x", "http://a:1",
     "tcp://a:1/x", "tcp://a\n:1", "ipc://", "x" * 1000, "tcp://[::1"],
)  # fmt: skip
def test_addresses_that_nobody_can_connect_to_are_refused(read: Read, endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint must be an address"):
        read.reader.add("a", endpoint)
    with pytest.raises(ValueError, match="replay must be an address"):
        read.reader.add("a", ANY.replace("*", "1"), endpoint)
