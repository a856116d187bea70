"""Instances that register with a router over a network that fails, and with one that is killed and comes back."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from host_cluster import PORT, START, Cluster, check, summary, written
from switch import Rules

CLIENTS = 4


class JoiningCluster(Cluster):
    """The router's file names no instance: they register by themselves.

    `network` has its rules from before any process starts.
    """

    NAMES = ("router", "p0", "d0")
    ROLES = MappingProxyType({"p0": "prefill", "d0": "decode"})
    rules = Rules()

    def _tables(self) -> list[str]:
        return []

    def _add_instances(self) -> None:
        self.network.set(self.rules)
        super()._add_instances()

    def instance_flags(self, name: str) -> list[str]:
        router, own = (f"http://{self.hosts[each].address}:{PORT}" for each in ("router", name))
        join = ["--join", router, "--join-url", own, "--join-name", name, "--join-role", self.ROLES[name]]
        return [*super().instance_flags(name), *join, "--join-key-file", self._key]


class LossyCluster(JoiningCluster):
    """One packet in five is lost while instances register."""

    rules = Rules(delay=0.05, loss=0.2)


@pytest.fixture(scope="module")
def cluster(hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyCluster]:
    with LossyCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.mark.slow
def test_instances_register_where_packets_are_lost(cluster: LossyCluster) -> None:
    cluster.network.set()
    answers = cluster.serve_through(CLIENTS, [(4.0, lambda: None)])
    print(f"\nafter loss of 20 %: {summary(answers)}")
    check(answers)
    assert not any(each.is_refused for each in answers)


@pytest.mark.slow
def test_instances_register_again_with_a_router_that_comes_back(cluster: LossyCluster) -> None:
    router = cluster.members["router"]
    router.signal(signal.SIGKILL)
    router.start()
    cluster.wait_until_open()
    check(cluster.serve_through(CLIENTS, [(3.0, lambda: None)]))


@pytest.mark.slow
@pytest.mark.parametrize("way", [("d0", "router"), ("router", "d0")])
def test_an_instance_registers_after_a_partition(way: tuple[str, str], cluster: LossyCluster) -> None:
    """It is dead while nothing passes in one direction, and is back by itself, however the router forgot it."""
    cluster.network.set(cluster.block(way))
    cluster.wait(lambda: cluster.states().get("d0") == "dead", 30.0, lambda: "it is dead")
    cluster.members["router"].signal(signal.SIGKILL)  # what is back has never heard of it
    cluster.members["router"].start()
    cluster.wait(lambda: cluster.states().get("p0") == "open", START, lambda: "the other one has registered")
    assert cluster.states().get("d0") != "open"
    cluster.network.set()
    cluster.wait_until_open()
    check(cluster.serve_through(CLIENTS, [(3.0, lambda: None)]))


@pytest.mark.slow
def test_one_that_does_not_know_the_secret_is_no_member(cluster: LossyCluster, tmp_path: Path) -> None:
    flags = cluster.instance_flags("d0")
    flags[flags.index("--kv-secret-file") + 1] = written(tmp_path / "other", "o" * 40)
    flags[flags.index("--join-name") + 1] = "stranger"
    cluster.members["d0"].end()
    cluster.add("d0", flags)
    try:
        cluster.wait(lambda: "does not know the secret" in cluster.members["d0"].log, START, lambda: "it says why")
        assert set(cluster.states()) <= {"p0", "d0"}
        assert cluster.states().get("d0") != "open"
    finally:
        cluster.members["d0"].end()
        cluster.add("d0", cluster.instance_flags("d0"))
    cluster.wait_until_open()
