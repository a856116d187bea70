"""A request as the conductor sees it, and the decisions on it."""

import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from longctx.cluster.conductor.config import Role
from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.serving.validation import check_text

Bound = Literal["ttft", "tbt", "memory", "prefill_load", "decode_load", "no_instance"]
"""The limit that forbids a request: its TTFT or TBT, memory for its KV cache, a pool's load, or no instance."""


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


class Transfer(NamedTuple):
    """Blocks that go from one instance to another before a prompt is computed (Mooncake, 5.2).

    Attributes:
      source: the name of the instance that has them.
      first, stop: tokens of the prompt, both multiples of the block size.
    """

    source: str
    first: int
    stop: int


class Assignment(NamedTuple):
    """The instances that serve a request.

    Attributes:
      prefill, decode: names of instances; the same if one does both.
      cached: tokens of the prompt that the prefill instance has or gets by the transfer.
      transfer: None: it gets none.
      ttft, tbt: predicted seconds.
      queue, transfer_seconds, prefill_seconds: the parts of `ttft`, in seconds.
    """

    request_id: str
    prefill: str
    decode: str
    cached: int
    transfer: Transfer | None
    ttft: float
    tbt: float
    queue: float
    transfer_seconds: float
    prefill_seconds: float


class Rejection(NamedTuple):
    """A request that is not served now: 429.

    Attributes:
      bound: the limit that forbids it.
      stage: before which it was rejected; `"decode"`: its prefill was computed and is not used.
      ttft, tbt: predicted seconds, had it been accepted; inf: no instance could serve it.
      load: of the pool that binds: predicted time over its SLO.
      retry_after: seconds after which it may be accepted, by prediction.
      is_deferred: the driver should keep it and ask again after `retry_after`, rather than tell its client.
    """

    request_id: str
    bound: Bound
    stage: Literal["prefill", "decode"]
    ttft: float
    tbt: float
    load: float
    retry_after: float
    is_deferred: bool = False


Decision = Assignment | Rejection


class RoleChange(NamedTuple):
    """An instance that should change its role; work of its former role goes on until it has ended."""

    instance: str
    role: Role
