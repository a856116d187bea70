"""How often tiers of several sizes have a request's blocks: `python -m benchmarks.tier_hit_rates FOLDER`.

Each `.jsonl` file of the folder is a trace whose rows have `hash_ids` (Mooncake, section 4.2 and table 1): ids of the
blocks of 512 tokens of a prompt, each of which stands for all tokens up to its end. The requests come one after the
other, and each looks its blocks up in host memory's own tier, uses those that it finds and stores the others, so rules
and chains are those of the server. A block counts as hit if it and all before it are there: others can't be used.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.host_memory import HostTier
from longctx.serving.kv_cache.tiers.index import EVICTION, PageName
from longctx.simulation.workloads import read_workload

SIZES = (1_000, 10_000, 30_000, 50_000, 100_000)  # blocks
_LAYOUT = PageLayout(1, 1, 1, 1, "float16")  # of blocks without contents


class HitRate(NamedTuple):
    """Blocks that were found, and all that were looked for."""

    hits: int
    blocks: int

    @property
    def percent(self) -> float:
        return 100 * self.hits / max(self.blocks, 1)


def hit_rate(prompts: Iterable[Sequence[int]], size: int, eviction: str) -> HitRate:
    """Of a tier with room for `size` blocks, for prompts that come one after the other, each as ids of its blocks."""
    tier = HostTier(size * _LAYOUT.page_bytes, _LAYOUT, _LAYOUT.whole, eviction)
    hits = total = 0
    for prompt in prompts:
        keys = [block.to_bytes(8, "big") for block in dict.fromkeys(prompt)]
        names = [PageName(key, keys[i - 1] if i else b"", i) for i, key in enumerate(keys)]
        found = next((i for i, key in enumerate(keys) if key not in tier), len(keys))
        for page in filter(None, map(tier.find, keys[:found])):
            tier.use(page)
        for name in names[found:]:
            if name.key not in tier and (page := tier.reserve(name)) is not None:
                tier.commit(page, 0)
                tier.release(page)
        hits += found
        total += len(keys)
    return HitRate(hits, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of traces, such as Mooncake's")
    options = parser.parse_args()
    print("| trace | rule |" + "".join(f" {size:,} |" for size in SIZES))
    print("|---|---|" + "---|" * len(SIZES))
    for path in sorted(options.folder.glob("*.jsonl")):
        prompts = [request.blocks for request in read_workload(path)]
        for eviction in EVICTION:
            rates = [hit_rate(prompts, size, eviction).percent for size in SIZES]
            print(f"| {path.stem} | {eviction} |" + "".join(f" {rate:.1f} % |" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
