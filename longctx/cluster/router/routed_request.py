"""`RoutedRequest`: a request of a client, from its arrival to its one answer, whatever becomes of instances meanwhile.

The instance that decodes is sent the request, and is told which one computes its prompt. If that instance refuses,
dies or breaks the protocol, another one is sent the request with a `Handoff` of the tokens that the client has had: it
goes on with the same seed, and the tokens that it repeats are compared and left out.
"""

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.request import Assignment, Bound, ClusterRequest, Decision, Rejection
from longctx.cluster.router.instance_client import ProtocolError, Refused
from longctx.cluster.router.instances import Instance, Instances
from longctx.cluster.router.router_metrics import RouterMetrics
from longctx.serving.engine.active_request import Sink
from longctx.serving.request.output import Event, FinishReason, Output, TokenLogprob
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.server.errors import DROPPED, ApiError
from longctx.serving.server.relay import EventLine, RelayBroken, RelayedOutputs

logger = logging.getLogger(__name__)

MOST_FAILURES = 8
"""Instances that may fail one request which they have taken, until it is given up: it may be the cause."""

RESUME_TIMEOUT = 60.0
"""Seconds for which a request that has begun waits for an instance that can go on with it."""

_FAILED_PAUSE, _REFUSED_PAUSE = 1.0, 0.2  # seconds until an instance is asked again that failed, or refused
_LEAST_PAUSE, _MOST_PAUSE = 0.01, 0.25  # seconds between two attempts to place it
_LEAST_TIME = 0.001  # seconds
_LEAST_RETRY, _MOST_RETRY = 0.5, 120.0  # seconds after which a client may come again
_REASONS: dict[Bound, str] = {
    "ttft": "the first token would come too late",
    "tbt": "tokens would come too slowly",
    "memory": "no instance has room for its keys and values",
    "prefill_load": "the instances that read prompts have too much to do",
    "decode_load": "the instances that write answers have too much to do",
    "no_instance": "there is no instance for it",
}
_seeds = random.Random()


@dataclasses.dataclass(eq=False)
class Routing:
    """Collaborators that all requests of a router share.

    Attributes:
      failures: where answers to requests that fail after they have begun are left, see `Frontend`.
      flush: is called after sinks.
      on_end: are called with each completion that ends, and its request.
    """

    conductor: Conductor
    instances: Instances
    stats: RouterMetrics
    vocab_size: int
    failures: dict[str, ApiError]
    flush: Callable[[], object]
    on_end: list[Callable[[Output, Request], object]] = dataclasses.field(default_factory=list)


