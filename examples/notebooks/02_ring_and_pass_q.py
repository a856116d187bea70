# %% [markdown]
# # A ring, and who sees what in it
#
# A sequence too long for one device is sharded over N ranks. Every query must still attend to every key before it, so
# something has to travel: the keys (pass-KV), or the queries and their results (pass-Q). This notebook draws what each
# rank computes in each hop, runs both on eight CPU devices, checks them against one device, counts the bytes that they
# send, and asks which is faster on hosts of H100.
#
# It takes about a minute on a laptop.

# %%
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from matplotlib.collections import PolyCollection

from longctx.kernels import attention, merge_state
from longctx.parallel import (
    H100_RDMA,
    ModelShape,
    choose_ring,
    context_parallel_attention,
    cpu_devices,
    layout_shards,
    make_mesh,
    ring_pass_kv,
    ring_pass_q,
    shard_positions,
    shard_sequence,
    unshard_sequence,
)
from longctx.plotting import COLORS, shown

cpu_devices(8)
RANKS, LAYOUTS = 8, ("contiguous", "zigzag", "striped")
RANK_COLORS = (*COLORS[:6], "#f0e442", COLORS[7])  # Okabe and Ito's yellow is fine for areas

# %% [markdown]
# ## Who has which tokens
#
# A layout says which rank has which tokens. Causal attention makes row t as expensive as its t + 1 keys, so the layout
# decides who has how much to do. 64 tokens on 8 ranks; each row of the causal square has the colour of its rank:

# %%
with shown(panels=3, width=3.1, height=3.3) as (figure, panels):
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        for rank, tokens in enumerate(layout_shards(64, RANKS, layout)):
            axes.barh(tokens, tokens + 1, height=1, color=RANK_COLORS[rank], label=f"rank {rank}")
        axes.set(title=layout, xlabel="key", ylim=(63.5, -0.5))
        axes.grid(visible=False)
    panels[0].set_ylabel("query")
    panels[-1].legend(loc="upper right", ncols=2)

# %% [markdown]
# ## Who sees what in each hop
#
# In hop i, rank r attends to the keys that started on rank r - i. Masks come from positions alone: a query sees a key
# whose position is not after its own. So the masks below are no special cases of an algorithm, but what follows from
# the layout. Each small square is one rank in one hop, eight queries by eight keys; coloured is what is seen, in the
# colour of the rank that the keys came from.


# %%
def keys_seen(layout, rank, hop, length=64):
    """How many keys each query of a rank sees in a hop. Shards are sorted, so these are the first ones."""
    shards = layout_shards(length, RANKS, layout)
    return np.searchsorted(shards[(rank - hop) % RANKS], shards[rank], side="right")


with shown(panels=3, width=3.1, height=3.3) as (figure, panels):
    for axes, layout in zip(panels, LAYOUTS, strict=True):
        squares, shapes, colors = [], [], []
        for rank in range(RANKS):
            for hop in range(RANKS):
                x, y, seen = 9 * hop, 9 * rank, keys_seen(layout, rank, hop)
                turns = np.flatnonzero(np.diff(seen, prepend=-1, append=-1))  # rows at which the outline turns
                steps = [(x + seen[i], y + row) for i, j in itertools.pairwise(turns) for row in (i, j)]
                squares.append([(x, y), (x + 8, y), (x + 8, y + 8), (x, y + 8)])
                if seen.any():
                    shapes.append([(x, y), *steps, (x, y + 8)])
                    colors.append(RANK_COLORS[(rank - hop) % RANKS])
        axes.add_collection(PolyCollection(squares, facecolor="#eeeeee"))
        axes.add_collection(PolyCollection(shapes, facecolors=colors))
        axes.set(title=layout, xlabel="hop", xlim=(-1, 72), ylim=(72, -1))
        axes.set_xticks(9 * np.arange(8) + 4, range(8))
        axes.set_yticks(9 * np.arange(8) + 4, [f"rank {rank}" for rank in range(8)] if layout == "contiguous" else [])
        axes.grid(visible=False)

# %% [markdown]
# Ranks wait for each other in every hop, since keys arrive from a neighbour. So a hop takes as long as its busiest
# rank. With contiguous shards one more rank is idle in each hop, and still those that are not have whole squares to
# compute. Zigzag (an early chunk and a late one on each rank) and striped shards give all ranks the same work in every
# hop.

# %%
length = 4096


def pairs(layout):
    """Pairs of query and key that are seen, `[hop, rank]`."""
    return np.array([[keys_seen(layout, rank, hop, length).sum() for rank in range(RANKS)] for hop in range(RANKS)])


