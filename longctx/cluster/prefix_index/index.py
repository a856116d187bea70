"""`PrefixIndex`: which instances hold which blocks."""

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from longctx.cluster.prefix_index.holders import HolderSets
from longctx.cluster.prefix_index.key_table import FREE, KeyTable
from longctx.cluster.prefix_index.tiers import TIERS, Match, Tier

_FEW = 40  # keys up to which plain Python is quicker than numpy


class PrefixIndex:
    """Keys of blocks, and who holds them in which tier. Any thread may call it.

    A key is the 64-bit hash of a block and of all before it, as KV events carry it. Each block has the number of its
    set of holders, and most blocks share their sets with many others.

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
      >>> for name, match in sorted(index.match(prompt).items()):
      ...     print(name, match)
      prefill-0 Match(blocks=3, device=2, host=1, disk=0)
      prefill-1 Match(blocks=1, device=0, host=1, disk=0)
    """

    def __init__(self) -> None:
        self._table = KeyTable()
        self._holders = HolderSets()
        self._blocks: Counter[int] = Counter()  # by the mask of one holder
        self._now = 0
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody holds."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Of all arrays, and about those of the sets of holders."""
        return self._table.num_bytes + self._holders.num_bytes

    @property
    def instances(self) -> list[str]:
        """That hold something."""
        with self._lock:
            return self._holders.names

    def blocks(self, instance: str, tier: Tier) -> int:
        """How many an instance holds in a tier."""
        return self._blocks[self._holders.mask(instance, tier)]

    def store(self, instance: str, tier: Tier, keys: Iterable[int]) -> None:
        """An instance has got blocks, keys in [0, 2^64); what it has already changes nothing.

        Args:
          instance: its name.
          tier: where it keeps them, or kept.
          keys: of the blocks.

        Raises:
          TypeError, OverflowError: a key is no such number.
        """
        wanted = _keys(keys)
        with self._lock:
            mask = self._holders.add(instance, tier)
            if len(wanted) <= _FEW:
                self._store_few(wanted, mask)
            else:
                self._store_all(_distinct(np.frombuffer(wanted, np.uint64)), mask)

    def remove(self, instance: str, tier: Tier, keys: Iterable[int]) -> None:
        """An instance has lost blocks; what it does not have changes nothing.

        Args:
          instance: its name.
          tier: where it keeps them, or kept.
          keys: of the blocks.

        Raises:
          TypeError, OverflowError: a key is no number in [0, 2^64).
        """
        wanted = _keys(keys)
        with self._lock:
            mask = self._holders.mask(instance, tier)
            if len(wanted) <= _FEW:
                self._remove_few(wanted, mask)
            else:
                at = self._table.find_all(_distinct(np.frombuffer(wanted, np.uint64)))
                self._drop(at[at != 0], mask)

    def clear(self, instance: str, tier: Tier | None = None) -> None:
        """An instance holds nothing any more, in one tier or (None) in none."""
        with self._lock:
            for each in TIERS if tier is None else [tier]:
                mask = self._holders.mask(instance, each)
                if self._blocks[mask]:
                    self._drop(self._where(mask), mask)
                del self._blocks[mask]
            if tier is None and self._holders.mask(instance):
                self._holders.forget(instance)

    def keys(self, instance: str, tier: Tier) -> np.ndarray:
        """The keys of all blocks that an instance holds in a tier, in no order.

        Returns:
          uint64 `[blocks]`.
        """
        with self._lock:
            return self._table.keys.array[self._where(self._holders.mask(instance, tier))]

    def match(self, keys: np.ndarray) -> dict[str, Match]:
        """What each instance holds of the leading blocks of a request; those that do not hold the first are left out.

        Args:
          keys: of the blocks in order, uint64 `[blocks]`.
        """
        matches = {}
        for name, blocks in self._leading(keys):
            device, host = sum(blocks[1::2]), blocks[2] + blocks[6]
            matches[name] = Match(sum(blocks), device, host, blocks[4])
        return matches

    def availability(self, keys: np.ndarray) -> dict[str, Match]:
        """As `match`, but a block that is in several tiers counts in each of them.

        Returns:
          By the name of each instance.
        """
        matches = {}
        for name, blocks in self._leading(keys):
            tiers = (sum(count for i, count in enumerate(blocks) if i >> tier & 1) for tier in range(len(TIERS)))
            matches[name] = Match(sum(blocks), *tiers)
        return matches

    def touch(self, keys: np.ndarray, now: float) -> None:
        """The leading blocks that are there have been used; new blocks have the last such time.

        Args:
          keys: of the blocks in order, uint64 `[blocks]`.
          now: seconds of the caller's clock.
        """
        with self._lock:
            self._now = max(self._now, int(now))
            self._table.used.array[self._table.find_leading(_check(keys))] = self._now

    def cold(self, instance: str, tier: Tier, before: float, limit: int, held_by: int = 1) -> np.ndarray:
        """The keys of blocks that an instance holds in a tier and nobody has used for long.

        The longest unused come first, and of those the last ones of a prefix: without its head a tail is of no use.

        Args:
          instance: its name.
          tier: where it holds them.
          before: seconds of the caller's clock, since when nobody has used them.
          limit: the most keys.
          held_by: only those that at least so many instances hold, in whatever tier.

        Returns:
          uint64 `[blocks]`.
        """
        with self._lock:
            holders, used = self._holders, self._table.used.array
            mask = holders.mask(instance, tier)
            at = self._where(mask, held_by)
            at = at[used[at] < before]
            order = used[at].astype(np.uint64) << np.uint64(32) | (FREE - at)
            if len(at) > limit:
                first = np.argpartition(order, limit)[:limit]
                at, order = at[first], order[first]
            return self._table.keys.array[at[np.argsort(order)]]

    # Within; the lock is held.

    def _where(self, mask: int, held_by: int = 1) -> np.ndarray:
        """Positions, uint32 `[n]`, of all blocks that a holder has, and that many instances."""
        holders = self._holders
        is_wanted = np.array([bool(held & mask) and holders.num_instances(held) >= held_by for held in holders.masks])
        sets = self._table.values.array
        if not is_wanted.any():
            return np.zeros(0, np.uint32)
        step = 1 << 20  # blocks at a time: what is made on the way stays small
        found = [np.flatnonzero(is_wanted[sets[i : i + step]]) + i for i in range(0, len(sets), step)]
        return np.concatenate(found).astype(np.uint32)

    def _leading(self, keys: np.ndarray) -> list[tuple[str, list[int]]]:
        """Of each instance with leading blocks, how many are in each combination of tiers: 1 device, 2 host, 4 disk."""
        found = []
        with self._lock:
            sets = self._table.values.array[self._table.find_leading(_check(keys))]
            if not len(sets):
                return []
            starts = np.flatnonzero(np.concatenate([[True], sets[1:] != sets[:-1]]))
            lengths = np.diff(starts, append=len(sets))
            distinct, first_run, run_set = np.unique(sets[starts], return_index=True, return_inverse=True)
            masks = [self._holders.masks[number] for number in distinct.tolist()]
            for instances, stop in self._ends(masks, first_run, len(starts)):
                blocks = np.bincount(run_set[:stop], lengths[:stop], len(masks)).astype(np.int64).tolist()
                for name, shift in self._holders.split(instances):
                    combinations = [0] * (1 << len(TIERS))
                    for mask, count in zip(masks, blocks, strict=True):
                        combinations[mask >> shift & 7] += count
                    found.append((name, combinations))
        return found

    def _ends(self, masks: list[int], first_run: np.ndarray, runs: int) -> list[tuple[int, int]]:
        """Instances, as a mask, and the run of blocks before which their leading blocks end."""
        ends = []
        order = np.argsort(first_run).tolist()
        left = self._holders.instances(masks[order[0]])
        for i in order[1:]:
            still = left & self._holders.instances(masks[i])
            if still != left:
                ends.append((left & ~still, int(first_run[i])))
                left = still
            if not left:
                return ends
        return [*ends, (left, runs)]

    def _store_few(self, keys: Iterable[int], mask: int) -> None:
        table, holders = self._table, self._holders
        old = new = -1  # mostly the next block has the same holders as the last one
        changed = moved = 0
        for key in keys:
            bucket = table.bucket(key)
            if at := table.find(key, bucket):
                held = table.values.view[at]
            else:
                at, held = table.insert(key, bucket), 0
                table.used.view[at] = self._now
            if held != old:
                holders.move(old, new, moved)
                old, new, moved = held, holders.number(holders.masks[held] | mask), 0
            if new != old:
                table.values.view[at] = new
                moved += 1
                changed += 1
        holders.move(old, new, moved)
        self._blocks[mask] += changed

    def _remove_few(self, keys: Iterable[int], mask: int) -> None:
        table, holders = self._table, self._holders
        old = new = -1
        changed = moved = 0
        for key in keys:
            bucket = table.bucket(key)
            if not (at := table.find(key, bucket)):
                continue
            if (held := table.values.view[at]) != old:
                holders.move(old, new, moved)
                old, new, moved = held, holders.number(holders.masks[held] & ~mask), 0
            if new != old:
                table.values.view[at] = new
                moved += 1
                changed += 1
                if not new:
                    table.remove(at, bucket)
        holders.move(old, new, moved)
        self._blocks[mask] -= changed

    def _store_all(self, keys: np.ndarray, mask: int) -> None:
        at = self._table.find_all(keys)
        is_new = at == 0
        if is_new.any():
            at[is_new] = self._table.insert_all(keys[is_new])
            self._table.used.array[at[is_new]] = self._now
        self._blocks[mask] += self._change(at, lambda held: held | mask)

    def _drop(self, at: np.ndarray, mask: int) -> None:
        self._blocks[mask] -= self._change(at, lambda held: held & ~mask)
        gone = at[self._table.values.array[at] == 0]
        if len(gone):
            self._table.remove_all(gone)

    def _change(self, at: np.ndarray, change: Callable[[int], int]) -> int:
        """Change the holders of blocks at distinct positions; of how many blocks they are others now."""
        holders = self._holders
        old, rows, counts = np.unique(self._table.values.array[at], return_inverse=True, return_counts=True)
        new = np.empty(len(old), np.uint32)
        # First all new sets, then what they cost: a set that loses its last block may be another's new one.
        for i, number in enumerate(old.tolist()):
            new[i] = holders.number(change(holders.masks[number]))
        for number, count in zip(new.tolist(), counts.tolist(), strict=True):
            holders.counts[number] += count
        for number, count in zip(old.tolist(), counts.tolist(), strict=True):
            holders.release(number, count)
        self._table.values.array[at] = new[rows]
        return int(counts[new != old].sum())


def _keys(keys: Iterable[int]) -> "array[int]":
    if isinstance(keys, np.ndarray):
        return array("Q", _check(keys).tobytes())
    return array("Q", keys)


def _check(keys: np.ndarray) -> np.ndarray:
    if keys.dtype != np.uint64 or keys.ndim != 1:
        raise TypeError(f"keys must be uint64 [blocks], got {keys.dtype} {list(keys.shape)}")
    return keys


def _distinct(keys: np.ndarray) -> np.ndarray:
    """Without repetitions, in order."""
    sorted_keys = np.sort(keys)
    if (sorted_keys[1:] != sorted_keys[:-1]).all():
        return keys
    return keys[np.sort(np.unique(keys, return_index=True)[1])]
