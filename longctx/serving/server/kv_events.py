"""KV events: the full pages that an engine can find, published to routers in vLLM's wire form.

Messages are msgpack batches `[time, events, rank]`, one for each step that changed something, each event a map
with its name as `type`. They are numbered from 0 without gaps, so a subscriber that misses some asks for them
(`kv_publisher.py`). Keys of pages are hashes under the engine's secret key, of which 64 bits are sent: a router with
the secret needs no more. Other routers hash `token_ids` their own way; these are sent if they are asked for, and then
readers of the events read prompts.

Pages that come to host memory or disk, and leave it, are events of other media, without tokens: those were in the event
of the same hash on the devices.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.prefix import KEY_BYTES
from longctx.serving.kv_cache.tiers.store import TieredStore

KIND = "full_attention"
_MEDIUM = "GPU"
_MEDIA = {"host": "CPU", "disk": "STORAGE"}
_INTERVAL = 0.1  # seconds, at most, for which changes of tiers wait while no step runs


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event; the tag is the name of its class, in the field `type`."""


class BlockStored(_Event):
    """Consecutive pages can be found. `extra_keys` has the salt of the first page of a salted prompt.

    `token_ids` is empty of pages beyond the devices, and of all where tokens are not asked for.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int  # of a page, whatever ranks share it
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(_Event):
    """Pages can be found no more."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """No page can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step, in order; `ts` is seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int


def block_hash(key: Key) -> int:
    """Return the 64 of a page key's 128 bits that are sent."""
    return int.from_bytes(key[:8], "big")


def block_hashes(keys: Sequence[Key]) -> np.ndarray:
    """Return those of all keys, uint64 `[keys]`."""
    return np.frombuffer(b"".join(keys), ">u8")[:: KEY_BYTES // 8].astype(np.uint64)


class _Change(NamedTuple):
    """Consecutive pages that can be found in a medium from now on, or, without `is_stored`, no more.

    `tokens`: if they are sent. `salt`: of pages on the devices.
    """

    medium: str
    keys: list[Key]
    is_stored: bool
    parent: Key | None = None
    tokens: np.ndarray | None = None
    salt: str = ""


class TierChanges:
    """A `TierListener` that collects changes; any thread may call it."""

    def __init__(self) -> None:
        self.num_pages = 0  # in all tiers
        self.has_some = threading.Event()
        self._changes: list[_Change] = []
        self._lock = threading.Lock()

    def stored(self, tier: str, key: Key, parent: Key) -> None:
        self._add(_Change(_MEDIA[tier], [key], True, parent))

    def removed(self, tier: str, key: Key) -> None:
        self._add(_Change(_MEDIA[tier], [key], False))

    def _add(self, change: _Change) -> None:
        with self._lock:
            self.num_pages += 1 if change.is_stored else -1
            last = self._changes[-1] if self._changes else None
            follows = not change.is_stored or (last is not None and last.keys[-1] == change.parent)
            if last is not None and follows and (last.medium, last.is_stored) == (change.medium, change.is_stored):
                last.keys.extend(change.keys)
            else:
                self._changes.append(change)
        self.has_some.set()

    def take(self) -> list[_Change]:
        """Return all changes since the last call."""
        with self._lock:
            self.has_some.clear()
            changes, self._changes = self._changes, []
        return changes


class KvEvents:
    """Listener of an engine's page pool and tiers that hands on the changes of each step; another thread encodes them.

    `publish` is called after a step with a function that returns the step's encoded batch. It must not block.
    `with_tokens`: whether events have the tokens of pages, which are prompts.
    """

    def __init__(
        self, thread: EngineThread, publish: Callable[[Callable[[], bytes]], object], with_tokens: bool = False
    ) -> None:
        engine = thread.engine
        pool = engine.core.pool
        if not engine.config.prefix_cache:
            raise ValueError("kv_events need prefix_cache=True: without it no page is ever found")
        if pool.listener is not None:
            raise ValueError("the engine's pages have a listener already")
        self._page_size, self._publish, self._with_tokens = engine.config.page_size, publish, with_tokens
        self._announced: set[Key] = set()
        self._changes: list[_Change | None] = []  # None: nothing is left
        self._handing_on = threading.Lock()
        self._tiers = TierChanges()
        self._is_closed = False
        pool.listener = self
        thread.on_step.append(self.flush)
        engine.pages.on_evict.append(self.flush)  # no step may follow for long
        store = engine.pages.store
        self._thread: threading.Thread | None = None
        if isinstance(store, TieredStore):
            store.listen(self._tiers)
            self._thread = threading.Thread(target=self._tell_of_tiers, name="longctx-tier-events", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End its thread."""
        self._is_closed = True
        self._tiers.has_some.set()
        if self._thread is not None:
            self._thread.join()

    # In the engine's thread, within a step.

    def stored(self, parent: Key | None, keys: list[Key], tokens: np.ndarray, salt: str) -> None:
        self._announced.update(keys)
        self._changes.append(_Change(_MEDIUM, keys, True, parent, tokens if self._with_tokens else None, salt))

    def removed(self, key: Key) -> None:
        if key in self._announced:
            self._announced.remove(key)
            last = self._changes[-1] if self._changes else None
            if last is not None and not last.is_stored:
                last.keys.append(key)
            else:
                self._changes.append(_Change(_MEDIUM, [key], False))

    def cleared(self) -> None:
        if not self._announced and not self._tiers.num_pages:
            self._changes.append(None)

    def flush(self, *step: object) -> None:
        """Hand on the changes since the last call."""
        with self._handing_on:
            changes, self._changes = self._changes, []
            self._hand_on([*changes, *self._tiers.take()])

    def _hand_on(self, changes: Sequence[_Change | None]) -> None:
        if changes:
            now, page_size = time.time(), self._page_size
            self._publish(lambda: encode(changes, page_size, now))

    # In a thread of its own: tiers change while no step runs, too.

    def _tell_of_tiers(self) -> None:
        while not self._is_closed:
            self._tiers.has_some.wait()
            time.sleep(_INTERVAL)
            with self._handing_on:
                if not self._changes:  # else the end of the step tells of pages on the devices, and then of others
                    self._hand_on(self._tiers.take())


_ENCODER = msgspec.msgpack.Encoder()


def encode(changes: Sequence[_Change | None], page_size: int, now: float) -> bytes:
    """Encode the batch of a step's changes."""
    return _ENCODER.encode(EventBatch(now, [_event(change, page_size) for change in changes], 0))


def _event(change: _Change | None, page_size: int) -> Event:
    if change is None:
        return AllBlocksCleared()
    medium, keys, is_stored, parent, tokens, salt = change
    hashes = list(map(block_hash, keys))
    if not is_stored:
        return BlockRemoved(hashes, medium, 0)
    return BlockStored(
        hashes,
        block_hash(parent) if parent else None,
        [] if tokens is None else tokens.tolist(),
        page_size,
        None,
        medium,
        None,
        [(salt,), *[None] * (len(keys) - 1)] if salt and parent is None else None,
        0,
        KIND,
    )
