"""The parts of Pallas that differ between versions, are private, or differ in the interpreter.

Three private names are used: `InterpretGPUParams` (public from jax 0.12 on) runs a kernel's threads, copies and
barriers on a CPU, `get_races` says whether any of them raced, and `_get_ptxas_isa_version` which PTX the ptxas in use
reads.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu.device import INTERPRETER, Interpreter

# Layouts of wgmma accumulators: the tile, and its reductions to one value per row or per column.
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)


@contextlib.contextmanager
def interpreted(num_multiprocessors: int = 2, detect_races: bool = True) -> Iterator[None]:
    """Within this context the device is a Hopper GPU with few multiprocessors, interpreted on the CPU.

    It takes about a second for each thread block and warpgroup. Don't use it under `jax.jit`, where the interpreter's
    threads deadlock.

    Raises:
      RuntimeError: the interpreter found a race.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        params = plgpu.InterpretGPUParams
    else:
        from jax._src.pallas.mosaic_gpu.interpret import params as private

        params = private.InterpretGPUParams
    token = INTERPRETER.set(Interpreter(params(detect_races=detect_races), num_multiprocessors))
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            yield
    finally:
        INTERPRETER.reset(token)


def ptx_version() -> tuple[int, Path] | None:
    """The newest PTX that Mosaic's assembler reads (88 for 8.8), and the library that says so; None without one."""
    try:
        from jax._src.lib import mosaic_gpu as private

        library = private._mosaic_gpu_ext
        return library._get_ptxas_isa_version(), Path(library.__file__)
    except (ImportError, AttributeError, RuntimeError):  # no CUDA plugin, another version of it, or no ptxas
        return None


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
        # jax 0.11 changes the default.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter and interpreter.params,
        **options,
    )

    def checked(*operands: Array) -> list[Array]:
        results = run(*operands)
        if interpreter and interpreter.params.detect_races:
            _check_races(results)
        # Some versions drop the mesh axes that `out_type` asks for.
        return [_vary_over(varying.varying, x) for x in results]

    return checked


def _vary_over(axes: frozenset[str], x: Array) -> Array:
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, missing, to="varying") if missing else x


def _check_races(results: Any) -> None:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as private

    jax.block_until_ready(results)
    if private.get_races().races_found:
        raise RuntimeError("the interpreter found a race; it has printed where")


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that wgmma reads: tiles of 8 rows by 128 bytes, swizzled."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def pad_for_tma(x: Array, axis: int, missing: int) -> Array:
    """Pad an axis for block copies that reach beyond its end by up to `missing` elements.

    TMA reads zeros there, so on a GPU an array is padded (and copied) only to the whole tiles of 8 that Pallas asks
    for. The interpreter refuses to read there, so for it all missing elements are padded.
    """
    if not interpreting():
        missing = min(missing, -x.shape[axis] % 8)
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def set_registers(number: int, action: str) -> None:
    """Set the register limit of this warpgroup."""
    if not interpreting():
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


def broadcast(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcast one value per row (axis 0) or per column (axis 1) to a whole tile."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def product(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a @ b.T in float32, a and b in shared memory; `meanwhile` runs once the product has been issued."""
    if interpreting():
        out = jnp.matmul(a[...], b[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the race detector needs it between a plain read and the copy that overwrites
        meanwhile()
        return out

    def run(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def accumulate(acc: Array, a: Array, b: Any) -> Array:
    """acc + a @ b, with a in registers and b in shared memory."""
    if interpreting():
        acc = acc + jnp.matmul(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def product_onto(start: Array, a: Any, b: Any) -> Array:
    """start + a @ b.T in float32, with a and b in shared memory."""
    if interpreting():
        return start + product(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b.transpose((1, 0))))(plgpu.ACC.init(start))


def products_onto(
    starts: tuple[Array, Array], first: tuple[Any, Any], second: tuple[Any, Any], beside: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """(`beside` of the first `product_onto`, the second one); `beside` runs while the second product is in flight."""
    if interpreting():
        return beside(product_onto(starts[0], *first)), product_onto(starts[1], *second)

    def run(refs: Any) -> None:
        for ref, (a, b) in zip(refs, (first, second), strict=False):
            plgpu.wgmma(ref, a, b.transpose((1, 0)))
        refs[2][...] = beside(plgpu.wgmma_accumulator_load(refs[0], wait_n=1))

    _, total, value = pl.run_state(run)((*map(plgpu.ACC.init, starts), cast(jnp.zeros_like(starts[0]), TILE)))
    return value, total


def accumulate_all(accs: list[Array], factors: list[tuple[Any, Any]]) -> list[Array]:
    """acc + a @ b for each acc and its (a, b), all in flight at once; a in registers, b in shared memory."""
    if interpreting():
        return [accumulate(acc, a, b) for acc, (a, b) in zip(accs, factors, strict=True)]

    def run(refs: Any) -> None:
        for ref, (a, b) in zip(refs, factors, strict=True):
            plgpu.wgmma(ref, a, b)

    return list(pl.run_state(run)([plgpu.ACC.init(acc) for acc in accs]))
