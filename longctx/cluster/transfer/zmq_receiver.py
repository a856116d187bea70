"""`PageReceiver`: fetches pages of leases that engines in other processes hold, over ZeroMQ.

Source: Mooncake, section 3.
"""

import contextlib
import functools
import itertools
import logging
import re
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import zmq

from longctx.cluster.transfer.messages import (
    TO_RECEIVER,
    VERSION,
    Alive,
    Block,
    Close,
    Corrupt,
    End,
    FromSender,
    Grant,
    Malformed,
    Open,
    Opened,
    Pulled,
    Refused,
    Release,
    decode,
    shorten,
)
from longctx.cluster.transfer.mooncake import MooncakePuller
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.remote_fetch import Lost, NoRoom, Peer, RemoteFetch, Stream, read_block
from longctx.cluster.transfer.socket_thread import SocketThread, transfer_key
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Network
from longctx.serving.kv_cache.connector import PageFetch
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_LOG = logging.getLogger(__name__)
_HEADER_BYTES = 1 << 16  # more than any header has
_MAX_MESSAGES = 100  # that are read of one sender before others have their turn
_IDLE_SECONDS = 60.0  # after which a connection without transfers is closed


@dataclass(frozen=True, eq=False)
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

    def fetch(self, keys: List[Key], wake: Callable[[], Any]) -> PageFetch:
        return self.receiver.fetch(self, keys, wake)

    def release(self) -> None:
        """Tell the senders that are connected that the lease is not needed. Without it the lease expires."""
        self.receiver.release(self)


