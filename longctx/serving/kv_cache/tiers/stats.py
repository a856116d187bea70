"""Counters of tiers."""

from dataclasses import dataclass, field


@dataclass
class TierCounters:
    """Counters of one tier. All count pages from the start on, unless said otherwise.

    Attributes:
      hits, misses: pages of loads that it had and that came whole, and that it was asked for and had not.
      stored, evicted: pages written to it, and removed for room.
      dropped: pages that were not written, as its queue or its memory was full, or the write failed.
      corrupt: pages that were there, and were not what had been written; files that were unusable at start.
      failed: writes that raised an error.
      bytes_read, bytes_written: bytes.
      pages, num_bytes, pinned_bytes: that it has now.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    corrupt: int = 0
    failed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    pages: int = 0
    num_bytes: int = 0
    pinned_bytes: int = 0


@dataclass
class TierStats:
    """Counters of all tiers.

    Attributes:
      host, disk, remote: of each tier.
      waiting_bytes: of pages that are on their way from devices, or to the disk.
    """

    host: TierCounters = field(default_factory=TierCounters)
    disk: TierCounters = field(default_factory=TierCounters)
    remote: TierCounters = field(default_factory=TierCounters)
    waiting_bytes: int = 0
