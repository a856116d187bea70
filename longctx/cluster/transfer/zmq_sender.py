"""Sends pages of this engine's leases to engines in other processes, over ZeroMQ.

Source: Mooncake, section 3 (the messenger beside each instance).
"""

import dataclasses
import functools
import logging
import threading
import time
from typing import Any

import zmq

from longctx.cluster.transfer.access import check_ip, transfer_key
from longctx.cluster.transfer.export import Wanted, find_wanted, wait_for_lease
from longctx.cluster.transfer.lease import Exporter, Lease, LeaseGone
from longctx.cluster.transfer.mailbox import Mailbox
from longctx.cluster.transfer.messages import (
    TO_SENDER,
    VERSION,
    Alive,
    Close,
    FromSender,
    Grant,
    Open,
    Opened,
    Pulled,
    Refused,
    Release,
    decode,
    encode,
    part_of,
    shorten,
)
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.send_queue import SendQueue
from longctx.cluster.transfer.send_stream import SendStream, Staging
from longctx.cluster.transfer.stats import Outcome, TransferStats
from longctx.serving.distributed.network import Address, Network, RejectedConnections
from longctx.serving.kv_cache.page_layout import PageLayout

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_BYTES = 1 << 25  # a request for a million pages
_MAX_MESSAGES = 100  # that are read before anything is sent
_CLOSE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1  # after an error that is of no transfer, so that it does not come at once again


