"""Instances as actors of a local Ray cluster. Ray is an extra: `pip install 'longctx-jax[cluster]'`."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_launched_processes import HERE, ROOT, answer, command, is_alive, wait_until

from longctx.cluster.config import RayOptions
from longctx.cluster.launcher.launcher import Address, Launched
from longctx.cluster.launcher.ray_launcher import HostState, RayHost, RayLauncher

try:
    import ray
except ModuleNotFoundError:
    ray = None

needs_ray = pytest.mark.skipif(ray is None, reason="Ray is not installed: pip install 'longctx-jax[cluster]'")


def test_the_actor_runs_a_process_with_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray: it is an ordinary object."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    host = RayHost("127.0.0.1")
    ip, port = host.place()
    try:
        host.start(
            "one", ["python", str(HERE / "stand_in.py"), ip, str(port), "--key=/far/key"], {"/far/key": b"secret"}
        )
        wait_until("it answers", lambda: answer(f"http://{ip}:{port}"))
        said = answer(f"http://{ip}:{port}") or ""
        path = Path(said.rpartition("--key=")[2])
        assert "/far/" not in said
        assert path.read_bytes() == b"secret"
        assert path.stat().st_mode & 0o077 == 0
        problem, pid, num_starts = host.state()
        assert (problem, num_starts) == (None, 1)
        assert pid is not None
    finally:
        host.stop()
    assert host.state().pid is None
    other = RayHost("127.0.0.1")
    try:
        assert other.place(port) == (ip, port), "the port that it had is taken again"
    finally:
        other.stop()


@pytest.mark.skipif(ray is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"needs ray: pip install 'longctx-jax\[cluster\]'"):
        RayLauncher([], RayOptions())


class ActorLost(Exception):
    """Stands in for `RayActorError`."""


class ActorUnavailable(ActorLost):
    """Stands in for `ActorUnavailableError`."""


class FakeActor:
    """Actor that fails to say its state as often as it is told, and counts its starts."""

    def __init__(self, *errors: Exception, loses_start: bool = False) -> None:
        self.errors, self.loses_start, self.num_starts, self.is_killed = list(errors), loses_start, 0, False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: lambda: getattr(self, f"_{name}")())

    def _place(self) -> tuple[str, int]:
        return "10.0.0.1", 8000

    def _start(self) -> None:
        if self.loses_start:
            self.loses_start = False
            raise ActorUnavailable
        self.num_starts += 1

    def _state(self) -> HostState:
        if self.is_killed:
            raise ActorLost
        if self.errors:
            raise self.errors.pop(0)
        return HostState(None, 1, self.num_starts)

    def _stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("actors", "is_first_kept"),
    [
        ([FakeActor(ActorUnavailable())], True),  # its connection broke, and is there again
        ([FakeActor(TimeoutError()), FakeActor()], False),  # it is stuck, and keeps its CPU until it is killed
        ([FakeActor(ActorLost()), FakeActor(loses_start=True)], False),
    ],
    ids=["cut", "stuck", "start is lost"],
)
def test_one_actor_runs_each_instance(
    actors: list[FakeActor], is_first_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Ray: the actor is made anew only where it is lost, and then the old one is killed."""
    made = iter(actors)
    errors = {"RayActorError": ActorLost, "ActorUnavailableError": ActorUnavailable, "GetTimeoutError": TimeoutError}
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *group, **bundle: None)
    util = {"scheduling_strategies": strategies, "remove_placement_group": lambda group: None}
    fake = SimpleNamespace(
        exceptions=SimpleNamespace(**errors),
        util=SimpleNamespace(placement_group=lambda *a, **k: SimpleNamespace(ready=lambda: lambda: None), **util),
        is_initialized=lambda: True,
        get=lambda call, timeout=None: call(),
        wait=lambda *calls, **options: None,
        kill=lambda actor: setattr(actor, "is_killed", True),
        remote=lambda kind: SimpleNamespace(options=lambda **o: SimpleNamespace(remote=lambda: next(made))),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr("longctx.cluster.launcher.ray_launcher._LOOK_SECONDS", 0.01)
    launcher = RayLauncher([Launched("one", "both", command("one"))], RayOptions())
    launcher.start()
    try:
        wait_until("the last one runs the instance", lambda: actors[-1].num_starts == 1 and not actors[0].errors)
        assert launcher.actors["one"] is actors[-1]
        assert actors[0].is_killed is not is_first_kept
        assert not actors[-1].is_killed
    finally:
        launcher.close()


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayLauncher]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{HERE}")
    instances = [Launched("one", "prefill", command("one")), Launched("two", "decode", command("two"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = RayLauncher(
            instances, RayOptions(cpus=0.5, strategy="PACK"), [Address("far", "both", "http://10.0.0.9:1")]
        )
        yield made
        made.close()


def state(launcher: RayLauncher, name: str) -> Any:
    return ray.get(launcher.actors[name].state.remote())


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_instances_on_ray(launcher: RayLauncher) -> None:
    far, one, two = launcher.start()
    assert (far.name, one.role, two.role) == ("far", "prefill", "decode")
    for each in (one, two):
        wait_until("it answers", lambda url=each.url: answer(url), 60)
    # A process that dies is started again by its actor, at the same port.
    pid: Any = state(launcher, "one").pid
    os.kill(pid, signal.SIGKILL)
    wait_until("it is started again", lambda: state(launcher, "one").num_starts == 2, 30)
    wait_until("it answers again", lambda: answer(one.url), 30)
    # An actor that dies takes its process along, and is made anew.
    moved: list[Address] = []
    launcher.moved = moved.append
    before: Any = state(launcher, "two").pid
    ray.kill(launcher.actors["two"])
    wait_until("its process is gone", lambda: not is_alive(before), 30)

    def address() -> str:
        return moved[-1].url if moved else two.url

    wait_until("another one answers", lambda: answer(address()), 60)
    pids = [state(launcher, name).pid for name in ("one", "two")]
    launcher.close()
    for each in pids:
        wait_until("it is gone", lambda pid=each: pid is None or not is_alive(pid), 30)
    assert not ray.is_initialized()


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longctx.cluster.launcher.ray_launcher._PLACE_SECONDS", 3.0)
    launcher = RayLauncher([Launched("one", "both", command("one"))], RayOptions(cpus=10_000))
    try:
        with pytest.raises(RuntimeError, match="has no room for 1 instances"):
            launcher.start()
    finally:
        launcher.close()
