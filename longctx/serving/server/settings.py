"""Settings of a server: API keys, limits of clients, timeouts, and observers."""

import hashlib
import ipaddress
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from longctx.serving.validation import Count, Positive, Range, Seconds, check_fields, check_text

LogFormat = Literal["text", "json"]
Scope = Literal["generate", "metrics", "join", "migrate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""Rights of a key: to use the model; to see figures of all tenants; to register as an instance of a cluster; to send
requests of any tenant, as a cluster's router does; and all of these with administration."""
SAME_SIGNAL = 0.5  # seconds; Slurm and a script in its job both send SIGTERM, and that is one signal
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[!-~]{8,512}")  # what a header can hold, without spaces
_HASHED, _DIGEST = "sha256:", re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiKey:
    """API key with a name. Only names are printed.

    Attributes:
      name: no other key of a server has it.
      key: the key itself, or `sha256:` and the hexadecimal digest of one that `hash_key` has hashed.
      scopes: what it may do. None: what the place where it stands implies, `generate` or `admin`.
      expires: seconds since 1970 from which on it opens nothing. None: it never expires.
      requests, tokens: of its tenant in any 60 seconds, at most. None: as `ServerSettings` says.
      tenant: of its requests. Empty: its name.

    Raises:
      ValueError: a name or key that is too short or long, or has other characters than it may; an unknown scope.
    """

    name: str
    key: str = field(repr=False)
    scopes: frozenset[Scope] | None = None
    expires: float | None = None
    requests: Positive | None = None
    tokens: Positive | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if not (_NAME.fullmatch(self.name) and _NAME.fullmatch(self.tenant or self.name)):
            raise ValueError("names of keys and tenants must be 1 to 64 letters, digits, '.', '_' or '-'")
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"the key of {self.name} must be 8 to 512 visible ASCII characters")
        if self.is_hashed and not _DIGEST.fullmatch(self.key.removeprefix(_HASHED)):
            raise ValueError(f"the key of {self.name} must have 64 hexadecimal digits after {_HASHED}")
        for scope in self.scopes or ():
            if scope not in SCOPES:
                raise ValueError(f"scopes of {self.name} must be of {', '.join(SCOPES)}, got {scope!r}")
        if not self.tenant:
            object.__setattr__(self, "tenant", self.name)
        check_fields(self)

    @property
    def is_hashed(self) -> bool:
        """Whether only the digest is known."""
        return self.key.startswith(_HASHED)

    @property
    def has_expired(self) -> bool:
        """Whether it opens nothing any more."""
        return self.expires is not None and time.time() >= self.expires

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key, 32 bytes."""
        if self.is_hashed:
            return bytes.fromhex(self.key.removeprefix(_HASHED))
        return hashlib.sha256(self.key.encode()).digest()


def hash_key(key: str) -> str:
    """Return what stands for a key in a file of keys, so that who reads the file has no key.

    It is a plain digest, which is enough for keys of 128 random bits and more, such as `longctx api-key` makes.
    """
    return _HASHED + hashlib.sha256(key.encode()).hexdigest()


def read_keys(lines: Iterable[str], prefix: str) -> tuple[ApiKey, ...]:
    """Read keys from lines `KEY` or `NAME KEY [OPTION=VALUE ...]`; empty lines and those with `#` in front don't count.

    Options are the other fields of `ApiKey`: `scopes=generate,metrics`, `expires=2027-01-31` (UTC, or with a time and
    an offset, as ISO 8601 has them), `requests=60`, `tokens=100000`, `tenant=NAME`.

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
        name = words[0] if len(words) > 1 else f"{prefix}-{number}"
        keys.append(ApiKey(name, words[min(1, len(words) - 1)], **_options(number, words[1:])))
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"names of keys must be different, got {', '.join(names)}")
    return tuple(keys)


def _options(line: int, words: Sequence[str]) -> dict[str, Any]:
    """Read the options behind the key, the first of the words, which must be none itself."""
    found: dict[str, Any] = {}
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        is_option = bool(value) and name in ("scopes", "expires", "requests", "tokens", "tenant")
        if i == 0 and not is_option:
            continue
        if i == 0 or not is_option or name in found:
            raise ValueError(
                f"key {line} must be KEY or NAME KEY [OPTION=VALUE ...], each option once: scopes, expires, "
                "requests, tokens or tenant"
            )
        if name == "scopes":
            found[name] = frozenset(value.split(","))
        elif name == "expires":
            found[name] = _seconds(line, value)
        elif name == "tenant":
            found[name] = value
        elif value.isdecimal() and len(value) < 16 and int(value) > 0:
            found[name] = int(value)
        else:
            raise ValueError(f"key {line}: {name} must be an integer above 0")
    return found


