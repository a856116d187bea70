"""The public `attention`: it checks arguments, fills in defaults and chooses an implementation."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Float, Int

from longctx.annotations import Nested, Real
from longctx.kernels.attention import batches
from longctx.kernels.attention.attention_plan import AttentionPlan, PlannedKernel, PlannedOperands
from longctx.kernels.attention.kernel import IMPLEMENTATIONS, Algorithm, Kernel, attention_with_vjp
from longctx.kernels.attention.operands import (
    Arguments,
    Bias,
    Implementation,
    Window,
    check_arrays,
    check_bias,
    check_implementation,
    check_kernel,
    check_out_dtype,
    check_sinks,
    check_window,
    with_batch,
)
from longctx.kernels.derivatives import reverse_mode_alone
from longctx.kernels.kernel_jit import kernel_jit
from longctx.kernels.merge import with_sinks
from longctx.kernels.partitioning import match_varying

_HINTS = {
    "is_causal": "causal",
    "local_window_size": "window",
    "mask": "positions and segments, or bias of booleans,",
    "query_seq_lengths": "q_segment_ids, negative for padding,",
    "key_value_seq_lengths": "kv_segment_ids, negative for padding,",
}
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _with_hints(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """The function, with errors for arguments of `jax.nn.dot_product_attention` that name what takes their place."""

    @functools.wraps(function)
    def call(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        for name in _HINTS.keys() & named.keys():
            raise TypeError(
                f"attention has no {name}: give {_HINTS[name]} instead, or call longctx.dot_product_attention"
            )
        return function(*arguments, **named)

    return call


@_with_hints
def attention(
    q: Float[ArrayLike, "*B T N H"],
    k: Float[ArrayLike, "*B S K H"],
    v: Float[ArrayLike, "*B S K Hv"],
    *,
    q_positions: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_positions: Int[ArrayLike, "... S"] | Nested | None = None,
    q_segment_ids: Int[ArrayLike, "... T"] | Nested | None = None,
    kv_segment_ids: Int[ArrayLike, "... S"] | Nested | None = None,
    q_first: Int[ArrayLike, "... T"] | Nested | None = None,
    q_last: Int[ArrayLike, "... T"] | Nested | None = None,
    causal: bool = True,
    window: Window | None = None,
    sinks: Float[ArrayLike, "N"] | None = None,
    logits_soft_cap: Real | None = None,
    bias: Bias | None = None,
    scale: Real | None = None,
    implementation: Implementation | None = None,
    out_dtype: DTypeLike | None = None,
    plan: AttentionPlan | None = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Exact softmax attention that also returns its state, so that parts can be merged (`merge_states`).

    A query sees a key when their segments are equal and not negative, if `causal` the key's position is not after the
    query's, the two are not farther apart than the `window`, and the key's position is from the query's `q_first` to
    its `q_last`. So one rule serves a cached prefix, packed sequences, padding and any sharding of a sequence. Lengths
    and the order of tokens are free; keys that are sorted by (segment, position) save work.

    Outside of `jax.jit` a call compiles one program for its shapes and non-array arguments, and keeps it; inside, it
    becomes part of the program that is traced. Arrays may be NumPy's.

    Args:
      q: queries `[*B, T, N, H]`, floating point.
      k, v: keys `[*B, S, K, H]` and values `[*B, S, K, Hv]`, N a multiple of K (grouped-query attention, nothing is
        repeated); Hv may differ from H, as in multi-head latent attention. Values must be finite also where no query
        sees them, since 0 * NaN is NaN: there, NaN or infinity makes results NaN, never wrong numbers. Keys that no
        query sees may hold anything, unless gradients are taken.
      q_positions, kv_positions: absolute positions, integers, `[T]` or `[*B, T]` and `[S]` or `[*B, S]`. Default:
        0, 1, 2, ...; where that would be a guess, causal with T != S or with `kv_positions`, give `q_positions`.
      q_segment_ids, kv_segment_ids: integers of the same shapes, both or neither; negative means padding.
      q_first, q_last: the first and the last position that each query sees, integers of the shapes of `q_positions`,
        which may be traced: a window that differs by layer, chunks (`position // chunk * chunk`), a prefix that all
        its tokens see. None: no limit. The tightest of these, `causal` and `window` holds, and work follows it.
      causal: whether a query sees only keys at its own position and before.
      window: how many tokens before a query, and after it, it sees besides those at its own position: an integer for
        both sides, or a pair, of which None means any number. Work is proportional to T times the window. A layer whose
        window of w tokens includes the query, as most models count, takes `(w - 1, 0)`.
      sinks: `[N]`, floating point: a logit of each head that takes part in its softmax and has no value (gpt-oss). It
        is in lse, so of parts that are to be merged only one may have it. A query that sees nothing has `lse = sink`.
      logits_soft_cap: scores become `cap * tanh(score / cap)` (Gemma 2), a Python number. None: they stay as they are.
      bias: added to scores, after the cap, where the rule above lets a query see a key. Either an array that broadcasts
        to `[*B, N, T, S]`: floating point, or boolean, False where a query does not see a key that it would see
        otherwise (no block is skipped for it). Or a function of numbers of query heads and the positions of queries and
        of keys, three integer arrays that broadcast to the scores, of which nothing has T times S elements:
        `lambda head, i, j: -slopes[head] * abs(i - j)`; its results are numbers or booleans, likewise. The function may
        hold constants, not traced arrays; pass the same one each time, as it is part of the program. `head` counts
        from 0.
      scale: factor on the scores, a Python number, default `H ** -0.5`.
      implementation: `"mosaic_gpu"` (Hopper GPUs; float16 and bfloat16; H of 64, 128 or 256, which values have too; no
        soft cap, no bias), `"triton"` (NVIDIA GPUs since Ampere; also float32; any H up to 576, in float32 256; no
        bias), `"xla"` (blockwise, memory linear in T + S) or `"reference"` (dense, the oracle); a sequence of these:
        the first that supports the case; None: the best that does (`longctx.kernels.explain` says which, and why). The
        first two round weights to 16 bits where q has them, as FlashAttention does; `"mosaic_gpu"` copies keys whose
        length is no multiple of 8, and needs scores within 1e9.
      out_dtype: dtype of `out`, default that of `q`. Take float32 for parts that are still to be merged.
      plan: what `plan_attention` derived from positions and segments, which it holds and which are then not given.
        Default: derived in this call.

    Returns:
      out `[*B, T, N, Hv]`, and lse `[*B, T, N]`: float32 (float64 for float64 inputs), natural log of the sum of
      exp(score). A query that sees nothing has `out = 0`, `lse = -inf`. Scores, softmax and sums are computed in
      float32 or wider. Scores may be any finite float32 numbers; a row of scores that are all -inf counts as empty.

      Both results are differentiable in q, k, v, sinks and an array of bias in reverse mode, and these gradients in
      forward mode: `jax.grad(f)`, `jax.jvp(jax.grad(f), ...)`, `jax.hessian(f)`. For `jax.jvp(f, ...)` and
      `jax.grad(jax.grad(f))` there is `"reference"`. Gradients compute weights again from lse, with a relative error of
      6e-8 times the score.

    Raises:
      ValueError, TypeError: an argument has the wrong shape, dtype or value; the message names it.
      NotImplementedError: the named implementation doesn't support the case; the message says why, and names one that
        does.

    Source:
      Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022); positions as masks after
      the context parallelism paper, section 3.5.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from longctx.kernels import attention, merge_state
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> q, k, v = (jax.random.normal(key, (6, heads, 64)) for key, heads in zip(keys, (8, 2, 2)))
      >>> out, lse = attention(q, k, v)  # 6 tokens, 8 query heads, 2 KV heads
      >>> out.shape, lse.shape
      ((6, 8, 64), (6, 8))
      >>> old = attention(q, k[:4], v[:4], q_positions=jnp.arange(6), kv_positions=jnp.arange(4))
      >>> new = attention(q, k[4:], v[4:], q_positions=jnp.arange(6), kv_positions=jnp.arange(4, 6))
      >>> merged, _ = merge_state(*old, *new)  # what four keys give, and the other two
      >>> bool(jnp.allclose(merged, out, atol=1e-5))
      True
      >>> segments = jnp.array([0, 0, 0, 1, 1, -1])  # two packed sequences, and a token of padding
      >>> _, lse = attention(q, k, v, q_segment_ids=segments, kv_segment_ids=segments)
      >>> bool(jnp.isneginf(lse[5]).all())  # padding sees nothing
      True
    """
    arrays = q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids, q_first, q_last
    # A plan holds positions that have been checked.
    arguments = check_arrays(arrays, causal=causal and plan is None)
    if plan is not None:
        _check_plan(plan, arguments, causal, window, implementation)
        if bias is not None:
            raise NotImplementedError("bias can't be given with a plan: leave plan out")
        implementation = plan.implementation  # type: ignore[assignment]
    out_dtype = check_out_dtype(out_dtype, arguments.q.dtype)
    value_size = arguments.v.shape[-1]
    kernel = check_kernel(arguments.q, causal, scale, implementation, window, logits_soft_cap, value_size, bias)
    bias = check_bias(bias, arguments.q, arguments.k)
    sinks = check_sinks(sinks, arguments.q)
    kernel = dataclasses.replace(kernel, out_dtype=out_dtype if sinks is None else None)
    with reverse_mode_alone("attention", kernel.implementation):
        out, lse = with_sinks(_attention(kernel, arguments, plan, bias), sinks)
    return out.astype(out_dtype), lse


