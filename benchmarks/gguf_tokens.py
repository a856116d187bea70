"""A model in GGUF, in the engine and in llama.cpp: whether their greedy tokens agree.

    python -m benchmarks.gguf_tokens FILE.gguf --llama-cpp PYTHON [--tokens 64]

Both compute with the same dequantised weights in float32, and with float32 keys and values: given quantised weights,
llama.cpp would quantise activations too (`benchmarks.llama_cpp_peer`). Tokens agree where they are equal, or differ
first where the two best logits are less than 1e-4 apart. PYTHON is that of an environment with llama-cpp-python.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks.engine import llama_cpp
from longctx.models import load_checkpoint, load_tokenizer
from longctx.serving import Engine, EngineConfig, SamplingParams

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about a river that never reaches the sea.",
    "Explain in a few sentences how a binary search finds a word in a dictionary of 100,000 words.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    options = parser.parse_args()
    model, params = load_checkpoint(options.file, dtype="float32")
    tokenizer = load_tokenizer(options.file)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts = [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    with tempfile.TemporaryDirectory() as folder:
        workload = [(prompt, options.tokens) for prompt in prompts]
        with llama_cpp(options.llama_cpp, Path(folder), workload, options.file) as peer:
            _, theirs = peer()
    longest = max(map(len, prompts)) + options.tokens
    config = EngineConfig(max_running=len(prompts), max_length=longest, token_budget=64, buckets=(64,))
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    outputs = Engine(model, params, config).generate(prompts, sampling)
    forward = jax.jit(model)
    for question, prompt, output, expected in zip(QUESTIONS, prompts, outputs, theirs, strict=True):
        different = np.flatnonzero(np.array(output.token_ids) != expected)
        verdict = f"all {options.tokens} tokens are equal"
        if different.size:
            at = different[0]
            second, best = np.sort(np.asarray(forward(params, np.array([*prompt, *expected[:at]])))[-1])[-2:]
            agrees = "a near tie" if best - second < 1e-4 else "they DIFFER"
            verdict = (
                f"token {at} is the first that differs; the two best logits are {best - second:.1e} apart: {agrees}"
            )
        print(f"{question}\n  {verdict}")


if __name__ == "__main__":
    main()
