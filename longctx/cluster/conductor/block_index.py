"""`BlockIndex`: what the conductor asks the prefix index."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class BlockMatch(Protocol):
    """The leading blocks of a prompt that an instance has, and how many of those in each tier."""

    @property
    def blocks(self) -> int: ...

    @property
    def device(self) -> int: ...

    @property
    def host(self) -> int: ...

    @property
    def disk(self) -> int: ...


class BlockIndex(Protocol):
    """Which instance has which blocks, by their KV events (`longctx.cluster.prefix_index`)."""

    def match(self, keys: np.ndarray) -> Mapping[str, BlockMatch]:
        """By instance; those that have no leading block are left out."""
        ...

    def clear(self, instance: str) -> None:
        """Forget all that an instance has."""
        ...
