"""A Llama checkpoint as an NNX module to fine-tune: `to_nnx`, `LlamaModule`, `from_nnx`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from longctx.kernels.attention.kernel import IMPLEMENTATIONS
from longctx.kernels.attention.operands import check_implementation
from longctx.models.llama import Llama, check_positions, check_tokens, like_tokens
from longctx.models.params import Params, abstract_params
from longctx.nnx.forward import Plan, Rows, logits_of, loss_of
from longctx.nnx.loss import next_token_targets
from longctx.parallel.layout import check_layout
from longctx.parallel.mesh_axes import MeshAxes, check_axes, check_mesh

METHODS = ("pass_kv", "pass_q", "all_gather")
"""The exchanges in which tokens stay sharded."""


class LlamaModule(nnx.Module):
    """A Llama over a mesh, made by `to_nnx`.

    Attributes:
      params: the tree of parameters of `longctx.models.Llama`, each an `nnx.Param`; layers are stacked.
    """

    def __init__(self, plan: Plan, params: Params):
        self.plan = plan
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def __call__(
        self,
        tokens: Int[ArrayLike, "*B T"],
        positions: Int[ArrayLike, "*B T"] | None = None,
        segment_ids: Int[ArrayLike, "*B T"] | None = None,
    ) -> Float[Array, "*B T vocab"]:
        """Compute the logits of every token."""
        rows, batch = self._rows(tokens, positions, segment_ids, None)
        logits = logits_of(self.plan, _arrays(self.params), rows)
        return logits.reshape(*batch, *logits.shape[1:])

    def loss(
        self,
        tokens: Int[ArrayLike, "*B T"],
        targets: Int[ArrayLike, "*B T"] | None = None,
        positions: Int[ArrayLike, "*B T"] | None = None,
        segment_ids: Int[ArrayLike, "*B T"] | None = None,
    ) -> tuple[Float[Array, ""], Int[Array, ""]]:
        """Compute the summed cross entropy and the number of targets."""
        if targets is None:
            if positions is not None:
                raise ValueError("targets must be given where positions are: the next token need not stand beside")
            targets = next_token_targets(jnp.asarray(tokens), segment_ids)  # type: ignore[arg-type]
        rows, _ = self._rows(tokens, positions, segment_ids, targets)
        return loss_of(self.plan, _arrays(self.params), rows)

    def _rows(self, tokens: Any, positions: Any, segment_ids: Any, targets: Any) -> tuple[Rows, tuple[int, ...]]:
        config, axes = self.plan.model.config, self.plan.axes
        tokens = check_tokens(config, tokens, is_packed=positions is not None)
        positions = check_positions(config, tokens, positions)
        segments = jnp.zeros_like(tokens) if segment_ids is None else like_tokens("segment_ids", tokens, segment_ids)
        targets = jnp.full_like(tokens, -1) if targets is None else like_tokens("targets", tokens, targets)
        *batch, length = tokens.shape
        count = math.prod(batch)
        if axes is not None and count % axes.size(axes.batch):
            raise ValueError(f"the {axes.size(axes.batch)} ranks of batch_axis must divide the batch of {count}")
        flat = (jnp.asarray(x, jnp.int32).reshape(count, length) for x in (tokens, positions, segments, targets))
        return Rows(*flat), tuple(batch)


def to_nnx(
    model: Llama,
    params: Params,
    mesh: Mesh | None = None,
    *,
    layout: str = "zigzag",
    method: str = "pass_kv",
    axis_name: str = "context",
    head_axis: str | None = None,
    batch_axis: str | None = None,
    implementation: str | None = None,
    remat: bool = False,
    chunk_size: int | None = None,
    fsdp: bool = False,
) -> LlamaModule:
    """A Llama checkpoint as an NNX module to fine-tune, its tokens sharded over a mesh."""
    if model.config.quantization is not None:
        raise ValueError("quantization: RowwiseFp8 weights can't be fine-tuned; load the checkpoint they were made of")
    _check_params(model, params)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be a positive number of tokens or None, got {chunk_size!r}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_implementation(implementation, IMPLEMENTATIONS)
    if mesh is None and not jax.sharding.get_mesh().empty:
        mesh = jax.sharding.get_mesh()
    axes = None
    if mesh is not None:
        axes = _axes(model, check_mesh(mesh), axis_name, head_axis, batch_axis)
    check_layout(1 if axes is None else axes.size(axis_name), layout)
    plan = Plan(model, mesh, axes, layout, method, implementation, bool(remat), chunk_size, bool(fsdp))
    if mesh is not None:
        params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, plan.specs)
    return LlamaModule(plan, params)


def from_nnx(module: LlamaModule) -> tuple[Llama, Params]:
    """The model and the parameters of a module, for `longctx.models.save_checkpoint`."""
    return module.plan.model, _arrays(module.params)


def _arrays(params: Any) -> Params:
    is_param = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
    return jax.tree.map(lambda param: param[...], params, is_leaf=is_param)


def _axes(model: Llama, mesh: Any, axis_name: str, head_axis: str | None, batch_axis: str | None) -> MeshAxes:
    axes = check_axes(mesh, axis_name, head_axis, batch_axis)
    if mesh.shape.get("stage", 1) > 1:
        raise ValueError(f"mesh must have one stage: a module has no pipeline, got {dict(mesh.shape)}")
    if axes.size(axes.head) == 1:
        return dataclasses.replace(axes, head=None)
    config = model.config
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % axes.size(axes.head):
            raise ValueError(
                f"the {axes.size(axes.head)} ranks of head_axis {axes.head!r} must divide {name}, "
                f"{getattr(config, name)}"
            )
    return axes


def _check_params(model: Llama, params: Params) -> None:
    wanted = abstract_params(model.config)
    if jax.tree.structure(wanted) != jax.tree.structure(params):
        raise ValueError("params must be those of model.init or load_checkpoint, stacked for one stage")
    for (path, leaf), x in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(params), strict=True):
        if x.shape != leaf.shape:
            raise ValueError(f"params{jax.tree_util.keystr(path)} must have the shape {leaf.shape}, got {x.shape}")
