"""Which row of which rank computes which token of a batch: from plain data to arrays, on the host alone."""

from typing import Any, NamedTuple

import numpy as np

from longctx.parallel.varseq import shard_tokens
from longctx.serving.runner.step_inputs import RowInputs, SampleInputs, Shape
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import completion_of

SHARDED, REPLICATED, LOCAL = range(3)  # kinds of rows, in the order in which a rank has them


class _Rows:
    """Rows of one kind on one rank."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.pages: list[int] = []  # of the rank; -1: another's

    def __len__(self) -> int:
        return len(self.slots)

    def add(self, tokens: list[int], positions: list[int], slot: int, pages: list[int]) -> None:
        self.tokens += tokens
        self.positions += positions
        self.slots += [slot] * len(positions)
        self.pages += pages

    def fill_up(self, count: int) -> None:
        """Add rows that belong to no sequence."""
        missing = count - len(self)
        self.add([0] * missing, [0] * missing, -1, [-1] * missing)


class Sampled(NamedTuple):
    """Place where a token is drawn."""

    chunk: Chunk
    rank: int
    kind: int
    row: int  # of its kind
    number: int  # among those of its rank

    @property
    def position(self) -> int:
        """Position of the token in its sequence."""
        return self.chunk.start + self.chunk.num_tokens


class TableEntry(NamedTuple):
    """An entry of a rank's page table: the page, its number in its sequence, and its window page.

    Rows see no window page in an entry whose sequence holds none, so that any may be there.
    """

    slot: int
    entry: int
    page: int
    number: int
    window: int = 0


class RowLayout:
    """The rows of a batch. Keeps what it needs of sequences, which change while the batch is in the stages.

    Attributes:
      counts: rows of each kind on the rank that has most.
      sampled: in the order of `Batch.sampled`.
      entries: new entries of each rank's page tables.
    """

    def __init__(self, batch: Batch, num_ranks: int, num_pages: int, page_size: int, num_window_pages: int = 0) -> None:
        self.batch, self.num_ranks, self._num_pages, self._page_size = batch, num_ranks, num_pages, page_size
        self._windows = _windows_of(batch, page_size) if num_window_pages else {}
        self._rows = [[_Rows() for _ in range(num_ranks)] for _ in range(3)]
        self._sharded_pages: list[list[int]] = []  # of all ranks, for each row that is sharded, rank after rank
        self._places: dict[int, tuple[int, int, int]] = {}  # of chunks' last rows, by slot: rank, kind, row
        self.entries: list[list[TableEntry]] = [[] for _ in range(num_ranks)]
        self.sampled: list[Sampled] = []
        chunks = batch.chunks
        if num_ranks == 1:
            decodes = [chunk for chunk in chunks if chunk.decodes]
            self._add_decodes(decodes)
            chunks = chunks[len(decodes) :]
        sharded = []
        for chunk in chunks:
            if chunk.sharded:
                sharded.append(chunk)
            elif len(chunk.ranks) > 1:
                self._replicate(chunk)
            else:
                self._add(chunk, chunk.ranks[0], LOCAL)
        if sharded:
            self._shard(sharded)
        self.counts: tuple[int, int, int] = tuple(max(map(len, kind)) for kind in self._rows)  # type: ignore[assignment]
        drawn = [len(self.sampled)] * num_ranks
        for chunk in chunks:
            if chunk.samples:
                rank, kind, row = self._places[chunk.slot]
                self.sampled.append(Sampled(chunk, rank, kind, row, drawn[rank]))
                drawn[rank] += 1

    # From chunks to rows.

    def _add_decodes(self, chunks: list[Chunk]) -> None:
        """Add the decodes of a single rank, which come first in a batch, at once: they are most rows of most steps."""
        if chunks:
            size, count, (rows,) = self._page_size, len(chunks), self._rows[LOCAL]
            sequences, slots, starts, *_ = zip(*chunks, strict=True)
            rows.tokens, rows.positions, rows.slots = [-1] * count, list(starts), list(slots)
            rows.pages = [sequence.pages[start // size] for sequence, start in zip(sequences, starts, strict=True)]
            self.sampled = [Sampled(chunk, 0, LOCAL, row, row) for row, chunk in enumerate(chunks)]

    def _add(self, chunk: Chunk, rank: int, kind: int) -> None:
        sequence, slot, start, count = chunk[:4]
        rows, first = self._rows[kind][rank], rank * self._num_pages
        if count == 1:
            page = sequence.pages[start // self._page_size] - first
            rows.tokens.append(-1 if chunk.decodes else int(completion_of(sequence).tokens[start]))
            rows.positions.append(start)
            rows.slots.append(slot)
            rows.pages.append(page if 0 <= page < self._num_pages else -1)
        else:
            pages = self._pages(chunk) - first
            pages[(pages < 0) | (pages >= self._num_pages)] = -1
            tokens = completion_of(sequence).tokens[start : start + count].tolist()
            rows.add(tokens, list(range(start, start + count)), slot, pages.tolist())
        self._places[slot] = rank, kind, len(rows.slots) - 1

    def _replicate(self, chunk: Chunk) -> None:
        """In the same place on all ranks of the sequence, the first of which draws."""
        top = max(len(self._rows[REPLICATED][rank]) for rank in chunk.ranks)
        for rank in reversed(chunk.ranks):
            self._rows[REPLICATED][rank].fill_up(top)
            self._add(chunk, rank, REPLICATED)

    def _shard(self, chunks: list[Chunk]) -> None:
        """Long chunks in zigzag, single tokens to where there is least, in turns from step to step.

        The rows of a rank are sorted by slot and position.
        """
        n, rows = self.num_ranks, self._rows[SHARDED]
        pages: list[list[int]] = [[] for _ in range(n)]
        long = [chunk for chunk in chunks if chunk.num_tokens > 1]
        if long:
            known = np.concatenate([completion_of(c.sequence).tokens[c.start : c.start + c.num_tokens] for c in long])
            positions = np.concatenate([np.arange(c.start, c.start + c.num_tokens) for c in long])
            slots = np.repeat([c.slot for c in long], [c.num_tokens for c in long])
            owners = np.concatenate([self._pages(c) for c in long])
            for rank, mine in enumerate(shard_tokens([c.num_tokens for c in long], [c.start for c in long], n)):
                own = rows[rank]
                own.tokens, own.positions = known[mine].tolist(), positions[mine].tolist()
                own.slots, pages[rank] = slots[mine].tolist(), owners[mine].tolist()
        for chunk in (chunk for chunk in chunks if chunk.num_tokens == 1):
            rank = min(range(n), key=lambda rank: (len(rows[rank]), (rank - self.batch.index) % n))
            own, start = rows[rank], chunk.start
            own.tokens.append(-1 if chunk.decodes else int(completion_of(chunk.sequence).tokens[start]))
            own.positions.append(start)
            own.slots.append(chunk.slot)
            pages[rank].append(chunk.sequence.pages[start // self._page_size])
        ends = {(chunk.slot, chunk.start + chunk.num_tokens - 1) for chunk in chunks}
        for rank, own in enumerate(rows):
            order = np.lexsort((own.positions, own.slots)).tolist()
            columns = own.tokens, own.positions, own.slots, pages[rank]
            own.tokens, own.positions, own.slots, pages[rank] = ([column[row] for row in order] for column in columns)
            for row, token in enumerate(zip(own.slots, own.positions, strict=True)):
                if token in ends:
                    self._places[token[0]] = rank, SHARDED, row
        self._sharded_pages = pages

    def _pages(self, chunk: Chunk) -> np.ndarray:
        """The page of each token."""
        first, last = chunk.start // self._page_size, (chunk.start + chunk.num_tokens - 1) // self._page_size
        number = np.arange(chunk.start, chunk.start + chunk.num_tokens) // self._page_size - first
        return np.array(chunk.sequence.pages[first : last + 1])[number]

    # From rows to arrays.

    def pack_rows(self, shape: Shape) -> np.ndarray:
        """A `RowInputs` of each rank, int32 `[ranks, length]`."""
        packed, plan = RowInputs.empty(shape)
        firsts = self._firsts(shape)
        for first, kind in zip(firsts, self._rows, strict=True):
            for rank, rows in enumerate(kind):
                part = (rank, slice(first, first + len(rows)))
                plan.tokens[part], plan.positions[part], plan.slots[part] = rows.tokens, rows.positions, rows.slots
        # A rank may have to keep what is sharded to any.
        others = (shape.ranks - 1) * shape.sharded
        plan.offsets[:, others + shape.sharded :] = plan.positions[:, shape.sharded :] % self._page_size
        for first, kind in zip(firsts[1:], self._rows[1:], strict=True):
            for rank, rows in enumerate(kind):
                plan.pages[rank, others + first : others + first + len(rows)] = rows.pages
        if shape.sharded:
            self._pack_sharded(plan, shape)
        if shape.replicated and shape.ranks > 1:
            plan.groups[:] = plan.slots[:, shape.sharded : firsts[LOCAL]].reshape(1, -1)
        for rank, entries in enumerate(self.entries):
            if entries:
                own = slice(len(entries))
                slots, numbers, pages, indices, windows = zip(*entries, strict=True)
                plan.table_slots[rank, own], plan.table_entries[rank, own] = slots, numbers
                plan.table_pages[rank, own], plan.table_page_index[rank, own] = pages, indices
                if shape.num_window_pages:
                    plan.table_window_pages[rank, own] = windows
        if shape.num_window_pages:
            self._pack_windows(plan, shape)
        return packed

    def _pack_windows(self, plan: RowInputs, shape: Shape) -> None:
        """Fill in the window page of each page that a row is written to."""
        is_written = plan.pages >= 0
        ranks = np.broadcast_to(np.arange(shape.ranks)[:, None], is_written.shape)[is_written]
        pages = (plan.pages[is_written] + ranks * self._num_pages).tolist()
        windows = np.fromiter(map(self._windows.__getitem__, pages), np.int32, len(pages))
        plan.window_pages[is_written] = windows - ranks * shape.num_window_pages

    def _pack_sharded(self, plan: RowInputs, shape: Shape) -> None:
        positions, slots = (x[:, : shape.sharded].reshape(-1) for x in (plan.positions, plan.slots))
        plan.sharded_positions[:], plan.sharded_slots[:] = positions, slots
        plan.sharded_order[:] = np.lexsort((positions, np.where(slots < 0, np.iinfo(np.int32).max, slots)))
        by_rank = np.full((shape.ranks, shape.sharded), -1, np.int32)
        for rank, mine in enumerate(self._sharded_pages):
            by_rank[rank, : len(mine)] = mine
        pages, ranks = by_rank.reshape(-1), np.arange(shape.ranks)[:, None]
        owned = (pages >= 0) & (pages // self._num_pages == ranks)
        plan.pages[:, : pages.size] = np.where(owned, pages - ranks * self._num_pages, -1)
        plan.offsets[:, : pages.size] = positions % self._page_size
        if shape.message:
            asking = sorted({slot for rows in self._rows[SHARDED] for slot in rows.slots if slot >= 0})
            plan.message_slots[:, : len(asking)] = asking

    def pack_samples(self, shape: Shape, controls: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """A `SampleInputs`, int32 `[length]`; controls and levels of sampling are those of the slots."""
        packed, plan = SampleInputs.empty(shape)
        if self.sampled:
            firsts = self._firsts(shape)
            chunks, ranks, kinds, rows, numbers = zip(*self.sampled, strict=True)
            slot = np.array([chunk.slot for chunk in chunks])
            at: Any = (0, slice(len(slot))) if self.num_ranks == 1 else (ranks, numbers)
            plan.rows[at] = np.array(rows) + np.array(firsts)[np.array(kinds)]
            plan.slots[at] = slot
            plan.positions[at] = [each.position for each in self.sampled]
            plan.controls[at] = controls[slot]
            plan.level[0] = levels[slot].max()
        return packed

    def rows_of(self, chunk: Chunk, shape: Shape) -> list[tuple[int, int, int]]:
        """(rank, row, position) of a chunk's tokens, each once."""
        firsts = self._firsts(shape)
        found: dict[int, tuple[int, int, int]] = {}
        for first, kind in zip(firsts, self._rows, strict=True):
            for rank, rows in enumerate(kind):
                for row, slot in enumerate(rows.slots):
                    if slot == chunk.slot:
                        found.setdefault(rows.positions[row], (rank, first + row, rows.positions[row]))
        return [found[position] for position in sorted(found)]

    @staticmethod
    def _firsts(shape: Shape) -> tuple[int, int, int]:
        return 0, shape.sharded, shape.sharded + shape.replicated


def _windows_of(batch: Batch, page_size: int) -> dict[int, int]:
    """The window page of each page that a batch writes to."""
    windows = dict[int, int]()
    for sequence, _, start, count, *_ in batch.chunks:
        own = slice(start // page_size, (start + count - 1) // page_size + 1)
        windows.update(zip(sequence.pages[own], sequence.window_pages[own], strict=True))
    return windows
