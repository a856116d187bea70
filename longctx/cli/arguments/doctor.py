"""Flags of `longctx doctor`."""

import argparse

from longctx.cli.arguments.engine import MODEL

SUMMARY = (
    "Check this machine: versions, devices, links, compile cache, extras, and what would be picked here and why. With "
    "--model, check all files of a checkpoint instead. A line for each problem; exit status 1 if there is any."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help=f"check a checkpoint: {MODEL}")
    parser.add_argument("--json", action="store_true", help="print JSON, as for a bug report")
