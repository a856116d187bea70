"""One assignment of a request: where its prompt is read, the pages that move, where it decodes.

Source: Mooncake, section 3, figure 4. Which instance draws the first token: see `ClusterSettings.first_token`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from longctx.cluster.conductor.decision import Assignment
from longctx.simulation.cluster.cluster_record import Moved, Placed
from longctx.simulation.cluster.core import ClusterCore, Leg
from longctx.simulation.cluster.page_stream import PageStream
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

    def _answer(self, came: int = 0, coming: int = 0) -> Leg:
        """The leg that decodes."""
        active = self._active
        known = active.metrics.output_tokens
        left = active.request.output_tokens - known
        leg = Leg(active.request, active.request_id, active.metrics.arrival, self, known, left, part="answer")
        leg.came, leg.coming = came, coming
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


class SplitAttempt(Attempt):
    """One instance reads the prompt and draws the first token; another one goes on when all pages have come."""

    def __init__(self, run: "ClusterRun", active: "ActiveRequest", assignment: Assignment) -> None:
        super().__init__(run, active, assignment)
        self._stream: PageStream | None = None
        self._read_at: float | None = None  # when the prompt had been read

    def needs(self, name: str) -> bool:
        if self.assignment.prefill == name and (self._read_at is None or self._stream is not None):
            return True
        return super().needs(name)

    def begin(self) -> None:
        self._begin_stream(0, self._known_tokens)
        self._after_calls(1, lambda: self._serve(self.assignment.prefill, self._prompt("prompt", 1)))

    def abort(self) -> None:
        super().abort()
        if self._stream is not None:
            self._stream.cancel()

    def chunk_begins(self, leg: Leg, start: int, tokens: int) -> None:
        if self._stream is not None and leg.part == "prompt":
            self._stream.begin_chunk(start, tokens)

    def chunk_ends(self, leg: Leg, start: int, tokens: int) -> None:
        if self._stream is not None and leg.part == "prompt":
            self._stream.end_chunk(start, tokens)

    def leg_ends(self, leg: Leg, part: TokenlessCompletion) -> None:
        active, run = self._active, self._run
        if leg.part == "answer" or active.metrics.output_tokens + 1 == active.request.output_tokens:
            if self._stream is not None:
                self._stream.cancel()
            super().leg_ends(leg, part)
            return
        # The prompt has been read, and its first token is there. The decoding instance is asked once more (3, step 4).
        del self._cores[leg.part]
        active.take(part)
        self._read_at = run.loop.now
        rejection = run.conductor.prefilled(active.request_id, run.loop.now)
        assert self._stream is not None
        if rejection is not None:
            self.abort()
            active.reject(rejection)
        else:
            self._stream.finish()

    @property
    def _known_tokens(self) -> int:
        """Tokens of the prompt, and of the answer as far as it is known."""
        return self._active.request.prompt_tokens + self._active.metrics.output_tokens

    def _begin_stream(self, first: int, stop: int) -> None:
        run, core = self._run, self._run.core(self.assignment.prefill)
        layers = run.nodes[core.name].spec.model.num_layers
        self._stream = PageStream(
            run.loop,
            core.nic,
            core.page_bytes / core.config.page_size,
            layers,
            run.settings.overlap,
            first,
            stop,
            self._pages_came,
        )

    def _pages_came(self) -> None:
        """All pages are in the memory of the decoding instance's host: the request joins its batch."""
        self._note_pages()
        self._serve(self.assignment.decode, self._answer(came=self._known_tokens - 1))

    def _note_pages(self) -> None:
        stream, placed, run = self._stream, self.assignment, self._run
        assert stream is not None
        assert stream.begun is not None
        assert self._read_at is not None
        self._stream = None
        waited = run.loop.now - self._read_at
        self._note_moved("pages", placed.prefill, placed.decode, stream.num_bytes, stream.begun, waited)


class ReservedAttempt(SplitAttempt):
    """The request waits with slot and pages where it decodes, which gets full pages and draws the first token."""

    def begin(self) -> None:
        run, active, placed = self._run, self._active, self.assignment
        decode = run.core(placed.decode)
        size = decode.config.page_size
        stop = (self._known_tokens - 1) // size * size
        there = decode.count_held(active.page_keys) * size if decode.config.prefix_cache else 0
        is_there = there >= stop  # it has all that another one could read for it
        coming = 0 if is_there else stop
        self._after_calls(1, lambda: self._serve(placed.decode, self._answer(coming=coming)))
        if is_there:
            self._read_at = run.loop.now
        else:
            self._begin_stream(there, stop)
            self._after_calls(2, lambda: self._serve(placed.prefill, self._prompt("prompt", 1)))

    def first_token(self, leg: Leg) -> None:
        if leg.part == "answer":
            active, run = self._active, self._run
            rejection = run.conductor.prefilled(active.request_id, run.loop.now)
            if rejection is not None:
                self.abort()
                active.reject(rejection)

    def leg_ends(self, leg: Leg, part: TokenlessCompletion) -> None:
        if leg.part == "answer":
            super().leg_ends(leg, part)
            return
        del self._cores[leg.part]
        self._active.note_prompt(part.metrics)
        self._read_at = self._run.loop.now
        assert self._stream is not None
        self._stream.finish()

    def _pages_came(self) -> None:
        self._note_pages()
        self._cores["answer"].end_pages(self._active.request_id)


def make_attempt(run: "ClusterRun", active: "ActiveRequest", assignment: Assignment) -> Attempt:
    """The attempt that follows from an assignment and the settings."""
    if assignment.prefill == assignment.decode:
        return Attempt(run, active, assignment)
    if run.settings.first_token == "decode":
        return ReservedAttempt(run, active, assignment)
    return SplitAttempt(run, active, assignment)
