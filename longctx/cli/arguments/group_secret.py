"""Flags of `longctx group-secret`."""

import argparse

SUMMARY = "Print a new secret, which all processes of a group then get by --group-secret-file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
