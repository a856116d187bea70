"""Context parallelism on 8 CPU devices, in one run: `python -m benchmarks.context_parallel --peer /tmp/ra/bin/python`.

4 heads of 64, float32, causal; operands are dealt and in place beforehand, and one compiled call of attention is timed.
The devices share this machine's cores, so the ideal is the best single program: the better of one device and a ring of
2. FLOP are those of the scores that the mask leaves, 4 H each, or of the full square where a column says so; the
backward pass counts 2.5 times the forward one. Contenders of a table take turns, in the order of its rows (or columns),
and the times are medians over the rounds.

`--peer` is the Python of an environment with the package `ringattention`, which needs an old JAX; without it, its rows
are left out. Its process takes turns with the rest and idles in between. To make one:

    python3.11 -m venv /tmp/ra
    /tmp/ra/bin/pip install ringattention==0.1.2 jax==0.4.35 jaxlib==0.4.35 flax==0.10.2 optax==0.2.4 \\
        orbax-checkpoint==0.10.3 chex==0.1.88
"""

import argparse
import datetime
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.timing import matmul_gflops, measure
from longctx.kernels import attention
from longctx.parallel import (
    all_gather_kv,
    kvp_attention,
    make_mesh,
    plan_decode,
    plan_varseq,
    ring_pass_kv,
    ring_pass_q,
    shard_sequence,
)

HEADS, HEAD_SIZE, RANKS = 4, 64, 8
MISS_PERCENTS = (1, 2.5, 5, 10, 25, 50, 100)
BATCHES, CACHED = (1, 3, 8, 13), 2048
DECODE_STEPS = 20  # in a time, being short
DEALT, WHOLE = P("context"), P()  # over the ranks, or the same on all

Run = Callable[[], object]


class Peer:
    """`ringattention_peer` in a process of its own."""

    def __init__(self, python: str, tokens: int) -> None:
        command = [python, str(Path(__file__).with_name("ringattention_peer.py")), str(tokens)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self._ask("")

    def contender(self, name: str, devices: int) -> Run:
        return lambda: self._ask(f"{name} {devices}\n")

    def _ask(self, request: str) -> str:
        self.process.stdin.write(request)
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer ended with exit status {self.process.wait()}")
        return answer.strip()


def contender(
    exchange: Callable[..., tuple[jax.Array, jax.Array]],
    ranks: int,
    operands: Sequence[jax.Array | np.ndarray],
    q_spec: P = DEALT,
    kv_spec: P = DEALT,
    backward: bool = False,
    **arguments: object,
) -> Run:
    """One compiled call on (q, k, v, q_positions, kv_positions, q_segment_ids, kv_segment_ids), the last two or not."""
    mesh = make_mesh(context=ranks)
    specs = (q_spec, kv_spec, kv_spec, q_spec, kv_spec, q_spec, kv_spec)[: len(operands)]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)]

    @jax.shard_map(mesh=mesh, in_specs=specs, out_specs=q_spec)
    def attend(*local: jax.Array) -> jax.Array:
        return exchange(*local, **arguments)[0]

    def both(q: jax.Array, k: jax.Array, v: jax.Array, *tokens: jax.Array) -> object:
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, *tokens), q, k, v)
        return out, pullback(q)  # any cotangent will do

    compiled = jax.jit(both if backward else attend)
    return lambda: jax.block_until_ready(compiled(*placed))


