"""What launchers start: commands of instances, where they are reached, and a Protocol of who starts them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

from longctx.cluster.conductor.instance import Role

MakeCommand = Callable[[str, int, Sequence[str]], Sequence[str]]
"""Makes the command of an instance, from the host and port at which it is to listen, and the hosts of all instances."""


class Launched(NamedTuple):
    """An instance that is to be started.

    Attributes:
      name: no other one has it.
      command: see `MakeCommand`.
      environment: more variables, where the router's own machine runs it. members: the same of each process of an
        instance of several, which are told their place by `--coordinator` and the like.
      files: that the command names, such as secrets, which have to be where it runs.
    """

    name: str
    role: Role
    command: MakeCommand
    files: tuple[str, ...] = ()
    environment: Mapping[str, str] = MappingProxyType({})
    members: tuple[Mapping[str, str], ...] = ()


class Address(NamedTuple):
    """Where a launched instance is reached, once it is ready."""

    name: str
    role: Role
    url: str


Moved = Callable[[Address], object]
"""Is called with an instance that has been started again at another address; from any thread."""


@runtime_checkable
class Launcher(Protocol):
    """Starts instances, and starts again those that end.

    Attributes:
      moved: see `Moved`.
    """

    moved: Moved

    def start(self) -> list[Address]:
        """Start all; it returns before they are ready. RuntimeError: they can't be started."""
        ...

    @property
    def problem(self) -> str | None:
        """Why an instance will never be there; None: nothing is wrong for good."""
        ...

    def close(self) -> None:
        """End all, and wait until they are gone."""
        ...
