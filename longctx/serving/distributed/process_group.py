"""`ProcessGroup`: this process among those that run one engine together."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import jax

if TYPE_CHECKING:  # pyzmq need not be there for one process alone
    from longctx.serving.distributed.channel import Context, Message, Receiver, Sender
    from longctx.serving.distributed.watchdog import Watchdog


_END = "the end"


class ProcessGroup:
    """Processes that run one engine, each on devices of its own; made by `initialize`. A context manager.

    Process 0 takes requests, the others follow it. When one dies, is stopped or loses its connection, all others log
    that within `failure_timeout` and exit with status 70. When one leaves the `with` block by an exception, so do the
    others; it exits with status 1 then. There is one engine to a `ProcessGroup`.

    Attributes:
      process_id, num_processes: this process, and how many there are.
      names: host of each process.
    """

    def __init__(
        self,
        process_id: int,
        names: list[str],
        watch: Watchdog | None,
        channel: Sender | Receiver | None,
        context: Context | None,
        join_timeout: float,
    ) -> None:
        self.process_id, self.names, self.join_timeout = process_id, names, join_timeout
        self.watch, self._channel, self._context = watch, channel, context
        self._all_know = False  # of an error: every process raises it by itself

    @classmethod
    def alone(cls) -> Self:
        """A process without others."""
        return cls(0, [platform.node()], None, None, None, 0.0)

    @property
    def num_processes(self) -> int:
        return len(self.names)

    @property
    def name(self) -> str:
        """Of this process's host."""
        return self.names[self.process_id]

    @property
    def is_first(self) -> bool:
        """Whether this process takes requests."""
        return self.process_id == 0

    def gather(self, what: str, value: Any) -> list[Any]:
        """Everybody's value, plain data, in the order of processes. All have to call it; so it is a barrier too.

        Raises:
          TimeoutError: some process did not within the time for joining.
        """
        if self.watch is None:
            return [value]
        deadline, peers, watch = time.monotonic() + self.join_timeout, self.watch.peers, self.watch
        if self.is_first:
            values = [value]
            for peer in peers:
                said, theirs = watch.receive(peer, max(0.0, deadline - time.monotonic()), what)
                if said != what:
                    raise RuntimeError(f"{peer} came to {said}, process 0 to {what}: do they run the same program?")
                values.append(theirs)
            for peer in peers:
                watch.send(peer, "value", values)
            return values
        watch.send(peers[0], "value", [what, value])
        return watch.receive(peers[0], self.join_timeout, what)

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """See to it that a value, plain data, is the same in all processes.

        Raises:
          ValueError: it is not; the message, the same everywhere, says what differs.
        """
        values = [json.loads(json.dumps(value)) for value in self.gather(what, value)]
        differences = [
            f"{name}: {_shown(values[0], name)} in process 0, {_shown(other, name)} in process {i}"
            for i, other in enumerate(values)
            for name in sorted({*values[0], *other})
            if values[0].get(name) != other.get(name) or (name in values[0]) != (name in other)
        ]
        if differences:
            self._all_know = True
            raise ValueError(f"processes must have the same {what}, and differ in {'; '.join(differences)}")

    def barrier(self, what: str) -> None:
        """Until all have come here."""
        self.gather(what, None)

    # Steps.

    def tell(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        """All others, as process 0."""
        if self.is_first and self._channel is not None:
            self._channel.send(header, frames)  # type: ignore[union-attr]

    def hear(self) -> Message:
        """What process 0 tells next."""
        assert self._channel is not None
        return self._channel.receive()  # type: ignore[union-attr]

    # The end.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End well, all together: process 0 lets the others' `follow` return, and waits for them."""
        if self.watch is not None and self._channel is not None:
            self.tell({"kind": "end"})
            self._part(self.watch)

    def fail(self, cause: str) -> None:
        """End badly: all others exit. This process goes on with its own error."""
        if self.watch is None or self._channel is None:
            return
        if self._all_know:
            self._part(self.watch)
            return
        self.watch.broadcast_failure(cause)
        self._shut(self.watch)
        atexit.register(_leave)  # before JAX's own, which would wait for all

    def _part(self, watch: Watchdog) -> None:
        """Go when all are ready to: whoever went before would seem to be dead."""
        try:
            if self.is_first:
                for peer in watch.peers:
                    while watch.receive(peer, self.join_timeout, "that it ends")[0] != _END:
                        pass
                watch.is_parting = True
                for peer in watch.peers:
                    watch.send(peer, "bye", None)
            else:
                watch.send(watch.peers[0], "value", [_END, None])
                watch.wait_for_end(self.join_timeout)
        finally:
            self._shut(watch)
        # At the exit of one process, JAX would wait for the others', and abort all if that took too long.
        jax.distributed.shutdown()

    def _shut(self, watch: Watchdog) -> None:
        watch.close()
        assert self._channel is not None
        assert self._context is not None
        self._channel.close()
        self._channel = None
        self._context.term()


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _shown(value: dict[str, Any], name: str) -> str:
    return repr(value[name]) if name in value else "nothing"
