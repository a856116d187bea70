"""The rule of attention: which keys a query sees, and what makes a score. Static, one for all implementations."""

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import jax.numpy as jnp
from jax import Array

from longctx.kernels.attention.mask import Tokens, Visible

BiasFunction = Callable[[Array, Array, Array], Array]
"""From the numbers of query heads, and the positions of queries and of keys, integers, to what is added to scores, or
to booleans, as of an array.

The three broadcast against each other, and the result has the shape that they broadcast to, or broadcasts to it.
"""


def is_added(bias: Array | None) -> TypeGuard[Array]:
    """Whether a bias is an array of numbers to add to scores, which then has a gradient."""
    return bias is not None and jnp.issubdtype(bias.dtype, jnp.floating)


class AttentionRule(NamedTuple):
    """The static arguments that decide the result.

    Attributes:
      causal: whether a query sees no key after it.
      scale: factor on the products of queries and keys.
      window: the most tokens before a query, and after it, that it sees; None: any number.
      soft_cap: scores are `soft_cap * tanh(score / soft_cap)`; None: as they are.
      bias: added to scores after the cap. None: nothing, or the array that the operands have.
    """

    causal: bool
    scale: float
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    bias: BiasFunction | None = None

    def visible(self, queries: Tokens) -> Visible:
        """Return the keys that each query sees."""
        positions, (before, after) = jnp.asarray(queries.positions), self.window
        limits = jnp.iinfo(positions.dtype)
        first = None if before is None else jnp.maximum(positions, limits.min + before) - before
        last = None if after is None else jnp.minimum(positions, limits.max - after) + after
        last = positions if self.causal else last
        first, last = _tighter(jnp.maximum, first, queries.first), _tighter(jnp.minimum, last, queries.last)
        return Visible(first, last, queries.segments)

    def scores(self, products: Array) -> Array:
        """Return the scores of products of queries and keys."""
        return self.cap(products * self.scale)

    def cap(self, scaled: Array) -> Array:
        """Return the scores of products that have been scaled."""
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def slope(self, scores: Array) -> Array | float:
        """Return the derivative of `cap` where its results are `scores`."""
        return 1.0 if self.soft_cap is None else 1 - jnp.square(scores / self.soft_cap)

    def biased(self, scores: Array, bias: Array | None, q_positions: Array, kv_positions: Array) -> Array:
        """Return the scores with the bias, and -inf where that says that a query sees no key.

        Args:
          scores: capped.
          bias: the operand for these scores, see `Operands.bias`; like the positions, it broadcasts to the scores.
        """
        if bias is None:
            return scores
        if self.bias is not None:
            bias = jnp.asarray(self.bias(bias, q_positions, kv_positions))
        return jnp.where(bias, scores, -jnp.inf) if bias.dtype == bool else scores + bias.astype(scores.dtype)


def _tighter(choose: Callable[[Array, Array], Array], limit: Array | None, own: Array | None) -> Array | None:
    """The tighter of two limits, None where there is neither."""
    return own if limit is None else limit if own is None else choose(limit, own)
