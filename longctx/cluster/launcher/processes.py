"""`ProcessLauncher`: instances as processes of this machine."""

import socket
from collections.abc import Sequence

from longctx.cluster.launcher.launched import Address, Launched, Moved
from longctx.cluster.launcher.supervised import Supervised

_HOST = "127.0.0.1"


class ProcessLauncher:
    """Starts instances as processes of this machine; a `Launcher`.

    Each has the same port whenever it is started again. They end with this process, however that ends.

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
            self._held.append(_reserve())
            port = self._held[-1].getsockname()[1]
            command = each.command(_HOST, port, (_HOST,))
            process = self.processes[each.name] = Supervised(each.name, command, each.environment)
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


def _reserve() -> socket.socket:
    """A socket at a port that nobody else is given then; it does not listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((_HOST, 0))
    return held
