"""Checks the arguments of every attention function and brings them to one form."""

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import ArrayLike, Bool, Float

from longctx.annotations import Nested, Real
from longctx.kernels import selection
from longctx.kernels.arrays import check_array, check_floating, check_ids
from longctx.kernels.attention import batches
from longctx.kernels.attention.kernel import IMPLEMENTATIONS, Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule, BiasFunction

Bias = Float[ArrayLike, "... T S"] | Bool[ArrayLike, "... T S"] | BiasFunction
_Name = Literal["mosaic_gpu", "triton", "xla", "reference"]
Implementation = _Name | Sequence[_Name]
Window = int | tuple[int | None, int | None]
_MOST_TOKENS = 2**31 - 1  # positions are int32


class Arguments(NamedTuple):
    """The arrays of a call, as the caller shaped them. Once they are checked, integers are int32, or traced int64."""

    q: Array
    k: Array
    v: Array
    q_positions: Any
    kv_positions: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    q_first: Any = None
    q_last: Any = None


def check_arrays(arrays: tuple[Any, ...], causal: bool) -> Arguments:
    """Check the arrays of `Arguments`. Nothing is computed on a device, except for integers wider than int32.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
    """
    q, k, v = (check_array(name, x) for name, x in zip("qkv", arrays[:3], strict=True))
    check_types(q, k, v)
    return check_masks(Arguments(q, k, v, *arrays[3:]), causal)


def check_masks(arguments: Arguments, causal: bool) -> Arguments:
    """Check what a query sees, and convert its integers to int32, but for traced int64; q, k and v may be types."""
    q, k, _, q_positions, kv_positions, q_segment_ids, kv_segment_ids, *_ = arguments
    *batch, q_length, _, _ = q.shape
    kv_length = k.shape[-3]
    if causal and q_length != kv_length and q_positions is None:
        raise ValueError(
            f"q_positions must be given when causal and T != S ({q_length} != {kv_length}): "
            "where the queries stand among the keys can't be guessed"
        )
    if causal and q_positions is None and kv_positions is not None:
        raise ValueError("q_positions must be given when causal and kv_positions are")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids and kv_segment_ids must be given both or neither")
    checked = {
        name: _check_tokens(name, x, tuple(batch), kv_length if name.startswith("kv_") else q_length)
        for name, x in arguments._asdict().items()
        if name not in ("q", "k", "v")
    }
    return arguments._replace(**checked)


def with_batch(arguments: Arguments) -> Operands:
    """The operands with one batch dimension or more, and default positions and segments."""
    batch = arguments.q.shape[:-3] or (1,)
    q, k, v = (x if x.ndim > 3 else x[None] for x in arguments[:3])

    def with_dims(x: Array) -> Array:
        return x if x.shape[:-1] == batch else x[(None,) * len(batch)]

    return Operands(q, k, v, *jax.tree.map(with_dims, _tokens(arguments)))


def flatten(arguments: Arguments) -> Operands:
    """The operands with one batch dimension, and default positions and segments."""
    return batches.flatten(with_batch(arguments))


def flatten_tokens(arguments: Arguments) -> tuple[Tokens, Tokens]:
    """Queries' and keys' tokens `[1 or B, T]` and `[1 or B, S]`, with default positions and segments."""
    return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), _tokens(arguments))


def check_kernel(
    q: Array | jax.ShapeDtypeStruct,
    causal: bool,
    scale: Real | None,
    implementation: str | Sequence[str] | None,
    window: Window | None = None,
    logits_soft_cap: Real | None = None,
    value_size: int | None = None,
    bias: Any = None,
) -> Kernel:
    """Check the static arguments, fill in defaults and choose the implementation.

    Args:
      value_size: the head size of values. None: that of q.
      bias: an array or a function; only a function becomes part of the kernel.
    """
    names = check_implementation(implementation, IMPLEMENTATIONS)
    soft_cap = check_soft_cap(logits_soft_cap)
    case = selection.Case(q.dtype, q.shape[-1], value_size or q.shape[-1], soft_cap is not None, bias is not None)
    function = bias if callable(bias) else None
    if function is not None and not _is_hashable(function):
        raise TypeError(f"bias must be a hashable function, as it is part of the program, got {function!r}")
    rule = AttentionRule(bool(causal), check_scale(scale, q.shape[-1]), check_window(window), soft_cap, function)
    return Kernel(selection.choose(names, case), rule)


