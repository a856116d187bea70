"""What the conductor decides of a request."""

from typing import Literal, NamedTuple

from longctx.cluster.conductor.instance import Role

Bound = Literal["ttft", "tbt", "memory", "prefill_load", "decode_load", "no_instance"]
"""What forbids a request: its predicted TTFT or TBT, memory for its KV cache, a pool's load, or nobody is there."""


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
    """Where a request is served.

    Attributes:
      prefill, decode: names of instances; the same if one does both.
      cached: tokens of the prompt that the prefill instance has or gets by the transfer.
      transfer: None: it gets none.
      ttft, tbt: predicted seconds.
      queue, transfer_seconds, prefill_seconds: what `ttft` consists of.
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
      bound: what forbids it.
      stage: before which stage it was rejected; `"decode"`: its prefill was in vain.
      ttft, tbt: predicted seconds, had it been accepted; inf: nobody could serve it.
      load: of the pool that binds: predicted time over its SLO.
      retry_after: seconds after which it may be accepted, by prediction.
      is_deferred: whoever asked should keep it and ask again after `retry_after`, rather than tell its client.
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
