"""`ConductorConfig`: the settings of a conductor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from longctx.models.validation import check_real, shown
from longctx.serving.validation import AboveZero, Count, Range, Share, check_fields

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)
AdmissionName = Literal["none", "baseline", "early_rejection", "predicted_early_rejection"]
ADMISSIONS: tuple[AdmissionName, ...] = get_args(AdmissionName)
PrefillLoad = Literal["request", "instance"]
_AtLeastZero = Annotated[float, Range(0)]
POLICIES = ("random", "least_loaded", "cache_aware", "kvcache_centric")


@dataclass(frozen=True)
class RoleConfig:
    """Limits by which an instance changes from prefill to decode, or back.

    Attributes:
      high, low: limits of load: one pool must be above `high`, the other below `low`.
      seconds: for which that must have been so.
      cool_down: seconds after a change in which there is no other.

    Raises:
      TypeError, ValueError: a setting is of another type or out of range.
    """

    high: _AtLeastZero = 0.9
    low: _AtLeastZero = 0.5
    seconds: _AtLeastZero = 30.0
    cool_down: _AtLeastZero = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_real("low", self.low, 0, self.high)


@dataclass(frozen=True)
class ConductorConfig:
    """Settings by which requests are placed, and rejected.

    Attributes:
      policy: which instance prefills: one of `POLICIES`, or a callable like them (`longctx.cluster.conductor.policy`).
      admission: when the load forbids a request: one of `ADMISSIONS` (never, before each stage, early, or early by
        prediction: 6.2 to 6.4), or a callable like them (`longctx.cluster.conductor.overload`).
      ttft, tpot: SLOs in seconds of requests that have none of their own.
      is_inline: whether a prompt is read where it is decoded, if to split the request doesn't pay: by an instance that
        decodes, where it fits into one of its steps within the TBT SLO (4); by one that does both, where it is sooner.
      balancing_threshold: a prefix elsewhere is fetched if it is at least that many times the local one (5.2).
      prefill_load: which predicted TTFT is compared with its SLO before a prefill: `"request"`, that of the request (5,
        algorithm 1), or `"instance"`, the greatest of the prompts that the chosen instance has (6.1).
      load_limit: of a pool's load: a request above it is rejected.
      decode_limit: of the decode pool's load, by which early rejection leaves room for what is in prefill (6.2): the
        pool's load is taken over it before a prefill, and as it is before a decode.
      priority_step: by how much each step of a request's priority raises the limit.
      decode_seconds: t_d, the assumed duration of a request's decoding (6.4); None: the mean of finished ones.
      defer_seconds: for which the driver should keep a rejected request and ask again, at most; 0: not at all.
      roles: when instances change between prefill and decode by load; None: never.
      swap_above, swap_below: an instance that has more blocks in a tier than the one share of what fits there swaps
        cold ones out, until it is at the other.
      swap_seconds: after which blocks that have not been used are cold.
      seed: of random choices.

    Raises:
      TypeError, ValueError: a setting is of another type or out of range.

    Source:
      Mooncake, sections 5 and 6.

    Examples:
      >>> from longctx.cluster.conductor.config import ConductorConfig
      >>> config = ConductorConfig(policy="kvcache_centric", admission="early_rejection", ttft=30.0, tpot=0.1)
      >>> config.policy, config.ttft
      ('kvcache_centric', 30.0)
    """

    policy: str | Callable[..., Any] = "kvcache_centric"
    admission: AdmissionName | Callable[..., Any] = "early_rejection"
    ttft: AboveZero = 30.0
    tpot: AboveZero = 0.1
    is_inline: bool = True
    balancing_threshold: Annotated[float, Range(1)] = 4.0
    prefill_load: PrefillLoad = "request"
    load_limit: AboveZero = 1.0
    decode_limit: AboveZero = 1.0
    priority_step: _AtLeastZero = 0.1
    decode_seconds: AboveZero | None = None
    defer_seconds: _AtLeastZero = 0.0
    roles: RoleConfig | None = None
    swap_above: Share = 0.95
    swap_below: Share = 0.9
    swap_seconds: _AtLeastZero = 60.0
    seed: Count = 0

    def __post_init__(self) -> None:
        if not callable(self.policy) and self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)} or a callable, got {shown(self.policy)}")
        if not callable(self.admission) and self.admission not in ADMISSIONS:
            names = ", ".join(ADMISSIONS)
            raise ValueError(f"admission must be one of {names} or a callable, got {shown(self.admission)}")
        check_fields(self)
        check_real("swap_below", self.swap_below, 0, self.swap_above)
        if self.roles is not None and not isinstance(self.roles, RoleConfig):
            raise TypeError(f"roles must be a RoleConfig or None, got {shown(self.roles)}")
