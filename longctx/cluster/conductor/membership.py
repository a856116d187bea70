"""Checks of what joins a cluster and of what instances say."""

import sys
from collections.abc import Iterable

from longctx.cluster.conductor.instance import ROLES, InstanceSpec, Report, Role
from longctx.cluster.conductor.state import InstanceState
from longctx.cluster.prefix_index.index import TIERS
from longctx.serving.validation import MAX_INT32, check_integer, check_real, check_text, shown


def check_joins(spec: InstanceSpec, instances: Iterable[InstanceState]) -> None:
    """Check that an instance may join those that are there.

    Raises:
      TypeError, ValueError: it may not; the message names both instances that don't go together.
    """
    if not check_text("name", spec.name):
        raise ValueError("name must not be empty")
    check_role(spec.role)
    check_integer("block_size", spec.block_size, 1, MAX_INT32)
    check_integer("decode_tokens", spec.decode_tokens, 0, sys.maxsize)
    check_integer("max_running", spec.max_running, 1, sys.maxsize)
    if not check_real("bandwidth", spec.bandwidth, 0) > 0:
        raise ValueError(f"bandwidth must be more than 0, got {shown(spec.bandwidth)}")
    check_real("latency", spec.latency, 0)
    if len(spec.cache_blocks) != len(TIERS):
        raise ValueError(f"cache_blocks must be of {', '.join(TIERS)}, got {shown(spec.cache_blocks)}")
    for tier, blocks in zip(TIERS, spec.cache_blocks, strict=True):
        check_integer(f"cache_blocks of {tier}", blocks, 0)
    check_costs(spec)
    for other in instances:
        if other.name == spec.name:
            raise ValueError(f"name must be of no other instance, got {spec.name!r}")
        for what in ("block_size", "kv_dtype", "fingerprint"):
            here, there = getattr(spec, what), getattr(other.spec, what)
            if here != there:
                raise ValueError(
                    f"instances of a cluster must have one {what}, got {there!r} of {other.name!r} and {here!r} of "
                    f"{spec.name!r}"
                )


def check_costs(spec: InstanceSpec) -> None:
    """Raises TypeError or ValueError: the costs of an instance are nonsense; they are looked at in a few places."""
    costs, block = spec.costs, spec.block_size
    for tokens in (block, 100 * block):
        check_real(f"prefill_seconds of {tokens} tokens", costs.prefill_seconds(0, tokens), 0)
        check_real(f"prefill_seconds of a token after {tokens}", costs.prefill_seconds(tokens, tokens + 1), 0)
        check_real(f"transfer_bytes of {tokens} tokens", costs.transfer_bytes(tokens), 0)
        for batch in (1, spec.max_running):
            check_real(f"decode_seconds of {batch} with {tokens} tokens", costs.decode_seconds(batch, tokens), 0)


def check_role(role: Role) -> None:
    """Raises ValueError: there is no such role."""
    if role not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, got {shown(role)}")


def check_report(report: Report) -> None:
    """Raises TypeError or ValueError: a figure is of another type, not finite, negative, or beyond 64 bits."""
    check_real("queue_seconds", report.queue_seconds, 0)
    check_integer("decoding", report.decoding, 0, sys.maxsize)  # no float holds any integer
    check_integer("decode_tokens", report.decode_tokens, 0, sys.maxsize)
    if not isinstance(report.known, frozenset | set):
        raise TypeError(f"known must be a set of ids, got {shown(report.known)}")
