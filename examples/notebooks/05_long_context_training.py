# %% [markdown]
# # Train on long documents in a ring
#
# In training, memory is what limits the length of a sequence: a device holds the activations of all its tokens. In a
# ring over N devices each holds those of T / N. This notebook trains a small Llama on packed documents over four CPU
# devices, with `longctx.nnx`, and checks that every loss is that of one device. Then it compiles longer steps, and
# looks at what they would take.
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

from longctx.models import passkey
from longctx.models.builtin import TINY
from longctx.models.checkpoint import read_model
from longctx.nnx import from_nnx, to_nnx
from longctx.parallel import cpu_devices, make_mesh
from longctx.plotting import COLORS, shown

cpu_devices(4)
RANKS, T, STEPS = 4, 1024, 16

# %% [markdown]
# ## Documents
#
# Ledgers of names and amounts, and then the same entries in another order. A token is a byte. Several documents are
# packed into one sequence; segment ids keep each to itself.


# %%
def ledger(rng, entries):
    """Entries, and once more in another order: tokens `[length]`."""
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
# `to_nnx` makes a Flax NNX module of a model and its parameters, here drawn at random; `load_checkpoint` gives those of
# Hugging Face files, to fine-tune. With a mesh, tokens are sharded over its axis `context` in zigzag,
# and attention goes round the ring. Positions and segments travel with the tokens, so documents may be packed across
# ranks. `remat` computes layers again in the backward pass, and `chunk_size` bounds what exists of the feed-forward and
# of the logits at a time. All the rest is Flax and optax as usual.

# %%
model, _ = read_model(TINY)  # the configuration of the built-in model: 4 layers, 657,024 parameters
params = model.init(jax.random.key(0))


def make(mesh):
    """A module and its optimizer; mesh None: on one device."""
    options = {} if mesh is None else {"mesh": mesh, "remat": True, "chunk_size": 128}
    module = to_nnx(model, jax.tree.map(jnp.copy, params), **options)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 4, STEPS)
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
    return [float(train_step(module, optimizer, *pack(seed))) for seed in range(STEPS)], module


# %% [markdown]
# ## A ring and one device
#
# The same steps twice, from the same parameters. The ring changes the order in which numbers are added, and nothing
# else.

# %%
ring, trained = train(make_mesh(context=RANKS))
alone, _ = train(None)
apart = np.abs(np.subtract(ring, alone))
with shown(width=5, height=3) as (figure, (axes,)):
    axes.plot(alone, color=COLORS[1], linewidth=4, alpha=0.5, label="one device")
    axes.plot(ring, color=COLORS[0], label="a ring of 4")
    axes.set(title="Loss", xlabel="step", ylabel="nats a token", ylim=0)
    axes.legend()
print(f"largest difference {apart.max():.0e}" if apart.max() > 1e-4 else "differences are below 1e-4")
print(f"loss {ring[0]:.2f} at first, {np.mean(ring[-3:]):.2f} in the end")
assert apart.max() < 1e-4
assert np.mean(ring[-3:]) < 0.6 * ring[0]

# %% [markdown]
# ## Back to a checkpoint
#
# `from_nnx` gives the model and its parameters, which `save_checkpoint(model, params, directory)` writes as safetensors
# for `transformers` and `longctx serve`. Their logits on one device are those of the module in the ring:

# %%
document = ledger(np.random.default_rng(1000), 20)
in_ring = trained(document)
served, weights = from_nnx(trained)
weights = jax.device_put(weights, jax.devices()[0])
np.testing.assert_allclose(in_ring, served(weights, document), rtol=0, atol=1e-3)
print("logits", in_ring.shape, "alike")

# %% [markdown]
# ## Memory
#
# Nothing is run here: the gradient is compiled, and the compiler says how much memory each device takes beside the
# parameters. With everything but attention local to a token, it follows T / N: four devices take a sequence about four
# times as long.

# %%
LENGTHS = {1: (2048, 4096, 8192), 4: (4096, 8192)}


def temporary_mib(ranks, length):
    module, _ = make(make_mesh(context=ranks))
    gradient = nnx.jit(nnx.value_and_grad(mean_loss))
    compiled = gradient.lower(module, *[jax.ShapeDtypeStruct((length,), jnp.int32)] * 2).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


memory = {ranks: [temporary_mib(ranks, length) for length in lengths] for ranks, lengths in LENGTHS.items()}
with shown(width=5, height=3) as (figure, (axes,)):
    for (ranks, mib), marker in zip(memory.items(), "os", strict=True):
        axes.plot(LENGTHS[ranks], mib, marker + "-", label=f"{ranks} device{'s' * (ranks > 1)}")
    axes.set(title="Memory of one device for a gradient", xlabel="tokens of the sequence", ylabel="MiB", ylim=0, xlim=0)
    axes.legend()
for ranks, mib in memory.items():
    for length, size in zip(LENGTHS[ranks], mib, strict=True):
        print(f"{ranks} x {length // ranks:5,} tokens: {size:4.0f} MiB")
assert memory[4][1] < memory[1][2] / 2  # 8,192 tokens on 4 devices and on one
assert memory[1][2] < 2.5 * memory[1][1]  # linear, not quadratic, in the tokens of a device

# %% [markdown]
# `examples/finetune_llama.py` does the same with a checkpoint: warm-up, accumulation, states that can be resumed,
# sharded parameters; it saves what `transformers` loads. `docs/finetuning.md` says more.
