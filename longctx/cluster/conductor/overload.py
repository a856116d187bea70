"""Overload: loads of instances and pools, the requests that are rejected by load, and when to ask again.

A load is a predicted time over its SLO, or a share of memory. An admission rule is a function `(question) -> Load |
None`: the load that counts for a request before a stage, None if nothing is checked there. A request is rejected if
that load is above the limit of its priority. A user's own rule is given to `ConductorConfig(admission=...)`.

Source: Mooncake, section 3 (step 4: the check before decoding), 6.1 (load by SLO) to 6.4 (the decode pool after a
specified time), 7.2, and figure 1 (what limits both pools: TTFT; TBT and memory for the KV cache).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, isnan
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import ConductorConfig, PrefillLoad
from longctx.cluster.conductor.request import Bound
from longctx.cluster.conductor.state import NO_DECODES, ClusterState, Decodes, InstanceState, OpenRequest
from longctx.serving.validation import check_real

_ROUNDING = 1e-9  # shares of requests, summed up, may be so far from a whole number
_LEAST_RETRY = 0.1  # seconds: estimates are not better than that
_LEAST_LIMIT, _MOST_LIMIT = 0.5, 2.0  # times `load_limit`: what a priority can do
_FIRST_SECONDS = 10.0  # t_d until a request has finished
_MEMORY = 256  # requests over which t_d is averaged, about


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


def decode_load(instance: InstanceState, demand: Decodes, tpot: float) -> Load:
    """The load of an instance by a demand: of TBT over its SLO and of memory, the one that binds."""
    return _greater(tbt_load(instance, demand, tpot), memory_load(instance, demand))


def decode_pool_load(pool: Sequence[tuple[InstanceState, Decodes]], tpot: float) -> Load:
    """The load of the decode pool: the mean TBT over its SLO of all instances (6.4), or their mean share of memory."""
    if not pool:
        return Load(inf, "no_instance")
    tbt = sum(tbt_load(instance, demand, tpot) for instance, demand in pool)
    memory = sum(memory_load(instance, demand) for instance, demand in pool)
    return _greater(tbt / len(pool), memory / len(pool))


def decode_pool_load_with(pool: Sequence[tuple[InstanceState, Decodes]], request: Decodes, tpot: float) -> Load:
    """The load of the decode pool with one more request.

    Of TBT it is the mean, as if the request were spread over all instances (6.4). But its keys and values lie on one:
    of memory it is the least load that an instance would have with all of it.
    """
    if not pool:
        return Load(inf, "no_instance")
    share = request.times(1 / len(pool))
    tbt = sum(tbt_load(instance, demand.plus(share), tpot) for instance, demand in pool) / len(pool)
    return _greater(tbt, min(memory_load(instance, demand.plus(request)) for instance, demand in pool))


def tbt_load(instance: InstanceState, demand: Decodes, tpot: float) -> float:
    """Predicted TBT over its SLO."""
    # Below 0 after requests were taken off whose tokens the last report did not count yet.
    batch, tokens = ceil(demand.batch - _ROUNDING), max(0, int(demand.tokens))
    return ratio(instance.spec.costs.decode_seconds(batch, tokens), tpot) if batch > 0 else 0.0


def memory_load(instance: InstanceState, demand: Decodes) -> float:
    """What is needed of memory, or of places in the batch, over what there is."""
    spec = instance.spec
    memory = max(0.0, demand.reserved) / spec.decode_tokens if spec.decode_tokens else inf
    return max(memory, demand.batch / spec.max_running)


def loads(state: ClusterState, now: float) -> Loads:
    """Compute the loads of both pools now: the mean over their instances; one that does both is in both."""
    config, prefills, decodes = state.config, state.prefill_pool(), state.decode_pool()
    prefill = sum(prefill_load(each, config.ttft, now) for each in prefills) / len(prefills) if prefills else inf
    return Loads(prefill, decode_pool_load([(each, each.decoding) for each in decodes], config.tpot).value)


def future_demands(
    state: ClusterState, now: float, then: float, decode_seconds: float
) -> list[tuple[InstanceState, Decodes]]:
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
    share = Decodes(batch, tokens, reserved).times(1 / len(pool)) if pool else NO_DECODES
    return [(each, Decodes(*demands[each.name]).plus(share)) for each in pool]


def _greater(tbt: float, memory: float) -> Load:
    return Load(tbt, "tbt") if tbt >= memory else Load(memory, "memory")


class Verdict(NamedTuple):
    """Why a request is rejected.

    Attributes:
      load: that is above the limit.
      retry_after: seconds after which it may be accepted, by prediction; inf: never, as far as is known.
    """

    bound: Bound
    load: float
    retry_after: float


@dataclass(frozen=True)
class Question:
    """What an admission rule is asked.

    Attributes:
      before: the stage that is to begin.
      open_request: the request, and where it goes, with its predicted TTFT and TBT.
      ttft, tpot: SLOs in seconds that hold for it.
      decode_seconds: t_d, what a request's decoding is assumed to take.
      prefill_load_of: see `ConductorConfig.prefill_load`.
      decode_limit: of the decode pool's load before a prefill, where 1 is that of its SLO or memory.
    """

    before: Literal["prefill", "decode"]
    state: ClusterState
    open_request: OpenRequest
    now: float
    ttft: float
    tpot: float
    decode_seconds: float
    decode_limit: float = 1.0
    prefill_load_of: PrefillLoad = "request"

    @property
    def prefill_end(self) -> float:
        """When its prompt will have been computed, by prediction."""
        return self.now + self.open_request.assignment.ttft

    def prefill_load(self) -> Load:
        """The predicted TTFT of this request over its SLO; or the greatest one of its instance, without it (6.1)."""
        placed = self.open_request.assignment
        if self.prefill_load_of == "request":
            return Load(ratio(placed.ttft, self.ttft), "ttft")
        seconds, end = max_ttft(self.state, placed.prefill, self.now)
        return Load(ratio(seconds, self.ttft), "prefill_load", end)

    def tbt_load(self) -> Load:
        """The TBT of the instance where it decodes over its SLO, as it is now, with this request (algorithm 1, 27)."""
        instance = self.state.instances[self.open_request.assignment.decode]
        return self._tbt_load(instance, instance.decoding)

    def predicted_tbt_load(self) -> Load:
        """The same at `prefill_end`."""
        name = self.open_request.assignment.decode
        [(instance, demand)] = (each for each in self._future_demands if each[0].name == name)
        return self._tbt_load(instance, demand)._replace(at=self.prefill_end)

    def decode_pool_load(self) -> Load:
        """The load of the decode pool as it is now, with this request, over `decode_limit`."""
        return self._pool_load([(each, each.decoding) for each in self.state.decode_pool()])

    def predicted_decode_pool_load(self) -> Load:
        """The load of the decode pool at `prefill_end`, with this request (6.4), over `decode_limit`."""
        return self._pool_load(self._future_demands)._replace(at=self.prefill_end)

    def least_decode_pool_load(self) -> Load:
        """The load of the decode pool with this request alone, over `decode_limit`."""
        return self._pool_load([(each, NO_DECODES) for each in self.state.decode_pool()])

    def least_tbt_load(self) -> Load:
        """The least TBT over its SLO that an instance would have with this request alone."""
        return min(self._tbt_load(each, NO_DECODES) for each in self.state.decode_pool())

    def decode_load(self) -> Load:
        """The load of the instance where it decodes, as it is now, with this request."""
        instance = self.state.instances[self.open_request.assignment.decode]
        return decode_load(instance, instance.decoding.plus(self.open_request.decodes), self.tpot)

    @cached_property  # of all open requests
    def _future_demands(self) -> list[tuple[InstanceState, Decodes]]:
        return future_demands(self.state, self.now, self.prefill_end, self.decode_seconds)

    def _tbt_load(self, instance: InstanceState, demand: Decodes) -> Load:
        return Load(tbt_load(instance, demand.plus(self.open_request.decodes), self.tpot), "tbt")

    def _pool_load(self, pool: list[tuple[InstanceState, Decodes]]) -> Load:
        load = decode_pool_load_with(pool, self.open_request.decodes, self.tpot)
        return Load(load.value / self.decode_limit, "decode_load" if load.bound == "tbt" else load.bound)


AdmissionRule = Callable[[Question], Load | None]


def none(question: Question) -> Load | None:
    """Reject nothing."""
    return None


def baseline(question: Question) -> Load | None:
    """Check each stage's own load before it (6.1). A prefill may be in vain."""
    return question.prefill_load() if question.before == "prefill" else question.decode_load()


