"""The way round a ring: blocks travel from rank to rank while each is computed with."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens
from longctx.parallel.exchange import Exchange


class Ring(Exchange):
    def shift(self, *arrays: Array) -> tuple[Array, ...]:
        """Every rank's arrays to the next rank, in one message.

        XLA's GPU backend has one permute in flight at a time and joins several into one only up to 30 MiB or so: of
        two long ones, the second would wait for the first, and no step would hide it.
        """
        n = self.num_ranks
        permutation = [(rank, (rank + 1) % n) for rank in range(n)]
        words = [_to_words(x, arrays) for x in arrays]
        message = words[0] if len(words) == 1 else jnp.concatenate([x.ravel() for x in words])
        arrived = lax.ppermute(message, self.axis_name, permutation)
        if len(words) == 1:
            return (arrived,)
        parts = jnp.split(arrived, np.cumsum([x.size for x in words])[:-1])
        return tuple(_from_words(part.reshape(x.shape), y) for part, x, y in zip(parts, words, arrays, strict=True))

    def tokens_by_hop(self, tokens: Tokens) -> Callable[[int], Tokens]:
        """The tokens of so many ranks back: all are gathered at once, being 8 bytes each, and one's own are at hand."""
        if self.num_ranks == 1:
            return lambda hop: tokens
        gathered = self.gather_tokens(tokens)
        return lambda hop: Tokens(*(x[self.source(hop)] for x in gathered)) if hop else tokens

    def source(self, hop: int) -> Array:
        """Whose block is here after that many hops."""
        return (lax.axis_index(self.axis_name) - hop) % self.num_ranks

    def ring(self, block: Array, tokens_of: Callable[[int], Any], step: Callable[[Any, Array, Any, Array], Any]) -> Any:
        """Fold `state = step(state, block, tokens, source)` over all ranks' blocks, from None and one's own block on.

        `tokens_of(hop)`: what is known of the block that is here after so many hops, as from `tokens_by_hop`.

        N - 1 permutes, each issued before the step that hides it. Without the barrier a compiler issues them all at
        once, holds N blocks, and hides the last alone. (XLA's CPU backend drops the barrier.)
        """
        state = None
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            arriving = (block,) if is_last else self.shift(block)
            state = step(state, block, tokens_of(hop), self.source(hop))
            if not is_last:
                (block,), state = lax.optimization_barrier((arriving, state))
        return state

    def ring_and_back(
        self,
        block: tuple[Array, ...],
        tokens: Tokens,
        step: Callable[[Any, tuple[Array, ...], Tokens], tuple[Any, Array]],
    ) -> tuple[Any, Array]:
        """Fold `state, share = step(state, block, tokens)` likewise; every block's owner gets the sum of its shares.

        The sum goes round with the blocks, one hop behind its own, so that steps hide both, and last goes home. N - 1
        messages hold a block and N - 1 a sum.
        """
        state: Any = None
        own: Any = None
        total: Any = None
        tokens_of = self.tokens_by_hop(tokens)
        for hop in range(self.num_ranks):
            is_last = hop == self.num_ranks - 1
            leaving = (*(() if is_last else block), *(() if total is None else (total,)))
            arriving = self.shift(*leaving) if leaving else ()
            state, share = step(state, block, tokens_of(hop))
            if hop == 0:
                own = share
            else:
                total = share if total is None else arriving[-1] + share
            if not is_last:
                block, state, own, total = lax.optimization_barrier((arriving[: len(block)], state, own, total))
        return state, own if total is None else own + self.shift(total)[0]


def _to_words(x: Array, message: tuple[Array, ...]) -> Array:
    """As what a message of several dtypes is made of; of one, as it is."""
    return x if len({y.dtype for y in message}) == 1 else lax.bitcast_convert_type(x, jnp.uint16)


def _from_words(words: Array, like: Array) -> Array:
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)
