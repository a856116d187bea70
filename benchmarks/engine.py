"""The engine with 16 requests that arrive together, against others, and against its own compiled step.

    python -m benchmarks.engine [--llama-cpp PYTHON] [--rounds 3]

Output tokens per second on a 100M-parameter model, float32, all contenders with the same
random weights, on all cores, in turns: the engine (prefix cache off, so that no round finds the one before), the
`generate` of transformers in one batch, padded on the left, whose every row runs to the longest output (only tokens
that were asked for count), the same one by one, and llama.cpp with continuous batching. PYTHON is that of an
environment of its own with llama-cpp-python and gguf (`benchmarks.llama_cpp_peer`).

All are greedy; tokens agree where they are equal, or differ first where the two best logits are less than 1e-4 apart.
No way of serving can be faster than all floating-point operations at the speed of a large matrix product, nor than
reading all weights once for each token of the longest output.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import torch
import transformers

from benchmarks.timing import matmul_gflops, read_gbytes
from longctx.models import Llama, LlamaConfig, load_checkpoint, save_checkpoint
from longctx.parallel import make_mesh
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.runner.step_inputs import Shape
from longctx.simulation.workloads import Lengths, synthesize

Workload = list[tuple[list[int], int]]  # prompts, and tokens to generate
Contender = Callable[[], tuple[float, list[list[int]]]]  # seconds, and the tokens of each request
RUNNING, PAGE, BUDGET, NUM_PAGES, MAX_LENGTH = 16, 64, 512, 512, 2048
CONFIG = LlamaConfig(
    vocab_size=258,
    hidden_size=768,
    intermediate_size=2816,
    num_layers=12,
    num_heads=12,
    num_kv_heads=6,
    head_dim=64,
    max_positions=8192,
)


def tell(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def make_workload(prompt_tokens: str, output_tokens: str) -> Workload:
    requests = synthesize(RUNNING, Lengths.parse(prompt_tokens), Lengths.parse(output_tokens))
    return [(request.tokens(CONFIG.vocab_size).tolist(), request.output_tokens) for request in requests]


class RecordingDevice(ModelRunner):
    """Keeps what each step was told, to run the same steps without scheduler and engine."""

    steps: list[tuple[np.ndarray, np.ndarray, Shape]]

    def step(self, rows: np.ndarray, samples: np.ndarray, shape: Shape):  # type: ignore[no-untyped-def]
        self.steps.append((rows, samples, shape))
        return super().step(rows, samples, shape)

    def run_bare(self) -> float:
        """Seconds of the recorded steps, one call after the other."""
        start = time.perf_counter()
        for rows, samples, shape in self.steps:
            drawn, _ = super().step(rows, samples, shape)
        jax.block_until_ready((self.state, drawn))
        return time.perf_counter() - start


class LongctxEngine:
    def __init__(self, directory: Path) -> None:
        model, params = load_checkpoint(directory)
        self.params = params
        config = EngineConfig(
            page_size=PAGE,
            max_running=RUNNING,
            token_budget=BUDGET,
            buckets=(8, 16, 128, BUDGET),
            num_pages=NUM_PAGES,
            max_length=MAX_LENGTH,
            prefix_cache=False,
        )
        sizes = NUM_PAGES, PAGE, RUNNING, -(-MAX_LENGTH // PAGE), config.step_rows(ParallelPlan()).largest
        self.device = RecordingDevice(model, params, make_mesh(), *sizes)
        self.device.steps = []
        executor = DeviceExecutor(model.config, config, ParallelPlan(), NUM_PAGES, MAX_LENGTH, self.device)
        self.engine = Engine(model, params, config, executor=executor)
        start = time.perf_counter()
        self.engine.warm_up()
        tell(f"compiled in {time.perf_counter() - start:.0f} s")

    def serve(self, workload: Workload) -> tuple[float, list[list[int]]]:
        self.device.steps = []
        requests = [Request(p, SamplingParams(max_tokens=n, ignore_eos=True)) for p, n in workload]
        start = time.perf_counter()
        outputs = self.engine.generate(requests)
        return time.perf_counter() - start, [output.token_ids for output in outputs]


class Transformers:
    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def serve(self, workload: Workload) -> tuple[float, list[list[int]]]:
        """In one batch, padded on the left."""
        longest = max(len(prompt) for prompt, _ in workload)
        tokens = torch.zeros((len(workload), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, (prompt, _) in enumerate(workload):
            tokens[i, longest - len(prompt) :], mask[i, longest - len(prompt) :] = torch.tensor(prompt), 1
        start = time.perf_counter()
        steps = max(count for _, count in workload)
        result = self.model.generate(tokens, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - start
        return seconds, [row[longest:][:count].tolist() for row, (_, count) in zip(result, workload, strict=True)]

    def serve_one_by_one(self, workload: Workload) -> tuple[float, list[list[int]]]:
        served = [self.serve([request]) for request in workload]
        return sum(seconds for seconds, _ in served), [outputs[0] for _, outputs in served]

    @torch.inference_mode()
    def gap(self, tokens: list[int]) -> float:
        """Between the two best logits after these tokens."""
        best, second = self.model(torch.tensor(tokens)[None], logits_to_keep=1).logits[0, -1].topk(2).values.tolist()
        return best - second


@contextlib.contextmanager
def llama_cpp(python: Path, directory: Path, workload: Workload, checkpoint: Path | None = None) -> Iterator[Contender]:
    """A contender in a process of its own, of a checkpoint (or GGUF file), which may be in `directory`."""
    (directory / "workload.json").write_text(json.dumps(workload))
    script = Path(__file__).with_name("llama_cpp_peer.py")
    command = [str(python), str(script), str(checkpoint or directory), str(directory / "workload.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        about = process.stdout.readline().strip()
        if not about:
            raise SystemExit("--llama-cpp: it did not start, see above")
        print(f"{about}\n")

        def serve() -> tuple[float, list[list[int]]]:
            process.stdin.write("serve\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            return answer["seconds"], answer["tokens"]

        yield serve
        process.stdin.close()


def num_agreeing(workload: Workload, expected: list[list[int]], given: list[list[int]], judge: Transformers) -> int:
    """How many requests' tokens are equal, or first differ at a near tie."""
    count = 0
    for (prompt, _), ours, theirs in zip(workload, expected, given, strict=True):
        assert len(ours) == len(theirs)
        common = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        count += common is None or judge.gap(prompt + ours[:common]) < 1e-4
    return count


