"""What the conductor knows of an instance: what it is, what it costs, and what it says of itself."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from longctx.cluster.prefix_index.index import TIERS as TIERS
from longctx.cluster.prefix_index.index import Tier as Tier

Role = Literal["prefill", "decode", "both"]
"""What an instance does: prompts, answers, or both (a coupled one: whatever it prefills it decodes too)."""

ROLES: tuple[Role, ...] = ("prefill", "decode", "both")


@runtime_checkable
class Costs(Protocol):
    """What work costs on an instance, by the one cost model (`longctx.serving.predictor`)."""

    def prefill_seconds(self, cached: int, prompt: int) -> float:
        """Seconds of prefilling a prompt of which so many leading tokens are cached, alone."""
        ...

    def decode_seconds(self, batch: int, tokens: int) -> float:
        """Seconds of a step of `batch` decodes whose contexts have so many tokens in all: their TBT."""
        ...

    def inline_seconds(self, batch: int, tokens: int, cached: int, prompt: int) -> float:
        """Seconds of a step of such decodes and of the rest of a prompt, all of it; inf: a step has no room for it."""
        ...

    def transfer_bytes(self, tokens: int) -> float:
        """Bytes of keys and values of so many tokens."""
        ...


@dataclass(frozen=True)
class InstanceSpec:
    """An instance that joins.

    Attributes:
      name: no other instance of the cluster has it.
      fingerprint: of its weights and of the form of its pages: only equal ones exchange pages.
      kv_dtype: of keys and values in its pages; empty: not known.
      block_size: tokens of a block, one key each; the same in the whole cluster.
      decode_tokens: tokens of KV cache that fit where it decodes.
      max_running: requests that decode at a time, at most.
      bandwidth: bytes per second at which it sends KV cache to others.
      latency: seconds until the first byte of a transfer comes.
      cache_blocks: that it has room for on its device, in host memory and on disk; 0: the conductor leaves the tier
        alone, which evicts by itself what it has no room for.
    """

    name: str
    role: Role
    costs: Costs
    block_size: int
    decode_tokens: int
    max_running: int
    bandwidth: float
    latency: float = 0.0
    fingerprint: str = ""
    kv_dtype: str = ""
    cache_blocks: tuple[int, int, int] = (0, 0, 0)


class Report(NamedTuple):
    """What an instance says of itself: it corrects the conductor's estimates.

    Attributes:
      queue_seconds: predicted seconds of all prompts that it has and has not computed.
      decoding: requests that decode.
      decode_tokens: tokens of KV cache that those hold.
      known: ids of the requests that the figures above count: what was assigned later comes on top.
    """

    queue_seconds: float
    decoding: int
    decode_tokens: int
    known: frozenset[str] = frozenset()
