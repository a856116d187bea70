"""Devices on paper: pages hold tokens, and what is sampled depends on every token that a row sees through its tables.

So a page that is lost, doubled, overwritten or read too early, in any stage or on any rank, changes the tokens of some
request, as on real devices, at the price of a few list operations. They are told what real ones are told.
"""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams, StepMetrics
from longctx.serving.distributed import ProcessGroup
from longctx.serving.executor.executor import DeviceExecutor, Pending, Results
from longctx.serving.runner.sampler import Controls, SampledTokens
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape
from longctx.serving.scheduler.batch import Batch

VOCAB, EOS, LENGTH = 50, 7, 256
MODEL = Llama(LlamaConfig(VOCAB, 8, 8, 12, 4, 4, 8, max_positions=LENGTH, eos_ids=(EOS,)))


def next_token(tokens: np.ndarray, seed: int, sample: int) -> int:
    """What paper devices sample after tokens `[T]`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed * 8 + sample) % VOCAB


def continuation(prompt: list[int], params: SamplingParams, sample: int = 0, eos: int | None = None) -> list[int]:
    """The answer to a prompt: the oracle."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        tokens.append(next_token(np.array(tokens), (params.seed or 0) if params.temperature else 0, sample))
        if tokens[-1] == eos and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """Stages and ranks; a stage's row of tokens goes on to the next."""

    def __init__(
        self, plan: ParallelPlan, num_pages: int, page_size: int, slots: int, entries: int, sections: tuple[int, ...]
    ) -> None:
        self.plan, self.page_size = plan, page_size
        each = plan.stage, plan.context
        self.pages = np.full((*each, num_pages, page_size), -1)
        self.table = np.full((*each, slots, entries), -1)
        self.numbers = np.full((*each, slots, entries), -1)
        self.last = np.full(slots, -1)
        # Tokens `[ranks, rows]` by kind, as they leave each stage, and a hash of what each row saw in it.
        self.between: list[Any] = [None] * plan.stage
        self.num_rows = 0
        self.shapes: set[Shape] = set()

    def clear_slot(self, slot: int) -> None:
        self.numbers[:, :, slot] = -1

    def set_entries(self, slot: int, first: np.ndarray, pages: np.ndarray, page_index: np.ndarray) -> None:
        for rank in range(self.plan.context):
            for i in np.flatnonzero(pages[rank] >= 0):
                self._set_entry(slice(None), rank, slot, first[rank] + i, pages[rank, i], page_index[rank, i])

    def set_seen(self, slot: int, seen: np.ndarray) -> None:
        pass

    def prompt_logprobs(self, hidden: Any, targets: np.ndarray, shape: Shape) -> Any:
        none = np.zeros((targets.size, shape.num_top))
        return none[:, 0], none.astype(int), none

    def compile(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> None:
        pass

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[SampledTokens, None]:
        self.shapes.add(shape)
        arrived = [None, *self.between[:-1]]
        for stage in range(self.plan.stage):
            self.between[stage] = self._compute(stage, RowInputs.views(rows[stage], shape), shape, arrived[stage])
        plan = SampleInputs.views(samples, shape)
        tokens = np.zeros(plan.slots.shape, int)
        last = RowInputs.views(rows[-1], shape)
        for rank, number in np.argwhere(plan.slots >= 0):
            row, slot = plan.rows[rank, number], plan.slots[rank, number]
            assert last.slots[rank, row] == slot
            position = last.positions[rank, row]
            assert plan.positions[rank, number] == position + 1
            seen = self._seen(self.plan.stage - 1, rank, row, slot, position, last, shape)
            controls = dict(zip(Controls._fields, plan.controls[rank, number].tolist(), strict=True))
            seed = controls["seed"] if controls["temperature"] else 0
            tokens[rank, number] = next_token(seen, seed, controls["completion"])
        for rank, number in np.argwhere(plan.slots >= 0):
            self.last[plan.slots[rank, number]] = tokens[rank, number]
        return SampledTokens(tokens.reshape(-1), None, None, None), None  # type: ignore[arg-type]

    def _compute(self, stage: int, plan: RowInputs, shape: Shape, arrived: Any) -> Any:
        """Update tables, write tokens; -> the tokens by kind, in places that don't depend on the bucket."""
        for rank in range(self.plan.context):
            told = set()
            for slot, entry, page, number in zip(*(part[rank] for part in plan[-4:]), strict=True):
                if slot >= 0:
                    assert (slot, entry) not in told, "an entry of a page table is set twice, in no order"
                    told.add((slot, entry))
                    self._set_entry(stage, rank, slot, entry, page, number)
        if stage == 0:
            tokens = np.where(plan.tokens < 0, self.last[np.maximum(plan.slots, 0)], plan.tokens)
            self.num_rows += int((plan.slots >= 0).sum())
        else:
            parts = () if arrived is None else (arrived[0][kind][:, :count] for kind, count in enumerate(shape[:3]))
            tokens = np.zeros_like(plan.tokens) if arrived is None else np.concatenate(list(parts), 1)
        if shape.message:
            self._check_message(stage, plan, shape)
        sharded, others = shape.sharded, (shape.ranks - 1) * shape.sharded
        # As on a device, all rows are written before any is read.
        for rank in range(self.plan.context):
            written = np.concatenate([tokens[:, :sharded].reshape(-1), tokens[rank, sharded:]])
            slots = np.concatenate([plan.slots[:, :sharded].reshape(-1), plan.slots[rank, sharded:]])
            assert len(written) == shape.written == others + shape.rows
            own = plan.pages[rank] >= 0
            assert (slots[own] >= 0).all()
            self.pages[stage, rank, plan.pages[rank][own], plan.offsets[rank][own]] = written[own]
        ends, kinds = np.cumsum(shape[:3]), []
        for end, count in zip(ends, shape[:3], strict=True):
            kinds.append(np.pad(tokens[:, end - count : end], ((0, 0), (0, 1000))))
        seen: dict[Any, int] = {}
        if self.plan.stage > 1:
            for rank, row in np.argwhere(plan.slots >= 0):
                slot, position = plan.slots[rank, row], plan.positions[rank, row]
                seen[slot, position] = next_token(self._seen(stage, rank, row, slot, position, plan, shape), 0, 0)
            assert arrived is None or seen == arrived[1], "what a row sees is not the same in every stage"
        return kinds, seen

    def _check_message(self, stage: int, plan: RowInputs, shape: Shape) -> None:
        """That pass-KV's message has room for all that is cached of the sharded sequences."""
        slots, positions = plan.slots[:, : shape.sharded], plan.positions[:, : shape.sharded]
        asking = set(slots[slots >= 0].tolist())
        assert set(plan.message_slots[0]) - {-1} == asking
        for rank in range(self.plan.context):
            pages = 0
            for slot in asking:
                numbers = self.numbers[stage, rank, slot]
                pages += int(((numbers >= 0) & (numbers * self.page_size < positions[slots == slot].min())).sum())
            assert pages <= shape.message

    def _set_entry(self, stage: Any, rank: int, slot: int, entry: int, page: int, number: int) -> None:
        self.table[stage, rank, slot, entry], self.numbers[stage, rank, slot, entry] = page, number

    def _seen(
        self, stage: int, rank: int, row: int, slot: int, position: int, plan: RowInputs, shape: Shape
    ) -> np.ndarray:
        """The tokens up to a position that a row sees: on its rank, on those that share it, or on all."""
        if row < shape.sharded:
            ranks = list(range(shape.ranks))
        elif row < shape.sharded + shape.replicated:
            groups = plan.groups[rank].reshape(shape.ranks, shape.replicated)
            ranks = np.flatnonzero(groups[:, row - shape.sharded] == slot).tolist()
        else:
            ranks = [rank]
        seen = np.full(position + 1, -2)
        for other in ranks:
            before = -1
            for page, number in zip(self.table[stage, other, slot], self.numbers[stage, other, slot], strict=True):
                if number < 0 and shape.ranks > 1:
                    break
                number = number if shape.ranks > 1 else before + 1
                assert number > before, "pages of a sequence are not in order"
                before = number
                start = number * self.page_size
                if start > position:
                    break
                part = self.pages[stage, other, page][: position + 1 - start]
                assert (seen[start : start + len(part)] == -2).all(), "a page is on two ranks"
                seen[start : start + len(part)] = part
        assert (seen >= 0).all(), "a token that is not there"
        return seen


class FakeExecutor(DeviceExecutor):
    """In virtual time: a step takes as long as its rows say."""

    def __init__(self, config: EngineConfig, plan: ParallelPlan, num_pages: int, seconds: float = 1e-3) -> None:
        def make(slots: int, entries: int, sections: tuple[int, int, int]) -> FakeDevice:
            return FakeDevice(plan, num_pages, config.page_size, slots, entries, sections)

        super().__init__(MODEL.config, config, plan, num_pages, LENGTH, make)
        self.now = self._free = 0.0
        self._seconds = seconds
        self._ready: dict[int, float] = {}

    def clock(self) -> float:
        return self.now

    def submit(self, batch: Batch) -> Pending:
        pending = super().submit(batch)
        self._free = max(self.now, self._free) + self._seconds * (1 + batch.num_tokens / 64)
        self._ready[self._stages[0].layout.batch.index] = self._free
        return pending

    def wait(self, pending: Pending) -> Results:
        self.now = max(self.now, self._ready[pending.layout.batch.index])
        return super().wait(pending)


def make_engine(
    num_pages: int = 24,
    page_size: int = 4,
    plan: ParallelPlan | None = None,
    group: ProcessGroup | None = None,
    monitor: Callable[[StepMetrics], object] | None = None,
    **options: object,
) -> Engine:
    options = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16)} | options
    config = EngineConfig(page_size=page_size, num_pages=num_pages, **options)
    executor = FakeExecutor(config, plan or ParallelPlan(), num_pages)
    return Engine(
        MODEL, None, config, executor=executor, clock=executor.clock, plan=plan, process_group=group, monitor=monitor
    )
