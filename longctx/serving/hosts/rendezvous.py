"""How processes meet: all others come to process 0, which lets them in together, or says why not."""

import json
import platform
import socket
import time
from typing import Any, NamedTuple

import jax
import jaxlib
import zmq

from longctx.serving.hosts.channel import Context, Receiver, Sender, Socket
from longctx.serving.hosts.detect import Place
from longctx.serving.hosts.hosts import Hosts
from longctx.serving.hosts.watch import Peer, Watch, make_pair


class _Guest(NamedTuple):
    """A process that has come and waits for an answer; `port` is that of its pair of sockets here."""

    envelope: bytes
    peer: Peer
    port: int


def lead(place: Place, failure_timeout: float, join_timeout: float) -> tuple[Hosts, str]:
    """As process 0: its `Hosts`, and the address for `jax.distributed`.

    Raises:
      ValueError: the port is taken, or a process contradicts this one. All that have come are told so.
      TimeoutError: some did not come. The others are told so.
    """
    context: Context = zmq.Context()
    address, _, port = place.coordinator.rpartition(":")
    door = context.socket(zmq.ROUTER)
    try:
        door.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        context.destroy()
        raise ValueError(f"coordinator {place.coordinator}: process 0 can't listen on port {port}: {error}") from None
    guests: dict[int, _Guest] = {}
    try:
        _await_all(place, door, context, guests, failure_timeout, join_timeout)
    except (TimeoutError, ValueError) as error:
        for envelope, peer, _ in guests.values():
            door.send_multipart([envelope, b"", json.dumps({"error": str(error)}).encode()])
            peer.close()
        context.destroy(linger=1000)
        raise
    names = [platform.node(), *(guests[i].peer.name for i in range(1, place.num_processes))]
    sender, jax_port = Sender(context), _free_port()
    for envelope, _, pair_port in guests.values():
        welcome = {"names": names, "pair": pair_port, "steps": sender.port, "jax": jax_port}
        door.send_multipart([envelope, b"", json.dumps(welcome).encode()])
    door.close(linger=1000)
    sender.wait_for(len(guests), join_timeout)
    watch = Watch(f"process 0 ({names[0]})", [guests[i].peer for i in sorted(guests)], failure_timeout)
    return Hosts(0, names, watch, sender, context, join_timeout), f"{address}:{jax_port}"


def _await_all(
    place: Place,
    door: Socket,
    context: Context,
    guests: dict[int, _Guest],
    failure_timeout: float,
    join_timeout: float,
) -> None:
    mine, deadline = _hello(place), time.monotonic() + join_timeout
    while len(guests) < place.num_processes - 1:
        if not door.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            missing = ", ".join(str(i) for i in range(1, place.num_processes) if i not in guests)
            raise TimeoutError(
                f"num_processes is {place.num_processes}, and process {missing} did not come within {join_timeout:g} s"
            )
        envelope, _, body = door.recv_multipart()
        hello: dict[str, Any] = json.loads(body)
        process, name = hello.pop("process_id"), hello.pop("host")
        wrong = [f"{key} {value}, and process 0 has {mine[key]}" for key, value in hello.items() if value != mine[key]]
        if process in guests or process == 0:
            wrong = [f"a process_id that {guests[process].peer if process else 'process 0'} has already"]
        if wrong:
            error = f"process {process} ({name}) has {'; '.join(wrong)}"
            door.send_multipart([envelope, b"", json.dumps({"error": error}).encode()])
            raise ValueError(error)
        pair = make_pair(context, failure_timeout)
        guests[process] = _Guest(envelope, Peer(process, name, pair), pair.bind_to_random_port("tcp://*"))


def follow(place: Place, failure_timeout: float, join_timeout: float) -> tuple[Hosts, str]:
    """As another process.

    Raises:
      ValueError: there is no such host, or process 0 refuses this one, or another.
      TimeoutError: process 0 does not answer.
    """
    host, _, port = place.coordinator.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise ValueError(f"coordinator {place.coordinator}: {error}") from None
    context: Context = zmq.Context()
    door, me = context.socket(zmq.REQ), platform.node()
    door.setsockopt(zmq.LINGER, 0)
    door.connect(f"tcp://{place.coordinator}")
    door.send(json.dumps(_hello(place) | {"process_id": place.process_id, "host": me}).encode())
    # Process 0 may wait as long for others, and then say who is missing.
    answers = door.poll(int(1000 * (join_timeout + 2)))
    welcome: dict[str, Any] = json.loads(door.recv()) if answers else {}
    door.close()
    if "names" not in welcome:
        context.term()
    if not answers:
        raise TimeoutError(
            f"coordinator {place.coordinator} did not answer within {join_timeout:g} s: is process 0 running there, "
            "and can it be reached from here?"
        )
    if "error" in welcome:
        raise ValueError(f"process 0 refuses: {welcome['error']}")
    pair = make_pair(context, failure_timeout)
    peer = Peer(0, welcome["names"][0], pair)
    pair.connect(f"tcp://{host}:{welcome['pair']}")
    receiver = Receiver(context, f"tcp://{host}:{welcome['steps']}")
    watch = Watch(f"process {place.process_id} ({me})", [peer], failure_timeout)
    hosts = Hosts(place.process_id, welcome["names"], watch, receiver, context, join_timeout)
    return hosts, f"{host}:{welcome['jax']}"


def _hello(place: Place) -> dict[str, Any]:
    """What has to be the same in all processes."""
    return {
        "num_processes": place.num_processes,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
