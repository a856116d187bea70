"""The executor that computes batches on devices: page tables, steps, and the results that are still to be read."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.models import Llama, LlamaConfig
from longctx.models.footprint import kv_row_bytes
from longctx.models.params import Params
from longctx.serving.config import EngineConfig
from longctx.serving.executor.interface import Progress, Results, ignore_progress
from longctx.serving.executor.page_fit import PageFit, compile_shapes
from longctx.serving.executor.page_mover import PageMover
from longctx.serving.executor.row_layout import RowLayout, TableEntry
from longctx.serving.executor.step_shapes import Message, StepShapes
from longctx.serving.kv_cache.connector import TIERS, Loaded, PageKeeper, PageRead, PageSource
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.request.output import TokenLogprob
from longctx.serving.request.sampling_params import SamplingLevel, SamplingParams
from longctx.serving.runner.model_runner import Drawing, ModelRunner
from longctx.serving.runner.sample_step import mask_size
from longctx.serving.runner.sampler import Controls, LogitBias, SampledTokens, count_tokens
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape
from longctx.serving.scheduler.batch import Batch, Chunk, TableRun, keys_by_rank
from longctx.serving.scheduler.sequence import Sequence, completion_of

BLOCK = 1024  # entries that `set_entries` sends at a time


class PageTables:
    """Pages of each slot on each rank, and where the next ones are written."""

    def __init__(
        self, runner: ModelRunner, num_ranks: int, num_slots: int, num_pages: int, num_window_pages: int
    ) -> None:
        self._runner, self._num_pages, self._num_window_pages = runner, num_pages, num_window_pages
        self._held = np.zeros((num_ranks, num_slots), np.int32)

    def clear(self, slot: int) -> None:
        """A slot has a new sequence."""
        self._held[:, slot] = 0
        if len(self._held) > 1:
            self._runner.clear_slot(slot)

    def write(self, tables: list[TableRun], room: int) -> list[list[TableEntry]]:
        """Entries that go with the step, on each rank; runs for which it has no room are sent ahead of it."""
        entries: list[list[TableEntry]] = [[] for _ in self._held]
        for slot, first, pages, windows in tables:
            runs: list[list[TableEntry]] = [[] for _ in entries]
            for number, page in enumerate(pages, first):
                rank, local = divmod(page, self._num_pages)
                window = max(0, windows[number - first] - rank * self._num_window_pages) if windows else 0
                runs[rank].append(TableEntry(slot, int(self._held[rank, slot]), local, number, window))
                self._held[rank, slot] += 1
            if all(len(x) + len(run) <= room for x, run in zip(entries, runs, strict=True)):
                for x, run in zip(entries, runs, strict=True):
                    x += run
            else:
                self._send_ahead(slot, runs)
        return entries

    def _send_ahead(self, slot: int, runs: list[list[TableEntry]]) -> None:
        for start in range(0, max(map(len, runs)), BLOCK):
            pages, numbers, windows = np.full((3, len(runs), BLOCK), -1, np.int32)
            firsts = np.zeros(len(runs), np.int32)
            for rank, run in enumerate(runs):
                part = run[start : start + BLOCK]
                if part:
                    firsts[rank] = part[0].entry
                    pages[rank, : len(part)] = [x.page for x in part]
                    numbers[rank, : len(part)] = [x.number for x in part]
                    windows[rank, : len(part)] = [x.window for x in part]
            self._set_entries(slot, firsts, pages, numbers, windows)

    def _set_entries(self, slot: int, firsts: np.ndarray, *columns: np.ndarray) -> None:
        self._runner.set_entries(slot, firsts, *columns[: 3 if self._num_window_pages else 2])

    def warm_up(self) -> None:
        """Run what writes ahead of a step once, to no effect on pages."""
        ranks = len(self._held)
        block = np.full((ranks, BLOCK), -1, np.int32)
        if ranks > 1:
            self._runner.clear_slot(0)
        self._set_entries(0, np.zeros(ranks, np.int32), block, block, block)


Place = tuple[int, int, int]
"""Rank, row and position of a token."""


@dataclass
class Pending:
    """A batch, and once it is in the last stage, its results on their way to the host."""

    layout: RowLayout
    exchange: str = ""  # of its sharded rows, if it has some
    pages: int = 0  # with cached keys of its sharded sequences, on the rank that has most
    packed: tuple[Shape, np.ndarray] | None = None
    drawing: Drawing | None = None  # its tokens are still to be drawn
    drawn: SampledTokens | None = None
    num_samples: int = 0  # of a rank, in the arrays of `drawn`
    prompts: list[tuple[Chunk, list[Place], Any]] = field(default_factory=list)  # where logprobs were asked for
    pooled: list[Chunk] = field(default_factory=list)  # with rows of embeddings
    hidden: Any = None  # sums of these rows, by slot

    def pack(self, shape: Shape) -> np.ndarray:
        if self.packed is None or self.packed[0] != shape:
            self.packed = shape, self.layout.pack_rows(shape)
        return self.packed[1]

    def draw(self, runner: ModelRunner, vocab_size: int) -> None:
        """Draw its tokens, with masks of those that may come, for which the tokens before have to be known."""
        drawing, self.drawing, masks = self.drawing, None, None
        assert drawing is not None
        if drawing.level >= SamplingLevel.MASKS:
            masks = np.full(mask_size(vocab_size, drawing.shape), -1, np.int32)
            filled = [
                completion_of(place.chunk.sequence).fill_mask(masks[place.rank, place.number], place.position)
                for place in self.layout.sampled
            ]
            masks = masks if any(filled) else None
        self.drawn, self.num_samples = runner.draw(drawing, masks), drawing.shape.samples

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the mask of one of its tokens needs tokens that are not known yet."""
        return any(completion_of(at.chunk.sequence).waits_for_tokens(at.position) for at in self.layout.sampled)

    def ask(self, runner: ModelRunner, hidden: Any, shape: Shape) -> None:
        """Ask for what the host wants to know besides the tokens."""
        asked: list[tuple[Chunk, list[Place]]] = []
        targets = np.zeros((shape.ranks, shape.rows), np.int32)
        for chunk in self.layout.batch.chunks:
            completion = completion_of(chunk.sequence)
            if completion.num_prompt_logprobs is not None and chunk.start < completion.num_prompt - 1:
                rows = self.layout.rows_of(chunk, shape)
                for rank, row, position in rows:
                    if position < completion.num_prompt - 1:
                        targets[rank, row] = completion.tokens[position + 1]
                asked.append((chunk, rows))
        if asked:
            results = runner.prompt_logprobs(hidden, targets, shape)
            self.prompts = [(chunk, rows, results) for chunk, rows in asked]
        self._pool(runner, hidden, shape)

    def _pool(self, runner: ModelRunner, hidden: Any, shape: Shape) -> None:
        """Ask for the sums of the rows that embeddings are made of."""
        slots = np.full((shape.ranks, shape.rows), -1, np.int32)
        for chunk in self.layout.batch.chunks:
            completion = completion_of(chunk.sequence)
            if completion.params.pooling is None:
                continue
            first = completion.num_prompt - completion.num_pooled
            if chunk.start < completion.num_prompt and chunk.start + chunk.num_tokens > first:
                self.pooled.append(chunk)
                for rank, row, position in self.layout.rows_of(chunk, shape):
                    if first <= position < completion.num_prompt:
                        slots[rank, row] = chunk.slot
        if self.pooled:
            self.hidden = runner.pool_rows(hidden, slots)

    def results(self) -> Results:
        """Wait for it."""
        assert self.drawn is not None, "a batch is waited for that is not in the last stage yet"
        sampled = self.layout.sampled
        at = [place.rank * self.num_samples + place.number for place in sampled]
        tokens = np.asarray(self.drawn.tokens)[at].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(sampled)
        wanted = [completion_of(place.chunk.sequence).params.logprobs for place in sampled]
        if any(count is not None for count in wanted):
            arrays = [np.asarray(x) for x in self.drawn[1:]]
            logprobs = [None if n is None else _logprob(arrays, i, n) for i, n in zip(at, wanted, strict=True)]
        hidden = None if self.hidden is None else np.asarray(self.hidden)
        pooled = [] if hidden is None else [(chunk.sequence, chunk.start, hidden[chunk.slot]) for chunk in self.pooled]
        return Results(tokens, logprobs, [self._of_prompt(*prompt) for prompt in self.prompts], pooled)

    def _of_prompt(self, chunk: Chunk, rows: list[Place], results: Any) -> Any:
        completion = completion_of(chunk.sequence)
        arrays = [np.asarray(x) for x in results]
        each = arrays[0].shape[0] // self.layout.num_ranks
        told = [
            _logprob(arrays, rank * each + row, completion.num_prompt_logprobs or 0)
            for rank, row, position in rows
            if position < completion.num_prompt - 1
        ]
        return chunk.sequence, chunk.start + 1, told


