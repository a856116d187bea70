"""Settings of a server: API keys, limits of clients, timeouts, and observers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from longctx.serving.validation import Count, Positive, Range, Seconds, check_fields, check_text

LogFormat = Literal["text", "json"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")  # what a header can hold, without spaces


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
      api_keys: keys of clients; their names are the tenants. None: every client may use the server, as tenant "".
      admin_keys: needed for loads, profiles and aborts, where there are some.
      allow_hosts: name by which clients may reach the server (the header Host, without its port). So a page of another
        site, whose name is made to point here, finds nothing. Empty: any name.
      allow_origins: web page from another host that may use the server from a browser (CORS).
      max_body_bytes: bytes of a request's body, at most. None: 1 MiB, and 16 for each token of the longest sequence.
      max_header_bytes: bytes of a request's headers, at most.
      header_timeout: seconds until a request's headers must be there.
      body_timeout: seconds until a request's body must be there.
      max_prompts: prompts of one request, at most.
      default_max_tokens: tokens of a chat's answer whose request doesn't say how many. It ends earlier where there is
        no room.
      max_priority: the highest priority that a request may ask for; higher ones count as this.
      min_tpot: the least TPOT target that a request may ask for, seconds. None: --tpot. A target shrinks the chunks of
        all prompts while the request decodes.
      stream_buffer: steps whose tokens may wait for a client that reads slowly, before its request is cancelled.
      slow_reader_timeout: seconds until a connection is closed whose client reads nothing.
      ping_interval: seconds between comments in a stream that has nothing to say, for proxies.
      shutdown_timeout: seconds for which running requests may go on after SIGTERM.
      stall_timeout: seconds of one step after which /health fails.
      prepare_processes: processes that check, tokenise and hash long prompts; with 0, threads do it.
      cache_tokens: tokens of the documents of one tenant's caches together. None: as many as can be pinned.
      max_cache_ttl: seconds for which a cache is kept, at most.
      profile_dir: folder where /start_profile writes traces. None: it is refused.

    Raises:
      TypeError, ValueError: a value is out of range; the message names it.
    """

    api_keys: tuple[ApiKey, ...] = ()
    admin_keys: tuple[ApiKey, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: Positive | None = None
    max_header_bytes: Annotated[int, Range(256)] = 32 * 2**10
    header_timeout: Seconds = 30.0
    body_timeout: Seconds = 60.0
    max_prompts: Positive = 1024
    default_max_tokens: Positive = 4096
    max_priority: Count = 0
    min_tpot: Annotated[float, Range(1e-6, 1e9)] | None = None
    stream_buffer: Positive = 1024
    slow_reader_timeout: Seconds = 30.0
    ping_interval: Seconds = 15.0
    shutdown_timeout: Seconds = 60.0
    stall_timeout: Seconds = 300.0
    prepare_processes: Count = 1
    cache_tokens: Count | None = None
    max_cache_ttl: Seconds = 86_400.0
    profile_dir: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        keys = [key.key for key in (*self.api_keys, *self.admin_keys)]
        if len(set(keys)) < len(keys):
            raise ValueError("api_keys and admin_keys must be different keys, and one is there twice")


@dataclass(frozen=True)
class ObserverSettings:
    """Settings of metrics, logs, spans and events of the cache.

    Attributes:
      metrics_prefix: prefix of the metrics that vLLM has too; vllm makes its dashboards work.
      kv_events: endpoint of ZeroMQ where events of the cache, which show prompts, are published. None: nowhere.
      kv_events_replay: endpoint where missed events can be asked for.
      kv_events_topic: first frame of the events.
      log_format: log a line for each request that has ended, as text or JSON. None: only problems are logged.
      log_prompts: log prompts and answers too.
      otlp: address where OpenTelemetry spans are sent, such as http://localhost:4318/v1/traces. None: there are none.

    Raises:
      ValueError: one needs another that is not given.
    """

    metrics_prefix: str = "longctx"
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    log_format: LogFormat | None = None
    log_prompts: bool = False
    otlp: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_prefix(self.metrics_prefix)
        if self.kv_events is None and (self.kv_events_replay is not None or self.kv_events_topic):
            raise ValueError("kv_events_replay and kv_events_topic need kv_events")
        if self.log_prompts and self.log_format is None:
            raise ValueError("log_prompts needs log_format")


def check_prefix(prefix: str) -> str:
    """Return a prefix of metrics; raise ValueError if it is no name of letters, digits and underscores."""
    check_text("metrics_prefix", prefix)
    if not (prefix.isascii() and prefix.isidentifier()):
        raise ValueError(f"metrics_prefix must be of letters, digits and underscores, got {prefix!r}")
    return prefix
