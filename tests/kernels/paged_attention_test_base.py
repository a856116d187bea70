"""The tests of every implementation of `paged_attention`. A subclass says what it supports and where it runs."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import RULES, SHAPES, Case, cases, error, oracle, run

from longctx.kernels import merge_states, paged_attention, plan_paged_attention


class PagedAttentionTestBase:
    implementation: str
    shapes: Any = SHAPES
    half_shapes: Any = SHAPES[3:]
    rules: Sequence[str] = tuple(RULES)
    examples, half_examples, merge_examples = 20, 8, 10
    supports_float32 = True
    supports_float64 = True
    jit = True

    def where(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, case: Case, dtype: Any, bits: bool = False) -> tuple[np.ndarray, np.ndarray]:
        with self.where():
            return run(case, dtype, self.implementation, bits, self.jit)

    def __init_subclass__(cls) -> None:
        """Make the drawn tests of each class, which differ in shapes and number."""

        def float32(self: PagedAttentionTestBase, case: Case) -> None:
            assert error(self.run(case, jnp.float32), oracle(case)) < 1e-5

        def float64(self: PagedAttentionTestBase, case: Case) -> None:
            with jax.enable_x64(True):
                assert error(self.run(case, jnp.float64), oracle(case)) < 1e-13

        def half(self: PagedAttentionTestBase, case: Case, dtype: str, bits: bool) -> None:
            self.check_half(case, jnp.dtype(dtype), bits)

        def merge(self: PagedAttentionTestBase, case: Case, ranks: int, seed: int) -> None:
            self.check_ranks_merge(case, ranks, seed)

        few = settings(max_examples=cls.half_examples)
        dtype = st.sampled_from(["bfloat16", "float16"])
        half_cases = cases(cls.half_shapes, cls.rules)
        cls.test_half_precision_is_as_good_as_dense = few(given(half_cases, dtype, st.booleans())(half))
        if cls.merge_examples:
            merge_cases = given(cases(cls.shapes[:1], cls.rules), st.integers(1, 4), st.integers(0, 2**32 - 1))
            cls.test_ranks_with_some_of_the_pages_merge = settings(max_examples=cls.merge_examples)(merge_cases(merge))
        if cls.supports_float32:
            some = settings(max_examples=cls.examples)
            cls.test_float32_agrees_with_oracle = some(given(cases(cls.shapes, cls.rules))(float32))
        if cls.supports_float64:
            cls.test_float64_is_honoured = settings(max_examples=2)(given(cases(cls.half_shapes, cls.rules))(float64))

    def check_half(self, case: Case, dtype: Any, bits: bool) -> None:
        """Within 2.5x the error of the dense computation on the same rounded inputs, plus 2e-3; kept as bits or not."""
        want = oracle(case)
        got = self.run(case, dtype, bits)
        assert error(got, want) <= 2.5 * error(run(case, dtype, "reference", bits), want) + 2e-3

    def check_ranks_merge(self, case: Case, ranks: int, seed: int) -> None:
        """Pages on ranks in any order; each rank lists only its own pages, and its page index has gaps."""
        want = oracle(case)
        metadata, rng = case.metadata, np.random.default_rng(seed)
        owner = rng.integers(0, ranks, metadata["page_table"].shape)
        dtype = jnp.float32 if self.supports_float32 else jnp.bfloat16
        states = []
        for rank in range(ranks):
            order = np.argsort(owner != rank, axis=1, kind="stable")  # its own come first
            own = np.take_along_axis(owner == rank, order, 1)
            table = np.where(own, np.take_along_axis(metadata["page_table"], order, 1), -(10**6))
            index = np.where(own, np.take_along_axis(metadata["page_index"], order, 1), 2**31 - 1)
            part = case._replace(metadata=metadata | {"page_table": table, "page_index": index})
            states.append(self.run(part, dtype))
        outs, lses = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*states, strict=True))
        got = tuple(np.asarray(x, np.float64) for x in merge_states(outs, lses))
        limit = 1e-5 if self.supports_float32 else 2.5 * error(run(case, dtype, "reference"), want) + 2e-3
        assert error(got, want) < limit

    @pytest.mark.parametrize(("rows", "entries", "pages"), [(0, 3, 4), (3, 0, 4), (3, 3, 0)])
    def test_nobody_to_ask_or_nothing_to_see(self, rows: int, entries: int, pages: int) -> None:
        q, k_pages = jnp.ones((rows, 4, 64), jnp.bfloat16), jnp.ones((pages, 16, 2, 64), jnp.bfloat16)
        table, zeros = jnp.zeros((1, entries), int), jnp.zeros(rows, int)
        with self.where():
            out, lse = paged_attention(
                q, k_pages, k_pages, table, None, jnp.zeros(1, int), zeros, zeros, implementation=self.implementation
            )
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:2], jnp.float32)
        assert not out.any()
        assert bool((lse == -jnp.inf).all())

    @pytest.mark.parametrize("max_rows_per_sequence", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_a_plan_for_fewer_rows_than_a_sequence_has(self, max_rows_per_sequence: int) -> None:
        """A sequence of 33 rows, more than one tile has then, beside a decode; the results are those without a plan."""
        rng = np.random.default_rng(max_rows_per_sequence)
        heads, kv_heads = 4, 2
        dtype = jnp.float32 if self.supports_float32 else jnp.bfloat16
        q = jnp.asarray(rng.standard_normal((34, heads, 64)), dtype)
        k_pages, v_pages = (jnp.asarray(rng.standard_normal((8, 16, kv_heads, 64)), dtype) for _ in range(2))
        metadata = (
            np.arange(8).reshape(2, 4),
            None,
            np.array([40, 64]),
            np.array([39, *range(31, 64)]),
            np.array([0] + [1] * 33),
        )
        arguments = q, k_pages, v_pages, *metadata
        with self.where():
            plan = plan_paged_attention(
                heads,
                k_pages,
                *metadata,
                implementation=self.implementation,
                max_rows_per_sequence=max_rows_per_sequence,
            )
            out, lse = paged_attention(*arguments, plan=plan)
        want_out, want_lse = paged_attention(*arguments, implementation="reference")
        tolerance = 1e-5 if self.supports_float32 else 2e-2
        np.testing.assert_allclose(out.astype(jnp.float32), want_out.astype(jnp.float32), atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, atol=1e-4)
