"""The parts of Pallas that differ between versions, are private, or differ in the interpreter.

Two private names are used. `InterpretGPUParams` runs a kernel's threads, copies and barriers on a CPU, and
`get_races` says whether any of them raced; from jax 0.12 on the first is public, and the interpreter itself raises.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.device import INTERPRETER, Interpreter
from longctx.kernels.partitioning import vary_over

# Layouts of wgmma accumulators: the tile, and its reductions to one value per row or per column.
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
# A layout that loads four values of 8 bits at a time.
FP8_TILE = plgpu.Layout.WGMMA_UPCAST_2X
ROW_OF_FP8_TILE = FP8_TILE.reduce(1)
# Rows of a tile of shared memory.
ROWS_OF_TILE = 8
# In place of -inf for running maxima: exp2(a - b) then needs no guard against inf - inf.
LOWEST = -1e30


@contextlib.contextmanager
def interpreted(num_multiprocessors: int = 2, detect_races: bool = True) -> Iterator[None]:
    """Within this context the device is a Hopper GPU with few multiprocessors, interpreted on the CPU.

    It takes about a second for each thread block and warpgroup. Don't use it under `jax.jit`, where the interpreter's
    threads deadlock.

    Raises:
      RuntimeError: the interpreter found a race, or a copy that does not begin at a whole tile.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:
        from jax._src.pallas.mosaic_gpu.interpret import params as private

        params = private.InterpretGPUParams
    token = INTERPRETER.set(Interpreter(params(detect_races=detect_races), num_multiprocessors, []))
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            yield
    finally:
        INTERPRETER.reset(token)


def interpreting() -> bool:
    """Whether `interpreted` is in force."""
    return INTERPRETER.get() is not None


def kernel(
    body: Callable[..., None], out_types: list[tuple[tuple[int, ...], Any]], like: Array, **options: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`, whose results vary over the mesh axes that `like` varies over."""
    varying, interpreter = jax.typeof(like).manual_axis_type, INTERPRETER.get()
    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in out_types],
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,  # jax 0.11 changes the default
            reduction_scratch_bytes=0,  # no kernel reduces across warps, and shared memory is short
        ),
        interpret=interpreter and interpreter.params,
        **options,
    )

    def checked(*operands: Array) -> list[Array]:
        results = run(*operands)
        if interpreter:
            _check(interpreter, results)
        # Some versions drop the mesh axes that `out_type` asks for.
        return [vary_over(varying.varying, x) for x in results]

    return checked


def _check(interpreter: Interpreter, results: Any) -> None:
    jax.block_until_ready(results)
    jax.effects_barrier()
    if interpreter.errors:
        raise RuntimeError("; ".join(interpreter.errors))
    if interpreter.params.detect_races and jax.__version_info__ < (0, 12):
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as private

        if private.get_races().races_found:
            raise RuntimeError("the interpreter found a race; it has printed where")


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads: tiles of 8 rows by 128 bytes (or a whole row), swizzled."""
    itemsize = jnp.dtype(dtype).itemsize
    size = min(128, shape[-1] * itemsize)
    tiling = plgpu.TilingTransform((ROWS_OF_TILE, size // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(size)))


def pad_for_tma(x: Array, axis: int, missing: int) -> Array:
    """Pad an axis for block copies that reach beyond its end by up to `missing` elements.

    TMA reads zeros there, so on a GPU an array is padded (and copied) only to the whole tiles of 8 that Pallas asks
    for. The interpreter refuses to read there, so for it all missing elements are padded.
    """
    if not interpreting():
        missing = min(missing, -x.shape[axis] % ROWS_OF_TILE)
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def set_registers(number: int, action: str) -> None:
    """Set the register limit of this warpgroup."""
    plgpu.set_max_registers(number, action=action)  # type: ignore[arg-type]


def cast(x: Array, layout: Any) -> Array:
    """Cast registers to a layout."""
    return x if interpreting() else plgpu.layout_cast(x, layout)


def read(ref: Any, layout: Any) -> Array:
    """Load registers of a layout directly from global or shared memory."""
    if interpreting():
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 12) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def write(ref: Any, value: Array) -> None:
    """Store registers to global memory, in pieces of whatever size their layout gives."""
    if interpreting() or jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        # The default, whole sectors of 32 bytes, refuses our accumulators. jax 0.10 has no `store`.
        plgpu.store(ref, value, optimized=False)  # type: ignore[attr-defined]


def broadcast(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcast one value per row (axis 0) or per column (axis 1) to a whole tile."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def copy_rows(source: Any, before: tuple[Any, ...], start: Any, head: Any, to: Any, barrier: Any) -> None:
    """Begin to copy rows of one head, `source[*before, start : start + len(to), head]`, to tiled shared memory (TMA).

    Every copy to `tiled` memory passes through here. It moves tiles of 8 rows: hardware would deliver zeros for rows of
    a copy that begins within one. In the interpreter such a copy makes the kernel raise.
    """
    if (interpreter := INTERPRETER.get()) is not None:
        jax.debug.callback(functools.partial(_check_start, interpreter.errors, len(source.shape), to.shape), start)
    plgpu.copy_gmem_to_smem(source.at[(*before, pl.ds(start, to.shape[0]), head)], to, barrier)


def _check_start(errors: list[str], rank: int, shape: tuple[int, ...], start: Array) -> None:
    if start % ROWS_OF_TILE:
        errors.append(
            f"a copy of {shape[0]} rows of an operand of rank {rank} begins at row {start}, not at a multiple of 8"
        )
