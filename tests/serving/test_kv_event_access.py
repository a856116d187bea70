"""Access to KV events: readers need the secret, what they send is bounded, and tokens are left out."""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from fake_device import make_engine

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving import Request, SamplingParams
from longctx.serving.distributed.network import Key, Network, pages_key
from longctx.serving.engine.thread import EngineThread
from longctx.serving.server.kv_events import KvEvents
from longctx.serving.server.kv_publisher import KvPublisher

ANY, SECRET = "tcp://127.0.0.1:*", "0123456789abcdef" * 2
PROMPT = list(range(16))


@pytest.fixture
def encrypted() -> Iterator[KvPublisher]:
    """Publisher with a secret, which has published an event of a prompt's pages."""
    publisher = KvPublisher(ANY, ANY, secret=SECRET)
    thread = EngineThread(make_engine(page_size=4))
    KvEvents(thread, publisher.publish, with_tokens=True)
    thread.engine.generate(Request(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)))
    yield publisher
    publisher.close()


def ask(publisher: KvPublisher, key: Key | None, seconds: float) -> list[list[bytes]]:
    """Subscribe, and ask for a replay; return all that comes until the replay ends, or within some seconds."""
    network, came, end = Network("127.0.0.1", None), list[list[bytes]](), time.monotonic() + seconds
    subscriber, reader = network.connect(zmq.SUB, key), network.connect(zmq.DEALER, key)
    subscriber.subscribe(b"")
    subscriber.connect(publisher.endpoint)
    reader.connect(publisher.replay_endpoint or "")
    reader.send_multipart([b"", bytes(8)])
    while time.monotonic() < end and came[-1:] != [[b"", b"", b"\xff" * 8, b""]]:
        publisher.publish(lambda: b"live")
        came += [each.recv_multipart() for each in (subscriber, reader) if each.poll(20)]
    network.drop(subscriber)
    network.drop(reader)
    network.close()
    return came


def test_events_are_for_those_who_know_the_secret_alone(encrypted: KvPublisher) -> None:
    came = ask(encrypted, pages_key(SECRET, "events"), 20)
    assert any(
        PROMPT in [event.get("token_ids") for event in msgspec.msgpack.decode(each[-1])[1]]
        for each in came[:-1]
        if each[-1] != b"live"
    )
    for key in (None, pages_key("another secret of 32 characters!", "events"), pages_key(SECRET, "transfer")):
        assert ask(encrypted, key, 0.7) == []


def test_a_reader_without_the_secret_is_told_so(encrypted: KvPublisher) -> None:
    index = PrefixIndex()
    reader = KvEventReader(index)
    with pytest.raises(ValueError, match="is_encrypted needs the secret"):
        reader.add("a", encrypted.endpoint, encrypted.replay_endpoint, is_encrypted=True)
    reader.close()
    with pytest.raises(ValueError, match="secret must have at least 32 characters"):
        KvEventReader(index, secret="short")


def test_an_index_is_kept_by_encrypted_events(encrypted: KvPublisher) -> None:
    index = PrefixIndex()
    reader = KvEventReader(index, secret=SECRET)
    reader.add("a", encrypted.endpoint, encrypted.replay_endpoint, is_encrypted=True)
    end = time.monotonic() + 20
    while index.num_blocks < 4:
        assert time.monotonic() < end, reader.publishers
        time.sleep(0.02)
    reader.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:*", "tcp://0.0.0.0:*", "tcp://[::]:*", "tcp://192.0.2.1:5557"])
def test_endpoints_that_other_machines_reach_need_a_secret(endpoint: str) -> None:
    for pair in ((endpoint, None), (ANY, endpoint)):
        with pytest.raises(ValueError, match="may be reached from other machines: they need a secret"):
            KvPublisher(*pair)
    if "192" not in endpoint:
        for more in ({"secret": SECRET}, {"is_plain": True}):
            publisher = KvPublisher(endpoint, **more)  # type: ignore[arg-type]
            assert publisher.is_encrypted == ("secret" in more)
            publisher.close()


def test_tokens_are_left_out_unless_they_are_asked_for() -> None:
    for with_tokens in (False, True):
        payloads: list[bytes] = []
        thread = EngineThread(make_engine(page_size=4))
        KvEvents(thread, lambda encode, payloads=payloads: payloads.append(encode()), with_tokens)
        thread.engine.generate(Request(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)))
        events = [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]
        assert [event["token_ids"] for event in events] == [PROMPT if with_tokens else []]
        assert len(events[0]["block_hashes"]) == 4


def test_large_frames_end_the_connection() -> None:
    publisher = KvPublisher(ANY, ANY)
    for kind, endpoint in ((zmq.SUB, publisher.endpoint), (zmq.DEALER, publisher.replay_endpoint)):
        with zmq.Context() as context, context.socket(kind) as mine:
            mine.linger = 0
            monitor = mine.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            mine.connect(endpoint or "")
            if kind == zmq.SUB:
                mine.subscribe(bytes(1 << 16))
            else:
                mine.send_multipart([b"", bytes(1 << 24)])
            assert monitor.poll(10_000)
            mine.disable_monitor()
            monitor.close(linger=0)
    assert len(ask(publisher, None, 20)) > 0
    publisher.close()


FLOOD = """
import sys, time
from longctx.serving.server.kv_publisher import KvPublisher
publisher = KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
for number in range(200):
    publisher.publish(lambda: bytes(1 << 20))
print(publisher.replay_endpoint, flush=True)
sys.stdin.read()
publisher.close()
print("closed", flush=True)
"""
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(16) + bytes(32)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def test_a_reader_that_asks_without_pause_and_breaks_off_aborts_nothing() -> None:
    """ZeroMQ's heartbeats abort the process of a connection that broke while its messages waited at a limit."""
    with subprocess.Popen(
        [sys.executable, "-c", FLOOD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(GREETING + bytes([4, len(READY)]) + READY)
            while b"Identity" not in connection.recv(1 << 10, socket.MSG_PEEK):
                time.sleep(0.01)
            connection.settimeout(1.0)
            try:
                while True:  # of a replay nothing is read, so requests wait
                    connection.sendall((b"\1\0" + b"\0\x08" + bytes(8)) * 1000)
            except TimeoutError:
                pass
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(6.5)
        assert process.poll() is None
        out, _ = process.communicate("", timeout=60)
        assert out == "closed\n"
