"""Requests on their way through a simulated cluster, and their dispatches to instances.

Source: Mooncake, section 3, figure 4 (one instance reads the prompt, and another one goes on with it).
"""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from longctx.cluster.conductor.conductor import Conductor
from longctx.cluster.conductor.request import Assignment, ClusterRequest, Rejection
from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.request.output import Metrics
from longctx.simulation.cluster.core import ClusterCore, Node, SubRequest, SubRequestListener, block_keys
from longctx.simulation.cluster.page_stream import PageStream
from longctx.simulation.cluster.settings import ClusterSettings
from longctx.simulation.event_loop import EventLoop, Thread
from longctx.simulation.instance.tokenless import TokenlessCompletion
from longctx.simulation.record import Moved, Placed, Record, Rejected, Served
from longctx.simulation.workloads import WorkloadRequest


@dataclass
class Cluster:
    """The instances of a run, their conductor, and what has come of the run.

    Attributes:
      router: the thread that has requests before the conductor, and passes tokens on.
      start: of the workload, by the loop.
      on_end: is called with each request that has been served or rejected.
      stranded: requests that are assigned when an instance comes.
    """

    nodes: dict[str, Node]
    loop: EventLoop
    conductor: Conductor
    router: Thread
    settings: ClusterSettings
    record: Record
    start: float
    on_end: Callable[["ActiveRequest"], object]
    stranded: list["ActiveRequest"] = field(default_factory=list)

    def core(self, name: str) -> ClusterCore:
        """Return the core of an instance that lives."""
        core = self.nodes[name].core
        assert core is not None, f"{name} is dead"
        return core


