"""An instance of two processes on two hosts, between which one direction of the network fails."""

from pathlib import Path
from types import MappingProxyType

import pytest
from host_cluster import Cluster, check, summary, written

FAILURE_TIMEOUT = 12.0  # seconds


class GroupCluster(Cluster):
    """The router's instance "g0" is a group of g0 and g1, of one pipeline stage each; "d0" is one process."""

    NAMES = ("router", "g0", "g1", "d0")
    ROLES = MappingProxyType({"g0": "both", "d0": "both"})

    def _add_instances(self) -> None:
        secret = written(self._folder / "group", "g" * 40)
        group = ["--stage", "2", "--num-processes", "2", "--coordinator", f"{self.hosts['g0'].address}:6000"]
        group += ["--group-secret-file", secret, "--failure-timeout", str(FAILURE_TIMEOUT)]
        for number, name in enumerate(("g0", "g1")):
            self.add(name, [*self.instance_flags(name), *group, "--process-id", str(number)])
        self.add("d0", self.instance_flags("d0"))


@pytest.mark.slow
@pytest.mark.parametrize("way", [("g1", "g0"), ("g0", "g1")])
def test_streams_of_a_group_that_is_cut_go_on_elsewhere(way: tuple[str, str], hosts: None, tmp_path: Path) -> None:
    """Both processes end, and no client sees an error, a wrong token or one twice."""
    with GroupCluster(tmp_path) as cluster:
        group = [cluster.members[name] for name in ("g0", "g1")]

        def cut() -> None:
            assert cluster.running("g0") > 0, "nothing is on the instance whose network shall fail"
            assert cluster.left(), "instances with requests hold nothing"
            cluster.network.set(cluster.block(way))

        answers = cluster.serve_through(6, [(5.0, cut), (1.5 * FAILURE_TIMEOUT, lambda: None)])
        print(f"\nfrom {way[0]} to {way[1]}: {summary(answers)}; statuses {[each.process.poll() for each in group]}")
        assert {each.process.wait(10) for each in group} <= {1, 70}, [each.log for each in group]
        check(answers)
        cluster.network.set()
        for each in group:
            each.start()
        cluster.wait_until_open()
        cluster.wait_until_settled()
