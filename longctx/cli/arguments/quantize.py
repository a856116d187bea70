"""Flags of `longctx quantize`."""

import argparse
from pathlib import Path

SUMMARY = "Quantise a checkpoint's weights to FP8 with a scale for each output row."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="checkpoint directory, or the name of a model of the hub")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write, which is empty or does not exist")
    parser.add_argument(
        "--modules",
        choices=["ffn", "all"],
        default="ffn",
        help="ffn: the feed-forward of all layers but the first and the last (default); all: all projections",
    )
