"""The paged attention kernel in Triton: persistent programs over the work tables, one loop over blocks of slots.

`sort_tiles` says beforehand which blocks of slots a tile sees. Blocks of which all rows see every key come first and
take no mask. The page of each slot is looked up in the loop; Triton brings both it and the keys to shared memory ahead
of their use, in asynchronous copies.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.triton import adapter
from longctx.kernels.triton.e4m3 import dequantize_pairs
from longctx.kernels.triton.online_softmax import OnlineSoftmax
from longctx.kernels.triton.scores import ScoreConfig
from longctx.kernels.triton.tile_config import Piece, TileConfig, pieces_of
from longctx.kernels.work import Tile, Work


class Rows(NamedTuple):
    """The rows of the kernel, as `SortedTiles` has them, and what each sees."""

    token: Any  # [rows]
    head: Any  # [rows]
    seen: tuple[Any, ...]  # [tiles, block_q] each


class Pages(NamedTuple):
    """Slots `[pages * page_size, K, H or Hv]` of keys and of values, the page table `[B, M]`, and the first page `[1]`.

    FP8 slots are uint16 `[pages * page_size, K, H / 2]`, pairs of values, and have scales `[pages, K, page_size]`.
    """

    k: Any
    v: Any
    table: Any
    first_page: Any
    k_scale: Any = None
    v_scale: Any = None


class Columns(NamedTuple):
    """Columns `first + stride * n` of a head, for the columns n of a piece: of FP8 a word has two of them."""

    piece: Piece
    stride: int
    first: int

    def numbers(self) -> Array:
        return self.piece.columns() * self.stride + self.first


def columns_of(head_size: int, is_fp8: bool) -> tuple[Columns, ...]:
    """The columns of each array in which a block of keys is multiplied, in their order."""
    if not is_fp8:
        return tuple(Columns(piece, 1, 0) for piece in pieces_of(head_size))
    return tuple(Columns(piece, 2, first) for piece in pieces_of(head_size // 2) for first in (0, 1))


class _Static(NamedTuple):
    """Static arguments of a kernel."""

    config: TileConfig
    scores: ScoreConfig
    page_size: int
    group: int  # heads that share a KV head
    columns: tuple[Columns, ...]  # of queries and keys
    value_columns: tuple[Columns, ...]


@kernel_jit("config", "scores", "page_size")
def paged_attention(
    q: Array, pages: Pages, rows: Rows, work: Work, config: TileConfig, scores: ScoreConfig, page_size: int
) -> tuple[Array, Array]:
    """Attention of the items of `work`, each a tile of rows of one KV head.

    Args:
      q: `[T, N, H]`.

    Returns:
      out float32 `[pieces, block_q, Hv]` and lse float32 `[pieces, block_q]`, natural log. Pieces that are not computed
      hold any values.
    """
    (_, heads, head_size), kv_heads = q.shape, pages.k.shape[1]
    num_pieces = kv_heads * work.tiles.shape[0] + work.workers.shape[0]
    is_fp8 = pages.k_scale is not None
    value_size = pages.v.shape[2] * (1 + is_fp8)
    columns = (columns_of(size, is_fp8) for size in (head_size, value_size))
    static = _Static(config, scores, page_size, heads // kv_heads, *columns)
    operands, structure = jax.tree.flatten((q, pages, rows, work.tiles, work.items, work.workers))
    kernel = adapter.kernel(
        functools.partial(_kernel, static, structure),
        [((num_pieces, config.block_q, value_size), jnp.float32), ((num_pieces, config.block_q), jnp.float32)],
        like=q,
        grid=(work.workers.shape[0],),
        config=config,
        name="paged_attention",
    )
    out, lse = kernel(*operands)
    return out, lse


def _kernel(static: _Static, structure: Any, *refs: Any) -> None:
    q, pages, rows, tiles, items, workers = jax.tree.unflatten(structure, refs[:-2])
    pages = pages._replace(first_page=pages.first_page[0])
    worker = pl.program_id(0)
    start, stop, first_unit, stop_unit = (workers[worker, column] + 0 for column in range(4))

    def compute_item(position: Array, _: None) -> None:
        tile = Tile.of(tiles, items, position, worker, first_unit, stop_unit)
        _compute(static, q, pages, rows, tile, *refs[-2:])

    lax.fori_loop(start, stop, compute_item, None)


def _compute(static: _Static, q: Any, pages: Pages, rows: Rows, tile: Tile, out: Any, lse: Any) -> None:
    """Compute a worker's part of an item."""
    config = static.config
    number = lax.iota(jnp.int32, config.block_q)
    row = jnp.minimum(tile.q_row + number, rows.token.shape[0] - 1)
    token, head = (adapter.load(ref, row)[:, None] for ref in (rows.token, rows.head))
    q_rows = [_load_columns(q, token, tile.head * static.group + head, columns) for columns in static.columns]
    seen = [adapter.load(ref, tile.number, pl.ds(0, config.block_q))[:, None] for ref in rows.seen]

    def step(n: Array, softmax: OnlineSoftmax, masked: bool) -> OnlineSoftmax:
        slot = tile.block(n) * config.block_kv + lax.iota(jnp.int32, config.block_kv)
        # Entries beyond those in use hold anything, and a slot never written may hold NaN.
        written = slot < tile.kv_tokens if masked else None
        block = _Block.find(static.page_size, pages, tile, slot, written)
        products = _sum(
            adapter.product(x, k, transposed=True)
            for x, k in zip(q_rows, block.load(pages.k, pages.k_scale, static.columns, q.dtype), strict=True)
        )
        scores = static.scores.scores(products)
        if masked:
            visible = slot[None, :] <= seen[0]
            if len(seen) > 1:
                visible &= slot[None, :] >= seen[1]
            scores = jnp.where(visible, scores, -jnp.inf)
        return softmax.absorb(scores, block.load(pages.v, pages.v_scale, static.value_columns, q.dtype), static.scores)

    softmax = OnlineSoftmax.empty(config.block_q, [columns.piece for columns in static.value_columns])
    softmax = lax.fori_loop(0, tile.num_full, functools.partial(step, masked=False), softmax)
    softmax = lax.fori_loop(tile.num_full, tile.num_blocks, functools.partial(step, masked=True), softmax)
    outs, of_rows = softmax.state(static.scores)
    # An item without blocks has no piece.
    exists = jnp.broadcast_to(tile.num_blocks > 0, number.shape)
    for columns, values in zip(static.value_columns, outs, strict=True):
        _store_columns(out, tile.piece, number[:, None], columns, values, exists[:, None])
    adapter.store(lse, tile.piece, pl.ds(0, config.block_q), value=of_rows, mask=exists)