work = {layout: pairs(layout) for layout in LAYOUTS}
ideal = length * (length + 1) / 2 / RANKS
busiest = {layout: work[layout].max(1) / ideal for layout in LAYOUTS}  # [hop]
with shown(panels=2, width=4.6, height=2.8) as (figure, (left, right)):
    for layout, marker in zip(LAYOUTS, "os^", strict=True):
        left.plot(busiest[layout], marker + "-", label=layout)
    left.set(title="Work of the busiest rank in each hop", xlabel="hop", ylabel="share of a rank's fair work", ylim=0)
    left.legend(loc="upper right", bbox_to_anchor=(1, 0.92))
    sums = [busiest[layout].sum() for layout in LAYOUTS]
    right.bar_label(right.bar(LAYOUTS, sums, color=COLORS[:3], width=0.6), fmt="%.2f")
    right.set(title="All hops together; 1 is perfect balance", ylim=(0, 2.2))
assert all(each.sum() == length * (length + 1) // 2 for each in work.values())  # every pair once
assert round(busiest["contiguous"].sum(), 2) == 1.87  # 2 - 1 / RANKS, of long sequences
assert max(busiest["zigzag"].sum(), busiest["striped"].sum()) < 1.01

# %% [markdown]
# ## A ring in fifteen lines
#
# Inside `jax.shard_map` each rank has its shard. Attend to the keys that are there, merge, send them on:


# %%
def ring(q, k, v, positions):
    state = None
    key_positions = positions
    for hop in range(RANKS):
        part = attention(q, k, v, q_positions=positions, kv_positions=key_positions, out_dtype=jnp.float32)
        state = part if state is None else merge_state(*state, *part)
        if hop < RANKS - 1:
            to_next = [(rank, (rank + 1) % RANKS) for rank in range(RANKS)]
            k, v, key_positions = (lax.ppermute(x, "context", to_next) for x in (k, v, key_positions))
    return state


mesh, spec = make_mesh(context=RANKS), P("context")


def on_ranks(function):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))


T, N, K, H = 2048, 8, 2, 64
q, k, v = (jax.random.normal(jax.random.key(seed), (T, heads, H)) for seed, heads in enumerate((N, K, K)))
one_device, _ = attention(q, k, v)
ring_on_ranks = on_ranks(ring)
for layout in LAYOUTS:
    positions, _ = shard_positions(T, RANKS, layout)
    shards = [shard_sequence(x, RANKS, layout, axis=0) for x in (q, k, v)]
    out, lse = ring_on_ranks(*shards, positions)
    out = unshard_sequence(out, RANKS, layout, axis=0)
    print(f"{layout:11}", "equals one device:", bool(np.abs(out - one_device).max() < 1e-5))
    np.testing.assert_allclose(out, one_device, rtol=0, atol=1e-5)

# %% [markdown]
# The library's `ring_pass_kv` is the same with what speed asks for: K and V in one message, issued before the attention
# that hides it, positions gathered once, a kernel that goes on from a state in place of merges, and gradients that
# travel in a ring of their own. `ring_pass_q` has the same arguments. 2,001 tokens do not divide by 8: the shards are
# padded, and padding has segment -1, which nobody sees.

# %%
length = 2001
positions, segments = shard_positions(length, RANKS)
shards = [shard_sequence(x[:length], RANKS, axis=0) for x in (q, k, v)]
one_device, one_lse = attention(q[:length], k[:length], v[:length])
arguments = (*shards, positions, positions, segments, segments)
programs = {exchange.__name__: on_ranks(exchange) for exchange in (ring_pass_kv, ring_pass_q)}
for program in programs.values():
    out, lse = (unshard_sequence(x, RANKS, axis=0, length=length) for x in program(*arguments))
    np.testing.assert_allclose(out, one_device, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, one_lse, rtol=0, atol=1e-5)

# %% [markdown]
# For whole arrays there is one call, which shards, pads, exchanges and puts back in order:

# %%
for method in ("pass_kv", "pass_q", "all_gather", "kvp", "auto"):
    out = context_parallel_attention(q[:length], k[:length], v[:length], mesh=mesh, method=method)
    np.testing.assert_allclose(out, one_device, rtol=0, atol=1e-5)

# %% [markdown]
# ## What they send
#
# Bytes are a property of the compiled program, not of the machine. Its text has every collective, with the shapes of
# its results; of a gather or an all-to-all, an eighth is the rank's own and travels nowhere.