def check_implementation(implementation: str | Sequence[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """Check the names and return them; none: the best is to be chosen."""
    is_sequence = isinstance(implementation, Sequence) and not isinstance(implementation, str)
    names: Any = implementation if is_sequence else () if implementation is None else (implementation,)
    if (implementation is not None and not names) or not all(name in [*known] for name in names):
        raise ValueError(
            f"implementation must be None, one of {sorted(known)}, or a sequence of these, got {implementation!r}"
        )
    return tuple(names)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def check_scale(scale: Real | None, head_size: int) -> float:
    if scale is None:
        scale = head_size**-0.5
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    return float(scale)


def check_window(window: Window | None, name: str = "window") -> tuple[int | None, int | None]:
    """Check a window and return the most tokens before a query, and after it, that it sees; None: any number."""
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, Sequence) and not isinstance(window, str) else (window, window)
    if len(sides) != 2 or not all(side is None or _is_count(side) for side in sides):
        raise ValueError(
            f"{name} must be None, an integer of 0 or more, or a pair of these (tokens before a query, and after it), "
            f"got {window!r}"
        )
    return tuple(None if side is None else min(int(side), _MOST_TOKENS) for side in sides)  # type: ignore[return-value]


def _is_count(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= 0


def check_soft_cap(logits_soft_cap: Real | None) -> float | None:
    """Check a cap of scores; None: there is none."""
    if logits_soft_cap is None:
        return None
    if not isinstance(logits_soft_cap, Real) or not 0 < logits_soft_cap < math.inf:
        raise ValueError(f"logits_soft_cap must be None or a finite number over 0, got {logits_soft_cap!r}")
    return float(logits_soft_cap)


def check_sinks(sinks: ArrayLike | None, q: Array) -> Array | None:
    """Check the sinks of the heads of q `[*B, T, N, H]`."""
    if sinks is None:
        return None
    sinks = check_array("sinks", sinks)
    check_floating("sinks", sinks.dtype)
    if sinks.shape != q.shape[-2:-1]:
        raise ValueError(f"sinks must have the shape {q.shape[-2:-1]}, a number for each head of q, got {sinks.shape}")
    return sinks


def check_bias(bias: Bias | None, q: Array, k: Array) -> Array | None:
    """Check a bias for q `[*B, T, N, H]` and k, and return an array with the dimensions of `[*B or 1, N, T, S]`.

    A function, which the kernel has, becomes the numbers of the heads.
    """
    *batch, length, heads, _ = q.shape
    if bias is None:
        return None
    if callable(bias):
        _check_bias_function(bias, heads, length, k.shape[-3])
        return jnp.arange(heads, dtype=jnp.int32).reshape((1,) * (len(batch) or 1) + (heads, 1, 1))
    bias = check_array("bias", bias, may_be_bool=True)
    if bias.dtype != bool:
        check_floating("bias", bias.dtype)
    wanted = (*batch, heads, length, k.shape[-3])
    check_broadcasts("bias", bias.shape, wanted)
    return bias.reshape((1,) * (max(len(wanted), 4) - bias.ndim) + bias.shape)


def check_broadcasts(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Check that a shape broadcasts to that of the scores `[*B, N, T, S]`."""
    if not _broadcasts(shape, wanted):
        raise ValueError(f"{name} must have a shape that broadcasts to {wanted}, [*B, N, T, S], got {shape}")


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], wanted[::-1], strict=False)
    return len(shape) <= len(wanted) and all(have in (1, want) for have, want in pairs)


def _check_bias_function(bias: BiasFunction, heads: int, length: int, kv_length: int) -> None:
    """Check that a bias can be traced, holds no traced arrays and returns numbers or booleans for a block of scores."""
    # As "xla" calls it, but for lengths that no constant of the scores' shape has.
    rows, keys = heads * length + 1, kv_length + 1
    arguments = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((rows, 1), (rows, 1), (1, keys)))
    traced = jax.make_jaxpr(bias)(*arguments)
    if any(isinstance(x, jax.core.Tracer) for x in traced.consts):
        raise TypeError(
            "bias must be a function that holds no traced arrays: it has no gradient in them; pass an array"
        )
    found = traced.out_avals
    if len(found) != 1 or not _broadcasts(getattr(found[0], "shape", (0,)), (rows, keys)):
        raise ValueError(
            "bias must return an array that broadcasts to what its arguments do, blocks of any size: "
            f"{(rows, keys)} for heads and q_positions of {(rows, 1)} and kv_positions of {(1, keys)}, "
            f"got {', '.join(map(str, found)) or None}"
        )
    dtype = found[0].dtype
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, bool)):
        raise TypeError(f"bias must return real numbers or booleans, got {dtype}")


def check_out_dtype(out_dtype: DTypeLike | None, default: DTypeLike) -> jnp.dtype:
    dtype = jnp.dtype(default if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"out_dtype must be a floating-point type, got {dtype}")
    return dtype


def check_types(q: Any, k: Any, v: Any) -> None:
    """Check the shapes and dtypes of q, k and v: arrays or types."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x.dtype)
        if x.dtype.itemsize < 2:
            raise TypeError(f"{name} must have 16 bits or more, got {x.dtype}")
        if x.ndim < 3:
            raise ValueError(f"{name} must have a shape [*batch, length, heads, head size], got {x.shape}")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got {q.dtype} and {name} of {x.dtype}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must have one shape but for the head size, got {k.shape} and {v.shape}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"k must have the batch dimensions of q, {q.shape[:-3]}, got {k.shape[:-3]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k must have the head size of q, {q.shape[-1]}, got {k.shape[-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if not v.shape[-1]:
        raise ValueError(f"v must have a head size over 0, got {v.shape}")
    if 0 in (heads, kv_heads, q.shape[-1]) or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's heads, and a head size over 0: {q.shape} and {k.shape}")


def _check_tokens(name: str, x: ArrayLike | Nested | None, batch: tuple[int, ...], length: int) -> Any:
    if x is None:
        return None
    tokens = check_ids(name, x)
    allowed = dict.fromkeys([(length,), (*batch, length)])  # one shape if there is no batch
    if tokens.shape not in allowed:
        raise ValueError(f"{name} must have the shape {' or '.join(map(str, allowed))}, got {tokens.shape}")
    return tokens


def _tokens(arguments: Arguments) -> tuple[Tokens, Tokens]:
    """Queries' and keys' tokens, with default positions and segments."""
    q, k, _, q_positions, kv_positions, q_segment_ids, kv_segment_ids, *limits = arguments

    def tokens(positions: Any, segments: Any, length: int, limits: Sequence[Any] = ()) -> Tokens:
        positions = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        segments = jnp.zeros(length, jnp.int32) if segments is None else segments
        return jax.tree.map(jnp.asarray, Tokens(positions, segments, *limits))

    queries = tokens(q_positions, q_segment_ids, q.shape[-3], limits)
    return queries, tokens(kv_positions, kv_segment_ids, k.shape[-3])
