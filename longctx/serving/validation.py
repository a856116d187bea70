"""Checks of arguments, whose errors name the argument and the values that are allowed."""

from longctx.models.validation import MAX_INT32 as MAX_INT32
from longctx.models.validation import check_bool as check_bool
from longctx.models.validation import check_integer as check_integer
from longctx.models.validation import check_real as check_real
from longctx.models.validation import shown as shown


def check_text(name: str, value: object) -> str:
    """Check for a string that can be encoded as UTF-8, and return it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode, got {shown(value)}") from error
    return value
