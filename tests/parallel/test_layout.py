"""Layouts: every token once, shards alike in length, and there and back on any axis, in and outside of jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.parallel import layout_hops, layout_shards, shard_positions, shard_sequence, unshard_sequence

LAYOUTS = st.sampled_from(["contiguous", "zigzag", "striped"])


@given(st.integers(0, 200), st.integers(1, 9), LAYOUTS)
def test_every_token_is_in_one_shard(length: int, num_shards: int, layout: str) -> None:
    shards = layout_shards(length, num_shards, layout)
    np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(length))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert all((np.diff(shard) > 0).all() for shard in shards)


@given(st.integers(1, 200), st.integers(1, 9))
def test_zigzag_pairs_chunks_from_both_ends(length: int, num_shards: int) -> None:
    """Shard i is two runs, the i-th from the start and the i-th from the end; all runs differ by a token at most."""
    shards = layout_shards(length, num_shards, "zigzag")
    runs = [np.split(shard, np.flatnonzero(np.diff(shard) > 1) + 1) for shard in shards]
    halves = [
        run if len(run) == 2 else [run[0][: (len(run[0]) + 1) // 2], run[0][(len(run[0]) + 1) // 2 :]] for run in runs
    ]
    chunks = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    np.testing.assert_array_equal(np.concatenate(chunks), np.arange(length))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1


def test_layouts_of_eight_tokens() -> None:
    def shards(layout: str) -> list[list[int]]:
        return [shard.tolist() for shard in layout_shards(8, 2, layout)]

    assert shards("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shards("zigzag") == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shards("striped") == [[0, 2, 4, 6], [1, 3, 5, 7]]


SIDE = st.none() | st.integers(0, 60)


@given(st.integers(0, 60), st.integers(1, 9), LAYOUTS, st.booleans(), SIDE, SIDE)
def test_hops_are_those_whose_keys_some_query_sees(
    length: int, num_shards: int, layout: str, causal: bool, before: int | None, after: int | None
) -> None:
    """Against every pair of a query and a key."""
    rank = np.empty(length, int)
    for i, shard in enumerate(layout_shards(length, num_shards, layout)):
        rank[shard] = i
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance <= (length if before is None else before)) & (distance >= -(length if after is None else after))
    hops = (rank[:, None] - rank)[seen & ~(causal & (distance < 0))] % num_shards
    want = tuple(sorted({0, *hops.tolist()}))
    assert layout_hops(length, num_shards, layout, causal=causal, window=(before, after)) == want


@given(st.integers(0, 40), st.integers(1, 5), LAYOUTS, st.integers(-3, 2), st.booleans())
def test_there_and_back(length: int, num_shards: int, layout: str, axis: int, jitted: bool) -> None:
    shape = [2, 3, 2]
    shape[axis] = length
    x = np.arange(np.prod(shape)).reshape(shape)

    def there_and_back(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        sharded = shard_sequence(x, num_shards, layout, axis, pad_value=-1)
        return sharded, unshard_sequence(sharded, num_shards, layout, axis, length)

    sharded, back = (jax.jit(there_and_back) if jitted else there_and_back)(x)
    np.testing.assert_array_equal(back, x)
    assert sharded.shape[axis] == num_shards * -(-length // num_shards)
    assert np.sum(np.asarray(sharded) == -1) == sharded.size - x.size


@given(st.integers(0, 40), st.integers(1, 5), LAYOUTS)
def test_positions_go_the_same_way(length: int, num_shards: int, layout: str) -> None:
    positions, segments = shard_positions(length, num_shards, layout)
    assert positions.dtype == segments.dtype == np.int32
    np.testing.assert_array_equal(positions, shard_sequence(jnp.arange(length), num_shards, layout, 0))
    np.testing.assert_array_equal(segments, shard_sequence(jnp.zeros(length, int), num_shards, layout, 0, -1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: shard_sequence(x, 2, "ring", 0), "layout must be one of contiguous, zigzag, striped, got 'ring'"),
        (lambda x: shard_sequence(x, 0, "zigzag", 0), "num_shards must be a positive integer, got 0"),
        (lambda x: shard_sequence(x, 2), "axis must index one of the 1 axes of x, got 1"),
        (
            lambda x: unshard_sequence(x, 4, axis=0),
            "length must be that of a sequence with 6 entries in 4 shards, got 6",
        ),
        (lambda x: unshard_sequence(x, 2, axis=0, length=4), "length must be that of a sequence with 6 entries"),
        (lambda x: layout_shards(-1, 2, "zigzag"), "length must be a non-negative integer, got -1"),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call(jnp.arange(6))
