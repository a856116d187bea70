"""How processes meet: all others come to process 0, which lets them in together, or says why not."""

import json
import platform
import random
import socket
import time
from typing import Any, NamedTuple

import zmq

from longctx.serving.distributed.channel import Context, Receiver, Sender, Socket, bind, make_context
from longctx.serving.distributed.cluster_env import ClusterEnv
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.distributed.watchdog import Peer, Watchdog, make_pair

# Others say every second that they are there; who does not for so many seconds is gone, and may come again.
_RETRY_SECONDS, _EXPIRY_SECONDS = 1.0, 5.0
# What the system gives to programs that don't care.
ANY_PORT = (49152, 65535)


class RendezvousOptions(NamedTuple):
    """Seconds, as of `initialize`, and from where to where process 0 may listen besides."""

    failure_timeout: float
    join_timeout: float
    ports: tuple[int, int]


class _Guest(NamedTuple):
    """A process that waits for an answer; `nonce` tells it from another that claims the same id."""

    envelope: bytes
    name: str
    nonce: int
    heard: float


def lead(place: ClusterEnv, terms: RendezvousOptions, traits: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """As process 0: its `ProcessGroup`, and the address for `jax.distributed`.

    Args:
      traits: what has to be the same in all processes.

    Raises:
      ValueError: a port is taken, or a process has other traits. All that have come are told so.
      TimeoutError: some did not come. The others are told so.
    """
    context = make_context()
    address, _, port = place.coordinator.rpartition(":")
    door = context.socket(zmq.ROUTER)
    door.setsockopt(zmq.LINGER, 1000)
    try:
        door.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        context.destroy()
        raise ValueError(f"coordinator {place.coordinator}: process 0 can't listen on port {port}: {error}") from None
    guests: dict[int, _Guest] = {}
    peers: list[Peer] = []
    try:
        _await_all(place, door, guests, terms, traits)
        names = [platform.node(), *(guests[i].name for i in range(1, place.num_processes))]
        sender, pair_ports = Sender(context, terms.ports, terms.failure_timeout), []
        for process in range(1, place.num_processes):
            pair = make_pair(context, terms.failure_timeout)
            peers.append(Peer(process, names[process], pair))
            pair_ports.append(bind(pair, terms.ports))
        jax_port = _free_port(terms.ports)  # the last, so that none of the others takes it
        welcome = {"names": names, "steps": sender.port, "jax": jax_port}
        for peer, pair_port in zip(peers, pair_ports, strict=True):
            _answer(door, guests[peer.process].envelope, welcome | {"pair": pair_port})
        sender.wait_for({*guests}, terms.join_timeout)
    except BaseException as error:
        for guest in guests.values():
            _answer(door, guest.envelope, {"error": f"{type(error).__name__}: {error}"})
        for peer in peers:
            peer.close()
        context.destroy(linger=1000)
        raise
    door.close()
    watch = Watchdog(f"process 0 ({names[0]})", peers, terms.failure_timeout)
    return ProcessGroup(0, names, watch, sender, context, terms.join_timeout), f"{address}:{jax_port}"


def _await_all(
    place: ClusterEnv, door: Socket, guests: dict[int, _Guest], terms: RendezvousOptions, traits: dict[str, Any]
) -> None:
    deadline, others = time.monotonic() + terms.join_timeout, {*range(1, place.num_processes)}
    while guests.keys() != others:
        now = time.monotonic()
        for process in [i for i, guest in guests.items() if now - guest.heard > _EXPIRY_SECONDS]:
            del guests[process]
        if now > deadline:
            missing = ", ".join(map(str, sorted(others - guests.keys())))
            raise TimeoutError(
                f"num_processes is {place.num_processes}, and process {missing} did not come within "
                f"{terms.join_timeout:g} s"
            )
        if not door.poll(100):
            continue
        envelope, body = door.recv_multipart()
        hello: dict[str, Any] = json.loads(body)
        process, name, nonce = int(hello["process_id"]), str(hello["host"]), int(hello.get("nonce", 0))
        theirs = hello.get("traits", {})
        wrong = [
            f"{key} {theirs.get(key)}, and process 0 has {traits.get(key)}"
            for key in sorted({*traits, *theirs})
            if theirs.get(key) != traits.get(key)
        ]
        if not wrong and (process == 0 or (process in guests and guests[process].nonce != nonce)):
            wrong = [f"a process_id that another on {guests[process].name if process else platform.node()} has already"]
        if wrong:
            error = f"process {process} ({name}) has {'; '.join(wrong)}"
            _answer(door, envelope, {"error": f"ValueError: {error}"})
            raise ValueError(error)
        guests[process] = _Guest(envelope, name, nonce, now)


def _answer(door: Socket, envelope: bytes, answer: dict[str, Any]) -> None:
    door.send_multipart([envelope, json.dumps(answer).encode()])


def follow(place: ClusterEnv, terms: RendezvousOptions, traits: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """As another process.

    Raises:
      ValueError: there is no such host, or process 0 refuses this one, or another.
      TimeoutError: process 0 does not answer.
    """
    # Process 0 may wait as long for others, and then say who is missing.
    host, deadline = place.coordinator.rpartition(":")[0], time.monotonic() + terms.join_timeout + 2
    _await_name(place.coordinator, deadline)
    context, me = make_context(), platform.node()
    hello = {"process_id": place.process_id, "host": me, "nonce": random.getrandbits(52), "traits": traits}
    welcome = _knock(context, place.coordinator, json.dumps(hello).encode(), deadline)
    if welcome is None or "error" in welcome:
        context.term()
        if welcome is not None:
            raise ValueError(f"process 0 refuses: {welcome['error']}")
        raise TimeoutError(
            f"coordinator {place.coordinator} did not answer within {terms.join_timeout:g} s: is process 0 running "
            "there, and can it be reached from here?"
        )
    pair = make_pair(context, terms.failure_timeout)
    peer = Peer(0, welcome["names"][0], pair)
    pair.connect(f"tcp://{host}:{welcome['pair']}")
    receiver = Receiver(context, f"tcp://{host}:{welcome['steps']}", place.process_id, terms.failure_timeout)
    watch = Watchdog(f"process {place.process_id} ({me})", [peer], terms.failure_timeout)
    group = ProcessGroup(place.process_id, welcome["names"], watch, receiver, context, terms.join_timeout)
    return group, f"{host}:{welcome['jax']}"


def _await_name(coordinator: str, deadline: float) -> None:
    """Until it can be resolved: what is about to start may have no name yet."""
    host, _, port = coordinator.rpartition(":")
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(f"coordinator {coordinator}: {error}") from None
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic()) + 0.01))


def _knock(context: Context, coordinator: str, hello: bytes, deadline: float) -> dict[str, Any] | None:
    """Say hello again and again, as process 0 may start later, or anew; its answer."""
    door = context.socket(zmq.DEALER)
    door.setsockopt(zmq.LINGER, 0)
    door.connect(f"tcp://{coordinator}")
    try:
        while (left := deadline - time.monotonic()) > 0:
            door.send(hello)
            if door.poll(int(1000 * min(_RETRY_SECONDS, left))):
                return json.loads(door.recv())
    finally:
        door.close()
    return None


def _free_port(ports: tuple[int, int]) -> int:
    for port in [0] if ports == ANY_PORT else range(ports[0], ports[1] + 1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ValueError(f"ports must have a free one from {ports[0]} to {ports[1]} on process 0's host")
