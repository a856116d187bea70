"""Traffic on an engine with tiers whose files, memory and disk go wrong meanwhile; by itself until it is killed.

Every answer is compared with the only right one. Fake devices make what tiers do the most of the work.
"""

import itertools
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fake_device import expected_tokens
from tiered_fake import make_tiered_engine, settle

from longctx.serving import Engine, ParallelPlan, Request, SamplingParams
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

PAGE_BYTES = 32
PLANS = [ParallelPlan(), ParallelPlan(2, 2, rank_tokens=16)]


class Faults:
    """Breaks what an engine's tiers have. `disk_is_full` makes writes fail, as `os.writev` is replaced."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.disk_is_full = False
        self.done: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._write = os.writev

    def __enter__(self) -> "Faults":
        os.writev = self._writev  # type: ignore[assignment]
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        os.writev = self._write

    def _writev(self, descriptor: int, buffers: list[memoryview]) -> int:
        if not self.disk_is_full:
            return self._write(descriptor, buffers)
        self.done["full"] += 1
        self._write(descriptor, [buffers[0][:50]])
        raise OSError(28, "No space left on device")

    def _run(self) -> None:
        """Break files while engines read and write them: by turns, so that the first few faults are of all kinds."""
        faults = itertools.cycle([self.flip, self.cut, self.flip, self.delete])
        while not self._stop.wait(0.01):
            self.disk_is_full = self.random.random() < 0.2
            for path in self.random.sample(files := sorted(self.folder.rglob("*.page")), min(1, len(files))):
                fault = next(faults)
                try:
                    fault(path)
                except OSError:  # it has gone meanwhile
                    continue
                self.done[fault.__name__] += 1

    def flip(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(self.random.randrange(max(1, path.stat().st_size)))
            byte = file.read(1)
            file.seek(-len(byte), 1)
            file.write(bytes(bits ^ (1 << self.random.randrange(8)) for bits in byte))

    def cut(self, path: Path) -> None:
        os.truncate(path, self.random.randrange(max(1, path.stat().st_size)))

    def delete(self, path: Path) -> None:
        path.unlink()

    def break_memory(self, store: TieredStore) -> None:
        """Flip a bit of a page in host memory, which nobody reads just now."""
        keys = list[bytes]()
        store.evict(lambda key: bool(keys.append(key)))  # it is asked about every page, and none is to go
        for key in self.random.sample(keys, min(1, len(keys))):
            fetch = store.fetch([key], lambda: None)
            while not fetch.is_over:
                for block in fetch.take(1):  # a view of it
                    block.data.flat[self.random.randrange(block.data.size)] ^= 1 << self.random.randrange(8)
                    self.done["memory"] += 1
                time.sleep(0.001)
            fetch.close()


def open_engine(folder: Path, plan: ParallelPlan, host_pages: int = 60) -> Engine:
    tiers = TierConfig(host_pages * PAGE_BYTES * plan.stage, 200 * PAGE_BYTES + 2**16, str(folder))
    return make_tiered_engine(40, plan=plan, tiers=tiers)


def store_of(engine: Engine) -> TieredStore:
    store = engine.pages.store
    assert isinstance(store, TieredStore)
    return store


def check_traffic(
    engine: Engine, generator: random.Random, rounds: int, before_each: Callable[[], object] = lambda: None
) -> int:
    """Ask about documents that are asked about again and again; how many tokens were loaded."""
    documents = [[(7 * number + i * (number + 3)) % 50 for i in range(60)] for number in range(12)]
    loaded = 0
    for _ in range(rounds):
        before_each()
        engine.scheduler.loads.seconds_per_page = None
        requests = []
        for _ in range(generator.randint(1, 5)):
            length = generator.randint(8, 60)
            question = [generator.randrange(50) for _ in range(generator.randint(1, 12))]
            sampling = SamplingParams(max_tokens=generator.randint(1, 9), ignore_eos=True)
            requests.append(Request([*generator.choice(documents)[:length], *question], sampling))
        outputs = engine.generate(requests)
        assert len(outputs) == len(requests)
        for request, output in zip(requests, outputs, strict=True):
            assert output.finish_reason == "length", output
            assert output.token_ids == expected_tokens(list(request.prompt), request.sampling), "a wrong answer"
            loaded += output.metrics.loaded_tokens
    return loaded


def check_nothing_is_left(engine: Engine) -> None:
    """Nobody holds pages or leases, and no load goes on."""
    settle(engine)
    stats, store = engine.stats(), store_of(engine)
    assert (stats.running, stats.waiting, stats.pages_held, len(engine.core.leases)) == (0, 0, 0, 0)
    assert not engine.scheduler.loads
    deadline = time.monotonic() + 20
    while store.num_loads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


FAULTS = ("flip", "cut", "delete", "full", "memory")
TOLD = ("loaded", "corrupt", "failed", "short")  # by metrics


def soak(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """Engines one after the other, in one folder; what was broken, and what the metrics tell of it.

    On a busy machine it takes longer than `seconds`, until each kind of fault has come and was told of.
    """
    told: Counter[str] = Counter()
    until, generator = time.monotonic() + seconds, random.Random(seed)
    with Faults(folder, seed) as faults:
        for number in itertools.count():
            engine = open_engine(folder, PLANS[number % len(PLANS)])
            store = store_of(engine)
            told["loaded"] += check_traffic(engine, generator, 12, lambda store=store: faults.break_memory(store))  # type: ignore[misc]
            if number % 4 == 3:
                check_nothing_is_left(engine)
            engine.pages.close()  # what waited has been written
            stats = store.stats
            told["corrupt"] += stats.host.corrupt + stats.disk.corrupt
            told["failed"] += stats.disk.failed
            told["short"] += sum(engine.pages.recomputed.values())
            if time.monotonic() > until and all(told[name] for name in TOLD) and all(map(faults.done.get, FAULTS)):
                break
            assert time.monotonic() < until + 60, (told, faults.done)
        told.update(faults.done)
    return told


if __name__ == "__main__":  # until it is killed
    own_folder, seed_ = Path(sys.argv[1]), int(sys.argv[2])
    print("ready", flush=True)
    for round_ in itertools.count():
        engine_ = open_engine(own_folder, PLANS[0])
        print("loaded", check_traffic(engine_, random.Random(f"{seed_} {round_}"), 20), flush=True)
        engine_.pages.close()
