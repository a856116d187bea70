"""`PagedPlan`: what paged attention derives from metadata alone, once a step, for all layers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Int, Shaped

from longctx.annotations import Nested
from longctx.kernels import selection
from longctx.kernels.arrays import check_constant, check_floating
from longctx.kernels.attention.operands import Implementation, Window, check_implementation, check_window
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.fp8 import BITS, E4M3
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.paged_attention.operands import PagedOperands, check_metadata, check_q_first
from longctx.kernels.paged_attention.reference import reference_paged_attention
from longctx.kernels.paged_attention.xla import plan_xla, xla_paged_attention


def plan_mosaic_gpu(operands: PagedOperands, *limits: Any) -> Any:
    # Importing Pallas takes half a second, so only callers that use it import it.
    from longctx.kernels.paged_attention.mosaic_gpu import plan_mosaic_gpu

    return plan_mosaic_gpu(operands, *limits)


def mosaic_gpu_paged_attention(
    operands: PagedOperands, rule: AttentionRule, plan: Any, out_dtype: jnp.dtype
) -> tuple[Array, Array]:
    from longctx.kernels.paged_attention.mosaic_gpu import mosaic_gpu_paged_attention

    return mosaic_gpu_paged_attention(operands, rule, plan, out_dtype)


def plan_triton(operands: PagedOperands, *limits: Any) -> Any:
    from longctx.kernels.paged_attention.triton import plan_triton

    return plan_triton(operands, *limits)


def triton_paged_attention(
    operands: PagedOperands, rule: AttentionRule, plan: Any, out_dtype: jnp.dtype
) -> tuple[Array, Array]:
    from longctx.kernels.paged_attention.triton import triton_paged_attention

    return triton_paged_attention(operands, rule, plan, out_dtype)


# plan(operands, before, max_rows_per_sequence, reserved_multiprocessors) -> data, from shapes and metadata
# forward(operands, rule, data, out_dtype) -> (out, lse), out of that dtype or of float32 or wider
IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[Array, Array]]]] = {
    "mosaic_gpu": (plan_mosaic_gpu, mosaic_gpu_paged_attention),
    "triton": (plan_triton, triton_paged_attention),
    "xla": (
        lambda operands, before, *_: plan_xla(operands, before),
        lambda operands, rule, data, _: xla_paged_attention(operands, rule, data),
    ),
    "reference": (
        lambda operands, *_: None,
        lambda operands, rule, data, _: reference_paged_attention(operands, rule, data),
    ),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("data",),
    meta_fields=("implementation", "window", "has_q_first", "shapes", "is_fp8", "empty"),
)
@dataclasses.dataclass(frozen=True)
class PagedPlan:
    """Result of `plan_paged_attention`, for `paged_attention(..., plan=)`. It is a pytree.

    Attributes:
      implementation: which it serves.
      window: how many tokens before a row it sees; None: any number.
      has_q_first: whether it is for a `q_first`.
      shapes: of q, of the pages and of the page table that it serves.
      is_fp8: whether the pages are FP8.
      empty: whether there is no row or no page.
      data: what the implementation made of the metadata; for its own use.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels.paged_attention import plan_paged_attention
      >>> pages = jax.ShapeDtypeStruct((8, 4, 2, 64), "float32")
      >>> metadata = jnp.array([[5, 2]]), None, jnp.array([6]), jnp.array([5]), jnp.array([0])
      >>> plan = plan_paged_attention(8, pages, *metadata)
      >>> plan.implementation, plan.is_fp8
      ('xla', False)
    """

    implementation: str
    window: int | None
    has_q_first: bool
    shapes: tuple[tuple[int, ...], ...]
    is_fp8: bool  # the pages
    empty: bool  # no row, or no page
    data: Any


def plan_paged_attention(
    num_heads: int,
    k_pages: Shaped[Array | np.ndarray, "pages page_size K H"] | jax.ShapeDtypeStruct,
    page_table: Int[ArrayLike, "B M"] | Nested,
    page_index: Int[ArrayLike, "B M"] | Nested | None,
    kv_lengths: Int[ArrayLike, "B"] | Nested,
    q_positions: Int[ArrayLike, "T"] | Nested,
    q_sequence: Int[ArrayLike, "T"] | Nested,
    window: Window | None = None,
    implementation: Implementation | None = None,
    q_dtype: DTypeLike | None = None,
    max_rows_per_sequence: int | None = None,
    reserved_multiprocessors: int = 0,
    *,
    q_first: Int[ArrayLike, "T"] | Nested | None = None,
) -> PagedPlan:
    """Derive from the metadata what `paged_attention` needs, once for all layers of a model.

    XLA's GPU backend does not move this work, some twenty small kernels, out of a loop over layers by itself.

    Args:
      num_heads: query heads N.
      k_pages: the pool `[pages, page_size, K, H]`; only its shape and dtype are read. Values of another size have the
        same plan, but name an implementation that takes them.
      page_table, page_index, kv_lengths, q_positions, q_sequence, window: as for `paged_attention`.
      implementation: as for `paged_attention`; the plan serves this one alone.
      q_dtype: dtype of the queries. None: that of k_pages, and bfloat16 where they are bits or FP8.
      max_rows_per_sequence: how many rows a sequence is expected to have at most, a Python integer: 1 where all rows
        are decodes. The kernels then take tiles that waste less. It is no limit: results are right for more rows,
        which take more tiles. None: any number.
      reserved_multiprocessors: how many multiprocessors the kernels leave to others that run beside them, such as
        NCCL's, a Python integer.
      q_first: as for `paged_attention`, which then takes it too.

    Returns:
      A `PagedPlan` for calls with these shapes and metadata.

    Raises:
      ValueError, TypeError, NotImplementedError: as `paged_attention`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import paged_attention, plan_paged_attention, write_pages
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 6, 2, 64))  # 6 tokens, 2 KV heads
      >>> empty = jnp.zeros((8, 4, 2, 64))  # a pool of 8 pages, of 4 tokens each
      >>> page, offset = jnp.array([5, 5, 5, 5, 2, 2]), jnp.arange(6) % 4
      >>> k_pages, v_pages = write_pages(empty, empty, k, v, page, offset)  # pages 5 and 2, in this order
      >>> q = jax.random.normal(jax.random.key(1), (1, 8, 64))
      >>> metadata = jnp.array([[5, 2]]), None, jnp.array([6]), jnp.array([5]), jnp.array([0])
      >>> plan = plan_paged_attention(8, k_pages, *metadata, max_rows_per_sequence=1)  # once for all layers of a step
      >>> out, _ = paged_attention(q, k_pages, v_pages, *metadata, plan=plan)
      >>> bool((out == paged_attention(q, k_pages, v_pages, *metadata)[0]).all())
      True
    """
    names = check_implementation(implementation, IMPLEMENTATIONS)
    if q_dtype is None:
        q_dtype = jnp.bfloat16 if k_pages.dtype in (jnp.uint16, BITS, E4M3) else k_pages.dtype
    check_floating("q_dtype", q_dtype)
    pages: Any = jax.ShapeDtypeStruct(k_pages.shape, k_pages.dtype)
    num_rows = np.shape(q_positions)[0]
    q: Any = jax.ShapeDtypeStruct((num_rows, num_heads, k_pages.shape[-1]), jnp.dtype(q_dtype))
    metadata = check_metadata(page_table, page_index, kv_lengths, q_positions, q_sequence, num_rows)
    if num_heads < 1 or num_heads % k_pages.shape[2]:
        raise ValueError(f"num_heads must be a multiple of k_pages' heads, got {num_heads} and {k_pages.shape}")
    if max_rows_per_sequence is not None:
        is_integer = isinstance(max_rows_per_sequence, Integral) and not isinstance(max_rows_per_sequence, bool)
        if not is_integer or max_rows_per_sequence < 1:
            raise ValueError(f"max_rows_per_sequence must be an integer of 1 or more, got {max_rows_per_sequence!r}")
        max_rows_per_sequence = int(max_rows_per_sequence)
    if not isinstance(reserved_multiprocessors, Integral) or reserved_multiprocessors < 0:
        raise ValueError(f"reserved_multiprocessors must be an integer of 0 or more, got {reserved_multiprocessors!r}")
    limits = check_window(window)[0], max_rows_per_sequence, int(reserved_multiprocessors)
    chosen = choose_implementation(names, q.dtype, pages)
    return _plan(q, pages, chosen, limits, metadata, check_q_first(q_first, num_rows))


@kernel_jit("q", "pages", "implementation", "limits", inline=True)
def _plan(
    q: Any, pages: Any, implementation: str, limits: tuple[int | None, int | None, int], metadata: Any, q_first: Any
) -> PagedPlan:
    arrays: tuple[tuple[Any, Any, Any, Any, Any], Any] = jax.tree.map(jnp.asarray, (metadata, q_first))
    operands = PagedOperands(q, pages, pages, *arrays[0], first_page=jnp.int32(0), q_first=arrays[1])
    return make_plan(operands, implementation, *limits)


def make_plan(operands: PagedOperands, implementation: str, before: int | None, *limits: Any) -> PagedPlan:
    """`plan_paged_attention` of checked operands, for a chosen implementation."""
    q, k_pages = operands.q, operands.k_pages
    if implementation != "reference":
        check_constant(implementation, T=q.shape[0], M=operands.page_table.shape[1])
    empty = 0 in (q.shape[0], k_pages.shape[0], *operands.page_table.shape)
    data = None if empty else IMPLEMENTATIONS[implementation][0](operands, before, *limits)
    has_q_first, is_fp8 = operands.q_first is not None, k_pages.dtype in (BITS, E4M3)
    return PagedPlan(implementation, before, has_q_first, shapes_of(operands), is_fp8, empty, data)


def choose_implementation(
    names: Sequence[str], q_dtype: jnp.dtype, k_pages: Any, value_size: int | None = None, has_soft_cap: bool = False
) -> str:
    """`selection.choose` for queries of a dtype and pages: an array, or its type; `value_size` None is that of keys."""
    case = selection.Case.of_pages(q_dtype, k_pages, value_size)
    return selection.choose(names, case._replace(has_soft_cap=has_soft_cap))


def shapes_of(operands: PagedOperands) -> tuple[tuple[int, ...], ...]:
    """The shapes that a plan depends on."""
    return operands.q.shape, operands.k_pages.shape, operands.page_table.shape
