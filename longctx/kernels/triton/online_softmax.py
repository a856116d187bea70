"""The online softmax inside a Triton kernel, with values in pieces of their head size."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from longctx.kernels.triton.adapter import product
from longctx.kernels.triton.scores import ScoreConfig
from longctx.kernels.triton.tile_config import Piece


class OnlineSoftmax(NamedTuple):
    """The running softmax of R rows over the keys so far: the carry of a loop over blocks of keys."""

    peak: Array  # [R], the greatest score, or -inf
    total: Array  # [R], the sum of weights
    accs: tuple[Array, ...]  # [R, size] of each piece, the sum of weights * v

    @classmethod
    def empty(cls, rows: int, pieces: Sequence[Piece]) -> "OnlineSoftmax":
        """Return the softmax over no keys."""
        zeros = jnp.zeros((rows,), jnp.float32)
        accs = tuple(jnp.zeros((rows, piece.size), jnp.float32) for piece in pieces)
        return cls(jnp.full((rows,), -jnp.inf, jnp.float32), zeros, accs)

    def absorb(self, scores: Array, values: Sequence[Array], config: ScoreConfig) -> "OnlineSoftmax":
        """Take in the scores `[R, keys]` of a block, -inf where a row sees no key, and its values `[keys, size]`."""
        peak = jnp.maximum(self.peak, jnp.max(scores, 1))
        finite = jnp.where(peak == -jnp.inf, 0.0, peak)
        weights = jnp.exp2((scores - finite[:, None]) * config.factor)
        decay = jnp.exp2((self.peak - finite) * config.factor)
        total = self.total * decay + jnp.sum(weights, 1)
        rounded = weights.astype(values[0].dtype)
        accs = (acc * decay[:, None] + product(rounded, v) for acc, v in zip(self.accs, values, strict=True))
        return type(self)(peak, total, tuple(accs))

    def state(self, config: ScoreConfig) -> tuple[tuple[Array, ...], Array]:
        """Return out `[R, size]` of each piece and lse `[R]`, natural; 0 and -inf for a row that saw no key."""
        empty = self.peak == -jnp.inf
        total = jnp.where(empty, 1.0, self.total)
        outs = tuple(acc / total[:, None] for acc in self.accs)
        return outs, jnp.where(empty, -jnp.inf, self.peak * config.unit + jnp.log(total))
