"""`PageSender`: sends pages of this engine's leases to engines in other processes, over ZeroMQ.

Source: Mooncake, section 3 (the messenger beside each instance).
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import zmq

from longctx.cluster.transfer import messages
from longctx.cluster.transfer.lease import POLL_SECONDS, Exporter, LeaseGone, Wanted, export_pages, find_wanted
from longctx.cluster.transfer.mooncake import MooncakeStaging
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.socket_thread import SocketThread, check_ip
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Address, Network, RejectedConnections, pages_key
from longctx.serving.kv_cache.connector import PageBlock
from longctx.serving.kv_cache.page_layout import PageLayout

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 1 << 25  # a request for a million pages
_MAX_MESSAGES = 100  # that are read before anything is sent
_MOST_CREDIT = 1 << 12  # blocks: a receiver that grants more is hostile; memory is bounded by `_SendQueue`
_WAIT_SECONDS = 0.1  # between two looks at whether a transfer was closed


class PageSender(SocketThread):
    """Sender of pages of this engine's leases to receivers that know the secret, until it is closed.

    A thread of its own owns the socket, and each transfer has one that reads pages.

    Args:
      exporter: the engine.
      layout, fingerprint: of its pages; receivers with others are refused.
      ip, port: where it listens; port 0: any free one.
      secret: what sender and receivers share; everything is encrypted then (CURVE). None: any process that reaches it
        gets the pages of leases whose ids, of 128 random bits, it knows; for loopback alone, unless `is_trusted`.
      options: limits and timeouts; None: the default ones.
      staging: registered memory that blocks are read from, see `mooncake.py`; None: they are sent.
      is_trusted: whether the network that `ip` is reached by is a private one.
      lease_timeout: seconds within which a lease may come, if a receiver waits less: those of a process that follows
        another one, which has told of the lease already.

    Attributes:
      address: `host:port`, for receivers.
      stats: how transfers ended.

    Raises:
      ValueError: `ip` is none, or can be reached from other machines without a secret; a block is too small.
      OSError: it can't listen there.

    Source:
      Mooncake, 3 (the messenger: KV cache from host to host, while later layers are computed).

    Examples:
      >>> from concurrent.futures import Future
      >>> from types import SimpleNamespace
      >>> import numpy as np
      >>> from longctx.cluster.transfer import PageSender
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.leases import LeasedPages
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> lease = LeasedPages(None, keys, pages=[0, 1, 2], length=12, total=12)
      >>> read = Future()
      >>> read.set_result([PageBlock(0, layout.whole, pages)])
      >>> shelf = SimpleNamespace(lease=lambda lease_id: lease, read=lambda *wanted: read)
      >>> shelf.release = lambda lease_id: None  # an `Exporter` of arrays; of an engine, `Engine.pages` is one
      >>> sender = PageSender(shelf, layout)  # without a secret on loopback only
      >>> sender.address.startswith("127.0.0.1:"), sender.num_streams
      (True, 0)
      >>> sender.close()
      >>> PageSender(shelf, layout, ip="10.0.0.1")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
          ...
      ValueError: ip 10.0.0.1 can be reached from other machines: transfers need a ...
    """

    def __init__(
        self,
        exporter: Exporter,
        layout: PageLayout,
        fingerprint: bytes = b"",
        ip: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        options: TransferOptions | None = None,
        staging: MooncakeStaging | None = None,
        is_trusted: bool = False,
        lease_timeout: float = 0.0,
    ) -> None:
        check_ip(ip, secret is not None or is_trusted)
        key, options = pages_key(secret, "transfer"), options or TransferOptions()
        options.check_fits(layout)
        super().__init__("page sender", options.silence_timeout)
        self.options, self.stats, self._network = options, TransferStats(), Network(ip, options.silence_timeout)
        self._exporter, self._layout, self._fingerprint, self._staging = exporter, layout, fingerprint, staging
        self._lease_timeout = lease_timeout
        self._queue = _SendQueue(self.options.queue_bytes, self.options.max_queue_bytes)
        try:
            self._socket = self._network.serve(zmq.ROUTER, key)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            self._rejected = RejectedConnections(f"transfers at {ip}")
            self._rejected.monitor(self._socket)
            self._socket.bind(f"tcp://{Address(ip, port)}" if port else f"tcp://{Address(ip, 0)}".replace(":0", ":*"))
        except zmq.ZMQError as error:
            self._network.close()
            raise OSError(error.errno, f"transfers can't listen on {Address(ip, port)}: {error}") from None
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")  # type: ignore[union-attr]
        self.address = bound.removeprefix("tcp://")
        self._streams: dict[bytes, _SendStream] = {}  # of each receiver
        self._poller.register(self._socket, zmq.POLLIN)
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """Number of transfers at the moment."""
        return len(self._streams)

    @property
    def num_queued_bytes(self) -> int:
        """Bytes of blocks that were handed to ZeroMQ and have not left."""
        return self._queue.num_bytes

    # The rest runs in the sender's thread.

    def _finish(self) -> None:
        for stream in list(self._streams.values()):
            stream.close("dropped")
        self._streams.clear()
        self._network.close()

    def _tick(self) -> None:
        for peer in list(self._streams):
            self._send(peer, messages.Alive())  # ends the transfer if heartbeats have found the connection dead
        self._rejected.update()
        self.stats.strangers = self._rejected.count

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise ValueError(f"a message of {len(frames)} frames")
                self._handle(peer, messages.decode(frames[0], messages.TO_SENDER))
            except ValueError as error:
                self._rejected.add(messages.shorten(str(error)))
            except Exception:
                _LOG.exception("longctx: a message of a transfer could not be handled")

    def _handle(self, peer: bytes, message: messages.FromReceiver) -> None:
        if isinstance(message, messages.Open):
            self._open(peer, message)
        elif isinstance(message, messages.Release):
            self._exporter.release(message.lease)
        elif (stream := self._streams.get(peer)) is not None:
            try:
                if isinstance(message, messages.Grant):
                    stream.grant(message.blocks)
                elif isinstance(message, messages.Pulled):
                    stream.free(message.slot)
                else:
                    self._close(peer, "dropped")
            except ValueError:
                self._close(peer, "malformed")
                raise

    def _open(self, peer: bytes, message: messages.Open) -> None:
        if peer in self._streams:
            raise ValueError("a transfer was opened in another one")
        lease_timeout = max(self._lease_timeout, message.lease_timeout / 1000)
        try:
            self._check_receiver(message)
            with contextlib.suppress(LeaseGone) if lease_timeout else contextlib.nullcontext():
                self._find(message)
        except (LeaseGone, ValueError) as error:
            reason = messages.shorten(str(error)) or "the lease is gone"
        except Exception:
            _LOG.exception("longctx: a lease could not be opened")
            reason = "the sender failed"
        else:
            post, queue = functools.partial(self._post, peer), functools.partial(self._queue.put, peer)
            stream = _SendStream(post, self.stats, queue, self._staging)
            self._streams[peer] = stream
            self._send(peer, messages.Alive())
            try:
                stream.start(self._export(message, lease_timeout, stream.closed))
            except RuntimeError:  # there are as many threads as there may be
                self._fail(peer)
            return
        self.stats.add_outcome("refused")
        self._send(peer, messages.Refused(reason))

    def _find(self, message: messages.Open) -> Wanted:
        """Find the pages that a receiver asks for in their lease. Raises LeaseGone or ValueError."""
        return find_wanted(
            self._exporter.lease(message.lease).keys,
            message.keys,
            messages.part_of(message),
            self._layout,
            message.needed,
        )

    def _export(self, message: messages.Open, timeout: float, is_closed: Callable[[], bool]) -> Iterator[PageBlock]:
        """Yield the pages that a receiver asks for, once the lease has come. Raises LeaseGone or ValueError."""
        until = time.monotonic() + timeout
        while True:
            try:
                wanted = self._find(message)
                break
            except LeaseGone:
                if is_closed() or time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)
        options = self._options_for(message)
        yield from export_pages(self._exporter, message.lease, self._layout, wanted, options, is_closed)

    def _check_receiver(self, message: messages.Open) -> None:
        """Raise ValueError unless this sender and a receiver fit together."""
        if message.version != messages.VERSION:
            raise ValueError(f"the sender speaks version {messages.VERSION} of transfers, not {message.version}")
        self._layout.check_same(message.layout, "the receiver")
        if message.fingerprint != self._fingerprint:
            raise ValueError("the pages are of another model or of other weights")
        if len(self._streams) >= self.options.max_streams:
            raise ValueError(f"the sender serves {len(self._streams)} transfers already")
        self._options_for(message).check_fits(self._layout)

    def _options_for(self, message: messages.Open) -> TransferOptions:
        return dataclasses.replace(self.options, block_bytes=min(self.options.block_bytes, message.block_bytes))

    def _close(self, peer: bytes, outcome: Outcome) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:  # else it was closed by what was sent meanwhile
            stream.close(outcome)

    def _fail(self, peer: bytes) -> None:
        """End one transfer because of the error that is being handled."""
        _LOG.exception("longctx: a transfer failed")
        self._close(peer, "failed")

    def _post(self, peer: bytes, message: messages.FromSender, data: Any) -> None:
        """Send a message from any thread."""
        self.post(lambda: self._send(peer, message, data))

    def _send(self, peer: bytes, message: messages.FromSender, data: Any = None) -> None:
        """Send a message of a transfer, which an error ends."""
        try:
            # Without a threshold below which it copies: what is copied would leave the queue before it is sent.
            blocks = [] if data is None else [zmq.Frame(data, copy=False, copy_threshold=0)]
            self._socket.send_multipart([peer, messages.encode(message), *blocks], zmq.NOBLOCK, copy=False)
        except Exception as error:
            if isinstance(error, zmq.ZMQError) and error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                self._close(peer, "lost")
            else:
                self._fail(peer)


class _SendStream:
    """One transfer until the receiver closes it: a thread reads pages, and sends blocks as they are granted.

    Args:
      post: sends a message to the receiver, with a block's bytes if it has any.
      queue: waits until there is room for a block's bytes on their way, and returns what is to be sent; None: closed.
    """

    def __init__(
        self,
        post: Callable[[messages.FromSender, Any], None],
        stats: TransferStats,
        queue: Callable[[np.ndarray, Callable[[], bool]], np.ndarray | None],
        staging: MooncakeStaging | None,
    ) -> None:
        self._post, self._stats, self._queue, self._staging = post, stats, queue, staging
        self._changed = threading.Condition()  # guards what follows
        self._credit, self._is_closed = 0, False
        self._outcome: Outcome | None = None
        self._slots: set[int] = set()  # that the receiver has not read yet

    def start(self, blocks: Iterator[PageBlock]) -> None:
        """Start to send blocks, whose iterator may wait, and raise LeaseGone or ValueError."""
        act = functools.partial(self._run, blocks)
        threading.Thread(target=act, name="longctx transfer", daemon=True).start()

    def grant(self, blocks: int) -> None:
        """Add to the blocks that may be sent. Raises ValueError: the receiver grants without bounds."""
        with self._changed:
            if self._credit + blocks > _MOST_CREDIT:
                raise ValueError(f"more than {_MOST_CREDIT} blocks granted")
            self._credit += blocks
            self._changed.notify()

    def free(self, slot: int) -> None:
        """Free a slot that the receiver has read. Raises ValueError: the slot is none of this transfer."""
        with self._changed:
            if slot not in self._slots:
                raise ValueError(f"slot {slot} freed, which the transfer does not have")
            self._slots.discard(slot)
        self._free({slot})

    def close(self, outcome: Outcome) -> None:
        """Send no more, and free what the receiver has not read; never waits."""
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
        """Return whether nothing more is to be sent."""
        return self._is_closed

    def _run(self, blocks: Iterator[PageBlock]) -> None:
        number = 0
        outcome: Outcome
        try:
            for block in blocks:
                num_pages = len(block.data)
                data = np.ascontiguousarray(np.asarray(block.data)).reshape(-1).view(np.uint8)
                message = messages.Block(number, block.first, num_pages, *block.part, messages.digest_of(data))
                if not self._send(message, data):
                    return
                number += 1
            reason, outcome = "", "complete"
        except LeaseGone as error:
            reason, outcome = messages.shorten(str(error)) or "the lease is gone", "ended"
        except ValueError as error:
            reason, outcome = messages.shorten(str(error)), "refused"
        except Exception:
            _LOG.exception("longctx: pages of a lease could not be sent")
            reason, outcome = "the sender failed", "failed"
        if not self._is_closed:
            self._end(outcome)  # before the receiver closes it
            self._post(messages.End(number, reason), None)

    def _send(self, message: messages.Block, data: np.ndarray) -> bool:
        """Send a block once there is room for it; returns False if the transfer was closed."""
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


class _SendQueue:
    """Bound on the bytes of blocks that were handed to the socket and have not left: ZeroMQ itself has none.

    One block is always admitted for a receiver that has none, so that receivers that don't read stop no others.
    """

    def __init__(self, most_each: int, most: int) -> None:
        self._most_each, self._most = most_each, most
        self._changed = threading.Condition()  # guards what follows
        self._queued: Counter[bytes] = Counter()
        self.num_bytes = 0

    def put(self, peer: bytes, data: np.ndarray, is_closed: Callable[[], bool]) -> np.ndarray | None:
        """Wait for room; returns a view of `data` `[bytes]` that takes it while the view exists. None: closed."""
        num_bytes = data.nbytes
        with self._changed:
            while not self._has_room(peer, num_bytes):
                if is_closed():
                    return None
                self._changed.wait(_WAIT_SECONDS)
            self._queued[peer] += num_bytes
            self.num_bytes += num_bytes
        view = data[:]  # ZeroMQ lets go of it when the bytes have left, or the connection has broken
        weakref.finalize(view, self._leave, peer, num_bytes).atexit = False
        return view

    def _has_room(self, peer: bytes, num_bytes: int) -> bool:
        queued = self._queued[peer]
        return not queued or (queued + num_bytes <= self._most_each and self.num_bytes + num_bytes <= self._most)

    def _leave(self, peer: bytes, num_bytes: int) -> None:
        with self._changed:
            self.num_bytes -= num_bytes
            self._queued[peer] -= num_bytes
            if not self._queued[peer]:
                del self._queued[peer]
            self._changed.notify_all()
