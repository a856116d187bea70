"""An index that reads a real engine's events, late, has what the engine can find."""

import numpy as np
from cluster.prefix_index.publishers import ANY, wait_for
from serving.fake_device import make_engine

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving import Request, SamplingParams
from longctx.serving.engine.thread import EngineThread
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

            keys = [engine.prepare(Request(prompt)).keys for prompt in prompts]

            def leading(each: list[bytes]) -> int:
                """Blocks of a prompt that the index says the engine has."""
                return index.match(np.array([block_hash(key) for key in each], np.uint64)).get("a", 0)

            there = [engine.scheduler.count_cached(each) // 4 for each in keys]
            wait_for(lambda: [leading(each) for each in keys] == there)
            assert sum(map(bool, there)) > 3
        assert reader.publishers["a"].is_whole
        assert reader.publishers["a"].errors == 0
    finally:
        reader.close()
        publisher.close()
