"""Fake devices: pages hold tokens, and a sampled token is a hash of all tokens that its row sees through its tables.

So a page that is lost, doubled, overwritten or read too early, in any stage or on any rank, changes the tokens of some
request, as on real devices, at the price of a few list operations. The inputs are those of real devices.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams, StepMetrics
from longctx.serving.distributed import ProcessGroup
from longctx.serving.executor.executor import DeviceExecutor, Pending, Results
from longctx.serving.request.sampling_params import SamplingLevel
from longctx.serving.runner.model_runner import Drawing
from longctx.serving.runner.sampler import IN_OUTPUT, IN_PROMPT, NUM_FLOATS, Controls, LogitBias, SampledTokens
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape
from longctx.serving.scheduler.batch import Batch

VOCAB, EOS, LENGTH = 50, 7, 256
MODEL = Llama(LlamaConfig(VOCAB, 8, 8, 12, 4, 4, 8, max_positions=LENGTH, eos_ids=(EOS,)))


def next_token(tokens: np.ndarray, seed: int, completion: int, slot: int = 0, allowed: np.ndarray | None = None) -> int:
    """The token that fake devices sample after tokens `[T]`; `slot` is a hash of what the slot keeps.

    `allowed` has a bit for each token that may come, int32 `[words]`: the next one of these is taken.
    """
    token = zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed * 8 + completion + slot) % VOCAB
    while allowed is not None and not int(allowed[token // 32]) >> token % 32 & 1:
        token = (token + 1) % VOCAB
    return token


def hash_slot(seen: np.ndarray | None, bias: list[tuple[int, float]]) -> int:
    """A hash of what a device keeps for a slot: how often tokens were seen, if that matters, and biases."""
    counted = b"" if seen is None else seen.astype(np.int64).tobytes()
    return zlib.crc32(counted + repr(bias).encode()) if counted or bias else 0


def expected_tokens(
    prompt: list[int], params: SamplingParams, completion: int = 0, eos: int | None = None
) -> list[int]:
    """The expected completion of a prompt."""
    tokens, seen, seed = list(prompt), np.zeros(VOCAB, int), (params.seed or 0) if params.temperature else 0
    seen[prompt] = IN_PROMPT
    while len(tokens) < len(prompt) + params.max_tokens:
        slot = hash_slot(seen if params.has_penalties else None, list(params.logit_bias))
        tokens.append(next_token(np.array(tokens), seed, completion, slot))
        seen[tokens[-1]] += IN_OUTPUT
        if tokens[-1] == eos and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """A `ModelRunner` of stages and ranks; each stage passes its rows' tokens to the next."""

    def __init__(
        self,
        plan: ParallelPlan,
        num_pages: int,
        page_size: int,
        slots: int,
        entries: int,
        sections: tuple[int, ...],
        windows: tuple[int, int] | None = None,
    ) -> None:
        self.plan, self.page_size = plan, page_size
        self.window, num_window_pages = windows or (None, 0)
        each = plan.stage, plan.context
        self.pages = np.full((*each, num_pages, page_size), -1)
        self.table = np.full((*each, slots, entries), -1)
        self.page_index = np.full((*each, slots, entries), -1)
        self.window_pages = np.full((*each, num_window_pages, page_size), -1)
        self.window_table = np.full((*each, slots, entries), -1)
        self.last = np.full(slots, -1)
        self.seen = np.zeros((slots, VOCAB), np.uint32)
        self.bias: list[list[tuple[int, float]]] = [[] for _ in range(slots)]
        # For each stage, the tokens `[ranks, rows]` by kind that leave it, and a hash of what each row saw in it.
        self.between: list[Any] = [None] * plan.stage
        self.num_rows, self.is_undrawn = 0, False
        self.shapes: set[Shape] = set()

    def clear_slot(self, slot: int) -> None:
        self.page_index[:, :, slot] = -1

    def set_entries(
        self,
        slot: int,
        first: np.ndarray,
        pages: np.ndarray,
        page_index: np.ndarray,
        window_pages: np.ndarray | None = None,
    ) -> None:
        assert (window_pages is None) == (self.window is None)
        for rank in range(self.plan.context):
            for i in np.flatnonzero(pages[rank] >= 0):
                at = slice(None), rank, slot, first[rank] + i
                self._set_entry(*at, pages[rank, i], page_index[rank, i])
                if window_pages is not None:
                    self.window_table[at] = window_pages[rank, i]

    def set_seen(self, slot: int, seen: np.ndarray) -> None:
        assert seen.dtype == np.uint32
        self.seen[slot] = seen

    def set_bias(self, slot: int, bias: LogitBias) -> None:
        pairs = zip(np.asarray(bias.tokens).tolist(), np.asarray(bias.values).tolist(), strict=True)
        self.bias[slot] = [pair for pair in pairs if pair[0] >= 0]

    def prompt_logprobs(self, hidden: Any, targets: np.ndarray, shape: Shape) -> Any:
        none = np.zeros((targets.size, shape.num_top))
        return none[:, 0], none.astype(int), none

    def pool_rows(self, hidden: Any, slots: np.ndarray) -> np.ndarray:
        return np.stack([np.full(2, np.sum(slots == slot), np.float32) for slot in range(slots.max() + 1)])

    num_programs = 1

    def compile(self, shape: Shape, compiled: Callable[[], object] = lambda: None) -> list[object]:
        compiled()
        return []

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[SampledTokens, None]:
        return self.draw(self.begin_step(rows, samples, shape)[0]), None

    def begin_step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape) -> tuple[Drawing, None]:
        assert not self.is_undrawn, "the tokens of the last step are not drawn"
        self.is_undrawn = True
        self.shapes.add(shape)
        arrived = [None, *self.between[:-1]]
        for stage in range(self.plan.stage):
            self.between[stage] = self._compute(stage, RowInputs.views(rows[stage], shape), shape, arrived[stage])
        last: Any = RowInputs.views(rows[-1], shape)
        return Drawing(shape, SamplingLevel(SampleInputs.views(samples, shape).level[0]), last, samples), None

    def draw(self, drawing: Drawing, masks: np.ndarray | None = None) -> SampledTokens:
        self.is_undrawn = False
        shape, level, last, samples = drawing
        inputs = SampleInputs.views(samples, shape)
        assert masks is None or level >= SamplingLevel.MASKS
        tokens = np.zeros(inputs.slots.shape, int)
        for rank, number in np.argwhere(inputs.slots >= 0):
            row, slot = inputs.rows[rank, number], inputs.slots[rank, number]
            assert last.slots[rank, row] == slot
            position = last.positions[rank, row]
            assert inputs.positions[rank, number] == position + 1
            seen = self._seen(self.plan.stage - 1, rank, row, slot, position, last, shape)
            controls = _unpack(inputs.controls[rank, number])
            seed = int(controls["seed"]) if controls["temperature"] else 0
            is_penalised = (controls[f"{x}_penalty"] for x in ("repetition", "presence", "frequency"))
            kept = hash_slot(self.seen[slot] if tuple(is_penalised) != (1, 0, 0) else None, self.bias[slot])
            assert kept == 0 or inputs.level[0] >= SamplingLevel.FILTERS
            allowed = None if masks is None else masks[rank, number]
            tokens[rank, number] = next_token(seen, seed, int(controls["completion"]), kept, allowed)
        for rank, number in np.argwhere(inputs.slots >= 0):
            self.last[inputs.slots[rank, number]] = tokens[rank, number]
            self.seen[inputs.slots[rank, number], tokens[rank, number]] += IN_OUTPUT
        count = tokens.size
        logprobs, top_logprobs = np.zeros(count), np.zeros((count, shape.num_top))  # nobody computed any
        arrays: Any = (tokens.reshape(-1), logprobs, top_logprobs.astype(int), top_logprobs)
        return SampledTokens(*arrays)

    def _compute(self, stage: int, inputs: RowInputs, shape: Shape, arrived: Any) -> Any:
        """Update tables and write tokens; returns the tokens by kind, padded to be independent of the bucket."""
        for rank in range(self.plan.context):
            entries = set()
            columns = inputs.table_slots, inputs.table_entries, inputs.table_pages, inputs.table_page_index
            for i, (slot, entry, page, number) in enumerate(zip(*(part[rank] for part in columns), strict=True)):
                if slot >= 0:
                    assert (slot, entry) not in entries, "an entry of a page table is set twice, in no order"
                    entries.add((slot, entry))
                    self._set_entry(stage, rank, slot, entry, page, number)
                    if self.window is not None:
                        self.window_table[stage, rank, slot, entry] = inputs.table_window_pages[rank, i]
        if stage == 0:
            tokens = np.where(inputs.tokens < 0, self.last[np.maximum(inputs.slots, 0)], inputs.tokens)
            self.num_rows += int((inputs.slots >= 0).sum())
        else:
            parts = () if arrived is None else (arrived[0][kind][:, :count] for kind, count in enumerate(shape[:3]))
            tokens = np.zeros_like(inputs.tokens) if arrived is None else np.concatenate(list(parts), 1)
        if shape.message:
            self._check_message(stage, inputs, shape)
        sharded, others = shape.sharded, (shape.ranks - 1) * shape.sharded
        # As on a device, all rows are written before any is read.
        for rank in range(self.plan.context):
            written = np.concatenate([tokens[:, :sharded].reshape(-1), tokens[rank, sharded:]])
            slots = np.concatenate([inputs.slots[:, :sharded].reshape(-1), inputs.slots[rank, sharded:]])
            assert len(written) == shape.written == others + shape.rows
            local = inputs.pages[rank] >= 0
            assert (slots[local] >= 0).all()
            offsets = inputs.offsets[rank][local]
            self.pages[stage, rank, inputs.pages[rank][local], offsets] = written[local]
            if self.window is not None:
                assert ((inputs.window_pages[rank] >= 0) == local).all()
                self.window_pages[stage, rank, inputs.window_pages[rank][local], offsets] = written[local]
        ends, kinds = np.cumsum(shape[:3]), []
        for end, count in zip(ends, shape[:3], strict=True):
            kinds.append(np.pad(tokens[:, end - count : end], ((0, 0), (0, 1000))))
        seen: dict[Any, int] = {}
        if self.plan.stage > 1:
            for rank, row in np.argwhere(inputs.slots >= 0):
                slot, position = inputs.slots[rank, row], inputs.positions[rank, row]
                seen[slot, position] = next_token(self._seen(stage, rank, row, slot, position, inputs, shape), 0, 0)
            assert arrived is None or seen == arrived[1], "what a row sees is not the same in every stage"
        return kinds, seen

    def _check_message(self, stage: int, inputs: RowInputs, shape: Shape) -> None:
        """Check that pass-KV's messages have room for all cached pages of the sharded sequences."""
        slots, positions = inputs.slots[:, : shape.sharded], inputs.positions[:, : shape.sharded]
        asking = set(slots[slots >= 0].tolist())
        assert set(inputs.message_slots[0]) - {-1} == asking
        for rank in range(self.plan.context):
            pages = 0
            for slot in asking:
                numbers = self.page_index[stage, rank, slot]
                pages += int(((numbers >= 0) & (numbers * self.page_size < positions[slots == slot].min())).sum())
            rounds = int(inputs.message_rounds[rank, 0]) if shape.rounds > 1 else 1
            assert 0 < rounds <= shape.rounds
            assert pages <= shape.message * rounds

    def _set_entry(self, stage: Any, rank: int, slot: int, entry: int, page: int, number: int) -> None:
        self.table[stage, rank, slot, entry], self.page_index[stage, rank, slot, entry] = page, number

    def _seen(
        self, stage: int, rank: int, row: int, slot: int, position: int, inputs: RowInputs, shape: Shape
    ) -> np.ndarray:
        """The tokens up to a position that a row sees: on its rank, on the ranks that replicate it, or on all."""
        if row < shape.sharded:
            ranks = list(range(shape.ranks))
        elif row < shape.sharded + shape.replicated:
            groups = inputs.groups[rank].reshape(shape.ranks, shape.replicated)
            ranks = np.flatnonzero(groups[:, row - shape.sharded] == slot).tolist()
        else:
            ranks = [rank]
        seen = np.full(position + 1, -2)
        for other in ranks:
            before = -1
            tables = self.table, self.page_index, self.window_table
            for page, number, window in zip(*(table[stage, other, slot] for table in tables), strict=True):
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
                if self.window is not None and (old := max(0, position + 1 - self.window - start)) < len(part):
                    kept = self.window_pages[stage, other, window][: len(part)]
                    assert (kept[old:] == part[old:]).all(), "a window page has other tokens than its page"
        assert (seen >= 0).all(), "a row sees a token that was not written"
        return seen


