"""KV events: which full pages an engine can find, told to routers in vLLM's wire form as they come and go.

What is sent are msgpack batches `[time, events, rank]`, one for each step that changed something, each event a map
with its name as `type`. They are numbered from 0 without gaps, so whoever misses some asks for them
(`kv_publisher.py`). Keys of pages are hashes under the engine's secret key, of which 64 bits are sent; consumers that
compare prompts hash `token_ids` their own way. So whoever reads the events reads prompts.
"""

import time
from collections.abc import Callable

import msgspec
import numpy as np

from longctx.serving.engine.load import StepReport
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.page_pool import Key

_MEDIUM, _KIND = "GPU", "full_attention"


class _Event(msgspec.Struct, tag=True, omit_defaults=True):
    """An event; the tag is the name of its class, in the field `type`."""


class BlockStored(_Event):
    """Consecutive pages can be found. `extra_keys` has the salt of the first page of a salted prompt."""

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
    """What a page's key is sent as: 64 of its 128 bits."""
    return int.from_bytes(key[:8], "big")


class _Stored(msgspec.Struct, gc=False):
    parent: Key | None
    keys: list[Key]
    tokens: np.ndarray
    salt: str


_Change = _Stored | list[Key] | None
"""Pages stored, removed, or None where there is none left."""


class KvEvents:
    """Listens to an engine's page pool, and hands on what each step changed; another thread makes messages of it.

    Args:
      thread: of an engine that caches prefixes. Its pool's listener is this object from now on.
      publish: is called after a step with a function that returns the step's encoded batch. It must not block.

    Raises:
      ValueError: the engine does not cache prefixes, or has a listener already.
    """

    def __init__(self, thread: EngineThread, publish: Callable[[Callable[[], bytes]], object]) -> None:
        engine = thread.engine
        pool = engine.core.pool
        if not engine.config.prefix_cache:
            raise ValueError("kv_events need prefix_cache=True: without it no page is ever found")
        if pool.listener is not None:
            raise ValueError("the engine's pages have a listener already")
        self._page_size, self._publish = engine.config.page_size, publish
        self._announced: set[Key] = set()
        self._changes: list[_Change] = []
        pool.listener = self
        thread.on_step.append(self.flush)

    # In the engine's thread, within a step.

    def stored(self, parent: Key | None, keys: list[Key], tokens: np.ndarray, salt: str) -> None:
        self._announced.update(keys)
        self._changes.append(_Stored(parent, keys, tokens, salt))

    def removed(self, key: Key) -> None:
        if key in self._announced:
            self._announced.remove(key)
            last = self._changes[-1] if self._changes else None
            if isinstance(last, list):
                last.append(key)
            else:
                self._changes.append([key])

    def cleared(self) -> None:
        if not self._announced:
            self._changes.append(None)

    def flush(self, report: StepReport | None = None) -> None:
        """Hand on what has changed since the last time."""
        if self._changes:
            changes, self._changes = self._changes, []
            now, page_size = time.time(), self._page_size
            self._publish(lambda: encode(changes, page_size, now))


_ENCODER = msgspec.msgpack.Encoder()


def encode(changes: list[_Change], page_size: int, now: float) -> bytes:
    """The batch of a step's changes."""
    return _ENCODER.encode(EventBatch(now, [_event(change, page_size) for change in changes], 0))


def _event(change: _Change, page_size: int) -> Event:
    if change is None:
        return AllBlocksCleared()
    if isinstance(change, list):
        return BlockRemoved(list(map(block_hash, change)), _MEDIUM, 0)
    is_salted = change.salt and change.parent is None
    return BlockStored(
        list(map(block_hash, change.keys)),
        None if change.parent is None else block_hash(change.parent),
        change.tokens.tolist(),
        page_size,
        None,
        _MEDIUM,
        None,
        [(change.salt,), *[None] * (len(change.keys) - 1)] if is_salted else None,
        0,
        _KIND,
    )
