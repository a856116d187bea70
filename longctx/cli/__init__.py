"""The command line, `longctx COMMAND`: see `COMMANDS` and docs/command_line.md."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from longctx import __version__
from longctx.cli.terminal import FAILED, INTERRUPTED, WRONG, interrupts, keep_stdout, report_error
from longctx.gpu_flags import set_memory_fraction, set_xla_flags

COMMANDS = {
    "api-key": "Make a key of a server: the line of a file of keys, with its digest; the key itself on standard error.",
    "bench": "Serve a workload, from a file or synthetic, and measure TTFT, TPOT and tokens per second.",
    "chat": "Talk to a model in the terminal, about files too; each turn reads only what is new.",
    "demo": "Hide pass keys in a long document and ask the built-in model for them.",
    "doctor": "Check this machine: versions, devices, links, compile cache, extras, and what would be picked here and "
    "why. With --model, check all files of a checkpoint. A line for each problem; exit status 1 if there is any.",
    "generate": "Continue a prompt with a Llama, Mistral, Qwen2.5, Qwen3 or Gemma 3 checkpoint.",
    "group-secret": "Print a new secret, which all processes of a group then get by --group-secret-file.",
    "plan": "Search the parallel plan of a model on up to N GPUs: what meets a target, and why others don't.",
    "profile": "Measure an engine's steps and fit the runtime predictor that scheduling uses.",
    "quantize": "Quantise a checkpoint's weights to FP8 with a scale for each output row.",
    "replay": "Replay what an engine recorded: as it was, or under other settings.",
    "serve": "Serve a model over HTTP, as OpenAI's API; with --cluster many engines behind one address.",
    "simulate": "Serve a workload in virtual time, on devices that need not be there.",
}
"""Summaries of the commands; `longctx.cli.commands` has their flags, the module of its name runs each."""


def program() -> NoReturn:
    """Run `main` as a program of its own, which Ctrl-C ends at once."""
    interrupts.watch()
    keep_stdout()
    status = main()
    if status:
        # Otherwise JAX's own exit would wait for other processes, or crash in the midst of a step.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status; an error is one line on standard error."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return report_error("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of the text has left, such as `head`
        return FAILED
    except (OSError, ValueError) as error:
        return report_error(str(error), WRONG)
    except MemoryError as error:
        return report_error(f"failed: {type(error).__name__}: {error}", FAILED)


def _run(arguments: list[str]) -> int:
    name, options = parse(arguments)
    set_xla_flags()  # before JAX starts
    set_memory_fraction()
    # Only now, so that `--help` doesn't wait for JAX.
    command = importlib.import_module(f"longctx.cli.{name.replace('-', '_')}")
    if hasattr(options, "compile_cache"):
        from longctx.cli import compile_cache

        compile_cache.enable(options.compile_cache)
    from longctx.cli.flags import flags_of, naming

    try:
        with naming(flags_of(options)):
            return command.run(options)
    except RuntimeError as error:
        if not _is_of_device(error):
            raise
        return report_error(f"failed: {str(error).splitlines()[0]}", FAILED)


def parse(arguments: list[str]) -> tuple[str, argparse.Namespace]:
    """Parse a command line, with the flags of its `--preset` and of a `--config` file, which it overrides.

    Returns:
      The command's name, and its options; `fields` of these says where the fields of settings are.

    Raises:
      ValueError: a flag is none or out of range, or a file can't be read; the message names the flag.
      SystemExit: the help was printed.
    """
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _parse_without_command(arguments)
    if name == "serve":
        return name, _parse_serve(arguments[1:])
    return name, _parse_command(name, arguments[1:])


def _parse_serve(arguments: list[str]) -> argparse.Namespace:
    """Parse the flags of `serve`, those of `vllm serve` among them, which errors name as they were given."""
    from longctx.cli.vllm_flags import translate

    translated = translate(arguments)
    try:
        options = _parse_command("serve", translated.arguments)
    except ValueError as error:
        raise ValueError(translated.named(str(error))) from None
    for parsed in options.fields.values():
        for field, each in parsed.items():
            parsed[field] = each._replace(flag=translated.given.get(each.flag, each.flag))
    return options


def _parse_command(name: str, given: list[str]) -> argparse.Namespace:
    """Parse the flags of a command."""
    parser = command_parser(name)
    options = parser.parse_args(given)
    from longctx.cli.config_file import config_arguments, preset_arguments
    from longctx.cli.flags import check_options

    of_file = config_arguments(parser, options.config) if getattr(options, "config", None) else []
    preset = getattr(parser.parse_args([*of_file, *given]), "preset", None)
    before = [*preset_arguments(preset), *of_file] if preset else of_file
    if before:
        parser.set_defaults(**vars(parser.parse_args(before)))
        options = parser.parse_args(given)
    check_options(options)
    return options


def _parse_without_command(arguments: list[str]) -> NoReturn:
    """Print the version or the list of commands, and exit; ValueError: there is no such command."""
    from longctx.cli.flags import Parser

    parser = Parser(prog="longctx", description="Exact inference over very long contexts.")
    parser.add_argument("--version", action="version", version=f"longctx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    parser.parse_args(arguments)
    raise ValueError("the command must come first")


def command_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command's flags."""
    from longctx.cli.commands import FLAGS
    from longctx.cli.flags import Parser, add_flags

    parser = Parser(prog=f"longctx {command}", description=COMMANDS[command], add_help=False)
    add_flags(parser, FLAGS[command])
    parser.add_argument("-q", "--quiet", action="store_true", help="print no statistics and no progress")
    parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    shown = [each for each in parser._actions if each.required or not each.option_strings]
    words = [f"{each.option_strings[0]} {each.metavar}" if each.option_strings else each.metavar for each in shown]
    parser.usage = " ".join(["%(prog)s", *map(str, words), "[FLAG ...]"])
    return parser


def command_flags(command: str) -> list[argparse.Action]:
    """Return the flags of a command, as argparse has them."""
    return command_parser(command)._actions


def _is_of_device(error: RuntimeError) -> bool:
    """Whether an error is the device's, such as that its memory is full."""
    if "jax" not in sys.modules:  # not all commands load it
        return False
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError)
