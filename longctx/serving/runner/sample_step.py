"""The program that samples after a step, for each level of sampling.

It is apart from the programs that run layers, as it is the same for all numbers of their rows. The host knows what the
rows of a batch ask for, and runs the program of the highest level among them (`SampleInputs.level`): so devices take no
branch, which on GPUs the host would have to read or a command buffer to hold.
"""

import functools
import threading
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Shaped, UInt32

from longctx.models import Llama
from longctx.models.params import Params
from longctx.models.sharded_params import sharded_specs
from longctx.parallel.mesh import index_of, named_sharding, present, shard_map, size_of
from longctx.parallel.tensor import all_gather_vocabulary, psum
from longctx.serving.request.sampling_params import SamplingLevel
from longctx.serving.request.token_mask import mask_words
from longctx.serving.runner.sampler import (
    IN_OUTPUT,
    Controls,
    LogitBias,
    SampledTokens,
    sample_tokens,
    token_logprobs,
)
from longctx.serving.runner.step_inputs import SampleInputs, Shape

VOCABULARY_AXES = ("tensor", "stage")
"""Mesh axes that the head's vocabulary is sharded over, the slowest first."""

_COMPILING = threading.Lock()  # so that threads that compile do not compile the same program twice


@functools.cache
def sample_program(mesh: Mesh) -> Any:
    """`sample_step`, jitted for a mesh."""
    sharding = named_sharding(mesh, P())
    return jax.jit(sample_step, static_argnums=(0, 1, 2, 3), donate_argnums=5, out_shardings=sharding)


def compile_samplers(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    params: Params,
    state: Any,
    samples: Any,
    levels: Iterable[SamplingLevel] = SamplingLevel,
) -> dict[SamplingLevel, Any]:
    """Compile the programs of levels for a step's shape, with its `DeviceState` and packed `SampleInputs`.

    Of arrays, only shapes, dtypes and shardings are used.
    """
    size, dtype = (shape.ranks * shape.samples, model.config.hidden_size), params["embed"].dtype
    last_rows = jax.ShapeDtypeStruct(size, dtype, sharding=named_sharding(mesh, P("context")))
    arguments = outer_params(params), (state.last_token, state.seen), state.bias, last_rows, samples
    masks = jax.ShapeDtypeStruct(
        mask_size(model.config.vocab_size, shape), jnp.int32, sharding=named_sharding(mesh, P())
    )
    program, compiled = sample_program(mesh), {}
    with _COMPILING:
        for level in levels:
            more = (masks,) if level >= SamplingLevel.MASKS else (None,)
            compiled[level] = program.lower(model, mesh, shape.of_samples, level, *arguments, *more).compile()
    return compiled


def mask_size(vocab_size: int, shape: Shape) -> tuple[int, int, int]:
    """Return the shape of the masks of a step's samples, int32 `[ranks, samples, words]`, see `TokenMask`."""
    return shape.ranks, shape.samples, mask_words(vocab_size)


def outer_params(params: Params) -> Params:
    """The parameters outside the layers."""
    return params | {"layers": ()}


