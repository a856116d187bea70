"""`RouterServer`: serves the instances of a cluster to the app of one event loop, as `Server` does an engine."""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.instance import Role
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.router.cluster_backend import ClusterBackend
from longctx.cluster.router.instance_client import NotUnderstood
from longctx.cluster.router.instances import Instances
from longctx.cluster.router.kv_feed import KvFeed
from longctx.cluster.router.router_metrics import RouterMetrics
from longctx.models.chat_template import ChatTemplate
from longctx.models.config import LlamaConfig
from longctx.models.tokenizer import Tokenizer
from longctx.serving.config import EngineConfig
from longctx.serving.engine.input_processor import InputProcessor
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.server.active_call import Limits
from longctx.serving.server.chat_format import ChatFormat
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.frontend import Frontend
from longctx.serving.server.read_call import CallReader, CallRules
from longctx.serving.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_UPKEEP_SECONDS = 1.0  # between two looks at roles and cold blocks
_RETRY = 2.0  # seconds after which instances may be there
_NO_TARGET = 1e9


class Member(NamedTuple):
    """An instance that a router begins with; `name` None: by its URL."""

    url: str
    name: str | None = None
    role: Role = "both"


class RouterSettings(NamedTuple):
    """Of a router alone.

    Attributes:
      instance_key: of an administrator of the instances; None: they need none.
      bandwidth: bytes per second at which an instance sends pages. latency: seconds until the first byte comes.
      look_seconds: between two looks at each instance.
      max_waiting: completions of the prompts of one call.
      metrics_prefix: of the metrics that vLLM has too.
    """

    instance_key: str | None = None
    bandwidth: float = 1e9
    latency: float = 0.0
    look_seconds: float = 0.25
    max_waiting: int = 1024
    metrics_prefix: str = "longctx"


class RouterServer(Frontend):
    """Serves a cluster.

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
        members: Sequence[Member] = (),
        settings: ServerSettings | None = None,
        router: RouterSettings | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        settings, router = settings or ServerSettings(), router or RouterSettings()
        self.model, self._config, self._router, self._members = model, config, router, tuple(members)
        self._max_length = config.longest_sequence(model.max_positions)
        page_hash = PageHash(os.urandom(32) if config.hash_key is None else config.hash_key, config.page_size)
        chat_format = ChatFormat(tokenizer, chat_template)
        least = config.slo.tpot if settings.min_tpot is None else settings.min_tpot
        rules = CallRules(
            model_names,
            self._max_length,
            model.vocab_size,
            settings.default_max_tokens,
            settings.max_prompts,
            settings.max_priority,
            _NO_TARGET if least is None else least,
            config.prefix_cache,
        )
        processor = InputProcessor(model, config, self._max_length, tokenizer, page_hash)
        super().__init__(
            model_names, tokenizer, chat_format, CallReader(processor, tokenizer, chat_format, rules), settings
        )
        self.index = PrefixIndex()
        self.conductor = Conductor(conductor, self.index)
        self.feed = KvFeed(self.index)
        self.instances = Instances(
            self.conductor,
            self.feed,
            router.instance_key,
            config.page_size,
            page_hash.fingerprint("cluster").hex() if config.prefix_cache else None,
            model.vocab_size,
            self._max_length,
            router.bandwidth,
            router.latency,
            router.look_seconds,
        )
        self.cluster = ClusterBackend(
            self.conductor, self.instances, model.vocab_size, self._max_length, self.failures, self._flush
        )
        self.metrics: RouterMetrics = RouterMetrics(router.metrics_prefix, self)
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def policy_name(self) -> str:
        """Of the conductor."""
        policy = self.conductor.config.policy
        return policy if isinstance(policy, str) else getattr(policy, "__name__", "own")

    # What `Frontend` asks.

    @property
    def backend(self) -> ClusterBackend:
        return self.cluster

    @property
    def limits(self) -> Limits:
        return Limits(self._config.max_running, self._router.max_waiting)

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def now(self) -> float:
        return time.monotonic()

    @property
    def is_warm(self) -> bool:
        """Whether there is an instance."""
        return bool(self.instances.members)

    @property
    def not_ready(self) -> ApiError:
        message = "no instance is there yet: see /cluster/instances"
        return ApiError(503, message, None, "server_is_overloaded", _RETRY, {DROPPED: "no_instance"})

    @property
    def problem(self) -> str | None:
        return None  # instances may come back

    # From start to end.

    def start(self) -> None:
        super().start()
        for member in self._members:
            self.instances.add(*member)
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
        self.feed.stop()

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
                except (httpx.HTTPError, NotUnderstood) as error:
                    logger.warning("longctx: cold blocks of %s stay: %s", instance.name, error)
