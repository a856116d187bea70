"""Prefill and decode of a 100M-parameter Llama against `transformers`, in one run: `python -m benchmarks.end_to_end`.

The built-in model's architecture, scaled; the same random weights in both. Prefill is bound by matrix products
(2 FLOP per parameter and token, plus attention), decode of one sequence by memory: it reads every weight per token.
Both bounds are measured beside them: a float32 matrix product, and a sum over an array as large as the weights.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from benchmarks.model import CONFIG
from benchmarks.timing import matmul_gflops, read_gbytes
from longctx.models import Llama, load_checkpoint, save_checkpoint
from longctx.serving import Engine, EngineConfig, SamplingParams

PROMPT, DECODE = 2048, 128


def run_longctx(directory: Path, dtype: str, prompt: np.ndarray) -> tuple[float, float]:
    """Seconds of prefill and of decode."""
    model, params = load_checkpoint(directory, dtype=dtype)
    config = EngineConfig(
        max_running=1,
        max_length=PROMPT + DECODE + 1,
        num_pages=-(-(PROMPT + DECODE) // 64),
        token_budget=PROMPT,
        buckets=(1, PROMPT),
        prefix_cache=False,
    )
    # The first token comes of the prefill, as many steps of decode follow as below.
    sampling = SamplingParams(max_tokens=1 + DECODE, ignore_eos=True)
    (output,) = Engine(model, params, config).generate([prompt], sampling)
    metrics = output.metrics
    assert len(output.token_ids) == 1 + DECODE
    assert metrics.ttft is not None
    assert metrics.tpot is not None
    return metrics.ttft, metrics.tpot * DECODE


def run_transformers(directory: Path, dtype: str, prompt: np.ndarray) -> tuple[float, float]:
    """The same with transformers' own cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    start = time.perf_counter()
    with torch.inference_mode():
        result = model(torch.tensor(prompt)[None], use_cache=True, logits_to_keep=1)
        read = time.perf_counter()
        for _ in range(DECODE):
            token = result.logits[:, -1:].argmax(-1)
            result = model(token, past_key_values=result.past_key_values, use_cache=True)
    return read - start, time.perf_counter() - read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model = Llama(CONFIG)
    params = model.init(jax.random.key(0), initializer_range=0.02)
    num_params = sum(x.size for x in jax.tree.leaves(params))
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT)
    contenders = {
        ("transformers", "float32"): run_transformers,
        ("longctx", "float32"): run_longctx,
        ("longctx", "bfloat16"): run_longctx,
    }
    times: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, model, params)
        del params
        for _ in range(rounds + 1):  # the first compiles
            for (name, dtype), run in contenders.items():
                time.sleep(0.3)  # idle threads of the one before spin for up to 0.2 s
                times[name, dtype].append(run(Path(folder), dtype, prompt))

    gflops, gbytes = matmul_gflops(), read_gbytes(num_params)
    print(f"{num_params / 1e6:.0f}M parameters; bounds: {gflops:.0f} GFLOP/s, {gbytes:.1f} GB/s read\n")
    print(
        "| implementation | dtype | prefill tokens/s | share of FLOP bound | decode tokens/s | share of memory bound |"
    )
    print("|---|---|---|---|---|---|")
    for (name, dtype), seconds in times.items():
        prefill, decode = (statistics.median(x) for x in zip(*seconds[1:], strict=True))
        flop_share = 2 * num_params * PROMPT / prefill / 1e9 / gflops
        memory_share = num_params * jnp.dtype(dtype).itemsize * DECODE / decode / 1e9 / gbytes
        print(
            f"| {name} | {dtype} | {PROMPT / prefill:.0f} | {flop_share:.0%} "
            f"| {DECODE / decode:.1f} | {memory_share:.0%} |"
        )


if __name__ == "__main__":
    main()
