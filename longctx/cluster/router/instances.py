"""`Instances`: watches the instances of a cluster, and tells the conductor which join, drain and are lost.

Each says how busy it is whenever that changes. One that is gone is removed, and joins again by itself when it is back;
one that says what can't be is excluded, with a reason, and may join again after a while: the others go on.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import httpx

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import Role
from longctx.cluster.conductor.instance import InstanceSpec, Report
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.cluster.router.instance_client import InstanceClient, LoadInfo, ProtocolError, ServerInfo, corrected
from longctx.cluster.server_url import check_server_url
from longctx.serving.server.settings import ApiKey
from longctx.serving.server.tls import Tls

logger = logging.getLogger(__name__)

MAX_SKEW = 10.0
"""Seconds that clocks of instances may differ from the router's."""

_REFUSED, _SILENT = 2, 3  # looks in a row after which it is dead: whose connection is refused; that time out
_PENALTY, _MOST_PENALTY = 5.0, 300.0  # seconds for which an instance is excluded: the first time, and at most
_PAUSE = 1.0  # seconds between two attempts to join
_ANY = ("*", "0.0.0.0", "[::]")  # hosts of endpoints that listen on all addresses


class RouterSettings(NamedTuple):
    """Settings of a router alone.

    Attributes:
      instance_key: of an administrator of the instances that have none of their own; None: they need none.
      secret: that all instances share, by which their KV events are read; None: these are plain.
      peers: hosts that instances may register from, besides this machine, see `Peers`.
      instance_keys: of an administrator of each of the others, by its name.
      joiners: keys with which an instance of that name registers, and no other one.
      bandwidth: bytes per second at which an instance sends pages. latency: seconds until the first byte comes.
      look_seconds: between two reports of an instance, at least.
      max_waiting: completions of the prompts of one call.
      max_logprob_bytes: of the log probabilities of one call, about.
      metrics_prefix: of the metrics that vLLM has too.
      tls: of the router; None: instances have certificates of a CA that the system knows, or plain HTTP.
    """

    instance_key: str | None = None
    secret: str | None = None
    peers: tuple[str, ...] = ()
    instance_keys: Mapping[str, str] = MappingProxyType({})
    joiners: Sequence[ApiKey] = ()
    bandwidth: float = 1e9
    latency: float = 0.0
    look_seconds: float = 0.25
    max_waiting: int = 1024
    max_logprob_bytes: int = 512 * 2**20
    metrics_prefix: str = "longctx"
    tls: Tls | None = None


State = Literal["joining", "open", "draining", "dead", "excluded"]
"""Never reached yet; taking requests; finishing what it has; not there any more; not to be trusted."""


@dataclass(eq=False)
class Instance:
    """Instance of a cluster as the router sees it, and the requests there.

    Attributes:
      name: no other instance of the cluster has it.
      role: that it has, or will have when it joins.
      reason: why it is not open.
      is_held: an administrator drains it: it does not open by itself.
      retry_at: when it may join again, by `time.monotonic`.
      num_excluded: how often in a row it was excluded.
      info, load: what it said last.
      heard: when that was, by `time.monotonic`.
      followers: tasks that read events of requests there; all are cancelled when it is lost.
    """

    name: str
    client: InstanceClient
    role: Role
    state: State = "joining"
    reason: str = "it has not been reached yet"
    is_held: bool = False
    retry_at: float = 0.0
    num_excluded: int = 0
    missed: int = 0
    info: ServerInfo | None = None
    load: LoadInfo | None = None
    heard: float = field(default_factory=time.monotonic)
    followers: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def is_member(self) -> bool:
        """Whether the conductor knows it."""
        return self.state in ("open", "draining")

    def lose(self) -> None:
        """Cancel all that is read from it."""
        for task in tuple(self.followers):
            if not task.cancelling():
                task.cancel()


