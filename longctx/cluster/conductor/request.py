"""`ClusterRequest`: what the conductor knows of a request."""

import sys
from dataclasses import dataclass

import numpy as np

from longctx.serving.validation import MAX_INT32, check_integer, check_real, check_text, shown


@dataclass(frozen=True, slots=True, eq=False)
class ClusterRequest:
    """A request as the conductor sees it: lengths and keys, no tokens.

    Attributes:
      request_id: no other request that has not ended has it.
      prompt_tokens: of its prompt.
      max_tokens: that it may generate, in all its completions; memory for them is needed where it decodes.
      keys: of the prompt's full blocks, in order, uint64 `[blocks]`; a key stands for its block and all before it.
      ttft: seconds within which its first token must come, by its SLO; None: the cluster's.
      tpot: seconds per token after it; None: the cluster's.
      priority: higher is more urgent.

    Raises:
      TypeError, ValueError: a number is out of range, or the keys are of more tokens than there are.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    keys: np.ndarray
    ttft: float | None = None
    tpot: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_text("request_id", self.request_id)
        check_integer("prompt_tokens", self.prompt_tokens, 1, MAX_INT32)
        check_integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        check_integer("priority", self.priority, -sys.maxsize, sys.maxsize)
        if not isinstance(self.keys, np.ndarray) or self.keys.dtype != np.uint64 or self.keys.ndim != 1:
            raise TypeError(f"keys must be uint64 [blocks], got {shown(self.keys)}")
        if len(self.keys) > self.prompt_tokens:
            raise ValueError(f"keys must be of {self.prompt_tokens} tokens at most, got {len(self.keys)} blocks")
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not check_real(name, value, 0) > 0:
                raise ValueError(f"{name} must be seconds, more than 0, got {value}")
