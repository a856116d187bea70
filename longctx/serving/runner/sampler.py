"""Sampling: from logits to tokens on the device, each row with its own parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from longctx.serving.request.sampling_params import MAX_LOGIT_BIAS, SamplingParams

IN_PROMPT, IN_OUTPUT = 1, 2
"""What `seen` has of a token: `IN_PROMPT` if it occurs in the prompt, and `IN_OUTPUT` as often as in the output. In 32
bits that is exact, since no sequence has 2**31 tokens."""


def count_tokens(prompt: Int[np.ndarray, "P"], output: Int[np.ndarray, "T"], vocab_size: int) -> np.ndarray:
    """What has been `seen` after prompt and output, uint32 `[vocab]`."""
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
    """Sampled tokens, and the L most probable tokens of each row. Log probabilities are natural logs."""

    tokens: Int[Array, "R"]  # -1: a logit is NaN or +inf, or all are -inf
    logprobs: Float[Array, "R"]
    top_tokens: Int[Array, "R L"]
    top_logprobs: Float[Array, "R L"]


def sample_tokens(
    logits: Float[Array, "R V"],
    seen: UInt32[Array, "R V"],
    controls: Controls,
    positions: Int[Array, "R"],
    num_top: int,
    bias: LogitBias | None = None,
) -> SampledTokens:
    """Sample the next token of every row.

    Args:
      logits: float32 `[R, V]`.
      seen: uint32 `[R, V]`, how often each token occurs in prompt and output, see `count_tokens`.
      controls: parameters of each row.
      positions: int32 `[R]`, positions of the new tokens. The random number of a row depends on its seed, completion
        and position only, so a token does not depend on the batch that it is sampled in.
      num_top: L, how many of the most probable tokens to return.
      bias: of each row. Log probabilities are those without biases and penalties.
    """
    is_finite = jnp.isfinite(jnp.max(logits, -1))
    biased = logits if bias is None else bias.add_to(logits)
    tokens = jnp.where(is_finite, _sample_rows(biased, seen, controls, positions), -1)
    return SampledTokens(tokens, *token_logprobs(logits, tokens, num_top))


def token_logprobs(
    logits: Float[Array, "R V"], tokens: Int[Array, "R"], num_top: int
) -> tuple[Float[Array, "R"], Int[Array, "R L"], Float[Array, "R L"]]:
    """Log probabilities `[R]` of tokens, and the `num_top` most probable tokens with theirs, both `[R, L]`."""
    logprobs = jax.nn.log_softmax(logits, -1)
    top_logprobs, top_tokens = lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], top_tokens.astype(jnp.int32), top_logprobs


def _sample_rows(logits: Array, seen: Array, controls: Controls, positions: Array) -> Array:
    logits = _penalise(logits, seen, controls)
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    warm = controls.temperature > 0
    # Subtract the maximum first: large logits over a very low temperature would overflow.
    logits = (logits - jnp.max(logits, -1, keepdims=True)) / jnp.where(warm, controls.temperature, 1)[:, None]
    weights = jnp.where(_kept(logits, controls), jnp.exp(logits), 0)
    # Inversion in vocabulary order takes one random number a row, and near ties don't change the result.
    cumulative = jnp.cumsum(weights, -1)
    threshold = _uniform(controls, positions) * cumulative[:, -1]
    # Prefix sums may round differently, so only tokens with a weight count, and the last such token is the fallback.
    beyond = (cumulative > threshold[:, None]) & (weights > 0)
    last = logits.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    sampled = jnp.where(jnp.any(beyond, -1), jnp.argmax(beyond, -1), last)
    return jnp.where(warm, sampled.astype(jnp.int32), greedy)


def _penalise(logits: Array, seen: Array, controls: Controls) -> Array:
    repetition, presence, frequency = (
        x[:, None] for x in (controls.repetition_penalty, controls.presence_penalty, controls.frequency_penalty)
    )
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    count = seen // IN_OUTPUT
    return logits - jnp.where(count > 0, presence, 0) - count.astype(jnp.float32) * frequency


def _kept(logits: Array, controls: Controls) -> Array:
    """Mask of the tokens that top_k, then top_p, then min_p keep, ties with the last one included.

    `logits` `[R, V]` have a maximum of 0.
    """
    vocab = logits.shape[1]
    ordered = jnp.sort(logits, -1, descending=True)
    num_kept = jnp.where(controls.top_k > 0, jnp.minimum(controls.top_k, vocab), vocab)
    weights = jnp.where(jnp.arange(vocab)[None] < num_kept[:, None], jnp.exp(ordered), 0)
    # A token is kept while the tokens before it stay below top_p, so the most probable one always is.
    before = jnp.cumsum(weights, -1) - weights
    limit = controls.top_p * jnp.sum(weights, -1)
    below_limit = jnp.sum((before < limit[:, None]) & (weights > 0), -1)
    num_kept = jnp.where(controls.top_p < 1, jnp.minimum(num_kept, jnp.maximum(below_limit, 1)), num_kept)
    least = jnp.take_along_axis(ordered, num_kept[:, None] - 1, 1)
    return (logits >= least) & (logits >= jnp.log(controls.min_p)[:, None])


def _uniform(controls: Controls, positions: Array) -> Array:
    def one(seed: Array, completion: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), completion), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(controls.seed, controls.completion, positions)