def _unpack(controls: np.ndarray) -> dict[str, float]:
    """The parameters of a row by name."""
    values = [*controls[:NUM_FLOATS].view(np.float32).tolist(), *controls[NUM_FLOATS:].tolist()]
    return dict(zip(Controls._fields, values, strict=True))


def model_with(window: int | None) -> Llama:
    """The model, or one whose layers have a window."""
    return MODEL if window is None else Llama(dataclasses.replace(MODEL.config, sliding_window=window))


class FakeExecutor(DeviceExecutor):
    """Runs fake devices in virtual time; the seconds of a step follow from its rows."""

    def __init__(
        self,
        config: EngineConfig,
        plan: ParallelPlan,
        num_pages: int,
        seconds: float = 1e-3,
        window: int | None = None,
    ) -> None:
        sizes = config.max_running, -(-LENGTH // config.page_size), config.step_rows(plan).largest
        count = config.count_window_pages(window, plan, num_pages, LENGTH)
        windows = None if window is None else (window, count)
        device: Any = FakeDevice(plan, num_pages, config.page_size, *sizes, windows)
        super().__init__(model_with(window).config, config, plan, num_pages, LENGTH, device)
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
    window: int | None = None,
    **options: object,
) -> Engine:
    options = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16), "chunking": "static"} | options
    config = EngineConfig(page_size=page_size, num_pages=num_pages, **options)
    executor = FakeExecutor(config, plan or ParallelPlan(), num_pages, window=window)
    return Engine(
        model_with(window),
        None,
        config,
        executor=executor,
        clock=executor.clock,
        plan=plan,
        process_group=group,
        monitor=monitor,
    )
