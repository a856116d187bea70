"""Errors that name flags, where libraries name arguments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from longctx.cli.arguments.engine import CHOICES, SIZES, SLO, flag


@contextmanager
def naming_flags(
    arguments: Sequence[str] | Mapping[str, str] = (*SIZES, *CHOICES, *SLO, "buckets", "verify_share"),
) -> Iterator[None]:
    """Replace argument names by flags in error messages: by those of the same names, or those that a mapping has."""
    flags = arguments if isinstance(arguments, Mapping) else {name: flag(name) for name in arguments}
    try:
        yield
    except (ValueError, TimeoutError) as error:
        names = rf"(?<!-)\b({'|'.join(flags)})\b"
        raise type(error)(re.sub(names, lambda name: flags[name[0]], str(error))) from None


@contextmanager
def prefixing(prefix: str) -> Iterator[None]:
    """Put a flag before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None