def _seconds(line: int, text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"key {line}: expires must be as ISO 8601 has it, such as 2027-01-31T12:00:00Z") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def is_loopback(host: str) -> bool:
    """Whether a host's address, or its name, is of the host itself, so that no other one reaches it there."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server; durations are seconds.

    Attributes:
      api_keys: keys of clients, each of a tenant. None: every client may use the server, as tenant "".
      admin_keys: needed for loads, profiles and aborts, where there are some. Without any keys, clients on this host
        alone may do that.
      allow_hosts: name by which clients may reach the server (the header Host, without its port). So a page of another
        site, whose name is made to point here, finds nothing. Empty: any name.
      allow_origins: web page from another host that may use the server from a browser (CORS).
      requests_per_minute: requests of a tenant that begin in any 60 seconds, at most, where its key says no other
        number. None: as many as there is room for.
      tokens_per_minute: tokens of such requests, those of the prompt and those that the answer may have.
      audit_log: file of administrative actions, refusals and failed authentication, a line of JSON each; `-` is
        standard error. None: there is none.
      access_log: log a line for each HTTP request: its method, path, status, seconds, tokens and tenant. Probes that
        are answered have none.
      max_body_bytes: bytes of a request's body, at most. None: 1 MiB, and 16 for each token of the longest sequence.
      max_header_bytes: bytes of a request's headers, at most.
      max_connections: connections of clients, at most; no more than half of the descriptors that the process may have.
        Beyond it, the one that has been idle longest makes room.
      max_connections_by_address: connections of one IPv4 address, or one /64 network of IPv6, at most. None: half of
        all.
      header_timeout: seconds until a request's headers must be there, and a TLS handshake done.
      body_timeout: seconds until a request's body must be there.
      max_prompts: prompts of one request, at most.
      default_max_tokens: tokens of a chat's answer whose request doesn't say how many. It ends earlier where there is
        no room.
      tool_call_parser: form in which the model calls tools: `auto`, as its chat template says, or one of `hermes`
        (Qwen's too), `mistral`, `llama3_json` and `pythonic`.
      max_priority: the highest priority that a request may ask for; higher ones count as this.
      min_tpot: the least TPOT target that a request may ask for, seconds. None: --tpot. A target shrinks the chunks of
        all prompts while the request decodes.
      stream_buffer: steps whose tokens may wait for a client that reads slowly, before its request is cancelled.
      resume_seconds: seconds for which an instance of a cluster goes on with a resumable stream that no router reads.
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
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    audit_log: Path | None = None
    access_log: bool = True
    max_body_bytes: Positive | None = None
    max_header_bytes: Annotated[int, Range(256)] = 32 * 2**10
    max_connections: Positive = 16_384
    max_connections_by_address: Positive | None = None
    header_timeout: Seconds = 30.0
    body_timeout: Seconds = 60.0
    max_prompts: Positive = 1024
    default_max_tokens: Positive = 4096
    tool_call_parser: Literal["auto", "hermes", "mistral", "llama3_json", "pythonic"] = "auto"
    max_priority: Count = 0
    min_tpot: Annotated[float, Range(1e-6, 1e9)] | None = None
    stream_buffer: Positive = 1024
    resume_seconds: Seconds = 30.0
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
        digests = [key.digest for key in self.keys]
        if len(set(digests)) < len(digests):
            raise ValueError("api_keys and admin_keys must be different keys, and one is there twice")

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys, with their scopes."""
        places: tuple[tuple[tuple[ApiKey, ...], Scope], ...] = (self.api_keys, "generate"), (self.admin_keys, "admin")
        return tuple(
            key if key.scopes else replace(key, scopes=frozenset({scope})) for keys, scope in places for key in keys
        )


@dataclass(frozen=True)
class ObserverSettings:
    """Settings of metrics, logs, spans and events of the cache.

    Attributes:
      metrics_prefix: prefix of the metrics that vLLM has too; vllm makes its dashboards work.
      kv_events: endpoint of ZeroMQ where events of the cache are published. None: nowhere. It is encrypted with
        --kv-secret-file, and of this machine alone without.
      kv_events_replay: endpoint where missed events can be asked for.
      kv_events_topic: first frame of the events.
      kv_events_tokens: send prompts' tokens in the events, for routers that hash them.
      kv_events_plain: do not encrypt the events, for routers without the secret. All who reach the endpoint read them.
      kv_events_secret: what publisher and readers share. None: they share none.
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
    kv_events_tokens: bool = False
    kv_events_plain: bool = False
    kv_events_secret: str | None = field(default=None, repr=False)
    log_format: LogFormat | None = None
    log_prompts: bool = False
    otlp: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_prefix(self.metrics_prefix)
        if self.kv_events is None:
            for name in ("replay", "topic", "tokens", "plain"):
                if getattr(self, f"kv_events_{name}"):
                    raise ValueError(f"kv_events_{name} needs kv_events")
        if self.log_prompts and self.log_format is None:
            raise ValueError("log_prompts needs log_format")


def check_prefix(prefix: str) -> str:
    """Return a prefix of metrics; raise ValueError if it is no name of letters, digits and underscores."""
    check_text("metrics_prefix", prefix)
    if not (prefix.isascii() and prefix.isidentifier()):
        raise ValueError(f"metrics_prefix must be of letters, digits and underscores, got {prefix!r}")
    return prefix
