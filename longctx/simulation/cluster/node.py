"""`Node`: an instance of a simulated cluster over all its lives, as the conductor hears of it."""

from collections.abc import Sequence as List
from typing import cast

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.instance import Costs, Report, Role
from longctx.cluster.prefix_index.index import PrefixIndex
from longctx.cluster.prefix_index.tiers import Tier
from longctx.serving.kv_cache.page_pool import Key
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.core import ClusterCore
from longctx.simulation.event_loop import EventLoop

_KEY = 8  # bytes of a page's key by which the conductor knows it


def block_key(key: Key) -> int:
    """By which the conductor knows a page."""
    return int.from_bytes(key[:_KEY], "little")


def block_keys(keys: List[Key]) -> np.ndarray:
    """By which the conductor knows pages, uint64 `[pages]`."""
    return np.frombuffer(b"".join([key[:_KEY] for key in keys]), "<u8").astype(np.uint64, copy=False)


class Node:
    """An instance: a core while it lives, and what it tells of its cache.

    Args:
      event_seconds: after which the index hears of a change.

    Attributes:
      core: of its present life; None: it is dead.
      lives: all its cores.
      keep_steps: whether they keep their steps.
    """

    def __init__(
        self, spec: ClusterInstance, costs: Costs, loop: EventLoop, index: PrefixIndex, seed: int, event_seconds: float
    ) -> None:
        self.spec, self.role, self.core = spec, spec.role, cast(ClusterCore | None, None)
        self.lives: list[ClusterCore] = []
        self._costs, self._loop, self._index, self._seed = costs, loop, index, seed
        self._event_seconds, self.keep_steps = event_seconds, False

    def join(self, conductor: Conductor, role: Role) -> None:
        """Begin a life, with an empty cache."""
        self.role = role
        self.core = core = ClusterCore(self.spec, self._loop, self._seed, self.keep_steps)
        self.lives.append(core)
        conductor.join(self.spec.spec(self._costs, role), self._loop.now)
        core.listen(lambda tier, new, gone: self._hear(core, cast(Tier, tier), new, gone))

    def kill(self) -> None:
        """End its life; its legs have been cancelled."""
        assert self.core is not None
        self.core.kill()
        self.core = None

    def report(self, conductor: Conductor) -> None:
        """Tell the conductor what it has to do."""
        core = self.core
        if core is not None:
            count, tokens = core.decodes()
            report = Report(max(0.0, core.prefill_seconds), count, tokens, core.known)
            conductor.report(self.spec.name, report, self._loop.now)

    def _hear(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if self._event_seconds:
            new, gone = list(new), list(gone)
            self._loop.at(self._loop.now + self._event_seconds, lambda: self._tell(core, tier, new, gone))
        else:
            self._tell(core, tier, new, gone)

    def _tell(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if core is not self.core:
            return  # it has died
        if new:
            self._index.store(self.spec.name, tier, map(block_key, new))
        if gone:
            self._index.remove(self.spec.name, tier, map(block_key, gone))
