"""`BlockIndex`: what the conductor asks the prefix index (`longctx.cluster.prefix_index`)."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from longctx.cluster.prefix_index.index import Match, Tier


@runtime_checkable
class BlockIndex(Protocol):
    """Which instance has which blocks, by their KV events."""

    def match(self, keys: np.ndarray) -> Mapping[str, Match]:
        """What each instance has of the leading blocks, keys uint64 `[blocks]`; those without any are left out."""
        ...

    def clear(self, instance: str) -> None:
        """Forget all that an instance has."""
        ...

    def touch(self, keys: np.ndarray, now: float) -> None:
        """The leading blocks that are there have been used."""
        ...

    def blocks(self, instance: str, tier: Tier) -> int:
        """How many an instance has in a tier."""
        ...

    def cold(self, instance: str, tier: Tier, before: float, limit: int, held_by: int = 1) -> np.ndarray:
        """Keys, uint64 `[<= limit]`, of blocks that an instance has in a tier and nobody has used since `before`.

        The longest unused come first. Only those that at least `held_by` instances have, in whatever tier.
        """
        ...
