"""`RoleRule`: which instance changes from prefill to decode or back, by load.

Source: Mooncake 7.1.1 leaves it to future work ("more flexible deployment and conversion methods"); the rule is ours.
"""

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Literal, NamedTuple

from longctx.cluster.conductor.config import RoleConfig
from longctx.cluster.conductor.decision import RoleChange
from longctx.cluster.conductor.load import Loads, loads
from longctx.cluster.conductor.state import ClusterState

Pool = Literal["prefill", "decode"]


class Candidate(NamedTuple):
    """An instance of one role, as the rule sees it.

    Attributes:
      requests: that it has of its role: prompts to compute, or requests that decode there or will.
      seconds: predicted, of its queue; or between the tokens of its batch.
      is_open: it takes new requests, so it is one of its pool.
      is_settled: it has no work of another role left.
    """

    name: str
    role: Pool
    requests: int
    seconds: float
    is_open: bool = True
    is_settled: bool = True


class RoleRule:
    """Changes a role when one pool has been overloaded for a while, and the other has had room all the time.

    The load of one pool must have been above `high` and that of the other below `low` at each look for `seconds`. The
    instance with least to lose changes: of the fewest requests, then of the shortest queue. Nothing changes for
    `cool_down` after a change, while an instance still ends work of its former role, if the giving pool has one
    instance only, or if it would be above `high` with one fewer.
    """

    def __init__(self, config: RoleConfig) -> None:
        self._config = config
        self._short: Pool | None = None
        self._since = 0.0
        self._changed = -inf

    def change(self, state: ClusterState, now: float) -> RoleChange | None:
        """Look at the cluster; whoever drives asks every second or so. The change is made by `Conductor.set_role`."""
        return self.decide(loads(state, now), candidates(state, now), now)

    def decide(self, loads: Loads, instances: Iterable[Candidate], now: float) -> RoleChange | None:
        """The rule, on plain data."""
        config = self._config
        short: Pool | None = None
        if loads.prefill > config.high and loads.decode < config.low:
            short = "prefill"
        elif loads.decode > config.high and loads.prefill < config.low:
            short = "decode"
        if short != self._short:
            self._short, self._since = short, now
        if short is None or now - self._since < config.seconds or now - self._changed < config.cool_down:
            return None
        instances = list(instances)
        giving = [each for each in instances if each.role != short and each.is_open]
        load = loads.decode if short == "prefill" else loads.prefill
        if not all(each.is_settled for each in instances) or len(giving) < 2:
            return None
        if load * len(giving) / (len(giving) - 1) > config.high:
            return None
        chosen = min(giving, key=lambda each: (each.requests, each.seconds, each.name))
        self._changed, self._short = now, None
        return RoleChange(chosen.name, short)


def candidates(state: ClusterState, now: float) -> list[Candidate]:
    """The instances that do one of both, and what they have to do."""
    prefills = Counter(each.assignment.prefill for each in state.prefilling.values())
    open_requests = [*state.prefilling.values(), *state.decoding.values()]
    decodes = Counter(each.assignment.decode for each in open_requests)
    found = []
    for each in state.instances.values():
        if each.role != "both":
            name, is_prefill = each.name, each.role == "prefill"
            own, other = (prefills, decodes) if is_prefill else (decodes, prefills)
            seconds = each.queue(now) if is_prefill else each.tbt(each.expected)
            found.append(Candidate(name, each.role, own[name], seconds, not each.is_draining, not other[name]))
    return found
