"""`PageReceiver`: fetches pages of leases that engines in other processes hold, over ZeroMQ.

Source: Mooncake, section 3.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from longctx.cluster.transfer import messages
from longctx.cluster.transfer.mooncake import MooncakePuller
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.socket_thread import SocketThread
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Network, Socket, pages_key
from longctx.serving.kv_cache.connector import WHOLE, Arrivals, Needed, PageBlock, PageFetch
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_LOG = logging.getLogger(__name__)
_HEADER_BYTES = 1 << 16  # more than any header has
_MAX_MESSAGES = 100  # that are read of one sender before others have their turn
_LINGER = 1000  # milliseconds in which the end of a transfer and of its lease may leave
# Without EVENT_HANDSHAKE_FAILED_PROTOCOL: libzmq 4.3.5 tells it of flipped bits too, takes the connection for one that
# waits, and aborts the process by an assertion at the next heartbeat after the connection has broken.
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(eq=False)
class RemoteSource:
    """`LeasedSource` of the pages of a lease that an engine in another process holds.

    Attributes:
      releases: whether the end of a fetch releases the lease.
      deadline: seconds after which a fetch ends.
      lease_timeout: seconds within which the lease may come.
    """

    receiver: "PageReceiver"
    addresses: list[str]
    lease_id: str
    releases: bool
    deadline: float
    lease_timeout: float
    was_fetched: bool = False

    def fetch(self, keys: List[Key], wake: Callable[[], Any], needed: Needed = WHOLE) -> PageFetch:
        self.was_fetched = True
        fetch = _Fetch(self.receiver, self, list(keys), wake, needed)
        self.receiver.begin(fetch)
        return fetch.arrivals

    def release(self) -> None:
        """Tell known senders that a lease is not needed, unless its fetch does; that of others expires."""
        if not (self.was_fetched and self.releases):
            for address in self.addresses:
                self.receiver.release(address, self.lease_id)


class PageReceiver(contextlib.AbstractContextManager["PageReceiver"]):
    """Receiver of pages from senders in other processes, until it is closed.

    Args:
      layout, fingerprint: of the pages of this engine; senders with others are refused.
      part: the layers and KV heads that this process wants; None: all.
      secret: what senders and receivers share; None: theirs have none either.
      options: limits and timeouts; None: the default ones.
      puller: reads blocks from registered memory, see `mooncake.py`.

    Attributes:
      stats: how transfers ended.

    Raises:
      ValueError: `part` is none of the layout's, or a block of `options` is too small for one layer of a page.

    Source:
      Mooncake, 3 (the messenger: KV cache from host to host, while later layers are computed).

    Examples:
      >>> import threading
      >>> from concurrent.futures import Future
      >>> from types import SimpleNamespace
      >>> import numpy as np
      >>> from longctx.cluster.transfer import PageReceiver, PageSender
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
      >>> with PageSender(shelf, layout) as sender, PageReceiver(layout) as receiver:  # of two processes, in practice
      ...     woken = threading.Event()
      ...     fetch = receiver.source(sender.address, "0123").fetch(keys, woken.set)
      ...     while not fetch.is_over:
      ...         _ = woken.wait(1.0)
      ...         woken.clear()
      ...         blocks = fetch.take(max_bytes=1 << 20)  # to write to the devices
      ...     fetch.close()
      >>> receiver.stats.blocks, receiver.stats.bytes == pages.nbytes
      (1, True)
    """

    def __init__(
        self,
        layout: PageLayout,
        fingerprint: bytes = b"",
        part: PageSlice | None = None,
        secret: str | None = None,
        options: TransferOptions | None = None,
        puller: MooncakePuller | None = None,
    ) -> None:
        self.part, self.options, self.stats = part or layout.whole, options or TransferOptions(), TransferStats()
        layout.check_part(self.part)
        self.options.check_fits(layout)
        self.layout, self.fingerprint, self.puller, self._key = (
            layout,
            fingerprint,
            puller,
            pages_key(secret, "transfer"),
        )
        self.network = Network("127.0.0.1", self.options.silence_timeout)
        self._lock = threading.Lock()  # of all that follows
        self.num_free_blocks = self.options.max_blocks
        self._started: set[_Fetch] = set()
        self._waiting: deque[_Fetch] = deque()  # until there may be a connection more
        self._is_closed = False
        self.known: set[str] = set()  # addresses of senders that have answered

    def source(
        self,
        address: str | List[str],
        lease_id: str,
        release: bool = True,
        deadline: float | None = None,
        lease_timeout: float = 0.0,
    ) -> RemoteSource:
        """Make the source of the pages of a lease.

        Args:
          address: `host:port` of the sender; of several processes of one engine, those of all.
          lease_id: of the lease.
          release: whether the end of a fetch releases the lease. If not, call `RemoteSource.release`.
          deadline: seconds after which a fetch ends; None: that of the options.
          lease_timeout: seconds within which a lease may come that the sender does not know yet.

        Returns:
          A `LeasedSource`.
        """
        addresses = [address] if isinstance(address, str) else list(address)
        return RemoteSource(self, addresses, lease_id, release, deadline or self.options.deadline, lease_timeout)

    @property
    def num_fetches(self) -> int:
        """Number of transfers at the moment."""
        return len(self._started) + len(self._waiting)

    def close(self) -> None:
        """End all fetches and close all sockets. It may be called more than once."""
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
            self._begin_waiting()
            started = list(self._started)
        if is_closed:
            return
        for each in started:
            each.close()
        self.network.close()
        if self.puller is not None:
            self.puller.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Sources and fetches call these.

    def begin(self, fetch: "_Fetch") -> None:
        """Begin a fetch, as soon as the limit of connections allows."""
        with self._lock:
            self._waiting.append(fetch)
            self._begin_waiting()

    def release(self, address: str, lease_id: str) -> None:
        """Release a lease over a connection of its own, where pages have come from before."""
        with self._lock, contextlib.suppress(zmq.ZMQError):
            if address in self.known and not self._is_closed:
                socket = self.connect(address)
                socket.send(messages.encode(messages.Release(lease_id)), zmq.NOBLOCK)
                self.network.drop(socket, _LINGER)

    def connect(self, address: str, events: int = 0) -> Socket:
        """Make a connection to a sender, with a monitor of `events`."""
        made = self.network.connect(zmq.DEALER, self._key)
        try:
            made.setsockopt(zmq.MAXMSGSIZE, self.options.block_bytes + _HEADER_BYTES)
            made.setsockopt(zmq.IPV6, int("[" in address))
            if events:
                made.get_monitor_socket(events)
            made.connect(f"tcp://{address}")
        except Exception:
            self.network.drop(made)
            raise
        return made

    def take_blocks(self, wanted: int, has_none: bool) -> int:
        """Return how many blocks a transfer may grant; one that has none always gets one, so that it goes on."""
        with self._lock:
            blocks = max(min(wanted, self.num_free_blocks), int(has_none))
            self.num_free_blocks -= blocks
        return blocks

    def free_blocks(self, count: int) -> None:
        """Give back blocks of memory that a fetch had been granted."""
        with self._lock:
            self.num_free_blocks += count

    def forget(self, fetch: "_Fetch", granted: int) -> None:
        """Note that a fetch has ended, and blocks do not come any more that were granted to it."""
        with self._lock:
            self.num_free_blocks += granted
            self._started.discard(fetch)
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the fetches for whose connections there is room; with the lock held."""
        connected = sum(len(each.source.addresses) for each in self._started)
        while self._waiting:
            count = len(self._waiting[0].source.addresses)
            if connected and connected + count > self.options.max_peers and not self._is_closed:
                return
            fetch = self._waiting.popleft()
            self._started.add(fetch)
            connected += count
            fetch.start(not self._is_closed)


