"""`quantization_config` of config.json: the two forms that are read, and that all others are refused by name."""

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_config import LLAMA_31_8B

from longctx.models import LlamaConfig, RowwiseFp8
from longctx.models.quantization_config import MODULES

FFN = ("w_gate", "w_up", "w_down")
ATTENTION = ("wq", "wk", "wv", "wo")
MODULE = "model.layers.{}.{}"

# The form of meta-llama/Llama-3.1-405B-Instruct-FP8, for 32 layers.
FBGEMM: dict[str, Any] = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": [
        *[MODULE.format(i, MODULES[name]) for i in range(32) for name in ATTENTION],
        *[MODULE.format(i, MODULES[name]) for i in (0, 31) for name in FFN],
        "lm_head",
    ],
}
# As llm-compressor's FP8_DYNAMIC scheme is written.
COMPRESSED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.2,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def read(quantization: Any) -> RowwiseFp8 | None:
    return LlamaConfig.from_hf({**LLAMA_31_8B, "quantization_config": quantization}).quantization


def changed(source: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    source = copy.deepcopy(source)
    *parents, key = path.split(".")
    at = source
    for parent in parents:
        at = at[parent]
    at[key] = value
    return source


def test_reads_fbgemm() -> None:
    assert read(FBGEMM) == RowwiseFp8.of(32, "ffn")
    assert read(FBGEMM) == RowwiseFp8(((), *[FFN] * 30, ()), 1200.0)
    assert read({"quant_method": "fbgemm_fp8"}) == RowwiseFp8.of(32, "all")
    assert read(FBGEMM | {"activation_scale_ub": 600}) == RowwiseFp8.of(32, "ffn", 600.0)


def test_reads_compressed_tensors() -> None:
    assert read(COMPRESSED) == RowwiseFp8.of(32, "all", None)


@pytest.mark.parametrize(
    ("name", "excluded"),
    [
        ("model.layers.3.mlp.up_proj", {(3, "w_up")}),
        ("model.layers.3.mlp", {(3, name) for name in FFN}),
        ("model.layers.3", {(3, name) for name in MODULES}),
        ("mlp.up_proj", {(i, "w_up") for i in range(32)}),
        ("up_proj", {(i, "w_up") for i in range(32)}),
        ("model.layers.3.mlp.up", set()),
        ("p_proj", set()),
        ("re:.*self_attn.*", {(i, name) for i in range(32) for name in ATTENTION}),
        (r"re:model\.layers\.\d+\.mlp\.up_proj$", {(i, "w_up") for i in range(32)}),
        ("re:^model.layers.3.mlp.*", {(3, name) for name in FFN}),
        ("re:.*layers.*mlp.*", {(i, name) for i in range(32) for name in FFN}),
        ("re:.*lm_head", set()),
    ],
)
def test_names_exclude_modules(name: str, excluded: set[tuple[int, str]]) -> None:
    sources = [COMPRESSED | {"ignore": [name]}]
    if not name.startswith("re:"):
        sources.append(FBGEMM | {"modules_to_not_convert": [name]})
    for source in sources:
        quantization = read(source)
        assert quantization is not None
        there = {(i, name) for i, names in enumerate(quantization.layers) for name in names}
        assert {(i, name) for i in range(32) for name in MODULES} - there == excluded


def test_a_model_without_a_quantised_module_is_a_plain_one() -> None:
    assert read(FBGEMM | {"modules_to_not_convert": ["model"]}) is None
    assert read(None) is None


@pytest.mark.parametrize("source", [FBGEMM, COMPRESSED, COMPRESSED | {"ignore": ["down_proj", "re:.*k_proj"]}])
def test_what_is_written_is_read_back(source: dict[str, Any]) -> None:
    config = LlamaConfig.from_hf({**LLAMA_31_8B, "quantization_config": source})
    written = json.loads(json.dumps(config.to_hf()))
    assert written["quantization_config"]["quant_method"] == source["quant_method"]
    assert LlamaConfig.from_hf(written) == config
    assert hash(LlamaConfig.from_hf(written)) == hash(config)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method = 'fp8'"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method = 'gptq'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": ["fbgemm_fp8"]}, "quant_method"),
        ({}, "quant_method"),
        ("fbgemm_fp8", "quantization_config must be an object"),
        (3, "quantization_config must be an object"),
        (FBGEMM | {"weight_block_size": [128, 128]}, "weight_block_size"),
        (FBGEMM | {"activation_scheme": "static"}, "activation_scheme"),
        *[(FBGEMM | {"activation_scale_ub": value}, "activation_scale_ub") for value in (None, 0, -1, "x", True, 1e40)],
        (FBGEMM | {"activation_scale_ub": float("nan")}, "activation_scale_ub"),
        (FBGEMM | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        (FBGEMM | {"modules_to_not_convert": [3]}, "modules_to_not_convert must be a list"),
        (FBGEMM | {"modules_to_not_convert": ["(a+)+$"]}, "modules_to_not_convert has '"),
        (FBGEMM | {"modules_to_not_convert": ["re:.*mlp.*"]}, "modules_to_not_convert has '"),
        (FBGEMM | {"modules_to_not_convert": ["a" * 201]}, "which is not the name of a module"),
        (FBGEMM | {"modules_to_not_convert": ["a"] * 200_001}, "at most 200000 names"),
        (COMPRESSED | {"ignore": ["re:(a+)+$"]}, "ignore has 're:"),
        (COMPRESSED | {"ignore": ["re:" + ".*x" * 3]}, "ignore has 're:"),
        (COMPRESSED | {"ignore": ["re:x"] * 9}, "at most 8 patterns"),
        (COMPRESSED | {"format": "pack-quantized"}, "format = 'pack-quantized'"),
        (COMPRESSED | {"quantization_status": "frozen"}, "quantization_status"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "transform_config"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (COMPRESSED | {"config_groups": []}, "config_groups"),
        (COMPRESSED | {"config_groups": COMPRESSED["config_groups"] | {"group_1": {}}}, "config_groups"),
        (COMPRESSED | {"config_groups": {"group_0": 3}}, "config_groups"),
    ],
)
def test_other_quantisation_is_refused_by_name(source: Any, named: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json: .*quantization_config") as caught:
        read(source)
    assert named in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("targets", ["re:.*mlp.*"]),
        ("targets", None),
        ("format", "naive-quantized"),
        ("output_activations", {"num_bits": 8}),
        ("input_activations", None),
        ("input_activations.strategy", "tensor"),
        ("input_activations.strategy", "group"),
        ("input_activations.dynamic", False),
        ("input_activations.dynamic", "local"),
        ("input_activations.num_bits", 4),
        ("input_activations.group_size", 128),
        ("input_activations.type", "int"),
        ("weights", None),
        ("weights.num_bits", 4),
        ("weights.num_bits", 8.0),
        ("weights.num_bits", True),
        ("weights.type", "int"),
        ("weights.strategy", "block"),
        ("weights.strategy", "tensor"),
        ("weights.block_structure", [128, 128]),
        ("weights.group_size", 128),
        ("weights.symmetric", False),
        ("weights.dynamic", True),
        ("weights.actorder", "group"),
        ("weights.zp_dtype", "int8"),
    ],
)
def test_other_schemes_of_compressed_tensors_are_refused_by_name(path: str, value: Any) -> None:
    source = changed(COMPRESSED, f"config_groups.group_0.{path}", value)
    with pytest.raises(ValueError, match=rf"quantization_config\.config_groups\.{path}"):
        read(source)


