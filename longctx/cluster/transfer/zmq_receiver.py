"""Fetches pages of leases that engines in other processes hold, over ZeroMQ.

Source: Mooncake, section 3.
"""

import contextlib
import functools
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from typing import Any

import zmq

from longctx.cluster.transfer.access import transfer_key
from longctx.cluster.transfer.arrivals import Arrivals
from longctx.cluster.transfer.credits import Credits
from longctx.cluster.transfer.export import check_part
from longctx.cluster.transfer.fetch_state import Fetch, Lost, Stream, read_block
from longctx.cluster.transfer.mailbox import Mailbox
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
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.peer import NoRoom, Peer
from longctx.cluster.transfer.puller import Puller
from longctx.cluster.transfer.remote_source import RemoteSource
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Network
from longctx.serving.kv_cache.connector import PageFetch
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice
from longctx.serving.kv_cache.page_pool import Key

_LOG = logging.getLogger(__name__)
_HEADER_BYTES = 1 << 16  # more than any header has
_MAX_MESSAGES = 100  # that are read of one sender before others have their turn
_IDLE_SECONDS = 60.0  # after which a connection without transfers is closed
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1  # after an error that is of no connection, so that it does not come at once again


class PageReceiver:
    """Fetches pages from senders in other processes, until it is closed. A thread of its own owns the sockets.

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
      >>> import numpy as np
      >>> from longctx.cluster.transfer import Lease, make_lease_id, PageReceiver, PageSender
      >>> from longctx.serving.kv_cache.connector import PageBlock
      >>> from longctx.serving.kv_cache.page_layout import PageLayout
      >>> layout = PageLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")
      >>> keys, pages = [bytes([n] * 16) for n in range(3)], np.ones((3, *layout.shape), np.float32)
      >>> lease = Lease(make_lease_id(), keys, [0, 1, 2], 0, 12, layout, expires=60.0)
      >>> class Shelf:
      ...     def open(self, lease_id):
      ...         return lease
      ...     def num_ready(self, lease_id):
      ...         return len(pages)
      ...     def read(self, lease_id, first, stop, layers):
      ...         read = Future()
      ...         read.set_result([PageBlock(0, layout.whole, pages[first:stop])])
      ...         return read
      ...     def release(self, lease_id):
      ...         pass
      >>> with PageSender(Shelf(), layout) as sender, PageReceiver(layout) as receiver:  # of two processes, in practice
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
        puller: Puller | None = None,
    ) -> None:
        self.part = part or layout.whole
        check_part(self.part, layout)
        self._key = transfer_key(secret)
        self.options = options or TransferOptions()
        self.options.check_fits(layout)
        self.stats = TransferStats()
        self._layout, self._fingerprint, self._puller = layout, fingerprint, puller
        self._network = Network("127.0.0.1", self.options.silence_timeout)
        self._credits = Credits(self.options.window_blocks, self.options.max_blocks)
        self._mailbox = Mailbox()
        self._peers: dict[str, Peer] = {}
        self._fetches: set[Fetch] = set()
        self._numbers = itertools.count()
        self._is_closing = False
        self._poller = zmq.Poller()
        self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="longctx page receiver", daemon=True)
        self._thread.start()

    def source(
        self,
        address: str | List[str],
        lease_id: str,
        release: bool = True,
        deadline: float | None = None,
        patience: float = 0.0,
    ) -> RemoteSource:
        """The pages of a lease, as a `PageSource`.

        Args:
          address: `host:port` of the sender; of several processes of one engine, those of all.
          lease_id: of the lease.
          release: whether the end of a fetch releases the lease. If not, call `RemoteSource.release`.
          deadline: seconds after which a fetch ends; None: that of the options.
          patience: seconds in which a lease may come that the sender does not know yet.

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
        return RemoteSource(self, addresses, lease_id, release, deadline or self.options.deadline, patience)

    @property
    def num_fetches(self) -> int:
        """How many transfers there are at the moment."""
        return len(self._fetches)

    def close(self) -> None:
        """End all transfers and close all connections. It may be called more than once."""
        self._is_closing = True
        self._mailbox.post(lambda: None)
        self._thread.join(_CLOSE_SECONDS)
        if self._puller is not None:
            self._puller.close()

    def __enter__(self) -> "PageReceiver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fetch(self, source: RemoteSource, keys: List[Key], wake: Callable[[], Any]) -> PageFetch:
        """Begin to fetch pages of a source.

        Args:
          source: of the pages.
          keys: of the pages, in order.
          wake: is called, in another thread, when blocks have come and at the end.

        Returns:
          The transfer, which the caller empties.
        """
        deadline = time.monotonic() + source.deadline
        fetch = Fetch(
            source.addresses, source.lease_id, list(keys), self.part, deadline, source.releases, source.patience
        )
        fetch.arrivals = Arrivals(
            len(keys),
            self.part,
            wake,
            lambda credit: self._mailbox.post(lambda: self._taken(credit)),
            lambda: self._mailbox.post(lambda: self._end(fetch, "dropped")),
            self.stats,
        )
        self._mailbox.post(lambda: self._open(fetch))
        if self._is_closing:  # set before the calls that came are made for the last time
            fetch.arrivals.end("dropped")
        return fetch.arrivals

    def release(self, addresses: list[str], lease_id: str) -> None:
        """Tell the senders that nobody needs a lease.

        Args:
          addresses: of the senders.
          lease_id: of the lease.
        """
        self._mailbox.post(lambda: self._release(addresses, lease_id))

    # What follows runs in the receiver's thread.

    def _run(self) -> None:
        tick = self.options.silence_timeout / 5
        next_tick = time.monotonic()
        try:
            while not self._is_closing:
                try:
                    self._poller.poll(max(0, int(1000 * (next_tick - time.monotonic()))) + 1)
                    self._act()
                    for peer in list(self._peers.values()):
                        self._attend(peer)
                    if time.monotonic() >= next_tick:
                        next_tick = time.monotonic() + tick
                        self._tick()
                    self._grant()
                except Exception:  # of no connection: those go on
                    _LOG.exception("longctx: the receiver of pages failed, and goes on")
                    time.sleep(_PAUSE_SECONDS)
        finally:
            self._is_closing = True
            self._act()
            for fetch in list(self._fetches):
                if fetch.release:
                    self._release(fetch.addresses, fetch.lease_id)
                self._end(fetch, "dropped")
            self._network.close()
            self._mailbox.close()

    def _act(self) -> None:
        for call in self._mailbox.take():
            try:
                call()
            except Exception:
                _LOG.exception("longctx: a call of the receiver of pages failed")

    def _attend(self, peer: Peer) -> None:
        """Read what a sender has sent. Whatever goes wrong costs the transfers from this one."""
        try:
            broke = peer.what_broke()  # before reading what came until then
            self._receive(peer)
        except Exception:
            _LOG.exception("longctx: transfers from %s failed", peer.address)
            broke = "failed"
        if broke is not None:
            self._drop(peer, broke)

    def _peer(self, address: str) -> Peer:
        """The connection to a sender, made if there is none. Raises NoRoom: there are too many."""
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

    def _open(self, fetch: Fetch) -> None:
        if fetch.arrivals.is_over:
            return
        self._fetches.add(fetch)
        try:
            self._ask(fetch)
        except NoRoom as error:
            _LOG.warning("longctx: a transfer was refused: %s", error)
            self._end(fetch, "refused")
        except Exception:
            _LOG.exception("longctx: a transfer from %s could not begin", ", ".join(fetch.addresses))
            self._end(fetch, "failed")

    def _ask(self, fetch: Fetch) -> None:
        for address in fetch.addresses:
            peer = self._peer(address)
            stream = Stream(next(self._numbers) % 2**31, fetch, peer, self._credits.open())
            peer.streams[stream.number] = stream
            fetch.streams.append(stream)
            peer.send(
                Open(
                    stream.number, VERSION, fetch.lease_id, fetch.keys, self._layout, self._fingerprint,
                    *fetch.part, self.options.block_bytes, int(1000 * fetch.patience),
                )
            )  # fmt: skip

    def _release(self, addresses: list[str], lease_id: str) -> None:
        """Tell senders, as far as they are connected: a lease of others expires."""
        for address in addresses:
            if (peer := self._peers.get(address)) is not None:
                peer.used = time.monotonic()
                peer.send(Release(lease_id))

    def _release_after(self, fetch: Fetch) -> None:
        """Release the lease of a fetch that was begun, over new connections where those before have broken."""
        for stream in fetch.streams:
            with contextlib.suppress(NoRoom):
                try:
                    self._peer(stream.peer.address)
                except zmq.ZMQError:
                    _LOG.exception("longctx: a lease could not be released at %s", stream.peer.address)
        self._release([stream.peer.address for stream in fetch.streams], fetch.lease_id)

    def _taken(self, credit: Any) -> None:
        self._credits.taken(credit)

    def _grant(self) -> None:
        """Grant what has become free to transfers that are open."""
        grants = dict(self._credits.grants())
        if grants:
            for fetch in self._fetches:
                for stream in fetch.streams:
                    if stream.credit in grants:
                        stream.peer.send(Grant(stream.number, grants[stream.credit]))

    def _tick(self) -> None:
        """Tell senders that this side lives; give up what is late, and connections that nobody uses."""
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

    def _receive(self, peer: Peer) -> None:
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
                self._blame(peer, error)
                return

    def _blame(self, peer: Peer, error: ValueError) -> None:
        """A sender said what it must not: nothing more is read of it."""
        _LOG.warning("longctx: a transfer from %s broke off: %s", peer.address, shorten(str(error)))
        self._drop(
            peer, "corrupt" if isinstance(error, Corrupt) else "lost" if isinstance(error, Lost) else "malformed"
        )

    def _handle(self, peer: Peer, message: FromSender, frames: list[Any]) -> None:
        stream = peer.streams.get(message.fetch)
        if stream is None:
            return  # it was closed, which the sender does not know yet
        stream.heard = time.monotonic()
        if isinstance(message, Block):
            self._block(stream, message, frames)
        elif frames:
            raise Malformed(f"a message of {1 + len(frames)} frames")
        elif isinstance(message, Refused):
            _LOG.warning("longctx: a transfer from %s was refused: %s", peer.address, shorten(message.reason))
            self._end(stream.fetch, "refused")
        elif isinstance(message, Opened):
            self._opened(stream, message)
        elif isinstance(message, End):
            if message.number != stream.num_come:
                raise Lost(f"{message.number} blocks were sent and {stream.num_come} received")
            stream.num_sent, stream.reason = message.number, message.reason
            self._end_if_over(stream)
        else:
            assert isinstance(message, Alive)

    def _opened(self, stream: Stream, message: Opened) -> None:
        try:
            self._layout.check_same(message.layout, f"the sender at {stream.peer.address}")
            if message.fingerprint != self._fingerprint:
                raise ValueError("the pages are of another model or of other weights")
        except ValueError as error:
            _LOG.warning("longctx: a transfer was refused: %s", shorten(str(error)))
            self._end(stream.fetch, "refused")
        else:
            stream.is_open = True

    def _block(self, stream: Stream, message: Block, frames: list[Any]) -> None:
        shape = stream.check(message, self._layout, self.options.block_bytes)
        if not self._credits.come(stream.credit):
            raise Malformed("a block that was not granted")
        if message.place is None:
            if len(frames) != 1:
                raise Malformed(f"a block of {1 + len(frames)} frames")
            self._ready(stream, message, shape, frames[0])
            return
        if frames or self._puller is None:
            self._credits.taken(stream.credit)
            raise Malformed("a block in registered memory, which this receiver does not read")
        num_bytes = self._layout.bits.itemsize * functools.reduce(int.__mul__, shape)

        def done(data: Any) -> None:
            self._mailbox.post(lambda: self._pulled(stream, message, shape, data))

        self._puller.pull(message.place, num_bytes, done)

    def _pulled(self, stream: Stream, message: Block, shape: tuple[int, ...], data: Any) -> None:
        peer = stream.peer
        if peer.streams.get(stream.number) is not stream:
            self._credits.taken(stream.credit)  # it ended meanwhile
        elif data is None:
            self._credits.taken(stream.credit)
            self._end(stream.fetch, "lost")
        else:
            peer.send(Pulled(stream.number, message.place.slot))  # type: ignore[union-attr]
            try:
                self._ready(stream, message, shape, data)
            except ValueError as error:
                self._blame(peer, error)

    def _ready(self, stream: Stream, message: Block, shape: tuple[int, ...], data: Any) -> None:
        """The bytes of a block are there."""
        try:
            block = read_block(message, data, shape, self._layout)
        except ValueError:
            self._credits.taken(stream.credit)
            raise
        stream.num_ready += 1
        self.stats.add_block(len(data))
        arrivals = stream.fetch.arrivals
        if not arrivals.put(block, stream.credit):
            self._credits.taken(stream.credit)
        if arrivals.outcome is not None:
            self._end(stream.fetch, arrivals.outcome)
        else:
            self._end_if_over(stream)

    def _end_if_over(self, stream: Stream) -> None:
        """End a transfer of which no stream has more."""
        if stream.fetch.is_ended:
            reasons = {each.reason for each in stream.fetch.streams} - {""} or {"pages are missing"}
            _LOG.warning("longctx: a transfer from %s ended: %s", stream.peer.address, shorten("; ".join(reasons)))
            self._end(stream.fetch, "ended")

    def _end(self, fetch: Fetch, outcome: Outcome) -> None:
        if fetch not in self._fetches:
            return
        self._fetches.discard(fetch)
        fetch.arrivals.end(outcome)
        for stream in fetch.streams:
            self._credits.close(stream.credit)
            if stream.peer.streams.pop(stream.number, None) is not None:
                stream.peer.send(Close(stream.number))
        if fetch.release and not self._is_closing:
            self._release_after(fetch)

    def _drop(self, peer: Peer, outcome: Outcome) -> None:
        """Close a connection, and with it all that comes over it."""
        if self._peers.pop(peer.address, None) is None:
            return
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.monitor)
        fetches = {stream.fetch: None for stream in peer.streams.values()}
        peer.streams.clear()
        peer.close()
        for fetch in fetches:
            self._end(fetch, outcome)
