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

from longctx.cluster.conductor.config import ConductorConfig
from longctx.cluster.conductor.request import Bound
from longctx.cluster.conductor.state import NO_DECODES, ClusterState, Decodes, InstanceState, OpenRequest
from longctx.models.validation import check_real

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


def ratio(seconds: float, slo: float) -> float:
    """Divide a predicted time by its SLO; NaN gives inf, as it must not satisfy a limit."""
    return inf if isnan(seconds) else seconds / slo


def decode_pool_load(
    pool: Sequence[tuple[InstanceState, Decodes]], tpot: float, request: Decodes | None = None
) -> Load:
    """Compute the load of the decode pool, or with one more request.

    The TBT is the mean, as if the request were spread over all instances (6.4). So is the share of memory; but the keys
    and values of a request lie on one instance: with it, it is the least that an instance would have with all of it.
    """
    if not pool:
        return Load(inf, "no_instance")
    if request is None:
        memory = sum(memory_load(instance, demand) for instance, demand in pool) / len(pool)
    else:
        memory = min(memory_load(instance, demand.plus(request)) for instance, demand in pool)
        share = request.times(1 / len(pool))
        pool = [(instance, demand.plus(share)) for instance, demand in pool]
    return _greater(sum(tbt_load(instance, demand, tpot) for instance, demand in pool) / len(pool), memory)


def tbt_load(instance: InstanceState, demand: Decodes, tpot: float) -> float:
    """Divide the predicted TBT by its SLO."""
    # Below 0 after requests were taken off whose tokens the last report did not count yet.
    batch, tokens = ceil(demand.batch - _ROUNDING), max(0, int(demand.tokens))
    return ratio(instance.spec.costs.decode_seconds(batch, tokens), tpot) if batch > 0 else 0.0


def memory_load(instance: InstanceState, demand: Decodes) -> float:
    """Return the share of memory, or of places in the batch, that a demand needs."""
    spec = instance.spec
    memory = max(0.0, demand.reserved) / spec.decode_tokens if spec.decode_tokens else inf
    return max(memory, demand.batch / spec.max_running)


def loads(state: ClusterState, now: float) -> Loads:
    """Compute the loads of both pools now; an instance that does both is in both.

    That of the prefill pool is the mean over its instances of the TTFT over its SLO. Prompts are computed in order: the
    last one has the longest TTFT, which is that of the queue.
    """
    config, prefills, decodes = state.config, state.prefill_pool(), state.decode_pool()
    prefill = sum(ratio(each.queue(now), config.ttft) for each in prefills) / len(prefills) if prefills else inf
    return Loads(prefill, decode_pool_load([(each, each.decoding) for each in decodes], config.tpot).value)


