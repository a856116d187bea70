"""Router of a cluster: `RouterServer` for the app of one event loop, and the `ClusterBackend` that answers requests."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import httpx

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.request import ClusterRequest, Decision, Rejection
from longctx.cluster.join import Challenges
from longctx.cluster.launcher.launcher import Address
from longctx.cluster.peers import Peers
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.reader import KvEventReader
from longctx.cluster.router.caches import ClusterCaches
from longctx.cluster.router.instance_client import LoadInfo, ProtocolError
from longctx.cluster.router.instances import Instance, Instances, RouterSettings
from longctx.cluster.router.routed_request import RoutedRequest, Routing, rejected
from longctx.cluster.router.router_metrics import RouterMetrics
from longctx.cluster.server_url import split_server_url
from longctx.models.chat_template import ChatTemplate
from longctx.models.config import LlamaConfig
from longctx.models.tokenizer import Tokenizer
from longctx.serving.config import EngineConfig
from longctx.serving.engine.active_request import Sink
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.auth import KeyRing
from longctx.serving.server.calls import ParsedCall
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.kv_events import block_hashes
from longctx.serving.server.request_parser import RequestParser
from longctx.serving.server.resumption import LAST_EVENT_ID
from longctx.serving.server.settings import ServerSettings
from longctx.serving.server.transfers import Received

logger = logging.getLogger(__name__)

_UPKEEP_SECONDS = 1.0  # between two looks at roles and cold blocks
_JOIN_SECONDS = 5.0  # for which an instance that keeps a stream may take to join
_RETRY = 2.0  # seconds after which instances may be there
_SHOWN = 4  # instances that an error names

MOST_ID = 200
"""Characters of a request's id that instances are told: the last ones, which make it unique."""


