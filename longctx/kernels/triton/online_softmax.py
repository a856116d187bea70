"""The online softmax inside a Triton kernel, with values in pieces of their head size."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from longctx.kernels.triton.adapter import product
from longctx.kernels.triton.tile_config import Piece

LOG2E = math.log2(math.e)


class OnlineSoftmax(NamedTuple):
    """The running softmax of R rows over the keys so far: the carry of a loop over blocks of keys.

    Weights are exp2((score - peak) * factor): a difference is taken before the product, so that no score, however
    large, differs from itself by what a contracted instruction rounds.
    """

    peak: Array  # [R], the greatest score, or -inf
    total: Array  # [R], the sum of weights
    accs: tuple[Array, ...]  # [R, size] of each piece, the sum of weights * v

    @classmethod
    def empty(cls, rows: int, pieces: Sequence[Piece]) -> "OnlineSoftmax":
        """Of no keys."""
        zeros = jnp.zeros((rows,), jnp.float32)
        accs = tuple(jnp.zeros((rows, piece.size), jnp.float32) for piece in pieces)
        return cls(jnp.full((rows,), -jnp.inf, jnp.float32), zeros, accs)

    def absorb(self, scores: Array, values: Sequence[Array], factor: float) -> "OnlineSoftmax":
        """Take in the scores `[R, keys]` of a block, -inf where a row sees no key, and its values `[keys, size]`.

        Args:
          factor: over 0; what it makes of scores, times ln(2), is natural.
        """
        peak = jnp.maximum(self.peak, jnp.max(scores, 1))
        finite = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights = jnp.exp2((scores - finite[:, None]) * factor)
        decay = jnp.exp2((self.peak - finite) * factor)
        total = self.total * decay + jnp.sum(weights, 1)
        rounded = weights.astype(values[0].dtype)
        accs = (acc * decay[:, None] + product(rounded, v) for acc, v in zip(self.accs, values, strict=True))
        return type(self)(peak, total, tuple(accs))

    def state(self, factor: float) -> tuple[tuple[Array, ...], Array]:
        """out `[R, size]` of each piece and lse `[R]`, natural; 0 and -inf for a row that saw no key."""
        empty = self.peak == -jnp.inf
        total = jnp.where(empty, 1.0, self.total)
        outs = tuple(acc / total[:, None] for acc in self.accs)
        return outs, jnp.where(empty, -jnp.inf, self.peak * (factor / LOG2E) + jnp.log(total))
