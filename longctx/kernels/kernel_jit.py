"""`jax.jit` for functions that may call a Mosaic GPU kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from longctx.kernels.device import INTERPRETER


def kernel_jit(*static: str, inline: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate with `jax.jit`. In the interpreter, whose threads deadlock under jit, the function is called as it is.

    Args:
      static: names of the static arguments.
      inline: whether a call inside another traced program becomes part of that program, as if it were not jitted. If
        not, the function is traced once for each shape and lowered once for each program: the layers of a model and
        the hops of a ring repeat a call, and tracing and lowering a kernel take half a second each.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnames=static, inline=inline)

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            return (jitted if INTERPRETER.get() is None else function)(*arguments)

        return run

    return decorate
