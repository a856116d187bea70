"""What `benchmarks.kernels` times: the named shapes, their gradients, zigzag; and what each result has to be."""

import fnmatch
import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.kernel_shapes import SHAPES, AttentionShape
from longctx.kernels import attention

L2_BYTES = 100e6  # twice an H100's 50 MiB, which a rotation of operands has to exceed
MAX_SETS = 16
# Gradients are checked against a float32 run over all tokens, which is slow for more.
MAX_BACKWARD_LENGTH = 16384
CHECKED_ROWS = 16
MAX_ERROR = 2e-2

Operands = tuple[Array, ...]  # q, k, v and, where gradients are asked for, d_out


@dataclass(frozen=True)
class Case:
    """One shape, and who sees whom: tokens are ranges of positions, (first, past the last) each."""

    name: str
    shape: AttentionShape
    q_ranges: tuple[tuple[int, int], ...]
    kv_ranges: tuple[tuple[int, int], ...]
    causal: bool = True
    backward: bool = False

    @staticmethod
    def of(shape: AttentionShape) -> "Case":
        queries = ((shape.kv_length - shape.q_length, shape.kv_length),)
        return Case(shape.name, shape, queries, ((0, shape.kv_length),))

    @property
    def q_positions(self) -> np.ndarray:
        return np.concatenate([np.arange(*r, dtype=np.int32) for r in self.q_ranges])

    @property
    def kv_positions(self) -> np.ndarray:
        return np.concatenate([np.arange(*r, dtype=np.int32) for r in self.kv_ranges])

    @property
    def plain(self) -> bool:
        """Whether a peer that knows no positions can compute it."""
        return len(self.q_ranges) == len(self.kv_ranges) == 1

    @property
    def flops(self) -> float:
        """Backward has five products where forward has two."""
        shape = self.shape
        if self.causal:
            pairs = int(np.searchsorted(self.kv_positions, self.q_positions, "right").sum(dtype=np.int64))
        else:
            pairs = shape.q_length * shape.kv_length
        return 4 * shape.head_size * shape.heads * shape.batch * pairs * (3.5 if self.backward else 1)

    @property
    def bytes(self) -> int:
        """Backward reads q, k, v, out and d_out, and writes d_q, d_k and d_v."""
        return self.shape.bytes * (3 if self.backward else 1)


# A rank of 8 has chunks 3 and 12 of 16. Keys: its own, and those of a rank before and of one behind.
ZIGZAG_CHUNK = 8192
ZIGZAG_KEYS = {"zigzag/own": (3, 12), "zigzag/earlier": (1, 14), "zigzag/later": (5, 10)}
ZIGZAG_DENSE = "zigzag/dense"


def zigzag_cases(chunk: int = ZIGZAG_CHUNK) -> list[Case]:
    """A hop of a ring, half of whose pairs are masked, and a dense call of as many pairs."""
    shape = replace(SHAPES["llama3-8b/tp1/prefill@16k"], q_length=2 * chunk, kv_length=2 * chunk)

    def ranges(chunks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((chunk * c, chunk * (c + 1)) for c in chunks)

    cases = [Case(name, shape, ranges((3, 12)), ranges(keys)) for name, keys in ZIGZAG_KEYS.items()]
    half = replace(shape, kv_length=chunk)
    return [*cases, Case(ZIGZAG_DENSE, half, ((0, 2 * chunk),), ((0, chunk),), causal=False)]


# Those of the aims, then one device of each model as it is served, then the rest.
_FIRST = (
    "mha/tp1/prefill@16k",
    "llama3-70b/tp8/chunk*@1m",
    "llama3-8b/tp1/decode@128k/b1",
    "llama3-8b/tp1/decode@128k/b32",
    "zigzag/*",
    "mha/tp1/prefill@16k/forward+backward",
    "llama3-8b/tp1/*",
    "llama3-70b/tp8/*",
    "llama3-405b/tp8/*",
    "*",
)


def all_cases(only: str = "*") -> list[Case]:
    """What matches, in the order in which it is worth knowing."""
    cases = [Case.of(shape) for shape in SHAPES.values()]
    gradients = [
        replace(case, name=f"{case.name}/forward+backward", backward=True)
        for case in cases
        if case.shape.kind == "prefill" and case.shape.q_length <= MAX_BACKWARD_LENGTH
    ]
    chosen = [case for case in cases + zigzag_cases() + gradients if fnmatch.fnmatchcase(case.name, only)]

    def rank(case: Case) -> int:
        return next(i for i, pattern in enumerate(_FIRST) if fnmatch.fnmatchcase(case.name, pattern))

    return sorted(chosen, key=rank)


def num_sets(case: Case) -> int:
    """How many sets of operands to rotate, so that a small problem isn't read from L2."""
    return int(np.clip(np.ceil(L2_BYTES / case.shape.bytes), 1, MAX_SETS))


def needed_bytes(case: Case) -> float:
    """Operands, results, and one sequence more, in bf16 and in float32, to check them."""
    shape = case.shape
    results = num_sets(case) * (case.bytes - shape.cache_bytes)
    return num_sets(case) * shape.bytes + results + 3 * shape.cache_bytes / shape.batch


def make_operands(case: Case, sets: int) -> list[Operands]:
    shape = case.shape
    kinds = [shape.q_shape, shape.kv_shape, shape.kv_shape] + [shape.q_shape] * case.backward
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), sets * len(kinds)))
    return [tuple(_normal(next(keys), kind) for kind in kinds) for _ in range(sets)]


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: Array, shape: tuple[int, ...]) -> Array:
    # Sequence by sequence: the random bits of a whole cache would take twice its memory.
    return jax.lax.map(
        lambda key: jax.random.normal(key, shape[1:]).astype(jnp.bfloat16), jax.random.split(key, shape[0])
    )


