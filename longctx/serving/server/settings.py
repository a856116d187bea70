"""Settings of a server: API keys, limits of clients, and timeouts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from longctx.serving.validation import check_integer, check_real

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")  # what a header can hold, without spaces
_INTEGERS = {
    "max_body_bytes": 1,
    "max_header_bytes": 256,
    "max_prompts": 1,
    "max_priority": 0,
    "default_max_tokens": 1,
    "stream_buffer": 1,
    "prepare_processes": 0,
}
_SECONDS = (
    "header_timeout",
    "body_timeout",
    "slow_reader_timeout",
    "ping_interval",
    "shutdown_timeout",
    "stall_timeout",
    "max_cache_ttl",
)


@dataclass(frozen=True)
class ApiKey:
    """API key with a name, which is the tenant of its requests. Only names are printed.

    Raises:
      ValueError: a name or key that is too short or long, or has other characters than it may.
    """

    name: str
    key: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a key's name must be 1 to 64 letters, digits, '.', '_' or '-', got {self.name!r}")
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"the key of {self.name} must be 8 to 512 visible ASCII characters")


def read_keys(lines: Iterable[str], prefix: str) -> tuple[ApiKey, ...]:
    """Read keys from lines `KEY` or `NAME KEY`; empty lines and those with `#` in front are left out.

    Args:
      prefix: of the names of keys without one, which are numbered from 1.

    Raises:
      ValueError: a line is not like that, or two keys have the same name; no message has a key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"key {number} must be KEY or NAME KEY, and has {len(words)} words")
        name = words[0] if len(words) == 2 else f"{prefix}-{number}"
        keys.append(ApiKey(name, words[-1]))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"names of keys must be different, got {', '.join(names)}")
    return tuple(keys)


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; durations are seconds.

    Attributes:
      api_keys: of clients; their names are the tenants. Empty: every client may use the server, as tenant "".
      admin_keys: needed for loads, profiles and aborts, where there are some.
      allow_hosts: names by which clients may reach the server (the header Host, without its port), so that a page of
        another site, whose name is made to point here, finds nothing. Empty: any.
      allow_origins: web pages from other hosts that may use the server from a browser (CORS).
      max_body_bytes, max_header_bytes: of a request, at most.
      header_timeout, body_timeout: until a request's headers, and its body, must be there.
      max_prompts: prompts of one request, at most.
      default_max_tokens: tokens of an answer whose request doesn't say how many, as far as there is room.
      max_priority: the highest `priority` that a request may have; higher ones count as this.
      min_tpot: the least TPOT target that a request may have: a target shrinks the chunks of all prompts while
        the request decodes. None: the engine's own, so that requests may only ask for less.
      stream_buffer: steps whose tokens may wait for a client that reads slowly, before its request is cancelled.
      slow_reader_timeout: until a client's connection is closed that takes nothing.
      ping_interval: between comments in a stream that has nothing to say, for proxies.
      shutdown_timeout: for which running requests may go on after SIGTERM.
      stall_timeout: without a step, although there is work, after which the server is not healthy any more.
      prepare_processes: processes that check, tokenise and hash long prompts; 0: threads do it.
      cache_tokens: of the documents of one tenant's caches together; None: as many as can be pinned.
      max_cache_ttl: for which a cache is kept, at most.
      profile_dir: where `/start_profile` writes traces; None: it is refused.

    Raises:
      TypeError, ValueError: a value is out of range; the message names it.
    """

    api_keys: tuple[ApiKey, ...] = ()
    admin_keys: tuple[ApiKey, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 64 * 2**20
    max_header_bytes: int = 32 * 2**10
    header_timeout: float = 30.0
    body_timeout: float = 60.0
    max_prompts: int = 1024
    default_max_tokens: int = 4096
    max_priority: int = 0
    min_tpot: float | None = None
    stream_buffer: int = 1024
    slow_reader_timeout: float = 30.0
    ping_interval: float = 15.0
    shutdown_timeout: float = 60.0
    stall_timeout: float = 300.0
    prepare_processes: int = 1
    cache_tokens: int | None = None
    max_cache_ttl: float = 86_400.0
    profile_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, least in _INTEGERS.items():
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))
        for name in _SECONDS:
            object.__setattr__(self, name, check_real(name, getattr(self, name), 0, 1e9))
        if self.cache_tokens is not None:
            object.__setattr__(self, "cache_tokens", check_integer("cache_tokens", self.cache_tokens, 0))
        if self.min_tpot is not None:
            object.__setattr__(self, "min_tpot", check_real("min_tpot", self.min_tpot, 1e-6, 1e9))
        keys = [key.key for key in (*self.api_keys, *self.admin_keys)]
        if len(set(keys)) < len(keys):
            raise ValueError("api_keys and admin_keys must be different keys, and one is there twice")
