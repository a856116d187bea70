"""Whom an engine fetches pages from, and how many of them it is connected to."""

import dataclasses
from typing import Any

import pytest
import zmq
from cluster.fake_engine import LAYOUT, FakeEngine, Taker, make_keys, wait_until
from cluster.ways import OPTIONS

from longctx.cluster.peers import Peers, parse_peer
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender
from longctx.serving.distributed.network import Network

FEW = dataclasses.replace(OPTIONS, max_peers=3, silence_timeout=1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", None)),
        ("host:80", ("host", 80)),
        ("fe80::1%eth0", ("fe80::1%eth0", None)),
        ("[::2]:80", ("::2", 80)),
        ("[::2]", ("::2", None)),
    ],
)
def test_peers_are_hosts_and_ports(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_peer(text) == expected


def test_a_network_stands_for_its_addresses() -> None:
    peers = Peers(["10.1.0.0/16", "fd00::/8", "10.2.0.1:80", "10.1.0.9:5"], "me")
    assert peers.admits("10.1.255.3", 4000)
    assert peers.admits("fd12::7")
    assert not peers.admits("10.2.0.2")
    assert not peers.admits("node-10.1.0.1")
    assert (peers.admits("10.2.0.1", 80), peers.admits("10.2.0.1", 81)) == (True, False)
    assert (peers.admits("10.1.0.9", 5), peers.admits("10.1.0.9", 6)) == (True, False), "its own ports are said"
    for text in ("10.1.0.1/16", "10.0.0.0/33"):
        with pytest.raises(ValueError, match="or a network, got"):
            Peers([text], "me")


@pytest.mark.parametrize("text", ["", "a b", "a:0", "a:65536", "[::1]:x", "http://a"])
def test_what_is_no_peer(text: str) -> None:
    with pytest.raises(ValueError, match="peers must be HOST or HOST:PORT"):
        parse_peer(text)


def test_who_is_admitted() -> None:
    peers = Peers(["a", "b:5", "b:6"], "me")
    for host in ("a", "me", "127.0.0.1", "::1", "localhost"):
        assert peers.admits(host, 9)
    assert [port for port in range(10) if peers.admits("b", port)] == [5, 6]
    assert peers.admits("b")
    for host in ("c", "127.0.0.2", "127.1", "0.0.0.0", "::ffff:127.0.0.1", ""):
        assert not peers.admits(host)
    # A port of this machine that is named restricts all its names.
    own = Peers(["127.0.0.1:5"], "me")
    assert [own.admits(host, port) for host in ("me", "localhost") for port in (5, 9)] == [True, False] * 2


def fetch(receiver: PageReceiver, address: str) -> Taker:
    return Taker(receiver.source(address, "0" * 32), make_keys(3), LAYOUT)


def still_receives(receiver: PageReceiver, options: TransferOptions = OPTIONS) -> None:
    engine = FakeEngine()
    lease, _ = engine.add(3)
    with PageSender(engine, LAYOUT, options=options) as sender:
        assert Taker(receiver.source(sender.address, lease.lease_id), lease.keys, LAYOUT).finish() == 3


def test_there_are_few_connections_whatever_addresses_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for their turn; a lease that is not fetched is released without a connection."""
    connected = 0
    connect, drop = Network.connect, Network.drop

    def count(self: Network, *arguments: Any) -> Any:
        nonlocal connected
        connected += 1
        assert connected <= FEW.max_peers
        return connect(self, *arguments)

    def uncount(self: Network, *arguments: Any) -> None:
        nonlocal connected
        connected -= 1
        drop(self, *arguments)

    monkeypatch.setattr(Network, "connect", count)
    monkeypatch.setattr(Network, "drop", uncount)
    with PageReceiver(LAYOUT, options=FEW) as receiver:
        for port in range(1, 30):
            receiver.source(f"127.0.0.1:{port}", "0" * 32).release()
        assert connected == 0
        takers = [fetch(receiver, f"127.0.0.1:{port}") for port in range(1, 8)]
        wait_until(lambda: connected == FEW.max_peers)
        assert [taker.finish() for taker in takers] == [0] * 7
        assert receiver.stats.outcomes["late"] == 7
        still_receives(receiver)
        wait_until(lambda: connected == 0)


@pytest.mark.parametrize("fails", ["connect", "recv_multipart"])
def test_an_error_of_one_connection_costs_its_transfer(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, made = PageReceiver.connect, list[Any]()

    def record(self: PageReceiver, address: str, *arguments: Any) -> Any:
        if fails == "connect" and not made:
            made.append(None)
            raise zmq.ZMQError(zmq.EMFILE)
        made.append(connect(self, address, *arguments))
        return made[-1]

    monkeypatch.setattr(PageReceiver, "connect", record)
    engines = FakeEngine(), FakeEngine()
    leases = [engine.add(3, ready=0)[0] for engine in engines]
    with (
        PageSender(engines[0], LAYOUT, options=OPTIONS) as one,
        PageSender(engines[1], LAYOUT, options=OPTIONS) as other,
        PageReceiver(LAYOUT, options=OPTIONS) as receiver,
    ):
        takers = []
        for number, (sender, lease) in enumerate(zip((one, other), leases, strict=True)):
            takers.append(Taker(receiver.source(sender.address, lease.lease_id), lease.keys, LAYOUT))
            wait_until(lambda number=number: len(made) == number + 1)

        def fail(*arguments: Any, **more: Any) -> Any:
            raise zmq.ZMQError(zmq.EFSM)

        if fails != "connect":
            object.__setattr__(made[0], fails, fail)
        assert takers[0].finish() == 0
        assert receiver.stats.outcomes["failed"] == 1
        engines[1].complete(leases[1], 3)
        assert takers[1].finish() == 3
