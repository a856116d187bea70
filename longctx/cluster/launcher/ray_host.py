"""`RayHost`: the actor that runs one instance's process on a machine of a Ray cluster."""

import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from longctx.cluster.launcher.supervised import Command, Supervised


class HostState(NamedTuple):
    """How an instance's process is.

    Attributes:
      problem: why it is not started again; None: nothing is wrong.
      pid: None: it does not run now.
      num_starts: how often it was started.
    """

    problem: str | None
    pid: int | None
    num_starts: int


class RayHost:
    """Runs one instance; its methods are called by Ray. The process ends with the actor, however that ends.

    Args:
      ip: of this machine, for the others; None: as Ray has it.
    """

    def __init__(self, ip: str | None = None) -> None:
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        self._ip = ip
        self._held: socket.socket | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="longctx-instance-")
        self._process: Supervised | None = None

    def place(self, port: int = 0) -> tuple[str, int]:
        """The IP of this machine, and a port that is kept for the instance: the one that is wanted, if it is free."""
        for wanted in (port, 0):
            held = socket.socket(socket.AF_INET6 if ":" in self._ip else socket.AF_INET)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((self._ip, wanted))
            except OSError:
                held.close()
                if not wanted:
                    raise
                continue
            self._held = held
            break
        assert self._held is not None
        return self._ip, self._held.getsockname()[1]

    def start(self, name: str, command: Sequence[str], files: Mapping[str, bytes]) -> None:
        """Start the instance, and start it again when it ends.

        Args:
          command: whose program is this machine's own Python.
          files: contents of the files that the command names, which are written here.
        """
        command = [sys.executable, *command[1:]]
        for number, (path, contents) in enumerate(files.items()):
            here = Path(self._folder.name) / str(number)
            with os.fdopen(os.open(here, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(contents)
            command = [each.replace(path, str(here)) for each in command]
        self._process = Supervised(name, Command(command, {}))
        self._process.start()

    def state(self) -> HostState:
        """How the process is."""
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
        self._folder.cleanup()
