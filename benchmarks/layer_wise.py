"""Loading pages while a step computes, layer by layer: what it could gain here. `python -m benchmarks.layer_wise`.

A question about a document whose pages lie in host memory: they have to be written to the devices, and one step of a
few rows attends to all of them. Three ways, in turns: all pages, then the step (what the engine does, where loads end
between steps); the step in as many programs as there are layers, each of which waits for its layer's pages alone, while
a thread sends those of the next ones; and, besides, both at once without waiting for each other, which no order of
them can beat. "in a scan": the pages are an input in pinned host memory of one program, whose scan over layers takes
and writes those of a layer at a time, as a step with loads inside it would; only the writes are run. Seconds are
medians; ratios are to the first way, of the same round.
"""

import argparse
import queue
import statistics
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from benchmarks.tiers import PAGE, SAMPLING, make_engine
from longctx.models import load_checkpoint
from longctx.models.builtin import TINY
from longctx.serving.kv_cache.connector import PageBlock, assemble
from longctx.serving.kv_cache.page_layout import PageSlice
from longctx.serving.runner import layered_step as layered
from longctx.serving.runner.layered_step import Programs, layered_step
from longctx.serving.runner.model_runner import MeshModelRunner
from longctx.serving.runner.page_programs import write_rows
from longctx.serving.runner.paged_cache import PagedCache


@partial(jax.jit, donate_argnums=(0, 1))
def write_in_scan(k: jax.Array, v: jax.Array, slab: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write pages of all layers, `slab` `[layers, pages, 2, page_size, K, H]` in pinned host memory, into the pools."""
    num_pages = k.shape[0] // slab.shape[0]

    def layer(pools: tuple[jax.Array, jax.Array], index: jax.Array) -> Any:
        data = jax.device_put(lax.dynamic_index_in_dim(slab, index, keepdims=False), jax.memory.Space.Device)
        rows, zero = index * num_pages + pages, np.int32(0)
        (k, v), _ = write_rows(True, pools, rows, np.int32(len(pages)), zero, data)
        return (k, v), None

    return lax.scan(layer, (k, v), jnp.arange(slab.shape[0], dtype=np.int32))[0]


class Case:
    """A runner with a document in its pages, and the step of a question about it, which can be run again and again."""

    def __init__(self, path: Path, tokens: int) -> None:
        model, params = load_checkpoint(path, dtype="float32")
        engine = make_engine(model, params, tokens)
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        assert isinstance(runner, MeshModelRunner)
        self.runner = runner
        document = np.random.default_rng(0).integers(0, 255, tokens).tolist()
        engine.generate([document], SAMPLING)
        steps: list[tuple[Any, ...]] = []
        run_step = runner.run_step

        def record(*arguments: Any) -> Any:
            steps.append(arguments)
            return run_step(*arguments)

        runner.run_step = record
        engine.generate([[*document, *[7] * 16]], SAMPLING)
        runner.run_step = run_step
        self.inputs = steps[0][4:]  # rows, samples, shape, sections
        sequence_pages = list(range(tokens // PAGE))
        layout = runner.page_layout
        self.pages, self.num_layers = sequence_pages, layout.num_layers
        data = np.zeros((len(sequence_pages), *layout.shape), layout.bits)
        assemble(runner.read_pages(sequence_pages, (0, self.num_layers)).result(), data, layout.whole)
        heads = (0, layout.num_kv_heads)
        # Host memory has all layers of a page together; a slab of one layer would be a file format of its own.
        self.layers = [
            PageBlock(0, PageSlice((layer, layer + 1), heads), np.ascontiguousarray(data[:, layer : layer + 1]))
            for layer in range(self.num_layers)
        ]
        self.whole = PageBlock(0, layout.whole, data)
        self.pinned: Any = None
        self.wait()

    def wait(self) -> None:
        jax.block_until_ready(self.runner.state)

    def load(self) -> None:
        for first in range(0, len(self.pages), 64):
            data = self.whole.data[first : first + 64]
            self.runner.write_pages(self.pages, PageBlock(first, self.whole.part, data))
        self.wait()

    def load_in_scan(self) -> None:
        runner, cache = self.runner, self.runner.state.cache
        if self.pinned is None:
            layers_first = np.ascontiguousarray(np.moveaxis(self.whole.data, 1, 0))
            sharding = SingleDeviceSharding(runner.mesh.devices.flat[0], memory_kind="pinned_host")
            self.pinned = jax.device_put(layers_first, sharding)
        pools = write_in_scan(*cache, self.pinned, np.arange(len(self.pages), dtype=np.int32))
        runner.state = runner.state._replace(cache=PagedCache(*pools))
        self.wait()

    def step(self) -> None:
        runner = self.runner
        state, _, last_rows = layered_step(runner.model, runner.mesh, runner.params, runner.state, *self.inputs)
        runner.state = state
        jax.block_until_ready(last_rows)

    def one_after_the_other(self) -> None:
        self.load()
        self.step()

    def layer_by_layer(self) -> None:
        """`layered_step`, whose layers each wait for their pages."""
        runner, placed = self.runner, queue.SimpleQueue[Any]()

        def place() -> None:
            for block in self.layers:
                placed.put(runner.place_block(self.pages, block))

        thread = threading.Thread(target=place)
        thread.start()
        programs = layered.programs(runner.mesh, runner.state.cache.is_fp8)

        def layer(model: Any, mesh: Any, weights: Any, index: Any, x: Any, rope: Any, attend: Any, cache: Any) -> Any:
            cache, _ = runner._pages.write(cache, [placed.get()])
            return programs.layer(model, mesh, weights, index, x, rope, attend, cache)

        cut = Programs(programs.begin, layer, programs.end)
        original, layered.programs = layered.programs, lambda mesh: cut  # type: ignore[assignment]
        try:
            self.step()
        finally:
            layered.programs = original
        thread.join()

    def at_once(self) -> None:
        """The step, and as many bytes sent and copied meanwhile; nothing waits for anything."""
        copies = np.empty_like(self.whole.data)

        def move() -> None:
            for block in self.layers:
                self.runner.place_block(self.pages, block)
            np.copyto(copies, self.whole.data)

        thread = threading.Thread(target=move)
        thread.start()
        self.step()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=TINY)
    parser.add_argument("--tokens", type=int, default=30_000, metavar="N")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    case = Case(options.file, options.tokens)
    ways = {
        "the load alone": case.load,
        "the load alone, in a scan": case.load_in_scan,
        "the step alone": case.step,
        "the load, then the step": case.one_after_the_other,
        "layer by layer": case.layer_by_layer,
        "both at once": case.at_once,
    }
    wall: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for name in np.random.default_rng(number).permutation(list(ways)).tolist():
            time.sleep(0.3)
            start, begun = time.perf_counter(), time.process_time()
            ways[name]()
            if number:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - begun)
    base = wall["the load, then the step"]
    print(f"{options.tokens:,} tokens, {case.whole.data.nbytes / 1e6:.0f} MB, {case.num_layers} layers")
    print("| way | wall, ms | least, ms | CPU, ms | wall, of the first way |\n|---|---|---|---|---|")
    for name, seconds in wall.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
        median, processor = (1e3 * statistics.median(x) for x in (seconds, cpu[name]))
        print(f"| {name} | {median:.1f} | {1e3 * min(seconds):.1f} | {processor:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
