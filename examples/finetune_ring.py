"""Train a model twice, in a ring over many devices and on one device, and compare the loss curves.

    python examples/finetune_ring.py --devices 8 --steps 30 --length 4001
    python examples/finetune_ring.py --exchange all_gather_kv

To train a model of your own on contexts that exceed one device, it needs:

* **Attention as an argument** (`Attend`). Everything else in a transformer works token by token, on whichever device
  has the token; only attention combines tokens.
* **Positions with the tokens.** Each token has an absolute position, for the rotary embedding and the mask, and a
  segment id, so that documents can be packed and shards padded. Then any device may have it (`shard_batch`).
* **A loss summed over the ranks**, divided by the number of all their tokens (`ring_loss`). The gradients need nothing
  else: `jax.shard_map` knows from types that parameters are the same on all ranks, and sums each rank's part of their
  gradient.
"""

import argparse
import dataclasses
import inspect
import tarfile
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.kernels import attention
from longctx.models.rope import apply_rope, rope_cos_sin, rope_table
from longctx.models.rope_config import RopeConfig
from longctx.parallel import all_gather_kv, make_mesh, ring_pass_kv, ring_pass_q, shard_sequence

EXCHANGES = {"ring_pass_kv": ring_pass_kv, "ring_pass_q": ring_pass_q, "all_gather_kv": all_gather_kv}

Attend = Callable[[Array, Array, Array, Array, Array], Array]
"""`attend(q, k, v, positions, segment_ids) -> out`, over the tokens of one packed sequence."""


