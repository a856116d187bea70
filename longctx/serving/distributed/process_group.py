"""`ProcessGroup`: the processes that run one engine together, as one of them sees it."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:  # a process alone works without pyzmq
    from longctx.serving.distributed.connections import Receiver, Sender
    from longctx.serving.distributed.network import Network
    from longctx.serving.distributed.watchdog import Watchdog


_END = "the end"


class ProcessGroup:
    """Processes that run one engine, each on devices of its own; made by `initialize`. A context manager.

    Process 0 takes requests, and the others follow it. When a process dies, is stopped or loses its connection, all
    others log that within `failure_timeout` and exit with status 70. A process that leaves the `with` block by an
    exception exits with status 1, and the others exit too. A `ProcessGroup` serves one engine.

    Args:
      process_id: id of this process, from 0.
      host_names: the host of each process.
      watchdog: sees that the others are alive; None: there are none.
      channel: by which process 0 tells the others what to do; None: there are none.
      network: of both; None: there is none.
      join_timeout: seconds for which processes wait for each other.

    Attributes:
      process_id, num_processes: id of this process, and how many there are.
      host_names: the host of each process.

    Examples:
      >>> from longctx.serving.distributed import initialize
      >>> with initialize("127.0.0.1:9876", num_processes=1, process_id=0) as group:
      ...     pages = group.gather("pages", 1000)  # what every process can hold, in their order
      ...     group.agree("settings", {"page_size": 64})  # or an error that lists the differences
      >>> min(pages)
      1000
    """

    def __init__(
        self,
        process_id: int,
        host_names: list[str],
        watchdog: Watchdog | None,
        channel: Sender | Receiver | None,
        network: Network | None,
        join_timeout: float,
    ) -> None:
        self.process_id, self.host_names, self.join_timeout = process_id, host_names, join_timeout
        self.watchdog, self._channel, self._network = watchdog, channel, network
        self._error_is_everywhere = False  # every process raises the same error, so none needs to be told

    @classmethod
    def alone(cls) -> ProcessGroup:
        """A group of this process only."""
        return cls(0, [platform.node()], None, None, None, 0.0)

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return len(self.host_names)

    @property
    def host_name(self) -> str:
        """The host of this process."""
        return self.host_names[self.process_id]

    @property
    def is_first(self) -> bool:
        """Whether this process takes requests."""
        return self.process_id == 0

    @property
    def ports(self) -> list[int]:
        """Ports at which the first process listens, for firewalls; in other processes none."""
        if self.watchdog is None or not self.is_first:
            return []
        return [self.watchdog.port, self._channel.port]  # type: ignore[union-attr]

    def gather(self, what: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Gather a value of plain data from every process, in their order.

        All processes have to call it with the same `what`, so it is a barrier too.

        Args:
          what: what it is, for messages.
          value: of this process.
          timeout: seconds; None: `join_timeout`.

        Returns:
          The values of all processes, in the order of their ids.

        Raises:
          TimeoutError: a process did not call it within `timeout` seconds; None: `join_timeout`.
          RuntimeError: a process called it with another `what`.
        """
        if self.watchdog is None:
            return [value]
        timeout = self.join_timeout if timeout is None else timeout
        deadline, peers, watchdog = time.monotonic() + timeout, self.watchdog.peers, self.watchdog
        if self.is_first:
            values = [value]
            for peer in peers:
                theirs, their_value = watchdog.receive(peer, max(0.0, deadline - time.monotonic()), what)
                if theirs != what:
                    raise RuntimeError(f"{peer} came to {theirs}, process 0 to {what}: do they run the same program?")
                values.append(their_value)
            for peer in peers:
                watchdog.send(peer, "value", values)
            return values
        watchdog.send(peers[0], "value", [what, value])
        return watchdog.receive(peers[0], timeout, what)

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Check that a value of plain data is the same in all processes.

        Args:
          what: what it is, for messages.
          value: of this process.

        Raises:
          ValueError: it is not; all processes raise the same message, which lists the differences.
        """
        values = [json.loads(json.dumps(value)) for value in self.gather(what, value)]
        differences = [
            f"{name}: {_shown(values[0], name)} in process 0, {_shown(other, name)} in process {i}"
            for i, other in enumerate(values)
            for name in sorted({*values[0], *other})
            if values[0].get(name) != other.get(name) or (name in values[0]) != (name in other)
        ]
        if differences:
            self._error_is_everywhere = True
            raise ValueError(f"processes must have the same {what}, and differ in {'; '.join(differences)}")

    def barrier(self, what: str, timeout: float | None = None) -> None:
        """Wait until all processes have called it with the same `what`.

        Args:
          what: what is waited for.
          timeout: seconds; None: `join_timeout`.

        Raises:
          TimeoutError, RuntimeError: as for `gather`.
        """
        self.gather(what, None, timeout)

    # Step messages.

    def broadcast(self, data: bytes) -> None:
        """Send a message from process 0 to all others; does nothing in other processes. No bytes: there are no more."""
        if self.is_first and self._channel is not None:
            self._channel.send(data)  # type: ignore[union-attr]

    def receive(self) -> bytes:
        """The next message that process 0 broadcasts; waits for it."""
        assert self._channel is not None
        return self._channel.receive()  # type: ignore[union-attr]

    # Reports.

    def report(self, value: Any) -> None:
        """Send a value of plain data to process 0, which takes it when it asks for `reports`."""
        if self.watchdog is not None and not self.is_first:
            self.watchdog.send(self.watchdog.peers[0], "report", value)

    def reports(self) -> Iterator[tuple[int, Any]]:
        """In process 0: what others have reported since the last call, with their numbers.

        Returns:
          Ids of processes, and what they reported.
        """
        for peer in () if self.watchdog is None else self.watchdog.peers:
            while not peer.reports.empty():
                yield peer.process, peer.reports.get()

    # The end.

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End all processes in order: process 0 lets the others' `follow` return, and waits for them."""
        if self.watchdog is not None and self._channel is not None:
            self.broadcast(b"")
            self._leave_together(self.watchdog)

    def fail(self, cause: str) -> None:
        """End all other processes for an error in this one, which the caller goes on to raise."""
        if self.watchdog is None or self._channel is None:
            return
        if self._error_is_everywhere:
            self._leave_together(self.watchdog)
            return
        self.watchdog.broadcast_failure(cause)
        self._close_sockets(self.watchdog)
        atexit.register(_exit_now)  # runs before JAX's handler, which would wait for all processes

    def _leave_together(self, watchdog: Watchdog) -> None:
        """Disconnect when all processes are ready to: one that left early would seem to be dead."""
        try:
            if self.is_first:
                for peer in watchdog.peers:
                    while watchdog.receive(peer, self.join_timeout, "that it ends")[0] != _END:
                        pass
                watchdog.allows_disconnects = True
                for peer in watchdog.peers:
                    watchdog.send(peer, "bye", None)
            else:
                watchdog.send(watchdog.peers[0], "value", [_END, None])
                watchdog.wait_for_end(self.join_timeout)
            # Otherwise JAX would wait for the others at the exit of one process, and abort all if that took too long.
            jax.distributed.shutdown()
            if self.is_first:
                watchdog.wait_for_disconnects(watchdog.failure_timeout)
        finally:
            self._close_sockets(watchdog)

    def _close_sockets(self, watchdog: Watchdog) -> None:
        watchdog.close()
        assert self._network is not None
        self._network.close()
        self._channel = None


def _exit_now() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _shown(value: dict[str, Any], name: str) -> str:
    return repr(value[name]) if name in value else "nothing"
