"""Flags of `longctx doctor`."""

import argparse

from longctx.cli.arguments.engine import MODEL

SUMMARY = "Check all files of a checkpoint: a line for each problem; exit status 1 if there is any."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL)
