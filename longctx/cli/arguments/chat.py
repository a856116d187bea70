"""Flags of `longctx chat`."""

import argparse

from longctx.cli.arguments.engine import add_compile_arguments, add_model_arguments, add_plan_arguments
from longctx.cli.arguments.sampling import add_sampling_arguments

SUMMARY = "Talk to a model in the terminal, about files too; each turn reads only what is new."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message, which every conversation begins with")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of the longest conversation; default: the model's context, or what fits into memory",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=512, metavar="N", help="the most prompt tokens of a step; default: 512"
    )
    parser.add_argument("--no-history", action="store_true", help="neither read nor keep the messages of earlier runs")
    add_sampling_arguments(parser, max_tokens=512)
    add_compile_arguments(parser)
    add_plan_arguments(parser)
