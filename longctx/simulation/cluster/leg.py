"""`Leg`: the part of a request that one simulated core serves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from longctx.simulation.instance.tokenless import TokenlessCompletion
from longctx.simulation.workloads import WorkloadRequest

if TYPE_CHECKING:
    from longctx.simulation.cluster.core import ClusterCore


@runtime_checkable
class LegOwner(Protocol):
    """Hears of a leg, at `loop.now`."""

    def chunk_begins(self, leg: "Leg", start: int, tokens: int) -> None:
        """So many tokens of its prompt are computed from now on; those before `start` are there."""
        ...

    def chunk_ends(self, leg: "Leg", start: int, tokens: int) -> None:
        """They have been computed."""
        ...

    def first_token(self, leg: "Leg") -> None:
        """Its prompt has been read, and its first token drawn, which is not its last."""
        ...

    def leg_ends(self, leg: "Leg", part: TokenlessCompletion) -> None:
        """It has all its tokens."""
        ...

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        """Pages of its prefix have come from another instance."""
        ...


@dataclass(eq=False)
class Leg:
    """The part of a request that one core serves.

    Attributes:
      request_id: no other leg of a core has it.
      arrival: of the request.
      known: tokens of its output that are known, and belong to the prompt here.
      max_tokens: that are generated here.
      came: leading tokens whose keys and values are in the host's memory, for this leg alone.
      staged: leading tokens, of full pages, that are there, and what follows them is computed here.
      source: another core that has leading pages, of `prefix` tokens, which are fetched from there; None: nothing is.
      part: the request's prompt, its answer after another one has read the prompt, or both.
    """

    request: WorkloadRequest
    request_id: str
    arrival: float
    owner: LegOwner
    known: int
    max_tokens: int
    came: int = 0
    staged: int = 0
    source: "ClusterCore | None" = None
    prefix: int = 0
    part: Literal["prompt", "answer", "whole"] = "whole"
