"""`KeyTable`: where each key is in dense arrays; 20 bytes a key, many keys at a time by numpy, few by plain Python.

Keys that come together get consecutive positions where there is room, and requests ask for them in the same order. So
the blocks of a prompt are found by comparing two stretches of memory rather than by hashing each of them.

Keys of a bucket are chained. Buckets are split one after another as keys come (linear hashing: Litwin, 1980), and
arrays grow by an eighth, so no insertion waits for all keys to be hashed again, and none is ever a tombstone.
"""

import secrets

import numpy as np

FREE = 0xFFFFFFFF  # as the follower of a position: it has no key
_ALL = (1 << 64) - 1
_SPLIT = 256  # buckets that are split at a time
_WINDOW = 256  # keys of a stretch that are compared at first
_LOOK_UP = 1024  # keys that are hashed at first, where stretches are short
_MOST = FREE - 2  # positions


class KeyTable:
    """Distinct keys, each at a position that stays the same until the key is removed.

    Attributes:
      keys: uint64 `[capacity]`, by position. Position 0 is never used, and stands for "not there".
      capacity: positions for which there is memory.
    """

    def __init__(self) -> None:
        # Of the hash: nobody can make keys that fall into one bucket.
        self._salt = secrets.randbits(64)
        self._factors = secrets.randbits(64) | 1, secrets.randbits(64) | 1
        self._num_buckets, self._level = _SPLIT, _SPLIT  # `_level`: a power of two, at most `_num_buckets`
        self._num_free = 0
        self._end = 1  # of positions that have been used
        self.capacity = 0
        self.keys = np.zeros(0, np.uint64)
        self._next = np.zeros(0, np.uint32)
        self._free = np.zeros(0, np.uint32)  # a stack of free positions
        self._heads = np.zeros(0, np.uint32)
        self._resize(1024)
        self._resize_heads(_SPLIT)

    def __len__(self) -> int:
        return self._end - 1 - self._num_free

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return self.keys.nbytes + self._next.nbytes + self._free.nbytes + self._heads.nbytes

    # Few keys

    def find(self, key: int) -> int:
        """Its position; 0: it is not there."""
        at, keys, follow = self._head_view[self._bucket(key)], self._key_view, self._next_view
        while at and keys[at] != key:
            at = follow[at]
        return at

    def insert(self, key: int) -> int:
        """Add a key that is not there; its position."""
        if self._num_free:
            self._num_free -= 1
            at = self._free_view[self._num_free]
        else:
            at = self._end
            if at == self.capacity:
                self._grow(at + 1)
            self._end += 1
        bucket = self._bucket(key)
        self._key_view[at] = key
        self._next_view[at] = self._head_view[bucket]
        self._head_view[bucket] = at
        if len(self) >= self._num_buckets + _SPLIT:
            self._split()
        return at

    def remove(self, at: int) -> None:
        """Remove the key at a position."""
        follow = self._next_view
        bucket = self._bucket(self._key_view[at])
        before = self._head_view[bucket]
        if before == at:
            self._head_view[bucket] = follow[at]
        else:
            while follow[before] != at:
                before = follow[before]
            follow[before] = follow[at]
        follow[at] = FREE
        self._free_view[self._num_free] = at
        self._num_free += 1

    # Many keys

    def find_all(self, keys: np.ndarray) -> np.ndarray:
        """Positions, uint32 `[n]`, of keys, uint64 `[n]`; 0: it is not there."""
        at = self._heads[self._buckets(keys)]
        rows = np.flatnonzero((self.keys[at] != keys) & (at != 0))
        while len(rows):
            after = self._next[at[rows]]
            at[rows] = after
            rows = rows[(self.keys[after] != keys[rows]) & (after != 0)]
        return at

    def find_leading(self, keys: np.ndarray) -> np.ndarray:
        """Positions of keys, in order, until the first that is not there."""
        found: list[np.ndarray] = []
        first, look_up = 0, _LOOK_UP
        while first < len(keys) and (at := self.find(int(keys[first]))):
            length = self._stretch(keys[first:], at)
            found.append(np.arange(at, at + length, dtype=np.uint32))
            first += length
            if length < _WINDOW // 4:
                some = self.find_all(keys[first : first + look_up])
                absent = np.flatnonzero(some == 0)
                if len(absent):
                    return np.concatenate([*found, some[: absent[0]]])
                found.append(some)
                first += len(some)
                look_up *= 2
        return np.concatenate(found) if found else np.zeros(0, np.uint32)

    def insert_all(self, keys: np.ndarray) -> np.ndarray:
        """Add distinct keys that are not there; their positions, uint32 `[n]`."""
        reused = min(self._num_free, len(keys))
        self._num_free -= reused
        at = np.empty(len(keys), np.uint32)
        at[:reused] = np.sort(self._free[self._num_free : self._num_free + reused])
        end = self._end + len(keys) - reused
        if end > self.capacity:
            self._grow(end)
        at[reused:] = np.arange(self._end, end, dtype=np.uint32)
        self._end = end
        self.keys[at] = keys
        self._link(at)
        while len(self) >= self._num_buckets + _SPLIT:
            self._split()
        return at

    def remove_all(self, at: np.ndarray) -> None:
        """Remove the keys at distinct positions."""
        buckets, left = self._buckets(self.keys[at]), at
        while len(left):
            # Of one bucket, one key at a time: else a key's predecessor might go at the same time.
            chosen, rows = np.unique(buckets, return_index=True)
            self._unlink(left[rows], chosen)
            is_left = np.ones(len(left), bool)
            is_left[rows] = False
            left, buckets = left[is_left], buckets[is_left]
        self._next[at] = FREE
        self._free[self._num_free : self._num_free + len(at)] = at
        self._num_free += len(at)

    def is_used(self, first: int, stop: int) -> np.ndarray:
        """Of positions in a range, whether they have a key, bool `[stop - first]`; `stop` at most `capacity`."""
        is_used = self._next[first:stop] != FREE
        is_used[max(0, self._end - first) :] = False
        return is_used

    # Within

    def _bucket(self, key: int) -> int:
        first, second = self._factors
        x = key ^ self._salt
        x = ((x ^ x >> 32) * first) & _ALL
        x = ((x ^ x >> 29) * second & _ALL) >> 32
        bucket = x & 2 * self._level - 1
        return bucket if bucket < self._num_buckets else bucket - self._level

    def _buckets(self, keys: np.ndarray) -> np.ndarray:
        first, second = map(np.uint64, self._factors)
        x = keys ^ np.uint64(self._salt)
        x = (x ^ x >> np.uint64(32)) * first
        x = ((x ^ x >> np.uint64(29)) * second) >> np.uint64(32)
        buckets = (x & np.uint64(2 * self._level - 1)).astype(np.int64)
        buckets[buckets >= self._num_buckets] -= self._level
        return buckets

    def _stretch(self, keys: np.ndarray, at: int) -> int:
        """How many leading keys have consecutive positions from `at` on, where the first is."""
        done, window = 1, _WINDOW
        while True:
            length = min(window, len(keys) - done, self._end - at - done)
            here = slice(at + done, at + done + length)
            differs = (self.keys[here] != keys[done : done + length]) | (self._next[here] == FREE)
            equal = int(differs.argmax()) if differs.any() else length
            done += equal
            if equal < window:
                return done
            window *= 4

    def _link(self, at: np.ndarray) -> None:
        """Put keys in front of their buckets' chains."""
        buckets = self._buckets(self.keys[at])
        order = np.argsort(buckets, kind="stable")
        buckets, at = buckets[order], at[order]
        after = self._heads[buckets]
        is_same = buckets[1:] == buckets[:-1]
        after[1:][is_same] = at[:-1][is_same]
        self._next[at] = after
        self._heads[buckets] = at  # the last of a bucket is what stays

    def _unlink(self, at: np.ndarray, buckets: np.ndarray) -> None:
        """Take keys of distinct buckets out of their chains."""
        after = self._next[at]
        before = self._heads[buckets]
        is_first = before == at
        self._heads[buckets[is_first]] = after[is_first]
        rows = np.flatnonzero(~is_first)
        while len(rows):
            follower = self._next[before[rows]]
            is_found = follower == at[rows]
            found = rows[is_found]
            self._next[before[found]] = after[found]
            rows, follower = rows[~is_found], follower[~is_found]
            before[rows] = follower

    def _split(self) -> None:
        """Spread some buckets' keys over twice as many."""
        first = self._num_buckets - self._level
        if self._num_buckets + _SPLIT > len(self._heads):
            self._resize_heads(self._num_buckets + _SPLIT + self._num_buckets // 8)
        chained = []
        at = self._heads[first : first + _SPLIT]
        while len(at := at[at != 0]):
            chained.append(at)
            at = self._next[at]
        self._heads[first : first + _SPLIT] = 0
        self._num_buckets += _SPLIT
        if self._num_buckets == 2 * self._level:
            self._level *= 2
        if chained:
            self._link(np.concatenate(chained))

    def _grow(self, least: int) -> None:
        self._resize(least + least // 8)

    def _resize(self, capacity: int) -> None:
        if capacity > _MOST:
            raise MemoryError(f"a key table has {_MOST} keys at most")
        for name in ("keys", "_next", "_free"):
            self._extend(name, capacity)
        self.capacity = capacity
        self._key_view, self._next_view = memoryview(self.keys), memoryview(self._next)
        self._free_view = memoryview(self._free)

    def _resize_heads(self, size: int) -> None:
        self._extend("_heads", size)
        self._head_view = memoryview(self._heads)

    def _extend(self, name: str, size: int) -> None:
        old = getattr(self, name)
        new = np.zeros(size, old.dtype)
        new[: len(old)] = old
        setattr(self, name, new)
