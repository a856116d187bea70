"""Rendezvous of the processes of a group: all others ask process 0 to join, and when all have come it replies.

Process 0 refuses a request that does not fit, and goes on waiting for those that do. A process that is gone before all
have come may join again.
"""

import platform
import time
from typing import Any, NamedTuple

from longctx.serving.distributed.connections import PROCESS_0, ControlClient, ControlServer, Receiver, Relay, Sender
from longctx.serving.distributed.environment import ClusterEnv, secret_at
from longctx.serving.distributed.network import Address, Network, derive_key, make_key, read_key, resolve
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.distributed.watchdog import Peer, Watchdog

_RETRY_SECONDS, _WAIT_SECONDS = 1.0, 0.1  # between two requests of a process to join, and of one wait
_REFUSAL_SECONDS = 2.0  # that process 0 waits for those it refuses to go, when it gives up

_MAX_CHARACTERS = 255  # of the name of a host

ANY_PORT = (49152, 65535)
"""The ephemeral ports, from which the system chooses for programs that ask for no port."""


class JoinRequest(NamedTuple):
    """Request of a process to join."""

    process: int
    host_name: str

    def __str__(self) -> str:
        return f"process {self.process} ({self.host_name})"


def read_join_request(value: Any) -> JoinRequest:
    """Read an untrusted request; raises ValueError if it is none."""
    match value:
        case [int(process), str(host_name)] if not isinstance(process, bool) and 0 <= process < 1 << 31:
            if host_name.isprintable() and len(host_name) <= _MAX_CHARACTERS:
                return JoinRequest(process, host_name)
    raise ValueError("a request to join must have the number of a process and the name of its host")


class RendezvousOptions(NamedTuple):
    """Timeouts in seconds, the range of process 0's further port, and the group's secret, as in `initialize`."""

    failure_timeout: float
    join_timeout: float
    ports: tuple[int, int] = ANY_PORT
    group_secret: str | None = None


def lead(cluster_env: ClusterEnv, options: RendezvousOptions) -> tuple[ProcessGroup, str]:
    """Meet the other processes as process 0.

    Returns:
      This process's `ProcessGroup`, and the coordinator address for `jax.distributed`.
    """
    coordinator, failure_timeout = cluster_env.coordinator, options.failure_timeout
    try:
        address = resolve(coordinator)
    except (OSError, ValueError) as error:
        raise ValueError(f"coordinator {coordinator}: {error}") from None
    secret = secret_at(coordinator, address.ip, options.group_secret)
    network = Network(address.ip, failure_timeout)
    server: RendezvousServer | None = None
    try:
        try:
            control = ControlServer(network, derive_key(secret), address.port)
        except ValueError as error:
            raise ValueError(f"coordinator {coordinator}: {error}") from None
        server = RendezvousServer(cluster_env, control, options)
        server.wait_for_all()
        host_names = [platform.node(), *(server.joiners[i].request.host_name for i in server.others)]
        steps_key = make_key()
        sender = Sender(network, steps_key, options.ports)
        control.rejected.monitor(sender.socket)
        relay = Relay(is_first=True)
        for joiner in server.joiners.values():
            control.send(joiner.peer, "welcome", [host_names, sender.port, steps_key.secret.decode()])
    except BaseException as error:
        if server is not None:
            server.refuse_all(f"{type(error).__name__}: {error}")
        network.close()
        raise
    peers = [Peer(i, host_names[i], server.joiners[i].peer) for i in server.others]
    watchdog = Watchdog(f"process 0 ({host_names[0]})", control, peers, relay, failure_timeout)
    group = ProcessGroup(0, host_names, watchdog, sender, network, options.join_timeout)
    try:
        sender.wait_for({*server.others}, options.join_timeout)
    except BaseException as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    return group, relay.address


class _Joiner(NamedTuple):
    """Process that waits for the others; `peer` is its routing id."""

    peer: bytes
    request: JoinRequest


