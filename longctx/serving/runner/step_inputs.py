"""What the host tells the devices in a step: shapes, and int32 arrays of one step's or one stage's batch."""

import math
from typing import Any, NamedTuple, Self

import numpy as np

from longctx.serving.runner.sampler import Controls


class Shape(NamedTuple):
    """The static sizes of a step; each is one compiled program."""

    sharded: int  # rows on each rank, of three kinds and in this order
    replicated: int
    local: int
    samples: int  # on each rank
    entries: int  # new ones of page tables, on each rank
    page_size: int
    num_pages: int  # of each rank
    num_top: int
    ranks: int
    exchange: str = "pass_q"  # of sharded rows
    message: int = 0  # pages that a rank sends in pass-KV

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
    ) -> Self:
        # A chunk of c tokens begins at most c / page_size + 1 pages, and there is a chunk for a sequence at most.
        sharded, replicated, local = rows
        tokens = ranks * sharded + replicated + local
        samples = min(tokens, max_running)
        entries = tokens // page_size + samples
        return cls(
            sharded, replicated, local, samples, entries, page_size, num_pages, num_top, ranks, exchange, message
        )

    @property
    def rows(self) -> int:
        """On each rank."""
        return self.sharded + self.replicated + self.local

    @property
    def written(self) -> int:
        """Rows whose keys and values a rank may have to keep: those sharded to all ranks, and its own."""
        return self.ranks * self.sharded + self.replicated + self.local


class Packed:
    """A tuple of int32 arrays that travels as one. A slot or page of -1: nothing."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    @classmethod
    def length(cls, shape: Shape) -> int:
        return sum(math.prod(size) for size in cls.sizes(shape))

    @classmethod
    def views(cls, packed: Any, shape: Shape) -> Self:
        """The parts of packed arrays `[..., length]`, on the host (views of them) or traced."""
        parts, start = [], 0
        for size in cls.sizes(shape):
            stop = start + math.prod(size)
            parts.append(packed[..., start:stop].reshape(*packed.shape[:-1], *size))
            start = stop
        return cls(*parts)


class _RowPlan(NamedTuple):
    tokens: Any  # [rows]; -1: the slot's last one
    positions: Any  # [rows]
    slots: Any  # [rows]
    pages: Any  # [written], of this rank, in which the row's keys and values are kept here
    offsets: Any  # [written], in the page
    sharded_positions: Any  # [ranks * sharded], of all ranks, rank after rank
    sharded_slots: Any
    sharded_order: Any  # by slot and position
    groups: Any  # [ranks * shared], slots of all ranks' shared rows
    message_slots: Any  # [samples], whose cached pages pass-KV sends
    table_slots: Any  # [entries]
    table_entries: Any
    table_pages: Any
    table_numbers: Any  # which page of the sequence it is


class RowPlan(_RowPlan, Packed):
    """Of one batch on one rank: what a stage computes."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        rows, written, entries = (shape.rows,), (shape.written,), (shape.entries,)
        several = shape.ranks if shape.ranks > 1 else 0
        sharded, groups = (several * shape.sharded,), (several * shape.replicated,)
        messages = (shape.samples if shape.message else 0,)
        return (rows,) * 3 + (written,) * 2 + (sharded,) * 3 + (groups, messages) + (entries,) * 4

    @classmethod
    def empty(cls, shape: Shape) -> tuple[np.ndarray, Self]:
        """Of all ranks, one that does nothing, int32 `[ranks, length]`, and its parts to be filled in."""
        packed = np.full((shape.ranks, cls.length(shape)), -1, np.int32)
        plan = cls.views(packed, shape)
        for part in (plan.tokens, plan.positions, plan.offsets, plan.sharded_positions):
            part.fill(0)
        plan.sharded_order[:] = np.arange(plan.sharded_order.shape[-1])
        return packed, plan


class _SamplePlan(NamedTuple):
    rows: Any  # [ranks, samples]
    slots: Any  # [ranks, samples]
    positions: Any  # [ranks, samples], of the tokens that are drawn
    controls: Any  # [ranks, samples, fields]
    plain: Any  # [1], whether all are the likeliest tokens


class SamplePlan(_SamplePlan, Packed):
    """Of the batch in the last stage, the same for all devices: which tokens are drawn, and how."""

    @classmethod
    def sizes(cls, shape: Shape) -> tuple[tuple[int, ...], ...]:
        each = (shape.ranks, shape.samples)
        return each, each, each, (*each, len(Controls._fields)), (1,)

    @classmethod
    def empty(cls, shape: Shape) -> tuple[np.ndarray, Self]:
        packed = np.zeros(cls.length(shape), np.int32)
        plan = cls.views(packed, shape)
        plan.slots.fill(-1)
        plan.plain.fill(1)
        return packed, plan