@dataclass(eq=False)
class _Stream:
    """Blocks that one process sends.

    Attributes:
      granted: blocks that may still come. held: blocks that have come and wait for the engine.
      heard: when its sender was heard last. is_admitted: whether the handshake was completed.
      num_come, num_ready: blocks that were announced, and those whose bytes are there. num_sent: of all, once known.
    """

    address: str
    socket: Socket
    monitor: Socket
    granted: int = 0
    held: int = 0
    heard: float = field(default_factory=time.monotonic)
    num_come: int = 0
    num_ready: int = 0
    num_sent: int | None = None
    reason: str = ""
    is_admitted: bool = False

    def let_go(self) -> None:
        self.held -= 1

    def send(self, message: messages.FromReceiver) -> None:
        with contextlib.suppress(zmq.Again):  # the connection has just broken, which its monitor tells
            self.socket.send(messages.encode(message), zmq.NOBLOCK)


class _Fetch(SocketThread):
    """Load of pages by a thread of its own, which has a connection to each process of the sending engine.

    Attributes:
      arrivals: what has come, for the engine.
    """

    def __init__(
        self, receiver: PageReceiver, source: RemoteSource, keys: list[Key], wake: Callable[[], Any], needed: Needed
    ) -> None:
        super().__init__("page fetch", receiver.options.silence_timeout)
        self._receiver, self.source, self._keys, self._layout = receiver, source, keys, receiver.layout
        self._needed = needed
        drop = functools.partial(self.post, lambda: self._end("dropped"))
        self.arrivals = Arrivals(
            len(keys), receiver.part, wake, self._note_taken, drop, receiver.stats.add_outcome, needed
        )
        self._deadline = time.monotonic() + source.deadline
        self._streams: list[_Stream] = []
        self._num_pulled = 0  # blocks that are being read from registered memory

    def start(self, may_begin: bool) -> None:
        """Begin, once the limit of connections allows; or (False) end at once."""
        self._is_closing = not may_begin
        self.post(self._open)
        self._thread.start()

    def _note_taken(self, stream: _Stream) -> None:
        """Note that the engine has taken a block, or will not; in any thread."""
        self._receiver.free_blocks(1)
        self.post(stream.let_go)

    # The rest runs in its thread.

    def _open(self) -> None:
        receiver, source = self._receiver, self.source
        if self._is_closing or self.arrivals.outcome is not None:
            return
        for address in source.addresses:
            socket = receiver.connect(address, _EVENTS)
            monitor = socket.get_monitor_socket(_EVENTS)
            stream = _Stream(address, socket, monitor)
            self._streams.append(stream)
            self._poller.register(socket, zmq.POLLIN)
            self._poller.register(monitor, zmq.POLLIN)
            stream.send(
                messages.Open(
                    messages.VERSION, source.lease_id, self._keys, self._layout, receiver.fingerprint,
                    *receiver.part, receiver.options.block_bytes, int(1000 * source.lease_timeout), self._needed,
                )
            )  # fmt: skip

    def _recover(self) -> None:
        self._end("failed")

    def _end(self, outcome: Outcome) -> None:
        """Read no more; only the first outcome counts."""
        self.arrivals.end(outcome)
        self._is_closing = True

    def _finish(self) -> None:
        self._end("dropped")  # the receiver is closed
        for stream in self._streams:
            with contextlib.suppress(zmq.ZMQError):  # a sender that is not told notices by itself
                stream.send(messages.Close())
                if self.source.releases:
                    stream.send(messages.Release(self.source.lease_id))
            self._receiver.network.drop(stream.socket, _LINGER)
            stream.monitor.close(linger=0)
        self._receiver.forget(self, self._num_pulled + sum(stream.granted for stream in self._streams))

    def _tick(self) -> None:
        now = time.monotonic()
        silence = now - min((stream.heard for stream in self._streams), default=now)
        if now > self._deadline or silence > self._receiver.options.silence_timeout:
            self._end("late")

    def _receive(self) -> None:
        for stream in self._streams:
            try:
                failure = _read_failure(stream)  # before reading what came until then
                self._receive_from(stream)
                if failure is not None:
                    self._end(failure)
            except messages.Malformed as error:
                self._reject(stream, error)
        self._grant()

    def _reject(self, stream: _Stream, error: messages.Malformed) -> None:
        """End a transfer whose sender broke the protocol: nothing more is read of it."""
        _LOG.warning("longctx: a transfer from %s broke off: %s", stream.address, messages.shorten(str(error)))
        self._end(error.outcome)

    def _grant(self) -> None:
        """Grant free blocks to streams."""
        for stream in self._streams if not self._is_closing else ():
            wanted = self._receiver.options.window_blocks - stream.granted - stream.held
            blocks = self._receiver.take_blocks(max(0, wanted), stream.granted == stream.held == 0)
            if blocks:
                stream.granted += blocks
                stream.send(messages.Grant(blocks))

    def _receive_from(self, stream: _Stream) -> None:
        for _ in range(_MAX_MESSAGES):
            if self._is_closing:
                return
            try:
                header, *frames = stream.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = messages.decode(header.buffer, messages.TO_RECEIVER)
            self._handle(stream, message, [frame.buffer for frame in frames])

    def _handle(self, stream: _Stream, message: messages.FromSender, frames: list[Any]) -> None:
        stream.heard = time.monotonic()
        self._receiver.known.add(stream.address)
        if isinstance(message, messages.Block):
            self._read_block(stream, message, frames)
        elif frames:
            raise messages.Malformed(f"a message of {1 + len(frames)} frames")
        elif isinstance(message, messages.Refused):
            reason = messages.shorten(message.reason)
            _LOG.warning("longctx: a transfer from %s was refused: %s", stream.address, reason)
            self._end("refused")
        elif isinstance(message, messages.End):
            if message.number != stream.num_come:
                raise messages.Lost(f"{message.number} blocks were sent and {stream.num_come} received")
            stream.num_sent, stream.reason = message.number, message.reason
            self._end_if_over()
        else:
            assert isinstance(message, messages.Alive)

    def _read_block(self, stream: _Stream, message: messages.Block, frames: list[Any]) -> None:
        self._check_block(stream, message)
        puller, place = self._receiver.puller, message.place
        if len(frames) != (place is None) or (puller is None and place is not None):
            raise messages.Malformed(f"a block of {1 + len(frames)} frames at {place}")
        stream.num_come += 1
        stream.granted -= 1
        stream.held += 1
        if place is None:
            self._put(stream, message, frames[0])
        else:
            assert puller is not None
            self._num_pulled += 1
            num_bytes = message.pages * self._layout.part_bytes(messages.part_of(message))
            put = functools.partial(self._put_pulled, stream, message)
            puller.pull(place, num_bytes, lambda data: self.post(functools.partial(put, data)))

    def _check_block(self, stream: _Stream, message: messages.Block) -> None:
        """Raise Lost if a block before this one is missing, Malformed if it is none of this transfer."""
        if stream.num_sent is not None:
            raise messages.Malformed("a block after the end of the transfer")
        if message.number != stream.num_come:
            raise messages.Lost(f"block {stream.num_come} was lost: the next one received was {message.number}")
        part = messages.part_of(message)
        if part.intersect(self._receiver.part) != part or not 0 < message.pages <= len(self._keys) - message.first:
            raise messages.Malformed(f"a block of {message.pages} pages from {message.first}, {part}: not wanted")
        num_bytes, most = message.pages * self._layout.part_bytes(part), self._receiver.options.block_bytes
        if num_bytes > most:
            raise messages.Malformed(f"a block of {num_bytes} bytes, which is over {most}")
        if stream.granted == 0:
            raise messages.Malformed("a block that was not granted")

    def _put_pulled(self, stream: _Stream, message: messages.Block, data: Any) -> None:
        """Take the bytes of a block that were read from registered memory; None: they could not be."""
        self._num_pulled -= 1
        if data is None:
            self._note_taken(stream)
            self._end("lost")
            return
        assert message.place is not None
        stream.send(messages.Pulled(message.place.slot))
        try:
            self._put(stream, message, data)
        except messages.Malformed as error:
            self._reject(stream, error)

    def _put(self, stream: _Stream, message: messages.Block, data: Any) -> None:
        """Take the bytes of a block, without a copy. Raises Malformed or Corrupt: they are not its bytes."""
        part = messages.part_of(message)
        shape = (message.pages, *self._layout.part_shape(part))
        try:
            block = PageBlock(message.first, part, messages.to_array(data, message.digest, shape, self._layout))
        except messages.Malformed:
            self._note_taken(stream)
            raise
        stream.num_ready += 1
        self._receiver.stats.add_block(len(data))
        if not self.arrivals.put(block, stream):
            self._note_taken(stream)
        if self.arrivals.outcome is not None:
            self._end(self.arrivals.outcome)
        else:
            self._end_if_over()

    def _end_if_over(self) -> None:
        """End a transfer of which no stream has more."""
        if all(stream.num_sent == stream.num_ready for stream in self._streams):
            reasons = {stream.reason for stream in self._streams} - {""} or {"pages are missing"}
            _LOG.warning("longctx: a transfer ended: %s", messages.shorten("; ".join(reasons)))
            self._end("ended")


def _read_failure(stream: _Stream) -> Outcome | None:
    """Return whether the connection was lost, or refused before anything was said, since the last call."""
    failure: Outcome | None = None
    while stream.monitor.poll(0):
        if recv_monitor_message(stream.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            stream.is_admitted = True
        else:
            failure = "lost" if stream.is_admitted else "refused"
    return failure
