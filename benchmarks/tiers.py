"""A second question about a long document, from device, host memory and disk: `python -m benchmarks.tiers`.

A document is read by an engine without tiers, and by one whose pages go to host memory and disk while it reads: what
storing adds to the time to the first token. Then another question about it comes: its pages are on the device; in host
memory; on disk, where it is found after the tiers have been closed and opened again. "cold": the files are read from
the disk itself, and not from the system's cache of files. Rounds have documents of their own, and contenders take turns
in a random order. Times are the engine's, everything compiled before; ratios are of one round, and their medians are
told. CPU seconds are those of the whole process, until the second token: what a busy machine changes least.

"load / copy" is the time from when a load begins until its pages can be used, in the engine, against copying as many
bytes from one array to another, once: the least that any load can take on a machine whose device is its CPU.

    python -m benchmarks.tiers [FILE.gguf --tokens 8000]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longctx.models import Llama, load_checkpoint
from longctx.models.builtin import TINY
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, Output, Request, SamplingParams
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import TieredStore

PAGE, BUDGET = 64, 512
SAMPLING = SamplingParams(max_tokens=2, ignore_eos=True)


def make_engine(
    model: Llama, params: Params, tokens: int, tiers: TierConfig | None = None, store: Any = None
) -> Engine:
    length = tokens + 2 * PAGE
    config = EngineConfig(
        page_size=PAGE,
        max_running=1,
        token_budget=BUDGET,
        buckets=(1, 64, BUDGET),
        max_length=length,
        num_pages=length // PAGE + 8,
        tiers=tiers,
    )
    engine = Engine(model, params, config, store=store)
    engine.warm_up()
    return engine


class Restarting:
    """A store that is closed and opened again."""

    def __init__(self, open_it: Callable[[], TieredStore]) -> None:
        self._open, self._store = open_it, open_it()

    def restart(self) -> None:
        self._store.close()
        self._store = self._open()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Contenders:
    """An engine with tiers and one without, and how long they take.

    Attributes:
      seconds: to the first token, of each kind of question. ratios: of one round, by name.
    """

    def __init__(self, path: Path, tokens: int, folder: str) -> None:
        self.model, params = load_checkpoint(path, dtype="float32")
        self.tokens, self.folder = tokens, Path(folder)
        config = self.model.config
        layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, PAGE, "float32")
        self.num_bytes = tokens // PAGE * layout.page_bytes
        tiers = TierConfig(host_bytes=4 * self.num_bytes, disk_bytes=100 * self.num_bytes, disk=folder)
        self.store: Any = Restarting(lambda: TieredStore(tiers, layout, b"benchmark"))
        self.plain = make_engine(self.model, params, tokens)
        self.tiered = make_engine(self.model, params, tokens, tiers, self.store)
        self.random = np.random.default_rng(0)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.ratios: dict[str, list[float]] = defaultdict(list)
        self.processor: dict[str, list[float]] = defaultdict(list)
        self.copies = [np.ones(self.num_bytes // 4, np.float32) for _ in range(2)]

    def document(self, tokens: int) -> list[int]:
        return self.random.integers(0, 255, tokens).tolist()

    def ask(self, name: str, engine: Engine, document: Sequence[int], question: int) -> Output:
        engine.scheduler.loads.seconds_per_page = None
        time.sleep(0.3)  # idle threads spin for up to 0.2 s
        begun = time.process_time()
        (output,) = engine.generate([[*document, *[question] * 16]], SAMPLING)
        self.processor[name].append(time.process_time() - begun)
        return output

    def settle(self) -> None:
        while self.tiered.has_work:
            self.tiered.step()
        assert self.store.flush(60)

    def read(self, document: list[int]) -> float:
        """Read a document anew in both engines; returns the seconds without tiers."""
        names = ["anew", "anew, stored"]
        found = {}
        for name in self.random.permutation(names).tolist():
            engine = self.plain if name == "anew" else self.tiered
            engine.core.pool.clear()
            output = self.ask(name, engine, document, 1)
            assert output.metrics.cached_tokens == 0
            found[name] = output
        self.settle()
        seconds = {name: output.metrics.ttft or 0.0 for name, output in found.items()}
        for name, each in seconds.items():
            self.seconds[name].append(each)
        self.ratios["storing"].append(seconds["anew, stored"] / seconds["anew"])
        return seconds["anew"]

    def question(self, name: str, document: list[int], anew: float) -> None:
        """Ask another question about a document, and note from where its pages came."""
        if name != "device":
            self.tiered.core.pool.clear()
        if name.startswith("disk"):
            self.store.restart()
        if name == "disk, cold":
            for path in self.folder.rglob("*.page"):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        tier = self.store.tier_of(self.tiered.prepare(Request(document)).keys[0])
        assert name == "device" or tier == name.partition(",")[0], (name, tier)
        output = self.ask(name, self.tiered, document, 2 + len(self.seconds[name]))
        pages = len(document) // PAGE
        assert output.metrics.cached_tokens == pages * PAGE
        assert output.metrics.loaded_tokens == (0 if name == "device" else pages * PAGE)
        assert output.metrics.ttft is not None
        self.seconds[name].append(output.metrics.ttft)
        self.ratios[name].append(anew / output.metrics.ttft)
        if name != "device":
            each = self.tiered.scheduler.loads.seconds_per_page
            assert each is not None
            self.seconds[f"load, {name}"].append(each * pages)
            self.ratios[f"load, {name}"].append(each * pages / self.copy())

    def copy(self) -> float:
        start = time.perf_counter()
        np.copyto(*self.copies)
        self.seconds["copy"].append(time.perf_counter() - start)
        return self.seconds["copy"][-1]

    def run(self, tokens: int) -> None:
        document = self.document(tokens)
        anew = self.read(document)
        for name in ("device", "host", "disk", "disk, cold"):
            self.question(name, document, anew)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=TINY)
    parser.add_argument("--tokens", type=int, default=30_000, metavar="N", help="length of the document")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        contenders = Contenders(options.file, options.tokens, folder)
        contenders.run(options.tokens // 8)
        for found in (contenders.seconds, contenders.ratios, contenders.processor):
            found.clear()
        for _ in range(options.rounds):
            contenders.run(options.tokens)
            print({name: round(values[-1], 4) for name, values in contenders.seconds.items()}, flush=True)
            print({name: round(values[-1], 3) for name, values in contenders.processor.items()}, flush=True)
        contenders.store.close()
    seconds, ratios, processor = (
        {name: statistics.median(values) for name, values in found.items()}
        for found in (contenders.seconds, contenders.ratios, contenders.processor)
    )
    print(f"{options.tokens:,} tokens, {contenders.num_bytes / 1e6:.0f} MB, {options.rounds} rounds")
    print("| pages from | TTFT, s | anew / this | CPU, s | anew / this | load, s | load / copy |")
    print("|---|---|---|---|---|---|---|")
    anew, storing = processor["anew"], processor["anew, stored"]
    print(f"| nowhere: read anew | {seconds['anew']:.3f} | 1 | {anew:.3f} | 1 | | |")
    print(
        f"| nowhere, and stored | {seconds['anew, stored']:.3f} | {1 / ratios['storing']:.3f} "
        f"| {storing:.3f} | {anew / storing:.3f} | | |"
    )
    for name in ("device", "host", "disk", "disk, cold"):
        load = f"{seconds[f'load, {name}']:.3f} | {ratios[f'load, {name}']:.2f}" if name != "device" else " |"
        share = f"{processor[name]:.3f} | {anew / processor[name]:.0f}"
        print(f"| {name} | {seconds[name]:.4f} | {ratios[name]:.0f} | {share} | {load} |")
    spread = statistics.quantiles(contenders.ratios["storing"], n=4) if options.rounds > 1 else []
    print(f"storing adds {100 * (ratios['storing'] - 1):.1f} %, quartiles {[round(x, 3) for x in spread]}")
    print(f"a copy takes {1e3 * seconds['copy']:.1f} ms, {contenders.num_bytes / seconds['copy'] / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
