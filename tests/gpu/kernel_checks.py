"""What attention takes by itself here, against the dense oracle in float32, on random operands.

A 16-bit result may be off by 2.5 times the error of a dense computation in the same dtype, plus 2e-3, as everywhere in
the tests. Rows that see nothing are exactly (0, -inf).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu_worker import Context, Figures, Unsupported
from jax import Array

from longctx.kernels import attention, paged_attention, write_pages
from longctx.kernels.device import Device
from longctx.kernels.fp8 import BITS, from_e4m3_bits
from longctx.kernels.mosaic_gpu.merge import merge_pieces

# Queries and keys of each shape, and at small sizes. The queries are the last tokens.
LENGTHS = {
    "prefill-4k": ((4096, 4096), (16, 16)),
    "chunk-64-at-8k": ((64, 8192), (6, 140)),
    "decode": ((1, 8192), (1, 140)),
    "ragged-2100": ((2100, 2100), (11, 11)),
}
# Of queries, at most: the oracle has every score in memory. 32 heads of 2,100 tokens have a worker for each tile.
HEADS = {"prefill-4k": 16, "chunk-64-at-8k": 16, "decode": 32, "ragged-2100": 32}


def compare(got: Sequence[Array], dense: Sequence[Array], want: Sequence[Array], are_sizes: bool = False) -> Figures:
    """Check each of some results.

    Args:
      got, dense, want: by the kernel, by the dense computation in its dtype, and by that in float32.
      are_sizes: errors count relative to the largest entry, as those of gradients, which are sums over many rows.

    Raises:
      AssertionError: one is off by more than it may be.
    """
    figures: Figures = {"error": 0.0, "allowed": 0.0}
    for i, (x, rough, exact) in enumerate(zip(got, dense, want, strict=True)):
        x, rough, exact = (np.asarray(each.astype(jnp.float32)) for each in (x, rough, exact))
        empty = np.isneginf(exact)
        assert np.array_equal(np.isneginf(x), empty), f"result {i}: other rows are empty than in the oracle"
        x, rough = x[~empty], rough[~empty]
        assert np.isfinite(x).all(), f"result {i} has NaN or infinity"
        size = max(1.0, float(np.abs(exact[~empty]).max(initial=0))) if are_sizes else 1.0
        error, of_dense = (float(np.abs(each - exact[~empty]).max(initial=0)) / size for each in (x, rough))
        allowed = 2.5 * of_dense + 2e-3
        assert error <= allowed, f"result {i} is off by {error:.2e}, more than {allowed:.2e}"
        if error >= figures["error"]:
            figures = {"error": error, "allowed": allowed}
    return figures


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def wide(*arrays: Array) -> list[Array]:
    return [x.astype(jnp.float32) for x in arrays]


def _operands(context: Context, lengths: str, head_size: int, group: int) -> tuple[list[Array], dict[str, Array]]:
    """q, k and v, and positions."""
    q_length, kv_length = LENGTHS[lengths][context.small]
    kv_heads = 1 if context.small else max(1, HEADS[lengths] // group)
    operands = draw(
        head_size + group, (q_length, kv_heads * group, head_size), *((kv_length, kv_heads, head_size),) * 2
    )
    return operands, {"q_positions": jnp.arange(kv_length - q_length, kv_length), "kv_positions": jnp.arange(kv_length)}


def attend(context: Context, lengths: str, head_size: int, group: int) -> Figures:
    operands, positions = _operands(context, lengths, head_size, group)
    with context.hopper():
        got = attention(*operands, **positions)
    dense = attention(*operands, **positions, implementation="reference")
    return compare(got, dense, attention(*wide(*operands), **positions, implementation="reference"))


def _gradients(implementation: str | None, operands: Sequence[Array], d_out: Array) -> list[Array]:
    out, pullback = jax.vjp(lambda *x: attention(*x, implementation=implementation)[0], *operands)
    return [out, *pullback(d_out.astype(out.dtype))]


def backward(context: Context, head_size: int, group: int) -> Figures:
    if context.small:
        raise Unsupported("gradients are not interpreted within jax.vjp")
    operands, _ = _operands(context, "ragged-2100", head_size, group)
    [d_out] = draw(1, operands[0].shape)
    got, dense = (_gradients(name, operands, d_out) for name in (None, "reference"))
    return compare(got, dense, _gradients("reference", wide(*operands), d_out), are_sizes=True)


class Pages(NamedTuple):
    """A pool with NaN in every slot that was not written, the rows that read it, and what the slots are in float32."""

    q: Array
    arguments: dict[str, Any]  # of `paged_attention`
    exact: dict[str, Any]  # the same over keys and values in float32, rounded as the pages are


def make_pages(context: Context, page_size: int, head_size: int, group: int, fp8: bool, kv_heads: int = 2) -> Pages:
    """A chunk of a prompt, decodes, a sequence of one token and padding, with shuffled pages."""
    rng = np.random.default_rng(page_size + head_size)
    lengths = np.array([70, 20, 1] if context.small else [2100, 777, 4096, 1, 333])
    chunk = 6 if context.small else 64
    kv_heads = 1 if context.small else kv_heads
    entries = -(-int(lengths.max()) // page_size)
    table = rng.permutation(len(lengths) * entries).reshape(len(lengths), entries)
    sequence = np.concatenate([np.zeros(chunk, int), np.arange(1, len(lengths)), [-1]])
    positions = np.concatenate([np.arange(lengths[0] - chunk, lengths[0]), lengths[1:] - 1, [0]])

    shape = (table.size, page_size, kv_heads, head_size)
    rows = np.concatenate([np.arange(length) for length in lengths])
    of = np.repeat(np.arange(len(lengths)), lengths)
    page, offset = table[of, rows // page_size], rows % page_size
    q, k, v = draw(3, (len(sequence), kv_heads * group, head_size), *((len(rows), kv_heads, head_size),) * 2)
    if fp8:
        nan_bits, nan_scale = jnp.full(shape, 0x7F, BITS), jnp.full((shape[0], kv_heads, page_size), jnp.nan)
        written = write_pages(nan_bits, nan_bits, k, v, page, offset, nan_scale, nan_scale)
        pools = dict(zip(("k_pages", "v_pages", "k_scale", "v_scale"), written, strict=True))
        rounded = [_dequantized(*written[i::2]) for i in range(2)]
    else:
        empty = jnp.full(shape, jnp.nan, jnp.bfloat16)
        rounded = list(write_pages(empty, empty, k, v, page, offset))
        pools = {"k_pages": rounded[0], "v_pages": rounded[1]}
    unused = np.arange(entries) * page_size >= lengths[:, None]
    tables = {
        "page_table": jnp.asarray(np.where(unused, 10**6, table), jnp.int32),
        "page_index": None,
        "kv_lengths": jnp.asarray(lengths, jnp.int32),
        "q_positions": jnp.asarray(positions, jnp.int32),
        "q_sequence": jnp.asarray(sequence, jnp.int32),
    }
    exact = dict(zip(("k_pages", "v_pages"), rounded, strict=True)) | tables
    return Pages(q, pools | tables, exact)


def _dequantized(values: Array, scale: Array) -> Array:
    """What a kernel takes keys for: rounded to bfloat16."""
    return (from_e4m3_bits(values, jnp.float32) * scale.swapaxes(1, 2)[..., None]).astype(jnp.bfloat16)


def _compare_pages(context: Context, pages: Pages, arguments: dict[str, Any]) -> Figures:
    with context.hopper():
        got = paged_attention(pages.q, **arguments)
    dense = paged_attention(pages.q, **pages.exact, implementation="reference")
    in_float32 = {name: wide(x)[0] if name.endswith("_pages") else x for name, x in pages.exact.items()}
    return compare(got, dense, paged_attention(*wide(pages.q), **in_float32, implementation="reference"))


def attend_to_pages(context: Context, page_size: int, head_size: int, group: int, fp8: bool) -> Figures:
    pages = make_pages(context, page_size, head_size, group, fp8)
    return _compare_pages(context, pages, pages.arguments)


def attend_to_far_pages(context: Context, fp8: bool) -> Figures:
    """Pages of a pool of more than 2^31 elements, past these; zeros elsewhere, where a wrapped index would read."""
    page_size, kv_heads, head_size = 64, 8, 64 if context.small else 128
    pages = make_pages(context, page_size, head_size, 4, fp8, kv_heads)
    own = pages.arguments["k_pages"]
    before = 8 if context.small else 2**31 // own[0].size + 1
    needed = 2 * before * own[0].nbytes * 1.4
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", needed)
    if memory < needed:
        raise Unsupported(f"needs {needed / 1e9:.0f} GB of memory, found {memory / 1e9:.0f}")

    @functools.partial(jax.jit, donate_argnums=0)
    def place(pool: Array, own: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(pool, own, before, 0)

    pools = {
        name: place(jnp.zeros((before + len(x), *x.shape[1:]), x.dtype), x)
        for name, x in pages.arguments.items()
        if name.endswith(("_pages", "_scale"))
    }
    return _compare_pages(context, pages, pages.arguments | pools | {"first_page": before}) | {
        "elements": pools["k_pages"].size
    }


def repeat(context: Context, kind: str) -> Figures:
    """The same call 100 times has the same bits."""
    times = 2 if context.small else 100
    if kind == "pages":
        pages = make_pages(context, 64, 128, 4, fp8=False)
        call: Callable[[], Any] = lambda: paged_attention(pages.q, **pages.arguments)  # noqa: E731
    elif kind == "backward":
        if context.small:
            raise Unsupported("gradients are not interpreted within jax.vjp")
        operands, _ = _operands(context, "ragged-2100", 128, 4)
        d_out = operands[0]
        call = lambda: _gradients(None, operands, d_out)  # noqa: E731
    else:
        operands, positions = _operands(context, "prefill-4k" if kind == "prefill" else kind, 128, 4)
        call = lambda: attention(*operands, **positions)  # noqa: E731

    def bits(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)

    with context.hopper():
        first = jax.tree.map(bits, call())
        same = [jnp.array_equal(bits(x), y) for _ in range(times) for x, y in zip(call(), first, strict=True)]
        different = int(len(same) - jnp.stack(same).sum())
    assert not different, f"{different} of {len(same)} results differ in a bit from the first"
    return {"repeats": times}


def merge(context: Context, head_size: int) -> Figures:
    """The kernel that merges pieces: few rows, of 0 to 132 pieces, and many of 0 to 12. Some saw nothing."""
    if not context.small and not Device.target().is_hopper:
        raise Unsupported("needs a GPU of the Hopper generation")
    counts = [[0, 1, 5]] if context.small else [list(range(133)), list(range(13)) * 60]
    figures = [_merge(context, head_size, np.array(numbers)) for numbers in counts]
    return max(figures, key=lambda found: found["error"])


def _merge(context: Context, head_size: int, numbers: np.ndarray) -> Figures:
    block_q, rng, tokens = 16, np.random.default_rng(head_size), len(numbers)
    first, total = np.cumsum([0, *numbers])[:-1], int(numbers.sum())
    out, lse = np.full((total + 1, block_q, head_size), np.nan), np.full((total + 1, block_q), np.nan)
    out[:-1], lse[:-1] = rng.standard_normal(out[:-1].shape), 30 * rng.standard_normal(lse[:-1].shape)
    empty = np.r_[rng.random(lse[:-1].shape) < 0.2, np.zeros((1, block_q), bool)]
    out[empty], lse[empty] = 0, -np.inf
    rows = rng.integers(0, block_q, tokens)

    exact, exact_lse = np.zeros((tokens, 1, head_size)), np.full((tokens, 1), -np.inf)
    for token, (start, number, row) in enumerate(zip(first, numbers, rows, strict=True)):
        own = slice(start, start + number)
        if (peak := lse[own, row].max(initial=-np.inf)) > -np.inf:
            weights = np.exp(lse[own, row] - peak)
            exact[token, 0] = weights @ out[own, row] / weights.sum()
            exact_lse[token, 0] = peak + np.log(weights.sum())
    tables = np.stack([first, numbers], 1), (np.arange(tokens) * block_q + rows)[:, None]
    arrays = [jnp.asarray(x, jnp.float32) for x in (out, lse)] + [jnp.asarray(x, jnp.int32) for x in tables]
    with context.hopper():
        got = merge_pieces(*arrays, 1, jnp.dtype(jnp.float32))
    want = [jnp.asarray(x, jnp.float32) for x in (exact, exact_lse)]
    return compare(got, want, want)
