"""An index that reads a real engine's events, late and with a snapshot, has what the engine can find."""

import numpy as np
import pytest
from cluster.prefix_index.publishers import ANY, wait_for
from serving.fake_device import make_engine

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.indexer.indexer import Context, KvIndexer, Publisher
from longctx.cluster.prefix_index.indexer.sequence_hash import sequence_hashes
from longctx.cluster.prefix_index.listeners import IndexUpdater
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving import Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server import kv_publisher
from longctx.serving.server.kv_events import KvEvents, block_hash
from longctx.serving.server.kv_publisher import KvPublisher
from longctx.serving.server.kv_snapshot import KvSnapshot


def test_an_engines_pages_are_the_indexs_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "_KEPT", 20)
    engine = make_engine(40, page_size=4)
    thread, publisher = EngineThread(engine), KvPublisher(ANY, ANY, snapshot=KvSnapshot())
    KvEvents(thread, publisher.publish)
    index, indexer = PrefixIndex(), KvIndexer()
    source = Publisher("a", "default", 0, "m", 4)
    indexer.register(source)
    reader = KvEventReader(IndexUpdater(index), indexer)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4, rng.integers(1, 60)).tolist() for _ in range(60)]
    try:
        with thread:
            for number, prompt in enumerate(prompts):
                request = Request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
                thread.submit(engine.prepare(request), lambda events: None)
                if number == 40:
                    assert thread.wait_idle(30)
                    reader.add(source.name, publisher.endpoint, publisher.replay_endpoint)
            assert thread.wait_idle(30)
            held = set(map(block_hash, engine.core.pool._page_of))
            wait_for(lambda: set(index.keys(source.name, "device").tolist()) == held)
        assert reader.publishers[source.name].is_whole
        assert reader.publishers[source.name].errors == 0
        # By tokens, too: of each prompt as many leading blocks as by the engine's own keys.
        page_hash, matched = PageHash(bytes(16), 4), 0
        for prompt in prompts:
            tokens, page_keys = np.array(prompt, np.int32), list[bytes]()
            page_hash.extend(page_keys, tokens, page_hash.root(Request(prompt).tenant))
            keys = np.array([block_hash(key) for key in page_keys], np.uint64)
            found = index.match(keys)
            matched += len(found)
            hashes = sequence_hashes(tokens.tobytes(), 4)
            hits = indexer.hits(Context("default", "m", "", 4, ""), hashes)["a"]
            assert hits.longest == 4 * (found[source.name].blocks if found else 0)
        assert matched > 3
    finally:
        reader.close()
        publisher.close()
