"""`PrefillDispatcher`: decides whether another server reads a prompt for this one, and which, and has it read.

A prompt is read here if little of it is not in the cache, or if the step that reads all of it is predicted to keep the
TPOT of those that decode. Else it is sent to the server that is predicted to have read it first, and the request waits
for its full pages, which come while later ones are computed. They come to host memory, if the engine has a tier there,
and the request enters the engine afterwards; else it waits in the engine with a slot and pages. The engine computes
what follows the last full page itself and draws the first token: so no answer has to be waited for, and whatever goes
wrong only means that pages don't come.

Source: Mooncake, section 4 (inline prefill), section 5.2 (the rule by which an instance is chosen).
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from longctx.cluster.prefill.instance import PrefillInstance
from longctx.cluster.prefill.reading import PrefillThread, Reading
from longctx.cluster.tpot_check import keeps_tpot
from longctx.cluster.transfer.lease import make_lease_id
from longctx.serving.engine.engine import Engine
from longctx.serving.engine.thread import Received
from longctx.serving.kv_cache.connector import LeasedSource
from longctx.serving.request.handoff import Handoff, Progress
from longctx.serving.request.request import PreparedRequest
from longctx.serving.validation import check_integer

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at how busy a server is
# A server is not asked whose queue is longer than both: those that decode here would wait for a prompt at every step.
_MOST_WAIT, _MOST_QUEUED = 20.0, 10.0  # predicted seconds, and times what the prompt itself takes
FORWARDED = ("authorization", "x-request-id", "traceparent")
"""Headers of a request that say who sends it."""

Decision = Literal["short", "quick", "nobody", "remote"]
"""Where a prompt is read: here, as it is short, or keeps the TPOT, or nobody else can; or elsewhere."""


class PrefillDispatcher(PrefillThread):
    """Asks other servers from a thread of its own. Its methods may be called from any thread, and don't wait.

    Args:
      instances: who may be asked.
      source: see `PrefillThread`.
      inline_tokens: tokens of a prompt, not cached, up to which it is read here.

    Attributes:
      decisions: how many prompts were read where, see `Decision`.
    """

    def __init__(
        self,
        engine: Engine,
        instances: list[PrefillInstance],
        source: Callable[..., LeasedSource],
        inline_tokens: int = 512,
    ) -> None:
        super().__init__(source)
        self._inline_tokens = check_integer("inline_tokens", inline_tokens, 0)
        self._engine, self._instances = engine, instances
        self.decisions: Counter[str] = Counter()
        self._next = 0  # who comes first among those that are as busy
        for each in instances:
            self.begin(self._watch(each), is_lasting=True)

    def dispatch(self, prepared: PreparedRequest, headers: Mapping[str, str]) -> Received | None:
        """Have a prompt read elsewhere, and what its request waits for; None: it is read here.

        Args:
          headers: of the request. Those that say who sends it go along, as pages are found by the same tenant only.
        """
        decision, seconds = self._decide(prepared)
        self.decisions[decision] += 1
        if decision != "remote":
            return None
        lease, size = make_lease_id(), self._engine.config.page_size
        length = (len(prepared.tokens) - 1) // size * size
        sent = {name: headers[name] for name in FORWARDED if name in headers}
        body = prefill_body(prepared, lease, len(prepared.tokens))
        reading = Reading(self, lease, body, sent, seconds, lambda tried: self.choose(tried, seconds))
        staged = self.stage(self._engine, prepared, reading.prefill, count_here(self._engine, prepared, length), length)
        self.begin(reading.run())
        if staged is not None:
            return Received(None, {}, staged)
        return Received(prompt_handoff(prepared, lease, length), {lease: reading.prefill})

    def info(self) -> dict[str, Any]:
        """Of its decisions, for `/server_info`."""
        return {
            "instances": [{"url": each.url, "is_open": each.is_open} for each in self._instances],
            "decisions": dict(self.decisions),
            "answers": dict(self.answers),
        }

    def _decide(self, prepared: PreparedRequest) -> tuple[Decision, float]:
        """Where a prompt is read, and how many seconds that is predicted to take."""
        engine, total = self._engine, len(prepared.tokens)
        keys, size = prepared.shared_keys, engine.config.page_size
        if not keys:  # nothing of it can be shared
            return "short", 0.0
        there = count_here(engine, prepared, len(keys) * size)
        if total - there <= self._inline_tokens or (total - 1) // size * size <= there:
            return "short", 0.0
        if keeps_tpot(engine, there, total - there, prepared.request.tpot_target):
            return "quick", 0.0
        seconds = engine.scheduler.forecast.prefill_seconds(there, total)
        return "nobody" if self.choose([], seconds) is None else "remote", seconds

    def choose(self, tried: list[PrefillInstance], seconds: float) -> PrefillInstance | None:
        """Who is predicted to be free first for a prompt that takes so long; of those that are as busy, in turns."""
        count = len(self._instances)
        turns = [self._instances[(self._next + i) % count] for i in range(count)]
        found = min((each for each in turns if each.is_open and each not in tried), key=_wait, default=None)
        return None if found is None or found.wait > max(_MOST_WAIT, _MOST_QUEUED * seconds) else found

    # In the thread.

    async def _watch(self, instance: PrefillInstance) -> None:
        while True:
            was_there = instance.addresses is not None
            await instance.look(self.client)
            if was_there != (instance.addresses is not None):
                where = " and ".join(instance.addresses or ())
                state = "not there any more" if was_there else f"found: its pages are at {where}"
                _LOG.info("longctx: the server %s that reads prompts is %s", instance.url, state)
            await asyncio.sleep(_LOOK_SECONDS)

    def make_source(self, instance: PrefillInstance, lease: str, patience: float) -> LeasedSource:
        self._next += 1
        return super().make_source(instance, lease, patience)


def count_here(engine: Engine, prepared: PreparedRequest, length: int) -> int:
    """Leading tokens of a prompt that an engine has, or that can't be shared: `length`, as none need to come then."""
    size, keys = engine.config.page_size, prepared.shared_keys[: length // engine.config.page_size]
    if not keys:
        return length
    there, store = engine.scheduler.count_cached(keys), engine.pages.store
    return there if store is None else there + store.look_up(keys[there // size :]) * size


def prompt_handoff(prepared: PreparedRequest, lease: str, length: int) -> Handoff:
    """What a request begins with whose prompt's first `length` tokens come under a lease.

    The first completion to be admitted fetches the pages, which the others find in the cache.
    """
    sampling = prepared.request.sampling
    seed = secrets.randbelow(2**31) if sampling.seed is None else sampling.seed
    return Handoff(seed, (Progress(lease, length, ()),) * sampling.n)


def prefill_body(
    prepared: PreparedRequest,
    lease: str,
    count: int,
    prefix: Mapping[str, Any] | None = None,
    is_cached: bool = False,
) -> Callable[[], bytes]:
    """Makes the body with which another server is asked to read a prompt's first tokens, and to keep their pages.

    Args:
      count: of the tokens.
      prefix: from where that server gets the first pages; None: it has or computes them.
      is_cached: that server has all of them, and is to compute none.
    """

    def make() -> bytes:
        request = prepared.request
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "lease": lease}
        if prefix is not None:
            params["prefix"] = dict(prefix)
        if is_cached:
            params["is_cached"] = True
        body: dict[str, Any] = {"prompt": prepared.tokens[:count].tolist(), "max_tokens": 1, "temperature": 0}
        body |= {"priority": request.priority, "kv_transfer_params": params}
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return msgspec.json.encode(body)

    return make


def _wait(instance: PrefillInstance) -> float:
    return instance.wait
