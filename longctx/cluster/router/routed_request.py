"""`RoutedRequest`: a request of a client, from its arrival to its one answer, whatever becomes of instances meanwhile.

The instance that decodes is sent the request, and is told who reads its prompt. If that instance refuses, dies or
answers what can't be, another one is sent the request with a `Handoff` of the tokens that the client has had: it goes
on with the same seed, and what it repeats is compared and left out.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Decision, Rejection
from longctx.cluster.router.event_check import EventCheck
from longctx.cluster.router.instance import Instance
from longctx.cluster.router.instance_client import NotUnderstood, Refused
from longctx.cluster.router.instances import Instances
from longctx.cluster.router.rejections import refused, rejected
from longctx.cluster.router.router_stats import RouterStats
from longctx.serving.engine.departure import Sink
from longctx.serving.request.output import Event, FinishReason, Output
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.errors import ApiError
from longctx.serving.server.event_lines import EventLine
from longctx.serving.server.relayed_outputs import RelayBroken, RelayedOutputs

logger = logging.getLogger(__name__)

MOST_FAILURES = 8
"""Instances that may fail one request which they have taken, until it is given up: it may be the cause."""

PATIENCE = 60.0
"""Seconds for which a request that has begun waits for an instance that can go on with it."""

_FAILED_PAUSE, _REFUSED_PAUSE = 1.0, 0.2  # seconds until an instance is asked again that failed, or refused
_LEAST_PAUSE, _MOST_PAUSE = 0.01, 0.25  # seconds between two attempts to place it
_END_SECONDS = 1.0  # for which the end of an answer may come after its last event
_LEAST_TIME = 0.001  # seconds
_LONG = 20_000  # tokens of a request that another thread writes


_seeds = random.Random()


class Routing:
    """What all requests of a router share.

    Args:
      failures: where answers to requests that fail are left, see `Frontend`.
      flush: is called after sinks.
      ended: is called with each completion that ends.
    """

    def __init__(
        self,
        conductor: Conductor,
        instances: Instances,
        stats: RouterStats,
        vocab_size: int,
        clock: Callable[[], float],
        failures: dict[str, ApiError],
        flush: Callable[[], object],
        ended: Callable[[Output, PreparedRequest], object],
    ) -> None:
        self.conductor, self.instances, self.stats, self.vocab_size = conductor, instances, stats, vocab_size
        self.clock, self.failures, self.flush, self.ended = clock, failures, flush, ended


class RoutedRequest:
    """One request. Its methods are for the event loop.

    Args:
      arrival: by the router's clock.
      sink: gets its events: each token once, and one end of each completion.
    """

    def __init__(
        self, routing: Routing, prepared: PreparedRequest, request: ClusterRequest, arrival: float, sink: Sink
    ) -> None:
        self._routing, self._prepared, self._request = routing, prepared, request
        self._arrival, self._sink = arrival, sink
        seed = prepared.request.sampling.seed
        seed = _seeds.randrange(2**31) if seed is None else seed
        self._relayed = RelayedOutputs.of_none(prepared, request.request_id, arrival, seed)
        self._check = EventCheck(prepared, routing.vocab_size)
        self._excluded: dict[str, float] = {}  # instances that have failed or refused it, until when
        self._last_token: dict[int, float] = {}
        self._attempts = self._num_failures = self._had = 0
        self._has_begun = False  # on some instance, which may have failed since
        self._problem = ""
        self._refusal: ApiError | None = None
        self.assignment: Assignment | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the client has had some."""
        return self._relayed.num_tokens > 0

    async def run(self, decision: Decision) -> None:
        """See it to its end.

        Args:
          decision: the first one.
        """
        routing, name = self._routing, self._request.request_id
        try:
            while True:
                assignment = await self._placed(decision)
                instance = routing.instances.by_name.get(assignment.decode)
                if instance is None:
                    self._problem = f"{assignment.decode} was removed"
                else:
                    await self._try(instance, assignment)
                if not self._relayed.open:
                    return
                routing.conductor.cancelled(name, routing.clock())
                routing.stats.retries += 1
                logger.warning("longctx: request %s leaves %s: %s", name, assignment.decode, self._problem)
                if self._num_failures >= MOST_FAILURES:
                    message = f"{self._num_failures} instances failed it, the last one: {self._problem}"
                    raise refused("instances_failed", message)
                decision = self._assign()
        except ApiError as error:
            self.end("error", error)
        except asyncio.CancelledError:
            self.end("cancelled")
            raise
        except Exception as error:
            logger.exception("the router failed with request %s", name)
            self.end("error", ApiError(500, f"the router failed: {type(error).__name__}", code="internal_error"))
        finally:
            routing.conductor.cancelled(name, routing.clock())

    def end(self, reason: FinishReason, error: ApiError | None = None) -> None:
        """Tell the client that nothing comes any more, unless it knows."""
        if self._relayed.open:
            if error is not None:
                self._routing.failures[self._request.request_id] = error
            now, text = self._routing.clock(), None if error is None else error.message
            self._tell([self._relayed.end(index, reason, now, text) for index in sorted(self._relayed.open)])

    def _assign(self, waited: float = 0.0) -> Decision:
        routing = self._routing
        # One that has begun is not rejected by load.
        generated = max(self._relayed.num_tokens, 1) if self._has_begun else 0
        now = routing.clock()
        exclude = frozenset(name for name, until in self._excluded.items() if until > now)
        return routing.conductor.assign(self._request, now, exclude, generated, waited)

    async def _placed(self, decision: Decision) -> Assignment:
        """Wait until there is a place. ApiError: there is none, or not for too long."""
        routing = self._routing
        since, pause = routing.clock(), _LEAST_PAUSE
        while isinstance(decision, Rejection):
            waited = routing.clock() - since
            if self._has_begun:
                if waited >= PATIENCE:
                    message = f"nobody could go on with it for {PATIENCE:.0f} s; before that: {self._problem}"
                    raise refused("instances_failed", message)
            elif decision.is_deferred:
                pause = max(decision.retry_after, _LEAST_PAUSE)
            else:
                routing.stats.note_rejection(decision)
                raise rejected(decision) if self._refusal is None else self._refusal
            await asyncio.sleep(min(pause, _MOST_PAUSE))
            pause *= 2
            decision = self._assign(routing.clock() - since)
        self.assignment = decision
        self._attempts += 1
        routing.stats.note_assignment(decision, self._request, is_again=self._attempts > 1)
        return decision

    async def _try(self, instance: Instance, assignment: Assignment) -> None:
        """Have an instance go on, to its end or until it fails; then the problem is noted. ApiError: it never can."""
        self._relayed.expect_again()
        self._had = self._relayed.num_tokens
        task = asyncio.create_task(self._follow(instance, assignment))
        instance.followers.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                self._note_failure(instance, "broken", f"it is {instance.state}: {instance.reason}")
                self._num_failures += 1
            else:
                task.result()
        except Refused as error:
            self._note_refusal(instance, error)
        except (NotUnderstood, RelayBroken) as error:
            self._routing.instances.exclude(instance, str(error))
            self._note_failure(instance, "nonsense", str(error))
            self._num_failures += 1
        except httpx.HTTPError as error:
            self._routing.instances.suspect(instance)
            self._note_failure(instance, "broken", f"its connection broke: {type(error).__name__} {error}".strip())
            self._num_failures += not isinstance(error, httpx.ConnectError)
        finally:
            if not task.cancelling():  # a second time would break off how it closes its connection
                task.cancel()
            instance.followers.discard(task)

    def _note_failure(self, instance: Instance, why: str, problem: str) -> None:
        self._has_begun = True
        self._excluded[instance.name] = self._routing.clock() + _FAILED_PAUSE
        self._problem = f"{instance.name}: {problem}"
        self._routing.stats.note_failure(instance.name, why)

    def _note_refusal(self, instance: Instance, error: Refused) -> None:
        """An instance does not take the request. ApiError: nobody would."""
        self._routing.stats.note_failure(instance.name, "refused")
        pause = _REFUSED_PAUSE if self._has_begun else math.inf
        self._excluded[instance.name] = self._routing.clock() + pause
        self._problem = f"{instance.name}: {error}"
        if error.status in (401, 403, 404, 409):
            self._routing.instances.exclude(instance, f"it takes no requests: {error}")
        elif error.status in (400, 413, 422) and not self._has_begun:
            raise ApiError(error.status, error.message)
        self._refusal = refused("queue", f"no instance takes it now; {self._problem}", error.retry_after or 1.0)

    async def _follow(self, instance: Instance, assignment: Assignment) -> None:
        """Pass events on until the last one."""
        if len(self._prepared.tokens) > _LONG:
            body = await asyncio.to_thread(self._body, assignment)
        else:
            body = self._body(assignment)
        lines = instance.client.resume(body, self._request.request_id)
        try:
            async for line in lines:
                self._has_begun = True
                self._pass_on(line)
                if not self._relayed.open:
                    await _read_to_end(lines)
                    return
        finally:
            await lines.aclose()
        raise httpx.ReadError("its events ended before the request did")

    def _pass_on(self, line: list[EventLine]) -> None:
        routing, relayed = self._routing, self._relayed
        now = routing.clock()
        events, problem = list[Event](), None
        for entry in line:
            try:
                event = self._read(entry, now)
            except (RelayBroken, httpx.ReadError) as error:
                problem = error  # what came before it counts as sent, so it has to be
                break
            if event is not None:
                events.append(event)
        if events:
            self._note_tokens(events, now)
            self._tell(events)
            if not relayed.open:
                routing.conductor.finished(self._request.request_id, now)
        if problem is not None:
            raise problem

    def _read(self, entry: EventLine, now: float) -> Event | None:
        """The client's event; None: the client has had it. RelayBroken: it can't be; httpx.ReadError: no more comes."""
        relayed, end = self._relayed, entry.end
        if end is not None and end.reason in ("cancelled", "error", "moved") and entry.index in relayed.open:
            raise httpx.ReadError(end.error or f"it ended the request: {end.reason}")
        self._check.check(entry, relayed)
        if end is not None:
            self._note_cached(end.cached_tokens)
        return relayed.read(entry, now)

    def _note_cached(self, cached: int) -> None:
        """Tokens of the prompt that were found, or loaded: but not those that the prefill instance has computed."""
        placed = self.assignment
        if self._relayed.cached_tokens is None and placed is not None:
            is_apart = placed.prefill != placed.decode
            most = placed.cached if is_apart else len(self._prepared.tokens)
            self._relayed.cached_tokens = min(cached, most)

    def _note_tokens(self, events: list[Event], now: float) -> None:
        """Tokens have come. ApiError: the request may not decode (Mooncake, section 3, step 4)."""
        routing, stats = self._routing, self._routing.stats
        with_tokens = [event for event in events if event.token_ids]
        stats.output_tokens += len(with_tokens)
        for event in with_tokens:
            if event.index in self._last_token:
                stats.note_gap(now - self._last_token[event.index])
            self._last_token[event.index] = now
        if not with_tokens or self._relayed.num_tokens - len(with_tokens) > self._had:
            return
        # These are the first ones of this attempt.
        if self._had == 0:
            placed = self.assignment
            predicted = placed.ttft if placed is not None and self._attempts == 1 else None
            stats.note_first(now - self._arrival, predicted)
        rejection = routing.conductor.prefilled(self._request.request_id, now, has_memory=True)
        if rejection is not None:
            stats.note_rejection(rejection)
            raise rejected(rejection)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if event.output is not None:
                self._routing.ended(event.output, self._prepared)
        self._sink(events)
        self._routing.flush()

    def _body(self, assignment: Assignment) -> bytes:
        """See `/resume`, docs/kv_transfer.md."""
        request: Any = dataclasses.replace(
            self._prepared.request,
            prompt=self._prepared.tokens.tolist(),
            request_id=None,
            ttft_deadline=self._time_left(),
        )
        body = {"request": request, "kv_transfer_params": {"handoff": self._relayed.handoff().to_dict()}}
        return msgspec.json.encode(body | {"prefill": self._prefill(assignment)})

    def _time_left(self) -> float | None:
        """Seconds within which the first token is wanted; None: nobody said so, or it is there, or too late."""
        deadline = self._prepared.request.ttft_deadline
        if deadline is None or self.has_tokens:
            return None
        left = deadline - (self._routing.clock() - self._arrival)
        return left if left > _LEAST_TIME else None

    def _prefill(self, assignment: Assignment) -> dict[str, Any] | None:
        """Who reads the prompt, and who has its beginning."""
        instances, transfer = self._routing.instances.by_name, assignment.transfer
        prefix = None
        if transfer is not None and transfer.source in instances:
            prefix = {"url": instances[transfer.source].client.url, "tokens": transfer.stop}
        url = None  # the instance that decodes reads it
        if assignment.prefill != assignment.decode and assignment.prefill in instances:
            url = instances[assignment.prefill].client.url
        if url is None and prefix is None:
            return None
        return {"url": url, "prefix": prefix, "seconds": assignment.ttft}


async def _read_to_end(lines: AsyncIterator[list[EventLine]]) -> None:
    """Let the connection be there for the next request; without its end it would be closed."""
    with contextlib.suppress(TimeoutError, httpx.HTTPError, NotUnderstood, RelayBroken):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in lines:
                pass
