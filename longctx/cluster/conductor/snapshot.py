"""`Snapshot`: all that a conductor knew when it decided, as plain data that another process can have."""

from typing import NamedTuple

from longctx.cluster.conductor.decision import Assignment, Decision, Rejection
from longctx.cluster.conductor.instance import InstanceSpec, Role
from longctx.cluster.conductor.state import ClusterState, OpenRequest


class OpenTask(NamedTuple):
    """A request that has not ended, or the one that was decided on.

    Attributes:
      prefill, decode: names of instances.
      prompt_tokens: of what is prefilled.
      computed: leading tokens of it that are cached, or have been computed by now, by prediction.
      output_tokens: that it will have in all, as far as is known: the mean of others, or its limit.
      generated: of these, by prediction; 0: its prompt is not computed.
      waited: seconds since it was assigned.
      ready_in: seconds until cached blocks have come from another instance.
      decoded_for: seconds since its prompt was computed.
      ttft, tpot: its SLOs in seconds.
    """

    request_id: str
    prefill: str
    decode: str
    prompt_tokens: int
    computed: int
    output_tokens: int
    generated: int
    waited: float
    ready_in: float
    decoded_for: float
    ttft: float
    tpot: float


class InstanceSnapshot(NamedTuple):
    """An instance. `queue_seconds`: predicted, of all its prompts, those included that are not this conductor's."""

    spec: InstanceSpec
    role: Role
    is_draining: bool
    queue_seconds: float


class Snapshot(NamedTuple):
    """A decision, and what was known before it.

    Attributes:
      is_admitted: what was decided.
      task: the request, placed as the policy would have it.
      ttft, tbt: what the conductor predicted for it, in seconds.
      open: all other requests, those that decode first, each group in the order in which it began.
    """

    is_admitted: bool
    task: OpenTask
    ttft: float
    tbt: float
    instances: tuple[InstanceSnapshot, ...]
    open: tuple[OpenTask, ...]


def take_snapshot(
    state: ClusterState, placed: OpenRequest, decision: Decision, now: float, output_tokens: float
) -> Snapshot:
    """What is known when a request is decided on, before anything is changed.

    Args:
      output_tokens: that requests have on average.
    """
    tasks = [
        _task(state, each, now, output_tokens)
        for group in (state.decoding, state.prefilling)
        for each in group.values()
        if each is not placed
    ]
    instances = tuple(
        InstanceSnapshot(each.spec, each.role, each.is_draining, each.queue(now)) for each in state.instances.values()
    )
    assignment = placed.assignment
    is_prefilled = isinstance(decision, Rejection) and decision.stage == "decode"
    task = _task(state, placed, now, output_tokens, is_prefilled)
    return Snapshot(isinstance(decision, Assignment), task, assignment.ttft, assignment.tbt, instances, tuple(tasks))


def _task(
    state: ClusterState, open_request: OpenRequest, now: float, mean: float, is_prefilled: bool = False
) -> OpenTask:
    placed, request, config = open_request.assignment, open_request.request, state.config
    since = open_request.decode_since
    output = min(request.max_tokens, max(1, round(mean)))
    generated, computed = 0, placed.cached
    if since is not None:
        instance = state.instances[placed.decode]
        tbt = instance.tbt(instance.decoding)
        # One token came with the prefill; a request that has gone on for longer than the mean has one more to go.
        generated = max(1, min(output - 1, 1 + int((now - since) / tbt))) if tbt > 0 else 1
        computed = request.prompt_tokens
    elif is_prefilled:
        generated, computed = 1, request.prompt_tokens
    elif placed.prefill_seconds > 0:
        begun = open_request.assigned_at + placed.ttft - placed.prefill_seconds
        share = min(1.0, max(0.0, (now - begun) / placed.prefill_seconds))
        computed += int(share * (request.prompt_tokens - 1 - placed.cached))
    return OpenTask(
        request.request_id,
        placed.prefill,
        placed.decode,
        request.prompt_tokens,
        computed,
        max(output, generated + 1),
        generated,
        now - open_request.assigned_at,
        max(0.0, open_request.assigned_at + placed.transfer_seconds - now),
        0.0 if since is None else now - since,
        request.ttft or config.ttft,
        request.tpot or config.tpot,
    )
