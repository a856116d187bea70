"""How processes meet: all others ask process 0 to join, and it admits all together or refuses with a reason."""

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

# Seconds between two requests of a process to join, and until process 0 forgets one that sends no more.
_RETRY_SECONDS, _EXPIRY_SECONDS = 1.0, 5.0

ANY_PORT = (49152, 65535)
"""The ephemeral ports, from which the system chooses for programs that ask for no port."""


class RendezvousOptions(NamedTuple):
    """Timeouts in seconds, and the range of further ports that process 0 may listen on, as in `initialize`."""

    failure_timeout: float
    join_timeout: float
    ports: tuple[int, int]


class _Joiner(NamedTuple):
    """A process that waits for an answer; `nonce` distinguishes it from another that claims the same id."""

    envelope: bytes
    host_name: str
    nonce: int
    last_heard: float


def lead(cluster_env: ClusterEnv, options: RendezvousOptions, shared: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """Meet the other processes as process 0.

    Args:
      shared: what has to be the same in all processes.

    Returns:
      This process's `ProcessGroup`, and the coordinator address for `jax.distributed`.

    Raises:
      ValueError: a port is taken, or what is shared differs in a process. All that have come get the error too.
      TimeoutError: some process did not come. The others get the error too.
    """
    context = make_context()
    address, _, port = cluster_env.coordinator.rpartition(":")
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 1000)
    try:
        router.bind(f"tcp://*:{port}")
    except zmq.ZMQError as error:
        context.destroy()
        raise ValueError(
            f"coordinator {cluster_env.coordinator}: process 0 can't listen on port {port}: {error}"
        ) from None
    joiners: dict[int, _Joiner] = {}
    peers: list[Peer] = []
    try:
        _await_all(cluster_env, router, joiners, options, shared)
        host_names = [platform.node(), *(joiners[i].host_name for i in range(1, cluster_env.num_processes))]
        sender, pair_ports = Sender(context, options.ports, options.failure_timeout), []
        for process in range(1, cluster_env.num_processes):
            pair = make_pair(context, options.failure_timeout)
            peers.append(Peer(process, host_names[process], pair))
            pair_ports.append(bind(pair, options.ports))
        jax_port = _free_port(options.ports)  # chosen last, so that no socket above takes it
        answer = {"names": host_names, "steps": sender.port, "jax": jax_port}
        for peer, pair_port in zip(peers, pair_ports, strict=True):
            _answer(router, joiners[peer.process].envelope, answer | {"pair": pair_port})
        sender.wait_for({*joiners}, options.join_timeout)
    except BaseException as error:
        for joiner in joiners.values():
            _answer(router, joiner.envelope, {"error": f"{type(error).__name__}: {error}"})
        for peer in peers:
            peer.close()
        context.destroy(linger=1000)
        raise
    router.close()
    watchdog = Watchdog(f"process 0 ({host_names[0]})", peers, options.failure_timeout)
    group = ProcessGroup(0, host_names, watchdog, sender, context, options.join_timeout)
    return group, f"{address}:{jax_port}"


def _await_all(
    cluster_env: ClusterEnv,
    router: Socket,
    joiners: dict[int, _Joiner],
    options: RendezvousOptions,
    shared: dict[str, Any],
) -> None:
    """Wait until all other processes have asked to join, and add them to `joiners` by id."""
    deadline, others = time.monotonic() + options.join_timeout, {*range(1, cluster_env.num_processes)}
    while joiners.keys() != others:
        now = time.monotonic()
        for process in [i for i, joiner in joiners.items() if now - joiner.last_heard > _EXPIRY_SECONDS]:
            del joiners[process]
        if now > deadline:
            missing = ", ".join(map(str, sorted(others - joiners.keys())))
            raise TimeoutError(
                f"num_processes is {cluster_env.num_processes}, and process {missing} did not come within "
                f"{options.join_timeout:g} s"
            )
        if not router.poll(100):
            continue
        envelope, body = router.recv_multipart()
        request: dict[str, Any] = json.loads(body)
        process, host_name = int(request["process_id"]), str(request["host"])
        nonce, theirs = int(request.get("nonce", 0)), request.get("traits", {})
        wrong = [
            f"{key} {theirs.get(key)}, and process 0 has {shared.get(key)}"
            for key in sorted({*shared, *theirs})
            if theirs.get(key) != shared.get(key)
        ]
        if not wrong and (process == 0 or (process in joiners and joiners[process].nonce != nonce)):
            owner = joiners[process].host_name if process else platform.node()
            wrong = [f"a process_id that another on {owner} has already"]
        if wrong:
            error = f"process {process} ({host_name}) has {'; '.join(wrong)}"
            _answer(router, envelope, {"error": f"ValueError: {error}"})
            raise ValueError(error)
        joiners[process] = _Joiner(envelope, host_name, nonce, now)


def _answer(router: Socket, envelope: bytes, answer: dict[str, Any]) -> None:
    router.send_multipart([envelope, json.dumps(answer).encode()])


def join(cluster_env: ClusterEnv, options: RendezvousOptions, shared: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """Meet process 0 as another process; arguments and results as in `lead`.

    Raises:
      ValueError: the coordinator's host does not exist, or process 0 refuses this process or another.
      TimeoutError: process 0 does not answer.
    """
    # Process 0 may wait for others as long as this process would, and then send an error that names them.
    host, deadline = cluster_env.coordinator.rpartition(":")[0], time.monotonic() + options.join_timeout + 2
    _await_name(cluster_env.coordinator, deadline)
    context, host_name = make_context(), platform.node()
    request = {
        "process_id": cluster_env.process_id,
        "host": host_name,
        "nonce": random.getrandbits(52),
        "traits": shared,
    }
    answer = _ask_to_join(context, cluster_env.coordinator, json.dumps(request).encode(), deadline)
    if answer is None or "error" in answer:
        context.term()
        if answer is not None:
            raise ValueError(f"process 0 refuses: {answer['error']}")
        raise TimeoutError(
            f"coordinator {cluster_env.coordinator} did not answer within {options.join_timeout:g} s: is process 0 "
            "running there, and can it be reached from here?"
        )
    process, host_names = cluster_env.process_id, answer["names"]
    pair = make_pair(context, options.failure_timeout)
    peer = Peer(0, host_names[0], pair)
    pair.connect(f"tcp://{host}:{answer['pair']}")
    receiver = Receiver(context, f"tcp://{host}:{answer['steps']}", process, options.failure_timeout)
    watchdog = Watchdog(f"process {process} ({host_name})", [peer], options.failure_timeout)
    group = ProcessGroup(process, host_names, watchdog, receiver, context, options.join_timeout)
    return group, f"{host}:{answer['jax']}"


def _await_name(coordinator: str, deadline: float) -> None:
    """Wait until the host name can be resolved: a container that is about to start may have no name yet."""
    host, _, port = coordinator.rpartition(":")
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(f"coordinator {coordinator}: {error}") from None
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic()) + 0.01))


def _ask_to_join(context: Context, coordinator: str, request: bytes, deadline: float) -> dict[str, Any] | None:
    """Send the request again and again, as process 0 may start later or restart; return its answer, or None."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"tcp://{coordinator}")
    try:
        while (left := deadline - time.monotonic()) > 0:
            dealer.send(request)
            if dealer.poll(int(1000 * min(_RETRY_SECONDS, left))):
                return json.loads(dealer.recv())
    finally:
        dealer.close()
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
