"""Two routers over the same instances, killed in turn: clients get every answer from the other one, or its rest."""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from host_cluster import Cluster, check, summary

CLIENTS = 6
ALIVE = 5.0  # seconds for which clients go on at the end
TURNS = 3


class TwoRouters(Cluster):
    """Clients are on the first router's host, and its processes die, not the host."""

    NAMES = ("router", "other", "p0", "d0", "d1")
    ROUTERS = ("router", "other")

    def is_open(self, router: str) -> bool:
        """Whether a router answers, and knows all instances."""
        try:
            return self.states(router) == dict.fromkeys(self.ROLES, "open")
        except httpx.HTTPError:
            return False


@pytest.mark.slow
@pytest.mark.parametrize("is_resumable", [False, True])
def test_clients_that_retry_see_no_error_while_routers_are_killed_in_turn(
    hosts: None, tmp_path: Path, is_resumable: bool
) -> None:
    """A router that is started again knows the instances and their blocks; nothing is left of either one's requests.

    Clients of resumable streams ask for the rest alone, and get each event once.
    """
    draw = random.Random(42)
    with TwoRouters(tmp_path) as cluster:

        def steps() -> Iterator[tuple[float, Callable[[], object]]]:
            for turn in range(TURNS):
                name = cluster.ROUTERS[turn % 2]
                yield draw.uniform(2.0, 4.0), lambda name=name: cluster.members[name].signal(signal.SIGKILL)
                yield draw.uniform(1.0, 3.0), cluster.members[name].start
                while not cluster.is_open(name):
                    yield 0.5, lambda: None
            yield ALIVE, lambda: None

        answers = cluster.serve_through(CLIENTS, steps(), is_resumable)
        cluster.wait_until_open()
        cluster.wait_until_settled()
        retries, resumed = sum(each.retries for each in answers), sum(each.resumed for each in answers)
        print(f"\n{TURNS} kills of routers: {summary(answers)}; {retries} retries, {resumed} streams resumed")
        check(answers)
        assert not any(each.is_refused for each in answers)
        assert retries
        assert bool(resumed) == is_resumable
        first, second = (
            {name: each["blocks"] for name, each in cluster.instances(router).items()} for router in cluster.ROUTERS
        )
        assert first == second
        assert any(sum(blocks.values()) for blocks in first.values())
