"""`RayLauncher`: instances on the machines of a Ray cluster.

Ray places, starts and watches: an actor of each instance runs its process, and is made anew where it is lost. Requests,
tokens and pages go by the instances' own sockets, as a call of Ray takes milliseconds.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longctx import extras
from longctx.cluster.config import RayOptions
from longctx.cluster.launcher.launcher import Address, Launched, Moved, hold_port
from longctx.cluster.launcher.supervised import BackOff, Command, Supervised
from longctx.cluster.server_url import host_port
from longctx.serving.kv_cache.secret import SecretFiles

logger = logging.getLogger(__name__)

_PLACE_SECONDS, _CALL_SECONDS, _STOP_SECONDS = 120.0, 30.0, 100.0
_LOOK_SECONDS = 1.0


class HostState(NamedTuple):
    """State of an instance's process.

    Attributes:
      problem: reason why it is not started again; None: there is none.
      pid: None: it does not run now.
      num_starts: number of its starts.
    """

    problem: str | None
    pid: int | None
    num_starts: int


class RayHost:
    """Actor that runs one instance's process on a machine of a Ray cluster. The process ends with the actor.

    Args:
      ip: of this machine, for the others; None: as Ray has it.
    """

    def __init__(self, ip: str | None = None) -> None:
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        self._ip = ip
        self._held: socket.socket | None = None
        self._files = SecretFiles()
        self._process: Supervised | None = None

    def place(self, port: int = 0) -> tuple[str, int]:
        """Reserve a port for the instance, `port` if it is free; return the IP of this machine and the port."""
        try:
            self._held = hold_port(self._ip, port)
        except OSError:
            self._held = hold_port(self._ip)
        return self._ip, self._held.getsockname()[1]

    def start(self, name: str, command: Sequence[str], files: Mapping[str, bytes]) -> None:
        """Start the instance, and start it again when it ends. A second call does nothing.

        Args:
          command: whose program is this machine's own Python.
          files: contents of the files that the command names, `--flag=path`, which this process keeps.
        """
        if self._process is not None:
            return
        command = [sys.executable, *command[1:]]
        for path, contents in files.items():
            here = str(self._files.add(contents))
            command = [each.removesuffix(path) + here if each.endswith(f"={path}") else each for each in command]
        self._process = Supervised(name, Command(command, {}))
        self._process.start()

    def state(self) -> HostState:
        """Return the state of the process."""
        process = self._process
        return (
            HostState(None, None, 0) if process is None else HostState(process.problem, process.pid, process.num_starts)
        )

    def stop(self) -> None:
        """End the process, and remove its files."""
        if self._process is not None:
            self._process.close()
        if self._held is not None:
            self._held.close()
        self._files.close()


class RayLauncher:
    """Launcher of instances as actors of a Ray cluster.

    Args:
      instances: that it starts.
      options: resources of each, and the cluster's address.
      others: that run already.

    Raises:
      MissingExtra: Ray is not installed.
    """

    def __init__(self, instances: Sequence[Launched], options: RayOptions, others: Sequence[Address] = ()) -> None:
        with extras.needed("cluster", "launcher 'ray'"):
            import ray
        self._ray: Any = ray
        self._instances, self._options, self._others = list(instances), options, list(others)
        self._began = False  # whether Ray was begun here
        self._group: Any = None
        self.actors: dict[str, Any] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self.problem: str | None = None
        self.moved: Moved = lambda address: None
        self._is_closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(index, each), name=f"longctx ray {each.name}", daemon=True)
            for index, each in enumerate(self._instances)
        ]

    def start(self) -> list[Address]:
        """Start all, and return before they are ready; RuntimeError: the Ray cluster is not there, or has no room."""
        ray, options = self._ray, self._options
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            try:
                ray.init(address=options.address, include_dashboard=None if options.address else False)
            except (ConnectionError, OSError, ValueError) as error:
                raise RuntimeError(f"[ray] address {options.address!r} can't be reached: {error}") from None
            self._began = True
        bundle = {"CPU": options.cpus} | ({"GPU": options.gpus} if options.gpus else {})
        self._group = ray.util.placement_group([dict(bundle) for _ in self._instances], strategy=options.strategy)
        try:
            ray.get(self._group.ready(), timeout=_PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(
                f"the Ray cluster has no room for {len(self._instances)} instances with {bundle} each, "
                f"{options.strategy}: see [ray], got {ray.cluster_resources()}"
            ) from None
        for index, each in enumerate(self._instances):
            self._make(index, each)
        for each in self._instances:
            self._start(each)
        for thread in self._threads:
            thread.start()
        return [*self._others, *(self._address(each) for each in self._instances)]

    def close(self) -> None:
        """End all, and wait until they are gone."""
        self._is_closing.set()
        for thread in self._threads:
            if thread.ident:
                thread.join(_CALL_SECONDS)
        ray = self._ray
        if ray.is_initialized():
            stops = [actor.stop.remote() for actor in self.actors.values()]
            ray.wait(stops, num_returns=len(stops), timeout=_STOP_SECONDS) if stops else None
            for actor in self.actors.values():
                ray.kill(actor)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            if self._began:
                ray.shutdown()
        self.actors.clear()

    def _make(self, index: int, instance: Launched) -> None:
        """Make an actor, and reserve the address of its instance."""
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        options = {"num_cpus": self._options.cpus, "num_gpus": self._options.gpus, "max_concurrency": 4}
        actor = ray.remote(RayHost).options(scheduling_strategy=strategy, **options).remote()
        before = self._places.get(instance.name, ("", 0))[1]
        self._places[instance.name] = ray.get(actor.place.remote(before), timeout=_PLACE_SECONDS)
        self.actors[instance.name] = actor

    def _start(self, instance: Launched) -> None:
        host, port = self._places[instance.name]
        hosts = sorted({place[0] for place in self._places.values()})
        files = {str(path): Path(path).read_bytes() for path in instance.files}
        started = self.actors[instance.name].start.remote(instance.name, instance.command(host, port, hosts), files)
        self._ray.get(started, timeout=_CALL_SECONDS)

    def _address(self, instance: Launched) -> Address:
        host, port = self._places[instance.name]
        return Address(instance.name, instance.role, f"{instance.scheme}://{host_port(host, port)}")

    def _watch(self, index: int, instance: Launched) -> None:
        """Make a new actor of an instance, with its process, when it has died or has not answered for a time."""
        errors, back_off, began = self._ray.exceptions, BackOff(), time.monotonic()
        answered = began
        while not self._is_closing.wait(_LOOK_SECONDS):
            try:
                state = self._ray.get(self.actors[instance.name].state.remote(), timeout=_CALL_SECONDS)
                answered, self.problem = time.monotonic(), self.problem or state.problem
                if not state.num_starts:  # the call to start it was lost
                    self._start(instance)
            except (errors.RayActorError, errors.GetTimeoutError) as error:
                is_cut = isinstance(error, errors.ActorUnavailableError)  # its connection broke; it may live
                if is_cut and time.monotonic() - answered < _CALL_SECONDS:
                    continue
                logger.warning("longctx: %s is lost, with its Ray actor", instance.name)
                if not self._is_closing.wait(back_off.after(time.monotonic() - began)):
                    began = time.monotonic()
                    self._replace(index, instance)
                    answered = time.monotonic()
            except Exception:  # Ray itself is gone, or goes
                logger.exception("longctx: the Ray cluster does not answer")

    def _replace(self, index: int, instance: Launched) -> None:
        before = self._address(instance)
        try:
            # One that is stuck keeps the CPUs and GPUs that the new one needs.
            self._ray.kill(self.actors[instance.name])
            self._make(index, instance)
            self._start(instance)
        except Exception as error:
            logger.warning("longctx: %s can't be started again yet: %s", instance.name, error)
            return
        address = self._address(instance)
        if address != before:
            self.moved(address)
