# %% [markdown]
# # Attention returns a state, and states merge
#
# Attention to a set of keys is a pair `(out, lse)`: the weighted mean of the values, and the logarithm of the sum of
# the weights. Pairs of disjoint key sets merge into the pair of their union. Ring attention, split-KV decode, a cached
# prefix and KV parallelism are all this one rule, applied to different parts. This notebook derives it, checks it, and
# shows where precision is lost.
#
# It takes about 20 seconds on a laptop.

# %%
import jax
import jax.numpy as jnp
import numpy as np

from longctx.kernels import attention, merge_state, merge_states
from longctx.plotting import COLORS, shown

jax.config.update("jax_platforms", "cpu")

# %% [markdown]
# ## The state
#
# One query has a score $s_j$ for key $j$. Over a set of keys $A$,
#
# $$\mathrm{lse}_A = \log \sum_{j \in A} e^{s_j}, \qquad \mathrm{out}_A = \sum_{j \in A} e^{s_j - \mathrm{lse}_A} v_j.$$
#
# `attention` returns both. Shapes have JAX's letters: T queries, S keys, N query heads, K key/value heads, H head size.

# %%
T, N, K, H = 512, 8, 2, 64
q, k, v = (jax.random.normal(jax.random.key(seed), (T, heads, H)) for seed, heads in enumerate((N, K, K)))
q = 2 * q  # some keys then have most of the weight, as in trained models
out, lse = attention(q, k, v)
print("out", out.shape, out.dtype, "  lse", lse.shape, lse.dtype)

# %% [markdown]
# The oracle is ten lines of NumPy in float64, from the definition. A mask compares positions: a query sees a key that
# is not after it.


