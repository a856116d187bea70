"""Fuzzes what processes say to each other before they know each other: hostile messages are refused, and nothing else.

The messages go through the functions that read them, and some of them through the sockets of a process 0 that waits.
"""

import contextlib
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from fuzz.mutate import HOSTILE, NUM_INPUTS, mutate_bytes, mutate_json
from serving.process_threads import free_port

from longctx.serving.distributed import rendezvous
from longctx.serving.distributed.connections import decode
from longctx.serving.distributed.environment import ClusterEnv
from longctx.serving.distributed.network import derive_key
from longctx.serving.distributed.rendezvous import JoinRequest, read_join_request

SECRET = "0123456789abcdef" * 2
HELLO = JoinRequest(7, "alpha")
MESSAGES = [["hello", HELLO], ["refused", "because"], ["alive", None]]

# Lists as deep as JSON's parser takes them may be too deep for what prints them.
NESTED = [
    [json.dumps(MESSAGES[0]).replace("7", "[" * depth + "]" * depth).encode()] for depth in (100, 500, 900, 950, 980)
]


def mutate_message(rng: random.Random) -> list[bytes]:
    """A message whose JSON, bytes or number of parts may be wrong."""
    message = rng.choice(MESSAGES)
    if rng.random() < 0.6:
        message = mutate_json(rng, message)
    parts = [json.dumps(message).encode()]
    if rng.random() < 0.5:
        parts[0] = mutate_bytes(rng, parts[0])
    if rng.random() < 0.1:
        parts = rng.choice([[], [*parts, b""], [b"", *parts], parts * 3, [b"[" * 100_000], [b"9" * 10_000], *NESTED])
    return parts


@NUM_INPUTS
def test_hostile_messages_are_refused(num_inputs: int) -> None:
    """Only ValueError leaves the functions that read messages, and what they return has the types that it should."""
    rng, num_read = random.Random(1), 0
    for _ in range(num_inputs):
        parts = mutate_message(rng)
        with contextlib.suppress(ValueError):
            kind, value, data = decode(parts)
            assert isinstance(kind, str)
            assert isinstance(data, bytes)
            num_read += 1
            with contextlib.suppress(ValueError):
                check_hello(read_join_request(value))
    assert 0.1 * num_inputs < num_read < 0.9 * num_inputs


def check_hello(hello: JoinRequest) -> None:
    assert type(hello.process) is int
    assert 0 <= hello.process < 2**31
    assert type(hello.host_name) is str
    assert str(hello).isprintable()
    assert len(str(hello)) < 300


def test_messages_are_read_as_they_were_sent() -> None:
    assert read_join_request(json.loads(json.dumps(HELLO))) == HELLO


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_hostile_values_of_each_field_are_refused_or_read(value: Any) -> None:
    for field in HELLO._fields:
        with contextlib.suppress(ValueError):
            check_hello(read_join_request([*HELLO._replace(**{field: value})]))


def test_process_0_goes_on_waiting_for_the_right_ones() -> None:
    """Hostile messages, from who has the key and from who has not, come while it waits; then the right process does."""
    rng, key = random.Random(2), derive_key(SECRET)
    port = free_port()

    def attack() -> int:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.curve_publickey, dealer.curve_secretkey = key
            dealer.curve_serverkey = key.public
            dealer.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(500):
                dealer.send_multipart(mutate_message(rng) or [b""])
            for _ in range(50):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(mutate_bytes(rng, b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE" + bytes(44)))
            time.sleep(0.5)
            return meet(1)

    def meet(process: int) -> int:
        act = rendezvous.join if process else rendezvous.lead
        cluster_env, options = (
            ClusterEnv(f"127.0.0.1:{port}", 2, process),
            rendezvous.RendezvousOptions(5, 30, group_secret=SECRET),
        )
        with act(cluster_env, options)[0] as group:
            return group.process_id

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 0)
        assert pool.submit(attack).result() == 1
        assert first.result() == 0
