"""The prefix index with a million blocks: memory, match, update, and rebuilding it from instances' replays.

`python -m benchmarks.prefix_index [--blocks N] [--instances N] [--replay-blocks N]`. Of the index it is
CPU time, of the replay wall time, with all publishers in one other process.
"""

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.serving.server.kv_events import KIND, BlockStored, EventBatch
from longctx.serving.server.kv_publisher import KvPublisher

TOKENS = 1_000_000  # of a request
STEP = 512  # blocks that an event tells of
SMALLEST = 16  # tokens of a block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--replay-blocks", type=int, default=1_000_000)
    options = parser.parse_args()
    found = {**measure_index(options.blocks, options.instances), **measure_replay(options.replay_blocks, 8)}
    for name, value in found.items():
        print(f"{name:45s} {value:12.4g}")


def measure_index(num_blocks: int, instances: int) -> dict[str, float]:
    """Prompts of a million tokens, each held by one instance, a sixteenth of them by all."""
    rng = np.random.default_rng(0)
    length = TOKENS // SMALLEST
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = PrefixIndex()
    prompts, calls = [], []
    for number in range(num_blocks // length):
        prompts.append(rng.integers(0, 2**64, length, dtype=np.uint64))
        calls += _chunks(index.store, f"instance-{number % instances}", prompts[-1], STEP)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "blocks": index.num_blocks,
        "bytes a block": index.num_bytes / index.num_blocks,
        "resident bytes a block, keys of the prompts too": (after - before) * 1024 / index.num_blocks,
        "store new, us a block": 1e6 * sum(calls) / index.num_blocks,
        "store new, longest call, ms": 1e3 * max(calls),
    }
    common = prompts[:: max(1, len(prompts) // 10)][:10]
    calls = [
        call
        for prompt in common
        for number in range(instances)
        for call in _chunks(index.store, f"instance-{number}", prompt, STEP)
    ]
    found["store what others hold, us a block"] = 1e6 * sum(calls) / (len(common) * length * instances)
    for size in (16, 64, 512):
        for name, some in (("one instance", prompts), ("all instances", common)):
            asked = [prompt[: TOKENS // size] for prompt in some]
            times = [_seconds(lambda keys=keys: index.match(keys)) for keys in asked]
            found[f"match 1M tokens, blocks of {size}, {name}, ms"] = 1e3 * float(np.median(times))
    calls = [call for prompt in common for call in _chunks(index.remove, "instance-7", prompt, STEP)]
    found["remove, us a block"] = 1e6 * sum(calls) / (len(common) * length)
    found["clear an instance, ms"] = 1e3 * _seconds(lambda: index.clear("instance-5"))
    found["cold blocks of an instance, ms"] = 1e3 * _seconds(lambda: index.cold("instance-6", "device", 10, 1000))
    return found


def _chunks(call: Callable[..., object], instance: str, keys: np.ndarray, step: int) -> list[float]:
    """Store or remove keys so many at a time: seconds of each call."""
    pieces = [keys[i : i + step].tolist() for i in range(0, len(keys), step)]  # as messages have them
    return [_seconds(lambda piece=piece: call(instance, "device", piece)) for piece in pieces]


def measure_replay(num_blocks: int, instances: int) -> dict[str, float]:
    """A new index over instances that have published as many messages as they keep."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_publish, args=(theirs, num_blocks, instances), daemon=True)
    process.start()
    endpoints, expected = ours.recv()
    index = PrefixIndex()
    reader = KvEventReader(index)
    try:
        start, used = time.perf_counter(), time.process_time()
        for number, (endpoint, replay) in enumerate(endpoints):
            reader.add(f"instance-{number}", endpoint, replay)
        _wait(lambda: index.num_blocks == expected)
        seconds, used = time.perf_counter() - start, time.process_time() - used
    finally:
        reader.close()
        ours.send(None)
        process.join()
    return {"replayed blocks": expected, "replay, s": seconds, "replay, CPU s of the reader": used}


def _publish(pipe: Connection, num_blocks: int, instances: int) -> None:
    """Publish blocks of 64 tokens, and stay until told to end."""
    rng = np.random.default_rng(1)
    publishers = [KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*") for _ in range(instances)]
    step = max(1, num_blocks // instances // 10_000 + 1)
    for publisher in publishers:
        parent = None
        for _ in range(num_blocks // instances // step):
            keys = rng.integers(0, 2**63, step).tolist()
            event = BlockStored(keys, parent, [7] * (64 * step), 64, None, "GPU", None, None, 0, KIND)
            parent = keys[-1]
            payload = msgspec.msgpack.encode(EventBatch(0.0, [event], 0))
            publisher.publish(lambda payload=payload: payload)
        _wait(lambda publisher=publisher: publisher._queue.empty())
    endpoints = [(publisher.endpoint, publisher.replay_endpoint) for publisher in publishers]
    pipe.send((endpoints, num_blocks // instances // step * step * instances))
    pipe.recv()
    for publisher in publishers:
        publisher.close()


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it takes too long")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
