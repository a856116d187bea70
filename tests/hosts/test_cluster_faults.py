"""A cluster on four hosts under faults of networks and processes: no client gets a wrong token or one twice.

`make test-hosts` prints a line for each fault, and one for the soak.
"""

import random
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from host_cluster import JOBS, Cluster, check, resident, summary
from switch import Rules

CLIENTS = 6
BEFORE, DURING, AFTER = 3.0, 10.0, 6.0  # seconds
RESTART = 30.0  # seconds that an instance takes until it is back
MOST_GROWTH = 1.1  # of memory, since a quarter of the soak


@pytest.fixture(scope="module")
def cluster(hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        assert len({tuple(job.expected) for job in JOBS}) == len(JOBS)
        yield cluster


Fault = tuple[Callable[[], object], Callable[[], object]]
"""Its beginning and its end."""


def _sent(name: str, begin: signal.Signals, end: signal.Signals) -> Callable[[Cluster], Fault]:
    return lambda cluster: (lambda: cluster.signal(name, begin), lambda: cluster.signal(name, end))


def _killed(name: str) -> Callable[[Cluster], Fault]:
    return lambda cluster: (lambda: cluster.signal(name, signal.SIGKILL), lambda: cluster.start(name))


def on_network(rules: Callable[[Cluster], Rules]) -> Callable[[Cluster], Fault]:
    return lambda cluster: (lambda: cluster.network.set(rules(cluster)), cluster.network.set)


NETWORK_FAULTS = {
    "none": on_network(lambda cluster: Rules()),
    "delay 50 ms": on_network(lambda cluster: Rules(delay=0.05)),
    "loss 5 %": on_network(lambda cluster: Rules(loss=0.05)),
    "reordering 20 %": on_network(lambda cluster: Rules(delay=0.005, reorder=0.2)),
    "10 Mbit/s": on_network(lambda cluster: Rules(rate=10e6)),
    "delay, loss, reordering and rate": on_network(lambda cluster: Rules(0.05, 0.05, 0.1, 10e6)),
    "a decode instance alone": on_network(lambda cluster: cluster.without("d0")),
    "the prefill instance alone": on_network(lambda cluster: cluster.without("p0")),
    "a decode instance is not heard": on_network(lambda cluster: cluster.block(("d0", "router"))),
    "a decode instance does not hear": on_network(lambda cluster: cluster.block(("router", "d0"))),
    "pages do not arrive": on_network(lambda cluster: cluster.block(("p0", "d0"))),
}
PROCESS_FAULTS = {
    "a decode instance stopped": _sent("d1", signal.SIGSTOP, signal.SIGCONT),
    "the prefill instance stopped": _sent("p0", signal.SIGSTOP, signal.SIGCONT),
    "a decode instance killed": _killed("d1"),
    "the prefill instance killed": _killed("p0"),
}
FAULTS = NETWORK_FAULTS | PROCESS_FAULTS


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_client_gets_every_token_once(fault: str, cluster: Cluster) -> None:
    """Streams go on while the fault is there; afterwards all instances are back, and hold nothing."""
    serve_through_fault(cluster, fault, FAULTS[fault](cluster))


def serve_through_fault(cluster: Cluster, name: str, fault: Fault, during: float = DURING) -> None:
    """Have clients ask before, during and after a fault: no client sees it, and the cluster heals by itself."""
    begin, end = fault
    answers = cluster.serve_through(CLIENTS, [(BEFORE, begin), (during, end), (AFTER, lambda: None)])
    since = time.monotonic()
    cluster.wait_until_open()
    cluster.wait_until_settled()
    print(f"\n{name}: {summary(answers)}; settled after {time.monotonic() - since:.0f} s")
    check(answers)


@pytest.mark.slow
def test_soak(cluster: Cluster, request: pytest.FixtureRequest) -> None:
    """Faults at random for `--soak` seconds: nothing is left, and memory is flat in processes that were not killed."""
    seconds: float = request.config.getoption("--soak", 60.0)
    draw, passed, names = random.Random(40), 0.0, list[str]()
    steps: list[tuple[float, Callable[[], object]]] = []
    sizes: list[dict[int, float]] = []

    def measure() -> None:
        sizes.append({each.process.pid: resident(each.process.pid) for each in cluster.members.values()})

    while passed < seconds:
        names.append(draw.choice(list(FAULTS)))
        begin, end = FAULTS[names[-1]](cluster)
        lasting, pause = draw.uniform(2.0, DURING), RESTART if "killed" in names[-1] else draw.uniform(2.0, AFTER)
        steps += [(0.0, begin), (lasting, end), (pause, lambda: None)]
        if passed < seconds / 4 <= passed + lasting + pause:
            steps.append((0.0, measure))
        passed += lasting + pause
    answers = cluster.serve_through(CLIENTS, steps)
    cluster.wait_until_open()
    cluster.wait_until_settled()
    measure()
    growth = [sizes[1][pid] / size for pid, size in sizes[0].items() if pid in sizes[1]]
    print(f"\nsoak, {passed:.0f} s, {len(names)} faults: {summary(answers)}; memory grew by {max(growth):.2f} at most")
    check(answers)
    assert max(growth) < MOST_GROWTH
