"""A barrier that XLA's CPU backend keeps as well."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")
S = TypeVar("S")


def hold(x: T, until: S) -> tuple[T, S]:
    """(x, until), where nothing computes with x before `until` is there.

    Such is `lax.optimization_barrier((x, until))`, but XLA's CPU backend drops it, and allocates early what is computed
    late.

    Args:
      x: an array, or a tree of them.
      until: the same; those of floats count on CPUs.
    """
    return lax.platform_dependent(x, until, cpu=_depend, default=lambda *both: lax.optimization_barrier(both))


def _depend(x: T, until: S) -> tuple[T, S]:
    """Return x plus a zero that depends on all of `until`, and of which XLA doesn't see that it is one."""
    is_never = jnp.array(False)
    for leaf in jax.tree.leaves(until):
        if leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating):
            first = leaf[(0,) * leaf.ndim]
            is_never |= jnp.isnan(first) & (first == 0)
    zero = jnp.where(is_never, 1.0, -0.0)  # x + -0.0 is x, to the bit
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), x), until