@pytest.mark.slow
def test_a_config_must_not_ask_for_endless_work() -> None:
    names = [f"model.layers.{i}.mlp.x{i}" for i in range(200_000)]
    many = {**LLAMA_31_8B, "num_hidden_layers": 2**14}
    start = time.process_time()
    LlamaConfig.from_hf(many | {"quantization_config": FBGEMM | {"modules_to_not_convert": names}})
    LlamaConfig.from_hf(many | {"quantization_config": COMPRESSED | {"ignore": [f"re:.*.*{i}$" for i in range(8)]}})
    assert time.process_time() - start < 20
    with pytest.raises(ValueError, match="num_hidden_layers"):
        LlamaConfig.from_hf(many | {"num_hidden_layers": 2**31 - 1, "quantization_config": FBGEMM})


def test_the_layers_of_config_and_quantization_must_agree() -> None:
    with pytest.raises(ValueError, match="quantization is of 3 layers, num_layers 32"):
        LlamaConfig(64, 32, 48, 32, 4, 2, 8, quantization=RowwiseFp8.of(3, "all"))
    with pytest.raises(ValueError, match="quantization must name parameters"):
        RowwiseFp8((("w_up", "w_gate"),))


def test_layers_that_alternate_are_refused() -> None:
    """Each run of layers that are alike is a loop to compile."""
    alternating = [f"model.layers.{i}.mlp" for i in range(0, 32, 2)]
    for source in (
        FBGEMM | {"modules_to_not_convert": alternating},
        COMPRESSED | {"ignore": alternating},
    ):
        with pytest.raises(ValueError, match=r"quantization_config has 32 runs .* at most 16 are supported"):
            read(source)
    with pytest.raises(ValueError, match="quantization has 17 runs"):
        RowwiseFp8((*(((), FFN) * 8), ()))
    assert read(FBGEMM | {"modules_to_not_convert": alternating[:7]}) is not None
    assert len(RowwiseFp8(((), FFN) * 8).layers) == 16


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: LlamaConfig(64, 32, 48, 32, 4, 2, 8, quantization={"a": 1}), TypeError, "quantization must be a Row"),
        (lambda: RowwiseFp8([("wq",)] * 2), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8((["wq"],)), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8([["wq"]]), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8(("wq",)), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8(((1,),)), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8(None), TypeError, "layers must be a tuple of tuples of names"),
        (lambda: RowwiseFp8.of("3"), TypeError, "num_layers must be an integer"),
        (lambda: RowwiseFp8.of(-1), ValueError, "num_layers must be an integer of 1 to"),
        (lambda: RowwiseFp8.of(10**12), ValueError, "num_layers must be an integer of 1 to"),
        (lambda: RowwiseFp8.of(3, ["ffn"]), ValueError, "modules must be ffn or all"),
        (lambda: RowwiseFp8.of(3, "all", "1"), TypeError, "activation_scale_ub must be a number"),
    ],
)
def test_arguments_of_a_wrong_kind_are_named(make: Callable[[], Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make()
