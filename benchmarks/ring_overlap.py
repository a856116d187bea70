"""A ring with each choice of `longctx.xla_flags(overlap=)`: `python -m benchmarks.ring_overlap`.

For each choice, in a process of its own as XLA reads its flags once, and for each number of devices: one layer of
`ring_pass_kv`, its attention without hops, and its hops without attention. The devices are the first of this machine's;
`--cpu` takes virtual ones, to rehearse with few tokens. `--model` predicts the same for H100s with NVLink, on any
machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernel_plan import MULTIPROCESSORS
from longctx.gpu_flags import OVERLAPS, reserved_multiprocessors, xla_flags
from longctx.parallel.device_tables import LINKS

# NCCL's channels for all collectives, not for hops alone: some versions of XLA count permutes among the former.
_ALL_CHANNELS = "--xla_gpu_nccl_collective_max_nchannels=4"
CHOICES = {
    "none": xla_flags(overlap=None),
    "multiprocessors": xla_flags(overlap="multiprocessors"),
    "multiprocessors, all collectives": f"{xla_flags(overlap='multiprocessors')} {_ALL_CHANNELS}",
    "copy_engines": xla_flags(overlap="copy_engines"),
}
HEADS = {"llama3-8b": (32, 8), "llama3-70b": (64, 8)}
HEAD_SIZE, TOKENS = 128, 131_072
# Predicted, not measured (docs/results/kernels_h100.md): FLOP/s of the kernel at 128k on all multiprocessors.
ATTENTION_FLOPS = 695e12
# Assumed: bytes/s that a thread block of NCCL moves over NVLink.
CHANNEL_BYTES = 20e9


def predict(model: str, ranks: int, overlap: str | None, tokens: int = TOKENS) -> dict[str, Any]:
    """Predicted seconds of a layer of ring pass-KV of H100s in zigzag: attention, its hops, and the ring.

    A hop waits for the kernel, or the kernel for the hop, where NCCL finds no free multiprocessor. Where it does, or
    where copy engines move keys, the longer hides the shorter. Memory's bandwidth, which both use, is not counted.
    """
    heads, kv_heads = HEADS[model]
    (channels,) = OVERLAPS["multiprocessors"].values()
    reserved = int(channels) if overlap == "multiprocessors" and ranks > 1 else 0
    flops = 4 * HEAD_SIZE * heads * tokens * (tokens + 1) / 2 / ranks**2
    step = flops / ATTENTION_FLOPS * MULTIPROCESSORS / (MULTIPROCESSORS - reserved)
    link = LINKS["nvlink-h100"]
    rate = link.bandwidth * link.share
    rate = min(rate, reserved * CHANNEL_BYTES) if reserved else rate
    hop = link.latency + tokens / ranks * 2 * kv_heads * HEAD_SIZE * 2 / rate
    exposed = hop if overlap is None else max(0.0, hop - step)
    times = {"attention": ranks * step, "hops": (ranks - 1) * hop, "ring": ranks * step + (ranks - 1) * exposed}
    return {"model": model, "ranks": ranks, "choice": overlap or "none"} | times


def prediction_table() -> str:
    """Predictions at 128k tokens as markdown, in ms."""
    lines = ["| model | GPUs | a hop, ms | none | multiprocessors | copy_engines |", "|---|---|---|---|---|---|"]
    for model in HEADS:
        for ranks in (1, 2, 4, 8):
            rows = [predict(model, ranks, overlap) for overlap in (None, "multiprocessors", "copy_engines")]
            hops = [f"{1e3 * row['hops'] / max(1, ranks - 1):.2f}" for row in rows[:2]]
            hop = f"{hops[0]}; {hops[1]}" if ranks > 1 else "-"
            lines.append(f"| {model} | {ranks} | {hop} | " + " | ".join(f"{1e3 * r['ring']:.2f}" for r in rows) + " |")
    return "\n".join(lines)


def contenders(ranks: int, tokens: int, heads: int, kv_heads: int, head_size: int) -> dict[str, Callable[[], object]]:
    """Calls of one layer on the first `ranks` devices: "ring", "attention" of the same blocks, and "hops" alone."""
    import jax
    import jax.numpy as jnp
    from jax import Array
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from longctx.kernels import attention
    from longctx.parallel import make_mesh, ring_pass_kv, shard_positions
    from longctx.parallel.ring import ring_shift, ring_source

    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    mesh, spec = make_mesh(context=ranks), P("context")
    there = NamedSharding(mesh, spec)
    positions, _ = shard_positions(tokens, ranks)

    def random(seed: int, num_heads: int) -> Array:
        make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=there)
        return make(jax.random.key(seed), (tokens, num_heads, head_size), dtype)

    q, k, v = (random(seed, n) for seed, n in enumerate((heads, kv_heads, kv_heads)))
    arguments = q, k, v, jax.device_put(positions, there)

    def ring(q: Array, k: Array, v: Array, positions: Array) -> Array:
        return ring_pass_kv(q, k, v, positions, positions)[0]

    def attention_alone(q: Array, k: Array, v: Array, positions: Array) -> Array:
        everywhere = jax.lax.all_gather(positions, "context")
        total = jnp.zeros_like(q)
        for hop in range(ranks):
            out, _ = attention(q, k, v, q_positions=positions, kv_positions=everywhere[ring_source("context", hop)])
            total, q = jax.lax.optimization_barrier((total + out, q))
        return total

    def hops_alone(q: Array, k: Array, v: Array, positions: Array) -> Array:
        block = jnp.stack([k, v])
        for _ in range(ranks - 1):
            (block,) = ring_shift("context", block)
        return block[0]

    def run(function: Callable[..., Array]) -> Callable[[], object]:
        compiled = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec))
        return lambda: jax.block_until_ready(compiled(*arguments))

    return {"ring": run(ring), "attention": run(attention_alone), "hops": run(hops_alone)}


def measure_here(choice: str, ranks: Sequence[int], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one choice, whose flags this process was started with, for each number of devices."""
    import jax

    from benchmarks.timing import measure

    for number in ranks:
        row: dict[str, Any] = {"choice": choice, "ranks": number, "tokens": arguments.tokens}
        if number > jax.device_count():
            yield row | {"reason": f"there are {jax.device_count()} devices"}
            continue
        sizes = arguments.tokens, arguments.heads, arguments.kv_heads, arguments.head_size
        row |= {"device": jax.devices()[0].device_kind, "reserved_multiprocessors": reserved_multiprocessors()}
        try:
            yield row | measure(contenders(number, *sizes), arguments.rounds)
        except Exception as error:  # the next number of devices may do
            yield row | {"reason": f"{type(error).__name__}: {error}"}


