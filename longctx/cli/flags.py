"""Flags made from the fields of dataclasses, dataclasses made from parsed flags, and errors that name flags."""

import argparse
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from longctx.serving.validation import FieldType, field_types

_Settings = TypeVar("_Settings")
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", tuple[int, ...]: "N,N", Mapping[str, float]: "NAME=X"}
_ENTRY = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", re.MULTILINE)


_UNITS = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B?)")


def parse_integers(text: str) -> tuple[int, ...]:
    """Return integers from `8,64,512`."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"must be integers with commas between them, got {text!r}")
    return tuple(map(int, text.split(",")))


def parse_weight(text: str) -> tuple[str, float]:
    """Return name and number from a text such as `NAME=2.5`."""
    name, _, weight = text.rpartition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=X, got {text!r}") from None


def parse_bytes(text: str) -> int:
    """Return a number of bytes, such as `8GiB`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, or as 8GiB or 500MB, got {text!r}")
    unit = found[2] if found[2] != "B" else ""
    return int(float(found[1]) * _UNITS[unit.replace("K", "k")])


_TYPES: dict[Any, Callable[[str], Any]] = {int: int, float: float, Path: Path}
_TYPES |= {tuple[int, ...]: parse_integers, Mapping[str, float]: parse_weight}


class Parser(argparse.ArgumentParser):
    """Parser whose errors are ValueErrors, a line that names the flag."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


class Flags(NamedTuple):
    """Flags of fields of a dataclass, in one section of a command's help.

    A flag is named like its field, `--token-budget` of `token_budget`; that of a switch which is on by default is
    `--no-...`, and one that may be repeated has no plural, `--allow-host` of `allow_hosts`. The help is a text among
    the field's annotations, or the first sentence of its entry in the docstring, and what that says about None.

    Attributes:
      settings: the dataclass.
      title: of the section; none: the first one. Groups of one title share a section.
      only: the fields that have flags; none: all, but those `without`.
      prefix: of all flags and of their names among the options.
      names: flags with other names, by field. aliases: further ones.
      defaults, helps: instead of those that the dataclass has, by field.
      positional: fields without a flag, which come by their place, and the words that stand for them in the help.
      are_changes: whether every default is None, as the flags replace recorded settings.
    """

    settings: type
    title: str = ""
    only: Collection[str] = ()
    without: Collection[str] = ()
    prefix: str = ""
    names: Mapping[str, str] = {}
    aliases: Mapping[str, Collection[str]] = {}
    defaults: Mapping[str, Any] = {}
    helps: Mapping[str, str] = {}
    positional: Mapping[str, str] = {}
    are_changes: bool = False


class Parsed(NamedTuple):
    """Place of a field among the options: its name there, and its flag."""

    name: str
    flag: str


def flag(name: str) -> str:
    """Return the flag of an argument."""
    return f"--{name.replace('_', '-')}"


def add_flags(parser: argparse.ArgumentParser, groups: Iterable[Flags]) -> None:
    """Add the flags of some groups to a command's parser; its options say in `fields` where each field's value is."""
    fields: dict[type, dict[str, Parsed]] = {}
    sections: dict[str, Any] = {"": parser}
    for group in groups:
        section = sections.get(group.title)
        if section is None:
            section = sections[group.title] = parser.add_argument_group(group.title)
        for field in dataclasses.fields(group.settings):
            if field.name in (group.only or {field.name}) and field.name not in group.without:
                fields.setdefault(group.settings, {})[field.name] = _add_flag(section, group, field)
    parser.set_defaults(fields=fields)


def _add_flag(section: Any, group: Flags, field: "dataclasses.Field[Any]") -> Parsed:
    kind, dest = field_types(group.settings)[field.name], group.prefix + field.name
    default = group.defaults.get(field.name, field.default)
    if default is dataclasses.MISSING and callable(field.default_factory):
        default = field.default_factory()
    is_required = default is dataclasses.MISSING and not group.are_changes
    if group.are_changes or is_required:
        default = None
    is_off, repeats = kind.kind is bool and default is True, _repeats(kind)
    name = flag(group.names.get(field.name, f"no_{dest}" if is_off else dest.removesuffix("s") if repeats else dest))
    is_size = kind.kind is int and field.name.endswith("_bytes")
    more: dict[str, Any] = {"help": _help(group, field.name, kind, default)}
    if kind.kind is bool:
        more |= {"action": "store_false" if is_off else "store_true"}
    else:
        word = _METAVARS.get(kind.kind, name.rpartition("-")[2].upper())
        more |= {"default": default, "metavar": "SIZE" if is_size else word}
        if kind.choices:
            more |= {"choices": list(kind.choices), "metavar": None}
        if kind.kind in _TYPES:
            more["type"] = parse_bytes if is_size else _TYPES[kind.kind]
        if repeats:
            more |= {"action": _Repeat, "default": []}
    if field.name in group.positional:
        section.add_argument(dest, **more | {"metavar": group.positional[field.name]})
        return Parsed(dest, group.positional[field.name])
    if is_required:
        more["required"] = True
    section.add_argument(name, *group.aliases.get(field.name, ()), dest=dest, **more)
    return Parsed(dest, name)


class _Repeat(argparse.Action):
    """Append to the values of a flag; those that are its default, as a file has them, are replaced."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [value] if before is self.default else [*before, value])


