"""A request on its way through a simulated cluster: assigned, prefilled, moved, decoded; anew where an instance died.

Source: Mooncake, section 3, figure 4.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np

from longctx.cluster.conductor.decision import Assignment, Rejection
from longctx.cluster.conductor.request import ClusterRequest
from longctx.serving.request.output import Metrics
from longctx.simulation.cluster.cluster_record import Moved, Placed, Rejected
from longctx.simulation.cluster.core import ClusterCore, Leg
from longctx.simulation.cluster.page_stream import PageStream
from longctx.simulation.instance.tokenless import TokenlessCompletion
from longctx.simulation.workloads import WorkloadRequest

if TYPE_CHECKING:
    from longctx.simulation.cluster.run import ClusterRun


class ActiveRequest:
    """A request that has come and has not ended.

    Attributes:
      metrics: of all of it, so far; times are those of the loop.
      attempt: where it is being served; None: nowhere, it waits to be assigned.
    """

    def __init__(
        self, run: "ClusterRun", request: WorkloadRequest, request_id: str, due: float, keys: np.ndarray, priority: int
    ) -> None:
        self._run, self.request, self.request_id, self.due = run, request, request_id, due
        self.metrics = Metrics(run.loop.now, request.prompt_tokens)
        self.attempt: Attempt | None = None
        self._wish = ClusterRequest(request_id, request.prompt_tokens, request.output_tokens, keys, priority=priority)
        self.num_assigned = self.num_deferred = 0
        self._times: list[float | np.ndarray] = []  # of its tokens

    def assign(self) -> None:
        """Ask the conductor, and do as it says."""
        run, now = self._run, self._run.loop.now
        decision = run.conductor.assign(self._wish, now, generated=self.metrics.output_tokens)
        if isinstance(decision, Assignment):
            self.num_assigned += 1
            self.attempt = Attempt(run, self, decision)
            self.attempt.begin()
        else:
            self.reject(decision)

    def reject(self, rejection: Rejection) -> None:
        """It is rejected, or asks again later; one that had been admitted waits for memory as long as it takes."""
        run, now = self._run, self._run.loop.now
        self.attempt = None
        had_place = self.num_assigned > 0 and rejection.stage == "prefill"
        may_wait = rejection.is_deferred and now - self.metrics.arrival < run.conductor.config.defer_seconds
        if rejection.bound == "no_instance" and had_place:
            run.wait_for_instance(self)
        elif may_wait or (rejection.bound == "memory" and had_place):
            self.num_deferred += 1
            run.record.num_deferred += 1
            run.loop.at(now + max(rejection.retry_after, run.settings.least_retry), self.assign)
        else:
            run.end_rejected(self, self._rejected(rejection))

    def take(self, part: TokenlessCompletion) -> None:
        """Add what a leg came to."""
        mine, metrics = self.metrics, part.metrics
        self._times += part.times or ()
        if mine.admitted is None and metrics.admitted is not None:
            mine.admitted, mine.slack = metrics.admitted, metrics.slack
            mine.cached_tokens, mine.loaded_tokens = metrics.cached_tokens, metrics.loaded_tokens
        mine.preemptions += metrics.preemptions
        mine.recomputed_tokens += metrics.recomputed_tokens
        mine.output_tokens += metrics.output_tokens
        if metrics.first_token is not None:
            if mine.first_token is None:
                mine.first_token = metrics.first_token
            else:
                assert mine.last_token is not None
                mine.longest_gap = max(mine.longest_gap, metrics.first_token - mine.last_token)
            mine.longest_gap = max(mine.longest_gap, metrics.longest_gap)
            mine.last_token = metrics.last_token

    def slowest_gaps(self) -> float | None:
        """The mean of the longest tenth of the gaps between its tokens, in seconds; None: there is none."""
        times = np.concatenate([np.atleast_1d(each) for each in self._times])
        if len(times) < 2:
            return None
        gaps, count = np.diff(times), -(-(len(times) - 1) // 10)
        return float(np.partition(gaps, -count)[-count:].mean())

    def abort(self) -> None:
        """Where it is served an instance has died: it is to be assigned anew, with the tokens that it has had."""
        if self.attempt is not None:
            self.attempt.abort()
            self.attempt = None

    def _rejected(self, rejection: Rejection) -> Rejected:
        return Rejected(
            self.request.number,
            self.due,
            self._run.loop.now - self._run.start,
            rejection.stage,
            rejection.bound,
            rejection.ttft,
            rejection.tbt,
            rejection.load,
            self.request.prompt_tokens,
            self.num_deferred,
        )


class Attempt:
    """One assignment of a request; the owner of its legs."""

    def __init__(self, run: "ClusterRun", active: ActiveRequest, assignment: Assignment) -> None:
        self._run, self._active, self.assignment = run, active, assignment
        self._legs: list[ClusterCore] = []  # cores that have a leg
        self._stream: PageStream | None = None
        self._is_coupled = assignment.prefill == assignment.decode
        self._is_prefilled = False
        self._prefill_end = 0.0

    def needs(self, name: str) -> bool:
        """Whether it depends on an instance still."""
        if self.assignment.decode == name:
            return True
        return self.assignment.prefill == name and (not self._is_prefilled or self._stream is not None)

    def begin(self) -> None:
        """Have the prompt read."""
        run, active, transfer = self._run, self._active, self.assignment.transfer
        core = run.core(self.assignment.prefill)
        if not self._is_coupled:
            layers, size = run.instance(core.name).model.num_layers, core.config.page_size
            self._stream = PageStream(
                run.loop, core.nic, core.page_bytes / size, layers, run.settings.overlap, self._pages_came
            )
        known = active.metrics.output_tokens
        leg = Leg(
            active.request,
            active.request_id,
            active.metrics.arrival,
            self,
            known,
            active.request.output_tokens - known if self._is_coupled else 1,
            source=None if transfer is None else run.core(transfer.source),
            prefix=0 if transfer is None else transfer.stop,
        )
        self._serve(core, leg)

    def abort(self) -> None:
        """End it wherever it is; its tokens so far are the request's."""
        for core in self._legs:
            self._active.take(core.cancel(self._active.request_id))
        self._legs.clear()
        if self._stream is not None:
            self._stream.cancel()

    # What cores tell, and the stream of pages.

    def chunk_begins(self, start: int, tokens: int) -> None:
        if self._stream is not None:
            self._stream.begin_chunk(start, tokens)

    def chunk_ends(self, start: int, tokens: int) -> None:
        if self._stream is not None:
            self._stream.end_chunk(tokens)

    def first_token(self) -> None:
        self._is_prefilled = True
        self._run.conductor.first_token(self._active.request_id, self._run.loop.now)

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        target, now = self.assignment.prefill, self._run.loop.now
        self._note_moved("prefix", source, target, num_bytes, begun, now - begun)

    def leg_ends(self, part: TokenlessCompletion) -> None:
        active, run = self._active, self._run
        self._legs.pop(0)
        active.take(part)
        if active.metrics.output_tokens == active.request.output_tokens:
            active.metrics.finished = part.metrics.finished
            if self._stream is not None:
                self._stream.cancel()
            run.end_served(active, Placed(self.assignment, active.num_assigned, active.slowest_gaps()))
            return
        # The prompt has been read, and its first token is there. The decoding instance is asked once more (3, step 4).
        self._is_prefilled, self._prefill_end = True, run.loop.now
        rejection = run.conductor.prefilled(active.request_id, run.loop.now)
        assert self._stream is not None
        if rejection is not None:
            self._stream.cancel()
            active.reject(rejection)
            return
        run.conductor.first_token(active.request_id, run.loop.now)
        self._stream.finish()

    def _pages_came(self) -> None:
        """All pages are in the memory of the decoding instance's host: the request joins its batch."""
        active, run, stream = self._active, self._run, self._stream
        assert stream is not None
        assert stream.begun is not None
        self._stream = None
        placed, waited = self.assignment, run.loop.now - self._prefill_end
        self._note_moved("pages", placed.prefill, placed.decode, stream.num_bytes, stream.begun, waited)
        known = active.metrics.output_tokens
        left, came = active.request.output_tokens - known, active.request.prompt_tokens + known - 1
        leg = Leg(active.request, active.request_id, active.metrics.arrival, self, known, left, came=came)
        self._serve(run.core(placed.decode), leg)

    def _serve(self, core: ClusterCore, leg: Leg) -> None:
        self._legs.append(core)
        core.serve(leg)

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
