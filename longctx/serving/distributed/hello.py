"""What a process says that asks to join, and what process 0 answers."""

import math
from typing import Any, NamedTuple

from longctx.serving.distributed.network import Key, read_key

_MAX_CHARACTERS = 200  # of what a stranger may have written, in messages and logs
_MAX_TRAITS = 100


class Hello(NamedTuple):
    """A request to join."""

    process: int
    host_name: str
    started: float  # when the process began to ask, in seconds of its host's clock
    traits: dict[str, Any]  # what has to be the same in all processes

    def to_json(self) -> dict[str, Any]:
        """Make plain data, of which `read_hello` makes the same again."""
        return self._asdict()

    def __str__(self) -> str:
        return f"process {self.process} ({shown(self.host_name)})"

    def differences(self, traits: dict[str, Any]) -> list[str]:
        """How the traits differ from those of process 0."""
        return [
            f"{shown(key)} {shown(self.traits.get(key))}, and process 0 has {traits.get(key)}"
            for key in sorted({*traits, *self.traits})
            if self.traits.get(key) != traits.get(key)
        ]


def read_hello(value: Any) -> Hello:
    """Read a request that anybody may have sent.

    Raises:
      ValueError: it is none.
    """
    match value:
        case {"process": int(process), "host_name": str(host_name), "started": float(started), "traits": dict(traits)}:
            is_plain = all(isinstance(trait, str | int | float | None) for trait in traits.values())
            if isinstance(process, bool) or not 0 <= process < 1 << 31 or not math.isfinite(started):
                raise ValueError("a request to join has an impossible number")
            if not host_name.isprintable() or not is_plain or len(traits) > _MAX_TRAITS:
                raise ValueError("a request to join has an impossible host_name or traits")
            return Hello(process, host_name, started, traits)
    raise ValueError("a request to join must have process, host_name, started and traits")


class Welcome(NamedTuple):
    """Process 0's answer when all have come."""

    host_names: list[str]
    steps_port: int
    steps_key: Key

    def to_json(self) -> dict[str, Any]:
        """Make plain data, of which `read_welcome` makes the same again."""
        return {"names": self.host_names, "port": self.steps_port, "key": self.steps_key.secret.decode()}


def read_welcome(value: Any) -> Welcome:
    """Read an answer.

    Raises:
      ValueError: it is none.
    """
    match value:
        case {"names": list(names), "port": int(port), "key": str(key)} if 0 < port < 65536:
            if all(isinstance(name, str) for name in names):
                return Welcome(names, port, read_key(key))
    raise ValueError("a welcome must have names, port and key")


def shown(value: Any) -> str:
    """Text on one line, and not a long one."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
