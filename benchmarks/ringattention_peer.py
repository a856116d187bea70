"""The package `ringattention` on request, for `benchmarks.context_parallel`, which cannot share a JAX with it.

Runs by itself in an environment made as that module says: `PYTHON benchmarks/ringattention_peer.py TOKENS`. It prints
a line about itself; then each line "forward 8" or "forward+backward 1" (pass, devices) on its input makes one such
call, the first of a kind compiling it, and a line "done" on its output says that the result is there.

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
from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattention import ringattention

HEADS, HEAD_SIZE = 4, 64
CHUNK = 128


def make_call(tokens: int, name: str, devices: int):  # type: ignore[no-untyped-def]
    mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))
    spec = PartitionSpec(None, "context")
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, tokens, HEADS, HEAD_SIZE), np.float32) for _ in range(4)]
    q, k, v, d_out = (jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays)
    chunk = np.gcd(CHUNK, tokens // devices).item()
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

    @functools.partial(shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_rep=False)
    def local_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ringattention(q, k, v, None, None, None, "context", True, blockwise)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        out, pullback = jax.vjp(local_attention, q, k, v)
        return out, pullback(d_out)

    compiled = jax.jit({"forward": local_attention, "forward+backward": both}[name])
    return lambda: jax.block_until_ready(compiled(q, k, v))


def main() -> None:
    print(", ".join(f"{name} {version(name)}" for name in ("ringattention", "jax", "jaxlib")), flush=True)
    calls = {}
    for line in sys.stdin:
        name, devices = line.split()
        if line not in calls:
            calls[line] = make_call(int(sys.argv[1]), name, int(devices))
        calls[line]()
        print("done", flush=True)


if __name__ == "__main__":
    main()
