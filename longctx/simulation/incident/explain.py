"""Why a request waited: the steps in which it was passed over, by whom, and under which rule."""

from typing import NamedTuple

from longctx.serving.predictor.runtime import Predictor
from longctx.serving.recording.reader import RecordedLog
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.policy import Policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State
from longctx.simulation.incident.replayer import Replayer
from longctx.simulation.incident.text import name_of, names


class Cause(NamedTuple):
    """Activity of a sequence in a step, or what it waits for. Steps of equal `kind` and `others` are told as one."""

    kind: str
    others: tuple[str, ...]
    text: str


class Span(NamedTuple):
    """Steps, from the first to the last, in which a sequence did or waited for something: from when, how long."""

    first: int
    last: int
    start: float
    seconds: float
    cause: Cause


class Order(NamedTuple):
    """By what the scheduler orders prompts; the least comes first."""

    priority: int
    tenant: float
    urgency: float
    number: int


class Explainer:
    """Replays a log, and keeps what one sequence did in every step.

    Args:
      request_id, completion: which; of several requests with one id the first.
    """

    def __init__(
        self,
        log: RecordedLog,
        request_id: str,
        completion: int = 0,
        predictor: Predictor | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.replayer = Replayer(log, predictor, policy, planned=self._look, begins=self._prepare)
        self.request_id, self._completion = request_id, completion
        self.sequence: Sequence | None = None
        self._orders: dict[Sequence, Order] = {}
        self._steps: list[tuple[int, float, Cause]] = []

    def run(self) -> list[Span]:
        """Yield what the request did and waited for, in order, until it ended.

        Raises:
          ValueError: the log has no such request, or is damaged.
          Differs: the replay decides otherwise than was recorded.
        """
        end = 0.0
        for moment in self.replayer.run():
            end = moment.now if moment.ended is None else moment.ended.finished
            if self.sequence is not None and self.sequence.state is State.FINISHED:
                break
        if self.sequence is None:
            raise ValueError(
                f"the log has no step since completion {self._completion} of a request {self.request_id!r} came: it is "
                "unknown, or was cancelled before"
            )
        return list(_spans(self._steps, end))

    def _prepare(self, now: float) -> None:
        """Before a step is planned: find the sequence, and what its order is."""
        if self.sequence is None:
            request = self.replayer.engine.requests.get(self.request_id)
            if request is not None and self._completion < request.num_completions:
                self.sequence = request.sequences[self._completion]
        if self.sequence is None or self.sequence.state in (State.DECODING, State.FINISHED):
            return
        scheduler = self.replayer.engine.core.scheduler
        urgency, rank = scheduler.chunker.policy.urgency, scheduler.chunker.tenants.rank
        self._orders = {
            s: Order(-s.priority, rank(s), urgency(s, now), s.order)
            for s in (*scheduler.waiting, *scheduler.running.prefilling)
        }

    def _look(self, batch: Batch, now: float) -> None:
        """After a batch is planned: what the sequence does in it."""
        if self.sequence is not None and self.sequence.state is not State.FINISHED:
            scheduler = self.replayer.engine.core.scheduler
            self._steps.append((batch.index, now, self._cause(scheduler, self.sequence, batch)))
            self._prepare(now)  # for the next batch of the same step

    def _cause(self, scheduler: Scheduler, sequence: Sequence, batch: Batch) -> Cause:
        if any(chunk.sequence is sequence and not chunk.decodes for chunk in batch.chunks):
            return Cause("prefill", (), "computes its prompt")
        if sequence.state is State.DECODING:
            return Cause("decode", (), "decodes")
        cause = self._why_waiting if sequence.state is State.WAITING else self._why_passed_over
        return cause(scheduler, sequence, batch)

    def _why_waiting(self, scheduler: Scheduler, sequence: Sequence, batch: Batch) -> Cause:
        admission, running, pool = scheduler.admission, scheduler.running, scheduler.pool
        again = "preempted; " if sequence.preemptions else ""
        if batch.admitted and self._comes_before(batch.admitted[-1], sequence):
            others = batch.admitted
            return self._behind("admitted", others, sequence, f"{again}{names(others)} got a slot")
        if not running.slots.free:
            return Cause(
                "slots", (), f"{again}no free slot: {len(running)} sequences run, of at most {running.max_running}"
            )
        leader = admission.waits_for(sequence)
        if leader is not None:
            text = f"{again}waits for pages of a common prefix, which {name_of(leader)} computes"
            return Cause("prefix", (name_of(leader),), text)
        blocked = admission.blocked
        if blocked is not None:
            own = sequence is blocked or scheduler.planner.least_pages(sequence) > pool.num_available
            pages = scheduler.planner.total_pages(sequence if own else blocked)
            needs = f"needs {pages:,} pages, and {pool.num_available:,} can be promised"
            if own:
                return Cause("pages", (), f"{again}no memory: it {needs}")
            text = f"{again}{name_of(blocked)} waits for memory, which it would hold too long: it {needs}"
            return self._behind("behind", [blocked], sequence, text)
        if sequence.in_flight:
            return Cause("in flight", (), f"{again}tokens of it from before are still in flight")
        return Cause("queue", (), f"{again}those before it were looked at first")

    def _why_passed_over(self, scheduler: Scheduler, sequence: Sequence, batch: Batch) -> Cause:
        if sequence in batch.blocked:
            needs = f"may need {sequence.claim:,} more pages, and {scheduler.pool.num_available:,} are there"
            return Cause("pages", (), f"no memory to grow: it {needs}")
        others = [chunk.sequence for chunk in batch.chunks if not chunk.decodes]
        if not others:
            return Cause("full", (), "no room beside the decodes of others: the token budget or their TPOT")
        return self._behind("passed over", others, sequence, f"passed over: {names(others)} took the rows")

    def _behind(self, kind: str, others: list[Sequence], sequence: Sequence, text: str) -> Cause:
        """A cause that is others; the rule by which the first of them comes before it is added."""
        first, rule = others[0], self._rule(others[0], sequence)
        return Cause(kind, (*map(name_of, others), rule.split(":")[0]), f"{text}; {name_of(first)} {rule}")

    def _comes_before(self, other: Sequence, sequence: Sequence) -> bool:
        before, own = self._orders.get(other), self._orders.get(sequence)
        return before is not None and own is not None and before < own

    def _rule(self, other: Sequence, sequence: Sequence) -> str:
        before, own = self._orders.get(other), self._orders.get(sequence)
        if before is None or own is None or before > own:
            return "shares a longer prompt's step"
        if before.priority != own.priority:
            return f"has priority {other.priority} over {sequence.priority}"
        if before.tenant != own.tenant:
            return f"is of tenant {other.tenant!r}, which has been served less than {sequence.tenant!r}"
        if before.urgency != own.urgency:
            policy = self.replayer.engine.policy_name
            return f"is more urgent by {policy}: its urgency is {own.urgency - before.urgency:.4g} lower"
        return "came first"


def _spans(steps: list[tuple[int, float, Cause]], end: float) -> list[Span]:
    """Consecutive steps with one cause as one."""
    spans: list[Span] = []
    for at, (step, now, cause) in enumerate(steps):
        until = steps[at + 1][1] if at + 1 < len(steps) else end
        last = spans[-1] if spans else None
        if last is not None and last.cause[:2] == cause[:2]:
            spans[-1] = last._replace(last=step, seconds=until - last.start)
        else:
            spans.append(Span(step, step, now, until - now, cause))
    return spans
