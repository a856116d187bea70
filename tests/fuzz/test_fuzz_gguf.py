"""Random damage to GGUF files: readers raise nothing but what they promise, and `verify` finds what they refuse."""

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fuzz.mutate import HOSTILE, NUM_INPUTS, mutate_bytes
from gguf_files import add

from longctx.models import CheckpointError, load_tokenizer
from longctx.models.checkpoint import tensor_problems
from longctx.models.gguf import GgufReader
from longctx.models.gguf_config import config_from_gguf
from longctx.models.hf_names import layouts

CONTROL = 3
METADATA = {
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.block_count": 2,
    "llama.feed_forward_length": 6,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1000.0,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 16,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": [*"abcdefgh", "ab", "abc", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1] * 10 + [CONTROL] * 2,
    "tokenizer.ggml.scores": [0.5] * 12,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 10,
    "tokenizer.ggml.eos_token_id": 11,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}",
}
SHAPES = {
    "attn_norm": (8,),
    "attn_q": (8, 8),
    "attn_k": (4, 8),
    "attn_v": (4, 8),
    "attn_output": (8, 8),
    "ffn_norm": (8,),
    "ffn_gate": (6, 8),
    "ffn_up": (6, 8),
    "ffn_down": (8, 6),
}


def write(path: Path, metadata: dict[str, Any], is_scaled: bool = False) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        add(writer, key, value)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (12, 8), "output_norm": (8,)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    if is_scaled:
        writer.add_tensor("rope_freqs.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_all(path: Path) -> None:
    """Do what `load_checkpoint` does, but for JAX."""
    reader = GgufReader(path)
    config = config_from_gguf(reader)
    for problem in tensor_problems(reader, config):
        raise problem
    for layout in (layouts(config)["embed"], *layouts(config)["layers"].values()):
        for name in layout.names:
            assert reader.read(name, (slice(None),) * len(layout.file_shape)).shape == layout.file_shape


def fuzz(num_inputs: int, path: Path, damage: Callable[[random.Random], None]) -> None:
    """Some files must load and more must be refused, or the fuzzer shows nothing."""
    loaded = 0
    for seed in range(num_inputs):
        damage(random.Random(seed))
        try:
            read_all(path)
            loaded += 1
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017 (others are errors of the test)
            assert len(str(error)) < 1000  # noqa: PT017
        try:
            load_tokenizer(path).encode("abc ab")
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017
    assert num_inputs / 100 < loaded < num_inputs / 2


@NUM_INPUTS
@pytest.mark.parametrize("is_scaled", [False, True])
def test_damaged_bytes(num_inputs: int, is_scaled: bool, memory_path: Path) -> None:
    """Of the header most of all: the tensors are as many bytes."""
    path = memory_path / "model.gguf"
    metadata = {key: value for key, value in METADATA.items() if not (is_scaled and "scaling" in key)}
    write(path, metadata, is_scaled)
    data = path.read_bytes()
    end = data.index(b"blk.1.ffn_down.weight") + 100

    def damage(rng: random.Random) -> None:
        match rng.randrange(4):
            case 0:
                path.write_bytes(mutate_bytes(rng, data))
            case 1:  # a length, count, type, offset or number
                at = rng.randrange(4, end)
                value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), rng.randrange(2**16)))
                width = rng.choice((1, 4, 8))
                number = struct.pack("<Q", value)[:width]
                path.write_bytes(data[:at] + number + data[at + width :])
            case _:
                path.write_bytes(mutate_bytes(rng, data[:end]) + data[end:])

    fuzz(num_inputs // 2, path, damage)


@NUM_INPUTS
def test_hostile_metadata(num_inputs: int, memory_path: Path) -> None:
    path = memory_path / "model.gguf"
    values = [value for value in HOSTILE if is_writable(value)]

    def damage(rng: random.Random) -> None:
        metadata = dict(METADATA)
        for key in rng.sample(sorted(metadata), rng.choice((1, 1, 2, 4))):
            value = metadata[key]
            match rng.randrange(4):
                case 0:
                    del metadata[key]
                case 1 if isinstance(value, list):
                    metadata[key] = [rng.choice(value) for _ in range(rng.randrange(1, 30))]
                case 2 if isinstance(value, int | float) and not isinstance(value, bool):
                    metadata[key] = type(value)(value * rng.choice((0, 2, 3, 100)))
                case _:
                    metadata[key] = rng.choice([*values, *METADATA.values()])
        path.unlink(missing_ok=True)
        write(path, metadata)

    fuzz(num_inputs // 4, path, damage)


def is_writable(value: Any) -> bool:
    """Whether a file can hold it, as the package writes it."""
    match value:
        case bool():
            return True
        case float():
            return abs(value) != 1e308
        case int():
            return 0 <= value < 2**32
        case str():
            return "\ud800" not in value
    return value == [0] * 1000
