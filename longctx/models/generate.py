"""Generation on one device: a prompt is read in chunks of fixed size, then tokens are written one by one."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from longctx.models.kv_cache import KVCache, attend_to_cache
from longctx.models.llama import Llama, check_tokens
from longctx.models.params import Params, arrange_for_cpu
from longctx.models.sampling import GREEDY, Sampling


class Context:
    """One sequence that a model has read and can continue.

    Reading and writing append to it; `rewind` forgets the end of it, so that several questions about one document
    read that only once.
    """

    def __init__(self, model: Llama, params: Params, capacity: int, chunk_size: int = 1024) -> None:
        """An empty context for at most `capacity` tokens, read in chunks of at most `chunk_size`.

        Raises:
          ValueError: `capacity` is not positive or more than the model's context, or `chunk_size` not positive.
        """
        config = model.config
        if not 1 <= capacity <= config.max_positions:
            raise ValueError(f"capacity must be 1 to the model's context of {config.max_positions}, got {capacity}")
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be positive, got {chunk_size}")
        self._model, self._capacity, self._chunk_size = model, capacity, chunk_size
        self._params = arrange_for_cpu(params)
        # A last chunk is padded up to its bucket, and so may reach this far beyond the last token.
        embed = params["embed"]
        # Where the parameters are: an array not committed to a device would compile the first step twice.
        self._cache = KVCache.empty(config, capacity + chunk_size, embed.dtype, embed.sharding)
        self._logits: Array | None = None
        self.length = 0
        self._turn = 0  # one iterator at a time may write

    def read(self, tokens: Sequence[int] | np.ndarray | Array, progress: Callable[[int], object] | None = None) -> None:
        """Append tokens `[T]`; `progress` is called with the number of tokens of each chunk when it is done.

        Raises:
          TypeError, ValueError: no tokens, not integers, ids out of range, or more than there is room for.
        """
        ids = np.asarray(check_tokens(self._model.config, np.asarray(tokens)))
        if ids.ndim != 1:
            raise ValueError(f"tokens must be one sequence [T], got shape {ids.shape}")
        self._check_room(len(ids))
        self._turn += 1
        for first in range(0, len(ids), self._chunk_size):
            chunk = ids[first : first + self._chunk_size]
            padded = np.zeros(self._bucket(len(chunk)), np.int32)
            padded[: len(chunk)] = chunk
            self._logits, self._cache = _step(
                self._model,
                self._params,
                self._cache,
                padded,
                np.int32(self.length),
                np.int32(len(chunk) - 1),
            )
            self.length += len(chunk)
            if progress is not None:
                self._logits.block_until_ready()
                progress(len(chunk))

    def write(self, max_tokens: int, sampling: Sampling = GREEDY, stop_ids: Iterable[int] = ()) -> Iterator[int]:
        """Continue: yields up to `max_tokens` tokens as they come, ending before the first of `stop_ids`.

        What was yielded is part of the context. Reading, rewinding or writing anew ends an earlier writing.

        Raises:
          ValueError: `max_tokens` is not positive or more than there is room for, or nothing has been read.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if self._logits is None:
            raise ValueError("nothing has been read that could be continued")
        self._check_room(max_tokens)
        self._turn += 1
        return self._write(max_tokens, sampling, frozenset(stop_ids), self._turn)

    def _write(self, max_tokens: int, sampling: Sampling, stop_ids: frozenset[int], turn: int) -> Iterator[int]:
        seedless = dataclasses.replace(sampling, seed=0)  # else every seed would compile anew
        for _ in range(max_tokens):
            if turn != self._turn:
                raise RuntimeError("the context has been read to, written to or rewound since this writing began")
            token = int(_draw(seedless, sampling.seed, self._logits, np.int32(self.length)))
            if token in stop_ids:
                return
            self._logits, self._cache = _step(
                self._model, self._params, self._cache, np.array([token], np.int32), np.int32(self.length), np.int32(0)
            )
            self.length += 1
            yield token

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. Read something before writing again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be 0 to {self.length}, got {length}")
        self.length, self._logits = length, None
        self._turn += 1

    def _check_room(self, num_tokens: int) -> None:
        if self.length + num_tokens > self._capacity:
            raise ValueError(
                f"{num_tokens} more tokens after {self.length} don't fit into a context of capacity {self._capacity}"
            )

    def _bucket(self, num_tokens: int) -> int:
        """The chunk sizes that are compiled: `chunk_size` and its quarters of quarters."""
        bucket = self._chunk_size
        while bucket // 4 >= num_tokens:
            bucket //= 4
        return bucket


def generate(
    model: Llama,
    params: Params,
    prompt: Sequence[int] | np.ndarray | Array,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    stop_ids: Iterable[int] | None = None,
    chunk_size: int = 1024,
) -> Iterator[int]:
    """Yield the tokens that continue a prompt.

    Args:
      model, params: as from `load_checkpoint`.
      prompt: token ids `[T]`.
      max_tokens: how many tokens at most.
      sampling: greedy by default.
      stop_ids: tokens that end the text and are not part of it; None takes the model's own `eos_ids`.
      chunk_size: tokens of the prompt that are read at a time.

    Raises:
      TypeError, ValueError: an empty prompt, ids out of range, more tokens than the model's context holds.
    """
    tokens = np.asarray(check_tokens(model.config, np.asarray(prompt)))
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    capacity = tokens.shape[-1] + max_tokens
    if capacity > model.config.max_positions:
        raise ValueError(
            f"prompt and max_tokens make {tokens.shape[-1]} + {max_tokens} tokens, "
            f"more than the model's context of {model.config.max_positions}"
        )
    context = Context(model, params, capacity, chunk_size)
    context.read(tokens)
    return context.write(max_tokens, sampling, model.config.eos_ids if stop_ids is None else stop_ids)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _step(
    model: Llama, params: Params, cache: KVCache, tokens: Array, start: Array, last: Array
) -> tuple[Array, KVCache]:
    """Read tokens `[T]` at positions `start` on; logits `[vocab]` after token `last` of them, and the cache."""
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden, cache = model.forward(params, tokens, positions, attend_to_cache(positions), cache)
    hidden = lax.dynamic_index_in_dim(hidden, last, keepdims=False)
    return model.logits(params, hidden), cache


@functools.partial(jax.jit, static_argnums=0)
def _draw(sampling: Sampling, seed: Array, logits: Array, position: Array) -> Array:
    return sampling.draw(logits, position, seed)
