"""A Llama checkpoint as an NNX module to fine-tune: `to_nnx`, `LlamaModule`, `from_nnx`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from longctx.kernels.arrays import check_floating
from longctx.kernels.attention.kernel import IMPLEMENTATIONS
from longctx.kernels.attention.operands import Implementation, check_implementation
from longctx.models.layer_stacks import LayerRuns, put_together
from longctx.models.llama import Llama, check_positions, check_range, check_tokens, like_tokens
from longctx.models.params import Params, abstract_params
from longctx.models.validation import MAX_INT32, check_bool, check_integer
from longctx.nnx.forward import Plan, Rows, logits_of, loss_of
from longctx.nnx.loss import next_token_targets
from longctx.parallel.context_parallel import Method
from longctx.parallel.layout import Layout, check_layout
from longctx.parallel.mesh_axes import MeshAxes, check_axes, check_mesh, mesh_with_devices, place

METHODS = ("pass_kv", "pass_q", "all_gather", "ulysses")
"""The exchanges in which tokens stay sharded."""


class LlamaModule(nnx.Module):
    """A Llama over a mesh, as `to_nnx` makes it.

    One `shard_map` is around all layers, which are scanned: each rank embeds its tokens, runs them through the layers,
    and makes their logits. Between ranks move keys and values (or what the `method` moves), and in a gradient, once a
    layer, the sums of its parameters' gradients.

    Args:
      plan: how to compute.
      params: parameters of the model, placed on the mesh.

    Attributes:
      plan: as given.
      params: the tree of parameters of `longctx.models.Llama`, each an `nnx.Param`; layers are stacked.

    Examples:
      >>> import jax
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.nnx import LlamaModule, to_nnx
      >>> model = Llama(LlamaConfig(64, 16, 32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> module = to_nnx(model, model.init(jax.random.key(0)))
      >>> isinstance(module, LlamaModule), module.params["layers"]["wq"].shape
      (True, (2, 16, 2, 8))
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
        """Compute the logits of every token.

        Args:
          tokens: integers `[*B, T]`.
          positions: integers `[*B, T]`; by default 0 to T-1. Needed where tokens don't stand in order.
          segment_ids: integers `[*B, T]` for packed sequences, negative for padding, whose logits mean nothing. Tokens
            attend within their segment only.

        Returns:
          float32 `[*B, T, vocab]`, in the order of the tokens, sharded as they are.

        Raises:
          TypeError, ValueError: as `longctx.models.Llama` raises them, but that there may be more tokens than
            `max_positions` where positions are given; or the ranks of `batch_axis` don't divide the batch.
        """
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
        """Compute the summed cross entropy and the number of targets; their quotient is the mean loss.

        Sums and counts of several batches add up, so that accumulated gradients are those of one large batch. Logits
        are computed for `chunk_size` tokens of a rank at a time, and again for the gradient: those of all tokens are
        never stored.

        Args:
          tokens, positions, segment_ids: as of a call of the module.
          targets: integers `[*B, T]`, the token to predict from each token and those before it; negative: none. None:
            `next_token_targets(tokens, segment_ids)`, if positions are None too.

        Returns:
          (total, float32 `[]`, in nats; count, int32 `[]`). `total` is differentiable in the parameters.

        Raises:
          TypeError, ValueError: as of a call of the module; a target that is too large, where it is concrete; or
            positions without targets.
        """
        if targets is None:
            if positions is not None:
                raise ValueError("targets must be given where positions are: the next token need not stand beside")
            targets = next_token_targets(tokens, segment_ids)
        rows, _ = self._rows(tokens, positions, segment_ids, targets)
        return loss_of(self.plan, _arrays(self.params), rows)

    def _rows(self, tokens: Any, positions: Any, segment_ids: Any, targets: Any) -> tuple[Rows, tuple[int, ...]]:
        config, axes = self.plan.model.config, self.plan.axes
        tokens = check_tokens(config, tokens, is_packed=positions is not None).astype(jnp.int32)
        positions = check_positions(config, tokens, positions)
        segments = jnp.zeros_like(tokens)
        if segment_ids is not None:
            segments = like_tokens("segment_ids", tokens, segment_ids, are_ids=True)
        targets = jnp.full_like(tokens, -1) if targets is None else like_tokens("targets", tokens, targets)
        *batch, length = tokens.shape
        count = math.prod(batch)
        if axes is not None and count % axes.size(axes.batch):
            raise ValueError(f"the {axes.size(axes.batch)} ranks of batch_axis must divide the batch of {count}")
        check_range("targets", targets, config.vocab_size, "the vocabulary", least=-MAX_INT32)
        flat = (jnp.asarray(x).reshape(count, length) for x in (tokens, positions, segments, targets))
        return Rows(*flat), tuple(batch)


def to_nnx(
    model: Llama,
    params: Params,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    layout: Layout = "zigzag",
    method: Method = "pass_kv",
    axis_name: str = "context",
    head_axis: str | None = None,
    batch_axis: str | None = None,
    implementation: Implementation | None = None,
    remat: bool = False,
    chunk_size: int | None = None,
    fsdp: bool = False,
) -> LlamaModule:
    """A Llama checkpoint as an NNX module to fine-tune, its tokens sharded over a mesh.

    The module's parameters are `nnx.Param`s, and it computes what `model` computes. Works with Auto and Explicit mesh
    axes, under `nnx.jit`, `nnx.grad` and the like.

    Memory of a gradient: with `remat` and a `chunk_size` each rank keeps, of each of its T / N tokens and each layer,
    the hidden state, the attention's output and its lse, and what one layer's attention needs; nothing grows with T
    alone.

    Args:
      model, params: of `load_checkpoint`, or `model.init`: of any family. Layers that are apart, as
        `load_checkpoint` gives them on accelerators, are stacked, which is a copy (`apart=False` there avoids it).
        Arrays that are where the module wants them are its own from then on, not copied: a step that donates the module
        deletes them.
      mesh: a mesh with `axis_name`, on which the parameters are placed. None: that of `jax.set_mesh`; without one, all
        is computed on one device.
      layout: tokens come in order, and are arranged as integers once, not their hidden states in each layer;
        `"zigzag"` balances causal attention. `"contiguous"`: tokens are computed where they stand, so also those that
        `shard_sequence` has arranged (with positions, segments and targets arranged alike).
      method: the exchange: `"pass_kv"`, `"pass_q"`, `"all_gather"` or `"ulysses"`.
      axis_name: the mesh axis of the tokens.
      head_axis: the mesh axis of the heads and of the feed-forward. None: `tensor`, if the mesh has it.
      batch_axis: the mesh axis of the batch; None: every rank computes all of it.
      implementation: as in `longctx.kernels.attention`.
      remat: whether a gradient computes each layer again, all but its attention, rather than to keep what is inside.
      chunk_size: tokens of one rank whose feed-forward, or whose logits in `loss`, are computed at once. None: all.
      fsdp: shard every matrix over `axis_name` too, and gather a layer's when it is computed. Gradients, and so the
        optimizer's state, are sharded alike.

    Returns:
      the module.

    Raises:
      TypeError: the model is no `Llama`, or an argument or a parameter has another type; the message names it.
      ValueError: the model is quantised (`RowwiseFp8`), params are not those of the model, the mesh has several stages,
        the ranks of `head_axis` don't divide the model's heads, or an argument is none of the above; the message says
        which.

    Source:
      Ring Attention (Liu et al. 2023), section 3; Blockwise Parallel Transformer (Liu and Abbeel 2023), section 3.

    Examples:
      >>> from flax import nnx
      >>> import jax
      >>> from longctx.models import Llama, LlamaConfig
      >>> from longctx.nnx import to_nnx
      >>> from longctx.parallel import make_mesh, use_devices
      >>> use_devices(8)
      >>> model = Llama(LlamaConfig(64, 16, 32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> module = to_nnx(model, model.init(jax.random.key(0)), make_mesh(context=4), remat=True, chunk_size=8)
      >>> tokens = jax.random.randint(jax.random.key(1), (1, 50), 0, 64)
      >>> def mean_loss(module):
      ...     total, count = module.loss(tokens)
      ...     return total / count
      >>> loss, gradient = nnx.jit(nnx.value_and_grad(mean_loss))(module)
      >>> print(f"{loss:.1f}")
      4.2
    """
    if not isinstance(model, Llama):
        raise TypeError(f"model must be a longctx.models.Llama, got {type(model).__name__}")
    if model.config.quantization is not None:
        raise ValueError("quantization: RowwiseFp8 weights can't be fine-tuned; load the checkpoint they were made of")
    if isinstance(layers := params.get("layers"), LayerRuns) and layers.stacking.apart:
        params = params | {"layers": put_together(layers)}
    _check_params(model, params)
    if chunk_size is not None:
        chunk_size = check_integer("chunk_size", chunk_size, 1)
    check_bool("remat", remat)
    check_bool("fsdp", fsdp)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_implementation(implementation, IMPLEMENTATIONS)
    mesh = mesh_with_devices(mesh)
    axes = None
    if mesh is None and not head_axis is batch_axis is None:
        raise ValueError(f"mesh must be given for head_axis and batch_axis, {head_axis!r} and {batch_axis!r}")
    if mesh is not None:
        axes = _axes(model, check_mesh(mesh), axis_name, head_axis, batch_axis)
    check_layout(1 if axes is None else axes.size(axis_name), layout)
    plan = Plan(model, mesh, axes, layout, method, implementation, remat, chunk_size, fsdp)
    if mesh is not None:
        params = jax.tree.map(lambda x, spec: place(x, mesh, spec), params, plan.specs)
    return LlamaModule(plan, params)


def from_nnx(module: LlamaModule) -> tuple[Llama, Params]:
    """The model and the parameters of a module, for `longctx.models.save_checkpoint`.

    Args:
      module: what `to_nnx` made.

    Returns:
      (model, params), the arrays of the module themselves.

    Raises:
      TypeError: it is no `LlamaModule`.

    Examples:
      >>> import jax
      >>> from longctx.models import Llama, LlamaConfig, save_checkpoint
      >>> from longctx.nnx import from_nnx, to_nnx
      >>> model = Llama(LlamaConfig(64, 16, 32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
      >>> module = to_nnx(model, model.init(jax.random.key(0)))
      >>> from_nnx(module)[0] == model
      True
      >>> save_checkpoint("finetuned", *from_nnx(module))
    """
    if not isinstance(module, LlamaModule):
        raise TypeError(f"module must be a LlamaModule, as to_nnx makes it, got {type(module).__name__}")
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
    wanted, given = (dict(jax.tree.leaves_with_path(tree)) for tree in (abstract_params(model.config), params))
    if wanted.keys() != given.keys():
        raise ValueError("params must be those of model.init or load_checkpoint, stacked for one stage")
    for path, leaf in wanted.items():
        name, x = jax.tree_util.keystr(path), given[path]
        if np.shape(x) != leaf.shape:
            raise ValueError(f"params{name} must have the shape {leaf.shape}, got {np.shape(x)}")
        check_floating(f"params{name}", x.dtype)
