"""Assignments whose prompt one instance reads, and another one goes on with.

Source: Mooncake, section 3, figure 4. Which of them draws the first token: see `ClusterSettings.first_token`.
"""

from typing import TYPE_CHECKING

from longctx.cluster.conductor.request import Assignment
from longctx.simulation.cluster.attempt import Attempt
from longctx.simulation.cluster.leg import Leg
from longctx.simulation.cluster.page_stream import PageStream
from longctx.simulation.instance.tokenless import TokenlessCompletion

if TYPE_CHECKING:
    from longctx.simulation.cluster.active_request import ActiveRequest
    from longctx.simulation.cluster.run import ClusterRun


class SplitAttempt(Attempt):
    """One instance reads the prompt and draws the first token; another one goes on when all pages have come."""

    def __init__(self, run: "ClusterRun", active: "ActiveRequest", assignment: Assignment) -> None:
        super().__init__(run, active, assignment)
        self._stream: PageStream | None = None
        self._read_at: float | None = None  # when the prompt had been read
        self._staged = 0  # tokens whose pages come to the memory of the decoding instance's host

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


class StagedAttempt(SplitAttempt):
    """Full pages go to the memory of the decoding instance's host, which computes what follows them: the first token.

    Where it decodes, the request takes no slot and no page of the devices before all of them have come.
    """

    def begin(self) -> None:
        run, active, placed = self._run, self._active, self.assignment
        decode = run.core(placed.decode)
        size = decode.config.page_size
        stop = (self._known_tokens - 1) // size * size
        there = decode.count_held(active.page_keys) * size if decode.config.prefix_cache else 0
        if there >= stop:  # it has all that another one could read for it
            self._after_calls(1, self._join)
        else:
            self._staged = stop
            self._begin_stream(there, stop)
            self._after_calls(2, lambda: self._serve(placed.prefill, self._prompt("prompt", 1)))

    def first_token(self, leg: Leg) -> None:
        pass  # that of the prompt's leg is nobody's; the conductor was asked when the pages had come

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
        self._join()

    def _join(self) -> None:
        """The decoding instance is asked once more (3, step 4), and loads the pages when the request joins a batch."""
        run, active = self._run, self._active
        self._read_at = run.loop.now
        rejection = run.conductor.prefilled(active.request_id, run.loop.now)
        if rejection is not None:
            self.abort()
            active.reject(rejection)
        else:
            self._serve(self.assignment.decode, self._answer(staged=self._staged))


def make_attempt(run: "ClusterRun", active: "ActiveRequest", assignment: Assignment) -> Attempt:
    """The attempt that follows from an assignment and the settings."""
    if assignment.prefill == assignment.decode:
        return Attempt(run, active, assignment)
    if run.settings.first_token == "decode":
        return StagedAttempt(run, active, assignment)
    return SplitAttempt(run, active, assignment)
