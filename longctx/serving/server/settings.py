"""`ServerSettings`: what a server allows its clients, and for how long it waits for them."""

from dataclasses import dataclass
from pathlib import Path

from longctx.serving.server.keys import ApiKey
from longctx.serving.validation import check_integer, check_real

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
class ServerSettings:
    """Settings of a server; durations are seconds.

    Attributes:
      api_keys: whoever has one may use the server; their names are the tenants. None: everybody may, as tenant "".
      admin_keys: needed for loads, profiles and aborts, where there are some.
      allow_hosts: names by which clients may reach the server (the header Host, without its port), so that a page of
        another site, whose name is made to point here, finds nothing. Empty: any.
      allow_origins: web pages from other hosts that may use the server from a browser (CORS).
      max_body_bytes, max_header_bytes: of a request, at most.
      header_timeout, body_timeout: until a request's headers, and its body, must be there.
      max_prompts: prompts of one request, at most.
      default_max_tokens: tokens of an answer whose request doesn't say how many, as far as there is room.
      max_priority: the highest `priority` that a request may have; higher ones count as this.
      min_tpot: the least TPOT target that a request may have: a target shrinks the chunks of everybody's prompts while
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