@dataclasses.dataclass(frozen=True)
class Config:
    hidden_size: int = 64
    num_blocks: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 256  # bytes


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    # By default a GPU multiplies float32 in TF32, whose rounding would make the curves differ.
    return nnx.Linear(inputs, outputs, use_bias=False, precision="highest", rngs=rngs)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        width, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.query = linear(width, heads * size, rngs)
        self.key = linear(width, kv_heads * size, rngs)
        self.value = linear(width, kv_heads * size, rngs)
        self.out = linear(heads * size, width, rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = linear(width, 4 * width, rngs)
        self.down = linear(4 * width, width, rngs)

    def __call__(self, x: Array, positions: Array, segment_ids: Array, attend: Attend) -> Array:
        cos_sin = rope_cos_sin(rope_table(RopeConfig(), self.config.head_dim), positions)
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).reshape(*x.shape[:-1], -1, self.config.head_dim)
            for project in (self.query, self.key, self.value)
        )
        out = attend(apply_rope(q, *cos_sin), apply_rope(k, *cos_sin), v, positions, segment_ids)
        x = x + self.out(out.reshape(*x.shape[:-1], -1))
        return x + self.down(nnx.silu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A causal model of bytes: tokens, positions and segment ids `[T]` -> logits `[T, vocab]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_blocks)])
        self.norm = nnx.RMSNorm(config.hidden_size, rngs=rngs)
        self.head = linear(config.hidden_size, config.vocab_size, rngs)

    def __call__(self, tokens: Array, positions: Array, segment_ids: Array, attend: Attend) -> Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, segment_ids, attend)
        return self.head(self.norm(x))


class Batch(NamedTuple):
    """Documents packed into one sequence: four int32 arrays `[T]`."""

    tokens: Any
    targets: Any  # the token that comes next; -1 where a document ends, and in padding
    positions: Any  # from 0 in each document
    segment_ids: Any  # which document; -1 is padding


def make_batch(step: int, length: int) -> Batch:
    """Pack three documents, of 1/2, 3/10 and 1/5 of the tokens: excerpts of three modules of the standard library."""
    if length < 4:
        raise ValueError(f"length must be at least 4, for three documents, got {length}")
    sizes = [length // 2, 3 * length // 10, length - length // 2 - 3 * length // 10]
    documents = []
    for segment, (size, module) in enumerate(zip(sizes, (argparse, tarfile, typing), strict=True)):
        source = np.frombuffer(inspect.getsource(module).encode(), np.uint8).astype(np.int32)
        if size > len(source):
            raise ValueError(f"length must be less than {length}: {module.__name__}.py has no {size} bytes")
        first = step * size % (len(source) - size + 1)
        tokens = source[first : first + size]
        documents.append(Batch(tokens, np.append(tokens[1:], -1), np.arange(size), np.full(size, segment)))
    return Batch(*(np.concatenate(arrays, dtype=np.int32) for arrays in zip(*documents, strict=True)))


def shard_batch(batch: Batch, mesh: Mesh, layout: str = "zigzag") -> Batch:
    """Pad a batch, reorder it by layout, and shard it over `context`."""
    paddings = Batch(tokens=0, targets=-1, positions=0, segment_ids=-1)

    def shard(x: np.ndarray, pad_value: int) -> Array:
        reordered = shard_sequence(x, mesh.shape["context"], layout, axis=0, pad_value=pad_value)
        return jax.device_put(reordered, NamedSharding(mesh, P("context")))

    return Batch(*map(shard, batch, paddings))


def replicate(params: Any, mesh: Mesh) -> Any:
    """Copy the parameters to every device; from one device, the first step would compile differently from the next."""
    return jax.device_put(params, NamedSharding(mesh, P()))


LossAndGradient = Callable[[Any, Batch], tuple[Array, Any]]
"""`(params, batch) -> (loss, gradient)`, compiled."""


def attend_with(function: Callable[..., tuple[Array, Array]], **options: Any) -> Attend:
    """Wrap an attention of `longctx` as an `Attend`: keys and queries are of the same tokens, and lse is dropped."""
    return lambda q, k, v, positions, segment_ids: function(
        q, k, v, positions, positions, segment_ids, segment_ids, **options
    )[0]


def sum_losses(graph: nnx.GraphDef, params: Any, batch: Batch, attend: Attend) -> tuple[Array, Array]:
    """The summed cross entropy of all tokens that have a next one, and their number, on this rank."""
    logits = nnx.merge(graph, params)(batch.tokens, batch.positions, batch.segment_ids, attend)
    has_next = batch.targets >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch.targets, 0))
    return jnp.sum(jnp.where(has_next, losses, 0)), jnp.sum(has_next)


def dense_loss(graph: nnx.GraphDef) -> LossAndGradient:
    """The loss on one device, for batches from `make_batch`."""

    def loss(params: Any, batch: Batch) -> Array:
        total, count = sum_losses(graph, params, batch, attend_with(attention))
        return total / count

    return jax.jit(jax.value_and_grad(loss))


def ring_loss(graph: nnx.GraphDef, mesh: Mesh, exchange: str = "ring_pass_kv") -> LossAndGradient:
    """The same loss over many devices, for batches from `shard_batch` and parameters from `replicate`."""

    def loss(params: Any, batch: Batch) -> Array:
        attend = attend_with(EXCHANGES[exchange], axis_name="context")
        total, count = lax.psum(sum_losses(graph, params, batch, attend), "context")
        return total / count

    # The gradient is P(), the same on all ranks: shard_map would refuse one that differs between ranks.
    return jax.jit(
        jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("context")), out_specs=P(), check_vma=True)
    )


OPTIMIZER = optax.adamw(3e-3)


@jax.jit
def update(params: Any, state: optax.OptState, gradient: Any) -> tuple[Any, optax.OptState]:
    change, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, change), state


def train(loss_and_gradient: LossAndGradient, params: Any, batches: Sequence[Batch]) -> np.ndarray:
    """Take a step of AdamW for each batch, and return the losses `[steps]`."""
    losses, state = [], OPTIMIZER.init(params)
    for batch in batches:
        loss, gradient = loss_and_gradient(params, batch)
        params, state = update(params, state, gradient)
        losses.append(loss)
    return np.array(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="devices in the ring (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--length", type=int, default=4001, help="tokens of a step (default: %(default)s)")
    parser.add_argument("--exchange", choices=EXCHANGES, default="ring_pass_kv", help="(default: %(default)s)")
    args = parser.parse_args()
    if min(args.devices, args.steps) < 1:
        parser.error("--devices and --steps must be at least 1")
    # This has to come before JAX creates its devices, and has an effect on CPUs only.
    if jax.config.jax_num_cpu_devices < args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)

    mesh = make_mesh(context=args.devices)
    graph, params = nnx.split(Transformer(Config(), nnx.Rngs(0)))
    batches = [make_batch(step, args.length) for step in range(args.steps)]
    sharded = [shard_batch(batch, mesh) for batch in batches]
    ring = train(ring_loss(graph, mesh, args.exchange), replicate(params, mesh), sharded)
    dense = train(dense_loss(graph), params, batches)
    print(f"step  {args.exchange} on {args.devices}  dense on 1")
    for step, (a, b) in enumerate(zip(ring, dense, strict=True)):
        print(f"{step:4}  {a:.6f}  {b:.6f}")
    print(f"largest difference: {np.abs(ring - dense).max():.1e}")


if __name__ == "__main__":
    main()
