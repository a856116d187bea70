"""Overload: which requests are rejected by load, and when to ask again.

An admission rule is a function `(question) -> Load | None`: the load that counts for a request before a stage, None if
nothing is checked there. A request is rejected if that load is above the limit of its priority. One's own rule is such
a function too, and is given to `ConductorConfig(admission=...)`.

Source: Mooncake, section 3 (step 4: the check before decoding), 6.1 to 6.4 and 7.2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import ConductorConfig, PrefillLoad
from longctx.cluster.conductor.decision import Bound
from longctx.cluster.conductor.load import (
    NOTHING,
    DecodeDemand,
    Load,
    decode_demand,
    decode_load,
    decode_pool_load_with,
    demand_of,
    future_demands,
    max_ttft,
    ratio,
    tbt_load,
)
from longctx.cluster.conductor.state import ClusterState, InstanceState, OpenRequest
from longctx.serving.validation import check_real

_LEAST_RETRY = 0.1  # seconds: estimates are not better than that
_LEAST_LIMIT, _MOST_LIMIT = 0.5, 2.0  # times `load_limit`: what a priority can do
_FIRST_SECONDS = 10.0  # t_d until a request has finished
_MEMORY = 256  # requests over which t_d is averaged, about


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
        return self._tbt_load(instance, decode_demand(instance))

    def predicted_tbt_load(self) -> Load:
        """The same at `prefill_end`."""
        name = self.open_request.assignment.decode
        [(instance, demand)] = (each for each in self._future_demands if each[0].name == name)
        return self._tbt_load(instance, demand)._replace(at=self.prefill_end)

    def decode_pool_load(self) -> Load:
        """The load of the decode pool as it is now, with this request, over `decode_limit`."""
        return self._pool_load([(each, decode_demand(each)) for each in self.state.decode_pool()])

    def predicted_decode_pool_load(self) -> Load:
        """The load of the decode pool at `prefill_end`, with this request (6.4), over `decode_limit`."""
        return self._pool_load(self._future_demands)._replace(at=self.prefill_end)

    def least_decode_pool_load(self) -> Load:
        """The load of the decode pool with this request alone, over `decode_limit`."""
        return self._pool_load([(each, NOTHING) for each in self.state.decode_pool()])

    def least_tbt_load(self) -> Load:
        """The least TBT over its SLO that an instance would have with this request alone."""
        return min(self._tbt_load(each, NOTHING) for each in self.state.decode_pool())

    def decode_load(self) -> Load:
        """The load of the instance where it decodes, as it is now, with this request."""
        instance = self.state.instances[self.open_request.assignment.decode]
        return decode_load(instance, decode_demand(instance).plus(demand_of(self.open_request)), self.tpot)

    @cached_property  # of all open requests
    def _future_demands(self) -> list[tuple[InstanceState, DecodeDemand]]:
        return future_demands(self.state, self.now, self.prefill_end, self.decode_seconds)

    def _tbt_load(self, instance: InstanceState, demand: DecodeDemand) -> Load:
        return Load(tbt_load(instance, demand.plus(demand_of(self.open_request)), self.tpot), "tbt")

    def _pool_load(self, pool: list[tuple[InstanceState, DecodeDemand]]) -> Load:
        load = decode_pool_load_with(pool, demand_of(self.open_request), self.tpot)
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

    def before_prefill(self, state: ClusterState, open_request: OpenRequest, now: float) -> Verdict | None:
        """Check a request when it comes, placed, and in none of the estimates."""
        return self._check("prefill", state, open_request, now)

    def before_decode(self, state: ClusterState, open_request: OpenRequest, now: float) -> Verdict | None:
        """Check a request whose prompt is computed, and which does not decode yet."""
        return self._check("decode", state, open_request, now)

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

    def _check(
        self, before: Literal["prefill", "decode"], state: ClusterState, open_request: OpenRequest, now: float
    ) -> Verdict | None:
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
