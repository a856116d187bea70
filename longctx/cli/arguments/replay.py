"""Flags of `longctx replay`."""

import argparse
from pathlib import Path

from longctx.cli.arguments.engine import ADMISSION, MODEL

SUMMARY = "Replay what an engine recorded: as it was, under other settings, or on the model."

SETTINGS = ("policy", "chunking", "max_share", "num_pages", "token_budget", "max_running", "admission", "run_ahead")
"""Settings that the same requests can be replayed under."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="DIR", help="what `longctx serve --record DIR` wrote; its last run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that is found out")

    looking = parser.add_argument_group("looking at it")
    looking.add_argument("--until", type=int, metavar="STEP", help="stop there, and print the scheduler's state")
    looking.add_argument(
        "--explain", metavar="REQUEST", help="why a request waited; REQUEST/N: its completion of this number"
    )

    looking.add_argument(
        "--accuracy", action="store_true", help="simulate it with measured and with predicted step times, and compare"
    )

    other = parser.add_argument_group("the same requests under other settings")
    other.add_argument("--policy", help="fcfs, edf, srpf, lrs, lrs_relative or ilrs")
    other.add_argument("--chunking", help="adaptive, static or static:N")
    other.add_argument("--max-share", type=float, metavar="X", help="share of a step for short prompts, ilrs")
    other.add_argument(
        "--slo",
        metavar="NAME=X[,NAME=X]",
        help="ttft_factor, ttft_least, tpot, tpot_factor, step_seconds: default targets",
    )
    other.add_argument("--num-pages", type=int, metavar="N", help="pages on each context rank")
    other.add_argument("--token-budget", type=int, metavar="N", help="rows of a step")
    other.add_argument("--max-running", type=int, metavar="N", help="sequences that run at a time")
    other.add_argument("--admission", choices=["reserve", "optimistic"], help=ADMISSION)
    other.add_argument("--run-ahead", type=int, metavar="N", help="steps in flight")

    model = parser.add_argument_group("on the model")
    model.add_argument("--model", metavar="MODEL", help=f"compute the tokens again, and compare them; {MODEL}")
    model.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the recorded engine's")
    for axis in ("stage", "context", "tensor"):
        model.add_argument(f"--{axis}", type=int, metavar="N", help="another plan, which gives the same tokens")
    # By another name than other commands have it, as most replays load no JAX.
    model.add_argument("--no-compile-cache", dest="compiles_anew", action="store_true", help="as of `longctx bench`")
