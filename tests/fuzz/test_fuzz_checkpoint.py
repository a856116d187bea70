"""Random damage to config.json, safetensors files and their index: loaders raise nothing but what they promise."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from fuzz.mutate import NUM_INPUTS, mutate_bytes, mutate_json
from safetensors.numpy import save_file

from longctx.kernels.fp8 import E4M3
from longctx.models import CheckpointError, LlamaConfig, RopeConfig, RowwiseFp8
from longctx.models.checkpoint import tensor_problems
from longctx.models.checkpoint_verify import weight_problems
from longctx.models.hf_names import Layout, layouts
from longctx.models.rope import rope_table
from longctx.models.rope_config import Llama3Scaling, YarnScaling
from longctx.models.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader

SIZES = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
ROPES = [None, Llama3Scaling(8.0, 1.0, 4.0, 64), YarnScaling(4.0, 64, explicit_attention_factor=0.7)]
CONFIGS = [
    LlamaConfig(num_layers=2, **SIZES, rope=RopeConfig(1000.0, scaling), eos_ids=(1, 2), tie_embeddings=tied)
    for scaling in ROPES
    for tied in (False, True)
]
# In both forms that quantization_config has: with a bound of activations, and without.
QUANTIZED = [dataclasses.replace(CONFIGS[0], quantization=RowwiseFp8.of(2, "all", bound)) for bound in (1200.0, None)]


def read_all(directory: Path, config: LlamaConfig) -> None:
    """Do what `load_checkpoint` does, but for JAX."""
    reader = SafetensorsReader(directory)
    for problem in tensor_problems(reader, config):
        raise problem
    for layout in jax.tree.leaves(layouts(config)):
        for name in layout.names:
            tensor = reader.read(name, (slice(None),))
            assert tensor.shape == layout.file_shape
            if layout.is_scale:
                reader.check_scale(name, tensor)


def make_tensors(config: LlamaConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(layout: Layout) -> np.ndarray:
        dtype = E4M3 if layout.is_e4m3 else np.float16
        return np.abs(rng.normal(1, 0.1, layout.file_shape)).astype(dtype)

    return {name: draw(layout) for layout in jax.tree.leaves(layouts(config)) for name in layout.names}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return make_tensors(CONFIGS[0])


def fuzz(num_inputs: int, damage: Callable[[random.Random], None], load: Callable[[], None]) -> None:
    """Some inputs must load and more must be refused, or the fuzzer shows nothing."""
    loaded, refusals = 0, list[tuple[type[Exception], str]]()
    for seed in range(num_inputs):
        damage(random.Random(seed))
        try:
            load()
            loaded += 1
        except (FileNotFoundError, ValueError) as error:
            refusals.append((type(error), str(error)))
    assert {kind for kind, _ in refusals} <= {FileNotFoundError, CheckpointError, ValueError}
    assert all(message for _, message in refusals)
    assert num_inputs / 100 < loaded < num_inputs / 2


@NUM_INPUTS
def test_damaged_configs(num_inputs: int, memory_path: Path) -> None:
    more = {"layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0, "pretraining_tp": 1}
    contents = [config.to_hf() | more for config in (*CONFIGS, *QUANTIZED, *QUANTIZED)]
    for hf in contents[: len(CONFIGS) : 2]:  # as transformers 5 writes it
        hf["rope_parameters"] = (hf.pop("rope_scaling") or {}) | {"rope_theta": hf.pop("rope_theta")}
    path = memory_path / "config.json"

    def damage(rng: random.Random) -> None:
        if rng.random() < 0.8:
            path.write_text(json.dumps(mutate_json(rng, rng.choice(contents))))
        else:
            path.write_bytes(mutate_bytes(rng, json.dumps(rng.choice(contents)).encode()))

    def load() -> None:
        config = LlamaConfig.from_hf(path)
        assert LlamaConfig.from_hf(config.to_hf()) == config
        table = rope_table(config.rope, config.head_dim)
        assert table.hi.shape == (config.head_dim // 2,)
        assert np.isfinite(table.attention_factor)

    fuzz(num_inputs, damage, load)


@NUM_INPUTS
@pytest.mark.parametrize("config", [CONFIGS[0], QUANTIZED[0]], ids=["plain", "quantized"])
def test_damaged_safetensors(num_inputs: int, memory_path: Path, config: LlamaConfig) -> None:
    """What the loader refuses, `verify` finds."""
    path = memory_path / SINGLE_FILE
    save_file(make_tensors(config), path)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])

    def damage(rng: random.Random) -> None:
        match rng.randrange(4):
            case 0:
                path.write_bytes(mutate_bytes(rng, data))
            case 1:
                path.write_bytes(data[:8] + mutate_bytes(rng, data[8:end]) + data[end:])
            case _:
                damaged = json.dumps(mutate_json(rng, header)).encode()
                path.write_bytes(len(damaged).to_bytes(8, "little") + damaged + data[end:])

    def load() -> None:
        try:
            read_all(memory_path, config)
        except ValueError:
            assert list(weight_problems(memory_path, config))
            raise

    fuzz(num_inputs, damage, load)


@NUM_INPUTS
def test_damaged_indexes(num_inputs: int, memory_path: Path, tensors: dict[str, np.ndarray]) -> None:
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, memory_path / file)
    contents = {"metadata": {"total_size": 1}, "weight_map": files}

    def damage(rng: random.Random) -> None:
        if rng.random() < 0.7:
            (memory_path / INDEX_FILE).write_text(json.dumps(mutate_json(rng, contents)))
        else:
            (memory_path / INDEX_FILE).write_bytes(mutate_bytes(rng, json.dumps(contents).encode()))

    fuzz(num_inputs, damage, lambda: read_all(memory_path, CONFIGS[0]))
