"""Paged attention on this CPU, beside contiguous keys and gathered pages: `python -m benchmarks.paged_attention`.

N = 8, K = 2, H = 64. `contiguous` is `attention` to the same keys without pages, a batch entry a sequence (of several
lengths, a call each); `FP8` has pages of e4m3 with scales; `gather` copies the pages of each sequence together and
attends densely, every score in memory.
The bounds are the machine's own matrix product and its own reading of memory, measured beside them. Medians of rounds.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import matmul_gflops, measure, read_gbytes
from longctx.kernels import attention, paged_attention
from longctx.kernels.bits import from_bits, to_bits
from longctx.kernels.fp8_rows import pack_rows, split_packed

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64


class Work(NamedTuple):
    """Sequences with the same context length and rows each."""

    sequences: int
    context: int
    rows: int

    def pairs(self) -> float:
        """Of a query and a key that it sees."""
        return self.sequences * self.rows * (self.context - (self.rows - 1) / 2)

    def keys(self) -> int:
        return self.sequences * self.context


BATCHES = {
    "256 rows at 8k": [Work(1, 8192, 256)],
    "256 rows at 32k": [Work(1, 32768, 256)],
    "16 decodes at 2k": [Work(16, 2048, 1)],
    "256 rows at 8k and 16 decodes at 2k": [Work(1, 8192, 256), Work(16, 2048, 1)],
}


def paged_contenders(batch: list[Work], page_size: int, dtype: str) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    contexts = [work.context for work in batch for _ in range(work.sequences)]
    rows = [work.rows for work in batch for _ in range(work.sequences)]
    entries = [context // page_size for context in contexts]
    pages = rng.permutation(sum(entries))
    table = np.zeros((len(contexts), max(entries)), np.int32)
    for row, part in zip(table, np.split(pages, np.cumsum(entries)[:-1]), strict=True):
        row[: len(part)] = part
    positions = np.concatenate([c - r + np.arange(r) for c, r in zip(contexts, rows, strict=True)])
    shape = (len(pages), page_size, KV_HEADS, HEAD_SIZE)
    k_pages, v_pages = (to_bits(jnp.asarray(rng.standard_normal(shape, np.float32), dtype)) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((len(positions), HEADS, HEAD_SIZE), np.float32), dtype)
    arrays = (q, k_pages, v_pages, jnp.asarray(table))
    fp8 = [split_packed(pack_rows(from_bits(x, dtype))) for x in (k_pages, v_pages)]
    scales = {f"{name}_scale": jnp.swapaxes(scale, 1, 2) for name, (_, scale) in zip("kv", fp8, strict=True)}
    metadata = tuple(map(jnp.asarray, (contexts, positions, np.repeat(np.arange(len(rows)), rows))))
    paged = jax.jit(lambda q, k, v, table, *x, **scales: paged_attention(q, k, v, table, None, *x, **scales))

    def gather(q, k_pages, v_pages, table):  # type: ignore[no-untyped-def]
        outs, row, sequence = [], 0, 0
        for work in batch:
            mine = table[sequence : sequence + work.sequences, : work.context // page_size]
            k, v = (
                from_bits(x[mine], q.dtype).reshape(work.sequences, work.context, KV_HEADS, HEAD_SIZE)
                for x in (k_pages, v_pages)
            )
            stop = row + work.sequences * work.rows
            rows = q[row:stop].reshape(work.sequences, work.rows, HEADS, HEAD_SIZE)
            at = jnp.arange(work.context - work.rows, work.context)
            outs.append(attention(rows, k, v, q_positions=at, implementation="reference")[0])
            row, sequence = stop, sequence + work.sequences
        return outs

    gathered = jax.jit(gather)
    return {
        f"pages of {page_size}": lambda: jax.block_until_ready(paged(*arrays, *metadata)),
        f"pages of {page_size}, FP8": lambda: jax.block_until_ready(
            paged(q, fp8[0][0], fp8[1][0], arrays[3], *metadata, **scales)
        ),
        f"gather, pages of {page_size}": lambda: jax.block_until_ready(gathered(*arrays)),
    }


def contiguous_contender(batch: list[Work], dtype: str) -> Callable[[], object]:
    rng = np.random.default_rng(0)

    def array(work: Work, length: int, heads: int) -> jax.Array:
        shape = (work.sequences, length, heads, HEAD_SIZE)
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    calls = [
        (
            array(work, work.rows, HEADS),
            array(work, work.context, KV_HEADS),
            array(work, work.context, KV_HEADS),
            jnp.arange(work.context - work.rows, work.context),
        )
        for work in batch
    ]
    compiled = jax.jit(lambda calls: [attention(q, k, v, q_positions=positions)[0] for q, k, v, positions in calls])
    return lambda: jax.block_until_ready(compiled(calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    gflops, gbytes = matmul_gflops(arguments.rounds), read_gbytes(2**26, arguments.rounds)
    print(f"bounds: {gflops:.0f} GFLOP/s (float32 matrix product of 2048), {gbytes:.1f} GB/s read\n")
    print("| dtype | rows | implementation | ms | bound, ms | contiguous's time / this |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for name, batch in BATCHES.items():
            flops = sum(4 * work.pairs() * HEADS * HEAD_SIZE for work in batch)
            read = sum(2 * work.keys() * KV_HEADS * HEAD_SIZE for work in batch) * jnp.dtype(dtype).itemsize
            bound = max(flops / gflops, read / gbytes) / 1e9
            contenders = {"contiguous": contiguous_contender(batch, dtype)}
            for page_size in (16, 64, 256):
                contenders |= paged_contenders(batch, page_size, dtype)
            seconds = measure(contenders, arguments.rounds)
            for contender, took in seconds.items():
                ratio = seconds["contiguous"] / took
                print(
                    f"| {dtype} | {name} | {contender} | {took * 1e3:.1f} | {bound * 1e3:.1f} | {ratio:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