class RoutedRequest:
    """Request of a client, until its end. For the event loop.

    Args:
      arrival: by `time.monotonic`.
      sink: gets its events: each token once, and one end of each completion.
    """

    def __init__(
        self, routing: Routing, prepared: PreparedRequest, request: ClusterRequest, arrival: float, sink: Sink
    ) -> None:
        self._routing, self._prepared, self._request = routing, prepared, request
        self._arrival, self._sink = arrival, sink
        seed = prepared.request.sampling.seed
        seed = _seeds.randrange(2**31) if seed is None else seed
        self._relayed = RelayedOutputs(prepared, request.request_id, arrival, seed)
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
        """Have instances serve it until its end.

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
                routing.conductor.cancelled(name, time.monotonic())
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
            routing.conductor.cancelled(name, time.monotonic())

    def end(self, reason: FinishReason, error: ApiError | None = None) -> None:
        """End all completions that are open."""
        if self._relayed.open:
            if error is not None:
                self._routing.failures[self._request.request_id] = error
            now, text = time.monotonic(), None if error is None else error.message
            self._tell([self._relayed.end(index, reason, now, text) for index in sorted(self._relayed.open)])

    def _assign(self, waited: float = 0.0) -> Decision:
        routing = self._routing
        # One that has begun is not rejected by load.
        generated = max(self._relayed.num_tokens, 1) if self._has_begun else 0
        now = time.monotonic()
        exclude = frozenset(name for name, until in self._excluded.items() if until > now)
        return routing.conductor.assign(self._request, now, exclude, generated, waited)

    async def _placed(self, decision: Decision) -> Assignment:
        """Wait until an instance may take it. ApiError: none may, or not for too long."""
        routing = self._routing
        since, pause = time.monotonic(), _LEAST_PAUSE
        while isinstance(decision, Rejection):
            waited = time.monotonic() - since
            if self._has_begun:
                if waited >= RESUME_TIMEOUT:
                    message = f"nobody could go on with it for {RESUME_TIMEOUT:.0f} s; before that: {self._problem}"
                    raise refused("instances_failed", message)
            elif decision.is_deferred:
                pause = max(decision.retry_after, _LEAST_PAUSE)
            else:
                routing.stats.rejections[decision.bound, decision.stage] += 1
                raise rejected(decision) if self._refusal is None else self._refusal
            await asyncio.sleep(min(pause, _MOST_PAUSE))
            pause *= 2
            decision = self._assign(time.monotonic() - since)
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
        except (ProtocolError, RelayBroken) as error:
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
        self._excluded[instance.name] = time.monotonic() + _FAILED_PAUSE
        self._problem = f"{instance.name}: {problem}"
        self._routing.stats.failures[instance.name, why] += 1

    def _note_refusal(self, instance: Instance, error: Refused) -> None:
        """Note that an instance does not take the request. ApiError: no instance would."""
        self._routing.stats.failures[instance.name, "refused"] += 1
        pause = _REFUSED_PAUSE if self._has_begun else math.inf
        self._excluded[instance.name] = time.monotonic() + pause
        self._problem = f"{instance.name}: {error}"
        if error.status in (401, 403, 404, 409):
            self._routing.instances.exclude(instance, f"it takes no requests: {error}")
        elif error.status in (400, 413, 422) and not self._has_begun:
            raise ApiError(error.status, error.message)
        self._refusal = refused("queue", f"no instance takes it now; {self._problem}", error.retry_after or 1.0)

    async def _follow(self, instance: Instance, assignment: Assignment) -> None:
        """Pass events on until the last one."""
        await instance.client.resume(self._body(assignment), self._request.request_id, self._take)
        if self._relayed.open:
            raise httpx.ReadError("its events ended before the request did")

    def _take(self, line: list[EventLine]) -> bool:
        """Pass events on; return whether the last one was among them."""
        self._has_begun = True
        self._pass_on(line)
        return not self._relayed.open

    def _pass_on(self, line: list[EventLine]) -> None:
        routing, relayed = self._routing, self._relayed
        now = time.monotonic()
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
        """Make the client's event; None: it has had it. RelayBroken: it can't be; httpx.ReadError: no more comes."""
        relayed, end = self._relayed, entry.end
        if end is not None and end.reason == "moved" and entry.index in relayed.open:
            raise ApiError(409, "another connection goes on with this stream", code="stream_resumed")
        if end is not None and end.reason in ("cancelled", "error") and entry.index in relayed.open:
            raise httpx.ReadError(end.error or f"it ended the request: {end.reason}")
        self._check(entry)
        if end is not None:
            self._note_cached(end.cached_tokens)
        return relayed.read(entry, now)

    def _check(self, entry: EventLine) -> None:
        """Raise RelayBroken unless an event is one that the request asked for, and can be the next."""
        sampling, tokens, end, relayed = self._prepared.request.sampling, entry.token_ids, entry.end, self._relayed
        num_prompt, vocab_size = len(self._prepared.tokens), self._routing.vocab_size
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise RelayBroken(f"it sends tokens that are not in the vocabulary of {vocab_size}")
        if sampling.logprobs is not None and len(entry.logprobs) != len(tokens):
            raise RelayBroken("it sends tokens without their log probabilities")
        if entry.logprobs:
            self._check_logprobs(entry.logprobs, sampling.logprobs)
        if entry.text and not tokens and end is None:
            raise RelayBroken("it sends text without tokens")
        had = relayed.num_tokens_of(entry.index) + len(tokens) - (1 if tokens and relayed.repeats(entry.index) else 0)
        if had > sampling.max_tokens:
            raise RelayBroken(f"it sends more than the {sampling.max_tokens} tokens that were asked for")
        if end is None or end.reason not in ("stop", "length") or relayed.repeats(entry.index):
            return
        if end.reason == "length" and had != sampling.max_tokens:
            raise RelayBroken(f"it ends after {had} tokens of {sampling.max_tokens}, by length")
        if not 0 <= end.cached_tokens <= num_prompt + had:
            raise RelayBroken(f"it says that {end.cached_tokens} tokens of {num_prompt + had} were cached")
        if had == 0:
            raise RelayBroken("it ends a completion without a token")
        if sampling.prompt_logprobs is not None and entry.index == 0:
            if end.prompt_logprobs is None or len(end.prompt_logprobs) != num_prompt - 1:
                raise RelayBroken("it sends no log probabilities of the prompt")
            self._check_logprobs(tuple(end.prompt_logprobs), sampling.prompt_logprobs)
        if sampling.pooling is not None and not (end.embedding and all(map(math.isfinite, end.embedding))):
            raise RelayBroken("it sends no embedding of the prompt")

    def _check_logprobs(self, logprobs: tuple[TokenLogprob, ...], num_top: int | None) -> None:
        for each in logprobs:
            values = (each.logprob, *(value for _, value in each.top))
            if len(each.top) > (num_top or 0) or not all(value <= 1e-3 and not math.isnan(value) for value in values):
                raise RelayBroken("it sends log probabilities that can't be")
            if not all(0 <= token < self._routing.vocab_size for token, _ in each.top):
                raise RelayBroken("it sends log probabilities of tokens that are not in the vocabulary")

    def _note_cached(self, cached: int) -> None:
        """Note tokens of the prompt that were found or loaded, not those that the prefill instance has computed."""
        placed = self.assignment
        if self._relayed.cached_tokens is None and placed is not None:
            is_apart = placed.prefill != placed.decode
            most = placed.cached if is_apart else len(self._prepared.tokens)
            self._relayed.cached_tokens = min(cached, most)

    def _note_tokens(self, events: list[Event], now: float) -> None:
        """Note tokens that have come. ApiError: the request may not decode (Mooncake, section 3, step 4)."""
        routing, stats = self._routing, self._routing.stats
        with_tokens = [event for event in events if event.token_ids]
        stats.output_tokens += len(with_tokens)
        gaps = stats.histograms["inter_token_latency_seconds"]
        for event in with_tokens:
            if event.index in self._last_token:
                gaps.observe(now - self._last_token[event.index])
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
            stats.rejections[rejection.bound, rejection.stage] += 1
            raise rejected(rejection)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if event.output is not None:
                self._routing.stats.note_end(event.output, self._prepared.request)
                for call in self._routing.on_end:
                    call(event.output, self._prepared.request)
        self._sink(events)
        self._routing.flush()

    def _body(self, assignment: Assignment) -> bytes:
        """Make the body of `/resume`, see docs/kv_transfer.md."""
        request: Any = dataclasses.replace(
            self._prepared.request,
            prompt="",
            request_id=None,
            ttft_deadline=self._time_left(),
        )
        body = {"request": request, "kv_transfer_params": {"handoff": self._relayed.handoff().to_dict()}}
        tokens = self._prepared.tokens.astype("<i4").tobytes()  # msgspec makes base64 of it
        return msgspec.json.encode(body | {"tokens": tokens, "prefill": self._prefill(assignment)})

    def _time_left(self) -> float | None:
        """Return seconds until the deadline of the first token; None: there is none, or it is there, or too late."""
        deadline = self._prepared.request.ttft_deadline
        if deadline is None or self.has_tokens:
            return None
        left = deadline - (time.monotonic() - self._arrival)
        return left if left > _LEAST_TIME else None

    def _prefill(self, assignment: Assignment) -> dict[str, Any] | None:
        """Name the instance that computes the prompt, and the one that has its prefix."""
        instances, transfer = self._routing.instances.by_name, assignment.transfer
        tenant, prefix = self._prepared.request.tenant, None
        if transfer is not None and transfer.source in instances:
            source = instances[transfer.source].client
            prefix = {"url": source.url, "tokens": transfer.stop, "grant": source.grant(tenant)}
        url = grant = None  # the instance that decodes reads it
        if assignment.prefill != assignment.decode and assignment.prefill in instances:
            reader = instances[assignment.prefill].client
            url, grant = reader.url, reader.grant(tenant)
        if url is None and prefix is None:
            return None
        return {"url": url, "prefix": prefix, "seconds": assignment.ttft, "grant": grant}


def rejected(rejection: Rejection) -> ApiError:
    """Make the answer to a rejected request: 429, or 503 if there is no instance."""
    reason = _REASONS.get(rejection.bound, rejection.bound)
    parts = [f"the cluster takes no such request now: {reason}"]
    if math.isfinite(rejection.ttft):
        parts.append(f"the first token would come after {rejection.ttft:.2f} s")
    if math.isfinite(rejection.tbt):
        parts.append(f"each later one after {rejection.tbt:.3f} s")
    if math.isfinite(rejection.load):
        parts.append(f"the load is {rejection.load:.2f} of what the SLO allows")
    if rejection.stage == "decode":
        parts.append("its prompt was read in vain")
    if math.isinf(rejection.retry_after) and rejection.bound != "no_instance":
        error = refused(rejection.bound, "; ".join(parts), None)
        error.headers["x-should-retry"] = "false"  # never, as far as is known
        return error
    return refused(rejection.bound, "; ".join(parts), min(max(rejection.retry_after, _LEAST_RETRY), _MOST_RETRY))


def refused(bound: str, message: str, retry_after: float | None = 1.0) -> ApiError:
    """Make the answer to a request that could be served at another time."""
    headers = {DROPPED: bound}
    if bound in ("no_instance", "instances_failed", "draining"):
        return ApiError(503, message, None, "server_is_overloaded", retry_after, headers)
    return ApiError(429, message, None, "slow_down", retry_after, headers)
