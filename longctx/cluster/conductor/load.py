"""Loads: predicted times over their SLOs, of instances, of pools, and of the decode pool at a moment to come.

Source: Mooncake, sections 6.1 (load by SLO), 6.4 (the decode pool after a specified time), figure 1 (what limits
both pools: TTFT; TBT and memory for the KV cache).
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf, isnan
from typing import NamedTuple

from longctx.cluster.conductor.decision import Bound
from longctx.cluster.conductor.state import ClusterState, InstanceState, OpenRequest

_ROUNDING = 1e-9  # shares of requests, summed up, may be so far from a whole number


class Load(NamedTuple):
    """A load, and what makes it so high. Above 1, an SLO is missed or memory is short.

    Attributes:
      at: the moment whose load it is; None: now.
    """

    value: float
    bound: Bound
    at: float | None = None


class Loads(NamedTuple):
    """Loads of both pools. A pool without instances has infinite load."""

    prefill: float
    decode: float

    @property
    def cluster(self) -> float:
        """The greater of both: the load of a cluster (6.2)."""
        return max(self)


class DecodeDemand(NamedTuple):
    """What decodes ask of an instance: in a prediction, as a share of what comes to a pool, a fraction of a request.

    Attributes:
      batch: requests that decode.
      tokens: of their contexts: what a step reads.
      reserved: tokens of KV cache that are kept for them, what they will generate included.
    """

    batch: float
    tokens: float
    reserved: float

    def plus(self, other: "DecodeDemand") -> "DecodeDemand":
        return DecodeDemand(self.batch + other.batch, self.tokens + other.tokens, self.reserved + other.reserved)

    def times(self, factor: float) -> "DecodeDemand":
        return DecodeDemand(self.batch * factor, self.tokens * factor, self.reserved * factor)


NOTHING = DecodeDemand(0.0, 0.0, 0.0)


def ratio(seconds: float, slo: float) -> float:
    """A predicted time over its SLO; inf if the prediction is no number: nothing may pass by nonsense."""
    return inf if isnan(seconds) else seconds / slo


def prefill_load(instance: InstanceState, ttft: float, now: float) -> float:
    """The load of an instance that prefills: the TTFT of whoever comes last, before its own prompt, over the SLO.

    Prompts are computed in their order, so nobody who waits has a longer predicted TTFT.
    """
    return ratio(instance.queue(now), ttft)


def max_ttft(state: ClusterState, instance: str, now: float) -> tuple[float, float]:
    """The greatest predicted TTFT of the prompts that an instance has (6.1), and when that prompt will be computed.

    A prompt that is late has waited for longer than was predicted.
    """
    found = 0.0, now
    for open_request in state.prefilling.values():
        if open_request.assignment.prefill == instance:
            end = max(open_request.prefill_end, now)
            found = max(found, (end - open_request.assigned_at, end))
    return found


def decode_demand(instance: InstanceState) -> DecodeDemand:
    """What decodes now; requests that will decode once their prompts are computed don't count."""
    return DecodeDemand(*instance.decoding)


def decode_load(instance: InstanceState, demand: DecodeDemand, tpot: float) -> Load:
    """The load of an instance by a demand: of TBT over its SLO and of memory, the one that binds."""
    return _greater(tbt_load(instance, demand, tpot), memory_load(instance, demand))


def decode_pool_load(pool: Sequence[tuple[InstanceState, DecodeDemand]], tpot: float) -> Load:
    """The load of the decode pool: the mean TBT over its SLO of all instances (6.4), or their mean share of memory."""
    if not pool:
        return Load(inf, "no_instance")
    tbt = sum(tbt_load(instance, demand, tpot) for instance, demand in pool)
    memory = sum(memory_load(instance, demand) for instance, demand in pool)
    return _greater(tbt / len(pool), memory / len(pool))


def decode_pool_load_with(
    pool: Sequence[tuple[InstanceState, DecodeDemand]], request: DecodeDemand, tpot: float
) -> Load:
    """The load of the decode pool with one more request.

    Of TBT it is the mean, as if the request were spread over all instances (6.4). But its keys and values lie on one:
    of memory it is the least load that an instance would have with all of it.
    """
    if not pool:
        return Load(inf, "no_instance")
    share = request.times(1 / len(pool))
    tbt = sum(tbt_load(instance, demand.plus(share), tpot) for instance, demand in pool) / len(pool)
    return _greater(tbt, min(memory_load(instance, demand.plus(request)) for instance, demand in pool))


def tbt_load(instance: InstanceState, demand: DecodeDemand, tpot: float) -> float:
    """Predicted TBT over its SLO."""
    # Below 0 after requests were taken off whose tokens the last report did not count yet.
    batch, tokens = ceil(demand.batch - _ROUNDING), max(0, int(demand.tokens))
    return ratio(instance.spec.costs.decode_seconds(batch, tokens), tpot) if batch > 0 else 0.0


def memory_load(instance: InstanceState, demand: DecodeDemand) -> float:
    """What is needed of memory, or of places in the batch, over what there is."""
    spec = instance.spec
    memory = max(0.0, demand.reserved) / spec.decode_tokens if spec.decode_tokens else inf
    return max(memory, demand.batch / spec.max_running)


def loads(state: ClusterState, now: float, exclude: Iterable[str] = ()) -> Loads:
    """The loads of both pools now: the mean over their instances; one that does both is in both."""
    config, exclude = state.config, frozenset(exclude)
    prefills, decodes = state.prefill_pool(exclude), state.decode_pool(exclude)
    prefill = sum(prefill_load(each, config.ttft, now) for each in prefills) / len(prefills) if prefills else inf
    return Loads(prefill, decode_pool_load([(each, decode_demand(each)) for each in decodes], config.tpot).value)


def future_demands(
    state: ClusterState, now: float, then: float, decode_seconds: float
) -> list[tuple[InstanceState, DecodeDemand]]:
    """What will decode on each instance of the decode pool at a moment to come (6.4, system level).

    Prompts that will have been computed by then are added, evenly to all instances; requests that will have decoded for
    `decode_seconds` are taken off. Nothing is known of those who will come between.

    Args:
      then: seconds of the same clock as `now`, not before it.
    """
    # Plain numbers: a thousand requests may be open, and this is asked for each that comes.
    pool = state.decode_pool()
    demands = {each.name: [*map(float, each.decoding)] for each in pool}
    for open_request in state.decoding.values():  # in order of their beginning
        since = open_request.decode_since
        if since is None or since + decode_seconds > then:
            break
        demand = demands.get(open_request.assignment.decode)
        if demand is not None:
            demand[0] -= 1
            demand[1] -= open_request.context
            demand[2] -= open_request.reserved
    batch = tokens = reserved = 0
    begin = then - decode_seconds
    for open_request in state.prefilling.values():
        end = open_request.prefill_end
        if end <= then and (end if end > now else now) > begin:  # one that is late may be computed at any moment
            batch += 1
            tokens += open_request.context
            reserved += open_request.reserved
    share = DecodeDemand(batch, tokens, reserved).times(1 / len(pool)) if pool else NOTHING
    return [(each, DecodeDemand(*demands[each.name]).plus(share)) for each in pool]


def demand_of(open_request: OpenRequest) -> DecodeDemand:
    """What a request asks of the instance where it decodes."""
    return DecodeDemand(1.0, open_request.context, open_request.reserved)


def _greater(tbt: float, memory: float) -> Load:
    return Load(tbt, "tbt") if tbt >= memory else Load(memory, "memory")
