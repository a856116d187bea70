"""The public `paged_attention`: it checks arguments, fills in defaults and chooses an implementation."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Float32, Int, Shaped

from longctx.annotations import Nested, Real
from longctx.kernels.attention.kernel import attention_with_vjp
from longctx.kernels.attention.operands import (
    Implementation,
    Window,
    check_implementation,
    check_out_dtype,
    check_scale,
    check_sinks,
    check_soft_cap,
    check_window,
)
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.derivatives import reverse_mode_alone
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.merge import with_sinks
from longctx.kernels.operand_dtype import wide_dtype
from longctx.kernels.paged_attention.kernel import PagedKernel, PlannedPages
from longctx.kernels.paged_attention.operands import PagedOperands, check_paged_operands, debug_check_table
from longctx.kernels.paged_attention.paged_plan import (
    IMPLEMENTATIONS,
    PagedPlan,
    choose_implementation,
    make_plan,
    shapes_of,
)
from longctx.kernels.partitioning import match_varying


def paged_attention(
    q: Float[ArrayLike, "T N H"],
    k_pages: Shaped[ArrayLike, "pages page_size K H"],
    v_pages: Shaped[ArrayLike, "pages page_size K Hv"],
    page_table: Int[ArrayLike, "B M"] | Nested,
    page_index: Int[ArrayLike, "B M"] | Nested | None,
    kv_lengths: Int[ArrayLike, "B"] | Nested,
    q_positions: Int[ArrayLike, "T"] | Nested,
    q_sequence: Int[ArrayLike, "T"] | Nested,
    first_page: ArrayLike = 0,
    *,
    q_first: Int[ArrayLike, "T"] | Nested | None = None,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
    plan: PagedPlan | None = None,
    k_scale: Float32[ArrayLike, "pages K page_size"] | None = None,
    v_scale: Float32[ArrayLike, "pages K page_size"] | None = None,
) -> tuple[Float[Array, "T N Hv"], Float[Array, "T N"]]:
    """Exact causal attention to keys and values in pages, with its state: prefill chunks and decodes in one call.

    Row t of q sees the keys of sequence `q_sequence[t]` at positions up to `q_positions[t]`, from `q_first[t]` on,
    within the `window`, and below that sequence's `kv_lengths`, if their pages are in its row of the page table.
    Rows may come in any order; consecutive rows of one sequence save work. The work follows the lengths, not M, B or
    padding. As `attention`, it compiles once for its shapes outside of `jax.jit`, and arrays may be NumPy's.

    Args:
      q: queries `[T, N, H]`, floating point.
      k_pages, v_pages: `[pages, page_size, K, H]` and `[pages, page_size, K, Hv]`, N a multiple of K, in the dtype of
        q, or uint16: the bits of a 16-bit q.dtype. With scales float8_e4m3fn, or uint8: its bits. Unused slots may hold
        anything, including NaN.
      page_table: `[B, M]` integers. Entry m of sequence b is page `first_page + page_table[b, m]`. An entry in
        use that is outside the pool is an error under `jax.experimental.checkify` if no `plan` is given (a check is an
        effect, which JAX dispatches slowly and `jax.export` refuses); otherwise some other page is read.
      page_index: `[B, M]` integers: the same entry is page number `page_index[b, m]` of the sequence, its keys at
        positions from `page_index[b, m] * page_size` on. On a rank that holds some of a sequence's pages it has gaps.
        Entries in use come first, ascending. All others have `page_index * page_size >= kv_lengths[b]`, and their
        table entries are never read. None: entry m is page number m.
      kv_lengths: `[B]` integers, how many tokens of a sequence are written, on all ranks together.
      q_positions: `[T]` integers, the rows' positions in their sequences.
      q_sequence: `[T]` integers, below B; negative is padding.
      first_page: integer scalar. With the pages of all layers in one pool `[layers * num_pages, ...]`, a layer passes
        `layer * num_pages`: a slice of the pool would be a copy.
      q_first: `[T]` integers, the first position that each row sees: a window that is data, as where the layers of
        one loop differ. None: no limit. Blocks of keys before it are not read, as are those before the window.
        A block on the edge is read whole: values of a page before it must be finite, as NaN there makes rows NaN.
      window: as for `attention`.
      sinks, logits_soft_cap: as for `attention`.
      scale: factor on the scores, a Python number, default `H ** -0.5`.
      implementation: `"mosaic_gpu"` (Hopper GPUs; float16 and bfloat16; H of 64, 128 or 256 and Hv equal to it; no soft
        cap; page sizes of 16 to 128 that divide it, or multiples of it, and of FP8 pages from 32 on), `"triton"`
        (NVIDIA GPUs since Ampere; no float64; H up to 256, of FP8 pages an even one), `"xla"` or `"reference"` (dense,
        the oracle); None picks the best that supports the case (`longctx.kernels.explain`).
      out_dtype: dtype of `out`, default that of `q`. Take float32 for parts that are still to be merged.
      plan: what `plan_paged_attention` derived from the same metadata, for all layers of a step. Default: derived in
        this call.
      k_scale, v_scale: float32 `[pages, K, page_size]`, both or neither, of FP8 pages: a key is `e4m3 values * scale`
        of its token and KV head, rounded to q.dtype. Those of unused slots may be anything.

    Returns:
      out `[T, N, Hv]`, and lse `[T, N]`: float32 (float64 for float64 inputs), natural log. A row that sees nothing has
      `out = 0`, `lse = -inf`. States of disjoint pages merge (`merge_states`). Scores may be any finite float32
      numbers, for `"mosaic_gpu"` within 1e9.

    Raises:
      ValueError, TypeError: an argument has the wrong shape, dtype or value; the message names it.
      NotImplementedError: the named implementation doesn't support the case; the message says why, and names one that
        does.

    Source:
      Pages after PagedAttention (Kwon et al. 2023); online softmax as in `attention`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention, paged_attention, write_pages
      >>> k, v = jax.random.normal(jax.random.key(0), (2, 6, 2, 64))  # 6 tokens, 2 KV heads
      >>> empty = jnp.zeros((8, 4, 2, 64))  # a pool of 8 pages, of 4 tokens each
      >>> page, offset = jnp.array([5, 5, 5, 5, 2, 2]), jnp.arange(6) % 4
      >>> k_pages, v_pages = write_pages(empty, empty, k, v, page, offset)  # pages 5 and 2, in this order
      >>> q = jax.random.normal(jax.random.key(1), (2, 8, 64))  # rows of the two last tokens
      >>> page_table, lengths = jnp.array([[5, 2]]), jnp.array([6])
      >>> positions, sequence = jnp.array([4, 5]), jnp.array([0, 0])
      >>> out, lse = paged_attention(q, k_pages, v_pages, page_table, None, lengths, positions, sequence)
      >>> dense, _ = attention(q, k, v, q_positions=positions, kv_positions=jnp.arange(6))
      >>> bool(jnp.allclose(out, dense, atol=1e-5))
      True
    """
    operands = check_paged_operands(
        q,
        k_pages,
        v_pages,
        page_table,
        page_index,
        kv_lengths,
        q_positions,
        q_sequence,
        first_page,
        k_scale,
        v_scale,
        q_first,
    )
    names = check_implementation(implementation, IMPLEMENTATIONS)
    cap = check_soft_cap(logits_soft_cap)
    rule = AttentionRule(True, check_scale(scale, operands.q.shape[-1]), check_window(window), cap)
    sinks = check_sinks(sinks, operands.q)
    out_dtype = check_out_dtype(out_dtype, operands.q.dtype)
    of_case = operands.q.dtype, operands.k_pages, operands.v_pages.shape[3], cap is not None
    if plan is None:
        chosen = choose_implementation(names, *of_case)
    elif not isinstance(plan, PagedPlan):
        raise TypeError(f"plan must be what plan_paged_attention returns, got {type(plan).__name__}")
    elif plan.shapes != shapes_of(operands) or (names and plan.implementation not in names):
        raise ValueError(
            f"plan must be for the shapes {shapes_of(operands)} and the implementation {implementation}, got one for "
            f"{plan.shapes} and {plan.implementation}"
        )
    elif plan.window != rule.window[0]:
        raise ValueError(
            f"plan must be for a window of {rule.window[0]} tokens before a row, got one for {plan.window}"
        )
    elif plan.has_q_first != (operands.q_first is not None):
        of_plan = "has one" if plan.has_q_first else "has none"
        raise ValueError(f"q_first must be given both with a plan and to plan_paged_attention: the plan {of_plan}")
    elif plan.is_fp8 != (operands.k_scale is not None):
        of_plan = "FP8 pages" if plan.is_fp8 else "pages that are not FP8"
        raise ValueError(f"plan must be for k_pages of {operands.k_pages.dtype}, got one for {of_plan}")
    else:
        chosen = choose_implementation([plan.implementation], *of_case)
    wide = None if sinks is None else wide_dtype(operands.q.dtype)
    with reverse_mode_alone("paged_attention", chosen):
        out, lse = with_sinks(_paged_attention(operands, plan, chosen, rule, wide or out_dtype), sinks)
    return out.astype(out_dtype), lse


@kernel_jit("implementation", "rule", "out_dtype", inline=True)
def _paged_attention(
    operands: PagedOperands, plan: PagedPlan | None, implementation: str, rule: AttentionRule, out_dtype: jnp.dtype
) -> tuple[Array, Array]:
    operands = match_varying(jax.tree.map(jnp.asarray, operands))
    if plan is None:
        plan = make_plan(operands, implementation, rule.window[0])
        if not plan.empty:
            debug_check_table(operands)
    if plan.empty:
        out = jnp.zeros_like(operands.q, wide_dtype(operands.q.dtype), shape=operands.out_shape)
        lse = jnp.full_like(out[..., 0], -jnp.inf)
    else:
        planned = PlannedPages(*operands[:3], operands[3:], plan)
        kernel = PagedKernel(rule, out_dtype)
        is_reference = plan.implementation == "reference"
        out, lse = kernel.forward(planned) if is_reference else attention_with_vjp(kernel, planned)
    return out.astype(out_dtype), lse
