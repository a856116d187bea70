"""The rule of attention: which keys a query sees, and what makes a score. Static, one for all implementations."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from longctx.kernels.attention.mask import Tokens, Visible


class AttentionRule(NamedTuple):
    """The static arguments that decide the result.

    Attributes:
      causal: whether a query sees no key after it.
      scale: factor on the products of queries and keys.
      window: the most tokens before a query, and after it, that it sees; None: any number.
      soft_cap: scores are `soft_cap * tanh(score / soft_cap)`; None: as they are.
    """

    causal: bool
    scale: float
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None

    def visible(self, queries: Tokens) -> Visible:
        """Return the keys that each query sees."""
        positions, (before, after) = jnp.asarray(queries.positions), self.window
        limits = jnp.iinfo(positions.dtype)
        first = None if before is None else jnp.maximum(positions, limits.min + before) - before
        last = None if after is None else jnp.minimum(positions, limits.max - after) + after
        last = positions if self.causal else last
        return Visible(first, last, queries.segments)

    def scores(self, products: Array) -> Array:
        """Return the scores of products of queries and keys."""
        return self.cap(products * self.scale)

    def cap(self, scaled: Array) -> Array:
        """Return the scores of products that have been scaled."""
        return scaled if self.soft_cap is None else self.soft_cap * jnp.tanh(scaled / self.soft_cap)

    def slope(self, scores: Array) -> Array | float:
        """Return the derivative of `cap` where its results are `scores`; for -inf, which is masked, 0 or 1."""
        if self.soft_cap is None:
            return 1.0
        return 1 - jnp.square(jnp.maximum(scores, -self.soft_cap) / self.soft_cap)
