"""State of a cluster at a moment: instances, open requests, and the estimates of both."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from longctx.cluster.conductor.config import ConductorConfig, Role
from longctx.cluster.conductor.instance import InstanceSpec, Report
from longctx.cluster.conductor.request import Assignment, ClusterRequest


class Decodes(NamedTuple):
    """Requests that decode together; a prediction may share out a request, a fraction to each instance.

    Attributes:
      batch: number of requests.
      tokens: of their contexts, in all: what a step reads.
      reserved: tokens of KV cache that are kept for them, with what they will generate.
    """

    batch: float
    tokens: float
    reserved: float

    def plus(self, other: "Decodes") -> "Decodes":
        """Add other requests."""
        return Decodes(self.batch + other.batch, self.tokens + other.tokens, self.reserved + other.reserved)

    def minus(self, other: "Decodes") -> "Decodes":
        """Take other requests off; nothing falls below 0, as reports may lack tokens that were generated since."""
        batch, tokens, reserved = self.batch - other.batch, self.tokens - other.tokens, self.reserved - other.reserved
        return Decodes(max(0, batch), max(0, tokens), max(0, reserved))

    def times(self, factor: float) -> "Decodes":
        """Multiply by a factor."""
        return Decodes(self.batch * factor, self.tokens * factor, self.reserved * factor)


NO_DECODES = Decodes(0, 0, 0)


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was assigned and has not ended.

    Attributes:
      generated: tokens that it had had when it was assigned, if it goes on after a failure.
      assigned_at: seconds of the driver's clock.
      context: tokens that it decodes with at first.
      reserved: tokens of KV cache that are kept for it where it decodes, in whole blocks.
      is_held: they are from its assignment on, rather than from the end of its prefill on.
      decode_since: when its prefill had ended; None: it has not.
    """

    request: ClusterRequest
    assignment: Assignment
    generated: int
    assigned_at: float
    context: int
    reserved: int
    is_held: bool
    decode_since: float | None = None

    @property
    def prefill_end(self) -> float:
        """Time at which its prompt will have been computed, by the prediction at its assignment."""
        return self.assigned_at + self.assignment.ttft

    @property
    def decodes(self) -> Decodes:
        """Its share of the decodes where it decodes."""
        return Decodes(1, self.context, self.reserved)


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
      assigned: prompts that it got in all.
      decoding: requests that decode here now: reported, and of this conductor.
      coming: requests of this conductor that will decode here once their prompts are computed.
      held: of these, the ones for which memory is kept already.
      others: of `decoding`, those that the last report counts and that are not of this conductor.
    """

    spec: InstanceSpec
    role: Role
    name: str = field(init=False)
    is_draining: bool = False
    queued: dict[str, float] = field(default_factory=dict)
    reported_prefills: dict[str, float] = field(default_factory=dict)
    decodes: dict[str, Literal["prefill", "own", "reported"]] = field(default_factory=dict)
    sends: dict[str, float] = field(default_factory=dict)
    assigned: int = 0
    has_others: bool = False
    decoding: Decodes = NO_DECODES
    coming: Decodes = NO_DECODES
    held: Decodes = NO_DECODES
    others: Decodes = NO_DECODES
    _queued_seconds: float = 0.0
    _head_since: float = 0.0  # when the first of `queued` began, or will
    _reported_until: float = 0.0  # when the reported queue is empty

    def __post_init__(self) -> None:
        self.name = self.spec.name

    def queue(self, now: float) -> float:
        """Predict the seconds until a prompt that comes now begins: those of all prompts before it."""
        total = self._reported_until - now if self._reported_until > now else 0.0
        if self.queued:
            elapsed = now - max(self._head_since, self._reported_until)
            head = next(iter(self.queued.values()))
            total += self._queued_seconds - min(head, max(0.0, elapsed))
        return total if total > 0 else 0.0

    @property
    def expected(self) -> Decodes:
        """Requests that decode here, and those that will once their prompts are computed."""
        return self.decoding.plus(self.coming)

    def tbt(self, decodes: Decodes) -> float:
        """Predict the seconds between the tokens of a batch; 0 if it is empty."""
        return self.spec.costs.decode_seconds(int(decodes.batch), int(decodes.tokens)) if decodes.batch else 0.0

    def tbt_with(self, context: int) -> float:
        """Predict the seconds between tokens once one more request, and all that are expected here, decode."""
        batch, tokens, _ = self.expected
        return self.spec.costs.decode_seconds(int(batch) + 1, int(tokens) + context)

    def has_room(self, tokens: int) -> bool:
        """Return whether one more request with a number of tokens of KV cache may decode here now."""
        batch = len(self.decodes) - self.coming.batch + self.others.batch + self.held.batch
        kept = self.decoding.reserved + self.held.reserved
        return kept + tokens <= self.spec.decode_tokens and batch < self.spec.max_running

    def sending(self, now: float) -> float:
        """Predict the seconds until all that it sends has left: its congestion."""
        return max(0.0, max(self.sends.values()) - now) if self.sends else 0.0

    def view(self, now: float) -> InstanceView:
        """Return what metrics and pages show."""
        batch, tokens, reserved = map(int, self.decoding)
        requests = {*self.queued, *self.reported_prefills, *self.decodes}
        return InstanceView(
            self.name, self.role, self.is_draining, self.queue(now), batch, tokens, reserved,
            self.spec.decode_tokens, self.tbt(self.decoding), self.sending(now), len(requests),
        )  # fmt: skip

    def begin_prefill(self, open_request: OpenRequest, now: float, ready: float) -> None:
        """Queue a prompt, whose fetched blocks are there at `ready`."""
        if not self.queued:
            self._head_since = max(now, ready)
        self.queued[open_request.request.request_id] = open_request.assignment.prefill_seconds
        self._queued_seconds += open_request.assignment.prefill_seconds
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
        """Expect a request, which decodes here once its prompt is computed."""
        self.decodes[open_request.request.request_id] = "prefill"
        self.coming = self.coming.plus(open_request.decodes)
        if open_request.is_held:
            self.held = self.held.plus(open_request.decodes)

    def join_batch(self, open_request: OpenRequest) -> None:
        """Begin to decode a request, whose prompt is computed."""
        self._forget_coming(open_request)
        self.decodes[open_request.request.request_id] = "own"
        self.decoding = self.decoding.plus(open_request.decodes)

    def end_decode(self, open_request: OpenRequest) -> None:
        """Forget a request that has ended, or goes elsewhere."""
        if self.decodes.pop(open_request.request.request_id) == "prefill":
            self._forget_coming(open_request)
        else:
            self.decoding = self.decoding.minus(open_request.decodes)
            if len(self.decodes) == self.coming.batch and not self.has_others:
                self.decoding = NO_DECODES  # the report counts tokens that were generated

    def _forget_coming(self, open_request: OpenRequest) -> None:
        self.coming = self.coming.minus(open_request.decodes)
        if open_request.is_held:
            self.held = self.held.minus(open_request.decodes)

    def correct(self, report: Report, find: Callable[[str], OpenRequest], now: float) -> None:
        """Take over the instance's report.

        Requests that it once counted and no longer counts have ended there: they are not added to it again.
        """
        known, prefills = report.known, self.reported_prefills | self.queued
        head = next(iter(self.queued), None)
        self.queued = {name: seconds for name, seconds in self.queued.items() if name not in known}
        self.reported_prefills = {name: prefills[name] for name in prefills if name not in self.queued}
        self._queued_seconds = sum(self.queued.values())
        if next(iter(self.queued), None) != head:
            self._head_since = now
        self._reported_until = now + report.queue_seconds
        self.has_others = any(name not in prefills and name not in self.decodes for name in known)
        ours, own, counted = NO_DECODES, NO_DECODES, 0
        for name, state in self.decodes.items():
            if state == "prefill":
                continue
            if name in known:
                self.decodes[name] = "reported"
                counted += 1
            decodes = find(name).decodes
            ours = ours.plus(decodes)
            if self.decodes[name] == "own":
                own = own.plus(decodes)
        batch = max(0, report.decoding - counted) if self.has_others else 0
        # The contexts of others are not reported: they are taken to be as long as those of the batch, on average.
        tokens = batch * report.decode_tokens // report.decoding if batch else 0
        self.others = Decodes(batch, tokens, tokens)
        self.decoding = Decodes(
            report.decoding + own.batch, report.decode_tokens + own.tokens, ours.reserved + self.others.reserved
        )


class PendingBlocks:
    """Blocks that instances do not have yet, and will have once their assigned prompts are computed.

    A key stands for its block and all before it: of two prompts with a key in common all earlier keys are equal, too.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, Counter[int]] = {}  # of each instance, the number of its prompts with a key

    def __len__(self) -> int:
        """Number of distinct blocks, over all instances."""
        return sum(map(len, self._prompts.values()))

    def add(self, instance: str, keys: np.ndarray) -> None:
        """Add a prompt, keys uint64 `[blocks]`."""
        self._prompts.setdefault(instance, Counter()).update(keys.tolist())

    def remove(self, instance: str, keys: np.ndarray) -> None:
        """Remove a prompt that was added."""
        counts, removed = self._prompts.get(instance, Counter()), keys.tolist()
        num_shared = bisect_left(removed, True, key=lambda key: counts[key] <= 1)  # with other prompts
        counts.subtract(removed[:num_shared])
        for key in removed[num_shared:]:
            counts.pop(key, None)
        if not counts:
            self._prompts.pop(instance, None)

    def match(self, keys: np.ndarray) -> dict[str, int]:
        """Count the leading blocks of a prompt that each instance will have; instances with none are left out."""
        wanted, found = keys.tolist(), dict[str, int]()
        for instance, counts in self._prompts.items():
            if wanted and wanted[0] in counts:
                found[instance] = _num_leading(wanted, counts)
        return found


