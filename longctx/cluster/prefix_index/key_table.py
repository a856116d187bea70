"""`KeyTable`: keys and what belongs to each, in dense arrays; many keys at a time by numpy, few by plain Python.

Keys that come together get consecutive positions where there is room, and requests ask for them in the same order. So
the blocks of a prompt are found by comparing two stretches of memory rather than by hashing each of them.

Keys of a bucket are chained. Buckets are split one after another as keys come (linear hashing: Litwin, 1980), and
arrays grow in place by an eighth: no insertion waits for all keys to be hashed again, and there are no tombstones.
"""

import secrets

import numpy as np

from longctx.cluster.prefix_index.column import Column

FREE = 0xFFFFFFFF  # as the follower of a position: it has no key
_ALL = (1 << 64) - 1
_SPLIT = 1024  # buckets that are split at a time
_WINDOW = 256  # keys of a stretch that are compared at first
_LOOK_UP = 1024  # keys that are hashed at first, where stretches are short
_START = 1024  # positions at first


class KeyTable:
    """Distinct keys, each at a position that stays the same until the key is removed.

    Attributes:
      keys: uint64, by position. Position 0 is never used, and stands for "not there".
      values, used: uint32, two numbers that the caller keeps of each key. A new key's are what the last key there had.
    """

    def __init__(self) -> None:
        # Of the hash, and secret: nobody can make keys that fall into one bucket.
        self._factors = secrets.randbits(64) | 1, secrets.randbits(64) | 1
        self._num_buckets, self._level = _SPLIT, _SPLIT  # `_level`: a power of two, at most `_num_buckets`
        self._num_free = 0
        self._end = 1  # of positions that have been used
        self.keys = Column(np.uint64, _START)
        self.values, self.used = Column(np.uint32, _START), Column(np.uint32, _START)
        self._next = Column(np.uint32, _START)  # the next position in its chain; 0: none; or FREE
        self._heads = Column(np.uint32, _SPLIT)  # the first position of each bucket's chain; 0: none
        self._free = Column(np.uint32, _START)  # a stack of free positions

    def __len__(self) -> int:
        return self._end - 1 - self._num_free

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        columns = self.keys, self.values, self.used, self._next, self._heads, self._free
        return sum(column.array.nbytes for column in columns)

    # Few keys

    def bucket(self, key: int) -> int:
        """Where a key belongs, until the next key is inserted."""
        first, second = self._factors
        x = key * first & _ALL
        bucket = (x ^ x >> 32) * second >> 32 & 2 * self._level - 1
        return bucket if bucket < self._num_buckets else bucket - self._level

    def find(self, key: int, bucket: int) -> int:
        """The position of a key; 0: it is not there."""
        at, keys, follow = self._heads.view[bucket], self.keys.view, self._next.view
        while at and keys[at] != key:
            at = follow[at]
        return at

    def insert(self, key: int, bucket: int) -> int:
        """Add a key that is not there; its position."""
        if self._num_free:
            self._num_free -= 1
            at = self._free.view[self._num_free]
        else:
            at = self._end
            if at == len(self.keys):
                self._grow(at + 1)
            self._end += 1
        self.keys.view[at] = key
        self._next.view[at] = self._heads.view[bucket]
        self._heads.view[bucket] = at
        if len(self) >= self._num_buckets + _SPLIT:
            self._split()
        return at

    def remove(self, at: int, bucket: int) -> None:
        """Remove the key at a position."""
        follow, heads = self._next.view, self._heads.view
        before = heads[bucket]
        if before == at:
            heads[bucket] = follow[at]
        else:
            while follow[before] != at:
                before = follow[before]
            follow[before] = follow[at]
        follow[at] = FREE
        if self._num_free == len(self._free):
            self._free.resize(2 * self._num_free)
        self._free.view[self._num_free] = at
        self._num_free += 1

    # Many keys

    def find_all(self, keys: np.ndarray) -> np.ndarray:
        """Positions, uint32 `[n]`, of keys, uint64 `[n]`; 0: it is not there."""
        at = self._heads.array[self._buckets(keys)]
        rows = np.flatnonzero((self.keys.array[at] != keys) & (at != 0))
        while len(rows):
            after = self._next.array[at[rows]]
            at[rows] = after
            rows = rows[(self.keys.array[after] != keys[rows]) & (after != 0)]
        return at

    def find_leading(self, keys: np.ndarray) -> np.ndarray:
        """Positions of keys, in order, until the first that is not there."""
        found: list[np.ndarray] = []
        first, look_up = 0, _LOOK_UP
        while first < len(keys) and (at := self._find(int(keys[first]))):
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
        at[:reused] = np.sort(self._free.array[self._num_free : self._num_free + reused])
        end = self._end + len(keys) - reused
        if end > len(self.keys):
            self._grow(end)
        at[reused:] = np.arange(self._end, end, dtype=np.uint32)
        self._end = end
        self.keys.array[at] = keys
        self._link(at)
        while len(self) >= self._num_buckets + _SPLIT:
            self._split()
        return at

    def remove_all(self, at: np.ndarray) -> None:
        """Remove the keys at distinct positions."""
        buckets, left = self._buckets(self.keys.array[at]), at
        while len(left):
            # Of one bucket, one key at a time: else a key's predecessor might go at the same time.
            chosen, rows = np.unique(buckets, return_index=True)
            self._unlink(left[rows], chosen)
            is_left = np.ones(len(left), bool)
            is_left[rows] = False
            left, buckets = left[is_left], buckets[is_left]
        self._next.array[at] = FREE
        if self._num_free + len(at) > len(self._free):
            self._free.resize(2 * (self._num_free + len(at)))
        self._free.array[self._num_free : self._num_free + len(at)] = at
        self._num_free += len(at)

    # Within

    def _find(self, key: int) -> int:
        return self.find(key, self.bucket(key))

    def _buckets(self, keys: np.ndarray) -> np.ndarray:
        first, second = map(np.uint64, self._factors)
        x = keys * first
        x = ((x ^ x >> np.uint64(32)) * second) >> np.uint64(32)
        buckets = (x & np.uint64(2 * self._level - 1)).astype(np.int64)
        buckets[buckets >= self._num_buckets] -= self._level
        return buckets

    def _stretch(self, keys: np.ndarray, at: int) -> int:
        """How many leading keys have consecutive positions from `at` on, where the first is."""
        done, window = 1, _WINDOW
        while True:
            length = min(window, len(keys) - done, self._end - at - done)
            here = slice(at + done, at + done + length)
            differs = (self.keys.array[here] != keys[done : done + length]) | (self._next.array[here] == FREE)
            equal = int(differs.argmax()) if differs.any() else length
            done += equal
            if equal < window:
                return done
            window *= 4

    def _link(self, at: np.ndarray) -> None:
        """Put keys in front of their buckets' chains."""
        buckets = self._buckets(self.keys.array[at])
        order = np.argsort(buckets, kind="stable")
        buckets, at = buckets[order], at[order]
        after = self._heads.array[buckets]
        is_same = buckets[1:] == buckets[:-1]
        after[1:][is_same] = at[:-1][is_same]
        self._next.array[at] = after
        self._heads.array[buckets] = at  # the last of a bucket is what stays

    def _unlink(self, at: np.ndarray, buckets: np.ndarray) -> None:
        """Take keys of distinct buckets out of their chains."""
        after = self._next.array[at]
        before = self._heads.array[buckets]
        is_first = before == at
        self._heads.array[buckets[is_first]] = after[is_first]
        rows = np.flatnonzero(~is_first)
        while len(rows):
            follower = self._next.array[before[rows]]
            is_found = follower == at[rows]
            found = rows[is_found]
            self._next.array[before[found]] = after[found]
            rows, follower = rows[~is_found], follower[~is_found]
            before[rows] = follower

    def _split(self) -> None:
        """Spread some buckets' keys over twice as many."""
        first = self._num_buckets - self._level
        if self._num_buckets + _SPLIT > len(self._heads):
            self._heads.resize(self._num_buckets + _SPLIT + self._num_buckets // 8)
        chained = []
        at = self._heads.array[first : first + _SPLIT]
        while len(at := at[at != 0]):
            chained.append(at)
            at = self._next.array[at]
        self._heads.array[first : first + _SPLIT] = 0
        self._num_buckets += _SPLIT
        if self._num_buckets == 2 * self._level:
            self._level *= 2
        if chained:
            self._link(np.concatenate(chained))

    def _grow(self, least: int) -> None:
        capacity = least + least // 8
        if capacity > FREE:
            raise MemoryError(f"an index has {FREE - 1} blocks at most")
        for column in (self.keys, self.values, self.used, self._next):
            column.resize(capacity)
