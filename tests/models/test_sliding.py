"""Layers with a sliding window and attention sinks: gpt-oss's attention, packing, stages, gradients, NNX."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hf_reference import greedy, logits

from longctx.models import Llama, LlamaConfig, RopeConfig, weight_bytes
from longctx.models.hf_names import Layout, layouts
from longctx.models.layer_stacks import put_together
from longctx.models.params import Params
from longctx.models.rope_config import YarnScaling, rope_from_hf
from longctx.nnx import to_nnx
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, SamplingParams

WINDOW = 5
CONFIG = LlamaConfig(
    *(64, 32, 48, 4, 4, 2, 8),
    rope=RopeConfig(1000.0),
    qk_norm=True,
    gemma_style=True,
    tie_embeddings=True,
    sliding_window=WINDOW,
    sliding_layers=(True, False, True, True),
    local_rope_theta=100.0,
    query_pre_attn_scalar=16.0,
    max_positions=256,
)
MODEL = Llama(CONFIG)
TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(2, 24))


@functools.cache
def params() -> Params:
    weights = MODEL.init(jax.random.key(0), initializer_range=0.2)
    keys = iter(jax.random.split(jax.random.key(1), 16))
    noise = lambda path, x: 0.3 * jax.random.normal(next(keys), x.shape) if "norm" in path[-1].key else x  # noqa: E731
    return jax.tree.map_with_path(noise, weights)


def close(actual: Any, expected: Any, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=atol)


@functools.cache
def gpt_oss() -> transformers.PreTrainedModel:
    """Of random weights, whose experts give nothing: the stack of attention layers is left."""
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        max_position_embeddings=256,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name or "sinks" in name else 0.0, 0.5)
            if "experts" in name:
                parameter.zero_()
    return model


@functools.cache
def gpt_oss_here() -> tuple[Llama, Params]:
    """The same layers and weights, with a feed-forward of zeros."""
    theirs = gpt_oss().config
    config = LlamaConfig(
        *(64, 32, 16, 4, 4, 2, 16),
        rope=rope_from_hf(theirs.to_dict()),
        norm_eps=theirs.rms_norm_eps,
        qkv_bias=True,
        out_bias=True,
        attention_sinks=True,
        sliding_window=theirs.sliding_window,
        sliding_layers=tuple(kind == "sliding_attention" for kind in theirs.layer_types),
        max_positions=256,
    )
    assert config.sliding_layers == (True, False, True, False)
    assert config.rope.scaling == YarnScaling(32.0, 4096, truncate=False)
    state = {name: tensor.numpy() for name, tensor in gpt_oss().state_dict().items()}

    def load(layout: Layout) -> jax.Array:
        files = [state.get(str(name), np.zeros(layout.file_shape, np.float32)) for name in layout.names]
        tensors = [layout.from_file(jnp.asarray(x), layout.shape) for x in files]
        return jnp.stack(tensors) if layout.stacked else tensors[0]

    return Llama(config), jax.tree.map(load, layouts(config))


def test_attention_of_gpt_oss_is_that_of_transformers() -> None:
    """Sinks, biases of q, k, v and the output, and a window in every other layer."""
    model, weights = gpt_oss_here()
    assert weight_bytes(model.config, dtype_bytes=4) == sum(x.nbytes for x in jax.tree.leaves(weights))
    expected = logits(gpt_oss(), TOKENS)
    assert np.ptp(expected) > 5
    close(model(weights, TOKENS), expected, atol=1e-4)


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(),
        ParallelPlan(context=2, tensor=2, ffn="all", rank_tokens=16),
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                ParallelPlan(context=2, rank_tokens=16),
                ParallelPlan(context=2, placement="interleave", exchange="pass_kv"),
                ParallelPlan(context=2, placement="interleave", exchange="pass_q"),
                ParallelPlan(stage=2, tensor=2),
            )
        ),
    ],
    ids=str,
)
def test_an_engine_of_gpt_oss_gives_the_tokens_of_transformers(plan: ParallelPlan) -> None:
    """Sinks count once: in chunks, in decodes, over pages of several ranks, and in pages that requests share."""
    model, weights = gpt_oss_here()
    shapes = {"page_size": 4, "num_pages": 48, "max_running": 4, "max_length": 64, "token_budget": 8, "buckets": (8,)}
    engine = Engine(model, weights, EngineConfig(**shapes), make_mesh(plan.stage, plan.context, plan.tensor), plan=plan)
    document, sampling = np.random.default_rng(1).integers(64, size=37).tolist(), SamplingParams(max_tokens=12)
    for prompts in ([[*document, 9], TOKENS[0].tolist()], [[*document, 9, 7]]):
        outputs = engine.generate(prompts, sampling)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = greedy(gpt_oss(), np.array([prompt]), 12)[0]
            assert len(set(expected.tolist())) > 4, "the reference must vary to show anything"
            assert [*output.token_ids] == expected.tolist()
    assert outputs[0].metrics.cached_tokens == 36


def test_a_query_sees_the_tokens_of_its_window_alone() -> None:
    """In a model whose layers all slide, a token reaches `layers * (window - 1)` further, and no more."""
    model = Llama(dataclasses.replace(CONFIG, sliding_layers=(True,) * 4))
    weights = params()
    changed = TOKENS.copy()
    changed[:, 0] = (changed[:, 0] + 1) % CONFIG.vocab_size
    difference = np.abs(np.asarray(model(weights, TOKENS) - model(weights, changed))).max((0, 2))
    reach = CONFIG.num_layers * (WINDOW - 1)
    assert (difference[: reach + 1] > 0).all()
    assert (difference[reach + 1 :] == 0).all()


def test_packed_sequences_have_windows_of_their_own() -> None:
    packed = np.concatenate([TOKENS[0, :13], TOKENS[1, :11]])
    segments, positions = np.repeat([0, 1], (13, 11)), np.array([*range(13), *range(11)])
    found = MODEL(params(), packed, positions, segments)
    close(found[:13], MODEL(params(), TOKENS[0, :13]))
    close(found[13:], MODEL(params(), TOKENS[1, :11]))


def test_layers_that_are_apart_and_those_of_stages_slide_alike() -> None:
    apart = MODEL.init(jax.random.key(0), initializer_range=0.2, apart=True)
    stacked = MODEL.init(jax.random.key(0), initializer_range=0.2)
    close(MODEL(apart, TOKENS), MODEL(stacked, TOKENS))
    assert jax.tree.structure(put_together(apart["layers"])) == jax.tree.structure(stacked["layers"])


def test_the_window_must_be_given_to_layers() -> None:
    rope, x = MODEL.rope(jnp.arange(3)), jnp.zeros((3, 32))
    with pytest.raises(ValueError, match="`sliding` must say"):
        MODEL.run_layers(params()["layers"], x, rope, lambda *_, **__: None, None)
    layer = jax.tree.map(lambda x: x[0], params()["layers"])
    with pytest.raises(ValueError, match="`is_sliding` must say"):
        MODEL.layer(layer, jnp.int32(0), x, rope, lambda *_, **__: None, None)


def loss(weights: Params) -> jax.Array:
    return jax.nn.logsumexp(MODEL(weights, TOKENS), axis=-1).mean()


def test_gradients_are_those_of_differences() -> None:
    gradients = jax.jit(jax.grad(loss))(params())
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(gradient).all(), path
        assert np.abs(gradient).max() > 1e-6, path
    direction = jax.tree.map(jnp.sign, gradients)
    moved = [jax.tree.map(lambda x, d, s=sign: x + s * 1e-4 * d, params(), direction) for sign in (1, -1)]
    slope = float(loss(moved[0]) - loss(moved[1])) / 2e-4
    total = sum(float(jnp.vdot(g, d)) for g, d in zip(*map(jax.tree.leaves, (gradients, direction)), strict=True))
    assert slope == pytest.approx(total, rel=2e-2)


def test_a_module_slides_too() -> None:
    module = to_nnx(MODEL, params())
    close(module(TOKENS), MODEL(params(), TOKENS))
