"""Draw which pages left and came while which steps ran, in a real run: `python -m benchmarks.page_overlap FILE.svg`.

An engine with the built-in model reads a document anew, whose pages are stored while it is read, and meanwhile answers
a question about another one, whose pages come from disk and host memory. docs/figures/page_overlap.svg is of a run.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.tiers import Restarting
from longctx.models import load_checkpoint
from longctx.models.builtin import TINY
from longctx.plotting import COLORS, drawing, save, style
from longctx.serving import Engine, EngineConfig, Request, SamplingParams, StepMetrics
from longctx.serving.kv_cache.connector import PageBlock, PageRead, PageStore
from longctx.serving.kv_cache.page_layout import PageLayout
from longctx.serving.kv_cache.tiers.config import TierConfig
from longctx.serving.kv_cache.tiers.store import open_store

PAGE, BUDGET = 64, 256
BEFORE, AFTER = 0.3, 1.0  # seconds about the question that are drawn
NEW, OLD = "a new document", "a question about a document on disk"
PROMPTS = {NEW: COLORS[0], OLD: COLORS[1]}
LEAVE, READ, WRITTEN = COLORS[2], COLORS[3], COLORS[4]


class Span(NamedTuple):
    """Pages `first` to `stop` of a sequence, and from when to when something happened to them."""

    first: int
    stop: int
    begun: float
    ended: float


class Watched:
    """A store that notes when pages are read from the devices, and when the mover takes pages of a load."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.stored: list[Span] = []
        self.taken: list[Span] = []
        self._lock = threading.Lock()

    def put(self, stores: Sequence[PageStore], read: PageRead) -> None:
        self._store.put(stores, _WatchedRead(read, [store.number for store in stores], self.stored))

    def fetch(self, keys: Sequence[bytes], wake: Callable[[], object]) -> Any:
        return _WatchedFetch(self._store.fetch(keys, wake), self.taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _WatchedRead:
    def __init__(self, read: PageRead, numbers: list[int], spans: list[Span]) -> None:
        self._read, self._numbers, self._spans, self._begun = read, numbers, spans, time.monotonic()

    def result(self) -> list[PageBlock]:
        blocks = self._read.result()
        self._spans.append(Span(min(self._numbers), max(self._numbers) + 1, self._begun, time.monotonic()))
        return blocks


class _WatchedFetch:
    def __init__(self, fetch: Any, spans: list[Span]) -> None:
        self._fetch, self._spans, self._last = fetch, spans, time.monotonic()

    def take(self, max_bytes: int) -> list[PageBlock]:
        blocks: list[PageBlock] = self._fetch.take(max_bytes)
        now = time.monotonic()
        for block in blocks:
            self._spans.append(Span(block.first, block.first + len(block.data), self._last, now))
            self._last = now
        return blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetch, name)


class Run(NamedTuple):
    """What happened: `stored` from the devices, `taken` from tiers, `written` to the devices.

    `came` is when the question came, `loaded` how many of its tokens were loaded.
    """

    steps: list[StepMetrics]
    stored: list[Span]
    taken: list[Span]
    written: list[Span]
    came: float
    loaded: int


def watch_writes(engine: Engine) -> list[Span]:
    """Note from now on when loaded pages are written over those of the devices."""
    runner: Any = engine.executor.runner  # type: ignore[attr-defined]
    place, write, spans = runner.place_block, runner.write_placed, list[Span]()
    blocks: dict[int, PageBlock] = {}

    def place_block(pages: Sequence[int], block: PageBlock) -> Any:
        placed = place(pages, block)
        blocks[id(placed)] = block
        return placed

    def write_placed(placed: list[Any]) -> Any:
        begun = time.monotonic()
        wait = write(placed)
        if wait is not None:
            wait()
        for each in placed:
            block = blocks.pop(id(each))
            spans.append(Span(block.first, block.first + len(block.data), begun, time.monotonic()))
        return wait

    runner.place_block, runner.write_placed = place_block, write_placed
    return spans


