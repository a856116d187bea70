"""Every exchange against the float64 oracle: values, lse and gradients. Layouts, caches and packing are data."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.parallel import (
    all_gather_kv,
    helix_attention,
    kvp_attention,
    make_mesh,
    plan_varseq,
    ring,
    ring_pass_kv,
    ring_pass_q,
    ulysses_attention,
)

Arrays = dict[str, jax.Array]

EXCHANGES: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "pass_kv": ring_pass_kv,
    "pass_q": ring_pass_q,
    "pass_q_decode": functools.partial(ring_pass_q, decode=True),
    "all_gather": all_gather_kv,
    "kvp_gather": functools.partial(kvp_attention, merge="gather"),
    "kvp_all_to_all": functools.partial(kvp_attention, merge="all_to_all"),
    "helix": helix_attention,
    "ulysses": ulysses_attention,
    "usp": functools.partial(ulysses_attention, ring_axis="stage"),  # two groups
}
RANKS = (1, 2, 3, 4, 5, 8)
HEADS = {1: (2, 2), 4: (8, 2), 8: (8, 1)}  # query and KV heads by their ratio
# Of the grid, a number of ranks and a head ratio with each exchange. A ring is unrolled, so that a long one takes long
# to compile; that of keys has two lengths. The dense one is compiled once for each pair.
SUBSET = [
    ("pass_kv", 2, 1),
    ("pass_kv", 5, 4),
    ("pass_q", 3, 8),
    ("pass_q_decode", 3, 8),
    ("all_gather", 2, 1),
    ("kvp_gather", 8, 4),
    ("kvp_all_to_all", 5, 4),
    ("helix", 3, 4),
    ("helix", 8, 8),
    ("ulysses", 2, 1),
    ("ulysses", 4, 4),  # more ranks than KV heads
    ("usp", 4, 8),
]
GRID = [
    (exchange, ranks, ratio)
    for exchange in EXCHANGES
    for ranks in RANKS
    for ratio in HEADS
    if exchange != "usp" or ranks % 2 == 0
]


@functools.cache
def differentiated(exchange: str, ranks: int, options: tuple[tuple[str, Any], ...]) -> Callable[..., Arrays]:
    """Values and gradients of one exchange, or with 0 ranks of dense attention: jitted once, all cases are data."""
    if ranks == 0:

        def compute(q: jax.Array, k: jax.Array, v: jax.Array, tokens: cases.Tokens, sinks: Any) -> Any:
            return attention(q, k, v, **tokens._asdict(), sinks=sinks, implementation="reference", **dict(options))

    else:
        groups = 2 if exchange == "usp" else 1
        spec = P(("stage", "context") if exchange == "usp" else "context")
        q_spec = P() if exchange.startswith(("kvp", "helix")) else spec
        out_specs = (P(None, "context"),) * 2 if exchange == "helix" else q_spec
        compute = jax.shard_map(
            lambda q, k, v, tokens, sinks: EXCHANGES[exchange](
                q, k, v, **tokens._asdict(), sinks=sinks, axis_name="context", **dict(options)
            ),
            mesh=make_mesh(stage=groups, context=ranks // groups),
            in_specs=(q_spec, spec, spec, cases.Tokens(*[q_spec, spec] * 2, q_spec, q_spec), P()),  # type: ignore[arg-type]
            out_specs=out_specs,
        )

    def run(
        arrays: dict[str, jax.Array], tokens: cases.Tokens, d_out: jax.Array, d_lse: jax.Array
    ) -> dict[str, jax.Array]:
        def weighted(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            out, lse = compute(arrays["q"], arrays["k"], arrays["v"], tokens, arrays.get("sinks"))
            seen = jnp.where(lse == -jnp.inf, 0, lse)  # an empty row's -inf would swallow the sum
            return jnp.sum(out * d_out) + jnp.sum(seen * d_lse), {"out": out, "lse": lse}

        gradients, results = jax.grad(weighted, has_aux=True)(arrays)
        return results | {f"d_{name}": x for name, x in gradients.items()}

    return jax.jit(run)


def check(
    exchange: str,
    ranks: int,
    ratio: int,
    tokens: cases.Tokens,
    seed: int,
    lengths: tuple[int, int] = (cases.NEW, cases.KEYS),
    value_size: int = cases.HEAD_SIZE,
    sinks: bool = False,
    heads: tuple[int, int] | None = None,
    **options: Any,
) -> None:
    heads, kv_heads = heads or heads_of(exchange, ranks, ratio)
    rng = np.random.default_rng(seed)
    q_shape = (ranks * lengths[0], heads, cases.HEAD_SIZE)
    kv_shape = (ranks * lengths[1], kv_heads)
    shapes = {"q": q_shape, "k": (*kv_shape, cases.HEAD_SIZE), "v": (*kv_shape, value_size)}
    if sinks:
        shapes["sinks"] = (heads,)
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    cotangents = rng.standard_normal((*q_shape[:-1], value_size)), rng.standard_normal(q_shape[:-1])

    def run(ranks: int, dtype: object) -> dict[str, np.ndarray]:
        typed = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
        compute = differentiated(
            exchange if ranks else "", ranks, tuple(options.items())
        )  # one oracle for all exchanges
        results = compute(typed, tokens, *(jnp.asarray(x, dtype) for x in cotangents))
        return {name: np.asarray(x, np.float64) for name, x in results.items()}

    with jax.enable_x64(True):
        want = run(0, jnp.float64)
    for name, got in run(ranks, jnp.float32).items():
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want[name]), err_msg=name)
        finite = np.isfinite(want[name])
        # Gradients of keys sum over the queries: the bound is relative to their size.
        size = np.abs(want[name][finite]).max(initial=1.0)
        np.testing.assert_allclose(got[finite], want[name][finite], rtol=0, atol=1e-5 * size, err_msg=name)


def heads_of(exchange: str, ranks: int, ratio: int) -> tuple[int, int]:
    """Query and KV heads of a ratio; where ranks get a part of the heads, so many that they divide the query heads."""
    heads, kv_heads = HEADS[ratio]
    divisor = {"helix": ranks, "ulysses": ranks, "usp": ranks // 2}.get(exchange, 1)
    times = divisor // math.gcd(heads, divisor)
    return times * heads, times * kv_heads


def thinned(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters of a test that is slow but for those kept: they attend to each part with the same code."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


def kinds(exchange: str) -> tuple[str, ...]:
    return ("decode",) if exchange == "pass_q_decode" else cases.KINDS


@pytest.mark.parametrize(("exchange", "ranks", "ratio"), SUBSET)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_agrees_with_oracle(exchange: str, ranks: int, ratio: int, data: st.DataObject, seed: int) -> None:
    check(exchange, ranks, ratio, data.draw(cases.tokens(ranks, kinds(exchange))), seed)


@pytest.mark.parametrize("exchange", thinned(EXCHANGES, "pass_kv", "kvp_gather", "helix", "ulysses"))
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_window_bias_soft_cap_sinks_and_values_of_another_size(exchange: str, data: st.DataObject, seed: int) -> None:
    ranks = 6 if exchange == "usp" else 3
    tokens = data.draw(cases.tokens(ranks, kinds(exchange)))
    options = {"window": (9, 0), "logits_soft_cap": 1.5, "bias": cases.alibi}
    check(exchange, ranks, 4, tokens, seed, value_size=5, sinks=True, **options)


@pytest.mark.parametrize("exchange", thinned(EXCHANGES, "pass_kv", "pass_q", "kvp_gather", "ulysses"))
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_first_and_last_position_of_each_query(exchange: str, causal: bool, data: st.DataObject, seed: int) -> None:
    ranks = 4 if exchange == "usp" else 3
    tokens = data.draw(cases.limits(data.draw(cases.tokens(ranks, kinds(exchange)))))
    check(exchange, ranks, 4, tokens, seed, causal=causal)


@pytest.mark.parametrize(
    ("exchange", "ranks", "heads"),
    [
        ("ulysses", 3, (12, 4)),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("ulysses", 4, (24, 6)), ("usp", 6, (12, 4)))),
    ],
)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_ranks_that_neither_divide_kv_heads_nor_are_a_multiple(
    exchange: str, ranks: int, heads: tuple[int, int], data: st.DataObject, seed: int
) -> None:
    """Ranks share some of the KV heads, whose gradients are sums."""
    check(exchange, ranks, 0, data.draw(cases.tokens(ranks)), seed, heads=heads)


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "ranks", "ratio"), GRID)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_agrees_with_oracle_on_the_grid(exchange: str, ranks: int, ratio: int, data: st.DataObject, seed: int) -> None:
    for kind in kinds(exchange):
        for layout in cases.LAYOUTS:
            check(exchange, ranks, ratio, data.draw(cases.tokens(ranks, (kind,), (layout,))), seed)


@pytest.mark.parametrize("exchange", thinned(EXCHANGES, "pass_kv"))
def test_many_tiles_and_blocks_of_keys(exchange: str) -> None:
    """Several blocks of queries and of keys on each rank, the last of either moved back; a prefix and two sequences."""
    ranks, new, keys = 4 if exchange == "usp" else 3, 300, 700
    plan = plan_varseq([700, 150], [0, 900], ranks)
    fill = [new - plan.q_indices.shape[1]] * 2 + [keys - plan.kv_indices.shape[1]] * 2
    fields = (plan.q_positions, plan.q_segment_ids, plan.kv_positions, plan.kv_segment_ids)
    padded = [
        np.pad(x, ((0, 0), (0, n)), constant_values=value).ravel()
        for x, n, value in zip(fields, fill, (0, -1, 0, -1), strict=True)
    ]
    q_positions, q_segments, kv_positions, kv_segments = padded
    if exchange == "pass_q_decode":  # every row a sequence of its own
        q_segments = np.where(np.arange(ranks * new) % 7 < 2, q_segments, -1)
    check(exchange, ranks, 4, cases.Tokens(q_positions, kv_positions, q_segments, kv_segments), 0, lengths=(new, keys))


@pytest.mark.parametrize("exchange", thinned(("pass_kv", "pass_q"), "pass_kv"))
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=2)
def test_a_ring_whose_middle_hops_are_a_loop(exchange: str, data: st.DataObject, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "MOST_UNROLLED", 4)
        check(exchange, 5, 1, data.draw(cases.tokens(5)), seed, scale=0.3)  # of no other test, so compiled here


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_queries_or_no_keys_anywhere(exchange: str, lengths: tuple[int, int]) -> None:
    new, keys = (2 * n for n in lengths)
    empty = cases.Tokens(np.zeros(new, int), np.zeros(keys, int), np.zeros(new, int), np.zeros(keys, int))
    check(exchange, 2, 4, empty, 0, lengths=lengths)


@pytest.mark.parametrize(
    "exchange", thinned(("pass_kv", "pass_q", "all_gather", "kvp_gather", "ulysses", "usp"), "pass_q", "usp")
)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=3)
def test_without_a_causal_mask(exchange: str, data: st.DataObject, seed: int) -> None:
    ranks = 4 if exchange == "usp" else 3
    check(exchange, ranks, 4, data.draw(cases.tokens(ranks)), seed, causal=False)
