"""The package `ringattention` on request, for `benchmarks.context_parallel` and `benchmarks.finetune`.

Those cannot share a JAX with it, so it runs by itself in an environment made as `benchmarks.context_parallel` says:
`PYTHON benchmarks/ringattention_peer.py attention TOKENS` or `... training WEIGHTS.npz CHUNK`. It prints a line about
itself, and then answers each line on its input by one on its output; the first request of a kind compiles.

- `attention`: "forward 8" or "forward+backward 1" (pass, devices) makes such a call, and "done" is the answer.
- `training`: "step 8 4096" (devices, tokens) takes a step, and its loss is the answer; "bytes 8 4096" answers with the
  temporary bytes of a device. The model is the Llama that `benchmarks.finetune` trains, with its weights, as such a
  package is used: layers are computed again for the gradient, and feed-forward and logits by chunks of tokens.

Its causal mode: contiguous shards, and pairs of chunks of queries and keys that the mask empties are skipped, by a
`lax.cond` each. Its chunks of 128 were the fastest on 2 cores, of 64 to 2048, on 8 devices and on one.
"""

import os
import sys

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import functools
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattention import ringattention

HEADS, HEAD_SIZE = 4, 64
CHUNK = 128


def mesh_of(devices):  # type: ignore[no-untyped-def]
    return Mesh(np.array(jax.devices()[:devices]), ("context",))


def ring(q, k, v):  # type: ignore[no-untyped-def]
    """Attention of the shards `[1, T, N, H]` of a device."""
    chunk = np.gcd(CHUNK, q.shape[1]).item()
    blockwise = {
        "causal_block_size": 1,
        "query_chunk_size": chunk,
        "key_chunk_size": chunk,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": jnp.float32,
        "precision": None,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "prevent_cse": True,
    }
    return ringattention(q, k, v, None, None, None, "context", True, blockwise)


def make_call(tokens, name, devices):  # type: ignore[no-untyped-def]
    mesh, spec = mesh_of(devices), PartitionSpec(None, "context")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, tokens, HEADS, HEAD_SIZE), np.float32) for _ in range(4)]
    q, k, v, d_out = (jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays)
    attention = shard_map(ring, mesh, in_specs=spec, out_specs=spec, check_rep=False)

    def both(q, k, v):  # type: ignore[no-untyped-def]
        out, pullback = jax.vjp(attention, q, k, v)
        return out, pullback(d_out)

    compiled = jax.jit({"forward": attention, "forward+backward": both}[name])

    def call():  # type: ignore[no-untyped-def]
        jax.block_until_ready(compiled(q, k, v))
        return "done"

    return call


def norm(x, weight):  # type: ignore[no-untyped-def]
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def rope(x, positions):  # type: ignore[no-untyped-def]
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 10000.0 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def map_chunks(function, xs, chunk):  # type: ignore[no-untyped-def]
    """`function` of chunks of tokens, each computed again for the gradient."""
    split = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), xs)
    return lax.map(jax.checkpoint(function), split)


def make_step(params, optimizer, devices, tokens, chunk):  # type: ignore[no-untyped-def]
    mesh, local = mesh_of(devices), tokens // devices
    chunk = np.gcd(chunk, local).item()

    def local_loss(params, tokens, targets):  # type: ignore[no-untyped-def]
        positions = lax.axis_index("context") * local + jnp.arange(local)

        @jax.checkpoint
        def layer(x, w):  # type: ignore[no-untyped-def]
            normed = norm(x, w["attn_norm"])
            q, k, v = (jnp.einsum("td,dnh->tnh", normed, w[name]) for name in ("wq", "wk", "wv"))
            q, k = rope(q, positions), rope(k, positions)
            x = x + jnp.einsum("tnh,nhd->td", ring(q[None], k[None], v[None])[0], w["wo"])

            def feed_forward(x):  # type: ignore[no-untyped-def]
                normed = norm(x, w["mlp_norm"])
                return x + (jax.nn.silu(normed @ w["w_gate"]) * (normed @ w["w_up"])) @ w["w_down"]

            return map_chunks(feed_forward, x, chunk).reshape(x.shape), None

        x, _ = lax.scan(layer, params["embed"][tokens], params["layers"])

        def chunk_loss(operands):  # type: ignore[no-untyped-def]
            x, targets = operands
            logits = norm(x, params["final_norm"]) @ params["lm_head"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            return jnp.sum(jnp.where(targets >= 0, losses, 0))

        total = map_chunks(chunk_loss, (x, targets), chunk).sum()
        return lax.psum(total, "context") / lax.psum((targets >= 0).sum(), "context")

    spec, whole = PartitionSpec("context"), PartitionSpec()
    loss = shard_map(local_loss, mesh, in_specs=(whole, spec, spec), out_specs=whole, check_rep=False)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, targets):  # type: ignore[no-untyped-def]
        value, gradient = jax.value_and_grad(loss)(params, tokens, targets)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    training = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, whole))
    ids = np.random.default_rng(0).integers(0, params["embed"].shape[0], tokens, np.int32)
    batch = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (ids, np.append(ids[1:], -1).astype(np.int32))]

    def run():  # type: ignore[no-untyped-def]
        nonlocal training
        *training, value = step(*training, *batch)
        return float(value)

    return {
        "step": run,
        "bytes": lambda: step.lower(*training, *batch).compile().memory_analysis().temp_size_in_bytes,
    }


def read_params(path):  # type: ignore[no-untyped-def]
    params: dict = {"layers": {}}
    for name, array in np.load(path).items():
        *within, leaf = name.split("/")
        (params["layers"] if within else params)[leaf] = array
    return params


def main() -> None:
    print(", ".join(f"{name} {version(name)}" for name in ("ringattention", "jax", "jaxlib")), flush=True)
    kind, first, *rest = sys.argv[1:]
    params = read_params(first) if kind == "training" else None

    @functools.cache
    def prepared(*key):  # type: ignore[no-untyped-def]
        if params is None:
            return make_call(int(first), key[0], int(key[1]))
        return make_step(params, optax.adam(1e-3), int(key[0]), int(key[1]), int(rest[0]))

    for line in sys.stdin:
        what, *numbers = line.split()
        print(prepared(what, *numbers)() if params is None else prepared(*numbers)[what](), flush=True)


if __name__ == "__main__":
    main()
