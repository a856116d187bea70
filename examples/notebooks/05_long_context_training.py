# %% [markdown]
# # Train on long documents in a ring
#
# In training, memory is what limits the length of a sequence: a device holds the activations of all its tokens. In a
# ring over N devices each holds those of T / N. This notebook fine-tunes the built-in model of 657,024 parameters on
# packed documents over four CPU devices, with `longctx.nnx`, and checks that every loss is that of one device. Then it
# compiles longer steps, and looks at what they would take.
#
# It takes about a minute and a half on a laptop, most of it to compile.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from longctx.models import load_checkpoint, passkey
from longctx.models.builtin import TINY
from longctx.nnx import from_nnx, next_token_targets, to_nnx
from longctx.parallel import cpu_devices, make_mesh
from longctx.plotting import COLORS, shown

cpu_devices(4)
RANKS, T, STEPS = 4, 1024, 24

# %% [markdown]
# ## Documents
#
# The task needs long distance: a ledger of names and amounts, and then the same entries in another order. What an
# amount is, only the first half tells. A token is a byte; names are those that the model has seen, the form is new.


# %%
def ledger(rng, entries):
    """Entries, and once more in another order; tokens [length], and where the amounts of the second half are."""
    names = rng.permutation(len(passkey.NAMES))[:entries]
    lines = [f"{passkey.NAMES[name]}: {rng.integers(10_000, 100_000)}\n" for name in names]
    first, second = "".join(lines), "".join(lines[i] for i in rng.permutation(entries))
    return np.frombuffer((first + second).encode(), np.uint8).astype(np.int32)


def pack(seed):
    """Documents one after another: tokens and segment ids `[T]`. The last is cut; a document sees itself alone."""
    rng = np.random.default_rng(seed)
    documents = [ledger(rng, entries) for entries in rng.integers(8, 24, 8)]
    segments = np.concatenate([np.full(len(document), number) for number, document in enumerate(documents)])
    return np.concatenate(documents)[:T], segments[:T].astype(np.int32)


tokens, segments = pack(seed=0)
print(bytes(tokens[:60].astype(np.uint8)).decode())
sizes = ", ".join(str(size) for size in np.bincount(segments))
print(f"documents of {sizes} tokens in one sequence of {len(tokens)}")

# %% [markdown]
# ## The module
#
# `to_nnx` makes a Flax NNX module of a checkpoint. With a mesh, tokens are sharded over its axis `context` in zigzag,
# and attention goes round the ring. Positions and segments travel with the tokens, so documents may be packed across
# ranks. `remat` computes layers again in the backward pass, and `chunk_size` bounds what exists of the feed-forward and
# of the logits at a time. All the rest is Flax and optax as usual.

# %%
model, params = load_checkpoint(TINY, dtype=jnp.float32)


def make(mesh):
    """A module and its optimizer; mesh None: on one device."""
    options = {} if mesh is None else {"mesh": mesh, "remat": True, "chunk_size": 128}
    module = to_nnx(model, jax.tree.map(jnp.copy, params), **options)
    rate = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 4, STEPS)
    optimizer = nnx.Optimizer(module, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), wrt=nnx.Param)
    everywhere = jax.devices()[0] if mesh is None else NamedSharding(mesh, P())
    # Placed as a step returns it: else the second step would be compiled anew.
    nnx.update(optimizer, jax.device_put(nnx.state(optimizer), everywhere))
    return module, optimizer


def mean_loss(module, tokens, segments):
    """Nats a token. Sums and counts are of all ranks; means of ranks would be wrong, as their counts differ."""
    total, count = module.loss(tokens, segment_ids=segments)
    return total / count


@nnx.jit
def train_step(module, optimizer, tokens, segments):
    value, gradient = nnx.value_and_grad(mean_loss)(module, tokens, segments)
    optimizer.update(module, gradient)
    return value


def train(mesh):
    module, optimizer = make(mesh)
    losses = [float(train_step(module, optimizer, *pack(seed))) for seed in range(STEPS)]
    return losses, module


# %% [markdown]
# ## A ring and one device
#
# The same steps twice, from the same parameters. The ring changes the order in which numbers are added, and nothing
# else.

# %%
ring, trained = train(make_mesh(context=RANKS))
alone, _ = train(None)
apart = np.abs(np.subtract(ring, alone))
with shown(panels=2, width=4.4, height=2.8) as (figure, (left, right)):
    left.plot(alone, color=COLORS[1], linewidth=4, alpha=0.5, label="one device")
    left.plot(ring, color=COLORS[0], label="a ring of 4")
    left.set(title="Loss", xlabel="step", ylabel="nats a token", ylim=0)
    left.legend()
    right.semilogy(np.maximum(apart, 1e-8), ".", color=COLORS[0])
    right.axhline(1e-4, color="k", ls="--", lw=1)
    right.set(title="Difference of the two", xlabel="step", ylabel="nats", ylim=(1e-8, 1e-3))
print(f"loss {ring[0]:.2f} at first, {np.mean(ring[-3:]):.2f} in the end")
assert apart.max() < 1e-4
assert np.mean(ring[-3:]) < 0.7 * ring[0]

# %% [markdown]
# ## Did it learn to look back?
#
# Amounts of the second half can be known, those of the first can't: their digits are drawn at random, which is 2.3 nats
# (log 10) at best. Logits of a new document, from the module in the ring; its parameters go back to a
# checkpoint that `longctx serve` takes (`save_checkpoint(*from_nnx(module), directory)`).

# %%
document = ledger(np.random.default_rng(1000), 20)
targets = np.asarray(next_token_targets(jnp.asarray(document)))
is_digit = (targets >= ord("0")) & (targets <= ord("9"))
second_half = np.arange(len(document)) >= len(document) // 2


def digit_losses(module):
    logp = np.asarray(jax.nn.log_softmax(module(document)))
    nats = -np.take_along_axis(logp, np.maximum(targets, 0)[:, None], 1)[:, 0]
    return [nats[is_digit & half].mean() for half in (~second_half, second_half)]


before, after = digit_losses(to_nnx(model, params)), digit_losses(to_nnx(*from_nnx(trained)))
with shown(width=4.5, height=2.6) as (figure, (axes,)):
    x = np.arange(2)
    axes.bar(x - 0.2, before, width=0.38, color=COLORS[5], label="before")
    axes.bar(x + 0.2, after, width=0.38, color=COLORS[0], label="after")
    axes.set(title="Loss of an amount's digit", ylabel="nats")
    axes.set_xticks(x, ["first half", "second half"])
    axes.legend()
for name, (first, second) in (("before", before), ("after", after)):
    print(f"{name:6} {first:.2f} nats a digit in the first half, {second:.2f} in the second")
assert after[1] < before[1]

# %% [markdown]
# ## Memory
#
# Nothing is run here: steps are compiled, and the compiler says how much memory each device takes beside parameters and
# optimizer. It grows with T / N: twice the devices, twice the tokens.

# %%
SHARDS = (2048, 4096)  # tokens of a device


def temporary_mib(ranks, length):
    module, _ = make(make_mesh(context=ranks))
    gradient = nnx.jit(nnx.value_and_grad(mean_loss))
    compiled = gradient.lower(module, *[jax.ShapeDtypeStruct((length,), jnp.int32)] * 2).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


memory = {ranks: [temporary_mib(ranks, ranks * shard) for shard in SHARDS] for ranks in (1, 2, 4)}
print(memory)
