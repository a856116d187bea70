"""Attention on this CPU against torch's and JAX's own, in one run: `python -m benchmarks.attention`.

T = S = 4096, N = 8, K = 2, H = 64, causal: 17.2 GFLOP forward (the causal half of 4 T S N H) and 2.5 times that
more backward. The bound is the machine's own matrix product, measured beside them. Medians over the rounds.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.timing import matmul_gflops, measure
from longctx.kernels import attention

LENGTH, HEADS, KV_HEADS, HEAD_SIZE = 4096, 8, 2, 64
FORWARD_FLOPS = 2 * LENGTH * LENGTH * HEADS * HEAD_SIZE
FLOPS = {"forward": FORWARD_FLOPS, "forward+backward": 3.5 * FORWARD_FLOPS}


def jax_contender(compute: Callable[..., jax.Array], arrays: list[np.ndarray], dtype: str, backward: bool):  # type: ignore[no-untyped-def]
    q, k, v, d_out = (jnp.asarray(x, dtype) for x in arrays)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        if not backward:
            return compute(q, k, v)
        out, pullback = jax.vjp(compute, q, k, v)
        return out, pullback(d_out)

    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(q, k, v))


def torch_contender(arrays: list[np.ndarray], dtype: str, backward: bool) -> Callable[[], object]:
    q, k, v, d_out = (torch.tensor(x).transpose(1, 2).to(getattr(torch, dtype)).contiguous() for x in arrays)
    for x in (q, k, v):
        x.requires_grad_(backward)

    def run() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), d_out) if backward else out

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    shapes = [(1, LENGTH, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]

    print(f"bound: {matmul_gflops(rounds):.0f} GFLOP/s (float32 matrix product of 2048)\n")
    print("| dtype | pass | implementation | ms | GFLOP/s | torch's time / ours |")
    print("|---|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for name, flops in FLOPS.items():
            backward = name != "forward"
            contenders = {
                "torch": torch_contender(arrays, dtype, backward),
                "longctx xla": jax_contender(lambda q, k, v: attention(q, k, v)[0], arrays, dtype, backward),
                "jax.nn": jax_contender(
                    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
                    arrays,
                    dtype,
                    backward,
                ),
            }
            seconds = measure(contenders, rounds)
            for contender, took in seconds.items():
                ratio = seconds["torch"] / took
                print(f"| {dtype} | {name} | {contender} | {took * 1e3:.0f} | {flops / took / 1e9:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
