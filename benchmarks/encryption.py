"""Encryption at rest, CPU seconds of pages on disk and of records of a log: `python -m benchmarks.encryption`.

Pages of three sizes are written to files by the disk tier, and read again from the system's cache of files, plain and
encrypted in turns; records are put in frames. Times are of the calling thread's CPU, which a busy machine changes
least: medians of the rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from longctx.serving.kv_cache.encryption import SEAL_BYTES, FileKey, disk_key
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.secret import make_secret
from longctx.serving.kv_cache.tiers.disk_tier import DiskTier
from longctx.serving.kv_cache.tiers.host_memory import PageChecksum
from longctx.serving.kv_cache.tiers.index import PageName
from longctx.serving.recording.log import log_key
from longctx.serving.recording.records import frame

RECORD_BYTES, RECORDS = 90, 1000


def measure_pages(folder: Path, page_size: int, rounds: int, key: FileKey) -> None:
    layout = PageLayout(num_layers=4, num_kv_heads=8, head_dim=128, page_size=page_size, dtype="bfloat16")
    payload = memoryview(np.random.default_rng(0).bytes(layout.page_bytes))
    seconds: dict[str, list[float]] = defaultdict(list)
    tiers = {
        kind: DiskTier(folder / f"{kind}-{page_size}", layout, layout.whole, b"model", 2**30, "lru", file_key)
        for kind, file_key in (("plain", None), ("encrypted", key))
    }
    checksum, out = PageChecksum(b"model", layout.whole), memoryview(bytearray(layout.page_bytes))
    for number in range(rounds):
        name = PageName(b"%032d" % number)
        for kind, tier in tiers.items():
            planned = tier.plan(name, 0)
            assert planned is not None
            start = time.thread_time()
            tier.write(planned[0], payload, checksum(name.key, payload))
            written = time.thread_time()
            assert tier.read(planned[0], out) is not None
            seconds[f"{kind} read"].append(time.thread_time() - written)
            seconds[f"{kind} written"].append(written - start)
            tier.delete([planned[0]])
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    cells = [medians[f"{kind} {what}"] for what in ("written", "read") for kind in ("plain", "encrypted")]
    print(f"| {layout.page_bytes >> 10:,} KiB | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    for tier in tiers.values():
        tier.close()


def measure_records(rounds: int, key: FileKey) -> None:
    record, context = bytes(RECORD_BYTES), bytes(40)
    plain, encrypted = [], []
    for _ in range(rounds):
        start = time.thread_time()
        for place in range(RECORDS):
            frame(record, place)
        middle = time.thread_time()
        for place in range(RECORDS):
            frame(b"".join(key.seal([record], context)), place)
        plain.append(middle - start)
        encrypted.append(time.thread_time() - middle)
    cells = (f"{statistics.median(times) / RECORDS * 1e6:.1f} µs" for times in (plain, encrypted))
    print(f"a record of {RECORD_BYTES} bytes, plain and encrypted: {', '.join(cells)}; {SEAL_BYTES} bytes more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "key")
        make_secret(secret)
        print("| page, CPU ms | written | encrypted | read | encrypted |\n|---|---|---|---|---|")
        for page_size in (8, 64, 512):
            measure_pages(Path(folder), page_size, options.rounds, disk_key(secret))
        key = log_key(secret)
        assert key is not None
        measure_records(options.rounds, key)


if __name__ == "__main__":
    main()
