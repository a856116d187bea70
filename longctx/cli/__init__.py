"""The command line: `longctx bench | demo | generate | profile`."""

import argparse
import sys
from collections.abc import Sequence

from longctx.cli import bench, demo, generate, profile


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error that the user can correct is one line on standard error, with exit status 2."""
    parser = argparse.ArgumentParser(prog="longctx", description="Exact inference over very long contexts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (bench, demo, generate, profile):
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=command.SUMMARY, description=command.SUMMARY)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ValueError) as error:
        print(f"longctx: {error}", file=sys.stderr)
        return 2
