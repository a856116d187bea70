"""Process groups whose processes are threads of the test: everything but `jax.distributed`."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from longctx.serving.distributed import ProcessGroup, rendezvous
from longctx.serving.distributed.environment import ClusterEnv


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(
    coordinator: str,
    num_processes: int,
    process_id: int,
    failure: float = 5.0,
    join: float = 60.0,
    group_secret: str | None = None,
) -> ProcessGroup:
    act = rendezvous.lead if process_id == 0 else rendezvous.join
    options = rendezvous.RendezvousOptions(failure, join, group_secret=group_secret)
    return act(ClusterEnv(coordinator, num_processes, process_id), options)[0]


def run_processes(
    num_processes: int,
    act: Callable[[ProcessGroup], Any],
    join: float = 60.0,
    group_secret: str | None = None,
    host: str = "127.0.0.1",
) -> list[Any]:
    """Run `act` in each process of a group; returns what each returned or raised."""
    coordinator = f"{host}:{free_port()}"

    def run(process_id: int) -> Any:
        with meet(coordinator, num_processes, process_id, join=join, group_secret=group_secret) as group:
            return act(group)

    return in_threads([lambda i=i: run(i) for i in range(num_processes)])


def in_threads(acts: list[Callable[[], Any]]) -> list[Any]:
    """Run callables at the same time; returns what each returned or raised."""

    def outcome(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(outcome, acts))
