"""The int32 arrays that the host sends to the devices in each step, and the static sizes that fix their layout."""

import math
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from longctx.serving.runner.sampler import Controls


class Shape(NamedTuple):
    """The static sizes of a step; each shape is one compiled program. Counts are of one rank."""

    sharded: int  # rows; the three kinds of rows come in this order
    replicated: int
    local: int
    samples: int  # rows that a token is sampled for
    entries: int  # new page table entries
    page_size: int  # tokens
    num_pages: int
    num_top: int  # most probable tokens that are returned with each sampled one
    ranks: int
    exchange: str = "pass_q"  # of the sharded rows
    message: int = 0  # cached pages that a rank sends at a time in pass-KV and all-gather; 0: nothing is cached
    rounds: int = 1  # how many such messages a rank may send; only as many as it takes are sent
    ffn: Literal["tensor", "all"] = "tensor"  # of the plan; with "all", replicated rows are the same on all ranks
    num_window_pages: int = 0  # of layers with a sliding window; 0: there are none

    @classmethod
    def of(
        cls,
        rows: tuple[int, int, int],
        max_running: int,
        page_size: int,
        num_pages: int,
        num_top: int,
        ranks: int = 1,
        exchange: str = "pass_q",
        message: int = 0,
        rounds: int = 1,
        ffn: Literal["tensor", "all"] = "tensor",
        num_window_pages: int = 0,
    ) -> "Shape":
        """The shape with (sharded, replicated, local) rows of a rank, and room for what these rows may need."""
        # A chunk of c tokens begins at most c / page_size + 1 pages, and each sequence has at most one chunk.
        sharded, replicated, local = rows
        tokens = ranks * sharded + replicated + local
        samples = min(tokens, max_running)
        entries = tokens // page_size + samples
        sizes = sharded, replicated, local, samples, entries, page_size, num_pages, num_top, ranks
        return cls(*sizes, exchange, message, rounds, ffn, num_window_pages)

    @property
    def rows(self) -> int:
        """Rows of a rank."""
        return self.sharded + self.replicated + self.local

    @property
    def shares_ffn(self) -> bool:
        """Whether output projections and feed-forward are sharded over the ranks."""
        return self.ffn == "all" and self.ranks > 1

    @property
    def of_samples(self) -> "Shape":
        """Return the fields that sampling depends on; the rest is 0."""
        return type(self)(0, 0, 0, self.samples, 0, 0, 0, self.num_top, self.ranks)

    @property
    def written(self) -> int:
        """Rows whose keys and values a rank may store: the sharded rows of all ranks, and its other rows."""
        return self.ranks * self.sharded + self.replicated + self.local


_Packed = TypeVar("_Packed", bound="Packed")  # Self, which no type checker at run time knows in a method


class Packed:
    """Base of named tuples of int32 arrays that are sent as one array. A slot or page of -1 marks padding."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        """The shape of each field."""
        raise NotImplementedError

    @classmethod
    def length(cls, shape: Shape) -> int:
        """Elements of the packed array."""
        return sum(math.prod(size) for size in cls.sizes(shape))

    @classmethod
    def views(cls: "type[_Packed]", packed: Any, shape: Shape) -> "_Packed":
        """Split packed arrays `[..., length]` into fields: views of a numpy array, slices of a traced one."""
        parts, start = [], 0
        for size in cls.sizes(shape):
            stop = start + math.prod(size)
            parts.append(packed[..., start:stop].reshape(*packed.shape[:-1], *size))
            start = stop
        return cls(*parts)


class _RowInputs(NamedTuple):
    tokens: Any  # [rows]; -1: the last token that was sampled for the slot
    positions: Any  # [rows]
    slots: Any  # [rows]
    pages: Any  # [written], page of this rank that stores the row's keys and values; -1: another rank's
    offsets: Any  # [written], token in the page
    sharded_positions: Any  # [ranks * sharded], of all ranks, rank after rank
    sharded_slots: Any  # [ranks * sharded], likewise
    sharded_order: Any  # [ranks * sharded], sorts them by slot and position; those of a rank are sorted
    groups: Any  # [ranks * replicated], slots of all ranks' replicated rows
    message_slots: Any  # [samples], slots whose cached pages pass-KV and all-gather send, ascending
    message_rounds: Any  # [1], in how many rounds they go, on all ranks of all stages
    table_slots: Any  # [entries], the new page table entries: slot,
    table_entries: Any  # [entries], column of the table,
    table_pages: Any  # [entries], page of this rank,
    table_page_index: Any  # [entries], and which page of its sequence it is
    # Of layers with a sliding window, empty where there are none; an entry whose page is never read has any page.
    window_pages: Any  # [written], as `pages`, of this rank's window pages
    table_window_pages: Any  # [entries], as `table_pages`


class RowInputs(_RowInputs, Packed):
    """The rows that one rank of one stage computes."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        rows, written, entries = (shape.rows,), (shape.written,), (shape.entries,)
        several = shape.ranks if shape.ranks > 1 else 0
        sharded, groups = (several * shape.sharded,), (several * shape.replicated,)
        messages = (shape.samples if shape.message else 0,), (1 if shape.rounds > 1 else 0,)
        sizes = (rows,) * 3 + (written,) * 2 + (sharded,) * 3 + (groups, *messages) + (entries,) * 4
        return (*sizes, *((written, entries) if shape.num_window_pages else ((0,), (0,))))

    @classmethod
    def empty(cls, shape: Shape) -> tuple[np.ndarray, "RowInputs"]:
        """Inputs without a row for all ranks, int32 `[ranks, length]`, and views of their fields to fill in."""
        packed = np.full((shape.ranks, cls.length(shape)), -1, np.int32)
        inputs = cls.views(packed, shape)
        for part in (inputs.tokens, inputs.positions, inputs.offsets, inputs.sharded_positions):
            part.fill(0)
        inputs.sharded_order[:] = np.arange(inputs.sharded_order.shape[-1])
        return packed, inputs


class _SampleInputs(NamedTuple):
    rows: Any  # [ranks, samples], row of the rank whose logits are used
    slots: Any  # [ranks, samples]
    positions: Any  # [ranks, samples], of the sampled tokens
    controls: Any  # [ranks, samples, fields], `Controls` as bits
    level: Any  # [1], the highest `SamplingLevel` of the rows; the host reads it to choose a program


class SampleInputs(_SampleInputs, Packed):
    """Which tokens are sampled from the batch in the last stage, and how; the same on all devices."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        each = (shape.ranks, shape.samples)
        return each, each, each, (*each, len(Controls._fields)), (1,)

    @classmethod
    def empty(cls, shape: Shape) -> tuple[np.ndarray, "SampleInputs"]:
        """Inputs without a sample, int32 `[length]`, and views of their fields to fill in."""
        packed = np.zeros(cls.length(shape), np.int32)
        inputs = cls.views(packed, shape)
        inputs.slots.fill(-1)
        return packed, inputs
