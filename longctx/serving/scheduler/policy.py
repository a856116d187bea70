"""Scheduling policies: the order in which prompts are read, which may share a step, and weighted shares of tenants.

A policy orders prompts, those that wait and those half read alike, anew in every step: so a prompt is preempted between
two of its chunks. Decodes are not ordered: they always run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from longctx.annotations import Real

if TYPE_CHECKING:  # settings name policies, and `--help` reads settings: sequences load numpy
    from longctx.serving.scheduler.sequence import Sequence

_REMEMBERED = 4096  # tenants without requests that are remembered, at most


class TenantShares:
    """Start-time fair queueing over tenants: of equal priority, who has been served least by weight comes first.

    A tenant is charged for a request when it is admitted, with the tokens that are not in the cache and its max_tokens,
    and gets back what the request did not use. So the order changes only when somebody is admitted or ends: a large
    request that waits for memory keeps its place. A tenant that comes back after a rest has saved nothing up.

    Args:
      weights: of tenants by name; 1 for others.

    Source: Goyal, Vin and Cheng 1996, section 2.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._served: dict[str, float] = {}  # tokens, each divided by its tenant's weight
        self._active: dict[str, int] = {}  # sequences that have not ended
        self._virtual = 0.0  # what an active tenant has been served at least
        self._charged: dict[Sequence, int] = {}

    @property
    def are_several(self) -> bool:
        """Whether sequences of more than one tenant have not ended."""
        return len(self._active) > 1

    def rank(self, sequence: Sequence) -> float:
        """The least comes first; the same for all sequences of a tenant."""
        return self._served[sequence.tenant] if len(self._active) > 1 else 0.0

    def enter(self, sequence: Sequence) -> None:
        """A sequence has come."""
        tenant = sequence.tenant
        if tenant not in self._active:
            self._virtual = max(self._virtual, min((self._served[other] for other in self._active), default=0.0))
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._virtual)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def charge(self, sequence: Sequence) -> None:
        """A sequence is admitted. One that was preempted is not charged again."""
        if sequence not in self._charged:
            tokens = sequence.prompt_length - (sequence.cached or 0) + sequence.max_tokens
            self._charged[sequence] = tokens
            self._add(sequence.tenant, tokens)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        tenant = sequence.tenant
        if self._charged.pop(sequence, None) is not None:
            self._add(tenant, -(sequence.prompt_length + sequence.max_tokens - sequence.length))
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._forget()

    def _add(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        """Forget tenants below `_virtual`: a tenant that returns counts as served that much anyway."""
        if not self._active:
            self._virtual = max(self._served.values())
        if len(self._served) > _REMEMBERED:
            self._served = {
                tenant: served
                for tenant, served in self._served.items()
                if tenant in self._active or served > self._virtual
            }


@runtime_checkable
class Policy(Protocol):
    """Pure functions of plain data: no clock, no randomness.

    Of a sequence they may read `arrival`, `deadline` (when its first token is due), `ttft_budget` (seconds from its
    arrival to then), `prefill_remaining` (predicted seconds of the rest of its prompt, computed alone) and its lengths;
    `share` may read `due_share` too, with which it is in time. Results are finite.
    """

    def urgency(self, sequence: Sequence, now: float) -> float:
        """The least is the most urgent. Higher priority comes before it, and of equals who came first."""

    def share(self, sequence: Sequence, now: float) -> float:
        """The share of a step, 0 to 1, that a prompt may have of one that is more urgent, but longer."""


def urgency_order(policy: Policy, sequence: Sequence, now: float) -> tuple[int, float]:
    """Return what sorts sequences by priority, then by a policy; the most urgent is the least."""
    return -sequence.priority, policy.urgency(sequence, now)


def by_urgency(
    policy: Policy, sequences: Iterable[Sequence], now: float, tenants: TenantShares | None = None
) -> Iterator[Sequence]:
    """The most urgent of the tenant whose turn it is first. Stopping early costs no more than a look at each.

    Higher priorities come before all others, and tenants before urgency: a policy orders the prompts of one tenant.
    """
    urgency = policy.urgency
    if tenants is None or not tenants.are_several:
        heap = [(-s.priority, 0.0, urgency(s, now), s.order, s) for s in sequences]
    else:
        heap = [(-s.priority, tenants.rank(s), urgency(s, now), s.order, s) for s in sequences]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[-1]


def lends_steps(policy: Policy) -> bool:
    """Whether a prompt may share the steps of a longer one, for all that is known without asking."""
    return getattr(type(policy), "share", None) is not Alone.share


def slack(sequence: Sequence, now: float) -> float:
    """Seconds that are left to its deadline after what is yet to be read; negative if it will be late."""
    return sequence.deadline - now - sequence.prefill_remaining


def relative_slack(sequence: Sequence, now: float) -> float:
    """The share of the time to its deadline that is left after what is yet to be read; negative if it will be late.

    Source: Medha, 4.2, equation 7, where `now` is implicit: it takes the deadline as time that is left.
    """
    return slack(sequence, now) / sequence.ttft_budget


class Alone:
    """A prompt has a whole step, as far as it can use it; what it leaves is the next one's."""

    def share(self, sequence: Sequence, now: float) -> float:
        return 0.0


class FirstComeFirstServed(Alone):
    """`fcfs`: in order of arrival. A short prompt waits for the whole of a long one before it."""

    def urgency(self, sequence: Sequence, now: float) -> float:
        return sequence.arrival


class EarliestDeadlineFirst(Alone):
    """`edf`: optimal while all deadlines can be kept; beyond that, long prompts come due and block all others."""

    def urgency(self, sequence: Sequence, now: float) -> float:
        return sequence.deadline


class ShortestRemainingPrefill(Alone):
    """`srpf`: the least mean TTFT. A long prompt may wait for ever."""

    def urgency(self, sequence: Sequence, now: float) -> float:
        return sequence.prefill_remaining


class LeastSlack(Alone):
    """`lrs`: least remaining slack, in seconds, whatever was promised.

    A short prompt that is due in a second has less of it than a long one that is due in a minute, so that a stream of
    short ones delays a long one until it is about to be late; after that it comes first with all that it still needs.

    Source: Medha, 4.2, the policy that it extends.
    """

    def urgency(self, sequence: Sequence, now: float) -> float:
        return slack(sequence, now)


class LeastRelativeSlack(Alone):
    """`lrs_relative`: by `relative_slack`, so a long prompt is urgent only once it has waited long for its length.

    Neither kind starves the other: when there is more to do than can be done, all are late by the same multiple of
    what they were promised.

    Source: Medha, 5.4, the adaptation of LRS that figure 22 compares with.
    """

    def urgency(self, sequence: Sequence, now: float) -> float:
        return relative_slack(sequence, now)


@dataclass(frozen=True)
class InputLengthAwareSlack(LeastRelativeSlack):
    """`ilrs`: Medha's policy: as `lrs_relative`, and short prompts share steps with a long one.

    That is prefill-prefill batching. The nearer a prompt is to its deadline, the larger its share of the step, up to
    `max_share`: what it has used up of its slack, and at least what it needs to be in time. The paper has the first of
    these two alone, by which a prompt of 15 ms that is due in a second begins with 1.5 % of a step, however long the
    steps are that it shares.

    Source: Medha, 4.2.
    """

    max_share: float = 0.5

    def share(self, sequence: Sequence, now: float) -> float:
        return min(self.max_share, max(0.0, 1.0 - relative_slack(sequence, now), sequence.due_share))


PolicyName = Literal["fcfs", "edf", "srpf", "lrs", "lrs_relative", "ilrs"]
POLICIES: dict[PolicyName, Callable[[float], Policy]] = {
    "fcfs": lambda max_share: FirstComeFirstServed(),
    "edf": lambda max_share: EarliestDeadlineFirst(),
    "srpf": lambda max_share: ShortestRemainingPrefill(),
    "lrs": lambda max_share: LeastSlack(),
    "lrs_relative": lambda max_share: LeastRelativeSlack(),
    "ilrs": InputLengthAwareSlack,
}


def make_policy(name: PolicyName | Policy, max_share: float) -> Policy:
    """One of `POLICIES`, or what is a policy already.

    Raises:
      ValueError: there is no such policy.
    """
    if isinstance(name, str):
        if name not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
        return POLICIES[name](max_share)
    methods = [getattr(name, method, None) for method in ("urgency", "share")]
    if isinstance(name, type) or not all(map(callable, methods)):
        raise TypeError(f"policy must be a name or have `urgency` and `share`, got {name!r}")
    from longctx.serving.scheduler.sequence import Sequence

    probe = Sequence("probe", 0, prompt_length=1, max_tokens=1, deadline=1.0)
    for method in (name.urgency, name.share):
        value = method(probe, 0.0)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"policy must return finite numbers, got {value!r} from {method.__qualname__}")
    return name
