"""Training steps of one Llama, ours and the package `ringattention`'s: `python -m benchmarks.finetune --peer PYTHON`.

One sequence over 8 CPU devices, float32, Adam: 4 layers, 4 heads of 64, feed-forward of 1024, 4096 token ids. Both have
the same first weights and the same tokens, compute layers again for the gradient, and feed-forward and logits by chunks
of 512 tokens; their losses are printed beside each other. Ours: `longctx.nnx.to_nnx`, zigzag. The peer's: contiguous
shards, `benchmarks/ringattention_peer.py`; it has no grouped heads, so here neither has.

Steps take turns, and times are medians over the rounds. Memory is what the compiler says that a step takes beside
parameters and optimizer, of each device. From two lengths follow the bytes of a token, from these the longest sequence
within `--budget`, and that one is compiled too. `--peer` is made as `benchmarks.context_parallel` says; without it, its
rows are left out.
"""

import argparse
import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.context_parallel import Peer, print_header, print_row
from benchmarks.timing import matmul_gflops, measure
from longctx.models import Llama, LlamaConfig
from longctx.nnx import to_nnx
from longctx.parallel import make_mesh

RANKS, CHUNK, LEARNING_RATE = 8, 512, 1e-3
CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_positions=2**31 - 1,
)


class Ours:
    """Training of the model on some devices."""

    def __init__(self, params: dict, devices: int, fsdp: bool) -> None:
        mesh = make_mesh(context=devices)
        params = jax.tree.map(jnp.asarray, params)
        self.module = to_nnx(Llama(CONFIG), params, mesh, remat=True, chunk_size=CHUNK, fsdp=fsdp)
        self.optimizer = nnx.Optimizer(self.module, optax.adam(LEARNING_RATE), wrt=nnx.Param)

        @nnx.jit(donate_argnums=(0, 1))
        def step(module: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
            def loss(module: nnx.Module) -> jax.Array:
                total, count = module.loss(tokens)
                return total / count

            value, gradient = nnx.value_and_grad(loss)(module)
            optimizer.update(module, gradient)
            return value

        self.compiled = step

    def step(self, tokens: int) -> float:
        return float(self.compiled(self.module, self.optimizer, token_ids(tokens)))

    def temp_bytes(self, tokens: int) -> int:
        abstract = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        compiled = self.compiled.lower(self.module, self.optimizer, abstract).compile()
        return compiled.memory_analysis().temp_size_in_bytes


def token_ids(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, tokens, np.int32)


def gflop_of_step(tokens: int) -> float:
    """Products of a step: matrices forward, again, and twice backward; attention forward and 2.5 times backward."""
    weights = CONFIG.num_layers * 4 * CONFIG.hidden_size**2 + CONFIG.vocab_size * CONFIG.hidden_size
    weights += CONFIG.num_layers * 3 * CONFIG.hidden_size * CONFIG.intermediate_size
    scores = CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim * tokens * (tokens + 1) / 2
    return (4 * 2 * tokens * weights + 3.5 * 4 * scores) / 1e9


def longest(temp_bytes: Callable[[int], int], budget: int, lengths: tuple[int, int]) -> tuple[float, int, int]:
    """(bytes of a device for each token of the sequence, longest sequence within the budget, bytes of that one)."""
    short, long = map(temp_bytes, lengths)
    slope = (long - short) / (lengths[1] - lengths[0])
    step = RANKS * CHUNK
    tokens = int(lengths[1] + (budget - long) / slope) // step * step
    while (found := temp_bytes(tokens)) > budget:
        tokens -= step
    return slope, tokens, found


def main() -> None:
    jax.config.update("jax_num_cpu_devices", RANKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="multiples of 4096")
    parser.add_argument("--budget", type=int, default=1024, help="MiB of a device, for the longest sequence")
    parser.add_argument("--peer", help="the Python of an environment with ringattention")
    args = parser.parse_args()
    if any(tokens < 1 or tokens % (RANKS * CHUNK) for tokens in args.tokens):
        parser.error(f"--tokens must be positive multiples of {RANKS * CHUNK}, got {args.tokens}")

    params = jax.tree.map(np.asarray, Llama(CONFIG).init(jax.random.key(0)))
    peer = None
    if args.peer is not None:
        file = Path(tempfile.mkdtemp()) / "weights.npz"
        np.savez(
            file,
            **{
                jax.tree_util.keystr(path, simple=True, separator="/"): x
                for path, x in jax.tree.leaves_with_path(params)
            },
        )
        peer = Peer(args.peer, "training", file, CHUNK)
    against = "" if peer is None else f"; peer: {peer.versions}"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, jax {jax.__version__}{against}")
    print(f"Bound: {matmul_gflops():.0f} GFLOP/s (float32 matrix product of 2048). Medians of {args.rounds} rounds.\n")

    print_header("tokens", "devices", "training", "s a step", "tokens/s", "GFLOP/s", "loss of the first step")
    for tokens in args.tokens:
        contenders: dict = {}
        for devices in (1, RANKS):
            ours = Ours(params, devices, fsdp=False)
            contenders[devices, "longctx"] = lambda ours=ours, tokens=tokens: ours.step(tokens)
            if peer is not None:
                line = f"step {devices} {tokens}"
                contenders[devices, "ringattention"] = lambda line=line: float(peer.ask(line))
        losses = {name: run() for name, run in contenders.items()}
        seconds = measure(contenders, args.rounds)
        for (devices, name), took in seconds.items():
            rates = (f"{took:.2f}", f"{tokens / took:,.0f}", f"{gflop_of_step(tokens) / took:.1f}")
            print_row(f"{tokens:,}", devices, name, *rates, f"{losses[devices, name]:.5f}")

    print(f"\n**Longest sequence** within {args.budget:,} MiB of each of {RANKS} devices, temporary.\n")
    print_header("training", "bytes of a device for each token", "longest sequence", "MiB")
    programs: dict[str, Callable[[int], int]] = {
        "longctx": Ours(params, RANKS, fsdp=False).temp_bytes,
        "longctx, parameters sharded": Ours(params, RANKS, fsdp=True).temp_bytes,
    }
    if peer is not None:
        programs["ringattention"] = lambda tokens: int(peer.ask(f"bytes {RANKS} {tokens}"))
    for name, temp_bytes in programs.items():
        slope, tokens, found = longest(temp_bytes, args.budget * 2**20, (32768, 65536))
        print_row(name, f"{slope:,.0f}", f"{tokens:,}", f"{found / 2**20:,.0f}")


if __name__ == "__main__":
    main()
