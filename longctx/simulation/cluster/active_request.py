"""A request on its way through a simulated cluster: it asks the conductor, and asks again where an instance dies."""

from typing import TYPE_CHECKING

import numpy as np

from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.request.output import Metrics
from longctx.simulation.cluster.attempt import Attempt
from longctx.simulation.cluster.block_keys import block_keys
from longctx.simulation.cluster.cluster_record import Rejected
from longctx.simulation.cluster.split_attempt import make_attempt
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
        self,
        run: "ClusterRun",
        request: WorkloadRequest,
        request_id: str,
        due: float,
        page_keys: list[Key],
        priority: int,
    ) -> None:
        self._run, self.request, self.request_id, self.due = run, request, request_id, due
        self.metrics = Metrics(run.loop.now, request.prompt_tokens)
        self.attempt: Attempt | None = None
        self.page_keys = page_keys
        lengths = request.prompt_tokens, request.output_tokens
        self._cluster_request = ClusterRequest(request_id, *lengths, block_keys(page_keys), priority=priority)
        self._refused_at: float | None = None
        self.num_assigned = self.num_deferred = 0
        self._times: list[float | np.ndarray] = []  # of its tokens

    def assign(self) -> None:
        """Ask the conductor, and do as it says."""
        run, now = self._run, self._run.loop.now
        waited = 0.0 if self._refused_at is None else now - self._refused_at
        decision = run.conductor.assign(self._cluster_request, now, generated=self.metrics.output_tokens, waited=waited)
        if isinstance(decision, Assignment):
            self.num_assigned += 1
            self.attempt = make_attempt(run, self, decision)
            self.attempt.begin()
        else:
            self.reject(decision)

    def reject(self, rejection: Rejection) -> None:
        """It is rejected, or asks again later; one that had been admitted waits for memory as long as it takes."""
        run, now = self._run, self._run.loop.now
        self.attempt = None
        had_place = self.num_assigned > 0 and rejection.stage == "prefill"
        self._refused_at = now if self._refused_at is None else self._refused_at
        if rejection.bound == "no_instance" and had_place:
            run.wait_for_instance(self)
        elif rejection.is_deferred or (rejection.bound == "memory" and had_place):
            self.num_deferred += 1
            run.record.num_deferred += 1
            run.loop.at(now + max(rejection.retry_after, run.settings.least_retry), self.assign)
        else:
            run.end_rejected(self, self._rejected(rejection))

    def take(self, part: TokenlessCompletion) -> None:
        """Add what a leg came to."""
        mine, metrics = self.metrics, part.metrics
        self._times += part.times or ()
        self.note_prompt(metrics)
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

    def note_prompt(self, metrics: Metrics) -> None:
        """Note when its prompt was begun, and what of it was cached, as whoever read it first says."""
        mine = self.metrics
        if mine.admitted is None and metrics.admitted is not None:
            mine.admitted, mine.slack = metrics.admitted, metrics.slack
            mine.cached_tokens, mine.loaded_tokens = metrics.cached_tokens, metrics.loaded_tokens

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
