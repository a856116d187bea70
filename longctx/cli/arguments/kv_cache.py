"""Flags of what keeps pages beyond the devices."""

import argparse
from pathlib import Path

EVICTIONS = ("lru", "lfu", "length")
"""Those of `TierConfig`, written again because importing it takes long (a test compares them)."""


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group(
        "KV cache beyond the devices", "SIZE is a number of bytes, or as 8GiB or 500MB (docs/kv_cache.md)"
    )
    tiers.add_argument("--kv-host-bytes", metavar="SIZE", help="pages kept in host memory; default: none")
    tiers.add_argument("--kv-disk", type=Path, metavar="DIR", help="keep pages in files in this folder too")
    tiers.add_argument("--kv-disk-bytes", metavar="SIZE", help="of these files")
    tiers.add_argument("--kv-store", metavar="URL", help="a distributed store, such as mooncake://HOST:PORT")
    tiers.add_argument("--kv-eviction", choices=EVICTIONS, default="lru", help="who goes first; default: lru")
    tiers.add_argument(
        "--verify-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of loads whose pages are computed again in idle time and compared; default: 0",
    )
    tiers.add_argument(
        "--kv-secret-file",
        type=Path,
        metavar="FILE",
        help="secret of the keys of pages, the same for engines that share them; default: one in --kv-disk, or random",
    )
