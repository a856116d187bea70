"""`longctx generate`: continue a prompt with a Hugging Face checkpoint."""

import argparse
import sys
from pathlib import Path

from longctx.cli import prompt_progress
from longctx.cli.engine_flags import add_plan_arguments, parallel_plan
from longctx.cli.process_flags import add_process_arguments, initialize_processes, make_parameter_mesh
from longctx.models import Llama, load_checkpoint, load_tokenizer
from longctx.serving import Engine, EngineConfig, Event, Output, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup

SUMMARY = "Continue a prompt with a Llama 3 or Qwen2.5 checkpoint."
PAGE_SIZE = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to continue")
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions (needs a temperature)")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends a completion; may be repeated"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's own")
    parser.add_argument("--chunk-size", type=int, default=1024, metavar="N", help="the most prompt tokens of a step")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="N", help="sample from the N most probable tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="sample from the most probable tokens that add up to X"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="sample from tokens at least X times as probable as the top one",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_plan_arguments(parser)
    add_process_arguments(parser)


def run(options: argparse.Namespace) -> int:
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop")
    sampling = SamplingParams(**{name: getattr(options, name) for name in names})
    if options.chunk_size < 1:
        raise ValueError(f"--chunk-size must be at least 1, got {options.chunk_size}")
    text = options.prompt if options.prompt is not None else options.prompt_file.read_text(encoding="utf-8")
    plan = parallel_plan(options)
    with initialize_processes(options) as group:
        return _generate(options, text, sampling, plan, group)


def _generate(
    options: argparse.Namespace, text: str, sampling: SamplingParams, plan: ParallelPlan, group: ProcessGroup
) -> int:
    tokenizer = load_tokenizer(options.model)
    if options.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    tokens = tokenizer.encode(text, add_special_tokens=not options.chat)
    if not tokens:
        raise ValueError("the prompt is empty")
    mesh = make_parameter_mesh(options, plan, group)
    model, params = load_checkpoint(options.model, mesh, options.dtype)
    config = _config(model, len(tokens), sampling, options.chunk_size)
    engine = Engine(model, params, config, mesh, tokenizer, plan=plan, process_group=group)
    if not group.is_first:
        engine.follow()
        return 0
    compiling = prompt_progress.warm_up(engine)

    request_id = engine.submit(Request(tokens, sampling))
    printer = _Printer(sampling.n)
    for events in prompt_progress.steps(engine, request_id):
        for event in events:
            printer.show(event)

    ttft = printer.outputs[0].metrics.ttft
    assert ttft is not None
    print(
        f"\nprompt   {len(tokens):,} tokens\n"
        f"TTFT     {ttft:.2f} s (after {compiling:.1f} s of compilation)\n"
        f"prefill  {len(tokens) / max(ttft, 1e-9):,.0f} tokens/s\n"
        f"decode   {prompt_progress.decode_rate(printer.outputs)}"
    )
    return 0


def _config(model: Llama, num_tokens: int, sampling: SamplingParams, chunk_size: int) -> EngineConfig:
    """Two step sizes, for prefill and for decodes, and the pages that this request needs."""
    longest, context = num_tokens + sampling.max_tokens, model.config.max_positions
    if longest > context:
        raise ValueError(
            f"the prompt's {num_tokens} tokens and --max-tokens {sampling.max_tokens} "
            f"are more than the model's context of {context}"
        )
    full_pages = (num_tokens - 1) // PAGE_SIZE  # shared by all completions
    pages = -(-longest // PAGE_SIZE)
    budget = max(sampling.n, min(chunk_size, -(-num_tokens // 64) * 64))
    return EngineConfig(
        page_size=PAGE_SIZE,
        num_pages=full_pages + sampling.n * (pages - full_pages),
        max_running=sampling.n,
        max_length=longest,
        token_budget=budget,
        buckets=tuple({sampling.n, budget}),
        prefix_cache=False,
        max_logprobs=0,
    )


class _Printer:
    """Prints text as it is generated; the text of a later completion is held back until those before it have ended."""

    def __init__(self, num_completions: int) -> None:
        self.outputs: list[Output] = []  # in order of their ends
        self._held = [""] * num_completions
        self._ended = [False] * num_completions
        self._current = 0

    def show(self, event: Event) -> None:
        self._held[event.index] += event.text
        if event.output is not None:
            self.outputs.append(event.output)
            self._ended[event.index] = True
        while self._current < len(self._held):
            sys.stdout.write(self._held[self._current])
            self._held[self._current] = ""
            if not self._ended[self._current]:
                break
            self._current += 1
            sys.stdout.write("\n" if self._current == len(self._held) else f"\n--- {self._current + 1}\n")
        sys.stdout.flush()
