"""From logits to tokens, on the device, each row with its own parameters."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.serving.request.request import SamplingParams

IN_PROMPT, IN_OUTPUT = 1, 2  # bits of `seen`


class Controls(NamedTuple):
    """Sampling parameters, an array `[R]` each, R rows."""

    temperature: Array  # float32 up to here: see FLOATS
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    presence_penalty: Array
    top_k: Array  # int32 from here; 0 keeps all
    seed: Array
    sample: Array

    @classmethod
    def row(cls, params: SamplingParams, seed: int, sample: int) -> np.ndarray:
        """What `unpack` reads: int32 `[fields]`, floats as their bits."""
        floats = np.array([getattr(params, name) for name in cls._fields[:FLOATS]], np.float32)
        return np.concatenate([floats.view(np.int32), np.array([params.top_k or 0, seed, sample], np.int32)])

    @classmethod
    def unpack(cls, rows: Array) -> "Controls":
        """From int32 `[R, fields]`."""
        floats = lax.bitcast_convert_type(rows[:, :FLOATS], jnp.float32)
        return cls(*floats.T, *rows[:, FLOATS:].T)


FLOATS = 5


class Drawn(NamedTuple):
    """Tokens `[R]` int32; of each its log probability `[R]`, and the likeliest tokens and theirs `[R, L]`."""

    tokens: Array
    logprobs: Array
    top_tokens: Array
    top_logprobs: Array


def draw(logits: Array, seen: Array, controls: Controls, positions: Array, num_top: int) -> Drawn:
    """The next token of every row.

    Args:
      logits: float32 `[R, V]`.
      seen: uint8 `[R, V]`, which tokens are in prompt and output (`IN_PROMPT`, `IN_OUTPUT`).
      positions: int32 `[R]`, of the new tokens. With seed and sample it is all that a draw depends on.
      num_top: L, how many likeliest tokens to tell of.
    """
    tokens = _draw_rows(logits, seen, controls, positions)
    return Drawn(tokens, *token_logprobs(logits, tokens, num_top))


def token_logprobs(logits: Array, tokens: Array, num_top: int) -> tuple[Array, Array, Array]:
    """Log probabilities of tokens `[R]`, and the `num_top` likeliest tokens with theirs `[R, L]`."""
    logprobs = jax.nn.log_softmax(logits, -1)
    top_logprobs, top_tokens = lax.top_k(logprobs, num_top)
    return jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], top_tokens.astype(jnp.int32), top_logprobs


def _draw_rows(logits: Array, seen: Array, controls: Controls, positions: Array) -> Array:
    logits = _penalise(logits, seen, controls)
    greedy = jnp.argmax(logits, -1).astype(jnp.int32)
    warm = controls.temperature > 0
    # The maximum first: a very low temperature would make infinities of large logits.
    logits = (logits - jnp.max(logits, -1, keepdims=True)) / jnp.where(warm, controls.temperature, 1)[:, None]
    weights = jnp.where(_kept(logits, controls), jnp.exp(logits), 0)
    # By inversion, in the order of the vocabulary: one number a row, and near ties change nothing.
    cumulated = jnp.cumsum(weights, -1)
    threshold = _uniform(controls, positions) * cumulated[:, -1]
    # Sums of parts round differently: only tokens with a weight count, and if none is beyond the threshold, the last.
    beyond = (cumulated > threshold[:, None]) & (weights > 0)
    last = logits.shape[1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    drawn = jnp.where(jnp.any(beyond, -1), jnp.argmax(beyond, -1), last)
    return jnp.where(warm, drawn.astype(jnp.int32), greedy)


def _penalise(logits: Array, seen: Array, controls: Controls) -> Array:
    repetition, presence = controls.repetition_penalty[:, None], controls.presence_penalty[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    return logits - jnp.where(seen & IN_OUTPUT > 0, presence, 0)


def _kept(logits: Array, controls: Controls) -> Array:
    """Which tokens top_k, then top_p, then min_p leave; logits `[R, V]` with maximum 0. Ties with the last stay."""
    vocab = logits.shape[1]
    ordered = jnp.sort(logits, -1, descending=True)
    num_kept = jnp.where(controls.top_k > 0, jnp.minimum(controls.top_k, vocab), vocab)
    weights = jnp.where(jnp.arange(vocab)[None] < num_kept[:, None], jnp.exp(ordered), 0)
    # A token stays if those before it don't yet reach top_p, so the likeliest always does.
    before = jnp.cumsum(weights, -1) - weights
    reached = controls.top_p * jnp.sum(weights, -1)
    stays = jnp.sum((before < reached[:, None]) & (weights > 0), -1)
    num_kept = jnp.where(controls.top_p < 1, jnp.minimum(num_kept, jnp.maximum(stays, 1)), num_kept)
    least = jnp.take_along_axis(ordered, num_kept[:, None] - 1, 1)
    return (logits >= least) & (logits >= jnp.log(controls.min_p)[:, None])


def _uniform(controls: Controls, positions: Array) -> Array:
    def one(seed: Array, sample: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), sample), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(controls.seed, controls.sample, positions)