@dataclasses.dataclass(eq=False)
class ClusterBackend(Routing):
    """`Backend` over the instances of a cluster, as an engine's thread is one over its engine. For the event loop."""

    def __post_init__(self) -> None:
        self.stats.requests = lambda: (self.num_running, self.num_waiting)
        self._requests: dict[str, tuple[RoutedRequest, asyncio.Task[None]]] = {}
        self._ids = map("request-{}".format, itertools.count())
        self._keepers: dict[str, str] = {}  # instances that keep streams which clients resume now

    @property
    def num_running(self) -> int:
        """Requests that have had a token."""
        return sum(routed.has_tokens for routed, _ in self._requests.values())

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have had no token."""
        return self.num_requests - self.num_running

    def submit(
        self, prepared: PreparedRequest, sink: Sink, arrival: float | None = None, received: Received | None = None
    ) -> str:
        """Begin a request; returns its id.

        Raises:
          TypeError, ValueError: it can never be served.
          ApiError: it is rejected now.
        """
        assert received is None, "instances move pages among themselves"
        now = time.monotonic()
        name = (prepared.request.request_id or next(self._ids))[-MOST_ID:]
        if name in self._requests:
            raise ValueError(f"request_id must be unique, and {name!r} has not ended yet")
        request = _cluster_request(prepared, name)
        keeper = self._keepers.get(prepared.request.stream_id or "")
        if keeper in self.conductor.state.instances:
            decision: Decision = self.conductor.attach(request, keeper, now)
        else:
            decision = self.conductor.assign(request, now)
        if isinstance(decision, Rejection) and not decision.is_deferred:
            self.stats.rejections[decision.bound, decision.stage] += 1
            raise rejected(decision)
        routed = RoutedRequest(self, prepared, request, now if arrival is None else arrival, sink)
        task = asyncio.get_running_loop().create_task(routed.run(decision), name=f"request {name}")
        self._requests[name] = routed, task
        task.add_done_callback(lambda task: self._forget(name, routed, task))
        return name

    def cancel(self, request_id: str) -> bool:
        """End a request; False if it is unknown or has ended. Its sink gets its last events before this returns."""
        found = self._requests.get(request_id)
        if found is None:
            return False
        routed, task = found
        routed.end("cancelled")
        task.cancel()
        return True

    @contextlib.asynccontextmanager
    async def resuming(self, requests: Sequence[PreparedRequest]) -> AsyncIterator[None]:
        """Ask instances for the streams of requests, which those that are submitted inside go on with."""
        instances = [each for each in self.instances if each.state in ("open", "draining", "joining")]
        loads = await asyncio.gather(*(each.client.load() for each in instances), return_exceptions=True)
        wanted, found = {prepared.request.stream_id for prepared in requests}, dict[str, Instance]()
        for instance, load in zip(instances, loads, strict=True):
            if isinstance(load, LoadInfo):
                found |= {name: instance for name in load.kept_streams if name in wanted}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_SECONDS):
                while not all(instance.is_member for instance in found.values()):  # the router has just begun
                    await asyncio.sleep(_JOIN_SECONDS / 100)
        self._keepers |= {name: instance.name for name, instance in found.items()}
        try:
            yield
        finally:
            for name in found:
                self._keepers.pop(name, None)

    async def close(self) -> None:
        """End all requests."""
        tasks = [task for _, task in self._requests.values()]
        for name in tuple(self._requests):
            self.cancel(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, name: str, routed: RoutedRequest, task: "asyncio.Task[None]") -> None:
        routed.end("cancelled")  # a task that never ran has not said so
        self.conductor.cancelled(name, time.monotonic())
        self._requests.pop(name, None)
        if not task.cancelled():
            task.exception()


class RouterServer(Frontend):
    """Server of a cluster, as `Server` is of an engine.

    Args:
      model: that all instances have; no weights are needed.
      config: of the instances' engines: pages, the secret of their keys, what requests may ask for.
      model_names: by which clients may call the model; the first one is in the answers.
      members: that it watches from the start; others register.
      chat_template: instead of the tokenizer's own.
    """

    def __init__(
        self,
        model: LlamaConfig,
        tokenizer: Tokenizer,
        config: EngineConfig,
        model_names: tuple[str, ...],
        conductor: ConductorConfig,
        members: Sequence[Address] = (),
        settings: ServerSettings | None = None,
        router: RouterSettings | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        settings, router = settings or ServerSettings(), router or RouterSettings()
        max_length = config.longest_sequence(model.max_positions)
        page_hash = PageHash(os.urandom(32) if config.hash_key is None else config.hash_key, config.page_size)
        parser = RequestParser(
            InputProcessor(model, config, max_length, tokenizer, page_hash),
            ChatFormat(tokenizer, chat_template, settings.tool_call_parser),
            model_names,
            settings,
            config,
            max_length,
            model.vocab_size,
            config.slo.tpot,
        )
        super().__init__(parser, settings)
        joiners = [dataclasses.replace(key, scopes=frozenset({"join"})) for key in router.joiners]
        self.keys = KeyRing(settings.keys, joiners, bool(settings.api_keys))
        self.challenges, self._peers = Challenges(page_hash), Peers(router.peers, "localhost")
        self.model, self._members = model, tuple(members)
        self.max_waiting, self.max_logprob_bytes = router.max_waiting, router.max_logprob_bytes
        self.index = PrefixIndex()
        self.conductor = Conductor(conductor, self.index)
        self.events = KvEventReader(self.index, secret=router.secret)
        self.instances = Instances(
            self.conductor,
            self.events,
            router,
            config.page_size,
            page_hash.fingerprint("cluster").hex() if config.prefix_cache else None,
            model.vocab_size,
            self.max_length,
        )
        self.metrics: RouterMetrics = RouterMetrics(
            router.metrics_prefix, model_names[0], self.conductor, self.instances, self.max_length
        )
        self.cluster = ClusterBackend(
            self.conductor, self.instances, self.metrics, model.vocab_size, self.failures, self._flush
        )
        self.backend = self.cluster
        self.caches = ClusterCaches(
            self.model_name,
            config.page_size,
            settings.cache_tokens,
            settings.max_cache_ttl,
            self.cluster,
            self.instances,
            self.index,
        )
        self._upkeep: asyncio.Task[None] | None = None

    def may_register(self, url: str) -> bool:
        """Return whether instances at this URL may register: on this machine, or a host of `RouterSettings.peers`."""
        parts = split_server_url(url)
        return parts is None or self._peers.admits(str(parts.hostname), parts.port or 80)

    def loads(self) -> dict[str, float]:
        """Predicted time over its SLO, by pool."""
        return self.conductor.loads(self.now())._asdict()

    def now(self) -> float:
        return time.monotonic()

    def _starting(self, call: ParsedCall, headers: Mapping[str, str]) -> AbstractAsyncContextManager[None]:
        """Find the instances that keep a stream which is resumed."""
        return self.cluster.resuming(call.requests) if LAST_EVENT_ID in headers else super()._starting(call, headers)

    def _flush(self) -> None:
        self.dispatcher.deliver()  # requests are served in the event loop

    @property
    def is_warm(self) -> bool:
        """Whether there are instances for a request: those that decode read prompts too where no other one does."""
        return bool(self.conductor.state.decode_pool())

    @property
    def not_ready(self) -> ApiError:
        closed = [each for each in self.instances if each.state != "open"]
        message = "no instance is open that writes answers"
        if closed:
            shown = [f"{each.name} ({each.role}) is {each.state}: {each.reason}" for each in closed[:_SHOWN]]
            message += f": {'; '.join(shown)}" + (f"; and {len(closed) - _SHOWN} more" if len(closed) > _SHOWN else "")
        waits = [each.retry_at - time.monotonic() for each in closed if each.state == "excluded"]
        retry = min(waits) if len(waits) == len(closed) > 0 else 0.0
        return ApiError(503, message, None, "server_is_overloaded", max(_RETRY, retry), {DROPPED: "no_instance"})

    @property
    def problem(self) -> str | None:
        return None  # instances may come back

    # From start to end.

    def start(self) -> None:
        super().start()
        for member in self._members:
            self.instances.add(member.url, member.name, member.role)
        self._upkeep = asyncio.create_task(self._keep_up())

    async def finish(self) -> None:
        self.drain()
        if self._upkeep is not None:
            self._upkeep.cancel()
        await self.cluster.close()
        await self.instances.close()
        await super().finish()

    def close(self) -> None:
        self.preparer.close()
        self.events.close()

    async def _keep_up(self) -> None:
        """Change roles by load, and have cold blocks taken out, where the conductor says so."""
        while True:
            await asyncio.sleep(_UPKEEP_SECONDS)
            try:
                self._change_role()
                await self._swap()
            except Exception:
                logger.exception("the router's upkeep failed")

    def _change_role(self) -> None:
        change = self.conductor.role_change(self.now())
        instance = None if change is None else self.instances.by_name.get(change.instance)
        if change is not None and instance is not None:
            logger.info("longctx: %s becomes %s, by load", instance.name, change.role)
            self.instances.set_role(instance, change.role)
            self.cluster.stats.role_changes += 1

    async def _swap(self) -> None:
        for swap in self.conductor.swaps(self.now()):
            instance = self.instances.by_name.get(swap.instance)
            if instance is not None and instance.is_member:
                try:
                    evicted = await instance.client.swap(swap.keys.tolist(), swap.tier)
                    self.cluster.stats.swapped_blocks += evicted
                except (httpx.HTTPError, ProtocolError) as error:
                    logger.warning("longctx: cold blocks of %s stay: %s", instance.name, error)


def _cluster_request(prepared: PreparedRequest, name: str) -> ClusterRequest:
    """Describe a request as the conductor sees it."""
    request = prepared.request
    return ClusterRequest(
        name,
        len(prepared.tokens),
        request.sampling.max_tokens * request.sampling.n,
        block_hashes(prepared.shared_keys),
        request.ttft_deadline,
        request.tpot_target,
        request.priority,
    )