class PageSender:
    """Serves transfers of leases to whoever knows the secret, until it is closed.

    A thread of its own owns the socket, and each transfer has one that reads pages.

    Args:
      exporter: the engine.
      layout, fingerprint: of its pages; receivers with others are refused.
      ip, port: where it listens; port 0: any free one.
      secret: what sender and receivers share; everything is encrypted then (CURVE). None: whoever reaches it gets the
        pages of leases whose ids they know, which nobody can guess; so it is for loopback alone, unless `is_trusted`.
      options: limits and timeouts; None: the default ones.
      staging: registered memory that blocks are read from, see `mooncake.py`; None: they are sent.
      is_trusted: the network that `ip` is reached by, where nobody listens.
      patience: seconds in which a lease may come, if a receiver has less patience: those of a process that follows
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
      >>> import threading
      >>> from concurrent.futures import Future
      >>> import numpy as np
      >>> from longctx.cluster.transfer import Lease, make_lease_id, PageSender
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
      >>> sender = PageSender(Shelf(), layout)  # without a secret on loopback only
      >>> sender.address.startswith("127.0.0.1:"), sender.num_streams
      (True, 0)
      >>> sender.close()
      >>> PageSender(Shelf(), layout, ip="10.0.0.1")  # doctest: +ELLIPSIS
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
        staging: Staging | None = None,
        is_trusted: bool = False,
        patience: float = 0.0,
    ) -> None:
        check_ip(ip, secret is not None or is_trusted)
        key = transfer_key(secret)
        self.options = options or TransferOptions()
        self.options.check_fits(layout)
        self.stats = TransferStats()
        self._patience = patience
        self._exporter, self._layout, self._fingerprint, self._staging = exporter, layout, fingerprint, staging
        self._queue = SendQueue(self.options.queue_bytes, self.options.max_queue_bytes)
        self._network = Network(ip, self.options.silence_timeout)
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
        self._mailbox = Mailbox()
        self._streams: dict[tuple[bytes, int], SendStream] = {}
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="longctx page sender", daemon=True)
        self._thread.start()

    @property
    def num_streams(self) -> int:
        """How many transfers there are at the moment."""
        return len(self._streams)

    def close(self) -> None:
        """End all transfers and close the socket. It may be called more than once."""
        self._is_closing = True
        self._mailbox.post(lambda: None)
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> "PageSender":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._mailbox.fileno(), zmq.POLLIN)
        tick = self.options.silence_timeout / 5
        next_tick = time.monotonic()
        try:
            while not self._is_closing:
                try:
                    poller.poll(max(0, int(1000 * (next_tick - time.monotonic()))) + 1)
                    self._receive()
                    self._act()
                    if time.monotonic() >= next_tick:
                        next_tick = time.monotonic() + tick
                        self._tick()
                except Exception:  # of no transfer: those go on
                    _LOG.exception("longctx: the sender of pages failed, and goes on")
                    time.sleep(_PAUSE_SECONDS)
        finally:
            for stream in list(self._streams.values()):
                stream.close("dropped")
            self._streams.clear()
            self._network.close()
            self._mailbox.close()

    def _act(self) -> None:
        for call in self._mailbox.take():  # apart from the loop, which would keep the last one with its block
            call()

    def _tick(self) -> None:
        """Tell receivers that this side lives; give up those that have not said so."""
        now = time.monotonic()
        for (peer, fetch), stream in list(self._streams.items()):
            if stream.closed():
                continue  # by what was sent to its peer just now
            if now - stream.heard > self.options.silence_timeout:
                self._close(peer, fetch, "late")
            else:
                self._send(peer, Alive(fetch))
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
                self._handle(peer, decode(frames[0], TO_SENDER))
            except ValueError as error:
                self._rejected.add(shorten(str(error)))
            except Exception:
                _LOG.exception("longctx: a message of a transfer could not be handled")

    def _handle(self, peer: bytes, message: Open | Grant | Pulled | Close | Release) -> None:
        if isinstance(message, Open):
            self._open(peer, message)
        elif isinstance(message, Release):
            self._exporter.release(message.lease)
        elif (stream := self._streams.get((peer, message.fetch))) is not None:
            stream.heard = time.monotonic()
            try:
                if isinstance(message, Grant):
                    stream.grant(message.blocks)
                elif isinstance(message, Pulled):
                    stream.free(message.slot)
                else:
                    self._close(peer, message.fetch, "dropped")
            except ValueError:
                self._close(peer, message.fetch, "malformed")
                raise

    def _open(self, peer: bytes, message: Open) -> None:
        if (peer, message.fetch) in self._streams:
            raise ValueError("a transfer was opened twice")
        find = functools.partial(self._find, message)
        patience = max(self._patience, message.patience / 1000)
        try:
            self._check(message)
            try:
                found = find()
            except LeaseGone:
                if not patience:
                    raise
                found = None
        except (LeaseGone, ValueError) as error:
            reason = shorten(str(error)) or "the lease is gone"
        except Exception:
            _LOG.exception("longctx: a lease could not be opened")
            reason = "the sender failed"
        else:
            stream = SendStream(
                message.fetch,
                functools.partial(self._post, peer),
                self.stats,
                functools.partial(self._queue.put, peer),
                self._staging,
            )
            self._streams[peer, message.fetch] = stream
            self._send(peer, Opened(message.fetch, self._layout, self._fingerprint))
            wait = functools.partial(wait_for_lease, find, patience, stream.closed)
            try:
                stream.start(self._exporter, wait if found is None else lambda: found, self._options_for(message))
            except RuntimeError:  # there are as many threads as there may be
                self._fail(peer, message.fetch)
            return
        self.stats.add_outcome("refused")
        self._send(peer, Refused(message.fetch, reason))

    def _find(self, message: Open) -> tuple[Lease, Wanted]:
        """The lease that a receiver asks for, and where in it. Raises ValueError or LeaseGone: it does not get it."""
        lease = self._exporter.open(message.lease)
        self._layout.check_same(lease.layout, "the lease")
        return lease, find_wanted(lease, message.keys, part_of(message))

    def _check(self, message: Open) -> None:
        """ValueError, unless this sender and a receiver fit together."""
        if message.version != VERSION:
            raise ValueError(f"the sender speaks version {VERSION} of transfers, not {message.version}")
        self._layout.check_same(message.layout, "the receiver")
        if message.fingerprint != self._fingerprint:
            raise ValueError("the pages are of another model or of other weights")
        if len(self._streams) >= self.options.max_streams:
            raise ValueError(f"the sender serves {len(self._streams)} transfers already")
        self._options_for(message).check_fits(self._layout)

    def _options_for(self, message: Open) -> TransferOptions:
        return dataclasses.replace(self.options, block_bytes=min(self.options.block_bytes, message.block_bytes))

    def _close(self, peer: bytes, fetch: int, outcome: Outcome) -> None:
        stream = self._streams.pop((peer, fetch), None)
        if stream is not None:  # else it was closed by what was sent meanwhile
            stream.close(outcome)

    def _fail(self, peer: bytes, fetch: int) -> None:
        """End one transfer, in the midst of handling an error of its own."""
        _LOG.exception("longctx: a transfer failed")
        self._close(peer, fetch, "failed")

    def _post(self, peer: bytes, message: FromSender, data: Any) -> None:
        """Send a message from any thread."""
        frames = [encode(message)] if data is None else [encode(message), data]
        self._mailbox.post(lambda: self._send_frames(peer, message.fetch, frames))

    def _send(self, peer: bytes, message: FromSender) -> None:
        self._send_frames(peer, message.fetch, [encode(message)])

    def _send_frames(self, peer: bytes, fetch: int, frames: list[Any]) -> None:
        """Send a message of a transfer; an error ends the transfer, and a peer that is gone all of its own."""
        try:
            # Without a threshold below which it copies: what is copied would leave the queue before it is sent.
            header, *data = frames
            sent = [peer, header, *(zmq.Frame(each, copy=False, copy_threshold=0) for each in data)]
            self._socket.send_multipart(sent, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                self._fail(peer, fetch)
                return
            for other, number in list(self._streams):
                if other == peer:
                    self._close(other, number, "lost")
        except Exception:
            self._fail(peer, fetch)
