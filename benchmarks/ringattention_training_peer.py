"""Training steps with the package `ringattention` on request, for `benchmarks.finetune`.

Runs by itself in the environment of `benchmarks.context_parallel`: `PYTHON benchmarks/ringattention_training_peer.py
WEIGHTS.npz CHUNK`. It prints a line about itself. Then "step 8 4096" (devices, tokens) on its input takes a step, the
first of a length compiling it, and its loss is the answer; "bytes 8 4096" answers with the temporary bytes of a device.

The model is the Llama that `benchmarks.finetune` trains, with its weights, as such a package is used: layers are
computed again for the gradient, attention is `ringattention`, and feed-forward and logits are computed by chunks of
tokens. Its chunks of attention of 128 were the fastest on 2 cores (`ringattention_peer.py`).
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

ATTENTION_CHUNK = 128


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
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    local = tokens // devices
    attention_chunk, chunk = np.gcd(ATTENTION_CHUNK, local).item(), np.gcd(chunk, local).item()
    blockwise = {
        "causal_block_size": 1,
        "query_chunk_size": attention_chunk,
        "key_chunk_size": attention_chunk,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": jnp.float32,
        "precision": None,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "prevent_cse": True,
    }

    def local_loss(params, tokens, targets):  # type: ignore[no-untyped-def]
        positions = lax.axis_index("context") * local + jnp.arange(local)

        @jax.checkpoint
        def layer(x, w):  # type: ignore[no-untyped-def]
            normed = norm(x, w["attn_norm"])
            q, k, v = (jnp.einsum("td,dnh->tnh", normed, w[name]) for name in ("wq", "wk", "wv"))
            q, k = rope(q, positions), rope(k, positions)
            out = ringattention(q[None], k[None], v[None], None, None, None, "context", True, blockwise)[0]
            x = x + jnp.einsum("tnh,nhd->td", out, w["wo"])

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

    spec = PartitionSpec("context")
    loss = shard_map(
        local_loss, mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec(), check_rep=False
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, targets):  # type: ignore[no-untyped-def]
        value, gradient = jax.value_and_grad(loss)(params, tokens, targets)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    everywhere = NamedSharding(mesh, PartitionSpec())
    training = jax.device_put((params, optimizer.init(params)), everywhere)
    ids = np.random.default_rng(0).integers(0, params["embed"].shape[0], tokens, np.int32)
    batch = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (ids, np.append(ids[1:], -1).astype(np.int32))]

    def run():  # type: ignore[no-untyped-def]
        nonlocal training
        *training, value = step(*training, *batch)
        return float(value)

    return run, lambda: step.lower(*training, *batch).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    print(", ".join(f"{name} {version(name)}" for name in ("ringattention", "jax", "jaxlib")), flush=True)
    params: dict = {"layers": {}}
    for name, array in np.load(sys.argv[1]).items():
        *within, leaf = name.split("/")
        (params["layers"] if within else params)[leaf] = array
    steps = {}
    for line in sys.stdin:
        kind, devices, tokens = line.split()
        key = devices, tokens
        if key not in steps:
            steps[key] = make_step(params, optax.adam(1e-3), int(devices), int(tokens), int(sys.argv[2]))
        print(steps[key][kind == "bytes"](), flush=True)


if __name__ == "__main__":
    main()