class Instances:
    """Instances of one cluster. For the event loop.

    Args:
      events: reads the KV events of members, by which the index knows which blocks they have.
      page_size: tokens of a page, of all instances.
      keys: fingerprint of the secret of page keys, see `ServerInfo`.
      vocab_size: of the model. max_length: of prompts and answers, in tokens.
    """

    def __init__(
        self,
        conductor: Conductor,
        events: KvEventReader,
        settings: RouterSettings,
        page_size: int,
        keys: str | None,
        vocab_size: int,
        max_length: int,
    ) -> None:
        self._conductor, self._events, self._settings = conductor, events, settings
        self._page_size, self._keys, self._vocab_size, self._max_length = page_size, keys, vocab_size, max_length
        self.by_name: dict[str, Instance] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self.by_name.values()))

    @property
    def members(self) -> list[Instance]:
        """Those that the conductor knows."""
        return [each for each in self.by_name.values() if each.is_member]

    # What administrators, launchers and instances ask for.

    def add(self, url: str, name: str | None = None, role: Role = "both") -> Instance:
        """Watch an instance from now on, or the one that is known by this URL.

        Raises:
          ValueError: the URL is none, or the name is another one's.
        """
        url = check_server_url("url", url)
        known = next((each for each in self.by_name.values() if each.client.url == url), None)
        if known is not None:
            return known
        name = name or url.partition("://")[2]
        if name in self.by_name:
            raise ValueError(
                f"name must be of no other instance, got {name!r}, which is at {self.by_name[name].client.url}"
            )
        key = self._settings.instance_keys.get(name, self._settings.instance_key)
        instance = Instance(name, InstanceClient(url, key, self._settings.tls), role)
        self.by_name[name] = instance
        self._watchers[name] = asyncio.create_task(self._watch(instance), name=f"watch {name}")
        return instance

    def drop(self, instance: Instance) -> None:
        """Watch an instance no more; what runs there goes on elsewhere."""
        self._leave(instance, "dead", "it was removed")
        self.by_name.pop(instance.name, None)
        instance.client.close()
        watcher = self._watchers.pop(instance.name, None)
        if watcher is not None:
            watcher.cancel()

    def drain(self, instance: Instance) -> None:
        """Give it nothing more; what it has goes on."""
        instance.is_held = True
        self._set_draining(instance, "it is drained by an administrator")

    def restore(self, instance: Instance) -> None:
        """Undo `drain`, and end an exclusion."""
        instance.is_held, instance.retry_at = False, 0.0
        if instance.state == "draining":
            self._conductor.drain(instance.name, time.monotonic(), False)
            instance.state, instance.reason = "open", ""

    def set_role(self, instance: Instance, role: Role) -> None:
        """Change what it does from now on."""
        if instance.is_member:
            self._conductor.set_role(instance.name, role, time.monotonic())
        instance.role = role

    # What requests notice.

    def exclude(self, instance: Instance, reason: str) -> None:
        """Remove an instance that broke the protocol; it may join again after a penalty."""
        instance.num_excluded += 1
        penalty = min(_MOST_PENALTY, _PENALTY * 2 ** (instance.num_excluded - 1))
        instance.retry_at = time.monotonic() + penalty
        self._leave(instance, "excluded", reason)

    def suspect(self, instance: Instance) -> None:
        """Note that a connection to it broke: the next look that fails is the last one."""
        instance.missed = max(instance.missed, _REFUSED - 1)

    async def close(self) -> None:
        """Stop watching all instances."""
        watchers = list(self._watchers.values())
        for each in watchers:
            each.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for instance in self.by_name.values():
            instance.client.close()

    # Looks.

    async def _watch(self, instance: Instance) -> None:
        count = 0
        while True:
            count += 1
            try:
                if instance.is_member:
                    await instance.client.follow_load(self._settings.look_seconds, partial(self._note, instance))
                elif time.monotonic() >= instance.retry_at:
                    await self._join(instance)
            except ProtocolError as error:
                self.exclude(instance, str(error))
            except httpx.HTTPError as error:
                self._miss(instance, error)
            except Exception as error:
                logger.exception("the router could not look at %s", instance.name)
                self.exclude(instance, f"the router could not look at it: {type(error).__name__}")
            await asyncio.sleep(self._settings.look_seconds if instance.is_member else _PAUSE * min(1.0, count / 8))

    async def _join(self, instance: Instance) -> None:
        """Let an instance in that answers as it should."""
        not_ready = await instance.client.ready()
        if not_ready is not None:
            if instance.state == "excluded":
                return
            instance.state, instance.reason = "joining", not_ready
            return
        sent = time.time()
        info = await instance.client.info()
        self._check(info, sent, time.time())
        same = next(
            (each for each in self.members if each.info is not None and each.info.instance == info.instance), None
        )
        if same is not None:
            raise ProtocolError(f"it is {same.name} by another address, {same.client.url}")
        load = await instance.client.load()
        costs = await instance.client.costs(info)
        try:
            spec = InstanceSpec(
                name=instance.name,
                role=instance.role,
                costs=costs,
                block_size=info.page_size,
                decode_tokens=info.max_total_num_tokens,
                max_running=info.max_running,
                bandwidth=self._settings.bandwidth,
                latency=self._settings.latency,
                fingerprint=info.kv_transfer.fingerprint,
                kv_dtype=info.kv_transfer.kv_dtype,
                cache_blocks=info.cache_blocks,
            )
            self._conductor.join(spec, time.monotonic())
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        instance.info, instance.state, instance.reason, instance.missed = info, "open", "", 0
        self._follow_events(instance.name, info, instance.client.url)
        logger.info("longctx: %s has joined as %s: %s", instance.name, instance.role, instance.client.url)
        if instance.is_held:
            self._set_draining(instance, "it is drained by an administrator")
        self._note(instance, load)

    def _follow_events(self, name: str, info: ServerInfo, url: str) -> None:
        """Follow the KV events of an instance that publishes some; else no cached block of it is known."""
        found = info.kv_events
        if found is None:
            logger.warning("longctx: %s publishes no KV events (--kv-events): what it has cached is not known", name)
            return
        host = urlsplit(url).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = None if found.replay is None else _reachable(found.replay, host)
        try:
            self._events.add(name, _reachable(found.endpoint, host), replay, found.topic, found.is_encrypted)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"its KV events can't be read: {error}") from None

    def _check(self, info: ServerInfo, sent: float, received: float) -> None:
        """ProtocolError, unless it can be one of this cluster."""
        if info.page_size != self._page_size:
            raise ProtocolError(f"its pages have {info.page_size} tokens, those of the cluster {self._page_size}")
        if info.keys != self._keys:
            raise ProtocolError("its keys of pages are made with another secret: see --kv-secret-file")
        if info.vocab_size != self._vocab_size:
            raise ProtocolError(f"its model has {info.vocab_size} tokens, that of the cluster {self._vocab_size}")
        if info.max_model_len < self._max_length:
            raise ProtocolError(
                f"its longest sequence has {info.max_model_len} tokens, that of the cluster {self._max_length}"
            )
        skew = max(sent - info.time, info.time - received, 0.0)
        if not skew <= MAX_SKEW:
            side = "behind" if info.time < sent else "ahead of"
            raise ProtocolError(f"its clock is {skew:.0f} s {side} the router's, and may be {MAX_SKEW:.0f}")
        if not (info.kv_bytes_per_token > 0 and info.max_total_num_tokens > 0 and info.max_running > 0):
            raise ProtocolError("it says that it has no room for any request")

    def _note(self, instance: Instance, load: LoadInfo) -> bool:
        """Tell the conductor what an instance says of itself; return whether it is not a member now.

        ProtocolError: what it says can't be.
        """
        info, costs = instance.info, None
        if not instance.is_member:
            return True
        assert info is not None
        instance.missed = 0
        if load.decoding > info.max_running or load.decode_tokens > info.max_total_num_tokens:
            raise ProtocolError(
                f"it says that {load.decoding} requests with {load.decode_tokens} tokens decode, of "
                f"{info.max_running} and {info.max_total_num_tokens} at most"
            )
        report = Report(load.backlog_seconds, load.decoding, load.decode_tokens, frozenset(load.request_ids))
        try:
            if load.factors is not None and (instance.load is None or load.factors != instance.load.factors):
                costs = corrected(self._conductor.state.instances[instance.name].spec.costs, load.factors)
            self._conductor.report(instance.name, report, time.monotonic(), costs)
        except (TypeError, ValueError) as error:
            raise ProtocolError(str(error)) from None
        instance.load, instance.heard = load, time.monotonic()
        if time.monotonic() > instance.retry_at + _MOST_PENALTY:
            instance.num_excluded = 0
        if load.draining and instance.state == "open":
            self._set_draining(instance, "it drains")
        elif not load.draining and instance.state == "draining" and not instance.is_held:
            self.restore(instance)
        if load.problem is not None and not load.draining:
            self._leave(instance, "joining", load.problem)  # its engine has failed: it joins when it is back
        return not instance.is_member

    def _miss(self, instance: Instance, error: httpx.HTTPError) -> None:
        """Note that it did not answer."""
        instance.missed += 1
        is_refused = isinstance(error, httpx.ConnectError)
        if instance.is_member:
            if instance.missed >= (_REFUSED if is_refused else _SILENT):
                self._leave(instance, "dead", f"it does not answer: {type(error).__name__} {error}".strip())
        elif instance.state != "dead":
            instance.state, instance.reason = "joining", f"it does not answer: {type(error).__name__} {error}".strip()

    def _leave(self, instance: Instance, state: str, reason: str) -> None:
        was_member = instance.is_member
        instance.state, instance.reason, instance.missed = state, reason, 0  # type: ignore[assignment]
        instance.load = None
        if was_member:
            logger.warning("longctx: %s is %s: %s", instance.name, state, reason)
            self._events.remove(instance.name)
            with contextlib.suppress(ValueError):
                self._conductor.remove(instance.name, time.monotonic())
            instance.lose()

    def _set_draining(self, instance: Instance, reason: str) -> None:
        if instance.state == "open":
            self._conductor.drain(instance.name, time.monotonic())
            instance.state, instance.reason = "draining", reason


def _reachable(endpoint: str, host: str) -> str:
    """Replace the host of an endpoint that listens on all addresses by that at which its instance is reached."""
    kind, separator, address = endpoint.partition("://")
    own, colon, port = address.rpartition(":")
    return f"{kind}{separator}{host}{colon}{port}" if kind == "tcp" and own in _ANY else endpoint
