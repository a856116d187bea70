"""The gradient of `paged_attention`: pages are gathered, and contiguous attention is differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.bits import from_bits
from longctx.kernels.paged_attention.operands import PagedOperands

# forward(operands, plan, rule, out_dtype) -> (out, lse)
Forward = Callable[[PagedOperands, Any, AttentionRule, jnp.dtype], tuple[Array, Array]]


class PlannedPages(NamedTuple):
    """`PagedOperands` and their plan, as the operands of an `Algorithm`, which begin with q, k and v."""

    q: Array
    k_pages: Array
    v_pages: Array
    rest: tuple[Any, ...]
    plan: Any

    @property
    def operands(self) -> PagedOperands:
        return PagedOperands(self.q, self.k_pages, self.v_pages, *self.rest)


@dataclasses.dataclass(frozen=True)
class PagedKernel:
    """The `Algorithm` of `paged_attention`."""

    compute: Forward
    rule: AttentionRule
    out_dtype: jnp.dtype

    def forward(self, planned: PlannedPages) -> tuple[Array, Array]:
        return self.compute(planned.operands, planned.plan, self.rule, self.out_dtype)

    def backward(self, planned: PlannedPages, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array | None, ...]:
        operands = planned.operands
        if operands.k_scale is not None:
            raise NotImplementedError("paged_attention has no gradient where pages are FP8: take pages of 16 bits")
        keys = _keys(operands)
        kernel = Kernel(planned.plan.implementation, self.rule)
        queries = Tokens(operands.q_positions[None], operands.q_sequence[None])
        pages = operands.k_pages, operands.v_pages
        has_gradient = jnp.issubdtype(operands.k_pages.dtype, jnp.floating)
        gather = lambda *pages: tuple(_gather(x, operands, lse.dtype) for x in pages)  # noqa: E731
        (k, v), scatter = jax.vjp(gather, *pages) if has_gradient else (gather(*pages), None)
        k, v = (x[None].astype(operands.q.dtype) for x in (k, v))
        rows = (x[None] for x in (lse, row_terms, d_out))
        d_q, d_k, d_v = kernel.backward(Operands(operands.q[None], k, v, queries, keys), *rows)
        return d_q[0], *((None, None) if scatter is None else scatter((d_k[0], d_v[0])))


def _keys(operands: PagedOperands) -> Tokens:
    """The tokens of all entries of the page table `[1, B * M * page_size]`, padding where nothing is written."""
    positions, written = _slots(operands)
    sequence = jnp.arange(written.shape[0], dtype=jnp.int32)[:, None, None]
    return Tokens(positions.reshape(1, -1), jnp.where(written, sequence, -1).reshape(1, -1))


def _slots(operands: PagedOperands) -> tuple[Array, Array]:
    """Positions of the slots of all entries `[B, M, page_size]`, 0 where nothing is written, and whether it is."""
    table, page_size = operands.page_table, operands.k_pages.shape[1]
    index = jnp.arange(table.shape[1], dtype=jnp.int32)[None] if operands.page_index is None else operands.page_index
    index = jnp.minimum(index, (2**31 - 1) // page_size - 1)  # the index of an unused entry must not overflow
    positions = index[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None]
    positions = jnp.broadcast_to(positions, (*table.shape, page_size))
    written = positions < operands.kv_lengths[:, None, None]
    return jnp.where(written, positions, 0), written


def _gather(pages: Array, operands: PagedOperands, dtype: jnp.dtype) -> Array:
    """The slots of all entries as `[B * M * page_size, K, H]`; slots never written may hold NaN, and give 0."""
    _, written = _slots(operands)
    page = jnp.where(written[..., 0], operands.first_page + operands.page_table, 0)
    rows = from_bits(pages, operands.q.dtype)[page].astype(dtype)
    return jnp.where(written[..., None, None], rows, 0).reshape(-1, *pages.shape[2:])
