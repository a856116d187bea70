"""Flags of `longctx generate`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import SIZES, add_compile_arguments, add_model_arguments, add_plan_arguments
from longctx.cli.arguments.processes import add_process_arguments
from longctx.cli.arguments.sampling import add_sampling_arguments

SUMMARY = "Continue a prompt with a Llama, Mistral, Qwen2.5 or Qwen3 checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="text to continue")
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="completions (needs a temperature); default: 1")
    parser.add_argument(
        "--max-running",
        type=int,
        default=SIZES["max_running"],
        metavar="N",
        help=f"the most completions, which take memory each; default: {SIZES['max_running']}",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=1024, metavar="N", help="the most prompt tokens of a step; default: 1024"
    )
    add_sampling_arguments(parser, max_tokens=256)
    add_compile_arguments(parser)
    add_plan_arguments(parser)
    add_process_arguments(parser)
