"""Instances that Ray places on three hosts, beside a head with the router, under faults of networks and processes.

Ray is in an environment of its own: `make .venv/installed-ray`.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_cluster import ROOT, START, Cluster
from network import Host, end_all_with, processes_with
from test_cluster_faults import DURING, FAULTS, Fault, on_network, serve_through_fault

LONG = 60.0  # seconds
NODE = "LONGCTX_RAY_NODE"  # variable of all processes of a node
PYTHON = Path(sys.prefix) / "ray" / "bin" / "python"
CPUS = 2  # of a node, as Ray believes; an instance takes one


class Node:
    """`ray start --block`, which is run again whenever it ends, as a service manager does."""

    def __init__(self, host: Host, log: Path, flags: list[str]) -> None:
        self.mark = {NODE: str(log)}
        self._host, self._log = host, log
        ray = [str(PYTHON), str(PYTHON.with_name("ray")), "start", "--block", "--object-store-memory=80000000"]
        flags = [f"--node-ip-address={host.address}", *flags]
        self._command = ["sh", "-c", 'while :; do "$@"; sleep 1; done', "sh", *ray, *flags]

    def start(self) -> None:
        own = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0", **self.mark}
        with self._host.inside(), self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, env=os.environ | own, stdout=log, stderr=log)

    def is_started(self) -> bool:
        return "Ray runtime started" in self._log.read_text()

    def signal(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            end_all_with(**self.mark)
            self._process.wait()
            return
        for pid, _ in processes_with(**self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class RayCluster(Cluster):
    """Router, and Ray's head without CPUs, on the first host; an instance on each of the others, as Ray likes."""

    NAMES = ("router", "w0", "w1", "w2")
    LAUNCHER, PYTHON = "ray", str(PYTHON)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = tempfile.mkdtemp(prefix="ray")  # paths of sockets must be short
        self._stopped: dict[str, int] = {}
        self.nodes: list[Node] = []

    def _start(self) -> None:
        head = f"{self.network.hosts[0].address}:6379"
        for name, host in zip(self.NAMES, self.network.hosts, strict=True):
            flags = [f"--address={head}", f"--num-cpus={CPUS}"]
            if not self.nodes:
                flags = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._files}"]
                flags += ["--num-cpus=0"]
            self.nodes.append(node := Node(host, self._folder / f"{name}.ray", flags))
            node.start()
            self.wait(node.is_started, START, lambda: "Ray's node is started")  # two at a time take the same sockets
        super()._start()

    def _tables(self) -> list[str]:
        lines = ["[ray]", f"address = '{self.network.hosts[0].address}:6379'", "strategy = 'SPREAD'"]
        for name, role in self.ROLES.items():
            lines += ["[[instances]]", f"name = '{name}'", f"role = '{role}'"]
        return lines

    def _add_instances(self) -> None:
        """Ray does."""

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            node.signal(signal.SIGCONT)
        super().__exit__()
        for node in self.nodes:
            node.signal(signal.SIGKILL)
        shutil.rmtree(self._files)

    def access(self, name: str) -> tuple[str, dict[str, str]]:
        if name in self.members:
            return super().access(name)
        _, command = self._process(name)
        file = next(each for each in command if each.startswith("--admin-key-file="))
        _, key = Path(file.partition("=")[2]).read_text().split()
        return self.instances()[name]["url"], {"authorization": f"Bearer {key}"}

    def _process(self, name: str) -> tuple[int, list[str]]:
        """Return the process id and the command of an instance."""
        host, port = re.findall(r"http://(.*):(\d+)", self.instances()[name]["url"])[0]
        for pid, _ in processes_with(**self.node(name).mark):
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if {"longctx", "serve", f"--host={host}", f"--port={port}"} <= set(command):
                return pid, command
        raise AssertionError(f"{name} does not run")

    def number(self, name: str) -> int:
        if name in self.NAMES:
            return self.NAMES.index(name)
        url = self.instances()[name]["url"]
        return next(i for i, host in enumerate(self.network.hosts) if f"//{host.address}:" in url)

    def node(self, name: str) -> Node:
        """Return the node on which an instance is."""
        return self.nodes[self.number(name)]

    def signal(self, name: str, number: signal.Signals) -> None:
        if number != signal.SIGCONT:
            self._stopped[name] = self._process(name)[0]
        os.kill(self._stopped[name], number)

    def start(self, name: str) -> None:
        """Ray does."""

    def actor(self, name: str) -> int:
        """Return the process id of the actor that runs an instance."""
        pid, _ = self._process(name)
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def cluster(hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    if not PYTHON.exists():
        pytest.skip("Ray is not there: make .venv/installed-ray")
    with RayCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def _node(begin: signal.Signals, end: Callable[[Node], object]) -> Callable[[RayCluster], Fault]:
    def made(cluster: RayCluster) -> Fault:
        node = cluster.node("d1")
        return lambda: node.signal(begin), lambda: end(node)

    return made


def _actor_stopped(cluster: RayCluster) -> Fault:
    pid = cluster.actor("d1")
    return lambda: os.kill(pid, signal.SIGSTOP), lambda: _resume(pid)


def _resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed
        os.kill(pid, signal.SIGCONT)


RAY_FAULTS: dict[str, tuple[Callable[[RayCluster], Fault], float]] = {
    **{name: (fault, DURING) for name, fault in FAULTS.items()},
    "an actor stopped, 60 s": (_actor_stopped, LONG),
    "a node stopped": (_node(signal.SIGSTOP, lambda node: node.signal(signal.SIGCONT)), DURING),
    "a node stopped, 60 s": (_node(signal.SIGSTOP, lambda node: node.signal(signal.SIGCONT)), LONG),
    "a node alone, 60 s": (on_network(lambda cluster: cluster.without("d1")), LONG),
    "a node is not heard, 60 s": (on_network(lambda cluster: cluster.block(("d1", "router"))), LONG),
    "a node does not hear, 60 s": (on_network(lambda cluster: cluster.block(("router", "d1"))), LONG),
    "a node killed": (_node(signal.SIGKILL, Node.start), DURING),
    "a node killed for 60 s": (_node(signal.SIGKILL, Node.start), LONG),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", RAY_FAULTS)
def test_every_client_gets_every_token_once_from_instances_of_ray(fault: str, cluster: RayCluster) -> None:
    """Streams go on while the fault is there; afterwards all instances are back, and hold nothing."""
    made, during = RAY_FAULTS[fault]
    serve_through_fault(cluster, f"Ray, {fault}", made(cluster), during)