class ClusterState:
    """All instances and all open requests.

    Attributes:
      config: see `ConductorConfig`.
      instances: by name, in the order in which they joined.
      senders: instances that may send blocks to others: those that prefill, draining ones too.
      prefilling: open requests whose prompt is not computed yet, by id, in the order of their assignment.
      decoding: those that decode, in the order in which they began to.
      pending: blocks of the prompts in `prefilling`.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self.config = config
        self.instances: dict[str, InstanceState] = {}
        self.senders: dict[str, InstanceState] = {}
        self._prefills: list[InstanceState] = []
        self._decodes: list[InstanceState] = []
        self.prefilling: dict[str, OpenRequest] = {}
        self.decoding: dict[str, OpenRequest] = {}
        self.pending = PendingBlocks()

    def find(self, request_id: str) -> OpenRequest | None:
        """Return an open request; None: there is none of this id."""
        return self.prefilling.get(request_id) or self.decoding.get(request_id)

    def add(self, instance: InstanceState) -> None:
        self.instances[instance.name] = instance
        self.sort()

    def remove(self, name: str) -> None:
        del self.instances[name]
        self.sort()

    def sort(self) -> None:
        """Sort instances into pools again, after one was added or removed, or its role or draining has changed."""
        instances = self.instances.values()
        self._prefills = [each for each in instances if each.role != "decode" and not each.is_draining]
        self._decodes = [each for each in instances if each.role != "prefill" and not each.is_draining]
        self.senders = {each.name: each for each in instances if each.role != "decode"}

    def prefill_pool(self, exclude: Collection[str] = ()) -> list[InstanceState]:
        """Return the instances that new prompts may go to; where none is, those that decode read prompts as well."""
        found = [each for each in self._prefills if each.name not in exclude] if exclude else self._prefills
        return found or self.decode_pool(exclude)

    def decode_pool(self, exclude: Collection[str] = ()) -> list[InstanceState]:
        """Return the instances that new requests may decode on."""
        return [each for each in self._decodes if each.name not in exclude] if exclude else self._decodes


def _num_leading(keys: list[int], counts: Counter[int]) -> int:
    """Count the leading keys of a prompt that are in `counts`, where each key comes with all keys before it."""
    return bisect_left(keys, True, key=lambda key: key not in counts)
