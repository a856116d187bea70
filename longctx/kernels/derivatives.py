"""Errors of differentiation that say what there is instead."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")


@contextlib.contextmanager
def reverse_mode_alone(function: str, implementation: str) -> Iterator[None]:
    """Name the function in JAX's error of forward-mode differentiation, and what there is instead."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(
            f'{function} of implementation="{implementation}" is differentiable in reverse mode alone (jax.grad, '
            f'jax.vjp), and its gradients in forward mode: for jax.jvp of {function} itself there is "reference"'
        ) from error


def end_reverse_mode(results: Tree, message: str) -> Tree:
    """Return the results. A gradient with respect to what they were computed from raises NotImplementedError.

    Without it the loops that computed them raise an error of JAX's own, which names neither the function nor a remedy.
    Forward-mode differentiation goes through.
    """

    def end(x: Any) -> Any:
        return _end_reverse_mode.bind(x, message=message) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(end, results)


def _raise(cotangent: Any, x: Any, *, message: str) -> NoReturn:
    raise NotImplementedError(message)


_end_reverse_mode = Primitive("end_reverse_mode")
_end_reverse_mode.def_impl(lambda x, *, message: x)
_end_reverse_mode.def_abstract_eval(lambda x, *, message: x)
ad.deflinear2(_end_reverse_mode, _raise)
batching.primitive_batchers[_end_reverse_mode] = lambda xs, axes, *, message: (
    _end_reverse_mode.bind(*xs, message=message),
    axes[0],
)
mlir.register_lowering(_end_reverse_mode, lambda context, x, *, message: [x])
