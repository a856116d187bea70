"""An engine rebuilt from the header of its log, without a device: recorded results and times stand in for it.

Decisions follow from contents by the keys of pages alone, and these were recorded. So the first token of a sequence is
its number here, and by that number keys are looked up instead of hashed. All other tokens are zeros.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from longctx.serving.config import EngineConfig
from longctx.serving.distributed.orders import DecisionLog, RequestUpdate
from longctx.serving.engine.active_request import ActiveRequests
from longctx.serving.engine.build import build_core
from longctx.serving.engine.core import run_step
from longctx.serving.engine.input_processor import SequenceMaker
from longctx.serving.executor.interface import Results
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash, PartialPage, Sessions
from longctx.serving.predictor.roofline import element_bytes_of
from longctx.serving.predictor.runtime import check_predictor
from longctx.serving.recording.log import Header
from longctx.serving.recording.records import (
    NOT_FINITE,
    STOP,
    Arrived,
    Cancelled,
    Ended,
    LoadEnded,
    Record,
    Released,
    split_keys,
)
from longctx.serving.request.output import Event
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.sequence import Sequence, completion_of
from longctx.simulation.instance.virtual_executor import Pending, VirtualExecutor

GOES_ON, STOPS = 0, 1
"""Tokens of a replay: a completion ends with the second."""
_TOKENS = {STOP: STOPS, NOT_FINITE: -1}


class Outcome(NamedTuple):
    """End of a completion other than by its length: the reason, and which of its samples was the last, by number."""

    reason: int
    sample: int


class ReplayExecutor(VirtualExecutor):
    """Runs batches in virtual time.

    Args:
      outcomes: of completions, by the numbers of their sequences, where no record says it.
      seconds: that batches take, where no record says it; None: what their plan predicted.

    Attributes:
      recorded: the results of the batch that is waited for next; None: they follow from `outcomes`.
    """

    def __init__(
        self, stages: int, outcomes: Mapping[int, Outcome], seconds: Callable[[Batch], float] | None = None
    ) -> None:
        super().__init__(seconds or (lambda batch: batch.predicted), 2, stages)
        self._outcomes = outcomes
        self.recorded: Ended | None = None

    def wait(self, pending: Pending) -> Results:
        recorded = self.recorded
        if recorded is None:
            return super().wait(pending)
        self.now = recorded.finished
        tokens = [GOES_ON] * len(pending.tokens)
        for sample, reason in recorded.ends:
            if sample < len(tokens):
                tokens[sample] = _TOKENS[reason]
        return Results(tokens, [None] * len(tokens), [])

    def _token(self, chunk: Chunk) -> int:
        outcome = self._outcomes.get(chunk.sequence.order)
        if outcome is None or chunk.start + chunk.num_tokens != chunk.sequence.prompt_length + outcome.sample:
            return GOES_ON
        return _TOKENS[outcome.reason]


class Contents:
    """The keys of all sequences' pages, by the sequences' numbers (`Sequence.order`).

    Attributes:
      keys: of the full pages of each, as far as they are known.
      found: the page where the session stopped that a sequence goes on with.
      left: the page where a sequence's session stopped.
      new_keys, new_left: recorded of the step that is replayed next, for the sequences that come to need them.
    """

    def __init__(self) -> None:
        self.keys: dict[int, list[bytes]] = {}
        self.found: dict[int, PartialPage | None] = {}
        self.left: dict[int, PartialPage | None] = {}
        self.new_keys: deque[bytes] = deque()
        self.new_left: deque[PartialPage | None] = deque()

    def key(self, order: int, page: int) -> bytes:
        """The key of a sequence's page; a unique one if its contents never came to be."""
        keys = self.keys[order]
        if page == len(keys):
            made_up = hashlib.blake2b(f"{order} {page}".encode(), digest_size=KEY_BYTES, person=b"made up")
            keys.append(self.new_keys.popleft() if self.new_keys else made_up.digest())
        return keys[page]


