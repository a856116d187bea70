"""Sampling: from logits to tokens on the device, each row with its own parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from longctx.parallel.mesh import index_of
from longctx.parallel.tensor import argmax, pmax
from longctx.serving.request.sampling_params import MAX_LOGIT_BIAS, SamplingLevel, SamplingParams

IN_PROMPT, IN_OUTPUT = 1, 2
"""What `seen` has of a token: `IN_PROMPT` if it occurs in the prompt, and `IN_OUTPUT` as often as in the output. In 32
bits that is exact, since no sequence has 2**31 tokens."""


def count_tokens(prompt: Int[np.ndarray, "P"], output: Int[np.ndarray, "T"], vocab_size: int) -> np.ndarray:
    """Return `seen` after prompt and output, uint32 `[vocab]`."""
    seen = IN_OUTPUT * np.bincount(output, minlength=vocab_size).astype(np.uint32)
    seen[prompt] |= IN_PROMPT
    return seen


class Controls(NamedTuple):
    """Sampling parameters of R rows."""

    # The first NUM_FLOATS fields are float32, the others int32.
    temperature: Float[Array, "R"]
    top_p: Float[Array, "R"]
    min_p: Float[Array, "R"]
    repetition_penalty: Float[Array, "R"]
    presence_penalty: Float[Array, "R"]
    frequency_penalty: Float[Array, "R"]
    top_k: Int[Array, "R"]  # 0 keeps all tokens
    seed: Int[Array, "R"]
    completion: Int[Array, "R"]  # index of the completion in its request

    @classmethod
    def row(cls, params: SamplingParams, seed: int, completion: int) -> np.ndarray:
        """Pack the parameters of one row: int32 `[fields]`, floats as their bits."""
        floats = np.array([getattr(params, name) for name in cls._fields[:NUM_FLOATS]], np.float32)
        return np.concatenate([floats.view(np.int32), np.array([params.top_k or 0, seed, completion], np.int32)])

    @classmethod
    def unpack(cls, rows: Int[Array, "R fields"]) -> "Controls":
        """Unpack rows that `row` has packed, int32 `[R, fields]`."""
        floats = lax.bitcast_convert_type(rows[:, :NUM_FLOATS], jnp.float32)
        return cls(*floats.T, *rows[:, NUM_FLOATS:].T)


NUM_FLOATS = 6


class LogitBias(NamedTuple):
    """Biases of R rows, `MAX_LOGIT_BIAS` of each; those that are not in use have token -1."""

    tokens: Int[Array, "R M"]
    values: Float[Array, "R M"]

    @classmethod
    def row(cls, params: SamplingParams) -> "LogitBias":
        """One row's: int32 and float32 `[M]`."""
        tokens, values = np.full(MAX_LOGIT_BIAS, -1, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
        for at, pair in enumerate(params.logit_bias):
            tokens[at], values[at] = pair
        return cls(tokens, values)  # type: ignore[arg-type]

    def add_to(self, logits: Float[Array, "R V"]) -> Float[Array, "R V"]:
        row = jnp.arange(len(logits), dtype=jnp.int32)[:, None]
        tokens = jnp.where(self.tokens < 0, logits.shape[1], self.tokens)
        return logits.at[row, tokens].add(self.values, mode="drop")


class SampledTokens(NamedTuple):
    """Sampled tokens, and the L most probable tokens of each row. Log probabilities are natural logs.

    Below `SamplingLevel.LOGPROBS` there are tokens alone.
    """

    tokens: Int[Array, "R"]  # -1: a logit is NaN or +inf, or all are -inf
    logprobs: Float[Array, "R"] | None = None
    top_tokens: Int[Array, "R L"] | None = None
    top_logprobs: Float[Array, "R L"] | None = None


def sample_tokens(
    logits: Float[Array, "R V_local"],
    level: SamplingLevel,
    controls: Controls,
    positions: Int[Array, "R"],
    seen: UInt32[Array, "R V"] | None = None,
    bias: LogitBias | None = None,
    mask: Int[Array, "R W"] | None = None,
    axes: tuple[str, ...] = (),
) -> Int[Array, "R"]:
    """Sample the next token of every row, with no sort and no branch.

    A token is the argmax of its logits, divided by the temperature, plus Gumbel noise. The noise depends on the row's
    seed, completion and position, and on the token. So a row gets the same token in any batch, at any level that
    computes what it asks for, and on any mesh.

    Args:
      logits: float32 `[R, V]`, or this device's shard of it, by vocabulary over `axes`.
      level: static; what is computed.
      controls: parameters of each row.
      positions: int32 `[R]`, positions of the new tokens.
      seen: uint32 `[R, V]`, how often each token occurs in prompt and output, see `count_tokens`; read from
        `SamplingLevel.FILTERS` on.
      bias: of each row, likewise.
      mask: int32 `[R, ceil(V / 32)]`, a bit for each token that may come, the lowest first; read from
        `SamplingLevel.MASKS` on. None: all may.
      axes: mesh axes over which the vocabulary is sharded, the slowest first; none from `MASKS` on.

    Returns:
      The tokens; -1 for a row with a logit that is NaN or +inf, or with no finite one.
    """
    if level >= SamplingLevel.MASKS:
        assert not axes, "masks, biases, penalties, top_k and top_p take logits of the whole vocabulary"
    if level >= SamplingLevel.FILTERS:
        logits = logits if bias is None else bias.add_to(logits)
        logits = logits if seen is None else _penalise(logits, seen, controls)
    if level >= SamplingLevel.MASKS and mask is not None:
        # A NaN stays one, so that it is found.
        logits = jnp.where(_unpack_bits(mask, logits.shape[1]) | jnp.isnan(logits), logits, -jnp.inf)
    if level == SamplingLevel.GREEDY:
        return argmax(logits, *axes)
    is_random = (controls.temperature > 0)[:, None]
    # Subtract the maximum first: large logits over a very low temperature would overflow.
    relative = logits - pmax(jnp.max(logits, -1, keepdims=True), *axes)
    scaled = relative / jnp.where(is_random, controls.temperature[:, None], 1)
    tokens = index_of(*axes) * logits.shape[1] + jnp.arange(logits.shape[1], dtype=jnp.int32)
    scores = jnp.where(_kept(scaled, controls, level), scaled + _gumbel(controls, positions, tokens), -jnp.inf)
    # A NaN stays one, so that `argmax` finds it: `where` could hide it.
    return argmax(jnp.where(is_random & ~jnp.isnan(scaled), scores, logits), *axes)


def token_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, "R"], num_top: int
) -> tuple[Float[Array, "R"], Int[Array, "R L"], Float[Array, "R L"]]:
    """Log probabilities `[R]` of tokens, and the `num_top` most probable tokens with theirs, both `[R, L]`."""
    logprobs = jax.nn.log_softmax(logits, -1)
    top_logprobs, top_tokens = lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], top_tokens.astype(jnp.int32), top_logprobs


