"""An index that reads a real engine's events, late, has what the engine can find."""

import numpy as np
from cluster.prefix_index.publishers import ANY, wait_for
from serving.fake_device import make_engine

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving import Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server.kv_events import KvEvents, block_hash
from longctx.serving.server.kv_publisher import KvPublisher


def test_an_engines_pages_are_the_indexs_blocks() -> None:
    engine = make_engine(40, page_size=4)
    thread, publisher = EngineThread(engine), KvPublisher(ANY, ANY)
    KvEvents(thread, publisher.publish)
    index = PrefixIndex()
    reader = KvEventReader(index)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 4, rng.integers(1, 60)).tolist() for _ in range(60)]
    try:
        with thread:
            for number, prompt in enumerate(prompts):
                request = Request(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
                thread.submit(engine.prepare(request), lambda events: None)
                if number == 40:
                    assert thread.wait_idle(30)
                    reader.add("a", publisher.endpoint, publisher.replay_endpoint)
            assert thread.wait_idle(30)
            held = set(map(block_hash, engine.core.pool._page_of))
            wait_for(lambda: set(index.keys("a", "device").tolist()) == held)
        assert reader.publishers["a"].is_whole
        assert reader.publishers["a"].errors == 0
        page_hash, matched = PageHash(bytes(16), 4), 0
        for prompt in prompts:
            page_keys = list[bytes]()
            page_hash.extend(page_keys, np.array(prompt, np.int32), page_hash.root(Request(prompt).tenant))
            matched += len(index.match(np.array([block_hash(key) for key in page_keys], np.uint64)))
        assert matched > 3
    finally:
        reader.close()
        publisher.close()
