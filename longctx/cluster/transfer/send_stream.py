"""The sending side of one transfer: a thread that reads pages, and sends as many blocks as the receiver grants."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from longctx.cluster.transfer.export import Wanted, export_pages
from longctx.cluster.transfer.lease import Exporter, Lease, LeaseGone
from longctx.cluster.transfer.messages import Block, End, FromSender, Place, digest_of, shorten
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.stats import Outcome, TransferStats

_LOG = logging.getLogger(__name__)
_MOST_CREDIT = 1 << 12  # blocks: who grants more is no receiver; what bounds memory is `SendQueue`


@runtime_checkable
class Staging(Protocol):
    """Memory that receivers read blocks from, in place of frames."""

    def put(self, data: np.ndarray, is_closed: Callable[[], bool]) -> Place | None:
        """Wait for a slot, and copy a block there; None: closed."""
        ...

    def free(self, slot: int) -> None: ...


class SendStream:
    """One transfer, from `Open` until the receiver closes it.

    Args:
      fetch: its number at the receiver.
      post: sends a message to the receiver, with a block's bytes if it has any.
      queue: waits until there is room for a block's bytes on their way, and returns what is to be sent; None: closed.
      staging: where blocks are put in place of frames; None: they are sent.

    Attributes:
      heard: when the receiver was heard last.
    """

    def __init__(
        self,
        fetch: int,
        post: Callable[[FromSender, Any], None],
        stats: TransferStats,
        queue: Callable[[np.ndarray, Callable[[], bool]], np.ndarray | None],
        staging: Staging | None,
    ) -> None:
        self.fetch, self.heard = fetch, time.monotonic()
        self._post, self._stats, self._queue, self._staging = post, stats, queue, staging
        self._changed = threading.Condition()  # guards what follows
        self._credit, self._is_closed = 0, False
        self._outcome: Outcome | None = None
        self._slots: set[int] = set()  # that the receiver has not read yet

    def start(self, exporter: Exporter, find: Callable[[], tuple[Lease, Wanted]], options: TransferOptions) -> None:
        """Begin to send what `find` finds; it may wait, and raise LeaseGone or ValueError."""
        act = lambda: self._run(exporter, find, options)  # noqa: E731
        threading.Thread(target=act, name=f"longctx transfer {self.fetch}", daemon=True).start()

    def grant(self, blocks: int) -> None:
        """The receiver has room for so many blocks more. Raises ValueError: it grants without bounds."""
        with self._changed:
            if self._credit + blocks > _MOST_CREDIT:
                raise ValueError(f"more than {_MOST_CREDIT} blocks granted")
            self._credit += blocks
            self._changed.notify()

    def free(self, slot: int) -> None:
        """The receiver has read a slot. Raises ValueError: the slot is none of this transfer."""
        with self._changed:
            if slot not in self._slots:
                raise ValueError(f"slot {slot} freed, which the transfer does not have")
            self._slots.discard(slot)
        self._free({slot})

    def close(self, outcome: Outcome) -> None:
        """Send no more, and free what the receiver has not read. It waits for nobody."""
        self._end(outcome)
        with self._changed:
            self._is_closed = True
            slots, self._slots = self._slots, set()
            self._changed.notify()
        self._free(slots)

    def _end(self, outcome: Outcome) -> None:
        with self._changed:
            if self._outcome is None:
                self._outcome = outcome
                self._stats.add_outcome(outcome)

    def closed(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._is_closed

    def _run(self, exporter: Exporter, find: Callable[[], tuple[Lease, Wanted]], options: TransferOptions) -> None:
        number = 0
        outcome: Outcome
        try:
            lease, wanted = find()
            for block in export_pages(exporter, lease, wanted, options, self.closed):
                num_pages = len(block.data)
                data = np.ascontiguousarray(np.asarray(block.data)).reshape(-1).view(np.uint8)
                message = Block(self.fetch, number, block.first, num_pages, *block.part, digest_of(data))
                if not self._send(message, data):
                    return
                number += 1
            reason, outcome = "", "complete"
        except LeaseGone as error:
            reason, outcome = shorten(str(error)) or "the lease is gone", "ended"
        except ValueError as error:
            reason, outcome = shorten(str(error)), "refused"
        except Exception:
            _LOG.exception("longctx: pages of a lease could not be sent")
            reason, outcome = "the sender failed", "failed"
        if not self._is_closed:
            self._end(outcome)  # before the receiver closes it
            self._post(End(self.fetch, number, reason), None)

    def _send(self, message: Block, data: np.ndarray) -> bool:
        """Send a block once there is room for it; returns False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._credit > 0 or self._is_closed)
            self._credit -= 1
        queued = None
        if self._staging is None:
            queued = self._queue(data, self.closed)
        else:
            place = self._staging.put(data, self.closed)
            if place is not None:
                with self._changed:
                    self._slots.add(place.slot)
                    message = msgspec.structs.replace(message, place=place)
        if self._is_closed:
            self.close("dropped")  # frees a slot that was taken meanwhile
            return False
        self._stats.add_block(data.nbytes)
        self._post(message, queued)
        return True

    def _free(self, slots: set[int]) -> None:
        for slot in slots:
            if self._staging is not None:
                self._staging.free(slot)
