"""`Core`: the engine without lock, thread, clock, executor, processes or JAX. It decides, and makes events of results.

A driver adds sequences, begins batches, has an executor run them, and ends each with its results, see `run_step`:

    while (batch := core.begin(now)) is not None:
        queue.submit(batch)
    step = queue.wait()
    events = core.end(step.batch, step.results, step.finished, step.seconds)

The drivers are `Engine`, `Follower` in other processes, replays, and the simulator (`longctx.simulation`).
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterable

import numpy as np

from longctx.serving.distributed.orders import DecisionLog
from longctx.serving.engine.batch_queue import BatchQueue
from longctx.serving.engine.metrics import EngineStats, Load
from longctx.serving.executor.interface import Results
from longctx.serving.executor.submit_queue import EndedStep, SubmitQueue
from longctx.serving.kv_cache.connector import TIERS, Loaded, PageFinder
from longctx.serving.kv_cache.leases import Leases
from longctx.serving.kv_cache.page_pool import Key, PagePool
from longctx.serving.kv_cache.prefix import PageHash, PartialPage, Sessions
from longctx.serving.request.completion import Completion
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Event, FinishReason, Lease, Metrics, TokenLogprob
from longctx.serving.request.request import PreparedRequest
from longctx.serving.scheduler.batch import Batch, Chunk
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence, State, completion_of

_NOT_FINITE = "the model's logits are not finite (NaN or infinite): its weights are damaged, or activations overflow"


class Core:
    """Continuous batching of sequences, whose tokens become events.

    Deterministic: the same calls with the same arguments give the same batches and events.

    Args:
      scheduler: decides what a batch has.
      page_hash: extends the keys of sequences by the pages that they generate; None: no pages are shared.
      sessions: remembers where conversations stop.
      run_ahead: see `BatchQueue`.

    Attributes:
      counts: of tokens, by name, see `EngineStats`.
      now: when it was last called, by its driver's clock.
      is_profiled: whether the predictor was measured, so that requests may be refused by what it says.

    Source:
      Medha, 4.2 (chunks of prompts and decodes in one batch), after Sarathi-Serve.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig
      >>> from longctx.simulation import Instance, Simulation
      >>> from longctx.simulation.hardware import predictor
      >>> from longctx.simulation.workloads import Lengths, synthesize
      >>> model, config = LlamaConfig.preset("llama-3-8b"), EngineConfig(num_pages=1000)
      >>> instance = Instance(model, config, predictor(model, "h100-nvlink"))  # drives a core in virtual time
      >>> record = Simulation([instance]).run(synthesize(10, Lengths(100, 1000), Lengths(20, 20)))
      >>> type(instance.core).__name__, instance.core.counts["output_tokens"]
      ('Core', 200)
    """

    def __init__(
        self, scheduler: Scheduler, page_hash: PageHash | None, sessions: Sessions | None, run_ahead: int
    ) -> None:
        self.scheduler, self.sessions = scheduler, sessions
        self.in_flight = BatchQueue(run_ahead, scheduler.plan.stage)
        self.page_hash = page_hash
        self.leases = Leases(scheduler.pool, scheduler.running.page_size)
        self._completing: deque[tuple[int, str, Chunk, int]] = deque()  # rows of sequences with leases, their steps
        self.now, self._is_blocked, self.is_profiled = 0.0, False, False
        names = "prompt_tokens", "output_tokens", "queried_tokens", "cached_tokens", "loaded_tokens"
        self.counts = dict.fromkeys(names, 0)

    @property
    def pool(self) -> PagePool:
        """The pages of the cache, and their holders."""
        return self.scheduler.pool

    def look_up(self, sequences: list[Sequence], store: PageFinder) -> None:
        """Note how much of the prompt of a request, which is about to be added, can be loaded.

        Args:
          sequences: of one request.
          store: that may have pages of it.
        """
        keys = sequences[0].keys if sequences[0].may_share else []
        found = self.scheduler.count_cached(keys) // self.scheduler.running.page_size
        count = store.look_up(keys[found:])
        for sequence in sequences:
            sequence.available = (found + count) * self.scheduler.running.page_size if count else 0

    def check(self, prepared: PreparedRequest) -> None:
        """Check that a request could be served if it were the only one.

        Args:
          prepared: the request.

        Raises:
          ValueError: its lease is another's, or its pages or targets are more than can be had.
        """
        request, length, scheduler = prepared.request, len(prepared.tokens), self.scheduler
        if request.lease is not None and request.lease in self.leases:
            raise ValueError(f"lease must be new, and {request.lease!r} is another request's")
        scheduler.planner.check(length, request.sampling.max_tokens)
        if self.is_profiled:
            cached = scheduler.count_cached(prepared.shared_keys)
            time = scheduler.forecast.time
            alone = dataclasses.replace(time, predictor=scheduler.chunker.predictor.predictor)
            alone.check_targets(request, cached, length, scheduler.plan.stage)

    def add(self, sequences: list[Sequence]) -> None:
        """Let sequences wait, which have been checked."""
        for sequence in sequences:
            lease_id = completion_of(sequence).lease_id
            if lease_id is not None:
                keys = self._lease_keys(completion_of(sequence), sequence.keys, sequence.length)
                self.leases.begin(lease_id, sequence, keys, sequence.length)
            self.scheduler.add(sequence)

    def resume(self, sequences: list[Sequence], handoff: Handoff, now: float) -> list[Event]:
        """Add sequences of which another engine has computed something.

        A source of each sequence's loads has the name of its lease.

        Args:
          sequences: of one request.
          handoff: what the other engine has computed.
          now: seconds of the driver's clock.

        Returns:
          The events of the tokens that the other engine has drawn.
        """
        events = []
        for sequence, progress in zip(sequences, handoff.completions, strict=True):
            completion, reason, length = completion_of(sequence), None, progress.length
            if completion.num_prompt_logprobs is not None:
                known = handoff.prompt_logprobs or ()
                completion.add_prompt_logprobs(1, list(known))
                sequence.may_share = len(known) == completion.num_prompt - 1
                if not sequence.may_share:  # the rows after those of known log probabilities are computed, all of them
                    length = min(length, len(known) - len(known) % self.scheduler.running.page_size)
                    if self.pool.windows is not None and length < progress.length:
                        length = 0  # the pages before its last ones come without what layers with a window see
            if handoff.embedding is not None:
                completion.hidden = np.array(handoff.embedding) * completion.num_pooled
            elif completion.params.pooling == "mean":
                length = 0
            for token, logprob in itertools.zip_longest(progress.tokens, progress.logprobs):
                if reason is None:
                    text, reason = completion.push(token, logprob, now)
                    events.append(completion.event(text, token, reason))
            if reason is not None:
                sequence.to(State.FINISHED)
                _complete(completion.metrics, sequence, now)
                continue
            sequence.length = completion.num_known
            if self.page_hash is not None:
                completion.extend_keys(sequence.keys, self.page_hash)
            if progress.lease is not None:
                sequence.source, sequence.available = progress.lease, length
                keys = self._lease_keys(completion, sequence.keys, progress.length)
                sequence.tail_key = keys[-1] if keys else None
            self.add([sequence])
        return events

    def cancel(self, sequence: Sequence) -> list[Event]:
        """End a sequence wherever it is.

        Returns:
          Its last event, unless it has ended.
        """
        if sequence.state is State.FINISHED:
            return []
        return [self._finish(sequence, completion_of(sequence).interrupt(), None, "cancelled", self.now)]

    def end_load(self, loaded: Loaded) -> Sequence | None:
        """End a load (`Batch.loads`); returns its sequence, which computes what is missing, or None if it is gone."""
        sequence = self.scheduler.loads.end(loaded)
        if sequence is not None and sequence.cached is not None:
            metrics = completion_of(sequence).metrics
            gained = sequence.computed - sequence.cached if not sequence.preemptions else 0
            sequence.cached += gained
            metrics.cached_tokens, metrics.loaded_tokens = sequence.cached, metrics.loaded_tokens + gained
            self.counts["cached_tokens"] += gained
            self.counts["loaded_tokens"] += gained
        return sequence

    def begin(self, now: float) -> Batch | None:
        """Plan a step.

        A batch without chunks moves those in later stages on, or lets slots rest.

        Args:
          now: seconds of the driver's clock.

        Returns:
          The batch; None: nothing may begin before another step has ended, or there is nothing to do.
        """
        self.now = now
        if not self.in_flight.has_room:
            return None
        batch = self.scheduler.schedule(now)
        if batch is None:
            if not (self.in_flight.lacks_successors or (not self.in_flight and self.scheduler.is_held_up)):
                return None
            batch = self.scheduler.idle()
        self._is_blocked = bool(batch.blocked)
        self.in_flight.append(batch)
        self._note_planned(batch, now)
        if self.leases:
            self._note_complete(batch)
        return batch

    def end(self, batch: Batch, results: Results, now: float, seconds: float | None) -> list[Event]:
        """Take the results of the oldest batch.

        Args:
          batch: what `begin` returned.
          results: what the executor has of it.
          now: seconds of the driver's clock.
          seconds: that its step took; None: unknown.

        Returns:
          What it brought each sequence.
        """
        self.now = now
        if seconds is not None:
            self.scheduler.chunker.predictor.observe(self.in_flight.slowest.work, seconds)
        self.in_flight.pop(batch)
        for sequence, start, logprobs in results.prompt_logprobs:
            if sequence.state is not State.FINISHED:
                completion_of(sequence).add_prompt_logprobs(start, list(logprobs))
        for sequence, start, rows in results.hidden:
            if sequence.state is not State.FINISHED:
                completion_of(sequence).add_hidden(start, rows)
        events, finished = [], State.FINISHED
        num_tokens = 0
        for sequence, token, logprob in zip(batch.sampled, results.tokens, results.logprobs, strict=True):
            if sequence.state is finished:
                continue  # it ended while this step was in flight
            if token < 0:
                events.append(self._fail(sequence, _NOT_FINITE, now))
                continue
            completion = completion_of(sequence)
            text, reason = self.receive(sequence, token, logprob, now)
            if (problem := completion.problem) is not None:
                events.append(self._fail(sequence, problem, now))
            elif reason is not None:
                events.append(self._finish(sequence, text, token, reason, now))
            else:
                events.append(completion.event(text, token))
            num_tokens += 1
        self.counts["output_tokens"] += num_tokens
        return events

    def receive(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float
    ) -> tuple[str, FinishReason | None]:
        """Take a token of a sequence; returns the text that became certain, and why the sequence ends, if it does."""
        completion = completion_of(sequence)
        text, reason = completion.push(token, logprob, now)
        if self.page_hash is not None and self._fills_page(completion):
            completion.extend_keys(sequence.keys, self.page_hash)
        self.scheduler.receive(sequence)
        return text, reason

    def abort(self, sequence: Sequence, error: str) -> Event:
        """Return the last event of a sequence whose step has failed with an error; nothing else can be done with it."""
        completion = completion_of(sequence)
        _complete(completion.metrics, sequence, self.now)
        return completion.fail(error)

    @property
    def has_stores(self) -> bool:
        """Whether pages wait to be stored: steps without rows let them leave."""
        return bool(self.scheduler.stores)

    @property
    def lacks_room(self) -> bool:
        """Whether a sequence waits for memory."""
        running = self.scheduler.running
        return self._is_blocked or bool(self.scheduler.waiting and not len(running))

    @property
    def is_stuck(self) -> bool:
        """Whether sequences wait that nothing will ever admit."""
        return bool(self.scheduler.waiting) and not (self.in_flight or self.scheduler.loads or self.leases)

    def stats(self) -> EngineStats:
        """Return the counts since the core was made, and what it holds now."""
        scheduler, pool, windows = self.scheduler, self.pool, self.pool.windows
        return EngineStats(
            steps=scheduler.num_steps,
            **self.counts,
            preemptions=scheduler.num_preempted,
            pages_evicted=pool.num_evicted,
            pages_held=pool.num_held,
            pages_cached=pool.num_cached,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            idle_stage_steps=self.in_flight.num_idle,
            window_pages_held=0 if windows is None else windows.num_held,
            window_pages_cached=0 if windows is None else windows.num_idle,
        )

    def load(self, stats: EngineStats, now: float) -> Load:
        """Return the work that there is, with these `stats`, at the time `now` of the driver's clock."""
        waiting, running, pool = tuple(self.scheduler.waiting), self.scheduler.running, self.pool
        prompts, decoding = (*waiting, *running.prefilling), tuple(running.decoding)
        return Load(
            time=now,
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=sum(sequence.length - sequence.prefix_hit_tokens for sequence in waiting),
            # Pages of other engines are not computed here.
            backlog_seconds=sum(
                sequence.prefill_remaining
                for sequence in prompts
                if sequence.source == TIERS or sequence.available <= sequence.computed
            ),
            num_pages=pool.num_pages,
            free_pages=pool.num_available,
            pages_by_rank=tuple(map(pool.held_on, range(pool.num_ranks))),
            stats=stats,
            decoding=len(decoding),
            decode_tokens=sum(sequence.computed for sequence in decoding),
        )

    def _fills_page(self, completion: Completion) -> bool:
        """Whether its last token completes a page that others may find."""
        assert self.page_hash is not None
        return completion.num_known % self.page_hash.page_size == 0

    def _note_planned(self, batch: Batch, now: float) -> None:
        for sequence in batch.admitted:
            metrics = completion_of(sequence).metrics
            if metrics.admitted is None:
                metrics.admitted, metrics.cached_tokens = now, sequence.cached or 0
                metrics.slack = sequence.slack
                self.counts["cached_tokens"] += metrics.cached_tokens
                self.counts["queried_tokens"] += sequence.prompt_length
        self.counts["prompt_tokens"] += sum(chunk.num_tokens for chunk in batch.chunks if not chunk.decodes)

    def _finish(self, sequence: Sequence, text: str, token: int | None, reason: FinishReason, now: float) -> Event:
        completion = completion_of(sequence)
        lease_id = completion.lease_id
        if lease_id is not None:
            if reason in ("stop", "length"):
                self._keep_pages(sequence, lease_id)
            else:
                self.leases.drop(lease_id, sequence)
        self.scheduler.finish(sequence, self._leave_session(sequence, completion))
        _complete(completion.metrics, sequence, now)
        return completion.event(text, token, reason)

    def _fail(self, sequence: Sequence, error: str, now: float) -> Event:
        lease_id = completion_of(sequence).lease_id
        if lease_id is not None:
            self.leases.drop(lease_id, sequence)
        self.scheduler.finish(sequence)
        _complete(completion_of(sequence).metrics, sequence, now)
        return completion_of(sequence).fail(error)

    def _keep_pages(self, sequence: Sequence, lease_id: str) -> None:
        """Keep the pages of a sequence that is about to end, as far as their contents are known to be right."""
        completion = completion_of(sequence)
        length = min(sequence.computed, completion.num_known - 1)
        if not sequence.is_running or length <= 0:
            self.leases.drop(lease_id, sequence)
            return
        keys = self._lease_keys(completion, sequence.keys, length)
        if self.leases.keep(lease_id, sequence, keys, sequence.pages, length, sequence.window_pages):
            completion.lease = Lease(lease_id, length)

    def _lease_keys(self, completion: Completion, keys: list[Key], length: int) -> list[Key]:
        """A key for each page of the first `length` tokens; that of a partial page stands for its tokens too."""
        if self.page_hash is None:
            return []
        full, tail = divmod(length, self.page_hash.page_size)
        if not tail:
            return keys[:full]
        parent = keys[full - 1] if full else _root(self.page_hash, completion)
        return [*keys[:full], self.page_hash.tail(parent, "lease", completion.known[length - tail : length])]

    def _note_complete(self, batch: Batch) -> None:
        """Note how much of sequences with leases is complete once all planned batches have been submitted."""
        for lease_id, lease in self.leases.running():
            if lease.owner.preemptions > lease.preemptions:  # its pages are another one's now
                lease.preemptions = lease.owner.preemptions
                self.leases.note(lease_id, lease.owner, [], 0, [])
        for chunk in batch.chunks:
            wanted = completion_of(chunk.sequence).lease_id
            if wanted is not None:
                self._completing.append((batch.index, wanted, chunk, chunk.sequence.preemptions))
        while self._completing and self._completing[0][0] + self.scheduler.plan.stage <= self.scheduler.num_steps:
            _, lease_id, chunk, preemptions = self._completing.popleft()
            sequence = chunk.sequence
            if sequence.is_running and sequence.preemptions == preemptions:
                complete = chunk.start + chunk.num_tokens
                self.leases.note(lease_id, sequence, sequence.pages, complete, sequence.window_pages)

    def _leave_session(self, sequence: Sequence, completion: Completion) -> PartialPage | None:
        """Remember where a session's turn ends, if it has computed something."""
        session = completion.request.session_id
        if self.sessions is None or self.page_hash is None or session is None:
            return None
        if completion.index > 0 or not sequence.is_running:
            return None
        computed = completion.tokens[: sequence.computed]
        return self.sessions.note(_root(self.page_hash, completion), session, sequence.keys, computed)


