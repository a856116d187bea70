"""`InstanceView`: what is known of an instance, for metrics and pages."""

from typing import NamedTuple

from longctx.cluster.conductor.instance import Role
from longctx.cluster.conductor.state import InstanceState


class InstanceView(NamedTuple):
    """An instance as metrics and pages show it.

    Attributes:
      queue_seconds: predicted, of its prompts.
      decoding, decode_tokens: requests that decode, and tokens of their contexts.
      reserved_tokens, capacity_tokens: of KV cache where it decodes: kept for requests, and in all.
      tbt: predicted seconds between tokens now.
      sending_seconds: until all has left that it sends.
      open_requests: that it has a part in.
    """

    name: str
    role: Role
    is_draining: bool
    queue_seconds: float
    decoding: int
    decode_tokens: int
    reserved_tokens: int
    capacity_tokens: int
    tbt: float
    sending_seconds: float
    open_requests: int


def view(state: InstanceState, now: float) -> InstanceView:
    """Show an instance."""
    batch, tokens, reserved = state.decoding
    return InstanceView(
        state.name, state.role, state.is_draining, state.queue(now), batch, tokens, reserved,
        state.spec.decode_tokens, state.tbt(state.decoding), state.sending(now), len(state.open),
    )  # fmt: skip
