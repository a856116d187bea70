"""Configurations: what is read from config.json, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from longctx.models import LlamaConfig, RopeConfig
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


def test_reads_qwen3() -> None:
    """As in Qwen/Qwen3-32B, whose head size is not hidden_size / num_attention_heads."""
    config = LlamaConfig.from_hf(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 151643,
            "eos_token_id": [151645, 151643],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "max_position_embeddings": 40960,
            "max_window_layers": 64,
            "model_type": "qwen3",
            "num_attention_heads": 64,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        }
    )
    assert config == LlamaConfig.preset("qwen3-32b")


def test_reads_mistral_and_llama_2() -> None:
    """As in mistralai/Mistral-7B-v0.3 and meta-llama/Llama-2-7b-hf."""
    mistral = {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32768,
    }
    assert LlamaConfig.from_hf(mistral) == LlamaConfig.preset("mistral-7b-v0.3")
    llama = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 11008, "max_position_embeddings": 4096}
    llama |= {"num_key_value_heads": 32, "rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 32000}
    assert LlamaConfig.from_hf(mistral | llama) == LlamaConfig.preset("llama-2-7b")


# As in google/gemma-3-1b-it.
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def test_reads_gemma3() -> None:
    config = LlamaConfig.from_hf(GEMMA3_1B)
    assert config == LlamaConfig.preset("gemma3-1b")
    assert [i for i, is_sliding in enumerate(config.sliding_layers) if not is_sliding] == [5, 11, 17, 23]
    stretched = LlamaConfig.from_hf(GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert stretched == dataclasses.replace(config, rope=RopeConfig(1000000.0, LinearScaling(8.0)))
    assert LlamaConfig.from_hf(GEMMA3_1B | {"query_pre_attn_scalar": 168}).query_pre_attn_scalar == 168


def test_reads_the_newer_rope_key_of_gemma3() -> None:
    newer = {key: value for key, value in GEMMA3_1B.items() if not key.startswith("rope")}
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    config = LlamaConfig.from_hf(newer)
    assert config.rope == RopeConfig(2e6, LinearScaling(8.0))
    assert config.local_rope_theta == 3e4


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": 7},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3, "sliding_window": 7},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "layer_types": [*["full_attention", "sliding_attention"] * 4],
        },
        {"model_type": "gemma3_text"},
        {"model_type": "gemma3_text", "sliding_window": 7, "sliding_window_pattern": 3},
        {"model_type": "gemma3_text", "layer_types": [*["full_attention"] * 8]},
    ],
    ids=str,
)
def test_sliding_layers_are_those_of_transformers(changes: dict[str, Any]) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
    hf = sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8} | changes
    config, theirs = LlamaConfig.from_hf(hf), transformers.AutoConfig.for_model(**hf)
    types = getattr(theirs, "layer_types", ["sliding_attention"] * 8)  # of Mistral, whose layers are alike
    sliding = tuple(kind == "sliding_attention" for kind in types)
    assert config.sliding_layers == (sliding if any(sliding) else ())
    assert config.sliding_window == (theirs.sliding_window if any(sliding) else None)
    written = transformers.AutoConfig.for_model(**config.to_hf())
    assert getattr(written, "layer_types", types) == types
    assert LlamaConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text"])
def test_absent_keys_mean_what_transformers_takes(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    required = {"model_type": theirs.model_type} | {key: getattr(theirs, key) for key in sizes}
    config = LlamaConfig.from_hf(required)
    assert config.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert config.max_positions == theirs.max_position_embeddings
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.tie_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if family == "Gemma3Text":
        assert config.local_rope_theta == ropes["sliding_attention"]["rope_theta"]
        assert config.query_pre_attn_scalar in (None, theirs.query_pre_attn_scalar)
        assert (config.bos_id, config.eos_ids) == (theirs.bos_token_id, (theirs.eos_token_id,))


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


_QWEN3_SLIDING: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
_GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": None, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        *[
            ({"architectures": [f"{name}ForCausalLM"]}, f"{name}ForCausalLM")
            for name in ("Qwen3Moe", "Qwen3Next", "Mixtral", "Ministral", "Gemma", "Gemma2", "Phi", "Phi3")
        ],
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 32}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": 3}, "use_sliding_window"),
        (_QWEN3_SLIDING | {"max_window_layers": -1}, "max_window_layers"),
        (_GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (_GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (_GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (_GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation"),
        (_GEMMA3 | {"sliding_window": None}, "sliding_window"),
        (_GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (_GEMMA3 | {"rope_local_base_freq": 0}, "rope_local_base_freq"),
        (_GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
        (
            _GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
            "rope_parameters.sliding_attention",
        ),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ({"head_dim": 127}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (_GEMMA3 | {"layer_types": []}, "layer_types is of 0 layers"),
        (_GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types is of 1 layers"),
        (_QWEN3_SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is of 2 layers"),
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


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("num_hidden_layers", [0, -1, True, 10**7, 2**31, 2**64, 32.0, []]),
        ("num_attention_heads", [0, -32, True]),
        ("num_key_value_heads", [0, -1, False, "8", {}]),
        ("head_dim", [0, -2, 2**40, "128"]),
        ("vocab_size", [2**31, -1]),
        ("max_position_embeddings", [0, 2**31, 1e9, "x", []]),
        ("rms_norm_eps", [-1, 0, math.nan, math.inf, "x", [], True, 2.0, 10**400]),
        ("bos_token_id", ["x", {}, -1, 10**6, True, [1]]),
        ("eos_token_id", ["x", {}, -1, 10**6, True, ["x"], [[1]], [1, -1], 1.0, [1] * 1001]),
        ("rope_theta", [0, -1, 1, math.inf, math.nan, "x", [], 1e300, 10**400]),
        ("rope_scaling", ["x", [], 3, True, {"rope_type": []}, {"rope_type": {}}, {"rope_type": 3}]),
        ("tie_word_embeddings", ["x", 1, 0.5, [True]]),
        ("architectures", ["LlamaForCausalLM", {}, 3, [[]], [{}], [None]]),
        ("layer_types", [3, True, "full_attention"]),
    ],
)
def test_values_of_wrong_types_or_out_of_range_are_named(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=key):
            LlamaConfig.from_hf({**LLAMA_31_8B, key: value})


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "factor"),
        *[(LLAMA_31_8B["rope_scaling"], key) for key in LLAMA_31_8B["rope_scaling"] if key != "rope_type"],
        *[
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, key)
            for key in ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
        ],
    ],
)
def test_values_of_rope_scaling_are_checked(scaling: dict[str, Any], key: str) -> None:
    for value in [0, -1, math.nan, math.inf, "x", [], True, 1e-300, 1e300, 10**400]:
        with pytest.raises(ValueError, match=key):
            LlamaConfig.from_hf({**LLAMA_31_8B, "rope_scaling": scaling | {key: value}})


def test_a_model_type_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match="architecture"):
        LlamaConfig.from_hf({**LLAMA_31_8B, "architectures": None, "model_type": []})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"[" * 100_000, "too deeply"),
        (b'{"x": ' * 10_000 + b"1" + b"}" * 10_000, "deep"),
        (b'{"x": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"x": "\xff"}', "UTF-8"),
        (b'{"x": "' + b"a" * 2**24 + b'"}', "larger than 16777216 bytes"),
    ],
)
def test_hostile_json_is_refused(tmp_path: Path, contents: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=rf"config\.json .*{message}"):
        LlamaConfig.from_hf(path)


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
    ),
)
configs = st.builds(
    LlamaConfig,
    vocab_size=st.integers(11, 1000),
    hidden_size=st.integers(1, 1000),
    intermediate_size=st.integers(1, 1000),
    num_layers=st.integers(1, 100),
    num_heads=st.sampled_from([4, 8]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([2, 64]),
    rope=st.builds(RopeConfig, theta=st.floats(2, 1e8), scaling=scalings),
    norm_eps=st.floats(1e-8, 1e-3),
    tie_embeddings=st.booleans(),
    qkv_bias=st.just(False),
    max_positions=st.just(2_000_000),
    bos_id=st.none() | st.integers(0, 10),
    eos_ids=st.lists(st.integers(0, 10), max_size=3).map(tuple),
)


FAMILIES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True, "out_bias": True},
    {"sliding_window": 9},
    {"qkv_bias": True},
    {"qkv_bias": True, "sliding_window": 9, "sliding_layers": (False, True, True)},
    {"qk_norm": True},
    {"qk_norm": True, "sliding_window": 9, "sliding_layers": (True, False, True)},
    {"qk_norm": True, "gemma_style": True},
    {"qk_norm": True, "gemma_style": True, "query_pre_attn_scalar": 168},
    {"qk_norm": True, "gemma_style": True, "sliding_window": 9, "local_rope_theta": 5e3},
]


@given(configs, st.sampled_from(FAMILIES))
def test_to_hf_is_read_back(config: LlamaConfig, family: dict[str, Any]) -> None:
    layers = len(family.get("sliding_layers", ())) or config.num_layers
    config = dataclasses.replace(config, num_layers=layers, **family)
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(LlamaConfig.from_hf(config.to_hf()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_sinks": True}, "has attention_sinks"),
        ({"gemma_style": True}, "has gemma_style"),
        ({"sliding_window": 9, "sliding_layers": (True, False)}, "has some layers sliding"),
        ({"qkv_bias": True, "out_bias": True, "sliding_window": 9}, "has qkv_bias, out_bias, sliding layers"),
        ({"query_pre_attn_scalar": 9}, "has query_pre_attn_scalar"),
        ({"sliding_window": 9, "local_rope_theta": 1e4}, "has sliding layers, local_rope_theta"),
    ],
)
def test_combinations_that_no_architecture_has_are_not_written(changes: dict[str, Any], message: str) -> None:
    config = LlamaConfig(96, 64, 80, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, **changes)
    with pytest.raises(ValueError, match=message):
        config.to_hf()
