"""The ring: blocks travel from rank to rank while each rank computes with the block it has."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.kernels.attention.mask import Tokens
from longctx.kernels.barrier import hold
from longctx.parallel.exchange import gather_tokens, pack_tokens

MOST_UNROLLED = 8
"""Hops of the longest ring that is unrolled. A loop takes those of a longer one, but the ends: each hop compiles."""


def ring_source(axis_name: str, hop: int | Array) -> Array:
    """The rank whose block is on this rank after `hop` hops."""
    return (lax.axis_index(axis_name) - hop) % lax.axis_size(axis_name)


def ring_shift(axis_name: str, *arrays: Array, by: int = 1) -> tuple[Array, ...]:
    """Send every rank's arrays to the rank that is `by` ranks after it, in one message.

    XLA's GPU backend runs one permute at a time and joins several into one only up to 30 MiB or so: of two long
    permutes the second would wait for the first, and no step would hide it. On CPUs, whose permutes hide nothing, a
    message of its own for each array saves the memory of the one that joins them.
    """
    n = lax.axis_size(axis_name)
    permute = functools.partial(lax.ppermute, axis_name=axis_name, perm=[(rank, (rank + by) % n) for rank in range(n)])

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


def check_hops(hops: Sequence[int] | None, num_ranks: int) -> tuple[int, ...]:
    """Check the hops of a ring, as `layout_hops` returns them, and return them; None: all.

    Raises:
      ValueError: they are no ascending integers from 0, of ranks.
    """
    if hops is None:
        return tuple(range(num_ranks))
    found = tuple(hops)
    is_ascending = all(isinstance(hop, (int, np.integer)) for hop in found) and sorted({*found}) == [*found]
    if not found or not is_ascending or found[0] != 0 or found[-1] >= num_ranks:
        raise ValueError(
            f"hops must be ascending integers from 0 to {num_ranks - 1} that begin with 0, the rank's own keys, "
            f"got {hops!r}"
        )
    return tuple(map(int, found))


def tokens_by_hop(tokens: Tokens, axis_name: str, hops: tuple[int, ...] | None = None) -> Callable[[Any], Tokens]:
    """A function from a hop to the positions and segments of the block that is on this rank after it.

    Those of all ranks are gathered at once, as they take 8 bytes a token or some more, unless few hops are taken, none
    of them by a loop; hop 0 reads this rank's own.
    """
    if hops is not None and len(hops) < min(lax.axis_size(axis_name), MOST_UNROLLED + 1):
        packed, unpack = pack_tokens(tokens)
        arrived = {hop: unpack(ring_shift(axis_name, packed, by=hop)[0]) for hop in hops[1:]}
        return lambda hop: arrived[hop] if hop else tokens
    if lax.axis_size(axis_name) == 1:
        return lambda hop: tokens
    gathered = gather_tokens(tokens, axis_name)
    is_own = lambda hop: isinstance(hop, int) and hop == 0  # noqa: E731
    return lambda hop: tokens if is_own(hop) else jax.tree.map(lambda x: x[ring_source(axis_name, hop)], gathered)


def fold_ring(
    block: tuple[Array, ...],
    tokens_of: Callable[[Any], Any],
    step: Callable[[Any, tuple[Array, ...], Any, Array], Any],
    axis_name: str,
    state: Any = None,
    hops: tuple[int, ...] | None = None,
    may_loop: bool = False,
) -> Any:
    """Fold `state = step(state, block, tokens, source)` over the blocks of all ranks, this rank's own first.

    Each of the N - 1 permutes is issued before the step that hides it. Without the barrier a compiler issues all
    permutes at once, holds N blocks, and hides only the last one. `tokens_of` is as `tokens_by_hop` makes it. Given
    `hops`, the blocks that come after other hops are left out. With `may_loop`, a hop may be traced, and states after
    all hops have one type.
    """

    def take(hop: Any, ahead: int, carry: Any) -> Any:
        block, state = carry
        arriving = ring_shift(axis_name, *block, by=ahead) if ahead else ()
        state = step(state, block, tokens_of(hop), ring_source(axis_name, hop))
        return hold(arriving, state) if ahead else (block, state)

    pairs = _with_following(hops, axis_name)
    looped = _looped(pairs, 1) if may_loop else range(0)
    carry = block, state
    for hop, ahead in pairs:
        if hop not in looped:
            carry = take(hop, ahead, carry)
        elif hop == looped.start:
            carry = lax.fori_loop(*_bounds(looped), lambda hop, carry: take(hop, 1, carry), carry)
    return carry[1]


def _with_following(hops: tuple[int, ...] | None, axis_name: str) -> list[tuple[int, int]]:
    """Pairs of each hop, and how many ranks ahead the block goes after it; 0: it is the last one."""
    hops = tuple(range(lax.axis_size(axis_name))) if hops is None else hops
    return [(hop, following - hop) for hop, following in zip(hops, (*hops[1:], hops[-1]), strict=True)]


def _looped(pairs: list[tuple[int, int]], first: int) -> range:
    """The hops that a loop takes, from `first` to the last but one; none of a short ring, or one that skips hops."""
    is_long = len(pairs) > MOST_UNROLLED and all(ahead == 1 for _, ahead in pairs[:-1])
    return range(first, len(pairs) - 1) if is_long else range(0)


def _bounds(hops: range) -> tuple[np.int32, np.int32]:
    """The first hop and the one after the last, in the type of `lax.axis_index`."""
    return np.int32(hops.start), np.int32(hops.stop)


def fold_ring_and_return(
    block: tuple[Array, ...],
    tokens: Tokens,
    step: Callable[[Any, tuple[Array, ...], Tokens], tuple[Any, tuple[Array, ...]]],
    axis_name: str,
    hops: tuple[int, ...] | None = None,
) -> tuple[Any, tuple[Array, ...]]:
    """Fold `state, share = step(state, block, tokens)` over all blocks, and return each block's sum of shares home.

    The sums follow their block one hop behind, so that steps hide both: N - 1 messages hold a block and N - 1 sums.
    """
    tokens_of = tokens_by_hop(tokens, axis_name, hops)

    def take(hop: Any, ahead: int, behind: int, carry: Any) -> Any:
        block, state, total = carry
        arriving, total = _shift_both(axis_name, block if ahead else (), ahead, total, behind)
        state, share = step(state, block, tokens_of(hop))
        total = _add(total, share) if total else share
        if ahead:
            block, (state, total) = hold(arriving, (state, total))
        return block, state, total

    pairs = _with_following(hops, axis_name)
    looped = _looped(pairs, 2)
    block, state, own = take(*pairs[0], 0, (block, None, ()))
    carry: Any = block, state, ()
    for (_, behind), (hop, ahead) in itertools.pairwise(pairs):
        if hop not in looped:
            carry = take(hop, ahead, behind, carry)
        elif hop == looped.start:
            carry = lax.fori_loop(*_bounds(looped), lambda hop, carry: take(hop, 1, 1, carry), carry)
    _, state, total = carry
    return state, _add(own, ring_shift(axis_name, *total, by=-pairs[-1][0])) if total else own


def _shift_both(
    axis_name: str, block: tuple[Array, ...], ahead: int, total: tuple[Array, ...], behind: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Send a block `ahead` ranks on and sums `behind` ranks on: in one message where both are equal."""
    if block and total and ahead == behind:
        arriving = ring_shift(axis_name, *block, *total, by=ahead)
        return arriving[: len(block)], arriving[len(block) :]
    return (
        ring_shift(axis_name, *block, by=ahead) if block else (),
        ring_shift(axis_name, *total, by=behind) if total else (),
    )


def _add(xs: tuple[Array, ...], ys: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def _to_words(x: Array, message: tuple[Array, ...]) -> Array:
    """Return x as 16-bit words where the message has several dtypes, else as it is."""
    return x if len({y.dtype for y in message}) == 1 else lax.bitcast_convert_type(x, jnp.uint16)


def _from_words(words: Array, like: Array) -> Array:
    """Undo `_to_words`."""
    return words if words.dtype == like.dtype else lax.bitcast_convert_type(words, like.dtype)
