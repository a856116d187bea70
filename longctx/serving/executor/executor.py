"""Runs batches: the interface, and the executor that computes them on devices."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.models import Llama, LlamaConfig
from longctx.models.params import Params
from longctx.parallel.cost import Hardware
from longctx.serving.config import EngineConfig
from longctx.serving.executor.exchange_rule import ExchangeRule
from longctx.serving.executor.row_layout import Layout
from longctx.serving.parallel_plan import ParallelPlan
from longctx.serving.predictor.roofline import CPU, hardware_of
from longctx.serving.request.completion import Completion
from longctx.serving.request.output import TokenLogprob
from longctx.serving.runner.model_runner import Device, MeshModelRunner
from longctx.serving.runner.sampler import IN_OUTPUT, IN_PROMPT, Controls, Drawn
from longctx.serving.runner.step_inputs import RowPlan, SamplePlan, Shape
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence

TABLE_BLOCK = 1024  # entries that `set_entries` sends at a time


class Results(NamedTuple):
    """Of a batch, in the order of `Batch.sampled`."""

    tokens: List[int]
    logprobs: List[TokenLogprob | None]
    # Of prompt tokens, with the sequence and the position of the first of them.
    prompt_logprobs: List[tuple[Sequence, int, List[TokenLogprob]]]


class Executor(Protocol):
    """Runs batches in the order in which they are submitted. `Sequence.data` is a `Completion`."""

    def submit(self, batch: Batch) -> Any:
        """Begin a batch, without waiting for it. In a pipeline of S stages S - 1 more bring it to its end."""
        ...

    def wait(self, pending: Any) -> Results:
        """The results of what `submit` returned."""
        ...

    def compile(self) -> None:
        """Everything that `warm_up` runs."""
        ...

    def warm_up(self) -> None:
        """Do beforehand whatever happens once."""
        ...


@dataclass
class Pending:
    """A batch, and from when it is in the last stage, what comes of it."""

    layout: Layout
    wanted: tuple[int, int, int] = (0, 0, 0)  # rows of each kind
    exchange: str = ""  # of its sharded rows, if it has some
    pages: int = 0  # that hold what is cached of its sharded sequences, on the rank that has most
    drawn: Drawn | None = None
    num_samples: int = 0  # of a rank, in the arrays of `drawn`
    prompt: List[tuple[Chunk, list[tuple[int, int, int]], Any]] = field(default_factory=list)
    packed: tuple[Shape, np.ndarray] | None = None

    def pack(self, shape: Shape) -> np.ndarray:
        if self.packed is None or self.packed[0] != shape:
            self.packed = shape, self.layout.pack_rows(shape)
        return self.packed[1]


class DeviceExecutor:
    """Turns batches into what devices are told. These run behind the call that begins a step, so that planning and
    computing overlap.

    Args:
      model: of which the device has the parameters.
      num_pages: of each rank.
      make_device: of (slots, pages of the longest sequence, the largest bucket of each kind of rows).
      hardware: by which exchanges are chosen.
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        plan: ParallelPlan,
        num_pages: int,
        max_length: int,
        make_device: Callable[[int, int, tuple[int, int, int]], Device],
        hardware: Hardware = CPU,
    ) -> None:
        self._config, self._plan, self._num_pages, self._vocab_size = config, plan, num_pages, model.vocab_size
        entries, slots = -(-max_length // config.page_size), config.max_running
        self._buckets = _buckets(plan, config)
        self._rule = ExchangeRule(plan, model, hardware, self._buckets, entries, config.page_size)
        self.device = make_device(slots, entries, tuple(map(max, self._buckets)))  # type: ignore[arg-type]
        self._held = np.zeros((plan.context, slots), np.int32)
        self._controls = np.zeros((slots, len(Controls._fields)), np.int32)
        self._plain = np.ones(slots, bool)
        self._stages: deque[Pending] = deque(maxlen=plan.stage)  # what is in each, the first stage's last

    @classmethod
    def on_mesh(
        cls,
        model: Llama,
        params: Params,
        config: EngineConfig,
        plan: ParallelPlan,
        mesh: Mesh,
        num_pages: int,
        max_length: int,
    ) -> Self:
        make = functools.partial(MeshModelRunner, model, params, mesh, num_pages, config.page_size)
        return cls(model.config, config, plan, num_pages, max_length, make, hardware_of(mesh.devices.flat[0]))

    # Shapes.

    def shapes(self) -> Iterator[Shape]:
        """All that serving may need."""
        for rows in itertools.product(*self._buckets):
            if any(rows) and self._is_needed(rows):
                yield self._shape_of(rows)
                for message in self._rule.messages(rows):
                    yield self._shape_of(rows, "pass_kv", message)

    def _is_needed(self, rows: tuple[int, ...]) -> bool:
        """Whether some batch, or with stages several, may need such buckets: a smaller one would not do."""
        least = 0
        for kind, count in zip(self._buckets, rows, strict=True):
            least += 1 + max(b for b in (0, *kind) if b < count) if count else 0
        return self._plan.stage > 1 or least <= self._config.token_budget

    def _shape(self) -> Shape:
        """That holds what is in all stages."""
        wanted = [max(column) for column in zip(*(pending.wanted for pending in self._stages), strict=True)]
        if not any(wanted):
            wanted[2] = 1
        rows = [next(b for b in kind if b >= count) for kind, count in zip(self._buckets, wanted, strict=True)]
        # Any exchange gives the same result: batches in later stages take that of the latest one with sharded rows.
        sharded = [pending for pending in self._stages if pending.exchange]
        exchange, message = "pass_q", 0
        if sharded and sharded[-1].exchange == "pass_kv":
            exchange, message = self._rule.of(tuple(rows), max(pending.pages for pending in sharded))
        return self._shape_of(tuple(rows), exchange, message)

    def _shape_of(self, rows: tuple[int, ...], exchange: str = "pass_q", message: int = 0) -> Shape:
        config = self._config
        num_top = min(config.max_logprobs, self._vocab_size)
        sizes = (config.max_running, config.page_size, self._num_pages, num_top, self._plan.context)
        return Shape.of(rows, *sizes, exchange, message)  # type: ignore[arg-type]

    def compile(self) -> None:
        for step in self._empty_steps():
            self.device.compile(*step)

    def warm_up(self) -> None:
        ranks = self._plan.context
        block = np.full((ranks, TABLE_BLOCK), -1, np.int32)
        if ranks > 1:
            self.device.clear_slot(0)
        self.device.set_entries(0, np.zeros(ranks, np.int32), block, block)
        self.device.set_seen(0, np.zeros(self._vocab_size, np.uint8))
        self.device.copy_page(0, 0, 0)
        for rows, samples, shape in self._empty_steps():
            drawn, hidden = self.device.step(rows, samples, shape)
            jax.device_get(drawn)
            targets = np.zeros((ranks, shape.rows), np.int32)
            jax.device_get(self.device.prompt_logprobs(hidden, targets, shape))

    def _empty_steps(self) -> Iterator[tuple[np.ndarray, np.ndarray, Shape]]:
        nothing = Layout(Batch(0), self._plan.context, self._num_pages, self._config.page_size)
        for shape in self.shapes():
            rows = np.stack([nothing.pack_rows(shape)] * self._plan.stage)
            yield rows, nothing.pack_samples(shape, self._controls, self._plain), shape

    # Batches.

    def submit(self, batch: Batch) -> Pending:
        for source, target in batch.copies:
            rank, page = divmod(source, self._num_pages)
            self.device.copy_page(rank, page, target % self._num_pages)
        for sequence in batch.admitted:
            self._on_board(sequence)
        rows, samples, shape = self.assemble(batch)
        drawn, hidden = self.device.step(rows, samples, shape)
        if len(self._stages) == self._plan.stage:
            self._bring_to_end(self._stages[0], drawn, hidden, shape)
        return self._stages[-1]

    def assemble(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, Shape]:
        """What the step that begins a batch is told, and its shape: a batch for every stage, the last one's samples."""
        self._stages.append(self._lay_out(batch))
        shape = self._shape()
        empty = self._plan.stage - len(self._stages)
        rows = [*(pending.pack(shape) for pending in reversed(self._stages)), *[RowPlan.empty(shape)[0]] * empty]
        samples = SamplePlan.empty(shape)[0]
        if not empty:
            samples = self._stages[0].layout.pack_samples(shape, self._controls, self._plain)
        return np.stack(rows), samples, shape

    def wait(self, pending: Pending) -> Results:
        sampled, drawn = pending.layout.sampled, pending.drawn
        assert drawn is not None, "a batch is waited for that is not in the last stage yet"
        at = [place.rank * pending.num_samples + place.number for place in sampled]
        tokens = np.asarray(drawn.tokens)[at].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(sampled)
        wanted = [place.chunk.sequence.completion.params.logprobs for place in sampled]
        if any(count is not None for count in wanted):
            arrays = [np.asarray(x) for x in drawn[1:]]
            logprobs = [None if n is None else _logprob(arrays, i, n) for i, n in zip(at, wanted, strict=True)]
        prompt = []
        for chunk, rows, results in pending.prompt:
            sample: Completion = chunk.sequence.completion
            arrays = [np.asarray(x) for x in results]
            each = arrays[0].shape[0] // self._plan.context
            told = [
                _logprob(arrays, rank * each + row, sample.params.prompt_logprobs or 0)
                for rank, row, position in rows
                if position < sample.num_prompt - 1
            ]
            prompt.append((chunk.sequence, chunk.start + 1, told))
        return Results(tokens, logprobs, prompt)

    def _lay_out(self, batch: Batch) -> Pending:
        plan = self._plan
        layout = Layout(batch, plan.context, self._num_pages, self._config.page_size)
        pending = Pending(layout, layout.counts)
        if batch.tables:
            self._fill_tables(batch, layout)
        sharded = [chunk for chunk in batch.chunks if chunk.sharded]
        if sharded:
            slots = [chunk.slot for chunk in sharded]
            pending.pages = int(self._held[:, slots].sum(1).max())
            pending.exchange = self._rule.choose(sharded)
        return pending

    def _fill_tables(self, batch: Batch, layout: Layout) -> None:
        """New entries of page tables; long runs of them go ahead of the step."""
        rows = [next(b for b in kind if b >= n) for kind, n in zip(self._buckets, layout.counts, strict=True)]
        room = self._shape_of(tuple(rows)).entries if any(rows) else 0
        for slot, first, pages in batch.tables:
            runs: list[list[tuple[int, int, int, int]]] = [[] for _ in layout.entries]
            for number, page in enumerate(pages, first):
                rank, local = divmod(page, self._num_pages)
                runs[rank].append((slot, int(self._held[rank, slot]), local, number))
                self._held[rank, slot] += 1
            if all(len(x) + len(run) <= room for x, run in zip(layout.entries, runs, strict=True)):
                for entries, run in zip(layout.entries, runs, strict=True):
                    entries += run
            else:
                self._send_ahead(slot, runs)

    def _send_ahead(self, slot: int, runs: list[list[tuple[int, int, int, int]]]) -> None:
        for start in range(0, max(map(len, runs)), TABLE_BLOCK):
            pages, numbers = np.full((2, len(runs), TABLE_BLOCK), -1, np.int32)
            firsts = np.zeros(len(runs), np.int32)
            for rank, run in enumerate(runs):
                part = run[start : start + TABLE_BLOCK]
                if part:
                    firsts[rank] = part[0][1]
                    pages[rank, : len(part)] = [page for _, _, page, _ in part]
                    numbers[rank, : len(part)] = [number for *_, number in part]
            self.device.set_entries(slot, firsts, pages, numbers)

    def _on_board(self, sequence: Sequence) -> None:
        """What a slot keeps as long as a sequence has it."""
        sample: Completion = sequence.completion
        slot = sequence.slot
        assert slot is not None
        self._held[:, slot] = 0
        if self._plan.context > 1:
            self.device.clear_slot(slot)
        self._controls[slot] = Controls.row(sample.params, sample.seed, sample.index)
        self._plain[slot] = sample.params.is_plain
        if sample.params.has_penalties:
            seen = np.zeros(self._vocab_size, np.uint8)
            seen[sample.tokens[: sample.num_prompt]] = IN_PROMPT
            seen[sample.tokens[sample.num_prompt :]] |= IN_OUTPUT
            self.device.set_seen(slot, seen)

    def _bring_to_end(self, pending: Pending, drawn: Drawn, hidden: jax.Array, shape: Shape) -> None:
        pending.drawn, pending.num_samples = drawn, shape.samples
        pending.prompt = self._ask_prompt_logprobs(pending.layout, hidden, shape)

    def _ask_prompt_logprobs(self, layout: Layout, hidden: jax.Array, shape: Shape) -> list[Any]:
        asked = []
        targets = np.zeros((shape.ranks, shape.rows), np.int32)
        for chunk in layout.batch.chunks:
            sample: Completion = chunk.sequence.completion
            if sample.params.prompt_logprobs is not None and chunk.start < sample.num_prompt - 1:
                rows = layout.rows_of(chunk, shape)
                for rank, row, position in rows:
                    if position < sample.num_prompt - 1:
                        targets[rank, row] = sample.tokens[position + 1]
                asked.append((chunk, rows))
        if not asked:
            return []
        results = self.device.prompt_logprobs(hidden, targets, shape)
        return [(chunk, rows, results) for chunk, rows in asked]


def _buckets(plan: ParallelPlan, config: EngineConfig) -> tuple[tuple[int, ...], ...]:
    """Rows of each kind that steps are compiled for: sharded, shared, own."""
    if plan.context == 1:
        return (0,), (0,), config.row_buckets
    buckets = (0, *config.growing_buckets(8))
    return buckets if plan.shards_rows else (0,), buckets, buckets


def _logprob(arrays: List[np.ndarray], row: int, count: int) -> TokenLogprob:
    logprobs, top_tokens, top_logprobs = (x[row] for x in arrays)
    return TokenLogprob(
        float(logprobs), tuple(zip(top_tokens[:count].tolist(), top_logprobs[:count].tolist(), strict=True))
    )
