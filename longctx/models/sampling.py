"""From logits to a token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The defaults are greedy.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token and ignores the rest.
      top_k: keep the k likeliest tokens; None keeps all.
      top_p: keep the likeliest tokens whose probabilities first reach this sum.
      seed: a token depends on the seed, its position and the logits alone.

    Raises:
      ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k must be an integer of at least 1 or None, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be an integer from 0 to 2**31 - 1, got {self.seed}")

    def draw(self, logits: Array, position: Array, seed: Array | int | None = None) -> Array:
        """The next token, int32, from logits `[vocab]`; `position` is the new token's, and seeds the draw.

        A traced `seed` goes before the sampling's own.
        """
        if self.temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        logits = keep_top_p(keep_top_k(logits / self.temperature, self.top_k), self.top_p)
        key = jax.random.fold_in(jax.random.key(self.seed if seed is None else seed), position)
        return jax.random.categorical(key, logits).astype(jnp.int32)


GREEDY = Sampling()


def keep_top_k(logits: Array, k: int | None) -> Array:
    """Logits `[vocab]` with all but the k largest at -inf; ties with the k-th stay."""
    if k is None or k >= logits.shape[-1]:
        return logits
    return jnp.where(logits < jax.lax.top_k(logits, k)[0][-1], -jnp.inf, logits)


def keep_top_p(logits: Array, p: float) -> Array:
    """Logits `[vocab]` with all but the smallest set of likeliest tokens that reaches probability p at -inf."""
    if p >= 1:
        return logits
    order = jnp.argsort(logits, descending=True)
    probabilities = jax.nn.softmax(logits[order])
    # A token stays if those before it don't yet reach p, so the likeliest always does.
    stays = jnp.cumsum(probabilities) - probabilities < p
    return jnp.where(jnp.zeros_like(stays).at[order].set(stays), logits, -jnp.inf)
