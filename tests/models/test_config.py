"""Configurations: what is read from config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import Llama, LlamaConfig, RopeConfig
from longctx.models.config import PRESETS
from longctx.models.rope_config import LinearScaling, Llama3Scaling, YarnScaling

# As in meta-llama/Llama-3.1-8B-Instruct, keys of no consequence left out.
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

# As in Qwen/Qwen2.5-7B-Instruct-1M.
QWEN_25_1M: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 1010000,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def test_reads_llama_31() -> None:
    assert LlamaConfig.from_hf(LLAMA_31_8B) == LlamaConfig.preset("llama-3.1-8b")


def test_reads_qwen25_1m() -> None:
    config = LlamaConfig.from_hf(QWEN_25_1M)
    assert config.qkv_bias
    assert config.head_dim == 128
    assert config.max_positions == 1010000
    assert config.rope == RopeConfig(10000000.0)
    assert config.eos_ids == (151645,)


def test_reads_a_file_and_the_newer_rope_key(tmp_path: Path) -> None:
    newer = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    newer["rope_parameters"] = {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(newer))
    assert LlamaConfig.from_hf(path) == LlamaConfig.from_hf(str(path)) == LlamaConfig.preset("llama-3.1-8b")


def test_yarn_of_the_qwen_instructions_stretches_the_context() -> None:
    """Qwen's model cards add just this key; `type` is the oldest spelling."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    config = LlamaConfig.from_hf({**QWEN_25_1M, "max_position_embeddings": 32768, "rope_scaling": scaling})
    assert config.rope.scaling == YarnScaling(4.0, 32768)
    assert config.max_positions == 131072


def test_defaults_of_absent_keys() -> None:
    config = LlamaConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": None,
        }
    )
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 16, 2048)
    assert config.rope == RopeConfig(10000.0)
    assert not config.tie_embeddings
    assert config.eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_key_value_heads": 5}, "multiple of num_kv_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [], "short_factor": []}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "factor"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LlamaConfig.from_hf({**LLAMA_31_8B, **changes})


def test_files_without_an_object_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LlamaConfig.from_hf(path)
    for contents in ["{", "[]"]:
        path.write_text(contents)
        with pytest.raises(ValueError, match=r"config\.json"):
            LlamaConfig.from_hf(path)


scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, factor=st.floats(1, 64)),
    st.builds(
        Llama3Scaling,
        factor=st.floats(1, 64),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
        original_max_positions=st.integers(512, 65536),
    ),
    st.builds(
        YarnScaling,
        factor=st.floats(1, 8),
        original_max_positions=st.integers(512, 65536),
        beta_fast=st.floats(8, 64),
        explicit_attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.floats(0.5, 2),
        truncate=st.booleans(),
    ),
)
configs = st.builds(
    LlamaConfig,
    vocab_size=st.integers(1, 1000),
    hidden_size=st.integers(1, 1000),
    intermediate_size=st.integers(1, 1000),
    num_layers=st.integers(1, 100),
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 64]),
    rope=st.builds(RopeConfig, theta=st.floats(2, 1e8), scaling=scalings),
    norm_eps=st.floats(1e-8, 1e-3),
    tie_embeddings=st.booleans(),
    qkv_bias=st.booleans(),
    max_positions=st.just(2_000_000),
    bos_id=st.none() | st.integers(0, 10),
    eos_ids=st.lists(st.integers(0, 10), max_size=3).map(tuple),
)


@given(configs)
def test_to_hf_is_read_back(config: LlamaConfig) -> None:
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(LlamaConfig.from_hf(config.to_hf()))


# Billions of parameters, as the model cards count them.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.1-405b", 405.85),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
    ],
)
def test_presets_have_the_published_sizes(name: str, billions: float) -> None:
    leaves = jax.tree.leaves(Llama(LlamaConfig.preset(name)).abstract_params())
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_preset_is_tested_and_unknown_ones_are_refused() -> None:
    assert len(PRESETS) == 7
    with pytest.raises(ValueError, match=r"llama-3\.1-405b"):
        LlamaConfig.preset("llama-4")
