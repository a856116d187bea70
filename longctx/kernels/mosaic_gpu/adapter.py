"""Everything of Pallas that differs between versions, is private, or has another form in the interpreter.

Private names, and why: `InterpretGPUParams` (public from jax 0.12 on) runs a kernel's threads, copies and barriers on a
CPU, and `get_races` says whether any of them raced. Nothing else reaches behind the public API.
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

from longctx.kernels.mosaic_gpu.device import INTERPRETER, Interpreter

# Accumulators of wgmma: rows over warps, and what is reduced to one value a row, or a column.
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)


@contextlib.contextmanager
def interpreted(num_multiprocessors: int = 2, detect_races: bool = True) -> Iterator[None]:
    """Within, the device is a Hopper GPU of a few multiprocessors, interpreted on the CPU. RuntimeError on a race.

    Slow: about a second a thread block and warpgroup. Under `jax.jit` the interpreter's threads wait for each other.
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


def interpreting() -> bool:
    return INTERPRETER.get() is not None


def traced_once(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what calls a kernel: one trace for calls of the same shapes, one lowering for those of a program.

    Layers and the hops of a ring are such calls, and a kernel takes half a second of each. Not in the interpreter.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        jitted = jax.jit(function, static_argnames=static)

        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            return (function if interpreting() else jitted)(*arguments)

        return run

    return decorate


def kernel(
    body: Callable[..., None], out_types: list[tuple[tuple[int, ...], Any]], like: Array, **how: Any
) -> Callable[..., Any]:
    """`plgpu.kernel`; results vary over the mesh axes that `like` varies over."""
    varying, interpreter = jax.typeof(like).manual_axis_type, INTERPRETER.get()
    run = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype in out_types],
        thread_name="wg",
        # jax 0.11 changes the default.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter and interpreter.params,
        **how,
    )

    def checked(*operands: Array) -> list[Array]:
        results = run(*operands)
        if interpreter and interpreter.params.detect_races:
            _check_races(results)
        # Some versions lose the axes of the types asked for.
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
    """Shared memory in the form that wgmma reads: 8 rows by 128 bytes, swizzled."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def pad_for_tma(x: Array, axis: int, missing: int) -> Array:
    """TMA reads zeros beyond an array's end; the interpreter refuses to, so for it there is room for `missing` more.

    Pallas' TMA wants a length in whole tiles of 8, so that any other is copied.
    """
    if not interpreting():
        missing = min(missing, -x.shape[axis] % 8)
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis % x.ndim else 0) for i in range(x.ndim)])


def set_registers(number: int, action: str) -> None:
    if not interpreting():
        plgpu.set_max_registers(number, action=action)  # type: ignore[arg-type]


def cast(x: Array, layout: Any) -> Array:
    return x if interpreting() else plgpu.layout_cast(x, layout)


def read(ref: Any, layout: Any) -> Array:
    """Registers of a layout straight from global memory."""
    if interpreting():
        return ref[...]
    index = ((),) if jax.__version_info__ < (0, 12) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def broadcast(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """One value a row (axis 0) or a column (axis 1) to all of a tile."""
    return lax.broadcast_in_dim(x, shape, (axis,))


def product(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """a @ b.T in float32, of shared memory; `meanwhile` runs once the product has been issued."""
    if interpreting():
        out = jnp.matmul(a[...], b[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the race detector wants it between a plain read and the copy that overwrites
        meanwhile()
        return out

    def run(acc: Any) -> Array:
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def accumulate(acc: Array, a: Array, b: Any) -> Array:
    """acc + a @ b: a in registers, b in shared memory."""
    if interpreting():
        acc = acc + jnp.matmul(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def product_onto(start: Array, a: Any, b: Any) -> Array:
    """start + a @ b.T in float32, of shared memory."""
    if interpreting():
        return start + product(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b.transpose((1, 0))))(plgpu.ACC.init(start))


def products_onto(
    starts: tuple[Array, Array], first: tuple[Any, Any], second: tuple[Any, Any], beside: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """`beside` of one `product_onto`, computed while the other is under way, and that."""
    if interpreting():
        return beside(product_onto(starts[0], *first)), product_onto(starts[1], *second)

    def run(refs: Any) -> None:
        for ref, (a, b) in zip(refs, (first, second), strict=False):
            plgpu.wgmma(ref, a, b.transpose((1, 0)))
        refs[2][...] = beside(plgpu.wgmma_accumulator_load(refs[0], wait_n=1))

    _, total, value = pl.run_state(run)((*map(plgpu.ACC.init, starts), cast(jnp.zeros_like(starts[0]), TILE)))
    return value, total


def accumulate_all(accs: list[Array], factors: list[tuple[Any, Any]]) -> list[Array]:
    """acc + a @ b for each acc with its (a, b), all under way at once; a in registers, b in shared memory."""
    if interpreting():
        return [accumulate(acc, a, b) for acc, (a, b) in zip(accs, factors, strict=True)]

    def run(refs: Any) -> None:
        for ref, (a, b) in zip(refs, factors, strict=True):
            plgpu.wgmma(ref, a, b)

    return list(pl.run_state(run)([plgpu.ACC.init(acc) for acc in accs]))
