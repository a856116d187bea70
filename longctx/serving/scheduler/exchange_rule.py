"""Which rows of a step are sharded over the context ranks, and which exchange they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from longctx.parallel.choose import choose_ring
from longctx.parallel.cost import Hardware, ModelShape
from longctx.serving.parallel_plan import ParallelPlan

if TYPE_CHECKING:
    from longctx.serving.scheduler.batch import Chunk


class Exchange(NamedTuple):
    """The exchange of a step's sharded rows, `"pass_q"` or `"pass_kv"`, and why it was chosen."""

    name: str
    reason: str


class ExchangeRule:
    """Decides by the plan, or by predicted seconds; the same arguments give the same answer.

    Args:
      rows: of a step, at most.
      model: the heads of one device.
      hardware: one device, and its link to the next context rank.
    """

    def __init__(
        self, plan: ParallelPlan, rows: int, model: ModelShape | None = None, hardware: Hardware | None = None
    ) -> None:
        self._plan, self._rows, self._model, self._hardware = plan, rows, model, hardware

    def shards(self, decodes: bool, remaining: int) -> bool:
        """Whether a sequence's next rows are sharded: all if pages interleave, else prompts longer than a step.

        Args:
          remaining: tokens of its prompt that are to be computed.
        """
        plan = self._plan
        return plan.shards_rows and (plan.placement == "interleave" or (not decodes and remaining > self._rows))

    def choose(self, chunks: list[Chunk]) -> Exchange | None:
        """The exchange of a step's sharded chunks; None: it has none.

        Decodes ask for all that is cached of each: for them queries go round.
        """
        chunks = [chunk for chunk in chunks if chunk.sharded]
        if not chunks:
            return None
        if self._plan.exchange != "auto":
            return Exchange(self._plan.exchange, "the plan's")
        if any(chunk.num_tokens == 1 for chunk in chunks):
            return Exchange("pass_q", "decodes")
        if self._model is None or self._hardware is None:
            return Exchange("pass_q", "no hardware to predict from")
        tokens, cached = sum(chunk.num_tokens for chunk in chunks), max(chunk.start for chunk in chunks)
        times = choose_ring(tokens, cached, self._plan.context, self._model, self._hardware).times
        seconds = {name: times[name].total for name in ("pass_kv", "pass_q")}
        name = min(seconds, key=seconds.__getitem__)
        predicted = ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in seconds.items())
        return Exchange(name, f"predicted for T = {tokens}, P = {cached}: {predicted}")
