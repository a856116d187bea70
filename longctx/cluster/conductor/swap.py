"""Which blocks are swapped out, over the whole cluster (Mooncake, sections 1.1 and 3)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from longctx.cluster.conductor.block_index import BlockIndex
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.instance import InstanceSpec
from longctx.cluster.prefix_index.index import TIERS, Tier


class Swap(NamedTuple):
    """Blocks that an instance should move out of a tier: to the next one that it has, or nowhere.

    Attributes:
      keys: uint64 `[blocks]`.
    """

    instance: str
    keys: np.ndarray
    tier: Tier


class Swapper:
    """Finds cold blocks on instances whose tiers are nearly full.

    Blocks that other instances have too go first, then the longest unused ones, wherever requests would find them. A
    block leaves one instance at a time, as the last replica would go with the others else.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._last: set[int] = set()  # what was to be swapped last time; KV events say later that it has been

    def swaps(self, specs: Iterable[InstanceSpec], index: BlockIndex, now: float) -> list[Swap]:
        """What should be swapped out now."""
        found, going = [], set[int]()
        for spec in specs:
            for tier, room in zip(TIERS, spec.cache_blocks, strict=True):
                blocks = index.blocks(spec.name, tier)
                if not room or blocks <= self._config.swap_above * room:
                    continue
                count = blocks - int(self._config.swap_below * room)
                keys = self._coldest(spec.name, tier, index, count, going, now)
                if keys:
                    going.update(keys)
                    found.append(Swap(spec.name, np.array(keys, np.uint64), tier))
        self._last = going
        return found

    def _coldest(self, name: str, tier: Tier, index: BlockIndex, count: int, going: set[int], now: float) -> list[int]:
        before, away = now - self._config.swap_seconds, going | self._last
        keys: dict[int, None] = {}  # in order
        for held_by in (2, 1):
            limit = count + len(away) if held_by == 2 else count + len(away) + len(keys)
            for key in index.cold(name, tier, before, limit, held_by).tolist():
                if len(keys) < count and key not in away:
                    keys[key] = None
        return [*keys]
