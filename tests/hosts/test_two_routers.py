"""Two routers over the same instances, killed in turn: clients that try the other one get every answer."""

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from host_cluster import Cluster, check, summary

CLIENTS = 6
ALIVE = 12.0  # seconds that a router takes until it knows all instances and what they have
TURNS = 3


class TwoRouters(Cluster):
    """Clients are on the first router's host, and its processes die, not the host."""

    NAMES = ("router", "other", "p0", "d0", "d1")
    ROUTERS = ("router", "other")


@pytest.mark.slow
def test_clients_that_retry_see_no_error_while_routers_are_killed_in_turn(hosts: None, tmp_path: Path) -> None:
    """A router that is started again knows the instances and their blocks; nothing is left of either one's requests."""
    draw = random.Random(42)
    with TwoRouters(tmp_path) as cluster:
        steps: list[tuple[float, Callable[[], object]]] = []
        for turn in range(TURNS):
            member = cluster.members[cluster.ROUTERS[turn % 2]]
            steps += [
                (draw.uniform(2.0, 4.0), lambda member=member: member.signal(signal.SIGKILL)),
                (draw.uniform(1.0, 3.0), member.start),
                (ALIVE, lambda: None),
            ]
        answers = cluster.serve_through(CLIENTS, steps)
        cluster.wait_until_open()
        cluster.wait_until_settled()
        retries = sum(each.retries for each in answers)
        print(f"\n{TURNS} kills of routers: {summary(answers)}; {retries} retries")
        check(answers)
        assert not any(each.is_refused for each in answers)
        assert retries
        first, second = (
            {name: each["blocks"] for name, each in cluster.instances(router).items()} for router in cluster.ROUTERS
        )
        assert first == second
        assert any(sum(blocks.values()) for blocks in first.values())
