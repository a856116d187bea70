"""Launcher of a cluster's instances as processes of this machine."""

import socket
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from longctx.cluster.conductor.config import Role
from longctx.cluster.launcher.supervised import Command, Supervised

_HOST = "127.0.0.1"

MakeCommand = Callable[[str, int, Sequence[str]], Sequence[str]]
"""Makes the command of an instance, from the host and port at which it is to listen, and the hosts of all instances."""


class Launched(NamedTuple):
    """Instance that is to be started.

    Attributes:
      name: no other one has it.
      command: see `MakeCommand`.
      files: that the command names, such as secrets, which have to be where it runs.
      environments: more variables of each of its processes, where the router's own machine runs them; several are told
        their place by `--coordinator` and the like.
      scheme: of its URL, `http` or `https`.
    """

    name: str
    role: Role
    command: MakeCommand
    files: tuple[str, ...] = ()
    environments: tuple[Mapping[str, str], ...] = (MappingProxyType({}),)
    scheme: str = "http"


class Address(NamedTuple):
    """URL at which an instance is reached, once it is ready."""

    name: str
    role: Role
    url: str


Moved = Callable[[Address], object]
"""Function that is called with an instance that was started again at another address; from any thread."""


class ProcessLauncher:
    """Launcher of instances as processes of this machine; without any, of those that run already.

    Each has the same port whenever it is started again. They end with this process, however that ends. An instance of
    several processes is started and ends as one.

    Args:
      instances: that it starts.
      others: that run already.
    """

    def __init__(self, instances: Sequence[Launched], others: Sequence[Address] = ()) -> None:
        self._instances, self._others = list(instances), list(others)
        self._held: list[socket.socket] = []
        self.moved: Moved = lambda address: None  # they never do
        self.processes: dict[str, Supervised] = {}

    def start(self) -> list[Address]:
        """Start all, and return before they are ready."""
        addresses = [*self._others]
        for each in self._instances:
            port = self._reserve()
            command, count, group = each.command(_HOST, port, (_HOST,)), len(each.environments), list[str]()
            if count > 1:
                group = [f"--coordinator={_HOST}:{self._reserve()}", f"--num-processes={count}", "--process-id="]
            commands = [
                Command([*command, *group[:2], *(f"{flag}{i}" for flag in group[2:])], environment)
                for i, environment in enumerate(each.environments)
            ]
            process = self.processes[each.name] = Supervised(each.name, *commands)
            process.start()
            addresses.append(Address(each.name, each.role, f"{each.scheme}://{_HOST}:{port}"))
        return addresses

    @property
    def problem(self) -> str | None:
        """Reason why an instance will never be there; None: there is none."""
        return next((each.problem for each in self.processes.values() if each.problem is not None), None)

    def close(self) -> None:
        """End all, and wait until they are gone."""
        for each in self.processes.values():
            each.begin_to_end()
        for each in self.processes.values():
            each.close()
        for held in self._held:
            held.close()

    def _reserve(self) -> int:
        self._held.append(hold_port(_HOST))
        return int(self._held[-1].getsockname()[1])


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Reserve a port, 0: any free one, by a socket that holds it and does not listen; OSError: it is taken."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held