def compare(
    engine: LongctxEngine, judge: Transformers, peer: Contender | None, workload: Workload, rounds: int
) -> None:
    """The table of contenders."""
    contenders: dict[str, Contender] = {
        "longctx engine": lambda: engine.serve(workload),
        "transformers, padded batch": lambda: judge.serve(workload),
        "transformers, one by one": lambda: judge.serve_one_by_one(workload),
    }
    if peer is not None:
        contenders["llama.cpp, continuous batching"] = peer
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(rounds + 1):  # the first warms up
        for name, serve in contenders.items():
            time.sleep(0.3)  # idle threads of the one before spin for up to 0.2 s
            elapsed, tokens[name] = serve()
            seconds[name].append(elapsed)
            tell(f"{name}: {elapsed:.2f} s")

    matrices = sum(x.size for x in jax.tree.leaves(engine.params)) - engine.params["embed"].size
    gflops, gbytes = matmul_gflops(), read_gbytes(matrices)
    read, written = sum(len(p) for p, _ in workload), sum(n for _, n in workload)
    rows = [len(p) + n - 1 for p, n in workload]  # the last token is not computed
    scores = sum(n * (n + 1) // 2 for n in rows) * CONFIG.num_layers * CONFIG.num_heads * CONFIG.head_dim
    compute = (2 * matrices * sum(rows) + 4 * scores) / gflops / 1e9
    memory = max(n for _, n in workload) * 4 * matrices / gbytes / 1e9
    print(
        f"{len(workload)} requests, {read:,} prompt and {written:,} output tokens. Bounds: compute {compute:.1f} s "
        f"({gflops:.0f} GFLOP/s), weights {memory:.1f} s ({gbytes:.1f} GB/s), so at most "
        f"{written / max(compute, memory):.0f} output tokens/s\n"
    )
    print("| implementation | seconds | output tokens/s | share of bound | engine is faster by | tokens agree |")
    print("|---|---|---|---|---|---|")
    base = statistics.median(seconds["longctx engine"][1:])
    for name, taken in seconds.items():
        median = statistics.median(taken[1:])
        agreeing = num_agreeing(workload, tokens["longctx engine"], tokens[name], judge)
        print(
            f"| {name} | {median:.2f} | {written / median:.1f} | {max(compute, memory) / median:.0%} "
            f"| {median / base:.2f}x | {agreeing} of {len(workload)} |"
        )
    print(f"\ndifferent tokens in the outputs: {len({t for row in tokens['longctx engine'] for t in row})}")


def compare_bare(engine: LongctxEngine, workloads: dict[str, Workload], rounds: int) -> None:
    """The table of engine against bare steps."""
    print("\n| steps | number | engine, ms a step | bare, ms a step | ratio |\n|---|---|---|---|---|")
    for name, workload in workloads.items():
        pairs = []
        for _ in range(rounds + 1):
            seconds, _ = engine.serve(workload)
            pairs.append((seconds, engine.device.run_bare()))
        ours, bare = (statistics.median(x) for x in zip(*pairs[1:], strict=True))
        steps = len(engine.device.steps)
        ratio = statistics.median(ours / bare for ours, bare in pairs[1:])
        print(f"| {name} | {steps} | {1e3 * ours / steps:.2f} | {1e3 * bare / steps:.2f} | {ratio:.3f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", default="64:1500", metavar="LOW:HIGH")
    parser.add_argument("--output-tokens", default="16:128", metavar="LOW:HIGH")
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="interpreter with llama-cpp-python and gguf")
    parser.add_argument("--only", choices=["peers", "bare"], help="one of the two tables")
    options = parser.parse_args()
    workload = make_workload(options.prompt_tokens, options.output_tokens)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        model = Llama(CONFIG)
        save_checkpoint(directory, model, model.init(jax.random.key(0), initializer_range=0.06))
        engine = LongctxEngine(directory)
        if options.only != "bare":
            judge = Transformers(directory)
            with contextlib.ExitStack() as stack:
                peer = None
                if options.llama_cpp is not None:
                    peer = stack.enter_context(llama_cpp(options.llama_cpp, directory, workload))
                compare(engine, judge, peer, workload, options.rounds)
        if options.only != "peers":
            compare_bare(engine, {"mixed": workload, "decodes": make_workload("64", "128")}, options.rounds)


if __name__ == "__main__":
    main()
