"""The ring: blocks travel from rank to rank while each rank computes with the block it has."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.barrier import hold
from longctx.parallel.exchange import gather_tokens


def ring_source(axis_name: str, hop: int) -> Array:
    """The rank whose block is on this rank after `hop` hops."""
    return (lax.axis_index(axis_name) - hop) % lax.axis_size(axis_name)


def ring_shift(axis_name: str, *arrays: Array) -> tuple[Array, ...]:
    """Send every rank's arrays to the next rank, in one message.

    XLA's GPU backend runs one permute at a time and joins several into one only up to 30 MiB or so: of two long
    permutes the second would wait for the first, and no step would hide it. On CPUs, whose permutes hide nothing, a
    message of its own for each array saves the memory of the one that joins them.
    """
    n = lax.axis_size(axis_name)
    permute = functools.partial(lax.ppermute, axis_name=axis_name, perm=[(rank, (rank + 1) % n) for rank in range(n)])

    def each(*arrays: Array) -> tuple[Array, ...]:
        return tuple(map(permute, arrays))

    def joined(*arrays: Array) -> tuple[Array, ...]:
        words = [_to_words(x, arrays) for x in arrays]
        arrived = permute(jnp.concatenate([x.ravel() for x in words]))
        parts = jnp.split(arrived, np.cumsum([x.size for x in words])[:-1])
        return tuple(_from_words(part.reshape(x.shape), y) for part, x, y in zip(parts, words, arrays, strict=True))

    if len(arrays) == 1:
        return each(*arrays)
    return lax.platform_dependent(*arrays, cpu=each, default=joined)


def tokens_by_hop(tokens: Tokens, axis_name: str) -> Callable[[int], Tokens]:
    """A function from a hop to the positions and segments of the block that is on this rank after it.

    Those of all ranks are gathered at once, as they take 8 bytes a token; hop 0 reads this rank's own.
    """
    if lax.axis_size(axis_name) == 1:
        return lambda hop: tokens
    gathered = gather_tokens(tokens, axis_name)
    return lambda hop: Tokens(*(x[ring_source(axis_name, hop)] for x in gathered)) if hop else tokens


def fold_ring(
    block: Array,
    tokens_of: Callable[[int], Any],
    step: Callable[[Any, Array, Any, Array], Any],
    axis_name: str,
    state: Any = None,
) -> Any:
    """Fold `state = step(state, block, tokens, source)` over the blocks of all ranks, this rank's own first.

    Each of the N - 1 permutes is issued before the step that hides it. Without the barrier a compiler issues all
    permutes at once, holds N blocks, and hides only the last one. `tokens_of` is as `tokens_by_hop` makes it.
    """
    n = lax.axis_size(axis_name)
    for hop in range(n):
        is_last = hop == n - 1
        arriving = (block,) if is_last else ring_shift(axis_name, block)
        state = step(state, block, tokens_of(hop), ring_source(axis_name, hop))
        if not is_last:
            block, state = hold(arriving[0], state)
    return state


def fold_ring_and_return(
    block: tuple[Array, ...],
    tokens: Tokens,
    step: Callable[[Any, tuple[Array, ...], Tokens], tuple[Any, tuple[Array, ...]]],
    axis_name: str,
) -> tuple[Any, tuple[Array, ...]]:
    """Fold `state, share = step(state, block, tokens)` over all blocks, and return each block's sum of shares home.

    The sums follow their block one hop behind, so that steps hide both: N - 1 messages hold a block and N - 1 sums.
    """
    state: Any = None
    own: tuple[Array, ...] = ()
    total: tuple[Array, ...] = ()
    n, tokens_of = lax.axis_size(axis_name), tokens_by_hop(tokens, axis_name)
    for hop in range(n):
        is_last = hop == n - 1
        leaving = (*(() if is_last else block), *total)
        arriving = ring_shift(axis_name, *leaving) if leaving else ()
        state, share = step(state, block, tokens_of(hop))
        if hop == 0:
            own = share
        else:
            total = _add(arriving[-len(share) :], share) if total else share
        if not is_last:
            block, (state, own, total) = hold(arriving[: len(block)], (state, own, total))
    return state, _add(own, ring_shift(axis_name, *total)) if total else own


def _add(xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def _to_words(x: Array, message: tuple[Array, ...]) -> Array:
    """Return x as 16-bit words where the message has several dtypes, else as it is."""
    return x if len({y.dtype for y in message}) == 1 else lax.bitcast_convert_type(x, jnp.uint16)


def _from_words(words: Array, like: Array) -> Array:
    """Undo `_to_words`."""
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)