class _Block(NamedTuple):
    """A block of slots: where they are in the pool, and which are written; None: all."""

    page: Array  # [block_kv]
    offset: Array
    page_size: int
    head: Array
    written: Array | None

    @classmethod
    def find(cls, page_size: int, pages: Pages, tile: Tile, slot: Array, written: Array | None) -> "_Block":
        """Look up the pages of slots."""
        entry, offset = (op(slot, jnp.int32(page_size)) for op in (lax.div, lax.rem))
        page = adapter.load(pages.table, jnp.broadcast_to(tile.kv, slot.shape), entry, mask=written)
        num_pages = pages.k.shape[0] // page_size
        page = jnp.clip(page + pages.first_page, 0, num_pages - 1)
        return cls(page, offset, page_size, tile.head, written)

    def load(self, slots: Any, scale: Any, columns: Sequence[Columns], dtype: Any) -> list[Array]:
        """Load keys or values of one head, `[block_kv, size]` of each of the columns."""
        pieces = tuple(dict.fromkeys(x.piece for x in columns))
        row, mask = self.page * self.page_size + self.offset, None if self.written is None else self.written[:, None]
        loaded = adapter.load_rows(slots, rows=row[:, None], head=self.head, pieces=pieces, mask=mask)
        if scale is None:
            return loaded
        of_slots = adapter.load(
            scale, self.page, jnp.broadcast_to(self.head, self.page.shape), self.offset, mask=self.written
        )
        return [values for words in loaded for values in dequantize_pairs(words, of_slots[:, None], dtype)]


def _load_columns(ref: Any, row: Array, head: Array, columns: Columns) -> Array:
    """Load `ref[row, head, columns]` `[R, size]` for row and head `[R, 1]`; 0 where a column does not exist."""
    index, exists = _index(columns, row, head)
    return adapter.load(ref, *index, mask=exists)


def _store_columns(ref: Any, row: Array, head: Array, columns: Columns, values: Array, mask: Array) -> None:
    """Store `values [R, size]` to `ref[row, head, columns]` where the mask `[R, 1]` is True."""
    index, exists = _index(columns, jnp.broadcast_to(row, head.shape), head)
    mask = jnp.broadcast_to(mask, values.shape)
    adapter.store(ref, *index, value=values, mask=mask if exists is None else exists & mask)


def _index(columns: Columns, row: Array, head: Array) -> tuple[tuple[Array, ...], Array | None]:
    shape = (row.shape[0], columns.piece.size)
    index = tuple(jnp.broadcast_to(x, shape) for x in (row, head, columns.numbers()[None, :]))
    if columns.piece.is_whole:
        return index, None
    return index, jnp.broadcast_to((columns.piece.columns() < columns.piece.limit)[None, :], shape)


def _sum(terms: Any) -> Array:
    first, *rest = terms
    return functools.reduce(jnp.add, rest, first)
