"""Runs batches: the interface, and the executor that computes them on a device."""

import functools
from collections.abc import Sequence as List
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from longctx.models import Llama
from longctx.models.cpu_weights import arrange_for_cpu
from longctx.models.params import Params
from longctx.serving import step as programs
from longctx.serving.batch import Batch, Chunk
from longctx.serving.cache import PagedCache
from longctx.serving.config import EngineConfig
from longctx.serving.output import TokenLogprob
from longctx.serving.sample import Sample
from longctx.serving.sampling import IN_OUTPUT, IN_PROMPT, Controls, Drawn
from longctx.serving.sequence import Sequence

TABLE_BLOCK = 1024  # entries that `set_entries` sends at a time


class Results(NamedTuple):
    """Of a batch, in the order of `Batch.sampled`."""

    tokens: List[int]
    logprobs: List[TokenLogprob | None]
    # Of prompt tokens, with the sequence and the position of the first of them.
    prompt_logprobs: List[tuple[Sequence, int, List[TokenLogprob]]]


class Executor(Protocol):
    """Runs batches in the order in which they are submitted. `Sequence.data` is a `Sample`."""

    def submit(self, batch: Batch) -> Any:
        """Begin a batch, without waiting for it."""
        ...

    def wait(self, pending: Any) -> Results:
        """The results of what `submit` returned."""
        ...

    def warm_up(self) -> None:
        """Do beforehand whatever happens once."""
        ...


class Pending(NamedTuple):
    batch: Batch
    drawn: Drawn
    prompt: List[tuple[Chunk, int, tuple[jax.Array, jax.Array, jax.Array]]]  # chunk, first row, token_logprobs


