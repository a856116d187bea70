"""The secret that the processes of a group share, from which they derive the keys of their connections."""

import ipaddress
import os
import secrets

ENVIRONMENT_VARIABLE = "LONGCTX_GROUP_SECRET"
_LEAST_CHARACTERS = 32


def make_group_secret() -> str:
    """Make a new secret: 256 random bits as text."""
    return secrets.token_hex(32)


def find_group_secret(given: str | None) -> str | None:
    """Return the secret that was given, or that of the environment; None: there is none.

    Raises:
      TypeError, ValueError: it is no text, or one that could be guessed.
    """
    secret = os.environ.get(ENVIRONMENT_VARIABLE) if given is None else given
    if secret is None:
        return None
    if not isinstance(secret, str):
        raise TypeError(f"group_secret must be text, got {type(secret).__name__}")
    secret = secret.strip()
    if len(secret) < _LEAST_CHARACTERS:
        raise ValueError(
            f"the group's secret must have at least {_LEAST_CHARACTERS} characters, got {len(secret)}: make one with "
            "`longctx group-secret > FILE`"
        )
    return secret


def check_address(coordinator: str, ip: str, group_secret: str | None) -> None:
    """Check that there is a secret if other machines can reach the coordinator's address.

    Raises:
      ValueError: there is none; the message says how to make one.
    """
    if group_secret is None and not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        raise ValueError(
            f"coordinator {coordinator} can be reached from other machines, and the group has no secret: make one with "
            "`longctx group-secret > FILE`, and give it to every process, by --group-secret-file FILE, "
            f"{ENVIRONMENT_VARIABLE} or initialize(group_secret=...)"
        )