def page_table(shape: AttentionShape, page_size: int) -> np.ndarray:
    """`[B, M]`: the pages of all sequences, shuffled."""
    pages = np.random.default_rng(0).permutation(shape.batch * shape.kv_length // page_size)
    return pages.reshape(shape.batch, -1).astype(np.int32)


def rows_to_check(case: Case) -> np.ndarray:
    return np.unique(np.linspace(0, case.shape.q_length - 1, CHECKED_ROWS).astype(int))


@functools.partial(jax.jit, static_argnames=("causal", "page_size"))
def _expected_rows(
    q: Array,
    k: Array,
    v: Array,
    entry: Array,
    rows: Array,
    q_positions: Array,
    kv_positions: Array,
    segments: tuple[Array, Array],
    table: Array | None,
    causal: bool,
    page_size: int,
) -> Array:
    def keys(x: Array) -> Array:
        if table is None:
            return x[entry].astype(jnp.float32)
        pages = x.reshape(-1, page_size, *x.shape[2:])[table[entry]]
        return pages.reshape(x.shape[1:]).astype(jnp.float32)

    q = q[entry, rows].astype(jnp.float32)
    positions = {"q_positions": q_positions[rows], "kv_positions": kv_positions}
    of_rows, of_keys = segments
    masks = {**positions, "q_segment_ids": of_rows, "kv_segment_ids": of_keys}
    return attention(q, keys(k), keys(v), **masks, causal=causal, implementation="xla")[0]


def expected_rows(case: Case, operands: Operands, causal: bool, page_size: int) -> list[np.ndarray]:
    """Of the first and the last sequence, `rows_to_check`: `[rows, N, H]` in float32, by the XLA implementation."""
    table = page_table(case.shape, page_size) if page_size else None
    rows = rows_to_check(case)
    # One segment. Left to the default, XLA folds a million of constants for seconds.
    segments = np.zeros(len(rows), np.int32), np.zeros(case.shape.kv_length, np.int32)
    tokens = rows, case.q_positions, case.kv_positions, segments, table
    with jax.default_matmul_precision("highest"):
        return [
            np.asarray(_expected_rows(*operands[:3], entry, *tokens, causal=causal, page_size=page_size))
            for entry in entries_to_check(case)
        ]


def entries_to_check(case: Case) -> list[int]:
    return sorted({0, case.shape.batch - 1})


@functools.partial(jax.jit, static_argnames="causal")
def _expected_gradients(q: Array, k: Array, v: Array, d_out: Array, causal: bool) -> tuple[Array, ...]:
    q, k, v, d_out = (x.astype(jnp.float32) for x in (q, k, v, d_out))
    compute = functools.partial(attention, causal=causal, implementation="xla")
    out, pullback = jax.vjp(lambda q, k, v: compute(q, k, v)[0], q, k, v)
    return out, *pullback(d_out)


def last_group(case: Case, x: Array) -> Array:
    """Of `[1, T, N or K, H]`, the heads of the last KV head: gradients are checked of these alone."""
    heads = case.shape.heads // case.shape.kv_heads if x.shape[2] == case.shape.heads else 1
    return x[:, :, -heads:]


def expected_gradients(case: Case, operands: Operands) -> list[np.ndarray]:
    """out, d_q, d_k and d_v of the last KV head, `[tokens, heads, H]` in float32."""
    with jax.default_matmul_precision("highest"):
        results = _expected_gradients(*(last_group(case, x) for x in operands), causal=case.causal)
    return [np.asarray(x[0]) for x in results]


def relative_error(got: np.ndarray, expected: np.ndarray, block: int = 1) -> float:
    """Largest error `[tokens, heads, H]`, as a part of the largest entry of the same block of tokens and head.

    Attention to a million random keys is near 0: zeros would have a small absolute error. Gradients take blocks of
    tokens, as those of a first token, whose weight is 1 whatever its score, are 0.
    """
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    starts = np.arange(0, len(got), block)
    error, size = (np.maximum.reduceat(np.abs(x).max(-1), starts) for x in (got - expected, expected))
    return float((error / np.maximum(size, np.finfo(np.float32).tiny)).max())