def measure_choices(
    ranks: Sequence[int],
    tokens: int = TOKENS,
    heads: int = 32,
    kv_heads: int = 8,
    head_size: int = HEAD_SIZE,
    rounds: int = 5,
    choices: Sequence[str] = tuple(CHOICES),
    cpu: bool = False,
    timeout: float = 120.0,
) -> Iterator[dict[str, Any]]:
    """Rows of each choice and number of devices, as they come: seconds of "ring", "attention" and "hops", or a reason.

    A choice that hangs is ended after `timeout` seconds, and its row says so; the next ones are measured nevertheless.
    """
    sizes = {"tokens": tokens, "heads": heads, "kv-heads": kv_heads, "head-size": head_size, "rounds": rounds}
    options = [f"--{name}={value}" for name, value in sizes.items()] + ["--cpu"] * cpu
    for choice in choices:
        own = {"XLA_FLAGS": f"{CHOICES[choice]} {os.environ.get('XLA_FLAGS', '')}".strip()}
        command = [sys.executable, "-m", "benchmarks.ring_overlap", "--child", choice, *options, "--ranks"]
        for number in ranks:
            row = {"choice": choice, "ranks": number, "tokens": tokens}
            try:
                result = subprocess.run(
                    [*command, str(number)], env=os.environ | own, capture_output=True, text=True, timeout=timeout
                )
            except subprocess.TimeoutExpired:
                yield row | {"reason": f"it took more than {timeout:g} s"}
                continue
            if result.returncode:
                yield row | {"reason": (result.stderr.strip().splitlines() or ["it failed"])[-1]}
            else:
                yield json.loads(result.stdout.splitlines()[-1])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown; of the hops, the part that attention hides."""
    lines = ["| choice | devices | ring, ms | attention, ms | hops, ms | of hops hidden |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "reason" in row:
            lines.append(f"| {row['choice']} | {row['ranks']} | {row['reason']} | | | |")
            continue
        ring, attention, hops = (row[name] for name in ("ring", "attention", "hops"))
        hidden = "-" if row["ranks"] == 1 else f"{max(0.0, min(1.0, (attention + hops - ring) / hops)):.0%}"
        cells = (row["choice"], row["ranks"], *(f"{1e3 * x:.2f}" for x in (ring, attention, hops)), hidden)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="print predictions; needs no GPU")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="numbers of devices")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=HEAD_SIZE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices, to rehearse")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows, written as they come")
    parser.add_argument("--child", choices=list(CHOICES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.model:
        print(prediction_table())
        return 0
    if wrong := [n for n in arguments.ranks if n < 1 or arguments.tokens % (2 * n)]:
        parser.error(f"--tokens must be a multiple of twice each of --ranks, got {arguments.tokens} for {wrong[0]}")
    if arguments.child:
        if arguments.cpu:
            from longctx.parallel import cpu_devices

            cpu_devices(max(arguments.ranks))
        for row in measure_here(arguments.child, arguments.ranks, arguments):
            print(json.dumps(row), flush=True)
        return 0
    sizes = arguments.tokens, arguments.heads, arguments.kv_heads, arguments.head_size, arguments.rounds
    rows = []
    for row in measure_choices(arguments.ranks, *sizes, cpu=arguments.cpu):
        rows.append(row)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
