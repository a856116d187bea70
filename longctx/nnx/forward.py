"""The forward pass of a Llama over a mesh, its tokens sharded: one `shard_map` around all layers."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from longctx.kernels.attention.kernel import ATTENTION_STATE
from longctx.kernels.attention.operands import Implementation
from longctx.kernels.partitioning import match_varying
from longctx.models.attend import Attend, Cache, dense_attend, first_seen
from longctx.models.llama import LayerFunction, Llama
from longctx.models.params import Param, Params, map_table, param_shape, param_table
from longctx.models.rope import Rope
from longctx.nnx.loss import map_rows, sum_cross_entropy
from longctx.parallel.context_parallel import METHODS, Method
from longctx.parallel.layout import Layout
from longctx.parallel.mesh_axes import MeshAxes, with_auto_axes
from longctx.parallel.reshard import pad_sequence, reshard_to_contiguous, reshard_to_layout

_OVER_HEADS = ("head", "out_head", "kv_head", "intermediate")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings of a forward pass. Hashable, so it can be static under jit.

    Attributes:
      mesh, axes: None: one device.
      remat: whether each layer is computed again for its gradient; its attention is not.
      fsdp: whether parameters are sharded over the ranks of a sequence, too, and gathered layer by layer.
      chunk_size: tokens of one rank whose feed-forward, or whose logits in a loss, are computed at once; None: all.
    """

    model: Llama
    mesh: Mesh | AbstractMesh | None
    axes: MeshAxes | None
    layout: Layout
    method: Method
    implementation: Implementation | None
    remat: bool
    chunk_size: int | None
    fsdp: bool = False

    @property
    def specs(self) -> Params:
        """PartitionSpec of each parameter: heads and feed-forward over the axis of heads.

        With `fsdp`, every matrix is sharded over the axis of sequences too, along its first axis that the ranks divide.
        """
        assert self.axes is not None
        config, axes = self.model.config, self.axes

        def spec(param: Param) -> P:
            names = [axes.head if axis in _OVER_HEADS else None for axis in param.axes]
            ranks, is_matrix = axes.size(axes.sequence), len({*param.axes} - {"layer"}) > 1
            for i, (axis, size) in enumerate(zip(param.axes, param_shape(config, param), strict=True)):
                if self.fsdp and is_matrix and axis != "layer" and names[i] is None and size % ranks == 0:
                    names[i] = axes.sequence
                    break
            return P(*names)

        return map_table(spec, param_table(config))


class Rows(NamedTuple):
    """Tokens and their metadata, int32 `[B, T]`. Segments are negative for padding, targets where there is none."""

    tokens: Array
    positions: Array
    segments: Array
    targets: Array


PADDING = Rows(0, 0, -1, -1)  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnums=0)
def logits_of(plan: Plan, params: Params, rows: Rows) -> Array:
    """float32 `[B, T, vocab]`, in the order of the tokens."""
    length = rows.tokens.shape[1]
    if plan.axes is None:
        return plan.model.logits(params, _dense_hidden(plan, params, rows))
    axes = plan.axes

    def local(params: Params, rows: Rows) -> Array:
        hidden = _local_hidden(plan, params, rows)
        # Hidden states are fewer bytes than logits.
        return plan.model.logits(params, reshard_to_contiguous(hidden, axes.sequence, plan.layout))

    whole = length % axes.size(axes.sequence) == 0
    spec = P(axes.batch, axes.sequence)
    return _over_mesh(plan, local, params, rows, spec, spec if whole else P(axes.batch), length)


@functools.partial(jax.jit, static_argnums=0)
def loss_of(plan: Plan, params: Params, rows: Rows) -> tuple[Array, Array]:
    """(summed cross entropy, float32; number of targets, int32)."""
    total = functools.partial(_sum_loss, plan)
    count = jnp.sum(rows.targets >= 0, dtype=jnp.int32)
    if plan.axes is None:
        return total(params, _dense_hidden(plan, params, rows), rows.targets), count
    axes = plan.axes

    def local(params: Params, rows: Rows) -> Array:
        # Targets are arranged as the tokens are.
        hidden = _local_hidden(plan, params, rows)
        targets = reshard_to_layout(rows.targets, axes.sequence, plan.layout)
        names = tuple(name for name in (axes.sequence, axes.batch) if name is not None)
        return lax.psum(total(params, hidden, targets), names)

    return _over_mesh(plan, local, params, rows, P(), P(), None), count


def _sum_loss(plan: Plan, params: Params, hidden: Array, targets: Array) -> Array:
    logits = functools.partial(plan.model.logits, params)
    return sum_cross_entropy(logits, hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), plan.chunk_size)


