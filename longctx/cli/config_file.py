"""Flags from TOML files and presets, as arguments. Those of the command line override them."""

import argparse
import difflib
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from longctx.cli.flags import flag
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan

_NOT_IN_FILES = {"help", "config"}


def config_arguments(parser: argparse.ArgumentParser, file: Path, arguments: Sequence[str]) -> list[str]:
    """The flags of a file as arguments, to be put before those of the command line.

    Args:
      parser: of the command.
      arguments: of the command line, after the command's name: what they give is left out.

    Raises:
      ValueError: the file can't be read, has a key that is no flag, or a value that its flag can't have.
    """
    return flag_arguments(f"--config {file}: ", parser, _read(file), _given(parser, arguments))


def flag_arguments(
    place: str, parser: argparse.ArgumentParser, values: Mapping[str, Any], given: Container[str] = ()
) -> list[str]:
    """Flags by their names as arguments, but those whose destinations are given; ValueError as `config_arguments`."""
    actions = {
        option[2:]: action for action in parser._actions for option in action.option_strings if option[:2] == "--"
    }
    found: list[str] = []
    for key, value in values.items():
        name = key.replace("_", "-")
        action = actions.get(name)
        if action is None or name in _NOT_IN_FILES:
            near = difflib.get_close_matches(name, actions.keys() - _NOT_IN_FILES, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{place}unknown key {key!r}{hint}")
        if action.dest not in given:
            found += _to_arguments(f"{place}{key}", f"--{name}", action, value)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            return tomllib.load(opened)
    except OSError as error:
        raise ValueError(f"--config {file} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file} is no TOML: {error}") from None


def _given(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> set[str]:
    """Names of what the command line says: of a parser whose defaults are all left out."""
    defaults = [(action, action.default, action.required) for action in parser._actions]
    for action in parser._actions:
        action.default, action.required = argparse.SUPPRESS, False
    try:
        return set(vars(parser.parse_known_args(arguments, argparse.Namespace())[0]))
    finally:
        for action, default, required in defaults:
            action.default, action.required = default, required


def _to_arguments(place: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{place} must be true or false, got {value!r}")
        return [option] if value else []
    values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise ValueError(f"{place} must be a string or a number, got {each!r}")
    return [f"{option}={each}" for each in values]


def preset_arguments(preset: str) -> list[str]:
    """Return the settings of a paper, those of `EngineConfig` and `ParallelPlan` of the same name, as arguments."""
    config, plan = getattr(EngineConfig, preset)(), getattr(ParallelPlan, preset, ParallelPlan)()
    found: list[str] = []
    for made, usual in ((config, EngineConfig()), (config.slo, EngineConfig().slo), (plan, ParallelPlan())):
        for name in (each.name for each in fields(made) if each.name != "slo"):
            value = getattr(made, name)
            if value != getattr(usual, name):
                found.append(f"{flag(name)}={value}")
    return found
