"""The engine: requests in, tokens out. Continuous batching over one compiled step.

Planning and computing overlap: up to `run_ahead` steps are under way while the host plans the next, and the results of
the oldest are taken before one more is begun.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from longctx.models import Llama, Tokenizer
from longctx.models.params import Params
from longctx.serving.batch import Batch
from longctx.serving.cache import default_num_pages
from longctx.serving.config import EngineConfig
from longctx.serving.door import Door
from longctx.serving.executor import DeviceExecutor, Executor, Results
from longctx.serving.output import Event, FinishReason, Output
from longctx.serving.pages import PagePool
from longctx.serving.policy import FirstComeFirstServed
from longctx.serving.prefix import PageHash
from longctx.serving.request import Request, SamplingParams
from longctx.serving.sample import Sample
from longctx.serving.scheduler import Scheduler
from longctx.serving.sequence import Sequence, State

Prompt = str | List[int] | Request


@dataclass
class _Job:
    """A request that has not ended: its sequences, and where its events go."""

    sequences: list[Sequence]
    events: deque[Event]
    num_open: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_open = len(self.sequences)


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made, and what it holds now."""

    steps: int
    prompt_tokens: int  # computed, not found in the cache
    output_tokens: int
    cached_tokens: int
    preemptions: int
    pages_evicted: int
    pages_held: int
    pages_cached: int
    running: int
    waiting: int