def _over_mesh(
    plan: Plan, local: Any, params: Params, rows: Rows, mapped_spec: P, out_spec: P, length: int | None
) -> Array:
    """`local(params, rows)` of each rank's contiguous part of the padded rows, cut to `length` along axis 1."""
    assert plan.axes is not None
    assert plan.mesh is not None
    axes = plan.axes

    def program(mesh: Any, operands: tuple[Params, Rows]) -> Array:
        params, rows = operands
        pad = lambda x, value: pad_sequence(x, axes.size(axes.sequence), plan.layout, value)  # noqa: E731
        mapped = jax.shard_map(
            lambda params, rows: local(_gather_all_but_layers(plan, params), rows),
            mesh=mesh,
            in_specs=(plan.specs, P(axes.batch, axes.sequence)),
            out_specs=mapped_spec,
        )
        out = mapped(params, jax.tree.map(pad, rows, PADDING))
        return out if length is None else out[:, :length]

    return with_auto_axes(program, plan.mesh, (params, rows), out_spec)


def _gather_all_but_layers(plan: Plan, params: Params) -> Params:
    assert plan.axes is not None
    others, specs = ({**tree, "layers": {}} for tree in (params, plan.specs))
    return gather_weights(others, specs, plan.axes) | {"layers": params["layers"]}


def _dense_hidden(plan: Plan, params: Params, rows: Rows) -> Array:
    dtype = params["embed"].dtype
    attend = dense_attend(plan.model.config, dtype, rows.positions, rows.segments, plan.implementation)
    return _hidden(plan, params, rows.tokens, rows.positions, attend)


def _local_hidden(plan: Plan, params: Params, rows: Rows) -> Array:
    """This rank's hidden states in the layout, inside `shard_map`."""
    assert plan.axes is not None
    axes = plan.axes
    parts = jnp.stack(rows[:3], -1)
    tokens, positions, segments = jnp.moveaxis(reshard_to_layout(parts, axes.sequence, plan.layout), -1, 0)
    exchange = functools.partial(
        METHODS[plan.method],
        q_positions=positions,
        kv_positions=positions,
        q_segment_ids=segments,
        kv_segment_ids=segments,
        axis_name=axes.sequence,
        implementation=plan.implementation,
    )

    def attend(
        cache: Cache,
        layer: Array,
        q: Array,
        k: Array,
        v: Array,
        is_sliding: Array | None = None,
        sinks: Array | None = None,
    ) -> Any:
        window, first = plan.model.config.sliding_window, None
        if window is not None and is_sliding is not None:
            first = jnp.where(is_sliding, first_seen(window, positions), 0)
        return exchange(q, k, v, q_first=first, sinks=sinks)[0], cache

    return _hidden(plan, params, tokens, positions, attend)


def _hidden(plan: Plan, params: Params, tokens: Array, positions: Array, attend: Attend) -> Array:
    """Hidden states after the final norm `[B, T, D]`."""
    model, rope, sliding = plan.model, plan.model.rope(positions), plan.model.sliding()
    run_layer = _layer_function(plan, rope, attend)
    x = model.scale_embeddings(params["embed"][tokens])
    kinds = None if sliding is None else sliding[0]
    x, _ = model.run_layers(params["layers"], x, rope, attend, None, run_layer=run_layer, sliding=kinds)
    return model.norm(params, x)


def _layer_function(plan: Plan, rope: Rope, attend: Attend) -> LayerFunction:
    model, head_axis = plan.model, None if plan.axes is None else plan.axes.head

    def psum(x: Array) -> Array:
        return x if head_axis is None else lax.psum(x, head_axis)

    def layer(weights: Params, index: Array, x: Array, cache: Cache, is_sliding: Array | None) -> tuple[Array, Cache]:
        if plan.axes is not None:
            weights = gather_weights(weights, plan.specs["layers"], plan.axes, is_layer=True)
        x, cache = model.attention(weights, index, x, rope, attend, cache, psum, is_sliding=is_sliding)
        return map_rows(lambda rows: model.feed_forward(weights, rows, psum), x, plan.chunk_size), cache

    if not plan.remat:
        return layer
    # In a scan, no common subexpression can undo it.
    policy = jax.checkpoint_policies.save_only_these_names(ATTENTION_STATE)
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def gather_weights(weights: Params, specs: Params, axes: MeshAxes, is_layer: bool = False) -> Params:
    """Gather the parameters that a layer's ranks shard, and let all vary over the axes of tokens.

    So each gradient is summed over the ranks once, here, and not where chunks of tokens use the parameter.
    """

    def gather(x: Array, spec: P) -> Array:
        names = tuple(spec)[1 if is_layer else 0 :]
        if axes.sequence in names:
            x = lax.all_gather(x, axes.sequence, axis=names.index(axes.sequence), tiled=True)
        for name in (axes.sequence, axes.batch):
            x = x if name is None else match_varying(x, name)
        return x

    return jax.tree.map(gather, weights, specs)
