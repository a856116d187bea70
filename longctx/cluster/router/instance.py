"""`Instance`: an engine's server as the router sees it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from longctx.cluster.conductor.instance import Role
from longctx.cluster.router.instance_client import InstanceClient, LoadInfo, ServerInfo
from longctx.cluster.router.instance_costs import InstanceCosts

State = Literal["joining", "open", "draining", "dead", "excluded"]
"""Never reached yet; taking requests; finishing what it has; not there any more; not to be trusted."""


@dataclass(eq=False)
class Instance:
    """An instance, and what runs there.

    Attributes:
      name: no other instance of the cluster has it.
      role: that it has, or will have when it joins.
      reason: why it is not open.
      is_held: an administrator drains it: it does not open by itself.
      retry_at: when it may join again, by `time.monotonic`.
      num_excluded: how often in a row it was excluded.
      info, costs, load: what it said last.
      heard: when that was, by `time.monotonic`.
      followers: tasks that read events of requests there; all are cancelled when it is lost.
    """

    name: str
    client: InstanceClient
    role: Role
    state: State = "joining"
    reason: str = "it has not been reached yet"
    is_held: bool = False
    retry_at: float = 0.0
    num_excluded: int = 0
    missed: int = 0
    info: ServerInfo | None = None
    costs: InstanceCosts | None = None
    load: LoadInfo | None = None
    heard: float = field(default_factory=time.monotonic)
    followers: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def is_member(self) -> bool:
        """Whether the conductor knows it."""
        return self.state in ("open", "draining")

    def lose(self) -> None:
        """Break off whatever is read from it."""
        for task in tuple(self.followers):
            if not task.cancelling():
                task.cancel()
