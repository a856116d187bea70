"""Instances of a simulated cluster over all their lives, as the conductor knows them."""

from collections.abc import Sequence as List
from typing import cast

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.instance import Report
from longctx.cluster.prefix_index.index import Tier
from longctx.serving.kv_cache.page_pool import Key
from longctx.simulation.cluster.cluster_instance import ClusterInstance
from longctx.simulation.cluster.core import ClusterCore
from longctx.simulation.cluster.settings import ClusterSettings
from longctx.simulation.event_loop import EventLoop

_KEY_BYTES = 8  # of a page's key, by which the conductor and KV events know it


def block_keys(keys: List[Key]) -> np.ndarray:
    """Return the keys by which the conductor knows pages, uint64 `[pages]`."""
    return np.frombuffer(b"".join([key[:_KEY_BYTES] for key in keys]), ">u8").astype(np.uint64)


def _block_key(key: Key) -> int:
    return int.from_bytes(key[:_KEY_BYTES], "big")


class Node:
    """An instance: a core while it lives, and what it tells of its cache.

    Args:
      keep_steps: whether cores keep their steps.

    Attributes:
      core: of its present life; None: it is dead.
      lives: all its cores.
    """

    def __init__(
        self,
        spec: ClusterInstance,
        conductor: Conductor,
        loop: EventLoop,
        seed: int,
        settings: ClusterSettings,
        keep_steps: bool,
    ) -> None:
        self.spec, self.role, self.core = spec, spec.role, cast(ClusterCore | None, None)
        self.lives: list[ClusterCore] = []
        self._conductor, self._loop, self._seed = conductor, loop, seed
        self._settings, self._keep_steps = settings, keep_steps
        self._kept: dict[int, Key] = {}  # in the host's memory, by what the conductor knows them by, if it swaps

    def join(self) -> None:
        """Begin a life in its role, with an empty cache."""
        self.core = core = ClusterCore(self.spec, self._loop, self._seed, self._keep_steps)
        self.lives.append(core)
        self._kept.clear()
        self._conductor.join(self.spec.spec(self.role, self._settings.swaps), self._loop.now)
        core.listen(lambda tier, new, gone: self._apply_change(core, cast(Tier, tier), new, gone))

    def swap_out(self, keys: np.ndarray) -> None:
        """Drop blocks, uint64 `[blocks]`, from the host's memory, as far as it has them."""
        if self.core is not None:
            self.core.discard([self._kept[key] for key in keys.tolist() if key in self._kept])

    def kill(self) -> None:
        """End its life; its sub-requests have been cancelled."""
        assert self.core is not None
        self.core.kill()
        self.core = None

    def report(self) -> None:
        """Tell the conductor what it has to do."""
        core = self.core
        if core is not None:
            count, tokens = core.decodes()
            report = Report(core.queue_seconds, count, tokens, core.known)
            self._conductor.report(self.spec.name, report, self._loop.now)

    def _apply_change(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if self._settings.swaps and tier == "host":
            self._kept.update((_block_key(key), key) for key in new)
            for key in gone:
                self._kept.pop(_block_key(key), None)
        if self._settings.event_seconds:
            new, gone = list(new), list(gone)
            self._loop.at(self._loop.now + self._settings.event_seconds, lambda: self._tell(core, tier, new, gone))
        else:
            self._tell(core, tier, new, gone)

    def _tell(self, core: ClusterCore, tier: Tier, new: List[Key], gone: List[Key]) -> None:
        if core is not self.core:
            return  # it has died
        if new:
            self._conductor.index.store(self.spec.name, tier, map(_block_key, new))
        if gone:
            self._conductor.index.remove(self.spec.name, tier, map(_block_key, gone))
