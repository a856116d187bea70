"""What `benchmarks.host_overhead` measures: hosts in a known state, each of which does a step at a time.

Scheduler, chunker, batch assembly and the handling of results are the ones that serve; only the device's step is left
out. `RunningHost` has requests with all that belongs to them; where planning alone is measured, sequences have no
tokens, and keys only where it is about keys.
"""

import functools
import math
import time
from typing import NamedTuple, Protocol

import jax
import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.parallel import make_mesh
from longctx.serving import EngineConfig, Metrics, ParallelPlan, Request, SamplingParams
from longctx.serving.engine.core import Core
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.interface import Results
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import CPU, roofline
from longctx.serving.request.completion import Completion, Detokenizer
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

RUNNING, BUDGET, PAGE = 128, 512, 64
RANKS, RANKED = 8, 256  # context ranks, and requests over all of them
WAITING, FREE_SLOTS = 2900, 8
MODEL = Llama(LlamaConfig(256, 16, 16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, max_positions=2**31 - 1))


class Parts(NamedTuple):
    """Microseconds of one step, of the thread's own time, since other processes run beside it; NaN: not measured."""

    schedule: float
    assemble: float = np.nan
    results: float = np.nan

    @property
    def planning(self) -> float:
        return float(np.nansum([self.schedule, self.assemble]))


class Case(Protocol):
    def step(self) -> Parts: ...


