"""llama.cpp on request, for `benchmarks.engine`: `PYTHON benchmarks/llama_cpp_peer.py CHECKPOINT WORKLOAD`.

Runs by itself in an environment with `pip install llama-cpp-python gguf`. CHECKPOINT is a directory as Hugging Face's,
one float32 safetensors file of a Llama without biases or scaled rotary embedding; it is written anew as GGUF, float32
too, without a vocabulary. Or it is a GGUF file, which is written anew with all tensors dequantised to float32. WORKLOAD
is JSON: [[prompt token ids, number of tokens to generate], ...].

It prints a line about itself; then, for each line on its input, serves the workload once, greedily, and prints JSON:
{"seconds": ..., "tokens": [[...], ...]}. The batching is continuous, as in llama.cpp's own server: each `llama_decode`
has one token of every sequence that decodes, and prompts in the rows that are left of 2048, its default. The cache is
float32, as all others in that benchmark, and flash attention is off: where it is on, as by default, llama.cpp makes
float16 of all keys and values before it attends, whatever the cache's type. The first call tries a stream of the cache
for each sequence, and one for all, and keeps what was faster.
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

ROWS = 2048
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """A safetensors file of float32."""
    contents = path.read_bytes()
    size = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        start, stop = (8 + size + x for x in entry["data_offsets"])
        tensors[name] = np.frombuffer(contents[start:stop], np.float32).reshape(entry["shape"])
    return tensors


def pair_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary pairs are (i, i + half) of a head in Hugging Face's layout, (2i, 2i + 1) in llama.cpp's."""
    out, hidden = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, hidden).swapaxes(1, 2).reshape(out, hidden)


def write_gguf(checkpoint: Path, path: Path) -> dict[str, Any]:
    """Returns the checkpoint's configuration."""
    config = json.loads((checkpoint / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in read_tensors(checkpoint / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in TOP:
            writer.add_tensor(f"{TOP[stem]}.weight", tensor)
            continue
        layer, _, kind = stem.removeprefix("model.layers.").partition(".")
        if NAMES[kind] in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if NAMES[kind] == "attn_q" else "num_key_value_heads"]
            tensor = pair_neighbours(tensor, heads)
        writer.add_tensor(f"blk.{layer}.{NAMES[kind]}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def write_float32(source: Path, path: Path) -> dict[str, Any]:
    """Copy a GGUF file with all tensors dequantised; returns what `write_gguf` does, of which `main` needs the size."""
    reader = gguf.GGUFReader(source)
    metadata = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture").contents())
    for name, field in metadata.items():
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"vocab_size": len(metadata["tokenizer.ggml.tokens"].contents())}


class Server:
    """One context that holds all sequences of the workload at a time."""

    def __init__(self, path: Path, vocab_size: int, workload: list[tuple[list[int], int]], unified: bool) -> None:
        self.workload, self.vocab_size = workload, vocab_size
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        longest = max(len(prompt) + count for prompt, count in workload)
        params.n_ctx = len(workload) * (-(-longest // 256) * 256)
        params.n_seq_max = len(workload)
        params.n_batch = ROWS
        params.kv_unified = unified
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp makes no such context"
        self.batch = llama_cpp.llama_batch_init(ROWS, 0, 1)

    def serve(self) -> list[list[int]]:
        """The tokens of all requests."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        outputs: list[list[int]] = [[] for _ in self.workload]
        read = [0] * len(self.workload)
        while any(len(output) < count for output, (_, count) in zip(outputs, self.workload, strict=True)):
            self.batch.n_tokens = 0
            sampled = []
            for i, (prompt, count) in enumerate(self.workload):
                if outputs[i] and len(outputs[i]) < count:
                    sampled.append((i, self._add(i, len(prompt) + len(outputs[i]) - 1, outputs[i][-1], True)))
            for i, (prompt, _) in enumerate(self.workload):
                stop = min(len(prompt), read[i] + ROWS - self.batch.n_tokens)
                for position in range(read[i], stop):
                    row = self._add(i, position, prompt[position], position == len(prompt) - 1)
                if read[i] < stop == len(prompt):
                    sampled.append((i, row))
                read[i] = stop
            assert llama_cpp.llama_decode(self.context, self.batch) == 0
            for i, row in sampled:
                logits = llama_cpp.llama_get_logits_ith(self.context, row)
                outputs[i].append(int(np.argmax(np.ctypeslib.as_array(logits, (self.vocab_size,)))))
        return outputs

    def _add(self, sequence: int, position: int, token: int, wanted: bool) -> int:
        row, batch = self.batch.n_tokens, self.batch
        batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.n_tokens += 1
        return row


@llama_cpp.llama_log_callback
def complain(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == 4:  # errors
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    llama_cpp.llama_log_set(complain, ctypes.c_void_p(0))
    workload = json.loads(Path(sys.argv[2]).read_text())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        source = Path(sys.argv[1])
        config = (write_float32 if source.suffix == ".gguf" else write_gguf)(source, path)
        servers = [Server(path, config["vocab_size"], workload, unified) for unified in (False, True)]
        print(f"llama.cpp (llama-cpp-python {version('llama-cpp-python')}), float32", flush=True)
        for _ in sys.stdin:
            served = []
            for server in servers:
                start = time.perf_counter()
                tokens = server.serve()
                served.append((time.perf_counter() - start, tokens, server))
            seconds, tokens, best = min(served, key=lambda each: each[0])
            servers = [best]
            print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
