"""`longctx generate`: continue a prompt with a Hugging Face checkpoint."""

import argparse
from pathlib import Path

from longctx.cli import answer
from longctx.models import load_checkpoint, load_tokenizer
from longctx.models.generate import Context
from longctx.models.sampling import Sampling

SUMMARY = "Continue a prompt with a Llama 3 or Qwen2.5 checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to continue")
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's own")
    parser.add_argument("--chunk-size", type=int, default=1024, metavar="N", help="prompt tokens read at a time")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="N")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N")


def run(options: argparse.Namespace) -> int:
    if options.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, got {options.max_tokens}")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    text = options.prompt if options.prompt is not None else options.prompt_file.read_text(encoding="utf-8")
    tokenizer = load_tokenizer(options.model)
    if options.chat:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    tokens = tokenizer.encode(text, add_special_tokens=not options.chat)
    if not tokens:
        raise ValueError("the prompt is empty")
    model, params = load_checkpoint(options.model, dtype=options.dtype)
    if len(tokens) + options.max_tokens > model.config.max_positions:
        raise ValueError(
            f"the prompt's {len(tokens)} tokens and --max-tokens {options.max_tokens} "
            f"are more than the model's context of {model.config.max_positions}"
        )
    figures = answer.Figures()
    context = Context(model, params, len(tokens) + options.max_tokens, options.chunk_size)
    answer.read(context, tokens, figures)
    stop_ids = {*model.config.eos_ids, *tokenizer.eos_ids}
    answer.write(context, tokenizer, options.max_tokens, sampling, sorted(stop_ids), figures)
    print(f"\n{figures.report()}")
    return 0
