"""`StaticLauncher`: instances that somebody else has started, such as Slurm or Kubernetes."""

from collections.abc import Sequence

from longctx.cluster.launcher.launched import Address, Moved


class StaticLauncher:
    """Knows where instances are, and starts and ends none; a `Launcher`."""

    problem: str | None = None

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = list(addresses)
        self.moved: Moved = lambda address: None

    def start(self) -> list[Address]:
        """Where they are."""
        return self._addresses

    def close(self) -> None:
        """Nothing: they go on."""
