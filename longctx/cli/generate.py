"""`longctx generate`: continue a prompt with a Hugging Face checkpoint."""

import argparse
from pathlib import Path

from longctx.cli.engine import EngineLoader, decode_rate, initialize_processes, show_compiling, steps
from longctx.cli.files import check_prompt, read_text
from longctx.cli.flags import read
from longctx.cli.terminal import FAILED, report_error
from longctx.models import Llama, load_tokenizer
from longctx.serving import EngineConfig, Output, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup
from longctx.serving.runner.device_memory import ADVICE

PAGE_SIZE = 64
_ADVICE = ADVICE | {
    "pages": "lower --max-tokens or --n, or shorten the prompt",
    "steps": "lower --n or --chunk-size",
}


def run(options: argparse.Namespace) -> int:
    """Print the completions."""
    sampling = read(SamplingParams, options)
    if sampling.n > options.max_running:
        raise ValueError(f"--n must be at most --max-running={options.max_running}, got {sampling.n}")
    if (options.prompt is None) == (options.prompt_file is None):
        raise ValueError("--prompt or --prompt-file must be given, and not both")
    if options.prompt is None:
        is_piped = options.prompt_file == Path("-")
        text = read_text("--prompt-file", Path("/dev/stdin") if is_piped else options.prompt_file)
    else:
        text = check_prompt("--prompt", options.prompt)
    with initialize_processes(options) as group:
        return _generate(options, text, sampling, group)


def _generate(options: argparse.Namespace, text: str, sampling: SamplingParams, group: ProcessGroup) -> int:
    loader = EngineLoader(options, group)
    tokenizer = load_tokenizer(loader.path)
    if options.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    tokens = tokenizer.encode(text, add_special_tokens=not options.chat)
    if not tokens:
        raise ValueError("the prompt is empty")
    config = _config(loader.model, len(tokens), sampling, options.chunk_size, options.kv_dtype)
    loader.check_memory(config, _ADVICE)
    engine = loader.load(config, tokenizer=tokenizer)
    if not group.is_first:
        engine.follow()
        return 0
    compiling = show_compiling(engine.compile, loader.console, engine)

    request_id = engine.submit(Request(tokens, sampling))
    outputs: list[Output] = []
    for events in steps(engine, request_id, loader.console):
        outputs += [event.output for event in events if event.output is not None]
        if sampling.n == 1:  # the texts of several completions would mix
            print(*(event.text for event in events), sep="", end="", flush=True)
    outputs.sort(key=lambda output: output.index)
    if sampling.n > 1:
        parts = [output.text if output.index == 0 else f"--- {output.index + 1}\n{output.text}" for output in outputs]
        print(*parts, sep="\n", end="")
    print(flush=True)
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        causes = ", ".join(sorted({str(output.error) for output in failed}))
        return report_error(f"failed: {len(failed)} of {sampling.n} completions: {causes}", FAILED)
    ttft = outputs[0].metrics.ttft
    assert ttft is not None
    loader.console.note(
        f"\nprompt   {len(tokens):,} tokens\n"
        f"TTFT     {ttft:.2f} s (after {compiling:.1f} s of compilation)\n"
        f"prefill  {len(tokens) / max(ttft, 1e-9):,.0f} tokens/s\n"
        f"decode   {decode_rate(outputs)}"
    )
    return 0


def _config(
    model: Llama, num_tokens: int, sampling: SamplingParams, chunk_size: int, kv_dtype: str | None
) -> EngineConfig:
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
        kv_dtype=kv_dtype,
    )
