"""Flags of `longctx profile`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import (
    add_compile_arguments,
    add_engine_arguments,
    add_model_arguments,
    add_plan_arguments,
)

SUMMARY = "Measure an engine's steps and fit the runtime predictor that scheduling uses."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FILE", help="profile to write, JSON, for bench --profile")
    add_model_arguments(parser)
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of the longest sequence; default: the model's context"
    )
    parser.add_argument("--max-context", type=int, metavar="N", help="the longest measured context in tokens (16,384)")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs of each batch; their median counts; default: 5"
    )
    parser.add_argument(
        "--check", type=int, default=20, metavar="N", help="random batches to evaluate the predictor on; default: 20"
    )
    add_compile_arguments(parser)
    add_engine_arguments(parser)
    add_plan_arguments(parser)
