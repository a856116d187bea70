"""The tests of every implementation of `attention`. A subclass says what it supports and where it runs."""

import contextlib
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ANY_SHAPE, RULES, SHAPES, Case, cases, error, oracle, run
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.kernels import attention, plan_attention

HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


class AttentionTestBase:
    implementation: str
    shapes: Any = SHAPES
    half_shapes: Any = SHAPES[-2:]
    any_shape: Any = ANY_SHAPE
    rules: Sequence[str] = tuple(RULES)
    examples, half_examples, slow_examples = 30, 12, 150
    supports_float32 = True
    supports_float64 = True
    supports_gradients = True

    def where(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __init_subclass__(cls) -> None:
        """Make the drawn tests of each class, which differ in shapes and number."""

        def float32(self: AttentionTestBase, case: Case) -> None:
            self.check_float32(case)

        def half(self: AttentionTestBase, case: Case, dtype: str) -> None:
            self.check_half(case, HALF[dtype])

        dtype = st.sampled_from(sorted(HALF))
        shapes, half_shapes = st.sampled_from(cls.shapes), st.sampled_from(cls.half_shapes)
        few, some, many = (settings(max_examples=n) for n in (cls.half_examples, cls.examples, cls.slow_examples))
        if cls.supports_float32:
            cls.test_float32_agrees_with_oracle = some(given(cases(shapes, cls.rules))(float32))
            cls.test_float32_agrees_with_oracle_for_any_shape = pytest.mark.slow(
                many(given(cases(cls.any_shape, cls.rules))(float32))
            )
        else:
            cls.test_half_precision_for_any_shape = pytest.mark.slow(
                many(given(cases(cls.any_shape, cls.rules), dtype)(half))
            )
        cls.test_half_precision_is_as_good_as_dense = few(given(cases(half_shapes, cls.rules), dtype)(half))

    def check_float32(self, case: Case) -> None:
        want = oracle(case)
        with self.where():
            results = run(case, jnp.float32, self.implementation, self.supports_gradients)
        for name, got in results.items():
            # Gradients of keys sum over the queries: the bound is relative to their size.
            size = np.abs(want[name][np.isfinite(want[name])]).max(initial=1.0)
            assert error(got, want[name]) < 1e-5 * size, name

    def check_half(self, case: Case, dtype: Any) -> None:
        """Within 2.5x the error of the dense computation on the same rounded inputs, plus 2e-3."""
        want, dense = oracle(case), run(case, dtype, "reference")
        with self.where():
            results = run(case, dtype, self.implementation, self.supports_gradients)
        for name, got in results.items():
            size = np.abs(want[name][np.isfinite(want[name])]).max(initial=1.0) if name[0] == "d" else 1
            assert error(got, want[name]) <= 2.5 * error(dense[name], want[name]) + 2e-3 * size, name

    def test_float64_is_honoured(self) -> None:
        if not self.supports_float64:
            with jax.enable_x64(True):
                q = jnp.ones((3, 2, 64), jnp.float64)
            with self.where(), pytest.raises(NotImplementedError, match="needs a dtype of"):
                attention(q, q, q, implementation=self.implementation)
            return
        with jax.enable_x64(True):
            q, k, v = jax.random.normal(jax.random.key(0), (3, 300, 2, 8), jnp.float64)
            out, lse = attention(q, k, v, implementation=self.implementation)
            want, want_lse = attention(q, k, v, implementation="reference")
            assert out.dtype == lse.dtype == jnp.float64
            chex.assert_trees_all_close((out, lse), (want, want_lse), rtol=0, atol=1e-13)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
    def test_no_queries_or_no_keys(self, shape: tuple[int, int]) -> None:
        q, k = jnp.ones((shape[0], 4, 64), jnp.bfloat16), jnp.ones((shape[1], 2, 64), jnp.bfloat16)
        with self.where():
            out, lse = attention(q, k, k, causal=False, implementation=self.implementation)
        assert out.shape == (shape[0], 4, 64)
        assert lse.shape == (shape[0], 4)
        assert not out.any()
        assert bool((lse == -jnp.inf).all())

    def test_scores_far_apart_stay_finite(self) -> None:
        """Scores near the float32 limits of exp: the online maximum must carry them. A scale below 0, and 0."""
        q = jnp.full((1, 1, 64), 1.0, jnp.bfloat16)
        k = jnp.broadcast_to(jnp.linspace(-3e4, 3e4, 600)[:, None, None], (600, 1, 64)).astype(jnp.bfloat16)
        mean = float(jnp.mean(k[:, 0, 0].astype(jnp.float32)))
        for scale, out, lse in ((-1 / 64, -3e4, 3e4), (0.0, mean, np.log(600))):
            with self.where():
                got = attention(q, k, k, causal=False, scale=scale, implementation=self.implementation)
            assert float(got[1][0, 0]) == pytest.approx(lse, rel=5e-3)
            assert float(got[0][0, 0, 0]) == pytest.approx(out, rel=5e-3, abs=10.0)

    def test_out_dtype_is_that_of_q(self) -> None:
        q = jnp.ones((4, 2, 64), jnp.bfloat16)
        with self.where():
            out, lse = attention(q, q, q, implementation=self.implementation)
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)  # drawn cases ask for float32

    @property
    def dtype(self) -> Any:
        return jnp.float32 if self.supports_float32 else jnp.bfloat16

    @pytest.mark.parametrize("where", ["keys", "values"])
    def test_not_a_number_behind_the_mask(self, where: str) -> None:
        """In keys it changes nothing; in values results are NaN or right. Later positions, another segment, padding."""
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 2, 64), (150, 1, 64), (150, 1, 64)))
        positions, segments = np.arange(150), np.zeros(150, int)
        segments[:20], segments[120:] = 1, -1
        hidden = (segments != 0) | (positions > 100)
        masks = {
            "q_positions": np.arange(96, 101),
            "kv_positions": positions,
            "q_segment_ids": np.zeros(5, int),
            "kv_segment_ids": segments,
        }
        want, _ = attention(q, k, v, **masks, implementation="reference")
        (k if where == "keys" else v)[hidden] = np.nan
        with self.where():
            out, _ = attention(
                *(jnp.asarray(x, self.dtype) for x in (q, k, v)), **masks, implementation=self.implementation
            )
        right = np.abs(out.astype(jnp.float32) - want) <= (1e-5 if self.supports_float32 else 2e-2)
        assert (right | np.isnan(out.astype(jnp.float32)) if where == "values" else right).all()

    @pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_a_plan_serves_calls_of_its_shapes(self, causal: bool) -> None:
        """The results, and the gradients where there are any, are those without it, bit for bit."""
        rng = np.random.default_rng(causal)
        q, k, v = (
            jnp.asarray(rng.standard_normal(shape), self.dtype)
            for shape in ((2, 3, 4, 64), (2, 140, 2, 64), (2, 140, 2, 64))
        )
        segments = np.zeros((2, 140), int)
        segments[1, :30] = -1
        masks = np.arange(137, 140), np.arange(140), np.zeros((2, 3), int), segments

        def planned(q: Any, k: Any, v: Any) -> Any:
            types = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
            plan = plan_attention(*types, *masks, causal=causal, implementation=self.implementation)
            return attention(q, k, v, causal=causal, plan=plan)

        def unplanned(q: Any, k: Any, v: Any) -> Any:
            names = "q_positions", "kv_positions", "q_segment_ids", "kv_segment_ids"
            given = dict(zip(names, masks, strict=True))
            return attention(q, k, v, **given, causal=causal, implementation=self.implementation)

        with self.where():
            for got, want in zip(planned(q, k, v), unplanned(q, k, v), strict=True):
                np.testing.assert_array_equal(got, want)
            if self.supports_gradients:
                got, want = (jax.grad(lambda *x, f=f: f(*x)[0].sum(), (0, 1, 2))(q, k, v) for f in (planned, unplanned))
                chex.assert_trees_all_equal(got, want)
