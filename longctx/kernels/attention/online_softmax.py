"""The online softmax of blockwise attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from longctx.kernels.operand_dtype import wide_dtype


def dot(a: Array, b: Array) -> Array:
    """The matrix product in float32 or wider."""
    # By default a GPU multiplies float32 in TF32, with 10 bits of mantissa.
    return jnp.matmul(a, b, precision="highest", preferred_element_type=wide_dtype(a.dtype))


def exp_below(scores: Array, peak: Array) -> Array:
    """exp(scores - peak) for scores that are at most peak.

    Their product with the scale was rounded. Without the minimum, LLVM contracts multiplication and subtraction to one
    instruction that rounds once: from 1e9 on a score then differs from itself by 64 and more, and exp overflows, or
    no weight of a row is left.
    """
    return jnp.exp(jnp.minimum(scores, peak) - peak)


class OnlineSoftmax(NamedTuple):
    """The running softmax of R rows over the keys so far: the carry of a loop over blocks."""

    peak: Array  # [R], the greatest score, or -inf
    total: Array  # [R], the sum of exp(score - peak)
    acc: Array  # [R, Hv], the sum of exp(score - peak) * v

    @classmethod
    def of_state(cls, out: Array, lse: Array) -> "OnlineSoftmax":
        """Continue from the state (out, lse) of other keys: weights that sum to 1 at a peak of lse, or an empty row."""
        return cls(lse, (lse != -jnp.inf).astype(out.dtype), out)

    def absorb(self, scores: Array, v_block: Array) -> "OnlineSoftmax":
        """Take in the scores `[R, keys]` of a block, -inf where a row sees no key, and its values `[keys, Hv]`.

        Masked values are multiplied by 0, so they must be finite.
        """
        peak = jnp.maximum(self.peak, _row_max(scores))
        finite = jnp.where(peak == -jnp.inf, 0, peak)
        weights = exp_below(scores, finite[:, None])
        decay = jnp.exp(self.peak - finite)
        total = self.total * decay + jnp.sum(weights, 1)
        return type(self)(peak, total, self.acc * decay[:, None] + dot(weights.astype(v_block.dtype), v_block))

    def state(self) -> tuple[Array, Array]:
        """(out `[R, Hv]`, lse `[R]`)."""
        empty = self.peak == -jnp.inf
        total = jnp.where(empty, 1, self.total)
        out = jnp.where(empty[:, None], 0, self.acc / total[:, None])
        return out, jnp.where(empty, -jnp.inf, self.peak + jnp.log(total))


def _row_max(x: Array) -> Array:
    """Maximum of each row, in two steps: XLA's CPU backend vectorises the first one, eight lanes wide."""
    rows, columns = x.shape
    if columns % 8:
        return jnp.max(x, 1)
    return jnp.max(jnp.max(x.reshape(rows, columns // 8, 8), 1), 1)
