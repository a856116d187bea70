"""One sequence on a CPU: prefill and decode of a real model, against transformers and llama.cpp.

    python -m benchmarks.one_sequence FILE.gguf [--llama-cpp PYTHON] [--rounds 3] [--bfloat16]

All compute with the same dequantised weights, in float32. A decode step can't be faster than reading the weights once:
"bound" is the bandwidth of a sum over as many bytes. "bare products" runs the products of a step, layer by layer, as
the engine does, and nothing else: what XLA's own products leave of the bound. Contenders take turns.
"""

import argparse
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks.engine import llama_cpp
from benchmarks.timing import measure, read_gbytes
from longctx.models import Llama, load_checkpoint
from longctx.models.params import Params
from longctx.models.sharded_params import shard_params
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, SamplingParams

Contender = Callable[[list[int], int], object]  # serves a prompt, and so many tokens

SHORT, LONG, STEPS = 10, 2048, 32


def make_engine(model: Llama, params: Params) -> Contender:
    length = LONG + STEPS + 2
    config = EngineConfig(
        max_running=1,
        max_length=length,
        num_pages=-(-length // 64),
        token_budget=512,
        buckets=(1, 16, 512),
        prefix_cache=False,
        max_logprobs=0,
    )
    engine = Engine(model, params, config)
    engine.warm_up()
    return lambda prompt, count: engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))


def make_transformers(path: Path) -> Contender:
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def serve(prompt: list[int], count: int) -> object:
        tokens = torch.tensor([prompt])
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False)

    return serve


def bare_products(model: Llama, params: Params) -> Callable[[], object]:
    """The products of `STEPS` decode steps with one row."""
    arranged = shard_params(params, model.config, make_mesh())

    @functools.partial(jax.jit, donate_argnums=1)
    def layer(weights: Params, x: jax.Array) -> jax.Array:
        q, _, _ = weights["wq wk wv"].product(x)
        (out,) = weights["wo"].product(q.reshape(1, -1))
        gate, up = weights["w_gate w_up"].product(x + out)
        (down,) = weights["w_down"].product(gate * up)
        return x + down

    head = jax.jit(lambda weight, x: weight.product(x))
    layers = jax.tree.map(lambda weight: weight[0], arranged["layers"])

    def run() -> object:
        for _ in range(STEPS):
            x = jnp.ones((1, model.config.hidden_size))
            for weights in layers:
                x = layer(weights, x)
            logits = jax.block_until_ready(head(arranged["lm_head"], x))
        return logits

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bfloat16", action="store_true", help="the engine with bfloat16 weights, too")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model, params = load_checkpoint(options.file, dtype="float32")
    engines: dict[str, Contender] = {"longctx": make_engine(model, params)}
    if options.bfloat16:
        engines["longctx, bfloat16"] = make_engine(*load_checkpoint(options.file, dtype="bfloat16"))
    engines["transformers"] = make_transformers(options.file)
    rng = np.random.default_rng(0)
    prompts = {length: rng.integers(0, model.config.vocab_size, length).tolist() for length in (SHORT, LONG)}
    cases = [(LONG, 1), (LONG, 1 + STEPS), (SHORT, 1), (SHORT, 1 + STEPS)]
    contenders: dict[str, Callable[[], object]] = {"bare products": bare_products(model, params)}
    for name, serve in engines.items():
        for length, count in cases:
            contenders[f"{name} {length} {count}"] = functools.partial(serve, prompts[length], count)
    with contextlib.ExitStack() as stack:
        if options.llama_cpp is not None:
            for length, count in cases:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                workload = [(prompts[length], count)]
                peer = stack.enter_context(llama_cpp(options.llama_cpp, folder, workload, options.file))
                contenders[f"llama.cpp {length} {count}"] = peer
            engines["llama.cpp"] = lambda prompt, count: None
        time.sleep(1)
        seconds = measure(contenders, options.rounds)

    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(params))
    bandwidth = read_gbytes(num_bytes // 4)
    bound = 1e9 * bandwidth / num_bytes
    print(f"bound: {bandwidth:.1f} GB/s over {num_bytes / 1e6:.0f} MB, {bound:.1f} tokens/s")
    print(f"bare products: {STEPS / seconds['bare products']:.1f} tokens/s")
    print(f"\n| tokens/s | prefill of {LONG:,} | decode after {SHORT} | after {LONG:,} | of the bound |")
    print("|---|---|---|---|---|")
    for name in engines:
        short, long = (
            STEPS / (seconds[f"{name} {length} {1 + STEPS}"] - seconds[f"{name} {length} 1"])
            for length in (SHORT, LONG)
        )
        prefill = LONG / seconds[f"{name} {LONG} 1"]
        print(f"| {name} | {prefill:.0f} | {short:.1f} | {long:.1f} | {short / bound:.0%} |")


if __name__ == "__main__":
    main()
