"""One assignment of a request, whose legs it owns."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from longctx.cluster.conductor.request import Assignment
from longctx.simulation.cluster.cluster_record import Moved, Placed
from longctx.simulation.cluster.core import ClusterCore
from longctx.simulation.cluster.leg import Leg
from longctx.simulation.instance.tokenless import TokenlessCompletion

if TYPE_CHECKING:
    from longctx.simulation.cluster.active_request import ActiveRequest
    from longctx.simulation.cluster.run import ClusterRun


class Attempt:
    """An assignment whose request one instance serves whole, and what all assignments have in common."""

    def __init__(self, run: "ClusterRun", active: "ActiveRequest", assignment: Assignment) -> None:
        self._run, self._active, self.assignment = run, active, assignment
        self._cores: dict[str, ClusterCore] = {}  # by the part of the request that they have
        self._is_over = False

    def needs(self, name: str) -> bool:
        """Whether it depends on an instance still."""
        return self.assignment.decode == name

    def begin(self) -> None:
        """Have the request served."""
        left = self._active.request.output_tokens - self._active.metrics.output_tokens
        self._after_calls(1, lambda: self._serve(self.assignment.prefill, self._prompt("whole", left)))

    def abort(self) -> None:
        """End it wherever it is; its tokens so far are the request's."""
        self._is_over = True
        for part, core in self._cores.items():
            cancelled = core.cancel(self._active.request_id)
            if part != "prompt":  # whose token is the answer's first one, or nobody's
                self._active.take(cancelled)
        self._cores.clear()

    # What cores tell.

    def chunk_begins(self, leg: Leg, start: int, tokens: int) -> None:
        pass

    def chunk_ends(self, leg: Leg, start: int, tokens: int) -> None:
        pass

    def first_token(self, leg: Leg) -> None:
        self._run.conductor.first_token(self._active.request_id, self._run.loop.now)

    def leg_ends(self, leg: Leg, part: TokenlessCompletion) -> None:
        del self._cores[leg.part]
        self._active.take(part)
        self._end(part)

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        now = self._run.loop.now
        self._note_moved("prefix", source, self.assignment.prefill, num_bytes, begun, now - begun)

    # Parts of the above.

    def _prompt(self, part: Literal["prompt", "whole"], max_tokens: int) -> Leg:
        """The leg that reads the prompt, with what it fetches from another instance."""
        active, transfer = self._active, self.assignment.transfer
        source = None if transfer is None else self._run.nodes[transfer.source].core
        known = active.metrics.output_tokens
        leg = Leg(active.request, active.request_id, active.metrics.arrival, self, known, max_tokens, part=part)
        if transfer is not None and source is not None:  # it has not died since
            leg.source, leg.prefix = source, transfer.stop
        return leg

    def _answer(self, came: int = 0, staged: int = 0) -> Leg:
        """The leg that decodes."""
        active = self._active
        known = active.metrics.output_tokens
        left = active.request.output_tokens - known
        leg = Leg(active.request, active.request_id, active.metrics.arrival, self, known, left, part="answer")
        leg.came, leg.staged = came, staged
        return leg

    def _serve(self, name: str, leg: Leg) -> None:
        self._cores[leg.part] = core = self._run.core(name)
        core.serve(leg)

    def _after_calls(self, count: int, action: Callable[[], object]) -> None:
        """Do something once so many servers have passed the request on, unless it is over then."""
        seconds = count * self._run.settings.call_seconds
        if seconds:
            self._run.loop.at(self._run.loop.now + seconds, lambda: None if self._is_over else action())
        else:
            action()

    def _end(self, part: TokenlessCompletion) -> None:
        """The request has all its tokens."""
        active = self._active
        self._is_over = True
        active.metrics.finished = part.metrics.finished
        self._run.end_served(active, Placed(self.assignment, active.num_assigned, active.slowest_gaps()))

    def _note_moved(
        self,
        kind: Literal["prefix", "pages"],
        source: str,
        target: str,
        num_bytes: float,
        begun: float,
        exposed: float,
    ) -> None:
        run, number = self._run, self._active.request.number
        times = begun - run.start, run.loop.now - run.start, exposed
        run.record.moved.append(Moved(number, kind, source, target, num_bytes, *times))
