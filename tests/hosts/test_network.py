"""The hosts and the switch themselves: what they are told to do to packets is what happens."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from network import Network
from switch import Rules


@pytest.fixture(scope="module")
def network(hosts: None) -> Iterator[Network]:
    with Network(2) as network:
        yield network


@pytest.fixture
def pair(network: Network) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A UDP socket on each of two hosts, each connected to the other one."""
    network.set()
    with ExitStack() as stack:
        sockets = []
        for host in network.hosts:
            with host.inside():
                each = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            each.bind((host.address, 5000))
            each.settimeout(0.5)
            sockets.append(each)
        for each, other in zip(sockets, reversed(network.hosts), strict=True):
            each.connect((other.address, 5000))
        yield sockets[0], sockets[1]


def received(receiver: socket.socket) -> list[int]:
    """Numbers that come until none comes for half a second."""
    numbers = []
    try:
        while True:
            numbers.append(int(receiver.recv(2000)[:4]))
    except TimeoutError:
        return numbers


def test_a_block_is_of_one_direction(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    network.set(Rules(blocked=[(0, 1)]))
    pair[0].send(b"0001")
    pair[1].send(b"0002")
    assert (received(pair[1]), received(pair[0])) == ([], [2])
    network.set(network.without(1))
    pair[1].send(b"0003")
    assert received(pair[0]) == []
    assert network.set().blocked >= 2
    pair[0].send(b"0004")
    assert received(pair[1]) == [4]


def test_packets_are_late_lost_and_overtaken(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    network.set(Rules(delay=0.05, loss=0.2, reorder=0.2))
    since = time.monotonic()
    for number in range(200):
        pair[0].send(b"%04d" % number)
    pair[1].recv(2000)
    assert time.monotonic() - since >= 0.05
    numbers = received(pair[1])
    assert 120 < len(numbers) < 190
    assert numbers != sorted(numbers)
    assert len(set(numbers)) == len(numbers)


def test_a_line_has_a_rate(network: Network, pair: tuple[socket.socket, socket.socket]) -> None:
    network.set(Rules(rate=1e6))
    since = time.monotonic()
    for number in range(30):
        pair[0].send(b"%04d" % number + bytes(996))
    assert received(pair[1]) == list(range(30))
    assert time.monotonic() - since >= 0.24 + 0.5  # 240,000 bits, and the wait for another one


def test_the_last_state_of_this_thread_is_its_own_network(network: Network) -> None:
    def names() -> list[str]:
        return [name for _, name in socket.if_nameindex()]

    before = names()
    with network.hosts[0].inside():
        assert "eth0" in names()
    assert names() == before
