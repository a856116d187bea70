"""Policies: the choice of the instance that prefills a request, and of the blocks that it fetches from another one.

A policy is a function of plain data: `(request, matches, pool, now, context) -> Choice`. A user's own is given to
`ConductorConfig(policy=...)`.

Source: Mooncake, section 5, algorithm 1 and figure 6.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import NamedTuple

from longctx.cluster.conductor.request import ClusterRequest, Transfer
from longctx.cluster.conductor.state import InstanceState


class Choice(NamedTuple):
    """Instance that prefills, and its predicted TTFT by parts, in seconds.

    Attributes:
      cached: tokens of the prompt that it has, or gets by the transfer.
    """

    instance: str
    cached: int
    transfer: Transfer | None
    queue: float
    transfer_seconds: float
    prefill_seconds: float

    @property
    def ttft(self) -> float:
        return self.queue + self.transfer_seconds + self.prefill_seconds


class PolicyContext(NamedTuple):
    """Further input of policies.

    Attributes:
      block_size: tokens of a block.
      balancing_threshold: see `ConductorConfig`.
      senders: instances that may send their blocks to others, by name.
      seed: of random choices, of the conductor and of the request.
      held: leading blocks that instances have by now, by name: only these can be sent.
      tpot: seconds, the request's TBT SLO, or the cluster's if that is less.
    """

    block_size: int
    balancing_threshold: float
    senders: Mapping[str, InstanceState]
    seed: str
    held: Mapping[str, int]
    tpot: float = inf

    def random(self) -> Random:
        """Return the same numbers for the same request, whatever was asked before: rejections leave no trace."""
        return Random(self.seed)


Policy = Callable[[ClusterRequest, Mapping[str, int], Sequence[InstanceState], float, PolicyContext], Choice]
"""Args: the request; its leading blocks that instances have or will have, by name (those with none are left out); the
instances that may prefill it, one at least; seconds of the driver's clock."""


def local_choice(
    request: ClusterRequest, matches: Mapping[str, int], state: InstanceState, now: float, context: PolicyContext
) -> Choice:
    """Prefill at an instance with the blocks that it has."""
    cached = matches.get(state.name, 0) * context.block_size
    seconds = state.spec.costs.prefill_seconds(cached, request.prompt_tokens)
    return Choice(state.name, cached, None, state.queue(now), 0.0, seconds)


def random(
    request: ClusterRequest,
    matches: Mapping[str, int],
    pool: Sequence[InstanceState],
    now: float,
    context: PolicyContext,
) -> Choice:
    """Choose an instance by chance."""
    return local_choice(request, matches, context.random().choice(pool), now, context)


def least_loaded(
    request: ClusterRequest,
    matches: Mapping[str, int],
    pool: Sequence[InstanceState],
    now: float,
    context: PolicyContext,
) -> Choice:
    """Choose the instance with the shortest queue, and of equal ones the one that has had the fewest prompts."""
    state = min(pool, key=lambda each: (each.queue(now), each.assigned))
    return local_choice(request, matches, state, now, context)


def cache_aware(
    request: ClusterRequest,
    matches: Mapping[str, int],
    pool: Sequence[InstanceState],
    now: float,
    context: PolicyContext,
) -> Choice:
    """Choose the instance with the least predicted TTFT, given its blocks (5.1): algorithm 1 without transfers."""
    return min((local_choice(request, matches, state, now, context) for state in pool), key=lambda each: each.ttft)


def kvcache_centric(
    request: ClusterRequest,
    matches: Mapping[str, int],
    pool: Sequence[InstanceState],
    now: float,
    context: PolicyContext,
) -> Choice:
    """Choose the instance with the least predicted TTFT, given the blocks that it has or fetches (algorithm 1).

    An instance whose prefix is shorter than the best one by the balancing threshold or more, or that has none at all,
    gets the difference from the best matched instance; the others compute it. Section 5.2 says that too ("we prefer to
    compute if the best remote prefix match is no larger than the local one multiplied by a threshold"), but also that
    a prefix is fetched "if the estimated additional prefill time is shorter than the transfer time", which is the
    opposite of what makes sense and is not in algorithm 1. This is algorithm 1: it compares no such times, but the
    transfer counts in the TTFT, by which the instance is chosen. Where the ratio is just the threshold, line 10 counts
    a transfer and line 30 makes none: here it is made, as it was counted.

    Fetched blocks stay: so hot prefixes spread over instances (lines 30 to 32).
    """
    source, size = _best_match(context), context.block_size
    best = 0 if source is None else context.held[source.name]
    chosen, least, fetches = pool[0], inf, False
    for state in pool:
        queue = state.queue(now)
        if queue >= least:
            continue  # whatever comes on top
        local = matches.get(state.name, 0)
        if source is None or local >= best or best < context.balancing_threshold * local:
            ttft = queue + state.spec.costs.prefill_seconds(local * size, request.prompt_tokens)
            does_fetch = False
        else:
            ttft = queue + send_seconds(source, (best - local) * size, now)
            ttft += state.spec.costs.prefill_seconds(best * size, request.prompt_tokens)
            does_fetch = True
        if ttft < least:
            chosen, least, fetches = state, ttft, does_fetch
    if source is None or not fetches:
        return local_choice(request, matches, chosen, now, context)
    first, cached = matches.get(chosen.name, 0) * size, best * size
    seconds = chosen.spec.costs.prefill_seconds(cached, request.prompt_tokens)
    transfer, send = Transfer(source.name, first, cached), send_seconds(source, cached - first, now)
    return Choice(chosen.name, cached, transfer, chosen.queue(now), send, seconds)


