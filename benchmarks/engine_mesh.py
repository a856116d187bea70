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
from typing import NamedTuple

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


def read_in_turns(
    model: Llama, params: Params, length: int, chunk: int, rounds: int
) -> tuple[list[Reader], float, list[tuple[int, float]]]:
    """The readers of all cases, the seconds of the linear layers alone, and each reader's first token."""
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
    return readers, linear.median, answers


def row(reader: Reader, length: int, ideal: float, linear: float, flops: float, is_same: bool) -> str:
    """A line of the table in markdown; `ideal`: of one or two devices; `linear`: seconds of the linear layers."""
    plan, took = reader.case.plan, reader.median
    if plan.context > 1 and not plan.shards_rows:
        ideal += (plan.context - 1) * linear
    least = math.ceil(length / reader.chunk) + plan.stage - 1
    return (
        f"| {reader.case.name} | {reader.chunk} | {took:.2f} | {length / took:,.0f} | {flops / took / 1e9:.0f} "
        f"| {ideal:.2f} | {ideal / took:.2f} | {reader.ticks} ({least}) | {reader.idle} of {plan.stage * reader.ticks} "
        f"| {'yes' if is_same else 'no'} |"
    )


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
    length = options.tokens
    readers, linear, answers = read_in_turns(
        model, model.init(jax.random.key(0)), length, options.chunk, options.rounds
    )
    ideal, rate = min(reader.median for reader in readers[:SMALL]), matmul_gflops()
    products = length * linear_flops(config)
    attention = 2 * length * (length + 1) * config.num_layers * config.num_heads * config.head_dim
    print(
        f"{length:,} tokens, 8 layers of {options.hidden}, {os.cpu_count()} cores, jax {jax.__version__}, load "
        f"{load:.1f} before. {products / 1e9:.0f} GFLOP of linear layers, {attention / 1e9:.0f} of attention, at "
        f"{rate:.0f} GFLOP/s (float32 product of 2048) {(products + attention) / rate / 1e9:.2f} s. "
        f"Ideal: {ideal:.2f} s, of which linear layers {linear:.2f}. Medians of {options.rounds} rounds.\n"
    )
    print(
        "| plan | chunk | seconds | tokens/s | GFLOP/s | ideal, s | of the ideal | ticks (least) | idle | same token |"
    )
    print("|" + "---|" * 10)
    for reader, (token, logprob) in zip(readers, answers, strict=True):
        is_same = token == answers[0][0] and abs(logprob - answers[0][1]) < 1e-3
        print(row(reader, length, ideal, linear, products + attention, is_same))


if __name__ == "__main__":
    main()