def early_rejection(question: Question) -> Load | None:
    """Check the greater load of both pools before the prefill (6.2), and decode's once more before it decodes.

    Before the prefill, the TBT of the selected instance counts too (algorithm 1, line 27): the pool's is a mean.
    """
    if question.before == "decode":
        return question.decode_load()
    loads = question.prefill_load(), question.decode_pool_load(), question.tbt_load()
    return max(loads, key=lambda each: each.value)


def predicted_early_rejection(question: Question) -> Load | None:
    """As early rejection, with the decode loads at the moment at which this prefill will have ended (6.4)."""
    if question.before == "decode":
        return question.decode_load()
    loads = question.prefill_load(), question.predicted_decode_pool_load(), question.predicted_tbt_load()
    return max(loads, key=lambda each: each.value)


ADMISSION_RULES: dict[str, AdmissionRule] = {
    "none": none,
    "baseline": baseline,
    "early_rejection": early_rejection,
    "predicted_early_rejection": predicted_early_rejection,
}


class Admission:
    """The admission of a conductor: its rule, the limits of priorities, and t_d. It changes nothing of the state.

    Attributes:
      decode_seconds: t_d: as configured, or a running mean over requests that have finished.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        rule = config.admission
        self._rule = rule if callable(rule) else ADMISSION_RULES[rule]
        self.decode_seconds = _FIRST_SECONDS if config.decode_seconds is None else config.decode_seconds
        self._learned = 0

    def check(
        self, before: Literal["prefill", "decode"], state: ClusterState, open_request: OpenRequest, now: float
    ) -> Verdict | None:
        """Check a request before a stage; it is not in the estimates of that stage yet. None: it may pass."""
        config, request = self._config, open_request.request
        # Its own TTFT is its own affair; a batch has one TBT, so a laxer one must not spoil that of others.
        ttft, tpot = request.ttft or config.ttft, min(request.tpot or config.tpot, config.tpot)
        question = Question(
            before, state, open_request, now, ttft, tpot, self.decode_seconds, config.decode_limit, config.prefill_load
        )
        load, limit = self._rule(question), self.limit(request.priority)
        if load is None or load.value <= limit:
            return None
        return Verdict(load.bound, load.value, retry_seconds(question, load, limit))

    def learn(self, seconds: float) -> None:
        """Take note of how long the decoding of a request took that has finished.

        Raises:
          TypeError, ValueError: `seconds` is not finite, or negative.
        """
        check_real("seconds", seconds, 0)
        if self._config.decode_seconds is None:
            self._learned = min(self._learned + 1, _MEMORY)
            self.decode_seconds += (seconds - self.decode_seconds) / self._learned

    def memory_seconds(self, state: ClusterState, reserved: int, now: float) -> float:
        """Seconds until so many tokens of KV cache are free where somebody decodes, by prediction; inf: never."""
        lacks = {
            each.name: reserved + each.decoding.reserved + each.held.reserved - each.spec.decode_tokens
            for each in state.decode_pool()
            if reserved <= each.spec.decode_tokens
        }
        for open_request in state.decoding.values():
            name, since = open_request.assignment.decode, open_request.decode_since
            if name in lacks and since is not None:
                lacks[name] -= open_request.reserved
                if lacks[name] <= 0:
                    return max(_LEAST_RETRY, since + self.decode_seconds - now)
        return max(_LEAST_RETRY, self.decode_seconds) if lacks else inf

    def limit(self, priority: int) -> float:
        """The load above which a request of a priority is rejected: each step up adds `priority_step`.

        It stays between half and twice `load_limit`.
        """
        low, high = _LEAST_LIMIT * self._config.load_limit, _MOST_LIMIT * self._config.load_limit
        return min(high, max(low, self._config.load_limit + self._config.priority_step * priority))


def retry_seconds(question: Question, load: Load, limit: float) -> float:
    """Seconds after which a request like this one would pass, by prediction, if nobody else came until then.

    The load of an instance falls when its prompt with the greatest TTFT is computed. A queue gets shorter by a second
    a second: for a TTFT, what is above the limit, if its own prefill leaves room. The decode pool gets emptier as the
    oldest requests end, `decode_seconds` after they began: until the share of them has that is above the limit.
    """
    placed, state, now = question.open_request.assignment, question.state, question.now
    if load.bound == "ttft":
        over = placed.ttft - limit * question.ttft
        return max(_LEAST_RETRY, over) if over <= placed.queue else inf
    if load.bound == "prefill_load" and load.at is not None:
        return max(_LEAST_RETRY, load.at - now)
    if load.value == inf:
        return inf
    if load.bound in ("memory", "decode_load") and question.least_decode_pool_load().value > limit:
        return inf  # it would not pass if all others had ended
    if load.bound == "tbt" and question.least_tbt_load().value > limit:
        return inf
    at = now if load.at is None else load.at
    ends = [
        each.decode_since + question.decode_seconds
        for each in state.decoding.values()
        if each.decode_since is not None and (load.bound != "tbt" or each.assignment.decode == placed.decode)
    ]
    coming = 0
    if at > now:  # who will have ended by then was not counted, and who is in prefill now was
        ends, coming = [end for end in ends if end > at], len(state.prefilling)
    above = ceil((len(ends) + coming) * (1 - limit / load.value))
    if not 0 < above <= len(ends):
        return max(_LEAST_RETRY, question.decode_seconds)
    return max(_LEAST_RETRY, ends[above - 1] - at)