class RecordedHash(PageHash):
    """Looks up keys instead of hashing tokens."""

    def __init__(self, contents: Contents, page_size: int) -> None:
        super().__init__(b"no secret", page_size)
        self._contents = contents

    def extend(self, keys: list[bytes], tokens: np.ndarray, root: bytes) -> None:
        order = int(tokens[0])
        for page in range(len(keys), len(tokens) // self.page_size):
            keys.append(self._contents.key(order, page))


class RecordedSessions(Sessions):
    """Looks up where conversations stopped."""

    def __init__(self, contents: Contents, page_size: int) -> None:
        self._contents, self._page_size = contents, page_size

    def find(self, root: bytes, session_id: str | None, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        return self._contents.found.get(int(tokens[0]))

    def note(self, root: bytes, session_id: str, keys: list[bytes], tokens: np.ndarray) -> PartialPage | None:
        new = self._contents.new_left
        if not len(tokens):  # it has computed nothing, so nothing is left
            if new:
                new.popleft()
            return None
        order = int(tokens[0])
        if new:
            self._contents.left[order] = new.popleft()
        page = self._contents.left.get(order)
        # It may stop elsewhere than recorded; then that page's key is not known.
        ends_there = page is not None and divmod(len(tokens), self._page_size) == (page.number, page.tokens)
        return page if ends_there else None


class Rebuilt:
    """Core of a recorded engine, which requests enter by their records.

    Args:
      config, num_pages: other ones than the header's.
      contents: of its requests, if they are known already.
      outcomes, seconds: see `ReplayExecutor`.
      logs: receive the decisions.

    Attributes:
      requests: that have not ended, by id.
      orders: the number of the last sequence of each request's id and completion.

    Raises:
      ValueError: the configuration contradicts the plan or the predictor.
    """

    def __init__(
        self,
        header: Header,
        config: EngineConfig | None = None,
        num_pages: int | None = None,
        contents: Contents | None = None,
        outcomes: Mapping[int, Outcome] | None = None,
        seconds: Callable[[Batch], float] | None = None,
        logs: Iterable[DecisionLog] = (),
    ) -> None:
        config, plan = config or header.config, header.plan
        check_predictor(header.predictor, config.token_budget)
        self.contents = contents or Contents()
        page_hash = RecordedHash(self.contents, config.page_size)
        sessions = RecordedSessions(self.contents, config.page_size)
        self.core, input_processor, _ = build_core(
            header.model,
            config,
            plan,
            header.predictor,
            num_pages or header.num_pages,
            header.max_length,
            topology=header.topology,
            element_bytes=element_bytes_of(header.dtype, header.topology),
        )
        self.core.sessions = sessions
        self.core.page_hash = page_hash if config.prefix_cache else None
        self.executor = ReplayExecutor(plan.stage, outcomes or {}, seconds)
        self._queue = SubmitQueue(self.executor, self.executor.clock, plan.stage)
        maker = SequenceMaker(header.model, config, None, page_hash, sessions)
        self.requests = ActiveRequests(self.core, input_processor, maker, self.executor, note=self._note)
        self._config, self._logs = config, tuple(logs)
        self._num_sequences = 0
        self.orders: dict[tuple[str, int], int] = {}
        self._names: dict[str, str] = {}  # of the last request of each recorded id

    def apply(self, record: Record) -> list[Event]:
        """Let happen what was recorded between steps; return the events of a cancel.

        Raises:
          ValueError: a request has not room in this engine.
        """
        match record:
            case Arrived():
                self._arrive(record)
            case Cancelled():
                return self._cancel(record)
            case Released():
                self.core.leases.release(record.lease_id)
            case LoadEnded():
                self.core.end_load(Loaded(record.name, record.num_pages, record.seconds))
        return []

    def step(self, now: float) -> EndedStep | None:
        """See `run_step`."""
        return run_step(self.core, self._queue, now, self._logs)

    def end(self, step: EndedStep) -> list[Event]:
        """See `Core.end`."""
        events = self.core.end(step.batch, step.results, step.finished, step.seconds)
        self.requests.deliver(events)
        return events

    def _arrive(self, arrived: Arrived) -> None:
        if arrived.num_completions > self._config.max_running:
            raise ValueError(
                f"max_running must be at least {arrived.num_completions} for request {arrived.request_id!r}, "
                f"got {self._config.max_running}"
            )
        try:
            self.core.scheduler.planner.check(arrived.num_prompt, arrived.max_tokens)
        except ValueError as error:
            raise ValueError(f"num_pages is too small for request {arrived.request_id!r}: {error}") from None
        # Under other settings the last request of this id may not have ended.
        name = arrived.request_id
        if name in self.requests:
            name = f"{name} (sequence {self._num_sequences})"
        self._names[arrived.request_id] = name
        sampling = SamplingParams(
            max_tokens=arrived.max_tokens,
            temperature=1.0,
            n=arrived.num_completions,
            seed=0,
            stop_token_ids=(STOPS,),
            ignore_eos=True,
            prompt_logprobs=None if arrived.may_share else 0,
        )
        request = Request(
            (),
            sampling,
            name,
            session_id="recorded" if arrived.has_session else None,
            tenant=arrived.tenant,
            ttft_deadline=arrived.ttft_deadline,
            tpot_target=arrived.tpot_target,
            priority=arrived.priority,
            lease=arrived.lease,
        )
        contents, first, keys = self.contents, self._num_sequences, split_keys(arrived.keys)
        contents.found[first] = arrived.partial_page
        for order in range(first, first + arrived.num_completions):
            contents.keys.setdefault(order, list(keys))
        tokens = np.zeros(arrived.num_prompt, np.int32)
        tokens[0] = first
        prepared = PreparedRequest(request, tokens, keys, b"")
        self.requests.repeat(prepared, name, arrived.now, arrived.available)

    def _cancel(self, cancelled: Cancelled) -> list[Event]:
        request = self.requests.get(self._names.get(cancelled.request_id, ""))
        if request is None:
            return []
        events: list[Event] = []
        request.deliver = lambda _, event: events.append(event)
        self.requests.leave(request)
        return events

    def _note(self, update: RequestUpdate, sequences: List[Sequence]) -> None:
        """Number sequences that are about to be added to the core."""
        for sequence in sequences:
            completion = completion_of(sequence)
            self.orders[completion.request_id, completion.index] = sequence.order
            assert sequence.order == self._num_sequences
            completion.known[0] = sequence.order
            self._num_sequences += 1
