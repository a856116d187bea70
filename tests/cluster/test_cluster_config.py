"""`cluster.toml`: what it says, and what is refused by name."""

from pathlib import Path

import pytest

from longctx.cluster.conductor.config import RoleConfig
from longctx.cluster.config import LAUNCHERS, InstanceEntry, read_cluster

WHOLE = """
[cluster]
policy = "cache_aware"
admission = "predicted_early_rejection"
ttft = 20
tpot = 0.2
balancing_threshold = 2.0
launcher = "ray"
report_seconds = 0.5
bandwidth = 25e9
[engine]
model = "longctx-tiny"
page_size = 16
[roles]
high = 0.8
[ray]
gpus = 8
strategy = "PACK"
[[instances]]
name = "reader"
role = "prefill"
count = 2
flags = { tensor = 2 }
[[instances]]
role = "decode"
[[instances]]
role = "decode"
url = "http://10.0.0.5:8000/"
[simulation]
model = "llama-2-70b"
page_size = 512
bandwidth = 1e11
"""
LEAST = '[[instances]]\nrole = "both"\n'


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_all_that_a_file_may_say(tmp_path: Path) -> None:
    found = read_cluster(written(tmp_path, WHOLE))
    assert [(each.name, each.role, each.url) for each in found.instances] == [
        ("reader-0", "prefill", None),
        ("reader-1", "prefill", None),
        ("decode-0", "decode", None),
        ("decode-1", "decode", "http://10.0.0.5:8000"),
    ]
    assert found.instances[0].flags == {"tensor": 2}
    assert (found.conductor.policy, found.conductor.ttft, found.conductor.balancing_threshold) == ("cache_aware", 20, 2)
    assert found.conductor.roles == RoleConfig(high=0.8)
    assert (found.launcher, found.report_seconds, found.bandwidth) == ("ray", 0.5, 25e9)
    assert (found.ray.gpus, found.ray.cpus, found.ray.strategy) == (8, 1, "PACK")
    assert found.engine == {"model": "longctx-tiny", "page_size": 16}
    assert found.simulation == {"model": "llama-2-70b", "page_size": 512, "bandwidth": 1e11}
    assert [found.count(role) for role in ("prefill", "decode", "both")] == [2, 2, 0]


def test_the_least_that_it_must_say(tmp_path: Path) -> None:
    found = read_cluster(written(tmp_path, LEAST))
    assert found.instances == (InstanceEntry("both-0", "both"),)
    assert found.launcher == LAUNCHERS[0] == "processes"
    assert found.conductor.roles is None
    assert read_cluster(written(tmp_path, '[cluster]\nlauncher = "static"\n')).instances == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cluster]\npolcy = 1\n" + LEAST, r"cluster.toml: \[cluster\] unknown key 'polcy': did you mean 'policy'"),
        ('[cluster]\npolicy = "best"\n' + LEAST, r"\[cluster\] policy must be one of"),
        ("[cluster]\nttft = 0\n" + LEAST, r"\[cluster\] ttft must be"),
        ('[cluster]\ntpot = "fast"\n' + LEAST, r"\[cluster\] tpot must be"),
        ("[cluster]\nbandwidth = -1\n" + LEAST, r"\[cluster\] bandwidth must be"),
        ('[cluster]\nlauncher = "slurm"\n' + LEAST, r"\[cluster\] launcher must be one of processes, ray, static"),
        ("[clutser]\nttft = 1\n" + LEAST, "unknown key 'clutser': did you mean 'cluster'"),
        ("cluster = 3\n" + LEAST, r"cluster must be a table"),
        ("instances = 3", r"instances must be tables, \[\[instances\]\]"),
        (
            '[[instances]]\nrole = "reader"',
            r"\[\[instances\]\] 1: role must be one of prefill, decode, both, got 'read",
        ),
        ("[[instances]]\ncount = 1", "1: role must be"),
        (LEAST + 'rols = "both"\n', "unknown key 'rols': did you mean 'role'"),
        (LEAST + "count = 0", "1: count must be"),
        (LEAST + "count = 1.5", "1: count must be"),
        (LEAST + "count = 5000", "1: count must be"),
        (LEAST + 'name = ""', "1: name must be"),
        (LEAST + 'name = "a"\n' + LEAST + 'name = "a"', "name must be one instance's alone, and 'a' is 2 times"),
        (LEAST + 'name = "a-0"\n' + LEAST + 'name = "a"\ncount = 1', "name must be one instance's alone, and 'a-0'"),
        (LEAST + 'url = "10.0.0.5:8000"', "1: url must be http://HOST:PORT"),
        (LEAST + 'url = "http://h:99999"', "1: url must be http://HOST:PORT"),
        (LEAST + 'url = "http://h:1"\ncount = 2', "1: url is of an instance that runs"),
        (LEAST + 'url = "http://h:1"\n' + LEAST + 'url = "http://h:1/"', "url must be one instance's alone"),
        ('[cluster]\nlauncher = "static"\n' + LEAST, "1: url must be there"),
        ('[[instances]]\nrole = "prefill"', "role must be prefill for some and decode for others"),
        ("[cluster]\nttft = 1.0", "must be there"),
        ('[engine]\nmodel = "a"\n' + LEAST + 'flags = { model = "b" }', "both-0: flags.model must be that of .engine."),
        (LEAST + "processes = 0", "1: processes must be"),
        (LEAST + "processes = true", "1: processes must be"),
        (LEAST + 'url = "http://h:1"\nprocesses = 2', "1: url is of an instance that runs"),
        ('[cluster]\nlauncher = "ray"\n' + LEAST + "processes = 2", "1: processes are for launcher 'processes'"),
        (LEAST + "devices = [0, 1, 2]\nprocesses = 2", "1: devices must be as many for each of 2 processes, got 3"),
        (LEAST + "devices = 3", "1: devices must be numbers of GPUs"),
        (LEAST + "devices = [-1]", "1: devices must be numbers of GPUs"),
        (LEAST + "devices = [0, 1, 2]\ncount = 2", "1: devices must be as many for each of 2 instances, got 3"),
        (
            LEAST + "devices = [0]\n" + LEAST + "devices = [0]",
            "devices must be one instance's alone, and 0 is of several",
        ),
        ('[cluster]\nlauncher = "ray"\n' + LEAST + "devices = [0]", "1: devices are for launcher 'processes'"),
        (LEAST + "[roles]\nhigher = 1", r"\[roles\] unknown key 'higher': did you mean 'high'"),
        (LEAST + "[roles]\nhigh = -1", r"\[roles\] high must be"),
        ("[cluster]\nroles = {}\n" + LEAST, r"\[cluster\] unknown key 'roles'"),
        (LEAST + "[ray]\ngpu = 1", r"\[ray\] unknown key 'gpu'"),
        (LEAST + "[ray]\ngpus = -1", r"\[ray\] gpus must be"),
        (LEAST + '[ray]\nstrategy = "ANY"', r"\[ray\] strategy must be one of"),
        ("[[instances]\n", "is no TOML"),
    ],
)
def test_what_can_not_be_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_cluster(written(tmp_path, text))


def test_devices_are_shared_out(tmp_path: Path) -> None:
    found = read_cluster(written(tmp_path, LEAST + "count = 2\nname = 'a'\ndevices = [0, 1, 2, 3]\n"))
    assert [each.devices for each in found.instances] == [(0, 1), (2, 3)]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml can't be read"):
        read_cluster(tmp_path / "none.toml")