def _check_plan(
    plan: AttentionPlan, arguments: Arguments, causal: bool, window: Window | None, implementation: Any
) -> None:
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"plan must be what plan_attention returns, got {type(plan).__name__}")
    q, k, _, *masks = arguments
    for name, x in zip(Arguments._fields[3:], masks, strict=True):
        if x is not None:
            raise ValueError(f"{name} must not be given with a plan, which holds those that it was made of")
    names = check_implementation(implementation, IMPLEMENTATIONS)
    own = plan.implementation if not names or plan.implementation in names else implementation
    wanted = q.shape, k.shape, bool(causal), check_window(window), own
    found = plan.q_shape, plan.k_shape, plan.causal, plan.window, plan.implementation
    if wanted != found:
        raise ValueError(
            "plan must be for q and k of {} and {}, causal={}, window={} and the implementation {}, ".format(*wanted)
            + "got one for {} and {}, causal={}, window={} and {}".format(*found)
        )


@kernel_jit("kernel", inline=True)
def _attention(
    kernel: Kernel, arguments: Arguments, plan: AttentionPlan | None, bias: Array | None
) -> tuple[Array, Array]:
    algorithm: Algorithm = kernel
    operands: Any = with_batch(arguments)._replace(bias=bias)
    if plan is not None:
        algorithm = PlannedKernel(kernel)
        tokens = batches.unflatten_tokens((plan.queries, plan.keys), operands.q.shape[:-3])
        operands = PlannedOperands(operands.q, operands.k, operands.v, tokens[0], tokens[1], plan.data)
    operands = match_varying(operands)
    if kernel.implementation == "reference":
        out, lse = algorithm.forward(operands)
    else:
        out, lse = attention_with_vjp(algorithm, operands)
    if arguments.q.ndim == 3:
        out, lse = out[0], lse[0]
    return out if kernel.out_dtype is None else out.astype(kernel.out_dtype), lse
