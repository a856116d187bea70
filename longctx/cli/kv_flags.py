"""What commands make of the flags of what keeps pages beyond the devices."""

import argparse
import re

from longctx.cli.naming import naming_flags
from longctx.serving.kv_cache.secret import make_secret, read_kv_secret
from longctx.serving.kv_cache.tiers.config import TierConfig

_UNITS = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?B|B?)")
_FLAGS = {
    "host_bytes": "--kv-host-bytes",
    "disk_bytes": "--kv-disk-bytes",
    "disk and": "--kv-disk and",
    "store": "--kv-store",
}
SECRET_FLAGS = {"kv_secret_file": "--kv-secret-file"}


def tier_config(options: argparse.Namespace) -> TierConfig | None:
    """What keeps pages, by the flags; None: nothing does. Errors name the flags."""
    if options.kv_host_bytes is None:
        for name in ("kv_disk", "kv_disk_bytes", "kv_store"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --kv-host-bytes: pages go there by host memory")
        return None
    with naming_flags(_FLAGS):
        return TierConfig(
            parse_bytes("--kv-host-bytes", options.kv_host_bytes),
            0 if options.kv_disk_bytes is None else parse_bytes("--kv-disk-bytes", options.kv_disk_bytes),
            None if options.kv_disk is None else str(options.kv_disk),
            options.kv_eviction,
            options.kv_store,
        )


def page_hash_key(options: argparse.Namespace) -> bytes | None:
    """The key of page hashes, by `--kv-secret-file`, or by a secret that is kept in `--kv-disk`; None: a random one.

    Raises:
      ValueError: there is no such file, others may read it, or its secret could be guessed.
    """
    file = options.kv_secret_file
    if file is None and options.kv_disk is not None:
        file = options.kv_disk / "secret"
        try:
            make_secret(file)
        except OSError as error:
            raise ValueError(f"--kv-disk {file.parent} can't be used: {error}") from None
    if file is None:
        if options.kv_store is not None:
            raise ValueError("--kv-store needs --kv-secret-file: engines find each other's pages by keys made with it")
        return None
    with naming_flags(SECRET_FLAGS):
        return read_kv_secret(file)


def parse_bytes(name: str, text: str) -> int:
    """A number of bytes, such as `8GiB`; ValueError that names the flag."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{name} must be a number of bytes, or as 8GiB or 500MB, got {text!r}")
    unit = found[2] if found[2] != "B" else ""
    return int(float(found[1]) * _UNITS[unit.replace("K", "k")])