def run_step(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> EndedStep | None:
    """Begin what can be, and wait for the oldest in-flight batch, whose results `Core.end` takes; None: none is."""
    if not begin_steps(core, queue, now, logs):
        return None
    return end_step(queue, logs)


def begin_steps(core: Core, queue: SubmitQueue, now: float, logs: Iterable[DecisionLog] = ()) -> bool:
    """Begin what can be; whether a batch is in flight then."""
    while (batch := core.begin(now)) is not None:
        for log in logs:
            log.note_plan(batch)
        queue.submit(batch)
    if not queue and core.is_stuck:
        raise RuntimeError("requests are waiting that are never admitted: this is a bug in the scheduler")
    return bool(queue)


def end_step(queue: SubmitQueue, logs: Iterable[DecisionLog] = ()) -> EndedStep:
    """Wait for the oldest in-flight batch."""
    step = queue.wait()
    for log in logs:
        log.note_draw(step.batch, step.results.tokens)
    return step


def _root(page_hash: PageHash, completion: Completion) -> bytes:
    return page_hash.root(completion.request.tenant, completion.request.cache_salt)


def _complete(metrics: Metrics, sequence: Sequence, now: float) -> None:
    """Fill in what is known when a sequence ends."""
    metrics.finished = max(now, metrics.arrival)
    metrics.preemptions, metrics.recomputed_tokens = sequence.preemptions, sequence.recomputed
    metrics.passed_by = sequence.passed_by
    metrics.ttft_deadline, metrics.tpot_target = sequence.ttft_budget, sequence.tpot_target
