"""Values, state and gradients of `attention` against the float64 oracle, for each implementation."""

import contextlib

import pytest
from attention_test_base import AttentionTestBase
from hypothesis import strategies as st

from longctx.kernels.hopper import adapter


class TestXla(AttentionTestBase):
    implementation = "xla"
    half_examples = 10


class TestReference(AttentionTestBase):
    implementation = "reference"
    examples, half_examples, slow_examples = 3, 1, 5


class TestMosaicGpu(AttentionTestBase):
    """In the interpreter, which takes seconds a thread block: few of them, and several tiles for each."""

    implementation = "mosaic_gpu"
    shapes = half_shapes = (
        ((), 70, 200, 1, 2, 64),
        ((), 130, 300, 1, 1, 128),
        ((), 1, 300, 1, 8, 64),
        ((2,), 30, 150, 1, 3, 64),
    )
    any_shape = st.tuples(
        st.sampled_from([(), (1,), (2,)]),
        st.integers(1, 600),
        st.integers(1, 500),
        st.integers(1, 2),
        st.integers(1, 4),
        st.sampled_from([64, 128, 256]),
    )
    half_examples, slow_examples = 4, 60
    supports_float32 = False
    supports_float64 = False
    supports_gradients = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return adapter.interpreted()


@pytest.mark.gpu
class TestMosaicGpuCompiled(AttentionTestBase):
    implementation = "mosaic_gpu"
    shapes = half_shapes = (
        ((), 1, 1, 1, 1, 64),
        ((), 1, 3000, 2, 4, 128),
        ((2,), 7, 300, 3, 1, 256),
        ((), 700, 700, 1, 8, 64),
        ((2, 1), 257, 1100, 2, 4, 128),
        ((), 1100, 257, 1, 2, 256),
        ((), 2100, 2100, 32, 1, 128),  # more tiles than four a multiprocessor: each a worker of its own
    )
    any_shape = st.tuples(
        st.sampled_from([(), (1,), (2,), (2, 1), (3, 2)]),
        st.integers(1, 1300),
        st.integers(1, 1300),
        st.integers(1, 4),
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from([64, 128, 256]),
    )
    half_examples, slow_examples = 60, 150
    supports_float32 = False
    supports_float64 = False
