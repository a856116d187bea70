"""Where an instance keeps a block."""

from typing import Literal, NamedTuple, get_args

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""The quickest first; KV events call them GPU, CPU and STORAGE."""


class Match(NamedTuple):
    """The leading blocks of a request that an instance holds, in whatever tier.

    Attributes:
      blocks: how many there are.
      device, host, disk: how many of them are in each tier; one that is in several counts in the quickest.
    """

    blocks: int
    device: int
    host: int
    disk: int
