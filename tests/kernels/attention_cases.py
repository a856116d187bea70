"""Drawn cases of `attention`, and their results by the float64 oracle."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from longctx.kernels import attention, plan_attention

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Case(NamedTuple):
    """One problem: float64 arrays, positions and segments, and cotangents for both results."""

    arrays: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    rule: str  # of RULES
    d_out: np.ndarray
    d_lse: np.ndarray


def alibi(head: jax.Array, q_position: jax.Array, kv_position: jax.Array) -> jax.Array:
    return -jnp.asarray([0.1, 0.5, 0.02, 0.3])[head % 4] * jnp.abs(q_position - kv_position)


# Static arguments, of which each compiles. The array of a bias is data, and so are `q_first` and `q_last`.
RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": (40, 0)},
    "both sides": {"window": (9, 130), "causal": False},
    "soft cap": {"logits_soft_cap": 1.5, "window": 300},
    "bias of heads": {"bias": alibi, "causal": False},
    "bias of all": {"logits_soft_cap": 1.5},
    "bias of keys": {"causal": False},
    "first": {},
    "last": {"causal": False},
    "first and last": {"causal": False, "window": (300, None)},
}

# (batch, T, S, K, G, H, and the head size of values where it differs): each compiles once, and everything else about a
# case is data. Lengths that divide nothing, shorter than a block, just over one, several.
SHAPES = [
    ((), 1, 1, 1, 1, 1),
    ((), 1, 3000, 2, 4, 8, 3),
    ((2,), 7, 300, 3, 1, 24),
    ((), 700, 700, 1, 8, 8),
    ((2, 1), 257, 1100, 2, 4, 8, 12),
    ((), 1100, 257, 1, 2, 16),
]
ANY_SHAPE = st.tuples(
    st.sampled_from([(), (1,), (2,), (2, 1), (3, 2)]),
    st.integers(1, 1300),
    st.integers(1, 1300),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 40),
)


@st.composite
def cases(draw: st.DrawFn, shapes: st.SearchStrategy[Any], rules: Sequence[str] = tuple(RULES)) -> Case:
    """Drawn shapes with any layout of tokens."""
    batch, q_length, kv_length, kv_heads, group, head_size, *of_values = draw(shapes)
    value_size = of_values[0] if of_values else head_size
    layout = draw(st.sampled_from(["suffix", "zigzag", "striped", "packed", "shuffled", "before"]))
    padding = draw(st.sampled_from(["none", "some", "all"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    rows, keys = (*batch, q_length, kv_heads * group), (*batch, kv_length, kv_heads)
    shapes_of = {"q": (*rows, head_size), "k": (*keys, head_size), "v": (*keys, value_size)}
    rule = draw(st.sampled_from(sorted(rules)))
    if rule == "bias of all":
        shapes_of["bias"] = (*batch, rows[-1], q_length, kv_length)
    elif rule == "bias of keys":
        shapes_of["bias"] = (rows[-1], 1, kv_length)
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes_of.items()}
    return Case(
        arrays=arrays,
        masks=_masks(rng, layout, padding, batch, q_length, kv_length) | _limits(rng, rule, batch, q_length, kv_length),
        rule=rule,
        d_out=rng.standard_normal((*rows, value_size)),
        d_lse=rng.standard_normal(rows),
    )


def _masks(
    rng: np.random.Generator, layout: str, padding: str, batch: tuple[int, ...], q_length: int, kv_length: int
) -> dict[str, np.ndarray]:
    q_segments, kv_segments = np.zeros(q_length, int), np.zeros(kv_length, int)
    q_positions, kv_positions = np.arange(q_length), np.arange(kv_length)
    match layout:
        case "suffix":  # new tokens after a cached prefix
            q_positions = q_positions + max(0, kv_length - q_length)
        case "zigzag":  # two chunks of a sequence four times as long
            q_positions = np.where(q_positions < q_length // 2, q_positions, q_positions + 2 * q_length)
        case "striped":
            q_positions, kv_positions = 4 * q_positions + 1, 4 * kv_positions + 3
        case "packed":  # several sequences, each counting from zero
            q_segments, q_positions = _pack(rng, q_length)
            kv_segments, kv_positions = _pack(rng, kv_length)
        case "shuffled":  # no order at all, and per sequence of the batch
            q_positions = rng.integers(0, 1000, (*batch, q_length))
            kv_positions = rng.integers(0, 1000, (*batch, kv_length))
            q_segments = rng.integers(0, 3, (*batch, q_length))
            kv_segments = rng.integers(0, 3, kv_length)
        case "before":  # every query stands before every key
            kv_positions = kv_positions + q_length
    if padding == "some":
        q_segments = np.where(rng.random(q_length) < 0.2, -1, q_segments)
        kv_segments = np.where(np.arange(kv_length) >= kv_length - kv_length // 3, -1, kv_segments)
    elif padding == "all":
        kv_segments = np.full(kv_length, -1)
    return {
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "q_segment_ids": q_segments,
        "kv_segment_ids": kv_segments,
    }


def _limits(
    rng: np.random.Generator, rule: str, batch: tuple[int, ...], q_length: int, kv_length: int
) -> dict[str, np.ndarray]:
    """Any positions, ascending or in no order, of each sequence or of all; also the least and the greatest."""
    limits = {}
    for name in ("first", "last"):
        if name in rule.split():
            ends = np.iinfo(np.int32).min, np.iinfo(np.int32).max
            found = rng.integers(-20, kv_length + 20, (*batch, q_length) if rng.random() < 0.5 else q_length)
            found = np.sort(found) if rng.random() < 0.7 else np.where(rng.random(found.shape) < 0.1, ends[0], found)
            limits[f"q_{name}"] = np.where(rng.random(found.shape) < 0.02, ends[1], found)
    return limits


def _pack(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
    cuts = np.sort(rng.integers(0, length + 1, 3))
    segments = np.searchsorted(cuts, np.arange(length), side="right")
    starts = np.concatenate([[0], cuts])[segments]
    return segments, np.arange(length) - starts


def _values(
    arrays: dict[str, jax.Array], masks: dict[str, jax.Array], rule: str, implementation: str, out_dtype: object
) -> dict[str, jax.Array]:
    out, lse = attention(**arrays, **masks, **RULES[rule], implementation=implementation, out_dtype=out_dtype)
    return {"out": out, "lse": lse}


@functools.partial(jax.jit, static_argnames=("rule", "implementation"))
def _values_and_gradients(
    arrays: dict[str, jax.Array],
    masks: dict[str, jax.Array],
    d_out: jax.Array,
    d_lse: jax.Array,
    rule: str,
    implementation: str,
) -> dict[str, jax.Array]:
    def weighted(arrays: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        results = _values(arrays, masks, rule, implementation, d_out.dtype)
        seen = jnp.where(results["lse"] == -jnp.inf, 0, results["lse"])  # an empty row's -inf would swallow the sum
        return jnp.sum(results["out"] * d_out) + jnp.sum(seen * d_lse), results

    grads, results = jax.grad(weighted, has_aux=True)(arrays)
    return results | {f"d{name}": grad for name, grad in grads.items()}


planned = jax.jit(plan_attention, static_argnames=("causal", "window", "implementation"))


def run(case: Case, dtype: object, implementation: str, gradients: bool = True) -> dict[str, np.ndarray]:
    """Values and gradients as float64; computed in `dtype`, results asked for in float32 or wider.

    Values alone are computed without `jax.jit`, but for the plan, whose operations would compile one by one.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    arrays = {name: jnp.asarray(x, dtype) for name, x in case.arrays.items()}
    masks = {name: jnp.asarray(x, jnp.int32) for name, x in case.masks.items()}
    if gradients:
        d_out, d_lse = (jnp.asarray(x, wide) for x in (case.d_out, case.d_lse))
        results = _values_and_gradients(arrays, masks, d_out, d_lse, case.rule, implementation)
    else:
        options = RULES[case.rule]
        visible = {name: options[name] for name in ("causal", "window") if name in options}
        plan = planned(arrays["q"], arrays["k"], **masks, **visible, implementation=implementation)
        out, lse = attention(**arrays, **options, plan=plan, out_dtype=wide)
        results = {"out": out, "lse": lse}
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


def oracle(case: Case) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        return run(case, jnp.float64, "reference")


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference; infinities must stand in the same places."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all()
    return float(np.max(np.abs(got[finite] - want[finite]), initial=0.0))
