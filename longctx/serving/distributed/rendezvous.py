"""How processes meet: all others ask process 0 to join, and when all have come it welcomes them together.

Process 0 refuses a request that does not fit, and goes on waiting for those that do. Either side notices within the
failure timeout that the other is gone, unless it starts again.
"""

import contextlib
import platform
import time
from typing import Any, NamedTuple

from longctx.serving.distributed.channel import Receiver, Sender
from longctx.serving.distributed.cluster_env import ClusterEnv
from longctx.serving.distributed.control import PROCESS_0, ControlClient, ControlServer
from longctx.serving.distributed.group_secret import check_address
from longctx.serving.distributed.hello import Hello, Welcome, read_hello, read_welcome
from longctx.serving.distributed.network import Address, Network, derive_key, make_key, resolve
from longctx.serving.distributed.process_group import ProcessGroup
from longctx.serving.distributed.relay import Relay
from longctx.serving.distributed.watchdog import Peer, Watchdog

# Seconds between two requests of a process to join, between two signs of life of process 0, and of one wait.
_RETRY_SECONDS, _SIGN_SECONDS, _WAIT_SECONDS = 1.0, 0.2, 0.1
_REFUSAL_SECONDS = 2.0  # that process 0 waits for those it refuses to go, when it gives up

ANY_PORT = (49152, 65535)
"""The ephemeral ports, from which the system chooses for programs that ask for no port."""


class RendezvousOptions(NamedTuple):
    """Timeouts in seconds, the range of process 0's further port, and the group's secret, as in `initialize`."""

    failure_timeout: float
    join_timeout: float
    ports: tuple[int, int] = ANY_PORT
    group_secret: str | None = None