class RendezvousServer:
    """End of process 0, which waits for the others."""

    def __init__(self, cluster_env: ClusterEnv, control: ControlServer, options: RendezvousOptions) -> None:
        self.others = range(1, cluster_env.num_processes)
        self.joiners: dict[int, _Joiner] = {}
        self._control, self._options = control, options
        self._last_refusal = ""

    def wait_for_all(self) -> None:
        """Wait until all have come; TimeoutError: they did not within the join timeout."""
        deadline = time.monotonic() + self._options.join_timeout
        while len(self.joiners) < len(self.others):
            if time.monotonic() > deadline:
                raise TimeoutError(self._who_is_missing())
            self.joiners = {i: each for i, each in self.joiners.items() if not self._control.is_lost(each.peer)}
            self._control.socket.poll(int(1000 * _WAIT_SECONDS))
            for message in self._control.receive():
                try:
                    if message.kind != "hello":
                        raise ValueError("not a request to join")
                    request = read_join_request(message.value)
                except ValueError:
                    self._control.rejected.add()
                else:
                    self._admit(message.peer, request)
            self._control.rejected.update()

    def refuse_all(self, cause: str) -> None:
        """Tell all that have come why there will be no group, until they have gone: a last message may be lost."""
        waiting = {joiner.peer for joiner in self.joiners.values()}
        deadline = time.monotonic() + _REFUSAL_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = {peer for peer in waiting if self._control.send(peer, "refused", cause)}
            self._control.socket.poll(int(1000 * _WAIT_SECONDS))
            for _ in self._control.receive():
                pass

    def _admit(self, peer: bytes, request: JoinRequest) -> None:
        old, wrong = self.joiners.get(request.process), None
        if request.process not in self.others:
            wrong = f"a process_id that is not from 1 to {len(self.others)}"
        elif old is not None and old.peer != peer and not self._control.is_lost(old.peer):
            wrong = f"a process_id that another on {old.request.host_name} has already"
        if wrong is None:
            self.joiners[request.process] = _Joiner(peer, request)
        else:
            self._last_refusal = f"{request} has {wrong}"
            self._control.send(peer, "refused", self._last_refusal)
            self._control.rejected.add(self._last_refusal)

    def _who_is_missing(self) -> str:
        missing = ", ".join(str(i) for i in self.others if i not in self.joiners)
        refused = f"; {self._last_refusal}, and was refused" if self._last_refusal else ""
        return (
            f"num_processes is {len(self.others) + 1}, and process {missing} did not come within "
            f"{self._options.join_timeout:g} s to {self._control.address}{refused}"
        )


def join(cluster_env: ClusterEnv, options: RendezvousOptions) -> tuple[ProcessGroup, str]:
    """Meet process 0 as another process; arguments and results as in `lead`."""
    # Process 0 may wait for others as long as this process would, and then send an error that names them.
    coordinator, deadline = cluster_env.coordinator, time.monotonic() + options.join_timeout + 2
    address = _await_name(coordinator, deadline)
    secret = secret_at(coordinator, address.ip, options.group_secret)
    process, host_name = cluster_env.process_id, platform.node()
    request = JoinRequest(process, host_name)
    network = Network(address.ip, options.failure_timeout)
    try:
        control = ControlClient(network, derive_key(secret), address, process)
        host_names, steps_port, steps_key = _ask_to_join(control, coordinator, request, options, deadline)
        receiver = Receiver(network, read_key(steps_key), steps_port, process)
        relay = Relay(is_first=False)
    except BaseException:
        network.close()
        raise
    peer = Peer(0, host_names[0], PROCESS_0)
    watchdog = Watchdog(f"process {process} ({host_name})", control, [peer], relay, options.failure_timeout)
    group = ProcessGroup(process, host_names, watchdog, receiver, network, options.join_timeout)
    return group, relay.address


def _await_name(coordinator: str, deadline: float) -> Address:
    """Wait until the host name can be resolved: a container that is about to start may have no name yet."""
    while True:
        try:
            return resolve(coordinator)
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise ValueError(f"coordinator {coordinator}: {error}") from None
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic()) + 0.01))


def _ask_to_join(
    control: ControlClient, coordinator: str, request: JoinRequest, options: RendezvousOptions, deadline: float
) -> Any:
    """Send the request again and again, as process 0 may start later or restart, until it welcomes or refuses.

    Returns:
      The hosts of all processes, the port of step messages, and the secret half of their key.
    """
    next_request = 0.0
    while (now := time.monotonic()) < deadline:
        if now > next_request and control.send(PROCESS_0, "hello", request):
            next_request = now + _RETRY_SECONDS
        control.socket.poll(int(1000 * max(0.0, min(_WAIT_SECONDS, deadline - now))))
        for message in control.receive():
            if message.kind == "refused":
                raise ValueError(f"process 0 refuses: {message.value}")
            if message.kind == "welcome":
                return message.value
    secret = "with this group_secret" if options.group_secret is not None else "by this user without a group_secret"
    raise TimeoutError(
        f"coordinator {coordinator} did not answer within {options.join_timeout:g} s: is process 0 running there, can "
        f"it be reached from here, and was it started {secret}?"
    )
