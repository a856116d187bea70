"""What the conductor knows at a moment: of instances, of open requests, and its estimates of both."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.decision import Assignment
from longctx.cluster.conductor.instance import InstanceSpec, Report, Role
from longctx.cluster.conductor.request import ClusterRequest


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was assigned and has not ended.

    Attributes:
      generated: tokens that it had had when it was assigned, if it goes on after a failure.
      assigned_at: seconds of the driver's clock.
      prefill_seconds: predicted, of what its prefill instance computes.
      context: tokens that it decodes with at first.
      reserved: tokens of KV cache that are kept for it where it decodes.
      decode_since: when its prefill had ended; None: it has not.
    """

    request: ClusterRequest
    assignment: Assignment
    generated: int
    assigned_at: float
    prefill_seconds: float
    context: int
    reserved: int
    decode_since: float | None = None


class Decodes(NamedTuple):
    """Requests that decode together, and the tokens of their contexts in all."""

    batch: int
    tokens: int

    def plus(self, batch: int, tokens: int) -> "Decodes":
        """With so many more, or fewer; never below 0."""
        return Decodes(max(0, self.batch + batch), max(0, self.tokens + tokens))


NO_DECODES = Decodes(0, 0)


@dataclass(eq=False, slots=True)
class InstanceState:
    """An instance, and the estimates of what it has to do.

    Both estimates, of the queue and of the decodes, are what the last report says, and on top of it the requests of
    this conductor that the report does not count. Of the queue, the time since is taken off: prompts are taken to be
    computed in order, those of the report first.

    Attributes:
      queued: ids of prompts that the last report does not count, in order, with their predicted seconds.
      reported_prefills: those that it counts.
      decodes: requests that decode here or will: in prefill, decoding and not reported, or reported.
      sends: transfers from here to other instances, by request: when each ends, by prediction.
      reserved: tokens of KV cache that are kept for `decodes`.
      assigned: prompts that it got in all.
    """

    spec: InstanceSpec
    role: Role
    is_draining: bool = False
    queued: dict[str, float] = field(default_factory=dict)
    reported_prefills: dict[str, float] = field(default_factory=dict)
    decodes: dict[str, Literal["prefill", "own", "reported"]] = field(default_factory=dict)
    sends: dict[str, float] = field(default_factory=dict)
    reserved: int = 0
    assigned: int = 0
    reported_at: float | None = None
    has_others: bool = False  # the last report counts requests that are not this conductor's
    others: Decodes = NO_DECODES
    decoding: Decodes = NO_DECODES  # now: reported, and of this conductor
    coming: Decodes = NO_DECODES  # of this conductor, in prefill
    _queued_seconds: float = 0.0
    _head_since: float = 0.0  # when the first of `queued` began, or will
    _reported_until: float = 0.0  # when the reported queue is empty

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def does_prefill(self) -> bool:
        return self.role != "decode"

    @property
    def does_decode(self) -> bool:
        return self.role != "prefill"

    @property
    def open(self) -> set[str]:
        """Ids of the requests that it has a part in still."""
        return {*self.queued, *self.reported_prefills, *self.decodes}

    def queue(self, now: float) -> float:
        """Predicted seconds until a prompt that comes now begins: those of all prompts before it."""
        total = self._reported_until - now if self._reported_until > now else 0.0
        if self.queued:
            elapsed = now - max(self._head_since, self._reported_until)
            head = next(iter(self.queued.values()))
            total += self._queued_seconds - min(head, max(0.0, elapsed))
        return total if total > 0 else 0.0

    @property
    def expected(self) -> Decodes:
        """Requests that decode here, and those that will once their prompts are computed."""
        return Decodes(self.decoding.batch + self.coming.batch, self.decoding.tokens + self.coming.tokens)

    def tbt(self, decodes: Decodes) -> float:
        """Predicted seconds between the tokens of such a batch; 0 if it is empty."""
        return self.spec.costs.decode_seconds(*decodes) if decodes.batch else 0.0

    @property
    def free_tokens(self) -> int:
        """Tokens of KV cache that are kept for nobody where it decodes."""
        return max(0, self.spec.decode_tokens - self.reserved - self.others.tokens)

    def has_room(self, tokens: int) -> bool:
        """Whether one more request with so many tokens of KV cache may decode here."""
        return tokens <= self.free_tokens and len(self.decodes) + self.others.batch < self.spec.max_running

    def sending(self, now: float) -> float:
        """Predicted seconds until all that it sends has left: its congestion."""
        return max(0.0, max(self.sends.values()) - now) if self.sends else 0.0

    # What happens to requests.

    def begin_prefill(self, open_request: OpenRequest, now: float, ready: float) -> None:
        """Queue a prompt, whose fetched blocks are there at `ready`."""
        if not self.queued:
            self._head_since = max(now, ready)
        self.queued[open_request.request.request_id] = open_request.prefill_seconds
        self._queued_seconds += open_request.prefill_seconds
        self.assigned += 1

    def end_prefill(self, request_id: str, now: float, was_computed: bool) -> None:
        """Take a prompt off the queue, computed or given up."""
        if request_id in self.queued:
            was_head = next(iter(self.queued)) == request_id
            self._queued_seconds -= self.queued.pop(request_id)
            if was_head:
                self._head_since = max(self._head_since, now)
            if not self.queued:
                self._queued_seconds = 0.0  # as differences of sums are not exact
        elif (seconds := self.reported_prefills.pop(request_id, None)) is not None:
            if not was_computed:
                self._reported_until -= seconds
            if not self.reported_prefills and not self.has_others:
                self._reported_until = 0.0

    def begin_decode(self, open_request: OpenRequest) -> None:
        """Keep memory for a request, which decodes here once its prompt is computed."""
        self.decodes[open_request.request.request_id] = "prefill"
        self.reserved += open_request.reserved
        self.coming = self.coming.plus(1, open_request.context)

    def join_batch(self, open_request: OpenRequest) -> None:
        """Its prompt is computed: it decodes."""
        self.decodes[open_request.request.request_id] = "own"
        self.coming = self.coming.plus(-1, -open_request.context)
        self.decoding = self.decoding.plus(1, open_request.context)

    def end_decode(self, open_request: OpenRequest) -> None:
        """It has ended, or goes elsewhere."""
        state = self.decodes.pop(open_request.request.request_id)
        self.reserved -= open_request.reserved
        if state == "prefill":
            self.coming = self.coming.plus(-1, -open_request.context)
        else:
            self.decoding = self.decoding.plus(-1, -open_request.context)
        if not self.decodes and not self.has_others:
            self.decoding = NO_DECODES  # the report counted tokens that were generated

    def correct(self, report: Report, requests: Mapping[str, OpenRequest], now: float) -> None:
        """Take over what the instance says of itself."""
        known, prefills = report.known, self.reported_prefills | self.queued
        head = next(iter(self.queued), None)
        self.reported_prefills = {name: seconds for name, seconds in prefills.items() if name in known}
        self.queued = {name: seconds for name, seconds in prefills.items() if name not in known}
        self._queued_seconds = sum(self.queued.values())
        if next(iter(self.queued), None) != head:
            self._head_since = now
        self._reported_until, self.reported_at = now + report.queue_seconds, now
        own = counted = NO_DECODES
        for name, state in self.decodes.items():
            if state != "prefill":
                self.decodes[name] = "reported" if name in known else "own"
                if name in known:
                    counted = counted.plus(1, requests[name].context)
                else:
                    own = own.plus(1, requests[name].context)
        self.has_others = any(name not in prefills and name not in self.decodes for name in known)
        batch = max(0, report.decoding - counted.batch) if self.has_others else 0
        # Nobody says how long the contexts of others are: as those of the batch, on average.
        self.others = Decodes(batch, batch * report.decode_tokens // report.decoding if batch else 0)
        self.decoding = own.plus(report.decoding, report.decode_tokens)


class ClusterState:
    """All instances and all open requests.

    Attributes:
      config: see `ConductorConfig`.
      instances: by name, in the order in which they joined.
      requests: by id, in the order in which they were assigned.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        self.instances: dict[str, InstanceState] = {}
        self.requests: dict[str, OpenRequest] = {}

    def prefill_pool(self, exclude: Collection[str] = ()) -> list[InstanceState]:
        """Instances that new prompts may go to."""
        instances = self.instances.values()
        return [each for each in instances if each.does_prefill and not each.is_draining and each.name not in exclude]

    def decode_pool(self, exclude: Collection[str] = ()) -> list[InstanceState]:
        """Instances that new requests may decode on."""
        instances = self.instances.values()
        return [each for each in instances if each.does_decode and not each.is_draining and each.name not in exclude]


class Loads(NamedTuple):
    """The load of both pools: predicted time over its SLO; above 1 it is missed (6.1)."""

    prefill: float
    decode: float


class InstanceView(NamedTuple):
    """An instance as metrics and pages show it.

    Attributes:
      queue_seconds: predicted, of its prompts.
      decoding, decode_tokens: requests that decode, and tokens of their contexts.
      reserved_tokens, capacity_tokens: of KV cache where it decodes: kept for requests, and in all.
      tbt: predicted seconds between tokens now.
      sending_seconds: until all has left that it sends.
      open_requests: that it has a part in.
    """

    name: str
    role: Role
    is_draining: bool
    queue_seconds: float
    decoding: int
    decode_tokens: int
    reserved_tokens: int
    capacity_tokens: int
    tbt: float
    sending_seconds: float
    open_requests: int
