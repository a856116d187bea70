"""What metrics and KV events tell of pages beyond the devices: what an engine with real tiers did."""

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_prometheus import Samples, fresh
from tiered_fake import make_tiered_engine, settle

from longctx.cluster.transfer.stats import TransferStats
from longctx.serving import Engine, Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore
from longctx.serving.server.kv_events import KvEvents, block_hash
from longctx.serving.server.metrics import ServerMetrics

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
PROMPT = [i % 50 for i in range(40)]


def tiers(folder: Path) -> TierConfig:
    return TierConfig(2**16, 2**20, str(folder))


def ask(engine: Engine, prompt: list[int]) -> int:
    """Ask without pages on the devices; how many tokens were loaded."""
    engine.core.pool.clear()
    engine.scheduler.loads.seconds_per_page = None
    (output,) = engine.generate(Request(prompt, FIVE))
    settle(engine)
    return output.metrics.loaded_tokens


def test_metrics_of_tiers_are_what_happened(tmp_path: Path) -> None:
    engine = make_tiered_engine(tiers=tiers(tmp_path))
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    thread = EngineThread(engine)
    metrics = ServerMetrics("vllm", thread, "m")
    assert ask(engine, PROMPT) == 0
    assert ask(engine, PROMPT) == 36
    thread.load = engine.core.load(engine.stats(), engine.now())
    got = fresh(metrics)
    assert got.get_one("longctx:kv_tier_stored_total", tier="host") == 11  # of 44 tokens
    assert got.get_one("longctx:kv_tier_stored_total", tier="disk") == 11
    assert got.get_one("longctx:kv_tier_hits_total", tier="host") == 9
    assert got.get_one("longctx:kv_tier_bytes", tier="host") == 11 * 32
    assert got.get_one("longctx:kv_loads_total") == got.get_one("longctx:kv_load_seconds_count") == 1
    assert got.get_one("longctx:kv_loaded_pages_total") == 9
    assert got.get_one("longctx:kv_stored_pages_total") == 11
    assert got.get_one("vllm:external_prefix_cache_queries_total") == 80
    assert got.get_one("vllm:external_prefix_cache_hits_total") == 36
    assert got.get_one("longctx:kv_leases") == 0
    # A page goes wrong in host memory, and its file is gone: the rest is computed, and the figures tell.
    fetch = store.fetch([engine.prepare(Request(PROMPT)).keys[4]], lambda: None)
    while not (blocks := fetch.take(1)):
        time.sleep(0.001)
    blocks[0].data.flat[0] ^= 1  # a view of it
    fetch.close()
    for path in tmp_path.rglob("*.page"):
        path.unlink()
    assert ask(engine, PROMPT) == 16
    got = fresh(metrics)
    assert got.get_one("longctx:kv_tier_corrupt_total", tier="host") == 1
    assert got.get_one("longctx:kv_short_loads_total") == 1
    assert got.get_one("longctx:kv_recomputed_pages_total", source="tiers") == 5
    assert got.get_one("longctx:kv_recomputed_pages_total", source="transfers") == 0
    engine.pages.close()


def test_metrics_of_transfers_are_those_of_both_directions() -> None:
    engine = make_tiered_engine(tiers=TierConfig(2**16))
    metrics = ServerMetrics("longctx", EngineThread(engine), "m")
    assert "kv_transfer" not in fresh(metrics).types
    sent, received = TransferStats(), TransferStats()
    metrics.transfers = {"sent": sent, "received": received}
    sent.add_block(1000)
    received.add_outcome("lost")
    received.strangers = 2
    got: Samples = fresh(metrics)
    assert got.get_one("longctx:kv_transfer_bytes_total", direction="sent") == 1000
    assert got.get_one("longctx:kv_transfers_received_total", outcome="lost") == 1
    assert got.get_one("longctx:kv_transfers_sent_total", outcome="lost") == 0
    assert got.get_one("longctx:kv_transfer_strangers_total", direction="received") == 2
    engine.pages.close()


class Media:
    """What a router makes of the events: hashes by medium, each of which it has heard of on the devices first."""

    def __init__(self) -> None:
        self.has = defaultdict[str, dict[int, int | None]](dict)
        self.told: set[int] = set()
        self.must_be_told = True

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            assert event["type"] != "AllBlocksCleared"
            has = self.has[event["medium"]]
            if event["type"] == "BlockRemoved":
                for page in event["block_hashes"]:
                    del has[page]
                continue
            assert bool(event["token_ids"]) == (event["medium"] == "GPU")
            parent = event["parent_block_hash"]
            for page in event["block_hashes"]:
                assert page not in has
                assert event["medium"] == "GPU" or page in self.told or not self.must_be_told
                has[page], parent = parent, page
            if event["medium"] == "GPU":
                self.told.update(event["block_hashes"])


def hashes(keys: Any) -> set[int]:
    return set(map(block_hash, keys))


def wait_for(media: Media, medium: str, expected: set[int]) -> None:
    end = time.monotonic() + 20
    while set(media.has[medium]) != expected:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("pages", [4, 100])
def test_an_index_of_events_knows_what_each_tier_has(tmp_path: Path, pages: int) -> None:
    engine = make_tiered_engine(tiers=TierConfig(pages * 32, 2**15, str(tmp_path)))
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    media = Media()
    events = KvEvents(EngineThread(engine), lambda encode: media.take(encode()), with_tokens=True)
    known = []
    for number in range(6):
        (output,) = engine.generate(Request([number, *PROMPT], FIVE))
        known += engine.prepare(Request([number, *PROMPT, *output.token_ids])).keys
        events.flush()
        settle(engine)
    for medium, tier in (("CPU", "host"), ("STORAGE", "disk")):
        wait_for(media, medium, hashes(key for key in known if store.count_by_tier([key])[tier]))
    keys = engine.prepare(Request([5, *PROMPT])).keys
    parents = {block_hash(key): block_hash(keys[i - 1]) if i else None for i, key in enumerate(keys)}
    for medium in ("CPU", "STORAGE"):
        assert all(media.has[medium][key] == parent for key, parent in parents.items() if key in media.has[medium])
    engine.core.pool.clear()
    events.flush()
    assert not media.has["GPU"]
    assert media.has["STORAGE"]
    events.close()
    engine.pages.close()
    # After a restart it hears of what is on disk.
    engine = make_tiered_engine(tiers=TierConfig(pages * 32, 2**15, str(tmp_path)))
    again = Media()
    again.must_be_told = False
    events = KvEvents(EngineThread(engine), lambda encode: again.take(encode()), with_tokens=True)
    wait_for(again, "STORAGE", set(media.has["STORAGE"]))
    assert not again.has["CPU"]
    events.close()
    engine.pages.close()


def test_an_engine_keeps_what_a_request_asks_for(tmp_path: Path) -> None:
    engine = make_tiered_engine(tiers=tiers(tmp_path))
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    engine.generate(Request(PROMPT, FIVE, retain=((17, 60.0), (30, 0.05))))  # 4 pages, and 7 for a moment
    settle(engine)
    time.sleep(0.06)
    assert store.count_by_tier([])["host"] == 0  # what is over ends when something is asked
    store.wanted([])
    assert (store.stats.host.pinned_bytes, store.stats.disk.pinned_bytes) == (4 * 32, 4 * 40)
