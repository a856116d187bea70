"""Who may take part in transfers between processes: those that know the secret."""

import ipaddress

from longctx.serving.distributed.network import Key, derive_key

_LEAST_CHARACTERS = 32


def transfer_key(secret: str | None) -> Key | None:
    """The CURVE key of all instances with this secret; None: there is none, and nothing is encrypted.

    Raises:
      TypeError, ValueError: it is no text, or one that could be guessed.
    """
    if secret is None:
        return None
    if not isinstance(secret, str):
        raise TypeError(f"secret must be text, got {type(secret).__name__}")
    if len(secret.strip()) < _LEAST_CHARACTERS:
        raise ValueError(
            f"secret must have at least {_LEAST_CHARACTERS} characters, got {len(secret.strip())}: make one with "
            "`longctx group-secret > FILE`"
        )
    return derive_key(secret.strip(), b"longctx transfer")


def check_ip(ip: str, may_be_reached: bool) -> None:
    """ValueError, unless this is an IP address, and one that other machines can't reach unless they may."""
    try:
        is_loopback = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
    except ValueError:
        raise ValueError(f"ip must be an IP address, got {ip!r}") from None
    if not (may_be_reached or is_loopback):
        raise ValueError(f"ip {ip} can be reached from other machines: transfers need a secret")