def lead(cluster_env: ClusterEnv, options: RendezvousOptions, shared: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """Meet the other processes as process 0.

    Args:
      shared: what has to be the same in all processes.

    Returns:
      This process's `ProcessGroup`, and the coordinator address for `jax.distributed`.

    Raises:
      ValueError: the coordinator is no address of this machine, can be reached from others without a secret, or a
        port is taken.
      TimeoutError: some process did not come, or is gone. The others get the error too.
    """
    coordinator, failure_timeout = cluster_env.coordinator, options.failure_timeout
    try:
        address = resolve(coordinator)
    except (OSError, ValueError) as error:
        raise ValueError(f"coordinator {coordinator}: {error}") from None
    check_address(coordinator, address.ip, options.group_secret)
    network = Network(address.ip, failure_timeout)
    lobby: _Lobby | None = None
    try:
        try:
            control = ControlServer(network, derive_key(options.group_secret), address.port)
        except ValueError as error:
            raise ValueError(f"coordinator {coordinator}: {error}") from None
        lobby = _Lobby(cluster_env, control, options, shared)
        lobby.wait_for_all()
        host_names = [platform.node(), *(lobby.joiners[i].hello.host_name for i in lobby.others)]
        steps_key = make_key()
        sender = Sender(network, steps_key, options.ports)
        control.strangers.monitor(sender.socket)
        relay = Relay(is_first=True)
        welcome = Welcome(host_names, sender.port, steps_key).to_json()
        for joiner in lobby.joiners.values():
            control.send(joiner.peer, "welcome", welcome)
    except BaseException as error:
        if lobby is not None:
            lobby.refuse_all(f"{type(error).__name__}: {error}")
        network.close()
        raise
    peers = [Peer(i, host_names[i], lobby.joiners[i].peer) for i in lobby.others]
    watchdog = Watchdog(f"process 0 ({host_names[0]})", control, peers, relay, failure_timeout)
    group = ProcessGroup(0, host_names, watchdog, sender, network, options.join_timeout)
    try:
        sender.wait_for({*lobby.others}, options.join_timeout)
    except BaseException as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    return group, relay.address


class _Joiner(NamedTuple):
    """A process that waits for the others; `peer` is its routing id."""

    peer: bytes
    hello: Hello


class _Lobby:
    """Where process 0 waits for the others.

    Attributes:
      others: the ids of all other processes.
      joiners: those that have come, by id.
    """

    def __init__(
        self, cluster_env: ClusterEnv, control: ControlServer, options: RendezvousOptions, shared: dict[str, Any]
    ) -> None:
        self.others = range(1, cluster_env.num_processes)
        self.joiners: dict[int, _Joiner] = {}
        self._control, self._options, self._shared = control, options, shared
        self._lost: dict[int, tuple[float, Hello]] = {}  # those that came, and when they were found to be gone
        self._last_refusal = ""

    def wait_for_all(self) -> None:
        """Wait until all have come.

        Raises:
          TimeoutError: they did not within the join timeout, or one is gone for the failure timeout.
        """
        deadline = time.monotonic() + self._options.join_timeout
        next_sign = 0.0
        while len(self.joiners) < len(self.others):
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(self._who_is_missing())
            if now > next_sign:
                next_sign = now + _SIGN_SECONDS
                self._find_lost(now)
            self._control.socket.poll(int(1000 * _WAIT_SECONDS))
            for message in self._control.receive():
                try:
                    if message.kind != "hello":
                        raise ValueError("not a request to join")
                    hello = read_hello(message.value)
                except ValueError:
                    self._control.strangers.add()
                else:
                    self._admit(message.peer, hello)
            self._control.strangers.update()

    def refuse_all(self, cause: str) -> None:
        """Tell all that have come why there will be no group, until they have gone: a last message may be lost."""
        waiting = {joiner.peer for joiner in self.joiners.values()}
        deadline = time.monotonic() + _REFUSAL_SECONDS
        while waiting and time.monotonic() < deadline:
            waiting = {peer for peer in waiting if self._control.send(peer, "refused", cause)}
            self._control.socket.poll(int(1000 * _WAIT_SECONDS))
            for _ in self._control.receive():
                pass

    def _find_lost(self, now: float) -> None:
        for process, joiner in list(self.joiners.items()):
            if self._control.is_lost(joiner.peer):
                del self.joiners[process]
                self._lost[process] = now, joiner.hello
        for since, hello in self._lost.values():
            if now - since > self._options.failure_timeout:
                raise TimeoutError(f"{hello} came, is gone, and did not come again within {now - since:.0f} s")

    def _admit(self, peer: bytes, hello: Hello) -> None:
        old, wrong = self.joiners.get(hello.process), hello.differences(self._shared)
        if hello.process not in self.others:
            wrong.append(f"a process_id that is not from 1 to {len(self.others)}")
        elif old is not None and old.peer != peer and not _replaces(hello, old.hello):
            wrong.append(f"a process_id that another on {old.hello.host_name} has already")
        if wrong:
            self._last_refusal = f"{hello} has {'; '.join(wrong)}"
            self._control.send(peer, "refused", self._last_refusal)
            self._control.strangers.add(self._last_refusal)
            return
        if old is not None and old.peer != peer:
            self._control.send(old.peer, "refused", f"{hello} has started again since")
        self.joiners[hello.process] = _Joiner(peer, hello)
        self._lost.pop(hello.process, None)

    def _who_is_missing(self) -> str:
        missing = ", ".join(str(i) for i in self.others if i not in self.joiners)
        refused = f"; {self._last_refusal}, and was refused" if self._last_refusal else ""
        return (
            f"num_processes is {len(self.others) + 1}, and process {missing} did not come within "
            f"{self._options.join_timeout:g} s to {self._control.address}{refused}"
        )


def _replaces(new: Hello, old: Hello) -> bool:
    """Whether a process was started again, and not another one by the same id."""
    return new.host_name == old.host_name and new.started > old.started


def join(cluster_env: ClusterEnv, options: RendezvousOptions, shared: dict[str, Any]) -> tuple[ProcessGroup, str]:
    """Meet process 0 as another process; arguments and results as in `lead`.

    Raises:
      ValueError: the coordinator's host does not exist, can be reached from other machines without a secret, or
        process 0 refuses this process or another.
      TimeoutError: process 0 does not answer, or is gone.
    """
    # Process 0 may wait for others as long as this process would, and then send an error that names them.
    coordinator, deadline = cluster_env.coordinator, time.monotonic() + options.join_timeout + 2
    address = _await_name(coordinator, deadline)
    check_address(coordinator, address.ip, options.group_secret)
    process, host_name = cluster_env.process_id, platform.node()
    hello = Hello(process, host_name, time.time(), shared)
    network = Network(address.ip, options.failure_timeout)
    try:
        control = ControlClient(network, derive_key(options.group_secret), address, process)
        welcome = _ask_to_join(control, coordinator, hello, options, deadline)
        network.ip = control.address.ip
        receiver = Receiver(network, welcome.steps_key, welcome.steps_port, process)
        relay = Relay(is_first=False)
    except BaseException:
        network.close()
        raise
    peer = Peer(0, welcome.host_names[0], PROCESS_0)
    watchdog = Watchdog(f"process {process} ({host_name})", control, [peer], relay, options.failure_timeout)
    group = ProcessGroup(process, welcome.host_names, watchdog, receiver, network, options.join_timeout)
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
    control: ControlClient, coordinator: str, hello: Hello, options: RendezvousOptions, deadline: float
) -> Welcome:
    """Send the request again and again, as process 0 may start later or restart, until it welcomes or refuses."""
    next_lookup, next_request, last_heard = 0.0, 0.0, None
    while (now := time.monotonic()) < deadline:
        if now > next_lookup:
            next_lookup = now + _RETRY_SECONDS
            _follow_name(control, coordinator, options)
        if now > next_request and control.send(PROCESS_0, "hello", hello.to_json()):
            next_request = now + _RETRY_SECONDS
        control.socket.poll(int(1000 * max(0.0, min(_WAIT_SECONDS, deadline - now))))
        for message in control.receive():
            last_heard = time.monotonic()
            if message.kind == "refused":
                raise ValueError(f"process 0 refuses: {message.value}")
            if message.kind == "welcome":
                return read_welcome(message.value)
        if last_heard is not None and now - last_heard > options.failure_timeout:
            raise TimeoutError(f"process 0 at {coordinator} is gone: nothing came for {now - last_heard:.0f} s")
    secret = "with" if options.group_secret is not None else "without"
    raise TimeoutError(
        f"coordinator {coordinator} did not answer within {options.join_timeout:g} s: is process 0 running there, can "
        f"it be reached from here, and was it started {secret} this group_secret?"
    )


def _follow_name(control: ControlClient, coordinator: str, options: RendezvousOptions) -> None:
    """Connect to another address if the name stands for one now: process 0's container may have started again."""
    with contextlib.suppress(OSError, ValueError):
        address = resolve(coordinator)
        check_address(coordinator, address.ip, options.group_secret)
        control.move(address)
