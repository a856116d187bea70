"""Flags from TOML files and presets, as arguments."""

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from longctx.cli.flags import flag, parse_integers
from longctx.serving.config import EngineConfig
from longctx.serving.parallel_plan import ParallelPlan

_NOT_IN_FILES = {"help", "config"}


def config_arguments(parser: argparse.ArgumentParser, file: Path) -> list[str]:
    """Return the flags of a command's file as arguments."""
    try:
        with file.open("rb") as opened:
            values = tomllib.load(opened)
    except OSError as error:
        raise ValueError(f"--config {file} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file} is no TOML: {error}") from None
    return flag_arguments(f"--config {file}: ", parser, values)


def flag_arguments(place: str, parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> list[str]:
    """Return flags by their names as arguments; ValueError as `config_arguments`."""
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
        found += _to_arguments(f"{place}{key}", f"--{name}", action, value)
    return found


def _to_arguments(place: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{place} must be true or false, got {value!r}")
        return [option] if value else []
    if isinstance(value, list) and action.type is parse_integers:
        value = ",".join(map(str, value))
    values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float | Path):
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
