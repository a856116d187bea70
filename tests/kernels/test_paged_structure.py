"""Compiled programs of `paged_attention`: pages in place, work by the lengths, and use inside `shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from paged_step import arguments, check_in_place, check_tiles_are_cut_once, step

from longctx.kernels import attention, merge_states, paged_attention, write_pages
from longctx.kernels.paged_attention.operands import PagedOperands, check_paged_operands
from longctx.kernels.paged_attention.tiles import partition_rows

pytestmark = pytest.mark.usefixtures("users_fusions")


@pytest.mark.parametrize(
    ("dtype", "is_fp8"),
    [
        pytest.param(jnp.float32, False, marks=pytest.mark.slow),
        (jnp.bfloat16, False),
        pytest.param(jnp.bfloat16, True, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_several_layers_is_in_place(dtype: Any, is_fp8: bool) -> None:
    compiled = step.lower(*arguments(jnp.dtype(dtype), is_fp8=is_fp8)).compile()
    check_in_place(compiled, dtype, is_fp8)
    check_tiles_are_cut_once(compiled)


def _partition(entries: int, padding: int, index_given: bool) -> list[tuple[int, list[list[int]]]]:
    """A chunk of 300 rows at position 1000, three decodes and a rest of 20 rows, in pages of 16 tokens.

    -> for each size, [first, stop, sequence, num_full, num_entries] of each tile.
    """
    lengths = np.array([1300, 2000, 17, 1, 20, 9000])
    sequence = np.repeat([0, 1, 2, 3, 4, -1], [300, 1, 1, 1, 20, padding])
    positions = np.concatenate([1000 + np.arange(300), [1999, 16, 0], np.arange(20), np.zeros(padding, int)])
    number = np.broadcast_to(np.arange(entries), (6, entries))
    pages = jnp.zeros((1, 16, 1, 8))
    operands = check_paged_operands(
        jnp.zeros((len(sequence), 1, 8)),
        pages,
        pages,
        np.zeros((6, entries), int),
        np.where(number * 16 < lengths[:, None], number, 2**31 - 1) if index_given else None,
        lengths,
        positions,
        sequence,
        0,
    )
    sizes = (1, 16, 256)
    lists_by_size = jax.jit(lambda *x: partition_rows(PagedOperands(*x), sizes))(*operands)
    return [
        (size, [[int(x[n]) for x in lists] for n in range(num)])
        for size, (num, *lists) in zip(sizes, (tiles[:6] for tiles in lists_by_size), strict=True)
    ]


def test_work_follows_lengths() -> None:
    """Padding rows, sequences without rows and a longer page table add no tile and no page."""
    want = [
        (1, [[300, 301, 1, 125, 125], [301, 302, 2, 1, 2], [302, 303, 3, 0, 1]]),
        (16, []),
        (256, [[0, 256, 0, 62, 79], [256, 300, 0, 78, 82], [303, 323, 4, 0, 2]]),
    ]
    for entries, padding, index_given in ((600, 0, False), (9000, 700, True)):
        assert _partition(entries, padding, index_given) == want


def test_pages_before_the_first_position_of_rows_are_not_read() -> None:
    """NaNs there change nothing: of a chunk, whose rows see from 2,048 on at least, and of a decode."""
    positions, page_size = np.append(3000 + np.arange(64), 4000), 64
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((65, 4, 8), *[(64, 64, 2, 8)] * 2))
    metadata = np.arange(64).reshape(1, 64), None, np.array([4001]), positions, np.zeros(65, int)
    first = np.append(np.full(64, 2048), 3900)
    unread = np.arange(64)[:, None, None, None] * page_size < 2048 - 512  # a block has at most 512 keys
    got = paged_attention(q, k, jnp.where(unread, jnp.nan, v), *metadata, q_first=first, implementation="xla")
    want = paged_attention(q, k, v, *metadata, q_first=first, implementation="reference")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_inside_shard_map_with_pages_on_several_ranks() -> None:
    """`check_vma=True`, with replicated queries, and pages and tables that differ by rank: merged states are exact."""
    ranks, page_size, num_pages, length = 4, 4, 8, 57
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((length, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    rows = np.arange(30, length)
    index = np.arange(16).reshape(-1, ranks).T.reshape(ranks, 1, 4)  # round robin
    table = rng.permutation(num_pages)[:4] + np.zeros_like(index)

    def local(k_pages, v_pages, table, index, rank, q, k, v):  # type: ignore[no-untyped-def]
        token = np.arange(length)
        mine = token // page_size % ranks == rank
        page = jnp.where(mine, table[0, 0][token // page_size // ranks], -1)
        pages = write_pages(k_pages[0], v_pages[0], k, v, page, token % page_size)
        zeros = np.zeros(len(rows), int)
        state = paged_attention(q, *pages, table[0], index[0], np.array([length]), rows, zeros)
        return merge_states(*jax.lax.all_gather(state, "context"))[0][None]

    mesh = jax.make_mesh((ranks,), ("context",), axis_types=(AxisType.Auto,))
    over, whole = P("context"), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(over,) * 5 + (whole,) * 3, out_specs=over)
    empty = jnp.full((ranks, num_pages, page_size, 2, 8), jnp.nan)
    got = jax.jit(mapped)(empty, empty, table, index, np.arange(ranks), q[rows], k, v)
    want, _ = attention(q[rows], k, v, q_positions=rows)
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), atol=1e-5)
