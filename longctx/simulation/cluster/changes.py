"""What happens to instances of a simulated cluster at given times."""

from dataclasses import dataclass
from typing import Literal, get_args

from longctx.serving.validation import check_real, check_text

Action = Literal["kill", "join", "drain", "restore", "prefill", "decode", "both"]
"""It dies, with all that it has; comes back, with nothing; gets no more requests; gets some again; its role changes."""
ACTIONS: tuple[Action, ...] = get_args(Action)


@dataclass(frozen=True)
class Change:
    """Something that happens to an instance, so many seconds after the beginning of the workload.

    Raises:
      TypeError, ValueError: the time is negative or not finite, or there is no such action.
    """

    at: float
    instance: str
    action: Action

    def __post_init__(self) -> None:
        check_text("instance", self.instance)
        check_real("at", self.at, 0)
        if self.action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}, got {self.action!r}")