def sample_step(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    level: SamplingLevel,
    outer: Params,
    tokens: tuple[Int[Array, "slots"], UInt32[Array, "slots vocab"]],
    bias: LogitBias,
    last_rows: Float[Array, "R D"],
    samples: Int[Array, "length"],
    masks: Int[Array, "ranks samples words"] | None = None,
) -> tuple[SampledTokens, tuple[Int[Array, "slots"], UInt32[Array, "slots vocab"]]]:
    """Sample on each rank for its own rows; then gather the tokens of all ranks, and count them.

    Args:
      shape: `Shape.of_samples` of the step.
      outer: the parameters outside the layers.
      tokens: `DeviceState.last_token` and `seen`.
      last_rows: the rows to sample from, as `step` returns them.
      samples: a packed `SampleInputs`.
      masks: of the tokens that may come, from `SamplingLevel.MASKS` on; None below.

    Returns:
      (sampled tokens, ranks one after another; `tokens`).
    """

    def on_device(
        outer: Params,
        tokens: tuple[Array, Array],
        bias: LogitBias,
        rows: Array,
        samples: Array,
        masks: Array | None,
    ) -> Any:
        (last_token, seen), inputs = tokens, SampleInputs.views(samples, shape)
        sampled = _sample_rows(model, mesh, shape, level, outer, seen, bias, rows, inputs, masks)
        sampled = jax.tree.map(lambda x: all_gather(x, "context"), sampled)
        slots, chosen = inputs.slots.reshape(-1), jnp.maximum(sampled.tokens, 0)
        at = padding_out_of_bounds(slots, last_token)
        seen = seen.at[at, chosen].add(jnp.uint32(IN_OUTPUT), mode="drop")
        return sampled, (last_token.at[at].set(chosen, mode="drop"), seen)

    specs = sharded_specs(outer, model.config, mesh), P(), P(), P("context"), P(), P()
    return shard_map(on_device, mesh, specs, P())(outer, tokens, bias, last_rows, samples, masks)


def _sample_rows(
    model: Llama,
    mesh: Mesh,
    shape: Shape,
    level: SamplingLevel,
    outer: Params,
    seen: Array,
    bias: LogitBias,
    rows: Array,
    inputs: SampleInputs,
    masks: Array | None,
) -> SampledTokens:
    """On a device: sample for the rank's rows. Below `MASKS` the vocabulary stays sharded."""
    rank, logits = index_of("context"), local_logits(model, mesh, outer, rows)
    controls, positions = Controls.unpack(inputs.controls[rank]), inputs.positions[rank]
    if level < SamplingLevel.MASKS:
        return SampledTokens(sample_tokens(logits, level, controls, positions, axes=VOCABULARY_AXES))
    logits = all_gather_vocabulary(logits, *VOCABULARY_AXES)[:, : model.config.vocab_size]
    own_mask, own_seen, own_bias = None if masks is None else masks[rank], None, None
    if level >= SamplingLevel.FILTERS:
        own_seen, *biases = (x[jnp.maximum(inputs.slots[rank], 0)] for x in (seen, *bias))
        own_bias = LogitBias(*biases)
    tokens = sample_tokens(logits, level, controls, positions, own_seen, own_bias, own_mask)
    logprobs = token_logprobs(logits, tokens, shape.num_top) if level == SamplingLevel.LOGPROBS else ()
    return SampledTokens(tokens, *logprobs)


def all_gather(x: Shaped[Array, "n *rest"], axis: str) -> Shaped[Array, "m *rest"]:
    """Concatenate the arrays of a mesh axis's devices; the result is the same on all of them."""
    return lax.all_gather(x, axis, tiled=True, to="invarying") if present(axis) else x


def from_last_stage(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Broadcast the last stage's array to all stages."""
    is_last = index_of("stage") == size_of("stage") - 1
    return psum(jnp.where(is_last, x, jnp.zeros_like(x)), "stage")


def local_logits(model: Llama, mesh: Mesh, params: Params, rows: Float[Array, "R D"]) -> Float[Array, "R shard"]:
    """Logits of this device's shard of the vocabulary; those of padding are -inf."""
    logits = model.logits(params, rows)
    parts = mesh.shape["tensor"] * mesh.shape["stage"]
    if logits.shape[1] * parts == model.config.vocab_size:
        return logits
    first = index_of(*VOCABULARY_AXES) * logits.shape[1]
    token = first + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where((token < model.config.vocab_size)[None], logits, -jnp.inf)


def padding_out_of_bounds(slots: Array, x: Array) -> Array:
    """Indices along the first axis of x, with padding beyond its end: `mode="drop"` would wrap negative ones round."""
    return jnp.where(slots < 0, x.shape[0], slots)
