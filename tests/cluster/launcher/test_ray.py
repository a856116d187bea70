"""Instances as actors of a local Ray cluster. Ray is an extra: `pip install 'longctx-jax[cluster]'`."""

import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_launched_processes import HERE, ROOT, answer, command, is_alive, wait_until

from longctx.cluster.config import RayOptions
from longctx.cluster.launcher.launcher import Address, Launched
from longctx.cluster.launcher.ray_launcher import RayHost, RayLauncher

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
