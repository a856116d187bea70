"""Deletes one barrier operation of the Mosaic GPU kernel's schedule and interprets it: for test_mosaic_gpu_barriers.

`python mutants.py NUMBER`: exits 0 if results are right and nothing was noticed. -1: nothing is deleted.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from longctx.kernels import attention, paged_attention
from longctx.kernels.mosaic_gpu import adapter, schedule

OPERATIONS = ("wait", "arrive")


class Delete(ast.NodeTransformer):
    """Deletes the n-th call of `machine.wait` or `machine.arrive`; lists their lines."""

    def __init__(self, number: int) -> None:
        self.number, self.lines = number, []

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in OPERATIONS:
            return node
        self.lines.append(node.lineno)
        return ast.copy_location(ast.Constant(None), node) if len(self.lines) - 1 == self.number else node


def mutate(number: int) -> tuple[ast.Module, list[int]]:
    """The changed module, and the lines of all its barrier operations."""
    transformer = Delete(number)
    tree = ast.fix_missing_locations(transformer.visit(ast.parse(inspect.getsource(schedule))))
    return tree, transformer.lines


def is_of_converter(line: int) -> bool:
    source, first = inspect.getsourcelines(schedule.convert)
    return first <= line < first + len(source)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


def check() -> None:
    """Contiguous keys with several blocks and tiles per worker; then pages with NaN in slots never written."""
    q, k, v = draw(140, 1, 64), draw(800, 1, 64), draw(800, 1, 64)[::-1]
    positions = jnp.arange(140) + 660
    compare(attention, q, k, v, q_positions=positions)

    pages = jnp.where(jnp.arange(832) < 800, 1, jnp.nan)[:, None, None] * jnp.pad(k, ((0, 32), (0, 0), (0, 0)))
    pages = pages.reshape(13, 64, 1, 64).astype(jnp.bfloat16)
    table = jnp.arange(13)[None]
    compare(paged_attention, q[:70], pages, pages, table, None, jnp.array([800]), positions[70:], jnp.zeros(70, int))


def check_fp8() -> None:
    """FP8 pages, of more blocks than both rings have stages."""
    q, pages = draw(8, 1, 128), draw(10, 128, 1, 128).astype(jnp.float8_e4m3fn)
    metadata = jnp.arange(10)[None], None, jnp.array([1280]), jnp.arange(8) + 1272, jnp.zeros(8, int)
    scale = jnp.ones((10, 1, 128), jnp.float32)
    compare(paged_attention, q, pages, pages, *metadata, k_scale=scale, v_scale=scale)


def compare(function: Callable[..., Any], *operands: Any, **options: Any) -> None:
    options |= {"out_dtype": jnp.float32}
    with adapter.interpreted(num_multiprocessors=1):
        got = jax.block_until_ready(function(*operands, **options))
    for a, b in zip(got, function(*operands, **options, implementation="reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-3)


if __name__ == "__main__":
    number = int(sys.argv[1])
    tree, lines = mutate(number)
    exec(compile(tree, schedule.__file__, "exec"), vars(schedule))
    in_converter = number >= 0 and is_of_converter(lines[number])
    if not in_converter:
        check()
    if in_converter or number < 0:
        check_fp8()