class DeviceExecutor:
    """On one device. JAX runs a step behind the call that begins it, so that planning and computing overlap."""

    def __init__(
        self, model: Llama, params: Params, config: EngineConfig, num_pages: int, max_length: int, device: jax.Device
    ) -> None:
        self._model, self._config, self._num_pages = model, config, num_pages
        there = SingleDeviceSharding(device)
        self._params = arrange_for_cpu(jax.device_put(params, there))
        entries = -(-max_length // config.page_size)
        slots = config.max_running
        # An array not committed to a device would compile the first step twice.
        put = functools.partial(jax.device_put, device=there)
        self.state = programs.DeviceState(
            PagedCache.empty(model.config, num_pages, config.page_size, params["embed"].dtype, there),
            put(np.zeros((slots, entries), np.int32)),
            put(np.zeros(slots, np.int32)),
            put(np.zeros((slots, model.config.vocab_size), np.uint8)),
        )
        self._controls = np.zeros((slots, len(Controls._fields)), np.int32)
        self._plain = np.ones(slots, bool)

    def shape(self, rows: int) -> programs.Shape:
        """The bucket that holds so many rows."""
        bucket = next(b for b in self._config.row_buckets if b >= rows)
        return self._shape_of(bucket)

    def _shape_of(self, bucket: int) -> programs.Shape:
        config = self._config
        return programs.Shape.of(
            bucket,
            config.max_running,
            config.page_size,
            self._num_pages,
            min(config.max_logprobs, self._model.config.vocab_size),
        )

    def warm_up(self) -> None:
        zero = np.int32(0)
        self.state = programs.set_entries(self.state, zero, zero, np.full(TABLE_BLOCK, -1, np.int32))
        self.state = programs.set_seen(self.state, zero, np.zeros(self.state.seen.shape[1], np.uint8))
        self.state = programs.copy_page(self.state, zero, zero, self._num_pages)
        for bucket in self._config.row_buckets:
            shape = self._shape_of(bucket)
            packed, _ = programs.Plan.empty(shape)
            drawn, hidden = self._step(packed, shape)
            jax.device_get(drawn)
            targets = np.zeros(bucket, np.int32)
            jax.device_get(programs.prompt_logprobs(self._model, self._params, hidden, targets, shape.num_top))

    def submit(self, batch: Batch) -> Pending:
        for source, target in batch.copies:
            self.state = programs.copy_page(self.state, np.int32(source), np.int32(target), self._num_pages)
        for sequence in batch.admitted:
            self._on_board(sequence)
        packed, plan, shape = self.assemble(batch)
        drawn, hidden = self._step(packed, shape)
        for x in drawn[: 1 if plan.plain[0] else None]:
            x.copy_to_host_async()
        return Pending(batch, drawn, self._ask_prompt_logprobs(batch, hidden, shape))

    def assemble(self, batch: Batch) -> tuple[np.ndarray, programs.Plan, programs.Shape]:
        """What the step of a batch is told: one packed array, its parts, and the step's shape."""
        shape = self.shape(batch.num_tokens)
        packed, plan = programs.Plan.empty(shape)
        self._fill_tables(batch, plan)
        self._fill_rows(batch, plan)
        return packed, plan, shape

    def wait(self, pending: Pending) -> Results:
        batch = pending.batch
        sampled = batch.sampled
        tokens = np.asarray(pending.drawn.tokens)[: len(sampled)].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(sampled)
        wanted = [sequence.data.params.logprobs for sequence in sampled]
        if any(count is not None for count in wanted):
            arrays = [np.asarray(x) for x in pending.drawn[1:]]
            logprobs = [None if n is None else _logprob(arrays, i, n) for i, n in enumerate(wanted)]
        prompt = []
        for chunk, first, results in pending.prompt:
            sample: Sample = chunk.sequence.data
            arrays = [np.asarray(x) for x in results]
            count = min(chunk.num_tokens, sample.num_prompt - 1 - chunk.start)
            told = [_logprob(arrays, first + i, sample.params.prompt_logprobs or 0) for i in range(count)]
            prompt.append((chunk.sequence, chunk.start + 1, told))
        return Results(tokens, logprobs, prompt)

    def _step(self, packed: np.ndarray, shape: programs.Shape) -> tuple[Drawn, jax.Array]:
        self.state, drawn, hidden = programs.step(self._model, self._params, self.state, packed, shape)
        return drawn, hidden

    def _on_board(self, sequence: Sequence) -> None:
        """What a slot keeps as long as a sequence has it."""
        sample: Sample = sequence.data
        slot = sequence.slot
        assert slot is not None
        self._controls[slot] = Controls.row(sample.params, sample.seed, sample.index)
        self._plain[slot] = sample.params.is_plain
        if sample.params.has_penalties:
            seen = np.zeros(self.state.seen.shape[1], np.uint8)
            seen[sample.tokens[: sample.num_prompt]] = IN_PROMPT
            seen[sample.tokens[sample.num_prompt :]] |= IN_OUTPUT
            self.state = programs.set_seen(self.state, np.int32(slot), seen)

    def _fill_tables(self, batch: Batch, plan: programs.Plan) -> None:
        """New entries of page tables; long runs of them go ahead of the step."""
        filled = 0
        for slot, first, pages in batch.tables:
            if filled + len(pages) <= len(plan.table_pages):
                run = slice(filled, filled + len(pages))
                plan.table_slots[run], plan.table_pages[run] = slot, pages
                plan.table_entries[run] = range(first, first + len(pages))
                filled = run.stop
                continue
            for start in range(0, len(pages), TABLE_BLOCK):
                block = np.full(TABLE_BLOCK, -1, np.int32)
                part = pages[start : start + TABLE_BLOCK]
                block[: len(part)] = part
                self.state = programs.set_entries(self.state, np.int32(slot), np.int32(first + start), block)

    def _fill_rows(self, batch: Batch, plan: programs.Plan) -> None:
        row, samples = 0, 0
        for sequence, slot, start, count, does_sample, decodes in batch.chunks:
            stop = row + count
            if decodes:
                plan.tokens[row], plan.positions[row], plan.slots[row] = -1, start, slot
            else:
                plan.tokens[row:stop] = sequence.data.tokens[start : start + count]
                plan.positions[row:stop] = range(start, start + count)
                plan.slots[row:stop] = slot
            row = stop
            if does_sample:
                plan.sample_rows[samples], plan.sample_slots[samples] = row - 1, slot
                samples += 1
        slots = plan.sample_slots[:samples]
        plan.controls[:samples] = self._controls[slots]
        plan.plain[0] = self._plain[slots].all()

    def _ask_prompt_logprobs(self, batch: Batch, hidden: jax.Array, shape: programs.Shape) -> list[Any]:
        row, asked = 0, []
        targets = np.zeros(shape.rows, np.int32)
        for chunk in batch.chunks:
            sample: Sample = chunk.sequence.data
            if sample.params.prompt_logprobs is not None and chunk.start < sample.num_prompt - 1:
                following = sample.tokens[chunk.start + 1 : min(chunk.start + 1 + chunk.num_tokens, sample.num_prompt)]
                targets[row : row + len(following)] = following
                asked.append((chunk, row))
            row += chunk.num_tokens
        if not asked:
            return []
        results = programs.prompt_logprobs(self._model, self._params, hidden, targets, shape.num_top)
        return [(chunk, first, results) for chunk, first in asked]


def _logprob(arrays: List[np.ndarray], row: int, count: int) -> TokenLogprob:
    logprobs, top_tokens, top_logprobs = (x[row] for x in arrays)
    return TokenLogprob(
        float(logprobs), tuple(zip(top_tokens[:count].tolist(), top_logprobs[:count].tolist(), strict=True))
    )
