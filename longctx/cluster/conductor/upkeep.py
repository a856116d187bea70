"""Changes that a conductor makes between requests: roles of instances by load, and cold blocks that are swapped out.

Source: Mooncake, sections 1.1 and 3 (cold blocks). Of roles 7.1.1 says only "more flexible deployment and conversion
methods", as future work; the rule is ours.
"""

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from longctx.cluster.conductor.config import ConductorConfig, RoleConfig
from longctx.cluster.conductor.instance import InstanceSpec
from longctx.cluster.conductor.overload import loads
from longctx.cluster.conductor.request import RoleChange
from longctx.cluster.conductor.state import ClusterState, InstanceState
from longctx.cluster.prefix_index.index import TIERS, PrefixIndex, Tier

Pool = Literal["prefill", "decode"]


class RoleRule:
    """Rule that changes a role when one pool has been overloaded for a while, and the other has had room all the time.

    The load of one pool must have been above `high` and that of the other below `low` at each look for `seconds`. The
    instance with the fewest requests changes, and of equal ones that with the shortest queue. Nothing changes for
    `cool_down` after a change, while an instance still ends work of its former role, if the giving pool has one
    instance only, or if it would be above `high` with one fewer.
    """

    def __init__(self, config: RoleConfig) -> None:
        self._config = config
        self._short: Pool | None = None
        self._since = 0.0
        self._changed = -inf

    def change(self, state: ClusterState, now: float) -> RoleChange | None:
        """Return a change, which the driver makes by `Conductor.set_role`; it asks about every second."""
        config, pools = self._config, loads(state, now)
        short: Pool | None = None
        if pools.prefill > config.high and pools.decode < config.low:
            short = "prefill"
        elif pools.decode > config.high and pools.prefill < config.low:
            short = "decode"
        if short != self._short:
            self._short, self._since = short, now
        if short is None or now - self._since < config.seconds or now - self._changed < config.cool_down:
            return None
        prefills = Counter(each.assignment.prefill for each in state.prefilling.values())
        decodes = Counter(each.assignment.decode for each in (*state.prefilling.values(), *state.decoding.values()))
        instances = [each for each in state.instances.values() if each.role != "both"]
        giving = [each for each in instances if each.role != short and not each.is_draining]
        load, own = (pools.decode, decodes) if short == "prefill" else (pools.prefill, prefills)
        # Work of a former role, that has not ended.
        if len(giving) < 2 or any((decodes if each.role == "prefill" else prefills)[each.name] for each in instances):
            return None
        if load * len(giving) / (len(giving) - 1) > config.high:
            return None

        def loss(each: InstanceState) -> tuple[int, float, str]:
            return own[each.name], each.tbt(each.expected) if short == "prefill" else each.queue(now), each.name

        self._changed, self._short = now, None
        return RoleChange(min(giving, key=loss).name, short)


class Swap(NamedTuple):
    """Blocks that an instance should move out of a tier: to its next one, or nowhere.

    Attributes:
      keys: uint64 `[blocks]`.
    """

    instance: str
    keys: np.ndarray
    tier: Tier


class Swapper:
    """Search for cold blocks on instances whose tiers are nearly full.

    Blocks that other instances have too go first, then the longest unused ones. A block leaves one instance at a time:
    otherwise its last replica would go with the others.
    """

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        self._last: set[int] = set()  # keys of the last swaps, which KV events confirm later

    def swaps(self, specs: Iterable[InstanceSpec], index: PrefixIndex, now: float) -> list[Swap]:
        """Return the blocks that should be swapped out now."""
        found, going = [], set[int]()
        for spec in specs:
            for tier, room in zip(TIERS, spec.cache_blocks, strict=True):
                blocks = index.blocks(spec.name, tier)
                if not room or blocks <= self._config.swap_above * room:
                    continue
                count = blocks - int(self._config.swap_below * room)
                keys = self._coldest(spec.name, tier, index, count, going, now)
                if keys:
                    going.update(keys)
                    found.append(Swap(spec.name, np.array(keys, np.uint64), tier))
        self._last = going
        return found

    def _coldest(self, name: str, tier: Tier, index: PrefixIndex, count: int, going: set[int], now: float) -> list[int]:
        before, away = now - self._config.swap_seconds, going | self._last
        keys: dict[int, None] = {}  # in order
        for held_by in (2, 1):
            limit = count + len(away) if held_by == 2 else count + len(away) + len(keys)
            for key in index.cold(name, tier, before, limit, held_by).tolist():
                if len(keys) < count and key not in away:
                    keys[key] = None
        return [*keys]
