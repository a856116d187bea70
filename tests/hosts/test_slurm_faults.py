"""A server on two hosts, which Slurm started, under faults of networks and processes: it heals by itself.

slurmctld is on a host of its own. Clients are on the server's.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_cluster import ENGINE, START, Answer, held, serve_through, summary, written
from slurm_cluster import END, SlurmCluster, missing_slurm
from switch import Rules
from test_slurm import EXAMPLES, REQUEUED, Job

CLIENTS = 4
BEFORE, SHORT, LONG, AFTER = 3.0, 10.0, 60.0, 6.0  # seconds
FAILURE_TIMEOUT = 30.0  # seconds, the default: longer than a short fault, and shorter than a long one
ANSWERED = FAILURE_TIMEOUT + 15.0  # seconds until each request has an answer or an error
LATEST = 60  # seconds after a long fault when TCP may send again what ends a job's step, which the next run has too
CONTROL, FIRST, SECOND = range(3)  # hosts: slurmctld's, and those of the server
MOST_REQUEUED = 3  # times, as the job's script says


class Server:
    """The job that serves: another one where Slurm has requeued it as often as its script allows."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self._folder, self._number = cluster, folder, 0
        self._keys = written(folder / "keys", "ann a-key-of-clients\nwatch a-key-of-observers scopes=metrics")
        self.job = self._submitted()

    def _submitted(self) -> Job:
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        flags = (self._keys, "--tensor=1", *ENGINE)
        job = Job(self.cluster, folder, EXAMPLES / "llama3_server", *flags, host=FIRST)
        job.wait(job.is_ready, START, "the server is ready")
        return job

    def renew(self) -> None:
        if self.job.has(Restarts=MOST_REQUEUED):
            self.cluster.call("scancel", self.job.id)
            self.job.wait(lambda: self.job.has(JobState="CANCELLED"), END, "the job is cancelled")
            self.job = self._submitted()

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.job.id)["Restarts"])

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.cluster.ranks(self.job.id, 2)[rank], number)


@pytest.fixture(scope="module")
def server(hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    reason = missing_slurm()
    if reason is not None:
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 3, slurmd_timeout=30, cred_expire=LATEST) as cluster:
        yield Server(cluster, tmp_path_factory.mktemp("jobs"))


Fault = tuple[Callable[[Server], object], Callable[[Server], object], float]
"""Its beginning, its end, and the seconds between them."""


def _network(seconds: float, **rules: object) -> Fault:
    made = Rules(**rules)
    return lambda server: server.cluster.network.set(made), lambda server: server.cluster.network.set(), seconds


def _blocked(seconds: float, *pairs: tuple[int, int]) -> Fault:
    return _network(seconds, blocked=list(pairs))


def _stopped(seconds: float, rank: int) -> Fault:
    pids: list[int] = []

    def stop(server: Server) -> None:
        pids[:] = [server.cluster.ranks(server.job.id, 2)[rank]]
        os.kill(pids[0], signal.SIGSTOP)

    def resume(server: Server) -> None:
        with contextlib.suppress(ProcessLookupError):  # Slurm has killed it
            os.kill(pids[0], signal.SIGCONT)

    return stop, resume, seconds


def _half_open() -> Fault:
    """A process dies while nothing passes, so that the other end of its connections is not told."""
    cut, heal, _ = _blocked(SHORT, *BOTH)

    def begin(server: Server) -> None:
        cut(server)
        server.signal(1, signal.SIGKILL)

    return begin, heal, LONG


BOTH = [(FIRST, SECOND), (SECOND, FIRST)]
FAULTS = {
    "delay 50 ms": _network(SHORT, delay=0.05),
    "loss 5 %": _network(SHORT, loss=0.05),
    "10 Mbit/s": _network(SHORT, rate=10e6),
    "delay, loss, reordering and rate": _network(SHORT, delay=0.05, loss=0.05, reorder=0.1, rate=10e6),
    "both ways, 10 s": _blocked(SHORT, *BOTH),
    "to the second, 10 s": _blocked(SHORT, BOTH[0]),
    "to the first, 10 s": _blocked(SHORT, BOTH[1]),
    "the second stopped, 10 s": _stopped(SHORT, 1),
    "both ways, 60 s": _blocked(LONG, *BOTH),
    "to the second, 60 s": _blocked(LONG, BOTH[0]),
    "to the first, 60 s": _blocked(LONG, BOTH[1]),
    "half-open": _half_open(),
    "the first stopped, 60 s": _stopped(LONG, 0),
    "the second stopped, 60 s": _stopped(LONG, 1),
    "slurmctld, 10 s": _blocked(SHORT, (CONTROL, SECOND), (SECOND, CONTROL)),
    "slurmctld, 60 s": _blocked(LONG, (CONTROL, SECOND), (SECOND, CONTROL)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_heals_by_itself(fault: str, server: Server) -> None:
    """Requests are answered once, or end with an error in time; then the job answers and holds nothing."""
    begin, end, seconds = FAULTS[fault]
    server.renew()
    job, restarts, cluster = server.job, server.restarts, server.cluster
    before = cluster.ranks(job.id, 2)
    steps = [(BEFORE, lambda: begin(server)), (seconds, lambda: end(server)), (AFTER, lambda: None)]
    with job.host.inside():
        answers = serve_through(job.url, {"authorization": "Bearer a-key-of-clients"}, CLIENTS, steps)
    since = time.monotonic()
    job.wait(lambda: job.is_ready() and job.has(JobState="RUNNING"), REQUEUED + START, "the server is ready again")
    healed = time.monotonic() - since
    under_way = [each for each in answers if not each.error.startswith("ConnectError")]
    print(f"\n{fault}: {summary(under_way)}; {len(answers) - len(under_way)} not connected", end="")
    print(f"; {server.restarts - restarts} requeues; ready after {healed:.0f} s", {e.error[:200] for e in under_way})
    check_ends(answers)
    assert all(each.tokens == each.job.expected for each in job.answers())
    metrics = job.get("/metrics", "a-key-of-observers")
    assert metrics is not None
    assert "num_requests_running" in metrics.text
    assert not held(metrics.text)
    after = cluster.ranks(job.id, 2)
    assert len(after) == 2
    if seconds < FAILURE_TIMEOUT:
        assert after == before
        assert not [each.error for each in answers if each.error]


def check_ends(answers: list[Answer]) -> None:
    """No token is wrong or comes twice, and each request has ended in time."""
    assert not [each for each in answers if each.is_wrong]
    late = [each.seconds for each in answers if each.seconds > ANSWERED]
    assert not late
