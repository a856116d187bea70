"""`TenantShares`: rows are shared between tenants by weight, so that one tenant's burst does not starve the others."""

from collections.abc import Mapping

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

    def state(self) -> tuple[dict[str, float], float]:
        """What is remembered of tenants that have no requests."""
        return dict(self._served), self._virtual

    def restore(self, served: Mapping[str, float], virtual: float) -> None:
        """Take over a `state`."""
        self._served, self._virtual = dict(served), virtual

    def _add(self, tenant: str, tokens: int) -> None:
        self._served[tenant] += tokens / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        """Nobody is served less than `_virtual` when it comes back, so those that were need not be remembered."""
        if not self._active:
            self._virtual = max(self._served.values())
        if len(self._served) > _REMEMBERED:
            self._served = {
                tenant: served
                for tenant, served in self._served.items()
                if tenant in self._active or served > self._virtual
            }
