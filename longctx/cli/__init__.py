"""The command line, `longctx COMMAND`: see `COMMANDS` and docs/command_line.md."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from longctx import __version__
from longctx.cli.arguments.engine import PRESETS, flag
from longctx.cli.terminal import FAILED, INTERRUPTED, WRONG, interrupts, report_error, stdout_is_ours
from longctx.gpu_flags import set_memory_fraction, set_xla_flags

COMMANDS = (
    *("bench", "chat", "demo", "doctor", "generate", "group-secret", "plan", "profile", "quantize"),
    *("replay", "serve", "simulate"),
)


def program() -> NoReturn:
    """`main` as a program of its own, which Ctrl-C ends at once."""
    interrupts.watch()
    status = main()
    if status:
        # Otherwise JAX's own exit would wait for other processes, or crash in the midst of a step.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status; an error is one line on standard error."""
    try:
        with stdout_is_ours():
            return _run(arguments)
    except KeyboardInterrupt:
        return report_error("interrupted", INTERRUPTED)
    except BrokenPipeError:  # whoever read the text has left, such as `head`
        return FAILED
    except (OSError, ValueError) as error:
        return report_error(str(error), WRONG)
    except MemoryError as error:
        return report_error(f"failed: {type(error).__name__}: {error}", FAILED)


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="longctx", description="Exact inference over very long contexts.")
    parser.add_argument("--version", action="version", version=f"longctx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name in COMMANDS:
        module = name.replace("-", "_")
        flags = importlib.import_module(f"longctx.cli.arguments.{module}")
        sub = commands.add_parser(name, help=flags.SUMMARY, description=flags.SUMMARY)
        sub.add_argument("-q", "--quiet", action="store_true", help="print no statistics and no progress")
        flags.add_arguments(sub)
        sub.set_defaults(command=module)
        parsers[name] = sub
    options = _parse(parser, parsers, sys.argv[1:] if arguments is None else list(arguments))
    set_xla_flags()  # before JAX starts
    set_memory_fraction()
    # Only now, so that `--help` doesn't wait for JAX.
    command = importlib.import_module(f"longctx.cli.{options.command}")
    if hasattr(options, "no_compile_cache"):
        from longctx.cli import compile_cache

        compile_cache.enable(not options.no_compile_cache)
    try:
        return command.run(options)
    except RuntimeError as error:
        if not _is_of_device(error):
            raise
        return report_error(f"failed: {str(error).splitlines()[0]}", FAILED)


def _parse(
    parser: argparse.ArgumentParser, parsers: dict[str, argparse.ArgumentParser], arguments: list[str]
) -> argparse.Namespace:
    """Parse the command line; of a command that takes them, the flags of `--preset` and of a `--config` file too."""
    options = parser.parse_args(arguments)
    at = next(i for i, argument in enumerate(arguments) if argument in parsers)
    file = getattr(options, "config", None)
    if file is not None:
        from longctx.cli.config_file import config_arguments  # few commands have one

        more = config_arguments(parsers[arguments[at]], file, arguments[at + 1 :])
        arguments = [*arguments[: at + 1], *more, *arguments[at + 1 :]]
        options = parser.parse_args(arguments)
    preset = getattr(options, "preset", None)
    if preset is None:
        return options
    more = [f"{flag(name)}={value}" for name, value in PRESETS[preset].items()]
    return parser.parse_args([*arguments[: at + 1], *more, *arguments[at + 1 :]])


def _is_of_device(error: RuntimeError) -> bool:
    """Whether an error is the device's, such as that its memory is full."""
    if "jax" not in sys.modules:  # not all commands load it
        return False
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError)
