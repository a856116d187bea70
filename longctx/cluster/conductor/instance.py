"""An instance as the conductor sees it: its description, its reports, and the checks of these."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from longctx.cluster.conductor.config import ROLES, Role
from longctx.cluster.conductor.costs import PredictorCosts
from longctx.cluster.prefix_index.index import TIERS
from longctx.models.validation import MAX_INT32, check_integer, check_real, shown
from longctx.serving.validation import AboveZero, Range, check_fields


@dataclass(frozen=True)
class InstanceSpec:
    """An instance that joins.

    Attributes:
      name: no other instance of the cluster has it.
      costs: seconds and bytes of its work, by the one cost model.
      fingerprint: of its weights and of the form of its pages: only equal ones exchange pages.
      kv_dtype: of keys and values in its pages; empty: not known.
      block_size: tokens of a block, one key each; the same in the whole cluster.
      decode_tokens: tokens of KV cache that fit where it decodes.
      max_running: requests that decode at a time, at most.
      bandwidth: bytes per second at which it sends KV cache to others.
      latency: seconds until the first byte of a transfer comes.
      cache_blocks: that it has room for on its device, in host memory and on disk; 0: the conductor leaves the tier
        alone, which evicts by itself what it has no room for.

    Raises:
      TypeError, ValueError: a field is of another type or out of range.
    """

    name: str
    role: Role
    costs: PredictorCosts
    block_size: Annotated[int, Range(1, MAX_INT32)]
    decode_tokens: Annotated[int, Range(0, sys.maxsize)]
    max_running: Annotated[int, Range(1, sys.maxsize)]
    bandwidth: AboveZero
    latency: Annotated[float, Range(0)] = 0.0
    fingerprint: str = ""
    kv_dtype: str = ""
    cache_blocks: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name:
            raise ValueError("name must not be empty")
        if len(self.cache_blocks) != len(TIERS):
            raise ValueError(f"cache_blocks must be of {', '.join(TIERS)}, got {shown(self.cache_blocks)}")
        for tier, blocks in zip(TIERS, self.cache_blocks, strict=True):
            check_integer(f"cache_blocks of {tier}", blocks, 0)


class Report(NamedTuple):
    """State of an instance as it reports it, which corrects the conductor's estimates.

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


def check_joins(spec: InstanceSpec, others: Iterable[InstanceSpec]) -> None:
    """Check an instance that joins a cluster.

    Raises:
      TypeError, ValueError: a cost is out of range, or it does not go together with another instance, which the message
        names.
    """
    costs, block = spec.costs, spec.block_size
    for tokens in (block, 100 * block):
        check_real(f"prefill_seconds of {tokens} tokens", costs.prefill_seconds(0, tokens), 0)
        check_real(f"prefill_seconds of a token after {tokens}", costs.prefill_seconds(tokens, tokens + 1), 0)
        check_real(f"transfer_bytes of {tokens} tokens", costs.transfer_bytes(tokens), 0)
        for batch in (1, spec.max_running):
            check_real(f"decode_seconds of {batch} with {tokens} tokens", costs.decode_seconds(batch, tokens), 0)
    for other in others:
        if other.name == spec.name:
            raise ValueError(f"name must be of no other instance, got {spec.name!r}")
        for what in ("block_size", "kv_dtype", "fingerprint"):
            here, there = getattr(spec, what), getattr(other, what)
            if here != there:
                raise ValueError(
                    f"instances of a cluster must have one {what}, got {there!r} of {other.name!r} and {here!r} of "
                    f"{spec.name!r}"
                )


def check_role(role: Role) -> None:
    """Raise ValueError unless there is such a role."""
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {shown(role)}")


def check_report(report: Report) -> None:
    """Raise TypeError or ValueError if a figure is of another type, not finite, negative, or beyond 64 bits."""
    check_real("queue_seconds", report.queue_seconds, 0)
    check_integer("decoding", report.decoding, 0, sys.maxsize)  # no float holds any integer
    check_integer("decode_tokens", report.decode_tokens, 0, sys.maxsize)
    if not isinstance(report.known, frozenset | set):
        raise TypeError(f"known must be a set of ids, got {shown(report.known)}")
