"""An engine rebuilt from the header of its log, without a device: recorded results and times stand in for it.

Decisions follow from contents by the keys of pages alone, and these were recorded. So the first token of a sequence is
its number here, and by that number keys are looked up instead of hashed. All other tokens are zeros.
"""

import dataclasses
import functools
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
from longctx.serving.engine.input_processor import SequenceMaker
from longctx.serving.engine.steps import run_step
from longctx.serving.executor.interface import Results
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import Loaded
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash, PartialPage, Sessions
from longctx.serving.predictor.runtime import Predictor, check_predictor
from longctx.serving.recording.header import Header
from longctx.serving.recording.records import (
    NOT_FINITE,
    STOP,
    Arrived,
    Cancelled,
    Ended,
    LoadEnded,
    Snapshot,
    split_keys,
)
from longctx.serving.recording.snapshot import restore_snapshot
from longctx.serving.request.output import Event
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.policy import Policy
from longctx.serving.scheduler.sequence import Sequence, completion_of
from longctx.simulation.instance.virtual_executor import DeviceSpeed, Pending, VirtualExecutor

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
      speed: see `VirtualExecutor`.

    Attributes:
      recorded: the results of the batch that is waited for next; None: they follow from `outcomes`.
    """

    def __init__(
        self,
        stages: int,
        outcomes: Mapping[int, Outcome],
        seconds: Callable[[Batch], float] | None = None,
        speed: DeviceSpeed | None = None,
    ) -> None:
        super().__init__(seconds or (lambda batch: batch.predicted), 2, stages, speed)
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
      predictor, policy: must be given if the engine had custom ones, which a log does not hold.
      contents: of its requests, if they are known already.
      outcomes, seconds, speed: see `ReplayExecutor`.
      logs: receive the decisions.

    Attributes:
      predictor: before correction.
      requests: that have not ended, by id.
      orders: the number of the last sequence of each request's id and completion.

    Raises:
      ValueError: a predictor or policy is missing, or the configuration contradicts the plan or the predictor.
    """

    def __init__(
        self,
        header: Header,
        config: EngineConfig | None = None,
        num_pages: int | None = None,
        predictor: Predictor | None = None,
        policy: Policy | None = None,
        contents: Contents | None = None,
        outcomes: Mapping[int, Outcome] | None = None,
        seconds: Callable[[Batch], float] | None = None,
        logs: Iterable[DecisionLog] = (),
        speed: DeviceSpeed | None = None,
    ) -> None:
        predictor = predictor or header.predictor
        if predictor is None:
            raise ValueError("predictor must be given: the recorded engine had a custom one, which a log does not hold")
        if config is None:
            config = header.config
            if header.custom_policy is not None:
                if policy is None:
                    raise ValueError(
                        f"policy must be given: the recorded engine had a custom one, {header.custom_policy}, which a "
                        "log does not hold"
                    )
                config = dataclasses.replace(config, policy=policy)
        self.predictor = predictor
        self.policy_name = config.policy if isinstance(config.policy, str) else type(config.policy).__qualname__
        check_predictor(predictor, config.token_budget)
        plan, size = header.plan, config.page_size
        self.num_pages = num_pages or header.num_pages
        self.contents = contents or Contents()
        self._page_hash, self._sessions = RecordedHash(self.contents, size), RecordedSessions(self.contents, size)
        self._maker = SequenceMaker(header.model, config, None, self._page_hash, self._sessions)
        self._max_length = header.max_length
        self._config, self._num_sequences = config, 0
        self._header, self._logs = header, tuple(logs)
        self._make_executor = functools.partial(ReplayExecutor, plan.stage, outcomes or {}, seconds, speed)
        self._build()
        self.orders: dict[tuple[str, int], int] = {}
        self._names: dict[str, str] = {}  # of the last request of each recorded id

    def _build(self) -> None:
        """A core that knows nothing."""
        header, plan = self._header, self._header.plan
        self.core, input_processor, _ = build_core(
            header.model,
            self._config,
            plan,
            self.predictor,
            self.num_pages,
            header.max_length,
            topology=header.topology,
            element_bytes=header.element_bytes,
        )
        self.core.sessions = self._sessions
        self.core.page_hash = self._page_hash if self._config.prefix_cache else None
        self.executor = self._make_executor()
        self._queue = SubmitQueue(self.executor, self.executor.clock, plan.stage)
        self.requests = ActiveRequests(self.core, input_processor, self._maker, self.executor, note=self._note)

    def restore(self, snapshot: Snapshot) -> None:
        """Begin anew, with what an engine knew.

        Raises:
          ValueError: the snapshot is of another engine.
        """
        self._build()
        self.executor.now = snapshot.now
        for batch in restore_snapshot(self.core, snapshot):
            self._queue.submit(batch)

    def arrive(self, arrived: Arrived) -> None:
        """Let a request enter.

        Raises:
          ValueError: it has not room in this engine.
        """
        if arrived.num_completions > self._config.max_running:
            raise ValueError(
                f"max_running must be at least {arrived.num_completions} for request {arrived.request_id!r}, "
                f"got {self._config.max_running}"
            )
        if arrived.num_prompt + arrived.max_tokens > self._max_length:
            raise ValueError(f"request {arrived.request_id!r} is longer than the longest sequence, which is damage")
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
            shares_pages=arrived.shares_pages,
        )
        self._enter(request, arrived, name)

    def cancel(self, cancelled: Cancelled) -> list[Event]:
        """End a request, if it has not ended."""
        request = self.requests.get(self._names.get(cancelled.request_id, ""))
        if request is None:
            return []
        events: list[Event] = []
        request.deliver = lambda _, event: events.append(event)
        self.requests.leave(request, cancelled.lease)
        return events

    def end_load(self, record: LoadEnded) -> None:
        """End a load, if a sequence waits for it."""
        self.core.end_load(Loaded(record.name, record.num_pages, record.seconds))

    def step(self, now: float) -> EndedStep | None:
        """See `run_step`."""
        return run_step(self.core, self._queue, now, self._logs)

    def end(self, step: EndedStep) -> list[Event]:
        """See `Core.end`."""
        events = self.core.end(step.batch, step.results, step.finished, step.seconds)
        self.requests.deliver(events)
        return events

    def _enter(self, request: Request, arrived: Arrived, name: str) -> None:
        contents, first, keys = self.contents, self._num_sequences, split_keys(arrived.keys)
        page = arrived.partial_page
        contents.found[first] = None if page is None else PartialPage(*page)
        for order in range(first, first + arrived.num_completions):
            contents.keys.setdefault(order, list(keys))
        tokens = np.zeros(arrived.num_prompt, np.int32)
        tokens[0] = first
        prepared = PreparedRequest(request, tokens, keys, b"")
        self.requests.repeat(prepared, name, arrived.now, arrived.available)

    def _note(self, update: RequestUpdate, sequences: List[Sequence]) -> None:
        """Number sequences that are about to be added to the core."""
        for sequence in sequences:
            completion = completion_of(sequence)
            self.orders[completion.request_id, completion.index] = sequence.order
            assert sequence.order == self._num_sequences
            completion.known[0] = sequence.order
            self._num_sequences += 1