def _unpack_bits(words: Int[Array, "R W"], size: int) -> Array:
    """The first `size` bits of each row's numbers of 32 bits, the lowest first: bool `[R, size]`."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]) & 1
    return bits.reshape(len(words), -1)[:, :size] == 1


def _penalise(logits: Array, seen: Array, controls: Controls) -> Array:
    repetition, presence, frequency = (
        x[:, None] for x in (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    count = seen // IN_OUTPUT
    return logits - jnp.where(count > 0, presence, 0) - count.astype(jnp.float32) * frequency


def _kept(logits: Array, controls: Controls, level: SamplingLevel) -> Array:
    """Mask of the tokens that top_k, then top_p, then min_p keep, ties with the last one included.

    `logits` `[R, V]` have a maximum of 0.
    """
    kept = logits >= jnp.log(controls.min_p)[:, None]
    if level < SamplingLevel.FILTERS:
        return kept
    # Of floats that are not negative, the bits are in the order of the values.
    distance = lax.bitcast_convert_type(jnp.abs(logits), jnp.uint32)
    top_k = jnp.where(controls.top_k > 0, controls.top_k.astype(jnp.float32), jnp.inf)
    kept &= (in_top_k := distance <= _farthest(distance, jnp.ones_like(logits), top_k)[:, None])
    weights = jnp.where(in_top_k, jnp.exp(logits), 0)
    top_p = jnp.where(controls.top_p < 1, controls.top_p * jnp.sum(weights, -1), jnp.inf)
    return kept & (distance <= _farthest(distance, weights, top_p)[:, None])


def _farthest(distance: UInt32[Array, "R V"], weights: Float[Array, "R V"], limit: Float[Array, "R"]) -> Array:
    """The largest distance of each row such that the weights of all tokens nearer than it sum to less than the limit.

    So a token is kept while what is before it stays below the limit. The search takes two bits of the result a pass,
    and each pass sums the weights in the same order: rounded sums grow with the distance, as exact ones do.
    """
    farthest = jnp.zeros(len(distance), jnp.uint32)
    for shift in range(30, -1, -2):
        more = farthest[:, None] + (jnp.arange(1, 4, dtype=jnp.uint32)[None] << shift)
        nearer = jnp.where(distance[:, None] < more[:, :, None], weights[:, None], 0)
        is_below = jnp.sum(nearer, -1) < limit[:, None]
        farthest += jnp.sum(is_below, -1, dtype=jnp.uint32) << shift
    return farthest


def _gumbel(controls: Controls, positions: Array, tokens: Int[Array, "V"]) -> Float[Array, "R V"]:
    """Gumbel noise: the negative log of an exponential variate for each row and token."""

    def bits(seed: Array, completion: Array, position: Array) -> Array:
        # With each fold, a key is hashed together with a number: what comes of a token's are 64 random bits.
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, completion), position)
        return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, tokens))

    high, low = jnp.moveaxis(jax.vmap(bits)(controls.seed, controls.completion, positions), -1, 0).astype(jnp.float32)
    # Between 0 and 1, both excluded. The lower bits count where the higher ones are few: the most probable outcome is
    # decided by the smallest numbers, so these must be as precise as others.
    uniform = jnp.minimum((high + (low + 0.5) * 2.0**-32) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
