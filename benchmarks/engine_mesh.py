"""One long prompt through the engine on meshes of 8 CPU devices: `python -m benchmarks.engine_mesh`.

A random Llama in float32 reads a prompt alone; the first token ends it, so the time is that of the prefill. The devices
share this machine's cores, so eight have no more to compute with than one: the ideal is the best of one or two devices.
What limits it are floating-point operations: a line says how many there are, and how fast the cores multiply.
Eight devices have to do the same operations, and besides: rows of nobody in ticks in which a stage has no chunk, the
exchanges, and under KV parallelism the linear layers of every rank. The ideal of that: attention once, the rest
`context` times. How long the linear layers take is measured on one device, by prompts of an eighth of a chunk each.

All contenders take turns, a warm-up first, which compiles; times are medians over the rounds. Each plan has the chunk
that suits it: a pipeline of many stages smaller ones, so that its first and last ticks count less; sharded rows
over eight ranks eight times as many, so that each rank has as many as one device alone.
"""

import argparse
import math
import os
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.timing import matmul_gflops
from longctx.models import Llama, LlamaConfig
from longctx.models.params import Params
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams, StepMetrics

DEVICES, PAGE, RUNNING = 8, 64, 8


class Case(NamedTuple):
    """A plan, and how many times the usual chunk its chunks are."""

    plan: ParallelPlan
    times: float = 1.0

    @property
    def name(self) -> str:
        plan = self.plan
        sizes = f"{plan.stage}x{plan.context}x{plan.tensor}"
        return sizes if plan.context == 1 else f"{sizes} {plan.exchange} {plan.placement}"


CASES = [
    Case(ParallelPlan()),
    Case(ParallelPlan(stage=2), 0.5),
    Case(ParallelPlan(context=2, exchange="pass_q", placement="interleave")),
    Case(ParallelPlan(tensor=2)),
    Case(ParallelPlan(2, 2, 2, "auto", "interleave")),
    Case(ParallelPlan(1, 8, 1, "pass_q", "interleave"), 8),
    Case(ParallelPlan(1, 8, 1, "pass_kv", "interleave"), 8),
    Case(ParallelPlan(1, 8, 1, "all_gather", "interleave"), 8),
    Case(ParallelPlan(8, 1, 1), 0.25),
    Case(ParallelPlan(1, 1, 8)),
    Case(ParallelPlan(1, 8, 1, "kvp", "interleave")),
]
SMALL = 4  # of them are of one or two devices: the best of these is the ideal


class Reader:
    """An engine of one case, and what it took to read."""

    def __init__(self, case: Case, model: Llama, params: Params, length: int, chunk: int) -> None:
        self.case, self.chunk = case, int(chunk * case.times)
        context, pages = case.plan.context, -(-(length + 1) // PAGE)
        rows = self.chunk // context if case.plan.shards_rows else self.chunk  # of a rank
        config = EngineConfig(
            page_size=PAGE,
            max_running=RUNNING,
            max_length=length + 1,
            num_pages=-(-pages // context) + 2 + RUNNING,
            token_budget=rows,
            buckets=(rows,),
            prefix_cache=False,
        )
        self.steps: list[StepMetrics] = []
        self.seconds: list[float] = []
        self.engine = Engine(model, params, config, plan=case.plan, monitor=self.steps.append)

    def read(self, prompts: list[list[int]]) -> list[tuple[int, float]]:
        """The first token after each prompt, and its logprob."""
        before, start = self.engine.stats(), time.perf_counter()
        self.steps.clear()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=0)
        outputs = self.engine.generate([Request(prompt, sampling) for prompt in prompts])
        self.seconds.append(time.perf_counter() - start)
        after = self.engine.stats()
        self.ticks, self.idle = after.steps - before.steps, after.idle_stage_steps - before.idle_stage_steps
        return [(output.token_ids[0], output.logprobs[0].logprob) for output in outputs]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds[1:])