def future_demands(
    state: ClusterState, now: float, then: float, decode_seconds: float
) -> list[tuple[InstanceState, Decodes]]:
    """Predict the decodes of each instance of the decode pool at a moment to come (6.4, system level).

    Prompts that will have been computed by then are added, evenly to all instances; requests that will have decoded for
    `decode_seconds` are taken off. Requests that come in between are not known.

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


class Verdict(NamedTuple):
    """Reason of a rejection.

    Attributes:
      bound: the limit that forbids the request.
      load: that is above the limit.
      retry_after: seconds after which it may be accepted, by prediction; inf: never, as far as is known.
    """

    bound: Bound
    load: float
    retry_after: float


@dataclass(frozen=True)
class Question:
    """Input of an admission rule.

    Attributes:
      before: the stage that is to begin.
      state: the cluster.
      open_request: the request and its instances, with its predicted TTFT and TBT.
      now: seconds of the driver's clock.
      ttft, tpot: SLOs in seconds that hold for it.
      decode_seconds: t_d, the assumed duration of a request's decoding.
    """

    before: Literal["prefill", "decode"]
    state: ClusterState
    open_request: OpenRequest
    now: float
    ttft: float
    tpot: float
    decode_seconds: float

    @property
    def prefill_end(self) -> float:
        """Predicted time at which its prompt will have been computed."""
        return self.now + self.open_request.assignment.ttft

    def prefill_load(self) -> Load:
        """Return the predicted TTFT of this request over its SLO; or the greatest of its instance, without it (6.1).

        A prompt that is late has waited for longer than was predicted.
        """
        placed = self.open_request.assignment
        if self.state.config.prefill_load == "request":
            return Load(ratio(placed.ttft, self.ttft), "ttft")
        seconds, end = 0.0, self.now
        for other in self.state.prefilling.values():
            if other.assignment.prefill == placed.prefill:
                other_end = max(other.prefill_end, self.now)
                seconds, end = max((seconds, end), (other_end - other.assigned_at, other_end))
        return Load(ratio(seconds, self.ttft), "prefill_load", end)

    def tbt_load(self) -> Load:
        """Return the TBT over its SLO, now and with this request, of the instance that decodes it (algorithm 1, 27)."""
        instance = self.state.instances[self.open_request.assignment.decode]
        return self._tbt_load(instance, instance.decoding)

    def predicted_tbt_load(self) -> Load:
        """Return the same at `prefill_end`."""
        name = self.open_request.assignment.decode
        [(instance, demand)] = (each for each in self._future_demands if each[0].name == name)
        return self._tbt_load(instance, demand)._replace(at=self.prefill_end)

    def decode_pool_load(self) -> Load:
        """Return the load of the decode pool now, with this request, over `decode_limit`."""
        return self._pool_load([(each, each.decoding) for each in self.state.decode_pool()])

    def predicted_decode_pool_load(self) -> Load:
        """Return the load of the decode pool at `prefill_end`, with this request (6.4), over `decode_limit`."""
        return self._pool_load(self._future_demands)._replace(at=self.prefill_end)

    def least_decode_pool_load(self) -> Load:
        """Return the load of the decode pool with this request alone, over `decode_limit`."""
        return self._pool_load([(each, NO_DECODES) for each in self.state.decode_pool()])

    def least_tbt_load(self) -> Load:
        """Return the least TBT over its SLO that an instance would have with this request alone."""
        return min(self._tbt_load(each, NO_DECODES) for each in self.state.decode_pool())

    def decode_load(self) -> Load:
        """Return the load, now and with this request, of the instance that decodes it."""
        instance = self.state.instances[self.open_request.assignment.decode]
        demand = instance.decoding.plus(self.open_request.decodes)
        return _greater(tbt_load(instance, demand, self.tpot), memory_load(instance, demand))

    @cached_property  # of all open requests
    def _future_demands(self) -> list[tuple[InstanceState, Decodes]]:
        return future_demands(self.state, self.now, self.prefill_end, self.decode_seconds)

    def _tbt_load(self, instance: InstanceState, demand: Decodes) -> Load:
        return Load(tbt_load(instance, demand.plus(self.open_request.decodes), self.tpot), "tbt")

    def _pool_load(self, pool: list[tuple[InstanceState, Decodes]]) -> Load:
        load = decode_pool_load(pool, self.tpot, self.open_request.decodes)
        return Load(load.value / self.state.config.decode_limit, "decode_load" if load.bound == "tbt" else load.bound)


AdmissionRule = Callable[[Question], Load | None]


def none(question: Question) -> Load | None:
    """Reject nothing."""
    return None


def baseline(question: Question) -> Load | None:
    """Check each stage's own load before it (6.1). A prefill may be computed for nothing."""
    return question.prefill_load() if question.before == "prefill" else question.decode_load()


def early_rejection(question: Question) -> Load | None:
    """Check the greater load of both pools before the prefill (6.2), and that of decode again before it decodes.

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
    """Admission of a conductor: its rule, the limits of priorities, and t_d. It does not change the state.

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
        # A request may have a laxer TTFT of its own; but a batch has one TBT, which must suit the others.
        ttft, tpot = request.ttft or config.ttft, min(request.tpot or config.tpot, config.tpot)
        question = Question(before, state, open_request, now, ttft, tpot, self.decode_seconds)
        load, limit = self._rule(question), self.limit(request.priority)
        if load is None or load.value <= limit:
            return None
        return Verdict(load.bound, load.value, retry_seconds(question, load, limit))

    def learn(self, seconds: float) -> None:
        """Update t_d by the decoding of a finished request, in seconds.

        Raises:
          TypeError, ValueError: `seconds` is not finite, or negative.
        """
        check_real("seconds", seconds, 0)
        if self._config.decode_seconds is None:
            self._learned = min(self._learned + 1, _MEMORY)
            self.decode_seconds += (seconds - self.decode_seconds) / self._learned

    def memory_seconds(self, state: ClusterState, reserved: int, now: float) -> float:
        """Predict the seconds until `reserved` tokens of KV cache are free on an instance that decodes; inf: never."""
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
        """Return the load above which a request of a priority is rejected: each step up adds `priority_step`.

        It stays between half and twice `load_limit`.
        """
        low, high = _LEAST_LIMIT * self._config.load_limit, _MOST_LIMIT * self._config.load_limit
        return min(high, max(low, self._config.load_limit + self._config.priority_step * priority))


def retry_seconds(question: Question, load: Load, limit: float) -> float:
    """Predict the seconds after which a request like this one would pass, if no other came until then.

    The load of an instance falls when its prompt with the greatest TTFT is computed. A queue gets shorter by a second
    a second: a TTFT needs the seconds above the limit, if its own prefill leaves room. The decode pool gets emptier as
    the oldest requests end, `decode_seconds` after they began, until the share above the limit has ended.
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
    if at > now:  # the load counts those in prefill now, and not those that will have ended by then
        ends, coming = [end for end in ends if end > at], len(state.prefilling)
    above = ceil((len(ends) + coming) * (1 - limit / load.value))
    if not 0 < above <= len(ends):
        return max(_LEAST_RETRY, question.decode_seconds)
    return max(_LEAST_RETRY, ends[above - 1] - at)


def _greater(tbt: float, memory: float) -> Load:
    return Load(tbt, "tbt") if tbt >= memory else Load(memory, "memory")
