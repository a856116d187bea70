"""The parts of Pallas' Triton backend that kernels use, all of them public, and its interpreter.

From jax 0.12 on lowering such a kernel warns that the backend is deprecated (DeprecationWarning).
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from longctx.kernels.device import TRITON_INTERPRETED, Device
from longctx.kernels.partitioning import vary_over
from longctx.kernels.triton.tile_config import Piece, TileConfig


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within this context `"triton"` is supported on the default device, which interprets its kernels."""
    token: contextvars.Token[bool] = TRITON_INTERPRETED.set(True)
    try:
        yield
    finally:
        TRITON_INTERPRETED.reset(token)


def kernel(
    body: Callable[..., None],
    out_types: Sequence[tuple[tuple[int, ...], Any]],
    like: Array,
    grid: tuple[int, ...],
    config: TileConfig,
    name: str,
) -> Callable[..., list[Array]]:
    """`pl.pallas_call` of a body that takes references to whole arrays, operands first.

    Args:
      out_types: (shape, dtype) of each result.
      like: an operand; results vary over the mesh axes that it varies over.
      grid: programs, the first dimension running fastest; all but the first must be below 65,536.
      name: of the compiled kernel.
    """
    varying = jax.typeof(like).manual_axis_type

    @functools.wraps(body)
    def named(*refs: Any) -> None:
        body(*refs)

    named.__name__ = named.__qualname__ = name
    run = pl.pallas_call(
        named,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in out_types],
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=not Device.target().is_gpu,
        name=name,
    )
    return lambda *operands: [vary_over(varying.varying, x) for x in run(*operands)]


def load(ref: Any, *index: Any, mask: Array | None = None, other: float = 0) -> Array:
    """Load elements, `other` where the mask is False. An index is a number, an array or `pl.ds`; arrays broadcast."""
    return plgpu.load(ref.at[_arrays(index)], mask=mask, other=None if mask is None else other)


def store(ref: Any, *index: Any, value: Array, mask: Array | None = None) -> None:
    """Store elements in the dtype of the reference."""
    plgpu.store(ref.at[_arrays(index)], value.astype(ref.dtype), mask=mask)


def _arrays(index: tuple[Any, ...]) -> tuple[Any, ...]:
    # The interpreter of some versions asks for arrays.
    return tuple(jnp.int32(x) if isinstance(x, int) else x for x in index)


def product(a: Array, b: Array, transposed: bool = False) -> Array:
    """The matrix product in float32 of `a [M, D]` and `b [D, N]`, or if `transposed` `b [N, D]`.

    Tensor cores multiply. Factors of float32 take three products of TF32, whose error is that of float32.
    """
    precision: Any = None
    if a.dtype == jnp.float32:
        # A CPU has no such algorithm.
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if Device.target().is_gpu else lax.Precision.HIGHEST
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def load_rows(
    ref: Any, *before: Any, rows: Array, head: Array, pieces: tuple[Piece, ...], mask: Array | None
) -> list[Array]:
    """Load rows of heads, `ref[*before, rows, head]`, in pieces `[R, size]` of the head size.

    Args:
      rows, head: `[R, 1]` each, or a number for all rows.
      mask: `[R, 1]`; rows without it are 0. None: all rows exist.
    """
    return [load(ref, *before, *_index(rows, head, x), mask=_exists(x, mask, rows.shape[0])) for x in pieces]


def store_rows(
    ref: Any,
    *before: Any,
    rows: Array,
    head: Array,
    pieces: tuple[Piece, ...],
    values: Sequence[Array],
    mask: Array | None,
) -> None:
    """Store what `load_rows` would load."""
    for x, value in zip(pieces, values, strict=True):
        store(ref, *before, *_index(rows, head, x), value=value, mask=_exists(x, mask, rows.shape[0]))


def _index(rows: Array, head: Array, piece: Piece) -> tuple[Array, ...]:
    """Indices of a piece of rows, of one shape where they are no numbers, as references ask."""
    shape = (rows.shape[0], piece.size)
    return tuple(jnp.broadcast_to(x, shape) if x.ndim else x for x in (rows, head, piece.columns()[None, :]))


def _exists(piece: Piece, mask: Array | None, num_rows: int) -> Array | None:
    """The mask of a piece of rows; None where all of it exists."""
    masks = [] if mask is None else [mask]
    if not piece.is_whole:
        masks.append(piece.columns()[None, :] < piece.limit)
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), (num_rows, piece.size)) if masks else None