class Engine:
    """Serves a model on one device. Any thread may call any method; whoever waits for tokens runs the steps.

    Args:
      model, params: as from `load_checkpoint`.
      config: sizes and rules, see `EngineConfig`.
      mesh: None, or a mesh of one device.
      tokenizer: needed for prompts that are text, for text in outputs, and for stop strings.
      executor: runs the batches instead of the device, for tests and simulations; `params` may then be None.
      clock: seconds; what metrics and policies go by.

    Raises:
      ValueError: sizes that contradict the model or the memory.
      NotImplementedError: a mesh of several devices.
    """

    def __init__(
        self,
        model: Llama,
        params: Params | None,
        config: EngineConfig | None = None,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or EngineConfig()
        if mesh is not None and mesh.size > 1:
            raise NotImplementedError(f"mesh: the engine runs on one device, got {dict(mesh.shape)}")
        positions = model.config.max_positions
        max_length = config.max_length or positions
        if max_length > positions:
            raise ValueError(f"max_length must be at most the model's context of {positions}, got {max_length}")
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.num_pages = config.num_pages or _fitting_pages(model, params, config, max_length)
        if executor is None:
            if params is None:
                raise ValueError("params must be given, unless an executor is")
            executor = DeviceExecutor(model, params, config, self.num_pages, max_length)
        self._executor, self._clock = executor, clock
        self._hash = PageHash(config.hash_key or os.urandom(32), config.page_size)
        self._door = Door(model.config, config, max_length, tokenizer, self._hash)
        self.scheduler = Scheduler(
            FirstComeFirstServed(config.prefill_share),
            PagePool(self.num_pages),
            config.page_size,
            config.max_running,
            config.token_budget,
            config.admission,
        )
        self._jobs: dict[str, _Job] = {}
        self._events: deque[Event] = deque()  # of requests that no stream waits for
        self._under_way: deque[tuple[Batch, Any]] = deque()
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._num_requests = 0
        self._counts = {"prompt_tokens": 0, "output_tokens": 0, "cached_tokens": 0}

    # One call for all.

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: SamplingParams | List[SamplingParams] | None = None,
        progress: Callable[[Event], object] | None = None,
    ) -> list[Output]:
        """Continue all prompts, batched together; the outputs in their order (n of them for a request with n > 1).

        Args:
          prompts: texts, lists of token ids, or `Request`s, which bring their own sampling.
          sampling: for all prompts, or one each; None is greedy, 16 tokens.
          progress: is called with every event.

        Raises:
          TypeError, ValueError: a prompt can't be served. None of them is begun then.
        """
        outputs: dict[tuple[str, int], Output] = {}
        requests = self._requests(prompts, sampling)
        ids, events = self._submit_all(requests)
        for event in self._follow(ids, events):
            if progress is not None:
                progress(event)
            if event.output is not None:
                outputs[event.request_id, event.sample] = event.output
        return [outputs[i, n] for i, request in zip(ids, requests, strict=True) for n in range(request.sampling.n)]

    def stream(
        self, prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | List[SamplingParams] | None = None
    ) -> Iterator[Event]:
        """The same, but every token as it comes. Leaving the iteration cancels what has not ended."""
        return self._follow(*self._submit_all(self._requests(prompts, sampling)))

    def warm_up(self) -> None:
        """Compile every program that serving needs; nothing is compiled after it."""
        with self._lock:
            assert not self._under_way, "warm_up comes before the first request"
            self._executor.warm_up()

    # Piece by piece.

    def submit(self, request: Request) -> str:
        """Begin a request; its id. `step` returns its events.

        Raises:
          TypeError, ValueError: it can't be served.
        """
        with self._lock:
            return self._submit(request, self._events)

    def cancel(self, request_id: str) -> bool:
        """End a request wherever it is; its last events say `"cancelled"`. False if it is unknown or has ended."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None:
                return False
            # Listed first: with the first of them end those that wait for it.
            for sequence in [s for s in job.sequences if s.state is not State.FINISHED]:
                self._finish(sequence, sequence.data.text_stream.finish(), None, "cancelled")
            return True

    def step(self) -> list[Event]:
        """Plan and begin what can be, and wait for the oldest step under way; events of submitted requests."""
        with self._lock:
            self._step()
            events = list(self._events)
            self._events.clear()
            return events

    def progress(self, request_id: str) -> tuple[int, int]:
        """How many tokens of a request's prompt are read, found in the cache or planned to be, and how many it has.

        Raises:
          KeyError: no such request, or it has ended.
        """
        with self._lock:
            sequence = self._jobs[request_id].sequences[0]
            return min(sequence.computed, sequence.prompt_length), sequence.prompt_length

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or some event has not been returned by `step`."""
        return bool(self._jobs or self._events)

    def stats(self) -> EngineStats:
        with self._lock:
            scheduler, pool = self.scheduler, self.scheduler.pool
            return EngineStats(
                steps=scheduler.num_steps,
                **self._counts,
                preemptions=scheduler.num_preempted,
                pages_evicted=pool.num_evicted,
                pages_held=pool.num_held,
                pages_cached=pool.num_cached,
                running=len(scheduler.prefilling) + len(scheduler.decoding),
                waiting=len(scheduler.waiting),
            )

    # Requests.

    def _requests(
        self, prompts: Prompt | Iterable[Prompt], sampling: SamplingParams | List[SamplingParams] | None
    ) -> list[Request]:
        listed: list[Any] = [prompts] if isinstance(prompts, str | Request) else list(prompts)
        if listed and all(isinstance(x, int | np.integer) for x in listed):
            listed = [listed]  # one prompt of token ids
        if sampling is None or isinstance(sampling, SamplingParams):
            each: list[SamplingParams | None] = [sampling] * len(listed)
        else:
            each = list(sampling)
            if len(each) != len(listed):
                raise ValueError(f"sampling must be one for all prompts or {len(listed)} of them, got {len(each)}")
        requests = []
        for prompt, params in zip(listed, each, strict=True):
            if isinstance(prompt, Request):
                if params is not None:
                    raise ValueError("sampling must be None for a Request, which brings its own")
                requests.append(prompt)
            else:
                requests.append(Request(prompt, params or SamplingParams()))
        return requests

    def _submit_all(self, requests: List[Request]) -> tuple[list[str], deque[Event]]:
        """Begin all or none; their ids, and where their events will be."""
        events: deque[Event] = deque()
        ids: list[str] = []
        with self._lock:
            try:
                for i, request in enumerate(requests):
                    try:
                        ids.append(self._submit(request, events))
                    except (TypeError, ValueError) as error:
                        raise type(error)(f"prompts[{i}]: {error}") from error
            except BaseException:
                for request_id in ids:
                    self.cancel(request_id)
                raise
        return ids, events

    def _submit(self, request: Request, events: deque[Event]) -> str:
        self._check_alive()
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        request_id = request.request_id if request.request_id is not None else f"request-{self._num_requests}"
        if request_id in self._jobs:
            raise ValueError(f"request_id must be unique, and {request_id!r} has not ended yet")
        sequences = self._door.enter(request, request_id, self._clock())
        self.scheduler.add(sequences[0])
        self._num_requests += 1
        self._jobs[request_id] = _Job(sequences, events)
        return request_id

    def _follow(self, ids: List[str], events: deque[Event]) -> Iterator[Event]:
        num_open = {i: self._jobs[i].num_open for i in ids}
        try:
            while num_open:
                while events:
                    event = events.popleft()
                    if event.output is not None:
                        num_open[event.request_id] -= 1
                        if not num_open[event.request_id]:
                            del num_open[event.request_id]
                    yield event
                if num_open:
                    with self._lock:
                        if not events:
                            self._step()
        finally:
            for request_id in num_open:
                self.cancel(request_id)

    # Steps.

    def _step(self) -> None:
        self._check_alive()
        try:
            while len(self._under_way) < self.config.run_ahead:
                now = self._clock()
                batch = self.scheduler.schedule(now)
                if batch is None:
                    break
                self._note_admitted(batch, now)
                self._under_way.append((batch, self._executor.submit(batch)))
            if self._under_way:
                batch, pending = self._under_way.popleft()
                self._receive(batch, self._executor.wait(pending))
        except BaseException as error:
            self._error = error
            self._jobs.clear()
            raise

    def _check_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed, and its requests with it") from self._error

    def _note_admitted(self, batch: Batch, now: float) -> None:
        for sequence in batch.admitted:
            metrics = sequence.data.metrics
            if metrics.admitted is None:
                metrics.admitted, metrics.cached_tokens = now, sequence.cached or 0
                self._counts["cached_tokens"] += metrics.cached_tokens
        self._counts["prompt_tokens"] += sum(chunk.num_tokens for chunk in batch.chunks if not chunk.decodes)

    def _receive(self, batch: Batch, results: Results) -> None:
        now = self._clock()
        for sequence, start, logprobs in results.prompt_logprobs:
            known = sequence.data.prompt_logprobs
            known += logprobs[len(known) + 1 - start :]  # computed anew, if it was put back
        for sequence, token, logprob in zip(batch.sampled, results.tokens, results.logprobs, strict=True):
            if sequence.state is State.FINISHED:
                continue  # it ended while this step was under way
            sample: Sample = sequence.data
            text, reason = sample.push(token, logprob, now)
            self._counts["output_tokens"] += 1
            if self.config.prefix_cache:
                sample.extend_keys(sequence, self._hash)
            self.scheduler.receive(sequence)
            if reason is not None:
                self._finish(sequence, text, token, reason)
            else:
                self._jobs[sample.request_id].events.append(sample.event(text, token))

    def _finish(self, sequence: Sequence, text: str, token: int | None, reason: FinishReason) -> None:
        sample: Sample = sequence.data
        if token is None:  # cancelled: what was held back is text after all
            sample.text += text
        tail = self._door.leave(sequence)
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence, tail)
        self._door.forget_sessions(self.num_pages)
        metrics = sample.metrics
        metrics.finished = self._clock()
        metrics.preemptions, metrics.recomputed_tokens = sequence.preemptions, sequence.recomputed
        job = self._jobs[sample.request_id]
        job.events.append(sample.event(text, token, reason))
        job.num_open -= 1
        if job.num_open == 0:
            del self._jobs[sample.request_id]


def _fitting_pages(model: Llama, params: Params | None, config: EngineConfig, max_length: int) -> int:
    most = config.max_running * -(-max_length // config.page_size)
    if params is None:
        return most
    embed: jax.Array = params["embed"]
    return default_num_pages(model.config, config.page_size, embed.dtype, next(iter(embed.devices())), most)
