"""Changes one barrier operation of the Mosaic GPU kernel's schedule and interprets it: for test_mosaic_gpu_barriers.

`python mutants.py CHANGE NUMBER`: exits 0 if results are right and nothing was noticed.
"""

import ast
import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longctx.kernels import attention, paged_attention
from longctx.kernels.mosaic_gpu import adapter, schedule

OPERATIONS = ("wait", "arrive")
CHANGES = ("delete", "double")


class Change(ast.NodeTransformer):
    """Deletes or doubles the n-th call of `machine.wait` or `machine.arrive`; lists their lines."""

    def __init__(self, change: str, number: int) -> None:
        self.change, self.number, self.lines = change, number, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in OPERATIONS:
            return node
        self.lines.append(node.lineno)
        if len(self.lines) - 1 != self.number:
            return node
        # (None, call, call)[0]: a lambda that is one call still returns None.
        calls = [] if self.change == "delete" else [node, node]
        none = ast.Tuple([ast.Constant(None), *calls], ast.Load())
        return ast.copy_location(ast.Subscript(none, ast.Constant(0), ast.Load()), node)


def mutate(change: str, number: int) -> tuple[ast.Module, list[int]]:
    """The changed module, and the lines of all its barrier operations."""
    transformer = Change(change, number)
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(inspect.getsource(schedule))))
    return tree, transformer.lines


def install(change: str, number: int) -> None:
    """Change the functions that the kernel calls."""
    exec(compile(mutate(change, number)[0], schedule.__file__, "exec"), vars(schedule))


def check() -> None:
    """Contiguous keys with several blocks and tiles per worker; pages with NaN in slots never written; FP8 pages."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((n, 1, 64)), jnp.bfloat16) for n in (140, 800, 800))
    positions = jnp.arange(140) + 660
    arguments = {"q_positions": positions, "out_dtype": jnp.float32}
    with adapter.interpreted(num_multiprocessors=1):
        got = jax.block_until_ready(attention(q, k, v, **arguments))
    compare(got, attention(q, k, v, **arguments, implementation="reference"))

    written = (jnp.arange(832) < 800)[:, None, None]
    pages = jnp.where(written, jnp.pad(k, ((0, 32), (0, 0), (0, 0))), jnp.nan).reshape(13, 64, 1, 64)
    metadata = jnp.arange(13)[None], None, jnp.array([800]), positions[70:], jnp.zeros(70, int)
    check_paged(q[:70], pages, *metadata)
    scale = jnp.where(written, 0.5, jnp.nan).astype(jnp.float32).reshape(13, 1, 64)
    check_paged(q[:70], pages.astype(jnp.float8_e4m3fn), *metadata, k_scale=scale, v_scale=scale)


def check_paged(q: jax.Array, pages: jax.Array, *metadata: Any, **scales: jax.Array) -> None:
    def run(implementation: str | None) -> tuple[jax.Array, jax.Array]:
        arguments = scales | {"out_dtype": jnp.float32, "implementation": implementation}
        return jax.block_until_ready(paged_attention(q, pages, pages, *metadata, **arguments))

    with adapter.interpreted(num_multiprocessors=1):
        got = run(None)
    compare(got, run("reference"))


def compare(got: tuple[jax.Array, jax.Array], want: tuple[jax.Array, jax.Array]) -> None:
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


if __name__ == "__main__":
    if sys.argv[1] != "none":
        install(sys.argv[1], int(sys.argv[2]))
    check()
