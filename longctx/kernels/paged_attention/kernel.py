"""The `Algorithm` of `paged_attention`. Its gradient gathers pages, and differentiates attention to contiguous keys."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.paged_attention.operands import PagedOperands, gather_slots, slots
from longctx.kernels.paged_attention.paged_plan import IMPLEMENTATIONS, PagedPlan, make_plan, shapes_of
from longctx.kernels.partitioning import Rule, partitioned, without_ones


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

    rule: AttentionRule
    out_dtype: jnp.dtype

    def forward(self, planned: PlannedPages) -> tuple[Array, Array]:
        return _divided(planned.operands, planned.plan, self.rule, self.out_dtype)

    def backward(self, planned: PlannedPages, lse: Array, row_terms: Array, d_out: Array) -> tuple[Array | None, ...]:
        operands = planned.operands
        if operands.k_scale is not None:
            raise NotImplementedError("paged_attention has no gradient where pages are FP8: take pages of 16 bits")
        positions, written = slots(operands)
        sequence = jnp.arange(len(written), dtype=jnp.int32)[:, None, None]
        keys = Tokens(*(x.reshape(1, -1) for x in (positions, jnp.where(written, sequence, -1))))
        of_rows = operands.q_positions, operands.q_sequence, operands.q_first
        queries = Tokens(*jax.tree.map(lambda x: x[None], of_rows))
        kernel = Kernel(planned.plan.implementation, self.rule)

        def gather(*pages: Array) -> tuple[Array, ...]:
            """Keys and values `[B * M * page_size, K, H]`."""
            gathered = (gather_slots(operands, x, None, written, lse.dtype) for x in pages)
            return tuple(x.reshape(-1, *x.shape[3:]) for x in gathered)

        pages = operands.k_pages, operands.v_pages
        has_gradient = jnp.issubdtype(operands.k_pages.dtype, jnp.floating)
        (k, v), scatter = jax.vjp(gather, *pages) if has_gradient else (gather(*pages), None)
        k, v = (x[None].astype(operands.q.dtype) for x in (k, v))
        rows = (x[None] for x in (lse, row_terms, d_out))
        d_q, d_k, d_v = kernel.backward(Operands(operands.q[None], k, v, queries, keys), *rows)
        return d_q[0], *((None, None) if scatter is None else scatter((d_k[0], d_v[0])))


def _divided(
    operands: PagedOperands, plan: PagedPlan, rule: AttentionRule, out_dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Compute, with heads divided over the mesh. Every device has all pages of its KV heads."""
    leaves, tree = jax.tree.flatten((operands, plan.data))

    def local(*leaves: Array) -> tuple[Array, ...]:
        mine, data = jax.tree.unflatten(tree, leaves)
        if shapes_of(mine) != shapes_of(operands):
            data = make_plan(mine, plan.implementation, rule.window[0]).data
        return IMPLEMENTATIONS[plan.implementation][1](mine, rule, data, out_dtype)

    of_heads = {"q": ("", "k g", ""), "k_pages": ("", "", "k", ""), "k_scale": ("", "k", "")}
    of_heads |= {"v_pages": of_heads["k_pages"], "v_scale": of_heads["k_scale"]}
    given = [(name, x) for name, x in operands._asdict().items() if x is not None]
    labels = [without_ones(x.shape, of_heads.get(name, ("",) * x.ndim)) for name, x in given]
    labels += [("",) * x.ndim for x in leaves[len(given) :]]
    names = [name if name in of_heads else "" for name, _ in given] + [""] * (len(leaves) - len(given))
    division = Rule(tuple(names), tuple(labels), (labels[0], labels[0][:-1]), splits_groups=False)
    return partitioned(local, division, None, *leaves)  # type: ignore[return-value]
