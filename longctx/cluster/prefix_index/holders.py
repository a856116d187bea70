"""`HolderSets`: the sets of holders that blocks have, each kept once, as far as blocks have it."""

import sys
from collections.abc import Iterator

from longctx.cluster.prefix_index.tiers import TIERS, Tier

_BITS = len(TIERS)


class HolderSets:
    """Sets of (instance, tier), numbered; a mask has a bit for each, and 3 bits for each instance.

    Attributes:
      masks: by number. Number 0 is the empty set.
      counts: how many blocks have a set, by its number.
    """

    def __init__(self) -> None:
        self.masks = [0]
        self.counts = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []
        self._instances: dict[str, int] = {}
        self._names: list[str | None] = []
        self._bits: dict[tuple[str, Tier], int] = {}

    def __len__(self) -> int:
        """Sets that blocks have."""
        return len(self._numbers) - 1

    @property
    def num_bytes(self) -> int:
        """About."""
        return sum(map(sys.getsizeof, self.masks)) + 150 * len(self.masks)

    @property
    def names(self) -> list[str]:
        """Of instances that are known."""
        return list(self._instances)

    def add(self, instance: str, tier: Tier) -> int:
        """The mask of a holder; its instance is known from now on."""
        mask = self._bits.get((instance, tier))
        if mask is None:
            number = self._names.index(None) if None in self._names else len(self._names)
            self._names[number : number + 1] = [instance]
            self._instances[instance] = number
            for i, each in enumerate(TIERS):
                self._bits[instance, each] = 1 << _BITS * number + i
            mask = self._bits[instance, tier]
        return mask

    def mask(self, instance: str, tier: Tier | None = None) -> int:
        """Of an instance in one tier, or in all; 0: it is not known."""
        if tier is not None:
            return self._bits.get((instance, tier), 0)
        return sum(self._bits.get((instance, each), 0) for each in TIERS)

    def forget(self, instance: str) -> None:
        """Give an instance's bits to the next one; no set has them."""
        self._names[self._instances.pop(instance)] = None
        for tier in TIERS:
            del self._bits[instance, tier]

    def number(self, mask: int) -> int:
        """Of a set; a new one has no blocks yet."""
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number] = mask
            else:
                number = len(self.masks)
                self.masks.append(mask)
                self.counts.append(0)
            self._numbers[mask] = number
        return number

    def move(self, old: int, new: int, blocks: int) -> None:
        """So many blocks change from one set to another."""
        if blocks:
            self.counts[new] += blocks
            self.release(old, blocks)

    def release(self, number: int, blocks: int) -> None:
        """So many blocks have a set no more; it goes with the last of them."""
        if number:
            self.counts[number] -= blocks
            if not self.counts[number]:
                del self._numbers[self.masks[number]]
                self.masks[number] = 0
                self._free.append(number)

    def instances(self, mask: int) -> int:
        """A mask with the lowest bit of each instance that is in a set, in whatever tier."""
        lowest = (1 << _BITS * len(self._names)) // (2**_BITS - 1)
        return (mask | mask >> 1 | mask >> 2) & lowest

    def num_instances(self, mask: int) -> int:
        """How many are in a set, in whatever tier."""
        return self.instances(mask).bit_count()

    def split(self, mask: int) -> Iterator[tuple[str, int]]:
        """Of a mask with the lowest bits of instances: name and shift of each."""
        while mask:
            shift = (mask & -mask).bit_length() - 1
            mask &= mask - 1
            yield self._names[shift // _BITS] or "", shift
