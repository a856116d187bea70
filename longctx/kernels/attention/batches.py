"""Attention of any batch dimensions: what a device computes of it, and what `jax.vmap` makes of it."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from longctx.kernels.partitioning import Labels, Rule, partitioned, without_ones

# forward(operands, state, plan) -> (out, lse), and backward(operands, lse, row_terms, d_out) -> (d_q, d_k, d_v), of
# operands with one batch dimension. Backward has a fourth result where they have a bias of numbers: its gradient.
Forward = Callable[[Any, Any, Any], tuple[Array, Array]]
Backward = Callable[[Any, Array, Array, Array], tuple[Array, ...]]


def forward(
    function: Forward,
    operands: Any,
    state: tuple[Array, Array] | None = None,
    plan: Any = None,
    has_constants: bool = False,
) -> tuple[Array, Array]:
    """The function of operands `[*B, ...]`, divided over the mesh. The plan is for the shapes of the operands."""
    leaves, tree = jax.tree.flatten((operands, state, plan))
    shapes = operands.q.shape, operands.k.shape

    def local(*leaves: Array) -> tuple[Array, ...]:
        operands, state, plan = jax.tree.unflatten(tree, leaves)
        is_whole = (operands.q.shape, operands.k.shape) == shapes
        return on_one_batch(function, operands, state, plan if is_whole else None)

    def fold(size: int, mapped: Sequence[bool], *leaves: Array) -> tuple[Array, ...]:
        (operands, state, _), (of_operands, of_state, _) = (jax.tree.unflatten(tree, x) for x in (leaves, mapped))
        operands = _fold(size, of_operands, operands)
        if state is not None:
            state = tuple(_with_axis(size, *pair) for pair in zip(of_state, state, strict=True))
        return forward(function, operands, state, has_constants=has_constants)

    *labels, out, lse = _labels(operands)
    labels += [out, lse] if state is not None else []
    labels += [("",) * x.ndim for x in jax.tree.leaves(plan)]
    return partitioned(local, _rule(labels, (out, lse), has_constants), fold, *leaves)  # type: ignore[return-value]


def on_one_batch(function: Forward, operands: Any, state: tuple[Array, Array] | None, plan: Any) -> tuple[Array, Array]:
    """The function of the operands with their batch dimensions flattened; results have them again."""
    q = operands.q
    if state is not None:
        state = _flatten(state[0], q.ndim - 3), _flatten(state[1], q.ndim - 3)
    out, lse = function(flatten(operands), state, plan)
    return out.reshape(operands.out_shape), lse.reshape(q.shape[:-1])


def backward(
    function: Backward, operands: Any, lse: Array, row_terms: Array, d_out: Array, *, has_constants: bool = False
) -> tuple[Array, ...]:
    """The function of operands `[*B, ...]`, divided over the mesh."""
    leaves, tree = jax.tree.flatten((operands, lse, row_terms, d_out))

    def local(*leaves: Array) -> tuple[Array, ...]:
        operands, *of_rows = jax.tree.unflatten(tree, leaves)
        q = operands.q
        shared = [operands.k, operands.v, *[operands.bias] * operands.has_bias_gradient]
        shapes = (x.shape[x.ndim - q.ndim :] for x in shared)
        d_q, *rest = function(flatten(operands), *(_flatten(x, q.ndim - 3) for x in of_rows))
        return d_q.reshape(q.shape), *(
            _unflatten_shared(*pair, q.shape[:-3]) for pair in zip(rest, shapes, strict=True)
        )

    def fold(size: int, mapped: Sequence[bool], *leaves: Array) -> tuple[Array, ...]:
        (operands, *rows), (of_operands, *of_rows) = (jax.tree.unflatten(tree, x) for x in (leaves, mapped))
        rows = [_with_axis(size, *pair) for pair in zip(of_rows, rows, strict=True)]
        return backward(function, _fold(size, of_operands, operands, share=False), *rows, has_constants=has_constants)

    *labels, out, of_lse = _labels(operands)
    lead = operands.k.ndim - operands.q.ndim
    results = labels[0], labels[1][lead:], labels[2][lead:], *labels[-1:] * operands.has_bias_gradient
    return partitioned(local, _rule([*labels, of_lse, of_lse, out], results, has_constants), fold, *leaves)


def flatten(operands: Any) -> Any:
    """Flatten the batch dimensions of an `Operands` to one. Tokens and keys that all sequences share have 1."""
    batch = operands.q.shape[:-3]
    if len(batch) == 1:
        return operands
    flat = functools.partial(_flatten_shared, batch=batch)
    return type(operands)(
        _flatten(operands.q, len(batch)),
        *(flat(x, lead=x.ndim - operands.q.ndim) for x in (operands.k, operands.v)),
        *(jax.tree.map(flat, x) for x in (operands.queries, operands.keys, operands.bias)),
    )


def unflatten_tokens(tokens: Any, batch: tuple[int, ...]) -> Any:
    """Tokens `[1 or B, T]` as `[*B, T]`, with 1 for every dimension of the batch if all its sequences share them."""
    return jax.tree.map(lambda x: x.reshape(*(batch if len(x) > 1 else (1,) * len(batch)), x.shape[1]), tokens)


def _flatten(x: Array, num_dims: int) -> Array:
    return x if num_dims == 1 else x.reshape(math.prod(x.shape[:num_dims]), *x.shape[num_dims:])


def _flatten_shared(x: Array, batch: tuple[int, ...], lead: int = 0) -> Array:
    """Flatten the batch dimensions after the first `lead`, some of them 1: to 1 if all are, else to the whole batch."""
    first, found, rest = x.shape[:lead], x.shape[lead : lead + len(batch)], x.shape[lead + len(batch) :]
    if math.prod(found) == 1:
        return x.reshape(*first, 1, *rest)
    return jnp.broadcast_to(x, (*first, *batch, *rest)).reshape(*first, math.prod(batch), *rest)


def _unflatten_shared(x: Array, shape: tuple[int, ...], batch: tuple[int, ...]) -> Array:
    """The gradient of keys or a bias of a shape, whose sequences may share them."""
    if math.prod(shape[:-3]) == x.shape[0]:
        return x.reshape(shape)
    shared = tuple(at for at, length in enumerate(shape[:-3]) if length == 1)
    return jnp.sum(x.reshape(*batch, *x.shape[1:]), shared, keepdims=True)


def _labels(operands: Any) -> list[Labels]:
    """The labels of the operands, and of out and lse."""
    q, k = operands.q, operands.k
    batch = tuple(f"b{at}" for at in range(q.ndim - 3))
    of_q = without_ones(q.shape, (*batch, "t", "k g", ""))
    of_k = without_ones(k.shape, (*("",) * (k.ndim - q.ndim), *batch, "", "k", ""))
    queries = [without_ones(x.shape, (*batch, "t")) for x in jax.tree.leaves(operands.queries)]
    keys = [without_ones(x.shape, (*batch, "")) for x in jax.tree.leaves(operands.keys)]
    of_v, of_out = (without_ones(x, labels) for x, labels in ((operands.v.shape, of_k), (operands.out_shape, of_q)))
    bias = () if operands.bias is None else (without_ones(operands.bias.shape, (*batch, "k g", "t", "")),)
    return [of_q, of_k, of_v, *queries, *keys, *bias, of_out, of_q[:-1]]


def _rule(operands: list[Labels], results: tuple[Labels, ...], has_constants: bool) -> Rule:
    names = ("q", "k", "v", *("",) * (len(operands) - 3))
    return Rule(names, tuple(operands), results, has_constants=has_constants)


def _fold(size: int, mapped: Any, operands: Any, share: bool = True) -> Any:
    """The operands with one more batch dimension, of which those that are not `mapped` may share one entry."""
    lead = (operands.k.ndim - mapped.k) - (operands.q.ndim - mapped.q)
    k, v = (
        jnp.moveaxis(_with_axis(1 if share else size, *pair), 0, lead)
        for pair in ((mapped.k, operands.k), (mapped.v, operands.v))
    )
    if k.shape[:-1] != v.shape[:-1]:
        shape = jnp.broadcast_shapes(k.shape[:-1], v.shape[:-1])
        k, v = (jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in (k, v))
    tokens = jax.tree.map(
        functools.partial(_with_axis, 1), (mapped.queries, mapped.keys), (operands.queries, operands.keys)
    )
    bias = None if operands.bias is None else _with_axis(1 if share else size, mapped.bias, operands.bias)
    return type(operands)(_with_axis(size, mapped.q, operands.q), k, v, *tokens, bias)


def _with_axis(size: int, is_mapped: bool, x: Array) -> Array:
    """x, with a first dimension of `size` if it is not mapped."""
    return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
