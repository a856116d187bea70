"""Values, state and gradients of `attention` against the float64 oracle, for each implementation."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import RULES, SHAPES, Case, cases, error, run
from attention_test_base import AttentionTestBase
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels import attention
from longctx.kernels.attention.kernel import Kernel, Operands
from longctx.kernels.attention.mask import Tokens
from longctx.kernels.attention.rule import AttentionRule
from longctx.kernels.mosaic_gpu import adapter
from longctx.kernels.triton import adapter as triton

LIMITED = ("first", "last", "first and last")


class TestXla(AttentionTestBase):
    implementation = "xla"
    examples, half_examples = 5, 2

    @given(cases(st.sampled_from(SHAPES), LIMITED))
    @settings(max_examples=6)
    def test_first_and_last_position_of_each_query(self, case: Case) -> None:
        self.check_float32(case)


@given(cases(st.sampled_from(SHAPES[2:4]), LIMITED))
@settings(max_examples=4)
def test_limits_of_queries_are_a_bias_of_booleans(case: Case) -> None:
    """As the dense oracle takes them from the same code as all other implementations."""
    batch, positions = case.arrays["q"].shape[:-3], case.masks["kv_positions"]
    seen = np.ones((*batch, case.arrays["q"].shape[-3], len(positions)), bool)
    if (first := case.masks.get("q_first")) is not None:
        seen &= positions >= first[..., None]
    if (last := case.masks.get("q_last")) is not None:
        seen &= positions <= last[..., None]
    masks = {name: x for name, x in case.masks.items() if name not in ("q_first", "q_last")}
    with jax.enable_x64(True):
        got, bias = run(case, jnp.float64, "reference", gradients=False), seen[..., None, :, :]
        want = attention(**case.arrays, **masks, bias=bias, **RULES[case.rule], implementation="reference")
    for name, x in zip(("out", "lse"), want, strict=True):
        assert error(got[name], np.asarray(x)) < 1e-12


@pytest.mark.slow
class TestReference(AttentionTestBase):
    implementation = "reference"
    examples, half_examples, slow_examples = 3, 1, 5


class TestTriton(AttentionTestBase):
    """Interpreted on the CPU."""

    implementation = "triton"
    # Head sizes of one piece, and of two; groups that fill tiles, that do not, and that take several.
    shapes = (
        ((), 40, 300, 1, 3, 24, 3),
        ((2, 1), 70, 150, 2, 4, 80, 12),
        ((2,), 3, 700, 1, 70, 8),
    )
    half_shapes = (((), 70, 200, 2, 2, 64), ((), 130, 90, 1, 1, 96, 40))
    any_shape = st.tuples(
        st.sampled_from([(), (1,), (2,), (2, 1)]),
        st.integers(1, 300),
        st.integers(1, 500),
        st.integers(1, 2),
        st.sampled_from([1, 2, 3, 4, 8, 130]),
        st.integers(1, 260),
    )
    rules = ("causal", "all", "window", "both sides", "soft cap")
    examples, half_examples, slow_examples = 2, 2, 60
    supports_float64 = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return triton.interpreted()


class TestMosaicGpu(AttentionTestBase):
    """In the interpreter, which takes seconds for a thread block: few of them, with several tiles each."""

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
    rules = ("causal", "all", "window", "both sides", "first and last")
    half_examples, slow_examples = 1, 60
    supports_float32 = False
    supports_float64 = False
    supports_gradients = False

    def where(self) -> contextlib.AbstractContextManager[None]:
        return adapter.interpreted()

    @pytest.mark.slow
    def test_scores_far_apart_stay_finite(self) -> None:
        super().test_scores_far_apart_stay_finite()

    @pytest.mark.slow
    def test_out_dtype_is_that_of_q(self) -> None:
        super().test_out_dtype_is_that_of_q()

    @pytest.mark.slow
    @pytest.mark.parametrize("where", ["keys", "values"])
    def test_not_a_number_behind_the_mask(self, where: str) -> None:
        super().test_not_a_number_behind_the_mask(where)

    @pytest.mark.slow
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_plan_serves_calls_of_its_shapes(self, causal: bool) -> None:
        super().test_a_plan_serves_calls_of_its_shapes(causal)

    @pytest.mark.slow
    def test_a_worker_for_each_tile(self) -> None:
        """Several KV heads and query heads not folded; out is written in 16 bits, and nothing is merged."""
        q, k, v = (jnp.asarray(self.rng.standard_normal((130, heads, 64)), jnp.bfloat16) for heads in (2, 2, 2))
        with adapter.interpreted(num_multiprocessors=1):
            got = attention(q, k, v)
        self.compare(got, attention(q, k, v, implementation="reference"))

    @pytest.mark.slow
    def test_shared_keys_in_one_array_after_a_state(self) -> None:
        """As in the hops of a ring."""
        q, kv, out = (self.rng.standard_normal(shape) for shape in ((2, 5, 2, 64), (2, 1, 140, 1, 64), (2, 5, 2, 64)))
        q, kv = (jnp.asarray(x, jnp.bfloat16) for x in (q, kv))
        lse = jnp.asarray(self.rng.standard_normal((2, 5, 2)), jnp.float32).at[0, :2].set(-jnp.inf)
        out = jnp.where((lse == -jnp.inf)[..., None], 0, jnp.asarray(out, jnp.float32))
        queries, keys = (Tokens(x, jnp.zeros_like(x)) for x in (jnp.arange(100, 105)[None], jnp.arange(140)[None]))
        operands = Operands(q, kv, kv, queries, keys)
        with self.where():
            got = Kernel("mosaic_gpu", AttentionRule(True, 0.125)).forward(operands, (out, lse))
        self.compare(got, Kernel("xla", AttentionRule(True, 0.125)).forward(operands, (out, lse)))

    @pytest.mark.parametrize(("length", "reserved", "num_workers"), [(5, 9, 1), (1100, 2, 5)])
    def test_beside_hops_multiprocessors_are_left_free(self, length: int, reserved: int, num_workers: int) -> None:
        """One worker on each of the others, where tiles are divided and where they are whole; at least one."""
        queries, keys = (Tokens(x, jnp.zeros_like(x)) for x in (jnp.arange(length)[None], jnp.arange(2000)[None]))
        kernel = Kernel("mosaic_gpu", AttentionRule(True, 0.125), reserved_multiprocessors=reserved)
        with adapter.interpreted(num_multiprocessors=7):
            q, k = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (length, 2000))
            plan = jax.eval_shape(lambda *x: kernel.plan(q, k, *x), queries, keys)
        assert len(plan.work.workers) == num_workers

    @pytest.mark.slow
    @pytest.mark.parametrize(("q_length", "kv_length", "heads"), [(5, 300, 1), (260, 260, 2)])
    def test_results_are_those_of_a_smaller_gpu(self, q_length: int, kv_length: int, heads: int) -> None:
        """Three workers of five, an odd number that divides neither tiles nor blocks, after the state of a hop."""
        q, k, out = (self.rng.standard_normal((1, n, heads, 64)) for n in (q_length, kv_length, q_length))
        q, k = (jnp.asarray(x, jnp.bfloat16) for x in (q, k))
        lse = jnp.asarray(self.rng.standard_normal((1, q_length, heads)), jnp.float32)
        state = jnp.asarray(out, jnp.float32), lse
        positions = jnp.arange(kv_length)[None]
        queries, keys = (Tokens(x, jnp.zeros_like(x)) for x in (positions[:, -q_length:], positions))
        operands = Operands(q, k, k, queries, keys)
        with adapter.interpreted(num_multiprocessors=5):
            got = Kernel("mosaic_gpu", AttentionRule(True, 0.125), reserved_multiprocessors=2).forward(operands, state)
        with adapter.interpreted(num_multiprocessors=3):
            smaller = Kernel("mosaic_gpu", AttentionRule(True, 0.125)).forward(operands, state)
        for x, y in zip(got, smaller, strict=True):
            np.testing.assert_array_equal(x, y)
        self.compare(got, Kernel("xla", AttentionRule(True, 0.125)).forward(operands, state))

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def compare(self, got: tuple[jax.Array, jax.Array], want: tuple[jax.Array, jax.Array]) -> None:
        np.testing.assert_allclose(got[0].astype(jnp.float32), want[0].astype(jnp.float32), atol=2e-2)
        np.testing.assert_allclose(got[1], want[1], atol=1e-5)
