"""FP8 products compiled for H100: each is a cuBLASLt call, and rows are quantised in the fusion that makes them."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from abstract_step import PAGE_SIZE, compile_step, make_shape
from h100 import h100_mesh
from hlo import collectives, copied_bytes

from longctx.models import LlamaConfig, RowwiseFp8
from longctx.models.footprint import cache_bytes, weight_bytes
from longctx.models.layer_runs import Stacking, layer_runs
from longctx.parallel.topology import AXES

LAYERS = 4
SMALL = dataclasses.replace(
    LlamaConfig.preset("llama-3-8b"), num_layers=LAYERS, vocab_size=1024, bos_id=None, eos_ids=()
)
LLAMA_405B = LlamaConfig.preset("llama-3.1-405b")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = .*?(?<=[)}\]]) ([a-z][\w\-]*)\((.*)$", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?^\}", re.MULTILINE | re.DOTALL)
FP8_CALL, OTHER_CALL = "__cublas$lt$matmul$f8", "__cublas$lt$matmul"


def compile_quantized(
    config: LlamaConfig, sizes: tuple[int, int, int], rows: int, num_pages: int, modules: str = "ffn"
) -> jax.stages.Compiled:
    config = dataclasses.replace(config, quantization=RowwiseFp8.of(config.num_layers, modules))
    mesh = h100_mesh(**dict(zip(AXES, sizes, strict=True)))
    # On one device no `jax.shard_map` gives the kernels their mesh.
    with jax.set_mesh(mesh) if mesh.size == 1 else contextlib.nullcontext():
        shape = make_shape(mesh, (0, 0, rows), num_pages)
        return compile_step(mesh, shape, jnp.bfloat16, config, sections=(0, 0, rows))


def products(text: str) -> tuple[list[tuple[str, str]], int]:
    """The computations that make rows and weights of each FP8 call (`"parameter"`: none), and how many others are."""
    bodies = {match[1]: match[0] for match in _COMPUTATION.finditer(text)}
    made = {name: (opcode, rest) for name, opcode, rest in _INSTRUCTION.findall(text)}

    def origin(name: str) -> str:
        opcode, rest = made[name]
        while opcode in ("bitcast", "get-tuple-element", "fusion-done"):
            opcode, rest = made[rest.split("%", 1)[1].split(")")[0].split(",")[0]]
        if opcode == "parameter":
            return opcode
        assert opcode in ("fusion", "fusion-start"), f"{name} is made by {opcode}"
        return bodies[rest.split("calls=%", 1)[1].split(",")[0]]

    calls, others = [], 0
    for opcode, rest in made.values():
        if opcode == "custom-call" and f'"{FP8_CALL}"' in rest:
            rows, weights = re.findall(r"%([\w.\-]+)", rest)[:2]
            calls.append((origin(rows), origin(weights)))
        elif (opcode == "custom-call" and f'"{OTHER_CALL}"' in rest) or opcode == "dot" or "__triton_gemm" in rest:
            others += 1
    return calls, others


def check_products(text: str, fp8: int, others: int) -> None:
    calls, found = products(text)
    assert (len(calls), found) == (fp8, others)
    for rows, weights in calls:
        # One fusion divides by the scale and rounds, from what was before: no scaled float is stored between.
        assert re.search(r"= f8e4m3fn\[.* convert\(", rows)
        assert "divide(" in rows
        assert weights == "parameter", "weights are read as they are"
    assert copied_bytes(text, "params") == 0


@pytest.mark.parametrize(
    ("sizes", "rows"), [((1, 1, 1), 64), pytest.param((1, 1, 2), 512, marks=pytest.mark.slow)], ids=str
)
def test_every_product_of_a_quantised_model_is_one_fp8_call(sizes: tuple[int, int, int], rows: int) -> None:
    """Seven in a layer. The head, which isn't quantised, is in the program that samples."""
    config, layers, tensor = dataclasses.replace(SMALL, num_layers=1), 1, sizes[2]
    text = compile_quantized(config, sizes, rows, 64, "all").as_text()
    check_products(text, fp8=7 * layers, others=0)
    heads, kv_heads = (count * config.head_dim // tensor for count in (config.num_heads, config.num_kv_heads))
    ffn = config.intermediate_size // tensor
    outputs = [int(n) for n in re.findall(rf"= \(f32\[{rows},(\d+)\].* custom-call.*{re.escape(FP8_CALL)}", text)]
    assert sorted(outputs) == sorted(layers * [heads, kv_heads, kv_heads, config.hidden_size, ffn, ffn, 4096])
    if tensor > 1:  # the maxima of rows that are shared: a float32 for each; and the embedding
        sent = [x.sent for x in collectives(text, tensor) if not x.within]
        assert sorted(sent) == [4.0 * rows] * 2 * layers + [2.0 * rows * config.hidden_size] * (2 * layers + 1)


@pytest.mark.slow
def test_a_step_of_one_row_multiplies_in_fp8() -> None:
    """Alone, a row would have its weights converted to float32, and the head's product is a sum."""
    check_products(compile_quantized(SMALL, (1, 1, 1), 1, 64, "all").as_text(), fp8=7 * LAYERS, others=0)


@pytest.mark.slow
def test_layers_that_are_not_quantised_lie_beside_those_that_are() -> None:
    """The first and the last layer; attention in all of them; the head."""
    text = compile_quantized(SMALL, (1, 1, 1), 64, 64).as_text()
    check_products(text, fp8=3 * (LAYERS - 2), others=4 * LAYERS + 3 * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "most"),
    [((1, 1, 8), 72e9), ((2, 1, 4), 72e9), ((4, 1, 2), 76e9)],  # 4 stages don't divide its 126 layers
    ids=str,
)
def test_405b_in_fp8_with_a_cache_of_128k_fits_8_gpus_of_80_gb(sizes: tuple[int, int, int], most: float) -> None:
    tokens = 128 * 1024
    compiled = compile_quantized(LLAMA_405B, sizes, 512, tokens // PAGE_SIZE)
    memory = compiled.memory_analysis()
    quantized = dataclasses.replace(LLAMA_405B, quantization=RowwiseFp8.of(126))
    stage, _, tensor = sizes
    expected = weight_bytes(quantized, stage, tensor) + cache_bytes(quantized, tokens, stage, tensor)
    assert expected <= memory.argument_size_in_bytes <= expected + 50e6
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < most
    text = compiled.as_text()
    calls, _ = products(text)
    assert len(calls) == 3 * sum(bool(run.quantized) for run in layer_runs(quantized, Stacking(stage, apart=True)))
    assert copied_bytes(text, "params") == 0
