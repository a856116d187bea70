"""The rows of a layer's output projection and feed-forward, where these are sharded over context ranks too.

A device then has a part of these weights for the rows of all ranks, not all of them for its own rows. Replicated rows
are the same on all ranks: an all-to-all merges their states to heads, and an all-reduce sums their products. Sharded
and local rows differ: an all-to-all gives each rank its heads of all of them, an all-gather gives it the feed-forward's
inputs, and reduce-scatters return the sums (sequence parallelism).

Source: Helix Parallelism (Bhatia et al. 2025), section 2; Megatron's sequence parallelism (Korthikanti et al. 2022).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from longctx.parallel.tensor import pmax, psum
from longctx.serving.runner.step_inputs import Shape


class Collectives(NamedTuple):
    """Functions of a device that `Llama.layer` takes under these names, inside `shard_map`."""

    psum: Callable[[Array], Array]
    pmax: Callable[[Array], Array]
    gather: Callable[[Array], Array]


def collectives_of(shape: Shape) -> Collectives:
    """Return the collectives of a step's layers."""
    if not shape.shares_ffn:
        return Collectives(lambda x: psum(x, "tensor"), lambda x: pmax(x, "tensor"), lambda x: x)
    rows = FfnRows.of(shape)
    return Collectives(rows.sum, lambda x: pmax(x, "context", "tensor"), rows.gather)


class FfnRows(NamedTuple):
    """The order of rows: a rank's are sharded, replicated and local ones; all are those of each rank, then replicated.

    Attributes:
      sharded, replicated: how many a rank has.
    """

    sharded: int
    replicated: int

    @classmethod
    def of(cls, shape: Shape) -> "FfnRows":
        """The rows of a step."""
        return cls(shape.sharded, shape.replicated)

    def heads(
        self, sharded: Float[Array, "s N H"], replicated: Float[Array, "r heads H"], local: Float[Array, "l N H"]
    ) -> Float[Array, "all heads H"]:
        """Return all rows with this rank's heads; replicated ones have no others already."""
        own = jnp.concatenate([sharded, local])
        if own.shape[0]:
            own = lax.all_to_all(own, "context", 1, 0, tiled=True)
        return self._join(own, replicated)

    def gather(self, x: Shaped[Array, "rows D"]) -> Shaped[Array, "all D"]:
        """Return all rows."""
        stop = self.sharded + self.replicated
        own = jnp.concatenate([x[: self.sharded], x[stop:]])
        if own.shape[0]:
            own = lax.all_gather(own, "context", tiled=True)
        return self._join(own, x[self.sharded : stop])

    def sum(self, y: Shaped[Array, "all D"]) -> Shaped[Array, "rows D"]:
        """Sum the products of all rows over the devices, and return this rank's rows."""
        first, own = y.shape[0] - self.replicated, []
        if first:
            mine = psum(lax.psum_scatter(y[:first], "context", tiled=True), "tensor")
            own = [mine[: self.sharded], mine[self.sharded :]]
        if self.replicated:
            own.insert(1, psum(y[first:], "context", "tensor"))
        return jnp.concatenate(own)

    def _join(self, own: Array, replicated: Array) -> Array:
        if not self.replicated:
            return own
        return jnp.concatenate([own, replicated]) if own.shape[0] else replicated
