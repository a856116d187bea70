r"""Context parallelism on 8 CPU devices, in one run: `python -m benchmarks.context_parallel --peer .peer/bin/python`.

4 heads of 64, float32, causal; operands are sharded beforehand, and one compiled call of attention is timed.
The devices share this machine's cores, so the ideal is the best single program: the better of one device and a ring of
2. FLOP are those of the scores that the mask leaves, 4 H each, or of the full square where a column says so; backward
counts 2.5 times forward. The contenders of a pass, a miss rate or a batch take turns, in the order of rows (miss rates:
of columns), and times are medians over the rounds. In decode a sequence's own key is the last of its cached ones.

`--peer` is the Python of an environment with the package `ringattention`, which needs an old JAX; without it, its rows
are left out. It runs in a process of its own (`ringattention_peer.py`), which takes turns with the rest. To make one:

    python3.11 -m venv .peer
    .peer/bin/pip install ringattention==0.1.2 jax==0.4.35 jaxlib==0.4.35 flax==0.10.2 optax==0.2.4 \
        orbax-checkpoint==0.10.3 chex==0.1.88
"""

import argparse
import datetime
import functools
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import matmul_gflops, measure
from longctx import parallel
from longctx.kernels import attention

HEADS, HEAD_SIZE, RANKS = 4, 64, 8
RINGS = {"pass-KV": parallel.ring_pass_kv, "pass-Q": parallel.ring_pass_q, "all-gather": parallel.all_gather_kv}
MISS_PERCENTS = (1, 2.5, 5, 10, 25, 50, 100)
BATCHES, CACHED = (1, 3, 8, 13), 2048
DECODE_STEPS = 20  # timed together, being short
DEALT, WHOLE = P("context"), P()  # over the ranks, or the same on all

Exchange = Callable[..., tuple[jax.Array, jax.Array]]
Run = Callable[[], object]


class Peer:
    """`ringattention_peer.py` in another environment, which answers each line on its input with one on its output."""

    def __init__(self, python: str, *arguments: object) -> None:
        command = [python, str(Path(__file__).with_name("ringattention_peer.py")), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._answer()

    def contender(self, name: str, devices: int) -> Run:
        return lambda: self.ask(f"{name} {devices}")

    def ask(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with exit status {self.process.wait()}")
        return line.strip()


def contender(
    exchange: Exchange,
    ranks: int,
    operands: Sequence[jax.Array | np.ndarray],
    q_spec: P = DEALT,
    kv_spec: P = DEALT,
    backward: bool = False,
) -> Run:
    """One compiled call on (q, k, v, q_positions, kv_positions) and, if given, (q_segment_ids, kv_segment_ids)."""
    mesh = parallel.make_mesh(context=ranks)
    specs = (q_spec, kv_spec, kv_spec, q_spec, kv_spec, q_spec, kv_spec)[: len(operands)]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=q_spec)
    def local_attention(*local: jax.Array) -> jax.Array:
        return exchange(*local)[0]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, *tokens: jax.Array) -> object:
        out, pullback = jax.vjp(lambda q, k, v: local_attention(q, k, v, *tokens), q, k, v)
        return out, pullback(q)  # any cotangent will do

    compiled = jax.jit(both if backward else local_attention)
    return lambda: jax.block_until_ready(compiled(*placed))


def random_qkv(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*shape, HEADS, HEAD_SIZE), np.float32) for _ in range(3)]


def print_row(*cells: object) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def print_header(*names: str) -> None:
    print_row(*names)
    print_row(*["---"] * len(names))


def full_prefill(tokens: int, rounds: int, peer: Peer | None) -> None:
    operands = *random_qkv(tokens), np.arange(tokens)
    entries: list[tuple[int, str, str, Exchange]] = [
        (1, "attention", "contiguous", attention),
        (2, "pass-KV", "zigzag", parallel.ring_pass_kv),
        *((RANKS, "pass-KV", layout, parallel.ring_pass_kv) for layout in ("zigzag", "striped", "contiguous")),
        (RANKS, "pass-Q", "zigzag", parallel.ring_pass_q),
        (RANKS, "all-gather", "zigzag", parallel.all_gather_kv),
        (RANKS, "KVP", "zigzag", parallel.kvp_attention),
    ]
    columns = ("pass", "devices", "exchange", "layout", "ms", "GFLOP/s", "of the full square", "ideal / t")
    print_header(*columns, "ringattention's t / t")
    for name, factor in (("forward", 1), ("forward+backward", 3.5)):
        contenders = {}
        for ranks, label, layout, exchange in entries:
            q, k, v, positions = (parallel.shard_sequence(x, ranks, layout, axis=0) for x in operands)
            q, q_positions, q_spec = (q, positions, DEALT) if label != "KVP" else (operands[0], operands[3], WHOLE)
            contenders[ranks, label, layout] = contender(
                exchange, ranks, (q, k, v, q_positions, positions), q_spec, backward=name != "forward"
            )
        if peer is not None:
            for ranks in (1, RANKS):
                contenders[ranks, "ringattention", "contiguous"] = peer.contender(name, ranks)
        seconds = measure(contenders, rounds)
        ideal = min(seconds[1, "attention", "contiguous"], seconds[2, "pass-KV", "zigzag"])
        for (ranks, label, layout), took in seconds.items():
            rate = factor * 2 * tokens**2 * HEADS * HEAD_SIZE / took / 1e9
            peer_took = seconds.get((ranks, "ringattention", "contiguous"))
            ratio = "" if peer_took is None else f"{peer_took / took:.2f}"
            rates = (f"{took * 1e3:.0f}", f"{rate:.0f}", f"{2 * rate:.0f}", f"{ideal / took:.2f}")
            print_row(name, ranks, label, layout, *rates, ratio)


