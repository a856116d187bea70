"""`EngineMessenger`: sends and fetches pages in each process of an engine.

Each process sends the pages of its own devices, and fetches what these want. The first one decides what is fetched
from where, and tells the others (`orders.Located`).

Source: Mooncake, section 3 (the messenger of an instance), and 4.1 (instances of several nodes).
"""

import contextlib
from collections.abc import Sequence as List
from typing import Any

from longctx.cluster.config import Messenger
from longctx.cluster.pending_pages import PendingSource
from longctx.cluster.server_url import host_port
from longctx.cluster.transfer import PageReceiver, PageSender, TransferOptions
from longctx.cluster.transfer.mooncake import MooncakePuller, MooncakeStaging, make_engine
from longctx.cluster.transfer.zmq_receiver import RemoteSource
from longctx.serving.engine.engine import Engine
from longctx.serving.kv_cache.connector import WHOLE, LeasedSource, Needed, PageFetch
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.runner.page_transfer import process_part
from longctx.serving.server.settings import is_loopback

MESSENGERS: dict[Messenger, str | None] = {"zmq": None, "mooncake-tcp": "tcp", "mooncake-rdma": "rdma"}
"""Carriers of pages: ZeroMQ alone, or Mooncake's transfer engine by this protocol. All servers take the same."""

_LAG_SECONDS = 10.0  # by which a process may be behind the first one, at most
_MOST_SECONDS = 3600.0  # a process waits for pages until the first one has its own
_LATE_SECONDS = 30.0  # and then for so long after each block


class EngineMessenger:
    """Sender and receiver of one process of an engine; every process has to make one.

    Args:
      ip, port: where others fetch pages; port 0: any free one. Of several processes of one host each has the next port.
      secret: what all instances share, see `PageSender`. is_plain: pages are not encrypted all the same.
      advertised: the host by which others reach this one; None: `ip`.
      messenger: of `MESSENGERS`.

    Attributes:
      engine: whose pages they are.
      host, port: where others fetch pages. followers: `host:port` of the other processes, in the first one.

    Raises:
      ValueError: the engine has no page keys, or processes contradict each other; an address or secret can't be.
      OSError: it can't listen there.
      ImportError, RuntimeError: the messenger is not there, or does not start.
    """

    def __init__(
        self,
        engine: Engine,
        ip: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        advertised: str | None = None,
        options: TransferOptions | None = None,
        messenger: Messenger = "zmq",
        is_plain: bool = False,
    ) -> None:
        if messenger not in MESSENGERS:
            raise ValueError(f"messenger must be one of {', '.join(MESSENGERS)}, got {messenger!r}")
        if engine.page_identity is None or not (engine.config.transfers and engine.config.prefix_cache):
            raise ValueError("engine must have transfers=True and prefix_cache=True in its configuration")
        layout, fingerprint = engine.page_identity
        group, options, protocol = engine.process_group, options or TransferOptions(), MESSENGERS[messenger]
        self.engine, self.host, self._group, self._pages = engine, advertised or ip, group, engine.pages
        if len(set(group.host_names)) > 1 and is_loopback(self.host):
            raise ValueError(f"ip must be one by which other hosts reach this process of several, got {self.host}")
        if port:
            port += group.host_names[: group.process_id].count(group.host_name)
        with contextlib.ExitStack() as stack:  # closes what was opened, in the reverse order
            staging = puller = None
            if protocol is not None:
                mooncake = make_engine(self.host, protocol)
                staging = MooncakeStaging(mooncake, self.host, options.max_blocks, options.block_bytes)
                stack.callback(staging.close)
                puller = MooncakePuller(mooncake, options.block_bytes)
            shared, lag = None if is_plain else secret, 0.0 if group.is_first else _LAG_SECONDS
            pages, part = engine.pages, None
            self.sender = PageSender(pages, layout, fingerprint, ip, port, shared, options, staging, is_plain, lag)
            stack.callback(self.sender.close)
            if group.num_processes > 1 and engine.mesh is not None:
                part = process_part(engine.mesh, engine.model.config)
            self.receiver = PageReceiver(layout, fingerprint, part, shared, options, puller)
            stack.callback(self.receiver.close)
            self.port = int(self.sender.address.rpartition(":")[2])
            group.agree("transfers", {"messenger": messenger, "is_plain": is_plain})
            addresses = group.gather("where its pages are", host_port(self.host, self.port))
            self.followers = addresses[1:]
            self._open = stack.pop_all()
        self._led: dict[str, _LedSource] = {}  # whose pages are being fetched
        self._followed: dict[str, PendingSource] = {}
        if self.followers and group.is_first:
            engine.pages.on_fetch.append(self._note_fetched)

    def close(self) -> None:
        """End all transfers."""
        self._open.close()

    # In the first process.

    def source(
        self, addresses: List[str], lease_id: str, deadline: float | None = None, lease_timeout: float = 0.0
    ) -> LeasedSource:
        """Make the source of the pages of a lease, which all processes fetch; see `PageReceiver.source`."""
        if not self.followers:
            return self.receiver.source(addresses, lease_id, deadline=deadline, lease_timeout=lease_timeout)
        inner = self.receiver.source(addresses, lease_id, release=False, deadline=deadline, lease_timeout=lease_timeout)
        return _LedSource(self, inner)

    def tell(self, source: "_LedSource", inner: RemoteSource) -> None:
        """Let the other processes fetch their parts, too."""
        self._led[inner.lease_id] = source
        place = {"addresses": inner.addresses, "deadline": inner.deadline, "lease_timeout": inner.lease_timeout}
        self._pages.locate(inner.lease_id, place)

    def forget(self, lease_id: str) -> None:
        """Note that the pages of a lease are not needed any more."""
        self._led.pop(lease_id, None)

    def _note_fetched(self, lease_id: str, is_everywhere: bool) -> None:
        """Note that a load has ended here, or in all processes: its sender may drop its pages only then."""
        if not is_everywhere:
            self._pages.locate(lease_id, None)
        elif (source := self._led.pop(lease_id, None)) is not None:
            source.release()

    # In the others: `LocatedSources`.

    def open(self, lease_id: str) -> PendingSource:
        # The first process says when the lease is not needed any more.
        source = self._followed[lease_id] = PendingSource(lambda: None, releases=False)
        source.page_timeout = _MOST_SECONDS
        return source

    def locate(self, lease_id: str, place: dict[str, Any] | None) -> None:
        source = self._followed.get(lease_id)
        if source is None:
            return  # its request has ended
        if place is None:
            source.settle()
            source.page_timeout = _LATE_SECONDS
        else:
            deadline, lease_timeout = place["deadline"], place["lease_timeout"]
            inner = self.receiver.source(place["addresses"], lease_id, False, deadline, lease_timeout)
            source.begin(inner, _MOST_SECONDS)

    def drop(self, lease_id: str) -> None:
        source = self._followed.pop(lease_id, None)
        if source is not None:
            source.release()


class _LedSource:
    """Source of the first process, which tells the others when a load begins to fetch."""

    def __init__(self, messenger: EngineMessenger, inner: RemoteSource) -> None:
        self._messenger, self._inner = messenger, inner

    def fetch(self, keys: List[Key], wake: Any, needed: Needed = WHOLE) -> PageFetch:
        self._messenger.tell(self, self._inner)
        return self._inner.fetch(keys, wake, needed)

    def release(self) -> None:
        self._messenger.forget(self._inner.lease_id)
        self._inner.release()