def tell(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def linear_flops(config: LlamaConfig) -> int:
    """Of a token's products with the layers' weights."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return 2 * config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def compare(model: Llama, params: Params, length: int, chunk: int, rounds: int) -> dict[str, Any]:
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, length).tolist()
    short = [prompt[at : at + chunk // RUNNING] for at in range(0, length, chunk // RUNNING)]
    readers = [Reader(case, model, params, length, chunk) for case in CASES]
    linear = Reader(CASES[0], model, params, length, chunk)
    answers = []
    for turn in range(rounds + 1):
        for reader in (*readers, linear):
            time.sleep(0.3)  # idle threads of the one before spin for up to 0.2 s
            told = reader.read(short if reader is linear else [prompt])
            name = "linear layers" if reader is linear else reader.case.name
            tell(f"{name}: {reader.seconds[-1]:.2f} s{'' if turn else ', compiling included'}")
            if reader is not linear and not turn:
                answers += told
    config, ideal = model.config, min(reader.median for reader in readers[:4])
    flops = (
        length * linear_flops(config),
        2 * length * (length + 1) * config.num_layers * config.num_heads * config.head_dim,
    )
    rows = [
        _row(reader, length, ideal, linear.median, sum(flops), answer, answers[0])
        for reader, answer in zip(readers, answers, strict=True)
    ]
    return {
        "tokens": length,
        "gflop": {"linear": flops[0] / 1e9, "attention": flops[1] / 1e9},
        "gflops": matmul_gflops(),
        "ideal": ideal,
        "linear": linear.median,
        "rows": rows,
    }


def _row(
    reader: Reader,
    length: int,
    ideal: float,
    linear: float,
    flops: int,
    answer: tuple[int, float],
    expected: tuple[int, float],
) -> dict[str, Any]:
    plan = reader.case.plan
    if plan.context > 1 and not plan.shards_rows:
        ideal += (plan.context - 1) * linear
    return {
        "plan": reader.case.name,
        "chunk": reader.chunk,
        "seconds": reader.median,
        "tokens_per_second": length / reader.median,
        "gflops": flops / reader.median / 1e9,
        "ideal": ideal,
        "of_ideal": ideal / reader.median,
        "ticks": reader.ticks,
        "least_ticks": math.ceil(length / reader.chunk) + plan.stage - 1,
        "idle": reader.idle,
        "stage_ticks": plan.stage * reader.ticks,
        "agrees": answer[0] == expected[0] and abs(answer[1] - expected[1]) < 1e-3,
    }


def table(found: dict[str, Any]) -> str:
    """In markdown."""
    lines = [
        "| plan | chunk | seconds | tokens/s | GFLOP/s | ideal, s | of the ideal | ticks (least) | idle stage-ticks "
        "| same token |",
        "|" + "---|" * 10,
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['plan']} | {row['chunk']} | {row['seconds']:.2f} | {row['tokens_per_second']:,.0f} "
            f"| {row['gflops']:.0f} | {row['ideal']:.2f} | {row['of_ideal']:.2f} "
            f"| {row['ticks']} ({row['least_ticks']}) | {row['idle']} of {row['stage_ticks']} "
            f"| {'yes' if row['agrees'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="rows of a step, with one stage; a multiple of 64")
    parser.add_argument("--hidden", type=int, default=512, help="size of hidden states, a multiple of 128")
    parser.add_argument("--rounds", type=int, default=3, help="all take turns; medians count")
    options = parser.parse_args()
    if options.chunk % 64 or options.hidden % 128 or min(options.chunk, options.hidden, options.tokens) < 1:
        parser.error("--chunk must be a positive multiple of 64, --hidden of 128, --tokens positive")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=options.hidden // 8,
        max_positions=options.tokens + 1,
    )
    model = Llama(config)
    load = os.getloadavg()[0]
    found = compare(model, model.init(jax.random.key(0)), options.tokens, options.chunk, options.rounds)
    gflop, rate = found["gflop"], found["gflops"]
    print(
        f"{options.tokens:,} tokens, 8 layers of {options.hidden}, {os.cpu_count()} cores, jax {jax.__version__}, load "
        f"{load:.1f} before. {gflop['linear']:.0f} GFLOP of linear layers, {gflop['attention']:.0f} of attention, at "
        f"{rate:.0f} GFLOP/s (float32 product of 2048) {sum(gflop.values()) / rate:.2f} s. "
        f"Ideal: {found['ideal']:.2f} s, of which linear layers {found['linear']:.2f}. "
        f"Medians of {options.rounds} rounds.\n"
    )
    print(table(found))


if __name__ == "__main__":
    main()