# %%
COLLECTIVE = re.compile(r"= (.*) (collective-permute|all-to-all|all-gather)(?:-start)?\(")


def bytes_sent(compiled):
    """Bytes that a rank sends in each kind of collective."""
    found = {}
    for line in compiled.as_text().splitlines():
        if match := COLLECTIVE.search(line):
            shapes, kind = match.groups()
            elements = sum(np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"\[([\d,]+)\]", shapes))
            share = 1 if kind == "collective-permute" else 1 - 1 / RANKS
            found[kind] = found.get(kind, 0) + int(4 * elements * share)  # all elements are of 4 bytes here
    return found


shard = -(-length // RANKS)
for name, program in programs.items():
    sends = bytes_sent(program.lower(*arguments).compile())
    print(f"{name:12}", ", ".join(f"{kind} {size:,}" for kind, size in sends.items()))
    tokens = shard * 8  # positions and segments
    keys, queries, states = shard * 2 * K * H * 4, shard * N * H * 4, shard * N * (H + 1) * 4
    assert sum(sends.values()) == (RANKS - 1) * (keys + tokens if name == "ring_pass_kv" else queries + states + tokens)

# %% [markdown]
# For N heads over K KV heads, a token's queries are N / 2K times the bytes of its keys and values. So pass-Q sends less
# only where new tokens are few beside cached ones. And its states come home in float32, after all attention, where
# nothing hides them.
#
# ## Which is faster
#
# `choose_ring` predicts the seconds of each exchange from a device's FLOP/s and its link, and says what the paper's
# equations say. Here: Llama 3 405B over 4 hosts of 8 H100, 128,000 tokens, of which more and more are new. (One ring is
# the GPUs of equal rank in the hosts: each has 16 query heads and one KV head.)

# %%
model = ModelShape(num_heads=16, num_kv_heads=1, head_size=128)
print(choose_ring(new_tokens=3_200, cached_tokens=124_800, num_ranks=4, model=model, hardware=H100_RDMA))

# %% [markdown]
# KVP is listed as well: it asks for the queries on all ranks, so that the rest of the layer is not divided by N. That
# is fine for decodes and small chunks, not for long prompts. Dashed: what pass-KV sends and attention doesn't hide.
# Dotted: one token in eight is new. Under that line, where more are new, keys are fewer bytes than queries
# (equation 1); yet pass-KV stays ahead far above it, as its hops are hidden and pass-Q's way home is not.

# %%
TOTAL = 128_000
new_tokens = np.unique(np.geomspace(64, TOTAL, 40).astype(int))
choices = [choose_ring(int(new), TOTAL - int(new), 4, model, H100_RDMA) for new in new_tokens]
with shown(panels=2, width=4.6) as (figure, (left, right)):
    for number, method in enumerate(("pass_kv", "pass_q", "kvp")):
        total = [1e6 * choice.times[method].total for choice in choices]
        left.loglog(new_tokens, total, color=COLORS[number], label=method)
    exposed = [1e6 * choice.times["pass_kv"].exposed for choice in choices]
    left.loglog(new_tokens, exposed, "--", color=COLORS[0], label="pass_kv, exposed")
    left.set(title="One layer, 128,000 tokens on 4 ranks", xlabel="new tokens", ylabel="predicted microseconds")
    left.legend()

    new_grid, cached_grid = np.geomspace(64, 1e6, 30), np.geomspace(1e3, 1e7, 30)
    gain = np.zeros((30, 30))  # above 0: pass-KV is the faster
    for row, column in np.ndindex(gain.shape):
        times = choose_ring(int(new_grid[column]), int(cached_grid[row]), 4, model, H100_RDMA).times
        gain[row, column] = np.log(times["pass_q"].total / times["pass_kv"].total)
    right.contourf(new_grid, cached_grid, gain, levels=(-9, 0, 9), colors=COLORS[1::-1], alpha=0.8)
    right.plot(new_grid, 7 * new_grid, color="k", ls=":")
    right.set(xscale="log", yscale="log", title="The faster ring", xlabel="new tokens", ylabel="cached tokens")
    right.text(3e4, 3e3, "pass-KV", color="w", size=11, ha="center")
    right.text(4e2, 1e6, "pass-Q", color="w", size=11, ha="center")
    right.set_ylim(1e3, 1e7)

assert choices[0].times["pass_q"].total < choices[0].times["pass_kv"].total  # 64 new tokens
assert choices[-1].method == "pass_kv"  # all are new
