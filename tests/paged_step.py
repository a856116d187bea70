"""A step of several layers that writes pages and attends to them by `"xla"`, to compile with abstract arguments."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from hlo import IN_PLACE, opcodes_of_size
from jax import Array, lax

from longctx.kernels import paged_attention, write_pages
from longctx.kernels.bits import bits_dtype

ROWS, HEADS, KV_HEADS, SIZE, LAYERS = 64, 4, 2, 16, 3
PAGE_SIZE, NUM_PAGES, SEQUENCES, ENTRIES = 16, 8192, 8, 65536
LAYER = NUM_PAGES * PAGE_SIZE * KV_HEADS * SIZE  # elements of one layer's K
TILES = ROWS + ROWS // 2 + ROWS // 17  # total length of the lists of tiles of 1, 16 and 64 rows
SCALES = ("k_scale", "v_scale")
ATTENDS = ("page_table", "page_index", "kv_lengths", "q_positions", "q_sequence")


@functools.partial(jax.jit, donate_argnums=(0,))
def step(cache: tuple[Array, ...], x: Array, metadata: dict[str, Array]) -> tuple[Array, tuple[Array, ...]]:
    def layer(carry, number):  # type: ignore[no-untyped-def]
        x, (k_pages, v_pages, *scales) = carry
        first_page = number * NUM_PAGES
        new = x[:, :KV_HEADS], x[:, KV_HEADS : 2 * KV_HEADS]
        page = jnp.where(metadata["page"] < 0, -1, metadata["page"] + first_page)
        k_pages, v_pages, *scales = cache = write_pages(k_pages, v_pages, *new, page, metadata["offset"], *scales)
        others = {name: metadata.get(name) for name in ATTENDS} | dict(zip(SCALES, scales, strict=False))
        out, _ = paged_attention(x, k_pages, v_pages, **others, first_page=first_page, implementation="xla")
        return (x + out, cache), None

    (x, cache), _ = lax.scan(layer, (x, cache), jnp.arange(LAYERS, dtype=jnp.int32))
    return x, cache


def arguments(dtype: object, sharding: object = None, is_fp8: bool = False) -> tuple[object, ...]:
    def array(dtype: object, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    pages = array(jnp.uint8 if is_fp8 else bits_dtype(dtype), LAYERS * NUM_PAGES, PAGE_SIZE, KV_HEADS, SIZE)
    scales = (array(jnp.float32, LAYERS * NUM_PAGES, KV_HEADS, PAGE_SIZE),) * 2 if is_fp8 else ()
    table, row = array(jnp.int32, SEQUENCES, ENTRIES), array(jnp.int32, ROWS)
    metadata = {"page_table": table, "page_index": table, "kv_lengths": array(jnp.int32, SEQUENCES)}
    metadata |= {"q_positions": row, "q_sequence": row, "page": row, "offset": row}
    return (pages, pages, *scales), array(dtype, ROWS, HEADS, SIZE), metadata


def computations_in_loops(text: str) -> dict[str, list[str]]:
    """Lines of every computation that a while loop of a compiled module runs, by the computation's name."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := re.match(r"^(ENTRY )?%([\w.\-]+) .*\{$", line):
            lines = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("  "):
            lines.append(line)
    waiting = [name for line in computations[entry] if " while(" in line for name in _called(line)]
    found: dict[str, list[str]] = {}
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = computations[name]
            waiting += [called for line in found[name] for called in _called(line)]
    return found


def _called(line: str) -> list[str]:
    return re.findall(r"(?:body|condition|calls|to_apply)=%([\w.\-]+)", line)


def check_in_place(compiled: Any, dtype: object, is_fp8: bool = False) -> None:
    """Check that the cache is updated in place, and that no layer makes an array of a layer's or a table's size."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    layer = LAYER * (1 if is_fp8 else bits_dtype(dtype).itemsize)
    scales = LAYER // SIZE * 4 if is_fp8 else 0
    assert memory.alias_size_in_bytes >= 2 * LAYERS * (layer + scales)
    assert memory.temp_size_in_bytes < LAYER / 2  # half a layer of K in 8 bits
    assert opcodes_of_size(text, SEQUENCES * ENTRIES) <= IN_PLACE


def check_tiles_are_cut_once(compiled: Any) -> None:
    """Check that the lists of tiles, which depend on metadata only, are made before the loop over layers."""
    text = compiled.as_text()
    loops = computations_in_loops(text)
    assert len(loops) > LAYERS
    assert results_of_tiles(text.splitlines())
    assert not any(results_of_tiles(lines) for lines in loops.values())


def results_of_tiles(lines: list[str]) -> list[str]:
    """The instructions that compute an array over all tiles, rather than slice one."""
    return [x for x in lines if re.search(rf" = \w+\[(2,)?{TILES}(,1)?\]\S* (fusion|select|gather|scatter)\(", x)]