def run(tokens: int) -> Run:
    model, params = load_checkpoint(TINY, dtype="float32")
    sizes = model.config
    layout = PageLayout(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, PAGE, "float32")
    num_bytes = tokens // PAGE * layout.page_bytes
    config = EngineConfig(
        page_size=PAGE,
        num_pages=2 * tokens // PAGE,
        max_running=2,
        max_length=tokens + 64,
        token_budget=BUDGET,
        buckets=(8, BUDGET),
        tiers=TierConfig(host_bytes=1),
    )
    random, sampling = np.random.default_rng(0), SamplingParams(max_tokens=24, ignore_eos=True)
    old, new = (random.integers(0, 255, count).tolist() for count in (tokens, tokens // 3))
    with tempfile.TemporaryDirectory() as folder:
        tiers = TierConfig(host_bytes=4 * num_bytes, disk_bytes=8 * num_bytes, disk=folder)
        inner = Restarting(lambda: open_store(tiers, layout, b"figure"))
        store: Any = Watched(inner)
        engine = Engine(model, params, config, store=store)
        engine.warm_up()
        for _ in range(2):  # a load runs once before
            engine.generate([Request(old, sampling)])
            while engine.has_work:
                engine.step()
            engine.core.pool.clear()
            assert store.flush(60)
            inner.restart()
            time.sleep(1)
        store.stored.clear()
        store.taken.clear()
        steps: list[StepMetrics] = []
        engine.add_monitor(steps.append)
        written = watch_writes(engine)
        engine.scheduler.loads.seconds_per_page = None
        engine.submit(Request(new, sampling, NEW))
        while not steps or engine.requests[NEW].progress[0] < tokens // 6:
            engine.step()
        came, loaded = time.monotonic(), 0
        engine.submit(Request([*old, *[7] * 20], sampling, OLD))
        while engine.has_work:
            for event in engine.step():
                if event.output is not None and event.request_id == OLD:
                    loaded = event.output.metrics.loaded_tokens
        store.flush(60)
        store.close()
    return Run(steps, store.stored, store.taken, written, came, loaded)


def draw(found: Run) -> Figure:
    figure, _ = drawing(0, 9, 5.5)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(1, 3, 3))
    origin = found.came
    for step in found.steps:
        at, low = step.finished - step.seconds - origin, 0.0
        rows = sum(count for _, count, _ in step.rows)
        for name, count, _ in step.rows:
            height = count / rows
            top.bar(at, height, step.seconds, low, align="edge", color=PROMPTS[name], edgecolor="white", linewidth=0.4)
            low += height
        prompts = [name for name, _, decodes in step.rows if not decodes]
        for name, (first, count) in zip(prompts, step.chunks, strict=True):
            axes, height = (middle, count / PAGE) if name == NEW else (bottom, 12)
            axes.barh(first / PAGE, step.seconds, height, at, align="edge", color=PROMPTS[name], alpha=0.5)
    for axes, spans, color in (
        (middle, found.stored, LEAVE),
        (bottom, found.taken, READ),
        (bottom, found.written, WRITTEN),
    ):
        for span in spans:
            width, height = max(span.ended - span.begun, 3e-3), span.stop - span.first
            axes.barh(span.first, width, height, span.begun - origin, align="edge", color=color)
    for axes in (top, middle, bottom):
        axes.axvline(0, color="black", linewidth=0.8, linestyle=":")
    top.set_yticks([])
    top.set_ylabel("rows of\neach step")
    middle.set_ylabel("page of the\nnew document")
    bottom.set_ylabel("page of the\ndocument on disk")
    bottom.set_xlabel("seconds since the question came")
    bottom.set_xlim(-BEFORE, AFTER)
    drawn = [step for step in found.steps if -BEFORE < step.finished - origin < AFTER + step.seconds]
    pages = [first / PAGE for step in drawn for first, count in step.chunks if count == BUDGET]
    middle.set_ylim(min(pages) - 4, max(pages) + 8)
    bottom.set_ylim(0)
    labels = {
        LEAVE: "pages leave the device",
        READ: "pages are read from disk",
        WRITTEN: "pages are written to the device",
    }
    handles = [Patch(color=color, label=name) for name, color in PROMPTS.items()]
    handles += [Patch(color=color, label=name) for color, name in labels.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=Path("page_overlap.svg"))
    parser.add_argument("--tokens", type=int, default=30_000, metavar="N", help="of the document on disk")
    options = parser.parse_args()
    found = run(options.tokens)
    print(f"{len(found.steps)} steps, {len(found.stored)} reads, {len(found.taken)} blocks of {found.loaded} tokens")
    with style():
        save(draw(found), options.file)


if __name__ == "__main__":
    main()