# %%
def dense(q, k, v, q_positions, kv_positions):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))  # grouped-query attention
    scores = np.einsum("tnh,snh->tns", q, k) * q.shape[-1] ** -0.5
    scores = np.where(kv_positions <= q_positions[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    lse = np.log(weights.sum(-1)) + scores.max(-1)
    return np.einsum("tns,snh->tnh", weights / weights.sum(-1, keepdims=True), v), lse


positions = np.arange(T)
exact_out, exact_lse = dense(q, k, v, positions, positions)
np.testing.assert_allclose(out, exact_out, rtol=0, atol=1e-5)
np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=1e-5)

# %% [markdown]
# ## Merging
#
# Softmax over the union of $A$ and $B$ divides by $e^{\mathrm{lse}_A} + e^{\mathrm{lse}_B}$, so each part only needs a
# new weight:
#
# $$\mathrm{lse} = \log(e^{\mathrm{lse}_A} + e^{\mathrm{lse}_B}), \qquad
# \mathrm{out} = e^{\mathrm{lse}_A - \mathrm{lse}} \mathrm{out}_A + e^{\mathrm{lse}_B - \mathrm{lse}} \mathrm{out}_B.$$
#
# No score, key or value is needed again. Here the keys are in two parts, cut at position 200. Queries before it see
# nothing of the second part, and the rule covers that too.


# %%
def attend_to(part, **options):
    """The state of all queries over some of the keys: masks come from positions, so parts need no care."""
    part = np.asarray(part)
    return attention(q, k[part], v[part], q_positions=positions, kv_positions=part, **options)


first, second = attend_to(range(200)), attend_to(range(200, T))
merged, merged_lse = merge_state(*first, *second)
np.testing.assert_allclose(merged, exact_out, rtol=0, atol=1e-5)
np.testing.assert_allclose(merged_lse, exact_lse, rtol=0, atol=1e-5)
print("merged equals dense within 1e-5")

# %% [markdown]
# The weight of a part, $e^{\mathrm{lse}_A - \mathrm{lse}}$, is the share of the softmax that its keys have. In eight
# parts of 64 keys, each query divides its attention like this. White: the part is in the query's future, and its
# weight is exactly 0.

# %%
parts = np.array_split(np.arange(T), 8)
states = [attend_to(part) for part in parts]
outs, lses = (jnp.stack(each) for each in zip(*states, strict=True))
out_8, lse_8 = merge_states(outs, lses)
np.testing.assert_allclose(out_8, exact_out, rtol=0, atol=1e-5)

shares = np.exp(lses - lse_8)  # [parts, T, N]
assert np.allclose(shares.sum(0), 1, atol=1e-5)
with shown(panels=2, width=4.6) as (figure, (left, right)):
    every = slice(None, None, 8)
    left.stackplot(positions[every], shares[:, every, 0], colors=[*COLORS[:6], "#f0e442", COLORS[7]], linewidth=0)
    left.set(title="Share of each part in the softmax, head 0", xlabel="query position", ylabel="share")
    left.margins(0)
    mean = shares.mean(-1).reshape(8, 8, 64).mean(-1)  # over heads, and over blocks of 64 queries
    right.pcolormesh(np.where(mean.T > 0, mean.T, np.nan), cmap="viridis", vmin=0, vmax=1)
    for row in range(8):
        for column in range(row + 1):
            share = mean[column, row]
            right.text(
                column + 0.5,
                row + 0.5,
                f"{share:.2f}",
                ha="center",
                va="center_baseline",
                color="w" if share < 0.6 else "k",
                size=7,
            )
    right.set(title="Mean share, all heads", xlabel="part of the keys", ylabel="part of the queries", aspect="equal")
    right.invert_yaxis()
    right.grid(visible=False)

# %% [markdown]
# The lse is what makes it exact. The mean of the parts' outputs, which forgets it, is wrong wherever parts have
# unequal shares:

# %%
seen = np.isfinite(lses).sum(0)[..., None]  # how many parts each query sees
plain_mean = np.asarray(outs).sum(0) / seen


def error_by_block(found):
    """The largest error in each block of 16 queries."""
    return np.abs(found - exact_out).max((1, 2)).reshape(-1, 16).max(1)


wrong, right = error_by_block(plain_mean), error_by_block(np.asarray(out_8))
assert wrong[4:].min() > 0.1  # queries of the first part see one part alone, which is right
assert right.max() < 1e-5
with shown(width=7, height=2.6) as (figure, (axes,)):
    axes.semilogy(positions[::16], wrong, label="mean of the parts' outputs", color=COLORS[1])
    axes.semilogy(positions[::16], right, label="merge_states", color=COLORS[0])
    axes.set(xlabel="query position", ylabel="largest error", title="Merged from eight parts, against float64")
    axes.legend()

# %% [markdown]
# ## Any parts, any order
#
# The rule is associative and commutative: ranks of a ring see the shards in different orders and get the same answer
# but for rounding. It has a neutral element, `(0, -inf)`, the state of a query that sees nothing. Merging with it
# changes no bit, and never makes NaN.

# %%
rng = np.random.default_rng(0)
for _ in range(5):
    tokens = np.sort(rng.permutation(T).reshape(8, 64), axis=1)  # any token in any part
    shuffled = [attend_to(tokens[i]) for i in rng.permutation(8)]
    state = shuffled[0]
    for other in shuffled[1:]:
        state = merge_state(*state, *other)
    np.testing.assert_allclose(state[0], exact_out, rtol=0, atol=1e-5)

nothing = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
same_out, same_lse = merge_state(out, lse, *nothing)
assert (same_out == out).all()
assert (same_lse == lse).all()
none_out, none_lse = merge_state(*nothing, *nothing)
assert (none_out == 0).all()
assert (none_lse == -jnp.inf).all()

# %% [markdown]
# Both exponents of the rule are at most 0, so nothing overflows, however large scores are. The sum of exponentials
# itself, which a naive merge would carry, is far beyond float32:

# %%
far = attention(40 * q, 40 * k, v)[1]
overflows = np.asarray(far) > np.log(np.finfo(np.float32).max)
print(f"e^lse overflows float32 for {overflows.mean():.0%} of the queries")
halves = [
    attention(40 * q, 40 * k[part], v[part], q_positions=positions, kv_positions=part)
    for part in np.split(positions, 2)
]
assert np.isfinite(merge_state(*halves[0], *halves[1])[0]).all()

# %% [markdown]
# ## Where precision goes
#
# States must stay float32 until the last merge. If a partial `out` is rounded to bfloat16 at each hop, as in a ring
# that carries its result in the model's dtype, every hop adds an error, and the error grows with the ring. (Queries,
# keys and values are float32 here, so that no other rounding counts.)


# %%
def merged_in_ring(num_parts, dtype):
    """Root mean square error of a ring of hops that keeps its partial result in a dtype."""
    state = None
    for part in np.split(positions, num_parts):
        hop = attend_to(part)
        state = hop if state is None else merge_state(*state, *hop)
        state = state[0].astype(dtype).astype(jnp.float32), state[1]
    error = np.asarray(state[0], np.float64) - exact_out
    return np.sqrt(np.mean(error**2))


counts = (1, 2, 4, 8, 16, 32, 64)
errors = {dtype: [merged_in_ring(count, dtype) for count in counts] for dtype in ("float32", "bfloat16")}
last_rounding = errors["bfloat16"][0]  # one part: a single rounding, of the result
with shown(width=6, height=3) as (figure, (axes,)):
    axes.loglog(counts, errors["bfloat16"], "s-", color=COLORS[1], label="partial results in bfloat16")
    axes.axhline(last_rounding, ls="--", color=COLORS[7], label="one rounding to bfloat16, at the end")
    axes.loglog(counts, errors["float32"], "o-", color=COLORS[0], label="partial results in float32")
    axes.set(xlabel="parts", ylabel="RMS error of out", title="Merging in two precisions")
    axes.set_xticks(counts, counts)
    axes.legend()
growth = errors["bfloat16"][-1] / last_rounding
print(f"64 parts in bfloat16: {growth:.1f} times the error of one rounding")
assert growth > 1.5
assert max(errors["float32"]) < last_rounding / 100

# %% [markdown]
# ## Gradients
#
# A merge is an ordinary function, so gradients flow through it. Those of merged parts equal those of one call.


# %%
def loss_of_whole(q, k, v):
    return (attention(q, k, v)[0] ** 2).sum()


def loss_of_parts(q, k, v):
    halves = [
        attention(q, k[part], v[part], q_positions=positions, kv_positions=part) for part in np.split(positions, 2)
    ]
    return (merge_state(*halves[0], *halves[1])[0] ** 2).sum()


whole, parts = (jax.grad(loss, (0, 1, 2))(q, k, v) for loss in (loss_of_whole, loss_of_parts))
for a, b in zip(whole, parts, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

# %% [markdown]
# ## What it is for
#
# | parts | who computes them | what moves | name |
# |---|---|---|---|
# | cached prefix, new tokens | one device | nothing | prefix caching |
# | ranges of a long cache | groups of cores | states, within the device | split-KV decode |
# | shards of a sequence | ranks of a ring | keys and values | ring pass-KV |
# | shards of a cache | ranks of a ring | queries, then states | ring pass-Q |
# | shards of a cache | ranks that all have the queries | states | KV parallelism |
#
# The first line, as an example: 448 tokens are cached, 64 are new.

# %%
old, new = positions[:448], positions[448:]
cached = attention(q[new], k[old], v[old], q_positions=new, kv_positions=old)
fresh = attention(q[new], k[new], v[new])
state = merge_state(*cached, *fresh)
np.testing.assert_allclose(state[0], exact_out[new], rtol=0, atol=1e-5)
print("prefix and new tokens, merged, equal the whole prompt")

# %% [markdown]
# Next: `02_ring_and_pass_q` moves the parts over eight devices.
