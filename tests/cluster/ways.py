"""The ways of transfer behind one interface, so that one suite tests all of them."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from cluster.fake_engine import LAYOUT, FakeEngine, wait_until

from longctx.cluster.transfer.local import LocalReceiver
from longctx.cluster.transfer.mooncake import MooncakePuller, MooncakeStaging, make_engine
from longctx.cluster.transfer.options import TransferOptions
from longctx.cluster.transfer.zmq_receiver import PageReceiver
from longctx.cluster.transfer.zmq_sender import PageSender
from longctx.serving.kv_cache.page_layout import PageLayout, PageSlice

SECRET = "0123456789abcdef" * 4
OPTIONS = TransferOptions(block_bytes=1 << 12, read_bytes=1 << 14, window_blocks=3, max_blocks=8, silence_timeout=2.0)


NUM_SLOTS = 5  # of the sender's registered memory, fewer than blocks that are granted


class Way:
    """One sending engine and one receiver.

    Attributes:
      sent, received: statistics of either side; the local way has one for both.
    """

    def __init__(self, name: str, engine: FakeEngine, sender: PageSender | None, receiver: Any) -> None:
        self.name, self.engine, self.sender, self.receiver = name, engine, sender, receiver
        self.received = receiver.stats
        self.sent = sender.stats if sender is not None else receiver.stats
        self._fingerprint = b""

    def source(self, lease_id: str, **more: Any) -> Any:
        if self.sender is None:
            return self.receiver.source(self.engine, lease_id, self.engine.layout, **more)
        return self.receiver.source(self.sender.address, lease_id, **more)


NAMES = ["local", "zmq", "curve", "mooncake"]


@cache
def mooncake_engine(side: str) -> Any:
    """A transfer engine per side: it lives as long as the process."""
    try:
        return make_engine("127.0.0.1")
    except ImportError as error:
        return pytest.skip(str(error))


@contextlib.contextmanager
def open_way(
    name: str,
    engine: FakeEngine | None = None,
    layout: PageLayout = LAYOUT,
    part: PageSlice | None = None,
    options: TransferOptions = OPTIONS,
) -> Iterator[Way]:
    """Connect an engine to a receiver of pages of `layout`."""
    engine = engine or FakeEngine()
    if name == "local":
        yield Way(name, engine, None, LocalReceiver(layout, part=part, options=options))
        return
    secret = SECRET if name == "curve" else None
    staging = puller = None
    if name == "mooncake":
        staging = MooncakeStaging(mooncake_engine("sender"), "127.0.0.1", NUM_SLOTS, options.block_bytes)
        puller = MooncakePuller(mooncake_engine("receiver"), options.block_bytes)
    with (
        PageSender(engine, engine.layout, secret=secret, options=options, staging=staging) as sender,
        PageReceiver(layout, part=part, secret=secret, options=options, puller=puller) as receiver,
    ):
        yield Way(name, engine, sender, receiver)
        if staging is not None:
            receiver.close()
            wait_until(lambda: staging.num_free == NUM_SLOTS)
    if staging is not None:
        staging.close()
