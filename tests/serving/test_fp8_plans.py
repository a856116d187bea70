"""Engines with FP8 weights: every plan gives the tokens of the dense model; what such a model needs of memory."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from dense_oracle import LENGTH, Oracle, make_engine, make_model

from longctx.models import LlamaConfig, RowwiseFp8
from longctx.models.footprint import cache_bytes, weight_bytes
from longctx.models.llama import Llama
from longctx.models.sharded_params import device_config
from longctx.parallel import make_mesh
from longctx.serving import EngineConfig, ParallelPlan, SamplingParams
from longctx.serving.engine.memory import estimate, param_bytes
from longctx.serving.runner.paged_cache import PagedCache

PROMPTS = [list(np.random.default_rng(i).integers(8, 50, size=length)) for i, length in enumerate((40, 13, 27))]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SIZES = [*itertools.product((1, 2), (1,), (1, 2, 4)), (1, 2, 2), (3, 1, 2), (3, 2, 1), (4, 1, 1)]
SOME = [((3, 1, 2), "all")]  # 3 stages don't divide the 4 layers
LLAMA_405B = LlamaConfig.preset("llama-3.1-405b")


@functools.cache
def oracle_of(modules: str) -> Oracle:
    """8 query and 2 KV heads. Under `"ffn"` three layers of stage 0 are like those of stage 1 but for one place."""
    plain = make_model(4, 8, 2)
    return Oracle(Llama(dataclasses.replace(plain.config, quantization=RowwiseFp8.of(4, modules))))


def check(sizes: tuple[int, int, int], modules: str, **options: Any) -> None:
    oracle = oracle_of(modules)
    shapes = {"page_size": 8, "num_pages": 24, "token_budget": 16, "buckets": (16,), "max_length": LENGTH}
    engine = make_engine(None, oracle, ParallelPlan(*sizes, **options), **shapes)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert oracle.agrees(list(output.token_ids), prompt, GREEDY)
        assert len(set(output.token_ids)) > 4


@pytest.mark.parametrize(("sizes", "modules"), SOME, ids=str)
def test_tokens_equal_those_of_the_dense_model(sizes: tuple[int, int, int], modules: str) -> None:
    check(sizes, modules)


@pytest.mark.parametrize(
    "sizes", [(1, 2, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1, 4, 1), (2, 2, 1)))], ids=str
)
def test_rows_are_quantised_by_their_maximum_over_context_ranks(sizes: tuple[int, int, int]) -> None:
    """Devices of both axes share the inputs of wo and w_down; requests grow onto all ranks."""
    check(sizes, "all", ffn="all", rank_tokens=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "modules"), [case for case in itertools.product(SIZES, ("ffn", "all")) if case not in SOME], ids=str
)
def test_tokens_of_more_plans_equal_those_of_the_dense_model(sizes: tuple[int, int, int], modules: str) -> None:
    check(sizes, modules)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("modules", [None, "ffn", "all"])
def test_bytes_by_arithmetic_are_those_of_the_arrays(modules: str | None, tied: bool) -> None:
    quantization = None if modules is None else RowwiseFp8.of(4, modules)
    config = LlamaConfig(
        90, 32, 48, 4, 8, 2, 8, tie_embeddings=tied, qkv_bias=not tied, max_positions=256, quantization=quantization
    )
    for stage, tensor, dtype in itertools.product((1, 2, 3, 4), (1, 2), (np.float32, jax.numpy.bfloat16)):
        mesh, size = make_mesh(stage, 1, tensor), np.dtype(dtype).itemsize
        assert weight_bytes(config, stage, tensor, size) == param_bytes(Llama(config), mesh, dtype)
        if stage < 3:
            bytes_of = functools.partial(param_bytes, Llama(config), make_mesh(stage, 2, tensor), dtype)
            assert weight_bytes(config, stage, tensor, size, ffn_ranks=2) == bytes_of("all") < bytes_of("tensor")
        local = device_config(config, mesh)
        for kv_dtype in (None, "float8_e4m3fn"):
            of = kv_dtype or dtype
            cache = PagedCache.abstract(local, 3, 10, of, num_stages=stage)
            assert cache_bytes(config, 30, stage, tensor, size, kv_dtype) == _bytes(cache) // (stage * tensor)


def _bytes(arrays: object) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def test_405b_in_fp8_and_its_cache_of_128k_fit_8_gpus_of_80_gb() -> None:
    """With one host of 8; in bfloat16 the weights alone don't."""
    quantized = dataclasses.replace(LLAMA_405B, quantization=RowwiseFp8.of(126))
    tokens = 128 * 1024
    for plan in (ParallelPlan(tensor=8), ParallelPlan(stage=2, tensor=4)):
        plan.check(quantized, 8, 80e9, tokens)
    assert weight_bytes(quantized, 1, 8) / 1e9 == pytest.approx(60.9, abs=0.1)
    assert cache_bytes(quantized, tokens, 1, 8) / 1e9 == pytest.approx(8.5, abs=0.1)
    with pytest.raises(ValueError, match=r"needs 101\.5 GB of weights and 8\.5 GB .* 131072 tokens .* has 80\.0 GB"):
        ParallelPlan(tensor=8).check(LLAMA_405B, 8, 80e9, tokens)
    with pytest.raises(ValueError, match="context the latter"):
        ParallelPlan(tensor=8).check(quantized, 8, 80e9, 400_000)
    ParallelPlan(context=2, tensor=8).check(quantized, 16, 80e9, 400_000)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ((float("nan"),), ValueError, "device_bytes"),
        ((-1.0,), ValueError, "device_bytes"),
        ((float("inf"),), ValueError, "device_bytes"),
        (("80e9",), TypeError, "device_bytes"),
        ((80e9, -1), ValueError, "tokens"),
        ((80e9, 1.5), TypeError, "tokens"),
        ((None, "many"), TypeError, "tokens"),
    ],
)
def test_memory_and_tokens_of_a_wrong_kind_are_named(arguments: tuple, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=f"{named} must be"):
        ParallelPlan(tensor=8).check(LLAMA_405B, 8, *arguments)


def test_an_engine_estimates_what_quantised_weights_take() -> None:
    model = oracle_of("all").model
    plain = Llama(dataclasses.replace(model.config, quantization=None))
    config = EngineConfig(page_size=4, max_running=2, token_budget=8)
    ours, theirs = (estimate(m, config, make_mesh(), np.float32, 10, 64) for m in (model, plain))
    assert ours.weights == param_bytes(model, make_mesh(), np.float32)  # it is not arranged anew on CPUs
    assert theirs.weights == 2 * param_bytes(plain, make_mesh(), np.float32)
    assert (ours.pages, ours.steps) == (theirs.pages, theirs.steps)