def partial_prefill(tokens: int, rounds: int) -> None:
    labels = ("one device", *RINGS, "KVP")
    print_header("miss rate", "new", "cached", "keys in a message", "queries in a message", "GFLOP", *labels)
    (q, k, v), positions = random_qkv(tokens), np.arange(tokens)
    for percent in MISS_PERCENTS:
        new = max(1, round(tokens * percent / 100))
        plan = parallel.plan_varseq([new], [tokens - new], RANKS, "zigzag")
        q_rows, kv_rows = plan.q_indices.ravel(), plan.kv_indices.ravel()  # of k and v, the cached tokens come first
        masks = [getattr(plan, f"{x}_{y}").ravel() for y in ("positions", "segment_ids") for x in ("q", "kv")]
        new_q, new_positions, new_segments = q[-new:], positions[-new:], np.zeros(new, int)
        shards = (new_q[q_rows], k[kv_rows], v[kv_rows], *masks)
        everywhere = (new_q, *shards[1:3], new_positions, masks[1], new_segments, masks[3])
        runs = (
            contender(attention, 1, (new_q, k, v, new_positions, positions)),
            *(contender(ring, RANKS, shards) for ring in RINGS.values()),
            contender(parallel.kvp_attention, RANKS, everywhere, WHOLE),
        )
        seconds = measure(dict(zip(labels, runs, strict=True)), rounds)
        messages = (f"{x.size // RANKS:,} ({np.mean(x < 0):.1%} padding)" for x in (kv_rows, q_rows))
        gflop = 4 * int(plan.scores.sum()) * HEADS * HEAD_SIZE / 1e9
        times = (f"{took * 1e3:.1f}" for took in seconds.values())
        print_row(f"{percent} %", f"{new:,}", f"{tokens - new:,}", *messages, f"{gflop:.1f}", *times)


def packed(q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Operands of a decode step: each row the last token of the sequence that it names (-1: none), its key cached."""
    plan = parallel.plan_varseq([CACHED] * len(q), None, RANKS)
    k, v = (x.reshape(-1, HEADS, HEAD_SIZE)[plan.kv_indices.ravel()] for x in (k, v))
    positions = np.full(rows.size, CACHED - 1)
    return q[rows, -1], k, v, positions, plan.kv_positions.ravel(), rows, plan.kv_segment_ids.ravel()


def decode(rounds: int) -> None:
    def repeat(run: Run) -> Run:
        return lambda: [run() for _ in range(DECODE_STEPS)]

    print_header("sequences", "exchange", "rows computed", "ms", "tokens/s")
    for batch in BATCHES:
        qkv = random_qkv(batch, CACHED)
        rows = parallel.plan_decode(batch, 0, RANKS).ravel()
        shards, padded, everywhere = (packed(*qkv, x) for x in (rows, np.maximum(rows, 0), np.arange(batch)))
        # Being equally long, the sequences are a batch as well.
        positions = np.broadcast_to(np.arange(CACHED), (batch, CACHED))
        batched = (qkv[0][:, -1:], *qkv[1:], positions[:, -1:], positions)
        kvp = functools.partial(parallel.kvp_attention, merge="gather")
        pass_q = functools.partial(parallel.ring_pass_q, decode=True)
        contenders = {
            ("one device, batch", batch): contender(attention, 1, batched),
            ("pass-Q, packed", batch): contender(pass_q, RANKS, shards),
            ("pass-Q, packed, padding computed", rows.size): contender(pass_q, RANKS, padded),
            ("KVP, batch", batch): contender(kvp, RANKS, batched, WHOLE, P(None, "context")),
            ("KVP, packed", batch): contender(kvp, RANKS, everywhere, WHOLE),
        }
        seconds = measure({name: repeat(run) for name, run in contenders.items()}, rounds)
        for (label, num_rows), took in seconds.items():
            step = took / DECODE_STEPS
            print_row(batch, label, num_rows, f"{step * 1e3:.2f}", f"{batch / step:.0f}")


def main() -> None:
    jax.config.update("jax_num_cpu_devices", RANKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384, help="a multiple of 8")
    parser.add_argument("--peer", help="the Python of an environment with ringattention")
    args = parser.parse_args()
    if args.tokens < RANKS or args.tokens % RANKS:
        parser.error(f"--tokens must be a positive multiple of {RANKS}, got {args.tokens}")
    peer = None if args.peer is None else Peer(args.peer, "attention", args.tokens)

    against = "" if peer is None else f"; peer: {peer.versions}"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, jax {jax.__version__}{against}")
    print(f"Bound: {matmul_gflops():.0f} GFLOP/s (float32 matrix product of 2048). Medians of {args.rounds} rounds.\n")
    print(f"**Full prefill** of {args.tokens:,} tokens.\n")
    full_prefill(args.tokens, args.rounds, peer)
    print(f"\n**Partial prefill**, forward, {RANKS} devices: new and cached tokens make {args.tokens:,}; ms.\n")
    partial_prefill(args.tokens, args.rounds)
    print(f"\n**Decode**, {RANKS} devices: a step of sequences with {CACHED:,} cached tokens each.\n")
    decode(args.rounds)


if __name__ == "__main__":
    main()
