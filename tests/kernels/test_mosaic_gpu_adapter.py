"""What stands for the hardware in the interpreter: asynchronous products, tiled copies, padding."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.mosaic_gpu.wgmma import Accumulator, multiply

SHAPE = (64, 64)


def draw(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def interpret(kernel: Callable[..., None], scratch: list[Any], *operands: Array) -> Array:
    """Interpret a kernel in one warpgroup; its result is float32 `[64, 64]`."""
    with adapter.interpreted():
        call = adapter.kernel(
            kernel,
            [(SHAPE, jnp.float32)],
            like=operands[0],
            kernel_name="test",
            grid=(1,),
            grid_names=("block",),
            num_threads=1,
            scratch_types=scratch,
        )
        return call(*operands)[0]


def run(body: Callable[[Any, Any, Any], None], a: Array, b: Array) -> Array:
    """Interpret `body(a_smem, b_smem, out)` in one warpgroup: `[64, 64]` operands, a float32 result of that shape."""

    def kernel(a_ref: Any, b_ref: Any, out: Any, a_smem: Any, b_smem: Any, ready: Any) -> None:
        for i, (x, to) in enumerate(((a_ref, a_smem), (b_ref, b_smem))):
            adapter.copy_rows(x, (), 0, 0, to, ready.at[i])
            plgpu.barrier_wait(ready.at[i])
        body(a_smem, b_smem, out)

    scratch = [*(adapter.tiled(SHAPE, a.dtype),) * 2, plgpu.Barrier(num_barriers=2)]
    return interpret(kernel, scratch, a[:, None], b[:, None])


def close(got: Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("in_registers", [False, True])
def test_products_from_zeros_and_from_an_array(transposed: bool, in_registers: bool) -> None:
    """Two in flight: the first is used while the second may still run."""
    a, b = draw(0, *SHAPE), draw(1, *SHAPE)

    def body(a_smem: Any, b_smem: Any, out: Any) -> None:
        def products(of_first: Accumulator, of_second: Accumulator) -> Array:
            of_first.issue(a_smem[...] if in_registers else a_smem, b_smem, transposed)
            of_second.issue(a_smem, b_smem)
            first = of_first.awaited(in_flight=1) * 2
            return first + of_second.awaited()

        start = jnp.full(SHAPE, 7.0, jnp.float32)
        out[...] = multiply([SHAPE, start], products, like=start)

    x, y = (z.astype(jnp.float32) for z in (a, b))
    close(run(body, a, b), 2 * x @ (y.T if transposed else y) + 7 + x @ y)


@pytest.mark.parametrize("written", ["before it is awaited", "after it was awaited"])
def test_operands_are_read_until_a_product_is_awaited(written: str) -> None:
    a, b = draw(0, *SHAPE), draw(1, *SHAPE)

    def body(a_smem: Any, b_smem: Any, out: Any) -> None:
        def products(accumulator: Accumulator) -> Array:
            accumulator.issue(a_smem, b_smem)
            if written == "before it is awaited":
                b_smem[...] = jnp.ones(SHAPE, jnp.bfloat16)
            result = accumulator.awaited()
            b_smem[...] = jnp.ones(SHAPE, jnp.bfloat16)
            return result

        out[...] = multiply([SHAPE], products)

    got = run(body, a, b)
    if written == "before it is awaited":
        assert bool(jnp.isnan(got).all())
    else:
        close(got, a.astype(jnp.float32) @ b.astype(jnp.float32))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_product_that_may_be_in_flight_has_no_value(in_flight: int) -> None:
    x = jnp.zeros(SHAPE, jnp.bfloat16)

    def products(first: Accumulator, second: Accumulator) -> Array:
        first.issue(x, x)
        second.issue(x, x)
        return (first if in_flight == 2 else second).awaited(in_flight)

    with adapter.interpreted(), pytest.raises(ValueError, match=f"2 products, of which {in_flight} may be in flight"):
        multiply([SHAPE, SHAPE], products)


def test_an_accumulator_takes_one_product() -> None:
    x = jnp.zeros(SHAPE, jnp.bfloat16)

    def products(accumulator: Accumulator) -> Array:
        accumulator.issue(x, x)
        accumulator.issue(x, x)
        return accumulator.awaited()

    with adapter.interpreted(), pytest.raises(ValueError, match="takes one product"):
        multiply([SHAPE], products)


def copied(start: int) -> Array:
    """Rows of a head from `start` on, copied in the interpreter; `start` is known to the device alone."""
    x = draw(2, 128, 2, 64)

    def kernel(x_ref: Any, start_ref: Any, out: Any, smem: Any, ready: Any) -> None:
        adapter.copy_rows(x_ref, (), start_ref[0], 1, smem, ready)
        plgpu.barrier_wait(ready)
        out[...] = smem[...].astype(jnp.float32)

    out = interpret(kernel, [adapter.tiled(SHAPE, x.dtype), plgpu.Barrier()], x, jnp.array([start], jnp.int32))
    np.testing.assert_array_equal(out, x[start : start + 64, 1].astype(jnp.float32))
    return out


@pytest.mark.parametrize("start", [0, 24, 64])
def test_copies_begin_at_whole_tiles(start: int) -> None:
    copied(start)


@pytest.mark.parametrize("start", [4, 17])
def test_a_copy_that_begins_within_a_tile_is_an_error(start: int) -> None:
    """Hardware would deliver zeros for some of its rows."""
    with pytest.raises(RuntimeError, match=f"64 rows of an operand of rank 3 begins at row {start}, not at a multiple"):
        copied(start)


@pytest.mark.parametrize(("length", "missing", "on_device"), [(61, 67, 64), (64, 64, 64), (60, 2, 62), (64, 0, 64)])
def test_padding_stands_for_zeros_beyond_the_end(length: int, missing: int, on_device: int) -> None:
    """TMA delivers them, if the array ends at a whole tile of 8 or at the block's end; the interpreter refuses."""
    x = jnp.ones((2, length, 3))
    pad = functools.partial(adapter.pad_for_tma, x, 1, missing)
    with adapter.interpreted():
        assert pad().shape == (2, length + missing, 3)
        assert not pad()[:, length:].any()
    assert pad().shape == (2, on_device, 3)
    assert not pad()[:, length:].any()


def test_layouts_are_none_in_the_interpreter() -> None:
    """`cast` and `read` change where registers lie, and no value."""
    x = jnp.arange(64.0)
    with adapter.interpreted():
        assert adapter.cast(x, adapter.ROW) is x
        np.testing.assert_array_equal(adapter.read(x, adapter.ROW), x)
    with pytest.raises(NotImplementedError, match="layout_cast"):
        jax.block_until_ready(adapter.cast(x, adapter.ROW))