def _repeats(kind: FieldType) -> bool:
    """Whether a flag may be repeated: its field has texts."""
    return get_origin(kind.kind) is not None and get_args(kind.kind)[0] is str


def _help(group: Flags, name: str, kind: FieldType, default: Any) -> str:
    """Describe a flag: the first sentence about its field, the range, the default, and whether it may be repeated."""
    entry = kind.help or _entries(group.settings).get(name, "")
    text = group.helps.get(name) or re.split(r"\.(?:\s|$)", entry, maxsplit=1)[0]
    if kind.range is not None and kind.range.high < 1e6 and math.isfinite(kind.range.low):
        text += f"; {kind.range.low:g} to {kind.range.high:g}"
    if default is None and not group.are_changes and (found := re.search(r"\bNone: ([^.;]*)", entry)):
        text = text.replace(f"; {found[0]}", "") + f"; default: {found[1]}"
    if kind.kind is not bool and default not in (None, "", (), {}) and "default: " not in text:
        text += f"; default: {default:g}" if isinstance(default, float) else f"; default: {default}"
    if _repeats(kind):
        text += "; may be repeated"
    return re.sub(r"`\"?|\"?`", "", text).replace("%", "%%")


@functools.cache
def _entries(settings: type) -> dict[str, str]:
    """The entries of the section Attributes of a class's docstring, by field."""
    _, _, section = inspect.cleandoc(settings.__doc__ or "").partition("\nAttributes:\n")
    section = section.partition("\n\n")[0]
    return {name: re.sub(r"\s+", " ", entry[2]) for entry in _ENTRY.finditer(section) for name in entry[1].split(", ")}


def read(settings: type[_Settings], options: argparse.Namespace, **more: Any) -> _Settings:
    """Make settings from the flags of a command."""
    parsed: dict[str, Parsed] = options.fields[settings]
    made: type = settings
    values = {name: getattr(options, each.name) for name, each in parsed.items() if name not in more}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = dict(value) if field_types(made)[name].kind == Mapping[str, float] else tuple(value)
    with naming({name: each.flag for name, each in parsed.items()}):
        return settings(**values | more)


def check_options(options: argparse.Namespace) -> None:
    """Check the ranges of flags that are the command line's own; ValueError names the flag."""
    for settings, parsed in options.fields.items():
        if settings.__module__.startswith("longctx.cli."):
            for name, each in parsed.items():
                value = getattr(options, each.name)
                if value is not None:
                    field_types(settings)[name].check(each.flag, value)


def flags_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the flags of a command by the fields of settings that they are of."""
    return {name: each.flag for parsed in options.fields.values() for name, each in parsed.items()}


def refuse(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse flags, by their names among the options, that are given; ValueError names the flag before `why`."""
    flags = {each.name: each.flag for parsed in options.fields.values() for each in parsed.values()}
    for name in names:
        if getattr(options, name) not in (None, []):
            raise ValueError(f"{flags[name]} {why}")


@contextmanager
def naming(flags: Mapping[str, str]) -> Iterator[None]:
    """Replace names of arguments by flags in error messages, which name an argument before they say what it must be."""
    names = "|".join(sorted(flags, key=len, reverse=True)) or "(?!)"
    found = re.compile(rf"(?<![-\w/'\"])(?<!the )(?:plan's )?({names})\b")
    says = re.compile(r"=|(?:'s| \*| =)? (?:must|contradicts?|has|needs?|\d|(?:and )?\w+ (?:must|\*))")

    def named(match: re.Match[str]) -> str:
        is_name = "_" in match[1] or says.match(match.string, match.end())
        return flags[match[1]] if is_name else match[0]

    try:
        yield
    except (ValueError, TimeoutError) as error:
        text, kind = str(error), TimeoutError if isinstance(error, TimeoutError) else ValueError
        raise kind(text if "] " in text else found.sub(named, text)) from None  # ]: a table of a file


@contextmanager
def prefixing(prefix: str) -> Iterator[None]:
    """Put a flag before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None
