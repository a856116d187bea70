"""Products on the tensor cores, which run while the warpgroup does other things."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu.adapter import interpreting


class Accumulator:
    """A wgmma accumulator of `multiply`.

    In the interpreter, whose wgmma takes no factor in registers (nor a transposed one before jax 0.12), products are
    plain ones. As wgmma may read its operands at any time until it is awaited, they are read when a product is issued,
    and again when it is awaited; if they differ, the result is NaN.
    """

    def __init__(self, start: Array | tuple[int, int], ref: Any, issued: list["Accumulator"]) -> None:
        self._ref, self._issued = ref, issued
        self._value: Any = 0 if isinstance(start, tuple) else start
        self._product: Callable[[], Array] | None = None

    def issue(self, a: Any, b: Any, transposed: bool = False) -> None:
        """Begin to add a @ b, or a @ b.T: a in registers or shared memory, b in shared memory. Once only."""
        if self in self._issued:
            raise ValueError("an accumulator takes one product")
        self._issued.append(self)
        if interpreting():
            early = [_contents(x) for x in (a, b)]
            self._product = lambda: _late_product(early, (a, b), transposed)
        else:
            plgpu.wgmma(self._ref, a, b.transpose((1, 0)) if transposed else b)

    def awaited(self, in_flight: int = 0) -> Array:
        """Wait until at most `in_flight` of the products issued last are in flight.

        Raises:
          ValueError: the product of this accumulator may be one of them.
        """
        done = self._issued[: len(self._issued) - in_flight]
        if self not in done:
            raise ValueError(f"of {len(self._issued)} products, of which {in_flight} may be in flight, it is not done")
        if not interpreting():
            return plgpu.wgmma_accumulator_load(self._ref, wait_n=in_flight)
        for other in done:
            if other._product is not None:
                other._value, other._product = other._value + other._product(), None
        return self._value


def _contents(x: Any) -> Array:
    return x if isinstance(x, jax.Array) else x[...]


def _late_product(early: list[Array], operands: tuple[Any, Any], transposed: bool) -> Array:
    a, b = (jnp.where(x == _contents(y), x, jnp.nan) for x, y in zip(early, operands, strict=True))
    plgpu.commit_smem()  # the race detector needs it between a plain read and the copy that overwrites
    return jnp.matmul(a, b.T if transposed else b, preferred_element_type=jnp.float32)


def multiply(starts: Sequence[Array | tuple[int, int]], products: Callable[..., Any], like: Any = None) -> Any:
    """Return what `products` returns, called with an `Accumulator` for each start.

    Args:
      starts: float32 arrays in layout `TILE`, or shapes of zeros.
      products: issues one product for each accumulator, and awaits them all.
      like: arrays with the structure, shapes, dtypes and layouts of the result; needed if any start is an array.
    """
    issued: list[Accumulator] = []
    if interpreting():
        return products(*(Accumulator(start, None, issued) for start in starts))
    zeros = [start for start in starts if isinstance(start, tuple)]
    arrays = [start for start in starts if not isinstance(start, tuple)]

    def run(of_arrays: Sequence[Any], *of_zeros: Any) -> Any:
        refs = iter(of_arrays), iter(of_zeros)
        return products(*(Accumulator(start, next(refs[isinstance(start, tuple)]), issued) for start in starts))

    def scoped(of_arrays: Sequence[Any]) -> Any:
        if not zeros:
            return run(of_arrays)
        return pl.run_scoped(functools.partial(run, of_arrays), *(plgpu.ACC(shape, jnp.float32) for shape in zeros))

    if not arrays:
        return scoped(())

    # An accumulator that begins with an array needs `run_state`, whose results are those of its references. To begin
    # with zeros there would take a move for each register.
    def state(refs: Any) -> None:
        of_arrays, results = refs
        for ref, result in zip(results, jax.tree.leaves(scoped(of_arrays)), strict=True):
            ref[...] = result

    accumulators = [plgpu.ACC.init(x) for x in arrays]
    _, results = pl.run_state(state)((accumulators, jax.tree.leaves(like)))
    return jax.tree.unflatten(jax.tree.structure(like), results)
