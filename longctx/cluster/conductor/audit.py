"""The shadow audit: whether rejections were right, and whether admissions got what was predicted.

A seeded sample of decisions is kept, as plain data (`Snapshot`). Whoever drives has them run forward in a thread or
process of low priority; `longctx.simulation.cluster.forward` does so in the simulator. A rejection was wrong if the
request would have kept its SLOs, and would have made no other request miss its own. An admission is compared with what
the request got.
"""

import threading
from collections import OrderedDict, deque
from random import Random
from typing import NamedTuple, Protocol, runtime_checkable

from longctx.cluster.conductor.decision import Assignment, Decision, Rejection
from longctx.cluster.conductor.request import ClusterRequest
from longctx.cluster.conductor.snapshot import Snapshot, take_snapshot
from longctx.cluster.conductor.state import ClusterState, OpenRequest
from longctx.serving.validation import check_integer, check_real

_FIRST_TOKENS = 256.0  # of an output, until a request has ended
_MEMORY = 256  # requests over which the length of outputs is averaged, about


class Outcome(NamedTuple):
    """What would have come of a request, run forward from a snapshot.

    Attributes:
      ttft, tbt: seconds; inf: it never had a token.
      others_broken: other requests that would have kept their SLOs without it, and not with it.
    """

    ttft: float
    tbt: float
    others_broken: int = 0


@runtime_checkable
class Forward(Protocol):
    """Runs a snapshot forward."""

    def __call__(self, snapshot: Snapshot) -> Outcome: ...


class AuditTotals(NamedTuple):
    """Counters of a shadow audit.

    Attributes:
      rejections: by load, of requests that could have been placed; deferred ones don't count.
      rejections_audited, rejections_wrong: of these, those that were run forward, and those found wrong.
      admissions: of requests.
      admissions_audited: that were run forward and have ended.
      admissions_wrong: of these, those that missed an SLO.
      predicted_ttft, simulated_ttft, ttft: sums of seconds over `admissions_audited`: by the conductor, run forward,
        and as it was.
      predicted_tbt, simulated_tbt, tbt: the same of TBT.
      dropped: samples for which there was no time.
    """

    rejections: int = 0
    rejections_audited: int = 0
    rejections_wrong: int = 0
    admissions: int = 0
    admissions_audited: int = 0
    admissions_wrong: int = 0
    predicted_ttft: float = 0.0
    simulated_ttft: float = 0.0
    ttft: float = 0.0
    predicted_tbt: float = 0.0
    simulated_tbt: float = 0.0
    tbt: float = 0.0
    dropped: int = 0

    @property
    def rejections_wrong_estimate(self) -> float:
        """Wrong rejections among all, as many for each as in the sample: each stands for as many as any other."""
        return self.rejections * self.rejections_wrong / self.rejections_audited if self.rejections_audited else 0.0


class _Admitted:
    """An admission of the sample: run forward and ended, in either order."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.outcome: Outcome | None = None
        self.got: tuple[float, float] | None = None


class ShadowAudit:
    """Observes a conductor. `take` and `note` may be called from another thread.

    Args:
      rejections, admissions: the shares of decisions that are audited, 0 to 1.
      capacity: samples that wait for their run at most; the oldest is dropped.

    Raises:
      TypeError, ValueError: an argument is of another type or out of range.
    """

    def __init__(self, rejections: float = 0.02, admissions: float = 0.02, seed: int = 0, capacity: int = 32) -> None:
        self._rejections = check_real("rejections", rejections, 0, 1)
        self._admissions = check_real("admissions", admissions, 0, 1)
        self._random = Random(check_integer("seed", seed, 0))
        self._capacity = check_integer("capacity", capacity, 1)
        self._waiting: deque[Snapshot] = deque()
        self._admitted: OrderedDict[str, _Admitted] = OrderedDict()
        self._totals, self._lock = AuditTotals(), threading.Lock()
        self._output_tokens, self._num_ended = _FIRST_TOKENS, 0

    # What the conductor tells.

    def decided(
        self, decision: Decision, request: ClusterRequest, now: float, state: ClusterState, placed: OpenRequest | None
    ) -> None:
        """A decision, before it changes anything."""
        if placed is None or placed.generated or (isinstance(decision, Rejection) and decision.is_deferred):
            return
        is_admitted = isinstance(decision, Assignment)
        is_sampled = self._random.random() < (self._admissions if is_admitted else self._rejections)
        if is_sampled:
            snapshot = take_snapshot(state, placed, decision, now, self._output_tokens)
        with self._lock:
            self._count(admissions=int(is_admitted), rejections=int(not is_admitted))
            if is_admitted:  # what was predicted before an instance died is not what it gets now
                self._admitted.pop(request.request_id, None)
            if is_sampled:
                self._keep(snapshot)

    def ended(self, request_id: str, ttft: float, tbt: float, output_tokens: int) -> None:
        """A request has had all its tokens; measured seconds."""
        self._num_ended = min(self._num_ended + 1, _MEMORY)
        self._output_tokens += (output_tokens - self._output_tokens) / self._num_ended
        with self._lock:
            admission = self._admitted.get(request_id)
            if admission is not None:
                admission.got = (ttft, tbt)
                self._compare(request_id, admission)

    # Whoever runs snapshots forward.

    def take(self) -> Snapshot | None:
        """The next snapshot to run forward; None: there is none."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def note(self, snapshot: Snapshot, outcome: Outcome) -> None:
        """What came of a snapshot that was taken."""
        task = snapshot.task
        with self._lock:
            if snapshot.is_admitted:
                admission = self._admitted.get(task.request_id)
                if admission is not None and admission.snapshot is snapshot:
                    admission.outcome = outcome
                    self._compare(task.request_id, admission)
            else:
                keeps = outcome.ttft <= task.ttft and outcome.tbt <= task.tpot
                self._count(rejections_audited=1, rejections_wrong=int(keeps and not outcome.others_broken))

    @property
    def totals(self) -> AuditTotals:
        with self._lock:
            return self._totals

    # Under the lock.

    def _keep(self, snapshot: Snapshot) -> None:
        if len(self._waiting) == self._capacity:
            dropped = self._waiting.popleft()
            admission = self._admitted.get(dropped.task.request_id)
            if admission is not None and admission.snapshot is dropped:
                del self._admitted[dropped.task.request_id]
            self._count(dropped=1)
        self._waiting.append(snapshot)
        if snapshot.is_admitted:
            self._admitted[snapshot.task.request_id] = _Admitted(snapshot)
            if len(self._admitted) > 16 * self._capacity:  # cancelled ones don't end
                self._admitted.popitem(last=False)

    def _compare(self, request_id: str, admission: _Admitted) -> None:
        if admission.outcome is None or admission.got is None:
            return
        del self._admitted[request_id]
        snapshot, outcome, (ttft, tbt) = admission.snapshot, admission.outcome, admission.got
        self._count(
            admissions_audited=1,
            admissions_wrong=int(ttft > snapshot.task.ttft or tbt > snapshot.task.tpot),
            predicted_ttft=snapshot.ttft,
            simulated_ttft=outcome.ttft,
            ttft=ttft,
            predicted_tbt=snapshot.tbt,
            simulated_tbt=outcome.tbt,
            tbt=tbt,
        )

    def _count(self, **changes: float) -> None:
        self._totals = self._totals._replace(**{name: getattr(self._totals, name) + n for name, n in changes.items()})