def _logprob(arrays: List[np.ndarray], row: int, count: int) -> TokenLogprob:
    logprobs, top_tokens, top_logprobs = (x[row] for x in arrays)
    return TokenLogprob(
        float(logprobs), tuple(zip(top_tokens[:count].tolist(), top_logprobs[:count].tolist(), strict=True))
    )


_READ_BYTES = 256 << 20  # of pages that are stored, at least


def read_bytes(config: EngineConfig, ranks: int, page_bytes: int) -> int:
    """Bytes of pages that are read at a time to be stored, at most: those of two steps of all context ranks."""
    step_pages = -(-config.token_budget // config.page_size) * ranks
    return max(_READ_BYTES, 2 * step_pages * page_bytes)


class DeviceExecutor:
    """Turns batches into what devices are told.

    Devices run behind the call that begins a step, so that planning and computing overlap.

    Args:
      model: of which the devices have the parameters.
      num_pages: of each rank.
      runner: runs steps on the devices, with a slot for each sequence that may run.
      element_bytes: of a number of keys and values.

    Attributes:
      num_pages: as given; with a `fit`, as many as fit.
      fit: where the memory of accelerators goes; None on CPUs.
      mover: moves pages beyond the devices and back; None: they stay there.
      sources: where it gets pages from, by name.
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        plan: ParallelPlan,
        num_pages: int,
        max_length: int,
        runner: ModelRunner,
        element_bytes: float = 4,
    ) -> None:
        self._config, self._plan, self.num_pages, self._vocab_size = config, plan, num_pages, model.vocab_size
        entries, slots = -(-max_length // config.page_size), config.max_running
        self.shapes = StepShapes(model, config, plan, num_pages, entries, element_bytes)
        self.runner = runner
        self.fit: PageFit | None = None
        self.mover: PageMover | None = None
        self.sources: dict[str, PageSource] = {}
        self._tables = PageTables(self.runner, plan.context, slots, num_pages, self.shapes.num_window_pages)
        self._controls = np.zeros((slots, len(Controls._fields)), np.int32)
        self._levels = np.zeros(slots, np.int32)  # a `SamplingLevel` each
        self._biased = np.zeros(slots, bool)  # whether the devices have biases for the slot
        self._stages: deque[Pending] = deque(maxlen=plan.stage)  # the batch in each, the first stage's last
        self._undrawn: Pending | None = None

    @classmethod
    def on_mesh(
        cls,
        model: Llama,
        params: Params,
        config: EngineConfig,
        plan: ParallelPlan,
        mesh: Mesh,
        num_pages: int | None,
        max_length: int,
        store: PageKeeper | None = None,
        fit: PageFit | None = None,
    ) -> "DeviceExecutor":
        """The executor of a mesh's devices, with as many pages of each rank as `fit` finds if `num_pages` is None."""
        head_dim, entries = model.config.head_dim, -(-max_length // config.page_size)
        element_bytes = kv_row_bytes(head_dim, params["embed"].dtype.itemsize, config.kv_dtype) / head_dim
        sizes = config.page_size, config.max_running, entries, config.step_rows(plan).largest
        runner = ModelRunner(model, params, mesh, None, *sizes, config.kv_dtype, plan.ffn)

        def compile_largest(num_pages: int) -> list[Any]:
            shapes = StepShapes(model.config, config, plan, num_pages, entries, element_bytes)
            return compile_shapes(runner, shapes.largest_shapes())

        if fit is not None:
            num_pages = fit.choose(num_pages, compile_largest)
        assert num_pages is not None
        windows = StepShapes(model.config, config, plan, num_pages, entries, element_bytes).num_window_pages
        runner.allocate(num_pages, windows)
        executor = cls(model.config, config, plan, num_pages, max_length, runner, element_bytes)
        executor.fit = fit
        executor.move_pages(store)
        return executor

    def move_pages(self, store: PageKeeper | None = None) -> None:
        """Let pages move to a store and back, and come from `sources`."""
        most_read = read_bytes(self._config, self._plan.context, self.runner.transfer.layout.page_bytes)
        has_window = self.shapes.num_window_pages > 0
        self.mover = PageMover(self.runner, store, self.sources, read_bytes=most_read, has_window=has_window)
        if store is not None:
            self.sources[TIERS] = store

    def compile(self, progress: Progress = ignore_progress) -> None:
        if self._moves_pages:
            self.runner.transfer.compile()
        programs = compile_shapes(self.runner, list(self.shapes), progress)
        if self.fit is not None:
            self.fit.check(programs)

    def warm_up(self) -> None:
        self._tables.warm_up()
        if self._moves_pages and self.mover is not None:
            self.mover.warm_up()
        self.runner.set_seen(0, np.zeros(self._vocab_size, np.uint32))
        self.runner.set_bias(0, LogitBias.row(SamplingParams()))
        warm: set[Shape] = set()
        for rows, samples, shape in self._empty_steps():
            # The program of a level is the same for all steps that sample as many tokens.
            for level in [SamplingLevel.GREEDY] if shape.of_samples in warm else list(SamplingLevel):
                SampleInputs.views(samples, shape).level[:] = level
                drawn, hidden = self.runner.step(rows, samples, shape)
                jax.device_get(drawn)
            warm.add(shape.of_samples)
            targets = np.zeros((self._plan.context, shape.rows), np.int32)
            jax.device_get(self.runner.prompt_logprobs(hidden, targets, shape))
            jax.device_get(self.runner.pool_rows(hidden, targets))

    @property
    def _moves_pages(self) -> bool:
        """Whether what moves pages is compiled ahead, and not when the first page is moved."""
        return self.mover is not None and (self._config.transfers or self.mover.sink is not None)

    def submit(self, batch: Batch) -> Pending:
        self._draw()
        if self.mover is not None:
            self.mover.submit(batch)
        for sequence in batch.admitted:
            self.admit(sequence)
        if not batch.chunks and self._plan.stage == 1:
            self._stages.append(self._lay_out(batch))  # no stage is to be moved on, so no step is needed
            return self._stages[-1]
        rows, samples, shape = self.assemble(batch)
        drawing, hidden = self.runner.begin_step(rows, samples, shape)
        if len(self._stages) < self._plan.stage:
            self.runner.draw(drawing)
            return self._stages[-1]
        last = self._stages[0]
        last.drawing = drawing
        if drawing.level < SamplingLevel.MASKS or not last.waits_for_tokens:
            last.draw(self.runner, self._vocab_size)
        else:
            self._undrawn = last  # devices compute its rows meanwhile
        last.ask(self.runner, hidden, shape)
        return self._stages[-1]

    def wait(self, pending: Pending) -> Results:
        if pending is self._undrawn:
            self._draw()
        return pending.results()

    def _draw(self) -> None:
        """Draw the tokens of the last step, if that waited for the results of the step before it."""
        last, self._undrawn = self._undrawn, None
        if last is not None:
            last.draw(self.runner, self._vocab_size)

    def poll_loads(self, timeout: float = 0.0) -> list[Loaded]:
        return [] if self.mover is None else self.mover.poll(timeout)

    def read_pages(self, pages: List[int], layers: tuple[int, int], windows: List[int] | None = None) -> PageRead:
        return self.runner.read_pages(pages, layers, windows)

    def admit(self, sequence: Sequence) -> None:
        """Set what a slot keeps as long as a sequence has it."""
        completion, slot = completion_of(sequence), sequence.slot
        assert slot is not None
        self._tables.clear(slot)
        params, tokens, num_prompt = completion.params, completion.tokens, completion.num_prompt
        self._controls[slot] = Controls.row(params, completion.seed, completion.index)
        self._levels[slot] = params.level
        if params.has_penalties:
            # A preempted sequence comes with its output so far, all of it: it waits for tokens in flight.
            self.runner.set_seen(slot, count_tokens(tokens[:num_prompt], tokens[num_prompt:], self._vocab_size))
        if params.logit_bias or self._biased[slot]:
            self.runner.set_bias(slot, LogitBias.row(params))
            self._biased[slot] = bool(params.logit_bias)

    def assemble(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, Shape]:
        """Return inputs and shape of the step that begins a batch: a batch for every stage, the last one's samples."""
        self._stages.append(self._lay_out(batch))
        shape = self._shape()
        empty = self._plan.stage - len(self._stages)
        packed = [*(pending.pack(shape) for pending in reversed(self._stages)), *[RowInputs.empty(shape)[0]] * empty]
        rows = np.stack(packed)
        # Devices of all stages have to go round as many times.
        pages = max(pending.pages for pending in self._stages)
        RowInputs.views(rows, shape).message_rounds[:] = Message(shape.message, shape.rounds).rounds_for(pages)
        samples = SampleInputs.empty(shape)[0]
        if not empty:
            samples = self._stages[0].layout.pack_samples(shape, self._controls, self._levels)
        return rows, samples, shape

    def _shape(self) -> Shape:
        """The smallest shape that holds the batches of all stages."""
        sharded, replicated, local = (
            max(column) for column in zip(*(pending.layout.counts for pending in self._stages), strict=True)
        )
        exchanging = [pending for pending in self._stages if pending.exchange]
        exchange = exchanging[-1].exchange if exchanging else ""
        if any(pending.exchange == "pass_q" for pending in exchanging):
            exchange = "pass_q"  # right for any, and as fast whatever is cached: others would send the pages of decodes
        pages = max((pending.pages for pending in exchanging), default=0)
        return self.shapes.of_step((sharded, replicated, local), exchange, pages)

    def _row_layout(self, batch: Batch) -> RowLayout:
        sizes = self._plan.context, self.num_pages, self._config.page_size, self.shapes.num_window_pages
        return RowLayout(batch, *sizes)

    def _lay_out(self, batch: Batch) -> Pending:
        layout = self._row_layout(batch)
        pending = Pending(layout)
        if batch.tables:
            room = self.shapes.holding(layout.counts).entries if any(layout.counts) else 0
            layout.entries = self._tables.write(batch.tables, room)
        if any(chunk.sharded for chunk in batch.chunks):
            pending.pages = self._cached_pages(batch)
            pending.exchange = "pass_q" if batch.exchange is None else batch.exchange.name
        return pending

    def _cached_pages(self, batch: Batch) -> int:
        """Pages with cached keys of the sharded sequences, on the rank that has most of them."""
        total, size = np.zeros(self._plan.context, int), self._config.page_size
        for chunk in batch.chunks:
            if chunk.sharded:
                total += -(-np.array(keys_by_rank(chunk.sequence, chunk.start, size)) // size)
        return int(total.max())

    def _empty_steps(self) -> Iterator[tuple[np.ndarray, np.ndarray, Shape]]:
        nothing = self._row_layout(Batch(0))
        for shape in self.shapes:
            rows = np.stack([nothing.pack_rows(shape)] * self._plan.stage)
            yield rows, nothing.pack_samples(shape, self._controls, self._levels), shape
