"""`TierConfig`: what keeps pages beyond the devices."""

import os
from dataclasses import dataclass

from longctx.serving.validation import check_integer, check_text

EVICTIONS = ("lru", "lfu", "length")


@dataclass(frozen=True)
class TierConfig:
    """Sizes and rules of the tiers of an engine. None of them changes an answer.

    Attributes:
      host_bytes: of pages in host memory.
      disk_bytes: of pages in files; 0: no files.
      disk: the folder of these files.
      eviction: who goes first: `"lru"`, `"lfu"`, or `"length"` (the tails of the longest chains).
      store: a distributed store beyond this machine, such as `"mooncake://HOST:PORT"`.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Examples:
      >>> from longctx.serving import EngineConfig
      >>> from longctx.serving.kv_cache.tiers.config import TierConfig
      >>> config = EngineConfig(tiers=TierConfig(host_bytes=64 << 20))
      >>> config.tiers.eviction
      'lru'
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    disk: str | None = None
    eviction: str = "lru"
    store: str | None = None

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 0))
        if self.host_bytes == 0:
            raise ValueError("host_bytes must be at least the size of a page: other tiers are read and written by it")
        if self.disk is not None:
            object.__setattr__(self, "disk", check_text("disk", os.fspath(self.disk)))
        if (self.disk is None) != (self.disk_bytes == 0):
            raise ValueError("disk and disk_bytes must be given together, a folder and how many bytes it may have")
        if self.eviction not in EVICTIONS:
            raise ValueError(f"eviction must be one of {', '.join(EVICTIONS)}, got {self.eviction!r}")
        if self.store is not None:
            check_text("store", self.store)
