"""Flags of `longctx demo`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import add_compile_arguments

SUMMARY = "Hide pass keys in a long document and ask the built-in model for them."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens", type=int, default=32768, metavar="N", help="length of the document in bytes; default: 32768"
    )
    parser.add_argument("--questions", type=int, default=8, metavar="N", help="pass keys to hide; default: 8")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the document")
    parser.add_argument("--document", type=Path, metavar="FILE", help="ask about this text instead (with --question)")
    parser.add_argument("--question", metavar="TEXT", help='such as "What is the pass key of lemon?"')
    parser.add_argument(
        "--chunk-size", type=int, default=512, metavar="N", help="the most tokens of a step; default: 512"
    )
    add_compile_arguments(parser)