def random(*shape: int) -> list[np.ndarray]:
    """q, k and v."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*shape, HEADS, HEAD_SIZE), np.float32) for _ in range(3)]


def full_prefill(tokens: int, rounds: int, peer: Peer | None) -> None:
    positions, arrays = np.arange(tokens), random(tokens)
    entries = [
        (1, "attention", attention, "contiguous"),
        (2, "pass-KV", ring_pass_kv, "zigzag"),
        *((RANKS, "pass-KV", ring_pass_kv, layout) for layout in ("zigzag", "striped", "contiguous")),
        (RANKS, "pass-Q", ring_pass_q, "zigzag"),
        (RANKS, "all-gather", all_gather_kv, "zigzag"),
        (RANKS, "KVP", kvp_attention, "zigzag"),
    ]
    print("| pass | devices | exchange | layout | ms | GFLOP/s | of the full square | ideal / t | ringattention / t |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, factor in (("forward", 1), ("forward+backward", 3.5)):
        contenders = {}
        for ranks, label, exchange, layout in entries:
            is_dealt = exchange is not kvp_attention
            q, k, v, q_positions, kv_positions = (
                shard_sequence(x, ranks, layout, axis=0) if is_dealt or of_keys else x
                for x, of_keys in zip((*arrays, positions, positions), (False, True, True, False, True), strict=True)
            )
            operands = (q, k, v, q_positions, kv_positions)
            contenders[ranks, label, layout] = contender(
                exchange, ranks, operands, DEALT if is_dealt else WHOLE, backward=name != "forward"
            )
        if peer is not None:
            for ranks in (1, RANKS):
                contenders[ranks, "ringattention", "contiguous"] = peer.contender(name, ranks)
        seconds = measure(contenders, rounds)
        ideal = min(seconds[1, "attention", "contiguous"], seconds[2, "pass-KV", "zigzag"])
        for (ranks, label, layout), took in seconds.items():
            rate = factor * 2 * tokens**2 * HEADS * HEAD_SIZE / took / 1e9
            peer_time = seconds.get((ranks, "ringattention", "contiguous"))
            ratio = "" if peer_time is None else f"{peer_time / took:.2f}"
            print(
                f"| {name} | {ranks} | {label} | {layout} | {took * 1e3:.0f} | {rate:.0f} | {2 * rate:.0f} "
                f"| {ideal / took:.2f} | {ratio} |",
                flush=True,
            )


def partial_prefill(tokens: int, rounds: int) -> None:
    labels = ("1 device", "pass-KV", "pass-Q", "all-gather", "KVP")
    print(f"| miss rate | new | cached | KV message | Q message | GFLOP | {', '.join(labels).replace(', ', ' | ')} |")
    print("|" + "---|" * (6 + len(labels)))
    q, k, v = random(tokens)
    positions, segments = np.arange(tokens), np.zeros(tokens, int)
    for percent in MISS_PERCENTS:
        new = max(1, round(tokens * percent / 100))
        plan = plan_varseq([new], [tokens - new], RANKS, "zigzag")
        new_q, new_positions = q[-new:], positions[-new:]
        # Cached tokens are counted first, so that a key's index is its position.
        kv = [x[plan.kv_indices.ravel()] for x in (k, v)]
        dealt_q = new_q[plan.q_indices.ravel()]
        q_tokens, kv_tokens = (
            (plan.q_positions.ravel(), plan.q_segment_ids.ravel()),
            (plan.kv_positions.ravel(), plan.kv_segment_ids.ravel()),
        )
        dealt = (dealt_q, *kv, q_tokens[0], kv_tokens[0], q_tokens[1], kv_tokens[1])
        whole_q = (new_q, *kv, new_positions, kv_tokens[0], segments[-new:], kv_tokens[1])
        runs = (
            contender(attention, 1, (new_q, k, v, new_positions, positions)),
            *(contender(exchange, RANKS, dealt) for exchange in (ring_pass_kv, ring_pass_q, all_gather_kv)),
            contender(kvp_attention, RANKS, whole_q, WHOLE),
        )
        seconds = measure(dict(zip(labels, runs, strict=True)), rounds)
        messages = [
            f"{length:,} ({RANKS * length / total - 1:+.1%})"
            for length, total in ((plan.message_tokens, tokens), (plan.q_indices.shape[1], new))
        ]
        gflop = 4 * int(plan.scores.sum()) * HEADS * HEAD_SIZE / 1e9
        cells = [f"{percent} %", f"{new:,}", f"{tokens - new:,}", *messages, f"{gflop:.1f}"]
        print("| " + " | ".join([*cells, *(f"{took * 1e3:.1f}" for took in seconds.values())]) + " |", flush=True)


def decode(rounds: int) -> None:
    print("| sequences | exchange | rows of a rank | ms | tokens/s |")
    print("|---|---|---|---|---|")
    for batch in BATCHES:
        q, k, v = random(batch, CACHED)
        q = q[:, -1]
        # The row's own key is the last that is cached, as if just written.
        plan = plan_varseq([CACHED] * batch, None, RANKS)
        packed = [x.reshape(-1, HEADS, HEAD_SIZE)[plan.kv_indices.ravel()] for x in (k, v)]
        kv_tokens = (plan.kv_positions.ravel(), plan.kv_segment_ids.ravel())

        def pass_q(rows: np.ndarray) -> Run:
            q_positions = np.full(rows.size, CACHED - 1)
            operands = (q[rows], *packed, q_positions, kv_tokens[0], rows, kv_tokens[1])  # noqa: B023
            return contender(ring_pass_q, RANKS, operands, decode=True)

        rows = plan_decode(batch, 0, RANKS).ravel()
        positions = np.broadcast_to(np.arange(CACHED), (batch, CACHED))
        batched = (q[:, None], k, v, positions[:, -1:], positions)
        by_sequence = P(None, "context")
        contenders = {
            ("1 device", batch): contender(attention, 1, batched, WHOLE, WHOLE),
            ("pass-Q", f"{rows.size // RANKS} at most"): pass_q(rows),
            ("pass-Q, padding computed", rows.size // RANKS): pass_q(np.maximum(rows, 0)),
            ("KVP, gather", batch): contender(kvp_attention, RANKS, batched, WHOLE, by_sequence, merge="gather"),
        }
        repeated = {name: (lambda run=run: [run() for _ in range(DECODE_STEPS)]) for name, run in contenders.items()}
        for (label, num_rows), took in measure(repeated, rounds).items():
            took /= DECODE_STEPS
            print(f"| {batch} | {label} | {num_rows} | {took * 1e3:.2f} | {batch / took:.0f} |", flush=True)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", RANKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16384, help="a multiple of 8")
    parser.add_argument("--peer", help="the Python of an environment with ringattention")
    args = parser.parse_args()
    if args.tokens < RANKS or args.tokens % RANKS:
        parser.error(f"--tokens must be a positive multiple of {RANKS}, got {args.tokens}")
    peer = None if args.peer is None else Peer(args.peer, args.tokens)

    against = "" if peer is None else f"; peer: {peer.versions}"
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, jax {jax.__version__}{against}")
    print(f"Bound: {matmul_gflops():.0f} GFLOP/s (float32 matrix product of 2048); medians of {args.rounds} rounds\n")
    print(f"**Full prefill** of {args.tokens:,} tokens\n")
    full_prefill(args.tokens, args.rounds, peer)
    print(f"\n**Partial prefill**, forward, {RANKS} devices, zigzag: new and cached tokens make {args.tokens:,}; ms\n")
    partial_prefill(args.tokens, args.rounds)
    print(f"\n**Decode**, {RANKS} devices: one step of sequences of {CACHED:,} cached tokens\n")
    decode(args.rounds)


if __name__ == "__main__":
    main()