class ActiveRequest:
    """A request that has come and has not ended. It asks the conductor again where an instance dies.

    Attributes:
      metrics: of all of it, so far; times are those of the loop.
      dispatch: where it is being served; None: nowhere, it waits to be assigned.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: WorkloadRequest,
        request_id: str,
        due: float,
        page_keys: list[Key],
        priority: int,
    ) -> None:
        self._cluster, self.request, self.request_id, self.due = cluster, request, request_id, due
        self.metrics = Metrics(cluster.loop.now, request.prompt_tokens)
        self.dispatch: Dispatch | None = None
        self.page_keys = page_keys
        lengths = request.prompt_tokens, request.output_tokens
        self._cluster_request = ClusterRequest(request_id, *lengths, block_keys(page_keys), priority=priority)
        self._refused_at: float | None = None
        self._num_assigned = self._num_deferred = 0
        self._times: list[float | np.ndarray] = []  # of its tokens
        self._told: float | None = None  # when its client had the first one

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt, and of the answer as far as it is known."""
        return self.request.prompt_tokens + self.metrics.output_tokens

    def assign(self) -> None:
        """Ask the conductor, and do as it says."""
        cluster, now = self._cluster, self._cluster.loop.now
        waited = 0.0 if self._refused_at is None else now - self._refused_at
        generated = self.metrics.output_tokens
        decision = cluster.conductor.assign(self._cluster_request, now, generated=generated, waited=waited)
        if isinstance(decision, Assignment):
            self._num_assigned += 1
            self.dispatch = make_dispatch(cluster, self, decision)
            self.dispatch.begin()
        else:
            self.reject(decision)

    def reject(self, rejection: Rejection) -> None:
        """End here, or ask again later; one that had been admitted waits for memory as long as it takes."""
        cluster, now = self._cluster, self._cluster.loop.now
        self.dispatch = None
        had_place = self._num_assigned > 0 and rejection.stage == "prefill"
        self._refused_at = now if self._refused_at is None else self._refused_at
        if rejection.bound == "no_instance" and had_place:
            cluster.stranded.append(self)
        elif rejection.is_deferred or (rejection.bound == "memory" and had_place):
            self._num_deferred += 1
            cluster.record.num_deferred += 1
            cluster.loop.at(now + max(rejection.retry_after, cluster.settings.least_retry), self.assign)
        else:
            request, at = self.request, now - cluster.start
            why = rejection.stage, rejection.bound, rejection.ttft, rejection.tbt, rejection.load
            rejected = Rejected(request.number, self.due, at, *why, request.prompt_tokens, self._num_deferred)
            cluster.record.rejected.append(rejected)
            cluster.on_end(self)

    def take(self, part: TokenlessCompletion) -> None:
        """Add what a sub-request came to."""
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
        """Note when its prompt was begun, and what of it was cached, where it was read first."""
        mine = self.metrics
        if mine.admitted is None and metrics.admitted is not None:
            mine.admitted, mine.slack = metrics.admitted, metrics.slack
            mine.cached_tokens, mine.loaded_tokens = metrics.cached_tokens, metrics.loaded_tokens

    def note_told(self) -> float:
        """Note that its client has a token; return when it had the first one."""
        self._told = self._cluster.loop.now if self._told is None else self._told
        return self._told

    def finish(self, assignment: Assignment, finished: float) -> None:
        """End with all its tokens, of which its client has the first one by now."""
        cluster, metrics, config = self._cluster, self.metrics, self._cluster.conductor.config
        assert metrics.first_token is not None
        assert metrics.last_token is not None
        told = self.note_told()
        metrics.first_token, metrics.last_token = max(metrics.first_token, told), max(metrics.last_token, told)
        metrics.finished, metrics.ttft_deadline, metrics.tpot_target = max(finished, told), config.ttft, config.tpot
        cluster.conductor.finished(self.request_id, cluster.loop.now)
        served = Served.of(metrics, self.due, cluster.start, self.request.number, assignment.decode)
        cluster.record.served.append(served)
        cluster.record.placed.append(Placed(assignment, self._num_assigned, self._slowest_gaps()))
        cluster.on_end(self)

    def abort(self) -> None:
        """Leave where it is served; its tokens so far stay known."""
        if self.dispatch is not None:
            self.dispatch.abort()
            self.dispatch = None

    def _slowest_gaps(self) -> float | None:
        """Return the mean of the longest tenth of the gaps between its tokens, in seconds; None: there is none."""
        times = np.concatenate([np.atleast_1d(each) for each in self._times])
        if len(times) < 2:
            return None
        gaps, count = np.diff(times), -(-(len(times) - 1) // 10)
        return float(np.partition(gaps, -count)[-count:].mean())


class Dispatch(SubRequestListener):
    """A request at the one instance that serves it whole, and what all dispatches have in common."""

    def __init__(self, cluster: Cluster, active: ActiveRequest, assignment: Assignment) -> None:
        self._cluster, self._active, self._assignment = cluster, active, assignment
        self._cores: dict[str, ClusterCore] = {}  # by the part of the request that they have
        self._is_over = False

    def needs(self, name: str) -> bool:
        """Whether it still depends on an instance."""
        return self._assignment.decode == name

    def begin(self) -> None:
        """Have the request served."""
        left = self._active.request.output_tokens - self._active.metrics.output_tokens
        self._call([self._assignment.decode], lambda: self._read_prompt("whole", left))

    def abort(self) -> None:
        """End it wherever it is; its tokens so far are the request's."""
        self._is_over = True
        for part, core in self._cores.items():
            cancelled = core.cancel(self._active.request_id)
            if part != "prompt":  # its token is the answer's first one, or not used
                self._active.take(cancelled)
        self._cores.clear()

    def first_token(self, sub: SubRequest) -> None:
        self._cluster.conductor.first_token(self._active.request_id, self._cluster.loop.now)
        self._tell(1, self._active.note_told)

    def ended(self, sub: SubRequest, part: TokenlessCompletion) -> None:
        del self._cores[sub.part]
        self._active.take(part)
        self._is_over, self._active.dispatch, finished = True, None, part.metrics.finished
        assert finished is not None
        # Other tokens than a sole one have been told of.
        self._tell(1 if sub.max_tokens == 1 else 0, lambda: self._active.finish(self._assignment, finished))

    def prefix_came(self, source: str, num_bytes: float, begun: float) -> None:
        waited = self._cluster.loop.now - begun
        self._note_moved("prefix", source, self._assignment.prefill, num_bytes, begun, waited)

    def _read_prompt(self, part: Literal["prompt", "whole"], max_tokens: int) -> None:
        """Serve what reads the prompt, with what it fetches from another instance."""
        active, transfer = self._active, self._assignment.transfer
        known = active.metrics.output_tokens
        sub = SubRequest(active.request, active.request_id, active.metrics.arrival, self, known, max_tokens, part=part)
        source = None if transfer is None else self._cluster.nodes[transfer.source].core
        if transfer is not None and source is not None:  # it has not died since
            sub.source, sub.prefix = source, transfer.stop
        self._serve(self._assignment.prefill, sub)

    def _serve(self, name: str, sub: SubRequest) -> None:
        self._cores[sub.part] = core = self._cluster.core(name)
        core.serve(sub)

    def _call(self, names: List[str], action: Callable[[], object]) -> None:
        """Call `action` once these instances' servers, in order, have passed the request on, unless it is over then."""
        if self._is_over:
            return
        if not names:
            action()
            return
        loop, delay, core = self._cluster.loop, self._cluster.settings.call_seconds, self._cluster.core(names[0])
        seconds = core.spec.server.seconds(self._active.known_tokens)

        def call() -> None:
            if seconds:
                core.server.run(seconds, lambda: self._call(names[1:], action))
            else:
                self._call(names[1:], action)

        if delay:
            loop.at(loop.now + delay, call)
        else:
            call()

    def _tell(self, tokens: int, action: Callable[[], object]) -> None:
        """Call `action` once the decoding instance's server and the router have passed on all tokens, and these."""
        cluster = self._cluster
        core, of_router = cluster.core(self._assignment.decode), tokens * cluster.settings.router.token
        if core.spec.server.token or cluster.settings.router.token:
            core.server.run(tokens * core.spec.server.token, lambda: cluster.router.run(of_router, action))
        else:
            action()

    def _note_moved(
        self,
        kind: Literal["prefix", "pages"],
        source: str,
        target: str,
        num_bytes: float,
        begun: float,
        exposed: float,
    ) -> None:
        cluster = self._cluster
        times = begun - cluster.start, cluster.loop.now - cluster.start, exposed
        cluster.record.moved.append(Moved(self._active.request.number, kind, source, target, num_bytes, *times))


class SplitDispatch(Dispatch):
    """One instance reads the prompt and draws the first token; another one goes on when all pages have come."""

    def __init__(self, cluster: Cluster, active: ActiveRequest, assignment: Assignment) -> None:
        super().__init__(cluster, active, assignment)
        self._stream: PageStream | None = None
        self._read_at: float | None = None  # when the prompt had been read
        self._servers = [assignment.decode, assignment.prefill]  # in the order in which they have the request

    def needs(self, name: str) -> bool:
        if self._assignment.prefill == name and (self._read_at is None or self._stream is not None):
            return True
        return super().needs(name)

    def begin(self) -> None:
        self._begin_stream(0, self._active.known_tokens)
        self._call(self._servers, lambda: self._read_prompt("prompt", 1))

    def abort(self) -> None:
        super().abort()
        if self._stream is not None:
            self._stream.cancel()

    def chunk_begins(self, sub: SubRequest, start: int, tokens: int) -> None:
        if self._stream is not None and sub.part == "prompt":
            self._stream.begin_chunk(start, tokens)

    def chunk_ends(self, sub: SubRequest, start: int, tokens: int) -> None:
        if self._stream is not None and sub.part == "prompt":
            self._stream.end_chunk(start, tokens)

    def ended(self, sub: SubRequest, part: TokenlessCompletion) -> None:
        active = self._active
        if sub.part == "answer" or active.metrics.output_tokens + 1 == active.request.output_tokens:
            if self._stream is not None:
                self._stream.cancel()
            super().ended(sub, part)
            return
        # The prompt has been read, and its first token is there.
        del self._cores[sub.part]
        active.take(part)
        self._tell(1, active.note_told)
        if self._is_admitted():
            assert self._stream is not None
            self._stream.finish()

    def _is_admitted(self) -> bool:
        """Ask the decoding instance once more (section 3, step 4), and reject the request if it has no room."""
        active, now = self._active, self._cluster.loop.now
        self._read_at = now
        rejection = self._cluster.conductor.prefilled(active.request_id, now)
        if rejection is not None:
            self.abort()
            active.reject(rejection)
        return rejection is None

    def _begin_stream(self, first: int, stop: int) -> None:
        cluster, core = self._cluster, self._cluster.core(self._assignment.prefill)
        layers, overlap = cluster.nodes[core.name].spec.model.num_layers, cluster.settings.overlap
        token_bytes = core.page_bytes / core.config.page_size
        self._stream = PageStream(cluster.loop, core.nic, token_bytes, layers, overlap, first, stop, self._pages_came)

    def _pages_came(self) -> None:
        """Note that all pages are in the memory of the decoding instance's host, and go on there."""
        stream, assigned = self._stream, self._assignment
        assert stream is not None
        assert stream.begun is not None
        assert self._read_at is not None
        self._stream = None
        waited = self._cluster.loop.now - self._read_at
        self._note_moved("pages", assigned.prefill, assigned.decode, stream.num_bytes, stream.begun, waited)
        self._join()

    def _join(self) -> None:
        self._decode(came=self._active.known_tokens - 1)

    def _decode(self, came: int = 0, staged: int = 0) -> None:
        active = self._active
        known = active.metrics.output_tokens
        times, left = active.metrics.arrival, active.request.output_tokens - known
        sub = SubRequest(active.request, active.request_id, times, self, known, left, came, staged, part="answer")
        self._serve(self._assignment.decode, sub)


class StagedDispatch(SplitDispatch):
    """Full pages go to the memory of the decoding instance's host, which computes what follows them: the first token.

    Where it decodes, the request takes no slot and no page of the devices before all of them have come.
    """

    def __init__(self, cluster: Cluster, active: ActiveRequest, assignment: Assignment) -> None:
        super().__init__(cluster, active, assignment)
        self._staged = 0  # tokens whose pages come to the memory of the decoding instance's host

    def begin(self) -> None:
        active, decode = self._active, self._cluster.core(self._assignment.decode)
        size = decode.config.page_size
        stop = (active.known_tokens - 1) // size * size
        there = decode.count_held(active.page_keys) * size if decode.config.prefix_cache else 0
        if there >= stop:  # it has all that another one could read for it
            self._call(self._servers[:1], self._join)
        else:
            self._staged = stop
            self._begin_stream(there, stop)
            self._call(self._servers, lambda: self._read_prompt("prompt", 1))

    def first_token(self, sub: SubRequest) -> None:
        # The token of the prompt's sub-request is not used; the conductor was asked when the pages had come.
        if sub.part == "answer":
            self._tell(1, self._active.note_told)

    def ended(self, sub: SubRequest, part: TokenlessCompletion) -> None:
        if sub.part == "answer":
            super().ended(sub, part)
            return
        del self._cores[sub.part]
        self._active.note_prompt(part.metrics)
        self._read_at = self._cluster.loop.now
        assert self._stream is not None
        self._stream.finish()

    def _join(self) -> None:
        """Load the pages when the request joins a batch of the decoding instance, if that has room."""
        if self._is_admitted():
            self._decode(staged=self._staged)


def make_dispatch(cluster: Cluster, active: ActiveRequest, assignment: Assignment) -> Dispatch:
    """Make the dispatch that follows from an assignment and the settings."""
    if assignment.prefill == assignment.decode:
        return Dispatch(cluster, active, assignment)
    if cluster.settings.first_token == "decode":
        return StagedDispatch(cluster, active, assignment)
    return SplitDispatch(cluster, active, assignment)