class RunningHost:
    """128 requests of `context` tokens each, all of which count as computed.

    In every step all decode, or, where `mixed`, 127 do, and the last one reads 385 tokens more of its prompt. Lengths
    are staggered, so that in every step two of the 128 begin a page.
    """

    def __init__(self, context: int, steps: int, mixed: bool) -> None:
        self._chunk = BUDGET - RUNNING + 1 if mixed else 0
        unread = steps * self._chunk + mixed  # so that the last one never comes to the end of its prompt
        lengths = [context + i % PAGE for i in range(RUNNING)]
        pages = sum(-(-(length + steps + 2) // PAGE) for length in lengths) + -(-unread // PAGE)
        config = EngineConfig(page_size=PAGE, max_running=RUNNING, token_budget=BUDGET)
        params = MODEL.init(jax.random.key(0))
        # Only the device has a cache of one page.
        longest = max(lengths) + steps + 2 + unread
        make = functools.partial(ModelRunner, MODEL, params, make_mesh(), 1, PAGE)
        self.executor = DeviceExecutor(MODEL.config, config, ParallelPlan(), pages, longest, make)
        self.scheduler = Scheduler(_chunker(BUDGET), PagePool(pages), PAGE, RUNNING)
        self.core = Core(self.scheduler, PageHash(bytes(32), PAGE), None, run_ahead=2)
        self.bytes_sent: set[int] = set()
        self._keys = 0
        # Two huge steps, which are not run. The last request is on its own in the second: else it could be the most
        # urgent in the first, take all of it, and nobody would decode.
        for first, stop in ((0, RUNNING - 1), (RUNNING - 1, RUNNING)):
            for order in range(first, stop):
                rest = unread if order == RUNNING - 1 else 0
                self.scheduler.add(self._sequence(order, lengths[order] + rest, steps + 2))
            self._set_up(sum(lengths[first:stop]))
        self.scheduler.chunker = _chunker(BUDGET)
        self._check_state(lengths)

    def _sequence(self, order: int, prompt_length: int, max_tokens: int) -> Sequence:
        keys = [(self._keys + i).to_bytes(KEY_BYTES) for i in range(prompt_length // PAGE)]
        self._keys += len(keys)
        request = Request((0,), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        completion = Completion(
            request=request,
            request_id=str(order),
            index=0,
            num_prompt=prompt_length,
            known=np.zeros(prompt_length + max_tokens, np.int32),
            seed=0,
            stop_ids=frozenset(),
            detokenizer=Detokenizer(None, ()),
            metrics=Metrics(0.0, prompt_length),
            prompt_logprobs=None,
        )
        return Sequence(str(order), order, prompt_length, max_tokens, keys=keys, completion=completion)

    def _set_up(self, prompt_tokens: int) -> None:
        """Plan a step with so many tokens of prompts."""
        decodes = len(self.scheduler.running.decoding)
        self.scheduler.chunker = _chunker(decodes + prompt_tokens)
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        assert batch.num_tokens == decodes + prompt_tokens
        for sequence in batch.admitted:
            self.executor.admit(sequence)
        if decodes:
            self._receive(self._before)
        self._before = batch

    def _check_state(self, lengths: list[int]) -> None:
        """That as many decode as the figures are said to be of, however long the context."""
        reading = self.scheduler.running.prefilling
        assert len(reading) == bool(self._chunk)
        assert len(self.scheduler.running.decoding) == RUNNING - len(reading)
        assert all(sequence.computed == lengths[-1] for sequence in reading)

    def step(self) -> Parts:
        """Plan and assemble one step, and take the results of the one before."""
        device = self.executor.runner
        assert isinstance(device, ModelRunner)
        state = device.state
        begin = time.thread_time_ns()
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        scheduled = time.thread_time_ns()
        rows, samples, _ = self.executor.assemble(batch)
        assembled = time.thread_time_ns()
        self._receive(self._before)
        received = time.thread_time_ns()
        self._before = batch
        assert device.state is state, "something was sent ahead of the step"
        chunks = [chunk.num_tokens for chunk in batch.chunks if not chunk.decodes]
        assert chunks == [self._chunk] * bool(self._chunk)
        assert len(batch.chunks) == RUNNING
        self.bytes_sent.add(rows.nbytes + samples.nbytes)
        return Parts(*(ns / 1e3 for ns in (scheduled - begin, assembled - scheduled, received - assembled)))

    def _receive(self, batch: Batch) -> None:
        """As the engine does."""
        tokens = [7] * len(batch.sampled)
        self.core.in_flight.append(batch)
        self.core.end(batch, Results(tokens, [None] * len(tokens), []), 0.0, None)


class PlannedHost:
    """Some decodes, and maybe some who wait; planning alone is measured."""

    def __init__(self, scheduler: Scheduler, decodes: int) -> None:
        self.scheduler, self._decodes, self._waiting = scheduler, decodes, len(scheduler.waiting)

    def step(self) -> Parts:
        begin = time.thread_time_ns()
        batch = self.scheduler.schedule(0.0)
        microseconds = (time.thread_time_ns() - begin) / 1e3
        assert batch is not None
        assert sum(chunk.decodes for chunk in batch.chunks) == len(batch.chunks) == self._decodes
        assert len(self.scheduler.waiting) == self._waiting
        for sequence in batch.sampled:
            self.scheduler.receive(sequence)
        return Parts(microseconds)


def ranked_decodes(steps: int) -> PlannedHost:
    """256 decodes of some 1,000 tokens, 32 on each of 8 ranks."""
    scheduler = _ranked_scheduler(BUDGET)
    for order in range(RANKED):
        scheduler.add(Sequence(str(order), order, 1000 + order % PAGE, steps + 1000))
    while len(scheduler.running.decoding) < RANKED:
        _run(scheduler)
    ranks = [sequence.ranks for sequence in scheduler.running.decoding]
    assert {ranks.count((rank,)) for rank in range(RANKS)} == {RANKED // RANKS}
    return PlannedHost(scheduler, RANKED)


class RankedPrompts:
    """256 admitted prompts over 8 ranks, none of which is read: rows are shared out among all of them, over and over.

    Args:
      length: of each prompt, about. Of 14 tokens most fit into one step; of 600 each is longer than a rank's.
    """

    def __init__(self, length: int) -> None:
        scheduler = _ranked_scheduler(1)  # one token of one prompt is read
        for order in range(RANKED):
            scheduler.add(Sequence(str(order), order, length + order % 8, 100))
        scheduler.schedule(0.0)
        assert len(scheduler.running.prefilling) == RANKED
        self._chunker, self._prompts = _chunker(BUDGET, scheduler.plan), list(scheduler.running.prefilling)

    def step(self) -> Parts:
        begin = time.thread_time_ns()
        packed = self._chunker.pack(self._prompts, (), 0.0)
        microseconds = (time.thread_time_ns() - begin) / 1e3
        assert packed
        return Parts(microseconds)


class RankedArrivals:
    """The step that admits 256 prompts at once over 8 ranks, and reads what it can of them."""

    def step(self) -> Parts:
        scheduler = _ranked_scheduler(BUDGET)
        for order in range(RANKED):
            scheduler.add(Sequence(str(order), order, 14 + order % 4, 100))
        begin = time.thread_time_ns()
        batch = scheduler.schedule(0.0)
        microseconds = (time.thread_time_ns() - begin) / 1e3
        assert batch is not None
        assert len(batch.admitted) == RANKED
        return Parts(microseconds)


def many_waiting(steps: int) -> PlannedHost:
    """128 decodes, 8 free slots, and 2,900 who wait, the first of whom, whoever that is, does not fit in memory."""
    length, output = 1000, steps + 1000
    pages = RUNNING * -(-(length + output - 1) // PAGE)
    scheduler = Scheduler(_chunker(BUDGET), PagePool(pages), PAGE, RUNNING + FREE_SLOTS)
    for order in range(RUNNING):
        scheduler.add(Sequence(str(order), order, length, output))
    while len(scheduler.running.decoding) < RUNNING:
        _run(scheduler)
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(50_000), WAITING)).astype(int).tolist()
    for order, each in enumerate(lengths, RUNNING):
        scheduler.add(Sequence(str(order), order, each, 100, 1e-3 * order))
    return PlannedHost(scheduler, RUNNING)


def long_prefix(context: int, steps: int) -> PlannedHost:
    """A decode after `context` tokens, another one, and a request that waits: it begins with these tokens too.

    All pages of its prefix are found, and in vain, since there is no memory for the 100 pages after them.
    """
    pages, more, spare = context // PAGE, 100, 50
    keys = [i.to_bytes(KEY_BYTES) for i in range(pages + more)]
    output = steps + 4
    lengths = pages * PAGE, more * PAGE
    num_pages = spare + sum(-(-(length + output) // PAGE) for length in lengths)
    scheduler = Scheduler(_chunker(sum(lengths)), PagePool(num_pages), PAGE, RUNNING)
    for order, length in enumerate(lengths):
        scheduler.add(Sequence(str(order), order, length, output, keys=[] if order else keys[:pages]))
    while len(scheduler.running.decoding) < len(lengths):
        _run(scheduler)
    scheduler.chunker = _chunker(BUDGET)
    scheduler.add(Sequence("head", len(lengths), sum(lengths), PAGE, keys=keys))
    assert scheduler.count_cached(keys) == pages * PAGE
    return PlannedHost(scheduler, len(lengths))


def _ranked_scheduler(budget: int) -> Scheduler:
    plan = ParallelPlan(context=RANKS)
    placer = plan.placer(PAGE, BUDGET, lambda _: math.inf)
    return Scheduler(_chunker(budget, plan), PagePool(RANKED * 1000, RANKS), PAGE, RANKED, placer=placer)


def _chunker(budget: int, plan: ParallelPlan | None = None) -> Chunker:
    predictor = Corrected(roofline(MODEL.config, CPU, budget))
    return Chunker(make_policy("ilrs", 0.5), predictor, Chunking(False, budget), plan, PAGE)


def _run(scheduler: Scheduler) -> None:
    """A step that nobody looks at."""
    batch = scheduler.schedule(0.0)
    assert batch is not None
    for sequence in batch.sampled:
        scheduler.receive(sequence)
