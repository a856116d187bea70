"""What reads a sender's registered memory without its help: a `Puller`."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from longctx.cluster.transfer.messages import Place


@runtime_checkable
class Puller(Protocol):
    """Reads blocks from registered memory of a sender, in a thread of its own."""

    def pull(self, place: Place, num_bytes: int, done: Callable[[Any], None]) -> None:
        """Begin to read; `done` gets the bytes, or None if they can't be read."""
        ...

    def close(self) -> None: ...
