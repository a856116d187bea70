"""`PrefixIndex`: the instances that hold each block, and the tiers in which they hold it."""

import sys
import threading
from array import array
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Literal, get_args

import numpy as np

Tier = Literal["device", "host", "disk"]
"""The memory in which an instance keeps a block."""

TIERS: tuple[Tier, ...] = get_args(Tier)
"""The quickest first; KV events call them GPU, CPU and STORAGE."""

_BITS = len(TIERS)
_INT_BYTES = 36  # of a 64-bit key as a Python integer


class PrefixIndex:
    """A dict from the key of each block to a bit mask of its holders. Any thread may call it.

    A key is the 64-bit hash of a block and of all before it, as KV events carry it. A mask has 3 bits for each
    instance, one for each tier.

    Source:
      Mooncake, 3 and 5 (the conductor knows which instance has which blocks).

    Examples:
      >>> import numpy as np
      >>> from longctx.cluster.prefix_index.index import PrefixIndex
      >>> index = PrefixIndex()
      >>> index.store("prefill-0", "device", [11, 12])  # by its KV events
      >>> index.store("prefill-0", "host", [13])
      >>> index.store("prefill-1", "host", [11])
      >>> prompt = np.array([11, 12, 13, 99], np.uint64)
      >>> index.match(prompt)  # leading blocks
      {'prefill-1': 1, 'prefill-0': 3}
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}  # of the holders of each key
        self._used: dict[int, int] = {}  # seconds of the last use of each key
        self._held: dict[tuple[str, Tier], dict[int, None]] = {}  # keys of each holder, in the order of their storing
        self._names: list[str | None] = []  # instances by the place of their bits; None: the place is free
        self._shifts: dict[str, int] = {}
        self._now = 0
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks that an instance holds."""
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of all keys and dicts."""
        dicts = [self._masks, self._used, *list(self._held.values())]
        return sum(map(sys.getsizeof, dicts)) + _INT_BYTES * len(self._masks)

    @property
    def instances(self) -> list[str]:
        """Names of the instances that hold a block or held one."""
        with self._lock:
            return list(self._shifts)

    def blocks(self, instance: str, tier: Tier) -> int:
        """Return the number of blocks that an instance holds in a tier."""
        return len(self._held.get((instance, tier), ()))

    def store(self, instance: str, tier: Tier, keys: Iterable[int]) -> None:
        """Add blocks to those that an instance holds in a tier; what it holds already changes nothing.

        Args:
          instance: its name.
          tier: where it keeps them.
          keys: of the blocks, in [0, 2^64).

        Raises:
          TypeError, OverflowError: a key is no such number.
        """
        wanted = _key_list(keys)
        with self._lock:
            bit = self._bit(instance, tier)
            masks, held = self._masks, self._held.setdefault((instance, tier), {})
            old = new = 0  # consecutive blocks mostly have the same holders, and share one integer
            for key in wanted:
                mask = masks.get(key, 0)
                if not mask:
                    self._used[key] = self._now
                if mask != old or not new:
                    old, new = mask, mask | bit
                if new != old:
                    masks[key] = new
                    held[key] = None

    def remove(self, instance: str, tier: Tier, keys: Iterable[int]) -> None:
        """Remove blocks from those that an instance holds in a tier; what it does not hold changes nothing.

        Args:
          instance: its name.
          tier: where it kept them.
          keys: of the blocks, in [0, 2^64).

        Raises:
          TypeError, OverflowError: a key is no such number.
        """
        wanted = _key_list(keys)
        with self._lock:
            held = self._held.get((instance, tier))
            if held:
                self._drop(instance, tier, [key for key in dict.fromkeys(wanted) if key in held])

    def clear(self, instance: str, tier: Tier | None = None) -> None:
        """Remove all blocks that an instance holds in one tier, or (None) in all of them."""
        with self._lock:
            for each in TIERS if tier is None else [tier]:
                self._drop(instance, each, list(self._held.get((instance, each), ())))
                self._held.pop((instance, each), None)
            if tier is None and instance in self._shifts:
                self._names[self._shifts.pop(instance) // _BITS] = None

    def keys(self, instance: str, tier: Tier) -> np.ndarray:
        """Return the keys of all blocks that an instance holds in a tier, uint64 `[blocks]`."""
        with self._lock:
            return np.array([*self._held.get((instance, tier), ())], np.uint64)

    def match(self, keys: np.ndarray) -> dict[str, int]:
        """Count the leading blocks of a request that each instance holds, in whatever tier.

        Args:
          keys: of the blocks in order, uint64 `[blocks]`.

        Returns:
          By the name of each instance that holds the first block.
        """
        wanted = _check(keys).tolist()
        matches: dict[str, int] = {}
        with self._lock:
            left, last = self._lowest, 0
            for count, mask in enumerate(map(self._masks.get, wanted)):
                if mask == last:
                    continue
                holders = 0 if mask is None else left & (mask | mask >> 1 | mask >> 2)
                if holders != left:
                    self._add_matches(matches, left & ~holders, count)
                    left = holders
                if not left:
                    return matches
                last = mask or 0
            self._add_matches(matches, left, len(wanted))
        return matches

    def count_by_tier(self, keys: np.ndarray) -> dict[Tier, int]:
        """Return how many of some blocks, uint64 `[blocks]`, some instance holds in each tier."""
        with self._lock:
            masks = [self._masks.get(key, 0) for key in _check(keys).tolist()]
            return {tier: sum(mask & self._lowest << bit > 0 for mask in masks) for bit, tier in enumerate(TIERS)}

    def touch(self, keys: np.ndarray, now: float) -> None:
        """Note that the leading blocks that are there have been used; new blocks have the last such time.

        Args:
          keys: of the blocks in order, uint64 `[blocks]`.
          now: seconds of the caller's clock.
        """
        wanted = _check(keys).tolist()
        with self._lock:
            self._now = max(self._now, int(now))
            self._used.update(dict.fromkeys(takewhile(self._masks.__contains__, wanted), self._now))

    def cold(self, instance: str, tier: Tier, before: float, limit: int, held_by: int = 1) -> np.ndarray:
        """Return the keys of blocks that an instance holds in a tier and that have not been used for long.

        The longest unused come first, and of those the last ones of a prefix: without its head a tail is of no use.

        Args:
          instance: its name.
          tier: where it holds them.
          before: seconds of the caller's clock, since when they have not been used.
          limit: the most keys.
          held_by: the number of instances that must hold a block at least, in whatever tier.

        Returns:
          uint64 `[blocks]`.
        """
        with self._lock:
            held = self._held.get((instance, tier), {})
            keys = np.fromiter(held, np.uint64, len(held))
            used = np.fromiter(map(self._used.__getitem__, held), np.int64, len(held))
            places = np.flatnonzero(used < before)[::-1]
            keys = keys[places[np.argsort(used[places], kind="stable")]]
            if held_by > 1:
                shared = (key for key in keys.tolist() if self._num_holders(key) >= held_by)
                keys = np.array([*islice(shared, limit)], np.uint64)
            return keys[:limit]

    # With the lock held.

    def _bit(self, instance: str, tier: Tier) -> int:
        if instance not in self._shifts:
            place = self._names.index(None) if None in self._names else len(self._names)
            self._names[place : place + 1] = [instance]
            self._shifts[instance] = _BITS * place
        return 1 << self._shifts[instance] + TIERS.index(tier)

    def _drop(self, instance: str, tier: Tier, keys: list[int]) -> None:
        """Take distinct blocks from an instance that holds them."""
        if not keys:
            return
        bit, masks, held = self._bit(instance, tier), self._masks, self._held[instance, tier]
        old = new = 0
        for key in keys:
            if (mask := masks[key]) != old:
                old, new = mask, mask & ~bit
            if new:
                masks[key] = new
            else:
                del masks[key], self._used[key]
            del held[key]

    @property
    def _lowest(self) -> int:
        """The lowest bits of all instances."""
        return (1 << _BITS * len(self._names)) // (2**_BITS - 1)

    def _num_holders(self, key: int) -> int:
        mask = self._masks[key]
        return ((mask | mask >> 1 | mask >> 2) & self._lowest).bit_count()

    def _add_matches(self, matches: dict[str, int], holders: int, count: int) -> None:
        """Add the matches of instances, given by their lowest bits, that hold the leading `count` blocks."""
        while holders and count:
            shift = (holders & -holders).bit_length() - 1
            holders &= holders - 1
            if (name := self._names[shift // _BITS]) is not None:
                matches[name] = count


def _key_list(keys: Iterable[int]) -> list[int]:
    return _check(keys).tolist() if isinstance(keys, np.ndarray) else array("Q", keys).tolist()


def _check(keys: np.ndarray) -> np.ndarray:
    if keys.dtype != np.uint64 or keys.ndim != 1:
        raise TypeError(f"keys must be uint64 [blocks], got {keys.dtype} {list(keys.shape)}")
    return keys