def _best_match(context: PolicyContext) -> InstanceState | None:
    """Return the first instance with the longest prefix, of those that may send it; None: none has it.

    Blocks of prompts that are not computed yet don't count: they would not be there when they are asked for.
    """
    best, found = 0, None
    for name, sender in context.senders.items():
        blocks = context.held.get(name, 0)
        if blocks > best:
            best, found = blocks, sender
    return found


def send_seconds(source: InstanceState, tokens: int, now: float) -> float:
    """Predict the seconds until KV cache has come from an instance, after all that it sends already."""
    spec = source.spec
    return source.sending(now) + spec.latency + spec.costs.transfer_bytes(tokens) / spec.bandwidth


def select_decode(
    prefill: InstanceState, rooms: Sequence[InstanceState], context: int, reserved: int, tpot: float
) -> tuple[InstanceState, float]:
    """Choose the instance that decodes: with memory if there is one, and of the least predicted TBT.

    An instance that does both, or that decodes and stands in for those that prefill, decodes what it reads, unless that
    would break the TBT SLO, which another one would keep.

    Args:
      rooms: instances that may take it, one at least.
      context: tokens that it decodes with.
      reserved: tokens of KV cache that are kept for it.
      tpot: seconds, its TBT SLO.

    Returns:
      (instance, predicted seconds between tokens once it and all that are expected there decode).
    """
    stays = prefill.role != "prefill"

    def rank(state: InstanceState) -> tuple[bool, bool, bool, float]:
        batch, _, kept = state.expected
        has_none = kept + reserved > state.spec.decode_tokens or batch >= state.spec.max_running
        tbt = state.tbt_with(context)
        return has_none, stays and tbt > tpot, stays and state is not prefill, tbt

    chosen = min(rooms, key=rank)
    return chosen, chosen.tbt_with(context)


def coupled_choice(
    request: ClusterRequest,
    matches: Mapping[str, int],
    rooms: Sequence[InstanceState],
    split: float,
    now: float,
    context: PolicyContext,
) -> Choice | None:
    """Read a prompt where it is decoded; None: to read it elsewhere pays, or no instance may.

    An instance that only decodes reads what fits into one of its steps and keeps the TBT SLO there, one prompt at a
    time, as section 4 says. One that does both and will keep the SLO reads what it would have read within `split`, the
    seconds until a prompt that is read elsewhere has come, keys and values included.
    """
    found = list[Choice]()
    for state in rooms:
        if state.role == "both":
            choice = local_choice(request, matches, state, now, context)
            if state.tbt_with(request.prompt_tokens) <= context.tpot and choice.ttft <= split:
                found.append(choice)
        elif state.queue(now) == 0:
            batch, tokens, _ = state.decoding
            cached = matches.get(state.name, 0) * context.block_size
            seconds = state.spec.costs.inline_seconds(int(batch), int(tokens), cached, request.prompt_tokens)
            if seconds <= context.tpot:
                found.append(Choice(state.name, cached, None, 0.0, 0.0, seconds))
    return min(found, key=lambda each: each.ttft, default=None)


POLICY_FUNCTIONS: dict[str, Policy] = {
    "random": random,
    "least_loaded": least_loaded,
    "cache_aware": cache_aware,
    "kvcache_centric": kvcache_centric,
}


def check_choice(
    choice: Choice, request: ClusterRequest, pool: Sequence[InstanceState], context: PolicyContext
) -> None:
    """Raise ValueError if a user's policy chose something impossible."""
    names, transfer, size = {each.name for each in pool}, choice.transfer, context.block_size
    if choice.instance not in names:
        raise ValueError(f"policy must choose one of {sorted(names)}, got {choice.instance!r}")
    if not 0 <= choice.cached < request.prompt_tokens or choice.cached % size:
        raise ValueError(f"policy must choose cached tokens in blocks of {size} below the prompt, got {choice.cached}")
    if not all(0 <= seconds < inf for seconds in choice[3:]):
        raise ValueError(f"policy must choose finite seconds, not negative, got {choice}")
    if transfer is not None:
        if transfer.source not in context.senders or transfer.source == choice.instance:
            raise ValueError(f"policy must choose a transfer from another instance, got {transfer}")
        if not 0 <= transfer.first < transfer.stop == choice.cached or transfer.first % size:
            raise ValueError(f"policy must choose a transfer of blocks up to the cached tokens, got {transfer}")