class PageReceiver(SocketThread):
    """Receiver of pages from senders in other processes, until it is closed. A thread of its own owns the sockets.

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
      >>> from longctx.cluster.transfer import Lease, make_lease_id, PageReceiver, PageSender
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> lease = Lease(make_lease_id(), keys, [0, 1, 2], 0, 12, layout)
      >>> read = Future()
      >>> read.set_result([PageBlock(0, layout.whole, pages)])
      >>> shelf = SimpleNamespace(open=lambda lease_id: lease, num_ready=lambda lease_id: 3, read=lambda *wanted: read)
      >>> shelf.release = lambda lease_id: None  # an `Exporter` of arrays; an engine has one of its own
      >>> with PageSender(shelf, layout) as sender, PageReceiver(layout) as receiver:  # of two processes, in practice
      ...     woken = threading.Event()
      ...     fetch = receiver.source(sender.address, lease.lease_id).fetch(keys, woken.set)
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
        part, options, key = part or layout.whole, options or TransferOptions(), transfer_key(secret)
        layout.check_part(part)
        options.check_fits(layout)
        network = Network("127.0.0.1", options.silence_timeout)
        super().__init__("page receiver", network, options.silence_timeout)
        self.part, self.options, self.stats, self._key = part, options, TransferStats(), key
        self._layout, self._fingerprint, self._puller = layout, fingerprint, puller
        self.num_free_blocks = self.options.max_blocks
        self._peers: dict[str, Peer] = {}
        self._fetches: dict[RemoteFetch, RemoteSource] = {}  # in the order in which blocks are granted
        self._numbers = itertools.count()
        self._thread.start()

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

        Raises:
          ValueError: an address is none.
        """
        addresses = [address] if isinstance(address, str) else list(address)
        for each in addresses:
            host, _, port = each.rpartition(":")
            if not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+", host) or not re.fullmatch(r"\d{1,5}", port):
                raise ValueError(f"address must be host:port, got {each!r}")
        if not addresses:
            raise ValueError("address must be at least one")
        return RemoteSource(self, addresses, lease_id, release, deadline or self.options.deadline, lease_timeout)

    @property
    def num_fetches(self) -> int:
        """Number of transfers at the moment."""
        return len(self._fetches)

    @property
    def addresses(self) -> list[str]:
        """Senders that it is connected to, as `host:port`."""
        return list(self._peers)

    def close(self) -> None:
        """End all fetches and close all sockets. It may be called more than once."""
        super().close()
        if self._puller is not None:
            self._puller.close()

    def fetch(self, source: RemoteSource, keys: List[Key], wake: Callable[[], Any]) -> PageFetch:
        """Begin to fetch pages of a source.

        Args:
          source: of the pages.
          keys: of the pages, in order.
          wake: is called, in another thread, when blocks have come and at the end.

        Returns:
          The transfer, which the caller empties.
        """
        fetch = RemoteFetch(
            list(keys),
            self.part,
            time.monotonic() + source.deadline,
            wake,
            lambda stream: self.post(lambda: self._free_block(stream)),
            lambda fetch: self.post(lambda: self._end(fetch, "dropped")),
            self.stats,
        )
        self.post(lambda: self._open(source, fetch))
        if self._is_closing:  # set before the calls that came are made for the last time
            fetch.end("dropped")
        return fetch

    def release(self, source: RemoteSource) -> None:
        """Tell the senders that a lease is not needed.

        Args:
          source: of the pages of the lease.
        """
        self.post(lambda: self._release(source))

    # The rest runs in the receiver's thread.

    def _release(self, source: RemoteSource) -> None:
        """Release a lease of senders that are connected; that of others expires."""
        for address in source.addresses:
            if (peer := self._peers.get(address)) is not None:
                peer.used = time.monotonic()
                peer.send(Release(source.lease_id))

    def _finish(self) -> None:
        for fetch, source in list(self._fetches.items()):
            if source.releases:
                self._release(source)
            self._end(fetch, "dropped")

    def _receive(self) -> None:
        for peer in list(self._peers.values()):
            try:
                failure = peer.read_failure()  # before reading what came until then
                self._receive_from(peer)
            except Exception:
                _LOG.exception("longctx: transfers from %s failed", peer.address)
                failure = "failed"
            if failure is not None:
                self._drop(peer, failure)
        self._grant()

    def _peer(self, address: str) -> Peer:
        """Return the connection to a sender, made if there is none. Raises NoRoom: there are too many."""
        peer = self._peers.get(address)
        if peer is None:
            if len(self._peers) >= self.options.max_peers:
                self._make_room()
            peer = Peer(self._network, self._key, address, self.options.block_bytes + _HEADER_BYTES)
            self._peers[address] = peer
            self._poller.register(peer.socket, zmq.POLLIN)
            self._poller.register(peer.monitor, zmq.POLLIN)
        peer.used = time.monotonic()
        return peer

    def _make_room(self) -> None:
        idle = [peer for peer in self._peers.values() if not peer.streams]
        if not idle:
            raise NoRoom(f"transfers come from {len(self._peers)} senders already")
        self._drop(min(idle, key=lambda peer: peer.used), "lost")

    def _open(self, source: RemoteSource, fetch: RemoteFetch) -> None:
        if fetch.is_over:
            return
        self._fetches[fetch] = source
        try:
            for address in source.addresses:
                peer = self._peer(address)
                stream = Stream(next(self._numbers) % 2**31, fetch, peer)
                peer.streams[stream.number] = stream
                fetch.streams.append(stream)
                peer.send(
                    Open(
                        stream.number, VERSION, source.lease_id, fetch.keys, self._layout, self._fingerprint,
                        *fetch.part, self.options.block_bytes, int(1000 * source.lease_timeout),
                    )
                )  # fmt: skip
        except NoRoom as error:
            _LOG.warning("longctx: a transfer was refused: %s", error)
            self._end(fetch, "refused")
        except Exception:
            _LOG.exception("longctx: a transfer from %s could not begin", ", ".join(source.addresses))
            self._end(fetch, "failed")

    def _grant(self) -> None:
        """Grant free blocks to transfers, in their order: whole ones, so that none waits for another with a part."""
        for fetch in self._fetches:
            for stream in fetch.streams:
                blocks = min(self.options.window_blocks - stream.granted - stream.held, self.num_free_blocks)
                if blocks > 0:
                    stream.granted += blocks
                    self.num_free_blocks -= blocks
                    stream.peer.send(Grant(stream.number, blocks))

    def _free_block(self, stream: Stream) -> None:
        stream.held -= 1
        self.num_free_blocks += 1

    def _tick(self) -> None:
        now = time.monotonic()
        for fetch in list(self._fetches):
            silence = now - min(stream.heard for stream in fetch.streams)
            if now > fetch.deadline or silence > self.options.silence_timeout:
                self._end(fetch, "late")
                continue
            for stream in fetch.streams:
                stream.peer.send(Grant(stream.number, 0))
        for peer in list(self._peers.values()):
            if peer.streams:
                peer.used = now
            elif now - peer.used > _IDLE_SECONDS:
                self._drop(peer, "lost")

    def _receive_from(self, peer: Peer) -> None:
        for _ in range(_MAX_MESSAGES):
            if peer.socket.closed:
                return
            try:
                header, *frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                self._handle(peer, decode(header.buffer, TO_RECEIVER), [frame.buffer for frame in frames])
            except ValueError as error:
                self._reject(peer, error)
                return

    def _reject(self, peer: Peer, error: ValueError) -> None:
        """Close the connection to a sender that broke the protocol: nothing more is read of it."""
        _LOG.warning("longctx: a transfer from %s broke off: %s", peer.address, shorten(str(error)))
        outcomes: dict[type[ValueError], Outcome] = {Corrupt: "corrupt", Lost: "lost"}
        self._drop(peer, outcomes.get(type(error), "malformed"))

    def _handle(self, peer: Peer, message: FromSender, frames: list[Any]) -> None:
        stream = peer.streams.get(message.fetch)
        if stream is None:
            return  # it was closed, which the sender does not know yet
        stream.heard = time.monotonic()
        if isinstance(message, Block):
            self._read_block(stream, message, frames)
        elif frames:
            raise Malformed(f"a message of {1 + len(frames)} frames")
        elif isinstance(message, Refused):
            self._refuse(stream, message.reason)
        elif isinstance(message, Opened):
            self._check_opened(stream, message)
        elif isinstance(message, End):
            if message.number != stream.num_come:
                raise Lost(f"{message.number} blocks were sent and {stream.num_come} received")
            stream.num_sent, stream.reason = message.number, message.reason
            self._end_if_over(stream)
        else:
            assert isinstance(message, Alive)

    def _refuse(self, stream: Stream, reason: str) -> None:
        _LOG.warning("longctx: a transfer from %s was refused: %s", stream.peer.address, shorten(reason))
        self._end(stream.fetch, "refused")

    def _check_opened(self, stream: Stream, message: Opened) -> None:
        try:
            self._layout.check_same(message.layout, "the sender")
            if message.fingerprint != self._fingerprint:
                raise ValueError("the pages are of another model or of other weights")
            stream.is_open = True
        except ValueError as error:
            self._refuse(stream, str(error))

    def _read_block(self, stream: Stream, message: Block, frames: list[Any]) -> None:
        shape = stream.announce(message, self._layout, self.options.block_bytes)
        if stream.granted == 0:
            raise Malformed("a block that was not granted")
        if message.place is not None and self._puller is None:
            raise Malformed("a block in registered memory, which this receiver does not read")
        if len(frames) != (message.place is None):
            raise Malformed(f"a block of {1 + len(frames)} frames")
        stream.granted -= 1
        stream.held += 1
        if message.place is None:
            self._put(stream, message, shape, frames[0])
        else:
            assert self._puller is not None
            num_bytes = self._layout.bits.itemsize * functools.reduce(int.__mul__, shape)
            put = functools.partial(self._put_pulled, stream, message, shape)
            self._puller.pull(message.place, num_bytes, lambda data: self.post(lambda: put(data)))

    def _put_pulled(self, stream: Stream, message: Block, shape: tuple[int, ...], data: Any) -> None:
        """Take the bytes of a block that were read from registered memory; None: they could not be."""
        peer = stream.peer
        if peer.streams.get(stream.number) is not stream:
            self._free_block(stream)  # it ended meanwhile
        elif data is None:
            self._free_block(stream)
            self._end(stream.fetch, "lost")
        else:
            assert message.place is not None
            peer.send(Pulled(stream.number, message.place.slot))
            try:
                self._put(stream, message, shape, data)
            except ValueError as error:
                self._reject(peer, error)

    def _put(self, stream: Stream, message: Block, shape: tuple[int, ...], data: Any) -> None:
        """Take the bytes of a block. Raises Malformed or Corrupt: they are not its bytes."""
        try:
            block = read_block(message, data, shape, self._layout)
        except ValueError:
            self._free_block(stream)
            raise
        stream.num_ready += 1
        self.stats.add_block(len(data))
        fetch = stream.fetch
        if not fetch.put(block, stream):
            self._free_block(stream)
        if fetch.outcome is not None:
            self._end(fetch, fetch.outcome)
        else:
            self._end_if_over(stream)

    def _end_if_over(self, stream: Stream) -> None:
        """End a transfer of which no stream has more."""
        if stream.fetch.has_ended:
            reasons = {each.reason for each in stream.fetch.streams} - {""} or {"pages are missing"}
            _LOG.warning("longctx: a transfer from %s ended: %s", stream.peer.address, shorten("; ".join(reasons)))
            self._end(stream.fetch, "ended")

    def _end(self, fetch: RemoteFetch, outcome: Outcome) -> None:
        source = self._fetches.pop(fetch, None)
        if source is None:
            return
        fetch.end(outcome)
        for stream in fetch.streams:
            self.num_free_blocks += stream.granted
            stream.granted = 0
            if stream.peer.streams.pop(stream.number, None) is not None:
                stream.peer.send(Close(stream.number))
        if source.releases and not self._is_closing:
            for stream in fetch.streams:  # over new connections where those before have broken
                with contextlib.suppress(NoRoom):
                    try:
                        self._peer(stream.peer.address)
                    except zmq.ZMQError:
                        _LOG.exception("longctx: a lease could not be released at %s", stream.peer.address)
            self._release(source)

    def _drop(self, peer: Peer, outcome: Outcome) -> None:
        """Close a connection, and end all transfers over it."""
        if self._peers.pop(peer.address, None) is None:
            return
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        fetches = {stream.fetch: None for stream in peer.streams.values()}
        peer.streams.clear()
        peer.close()
        for fetch in fetches:
            self._end(fetch, outcome)
