"""Flags that say how tokens are drawn, and when an answer ends."""

import argparse


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Those of `SamplingParams` that a command takes; `max_tokens` is the default of `--max-tokens`."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"to generate at most; default: {max_tokens}"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    sampling.add_argument("--top-k", type=int, metavar="N", help="sample from the N most probable tokens")
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="sample from the most probable tokens that add up to X; default: 1",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="X",
        help="sample from tokens at least X times as probable as the top one; default: 0",
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="of the tokens that are drawn; default: 0")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer; may be repeated"
    )
