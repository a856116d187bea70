"""`ProcessLauncher`: instances as processes of this machine."""

import socket
from collections.abc import Sequence

from longctx.cluster.launcher.launched import Address, Launched, Moved
from longctx.cluster.launcher.supervised import Command, Supervised

_HOST = "127.0.0.1"


class ProcessLauncher:
    """Starts instances as processes of this machine; a `Launcher`.

    Each has the same port whenever it is started again. They end with this process, however that ends. An instance of
    several processes is started and ends as one.

    Args:
      others: that run already.
    """

    def __init__(self, instances: Sequence[Launched], others: Sequence[Address] = ()) -> None:
        self._instances, self._others = list(instances), list(others)
        self._held: list[socket.socket] = []
        self.moved: Moved = lambda address: None  # they never do
        self.processes: dict[str, Supervised] = {}

    def start(self) -> list[Address]:
        """Start all; it returns before they are ready."""
        addresses = [*self._others]
        for each in self._instances:
            port = self._reserve()
            commands = [Command(each.command(_HOST, port, (_HOST,)), each.environment)]
            if each.members:
                commands = _commands(each, commands[0], f"{_HOST}:{self._reserve()}")
            process = self.processes[each.name] = Supervised(each.name, *commands)
            process.start()
            addresses.append(Address(each.name, each.role, f"http://{_HOST}:{port}"))
        return addresses

    @property
    def problem(self) -> str | None:
        """Why an instance will never be there; None: nothing is wrong for good."""
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
        """A port that nobody else is given, as a socket holds it, which does not listen."""
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        self._held.append(held)
        return int(held.getsockname()[1])


def _commands(instance: Launched, command: Command, coordinator: str) -> list[Command]:
    """One for each process of an instance of several."""
    group = [f"--coordinator={coordinator}", f"--num-processes={len(instance.members)}"]
    return [
        Command([*command.arguments, *group, f"--process-id={i}"], {**command.environment, **member})
        for i, member in enumerate(instance.members)
    ]
