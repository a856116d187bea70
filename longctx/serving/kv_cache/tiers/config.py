"""`TierConfig`: what keeps pages beyond the devices."""

import os
from dataclasses import dataclass
from typing import Literal

from longctx.serving.validation import Count, check_fields

Eviction = Literal["lru", "lfu", "length"]


@dataclass(frozen=True)
class TierConfig:
    """Sizes and rules of the tiers of an engine. None of them changes an answer.

    Attributes:
      host_bytes: bytes of pages in host memory.
      disk_bytes: bytes of pages in files. With 0 there are no files.
      disk: folder of these files.
      eviction: pages that are evicted first. `"length"`: the tails of the longest chains.
      store: a distributed store beyond this machine, such as mooncake://HOST:PORT.
      disk_key_file: file of a secret with which the files of pages are encrypted. None: they are not encrypted.

    Raises:
      TypeError, ValueError: a value is of the wrong type or out of range; the message names it.

    Examples:
      >>> from longctx.serving import EngineConfig
      >>> from longctx.serving.kv_cache.tiers.config import TierConfig
      >>> config = EngineConfig(tiers=TierConfig(host_bytes=64 << 20))
      >>> config.tiers.eviction
      'lru'
    """

    host_bytes: Count = 0
    disk_bytes: Count = 0
    disk: str | None = None
    eviction: Eviction = "lru"
    store: str | None = None
    disk_key_file: str | None = None

    def __post_init__(self) -> None:
        for name in ("disk", "disk_key_file"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        check_fields(self)
        if self.host_bytes == 0:
            raise ValueError("host_bytes must be at least the size of a page: other tiers are read and written by it")
        if (self.disk is None) != (self.disk_bytes == 0):
            raise ValueError("disk and disk_bytes must be given together, a folder and how many bytes it may have")
        if self.disk is None and self.disk_key_file is not None:
            raise ValueError("disk_key_file needs disk: host memory is not encrypted")
