"""What the host does in a step: `python -m benchmarks.host_overhead`, as a table in markdown.

Scheduler, chunker, batch assembly and the handling of results are the ones that serve; only the device's step is left
out. Pages are of 64 tokens. Times are of the thread's own, in microseconds a step, medians; all cases of a row take
turns. p10 is the least disturbed: who shares the machine also shares its caches.

`decode`: 128 decodes on one rank. Every request really has its pages (156,250 entries at 10M tokens), their keys and
reference counts, distinct from those of all others; prompts are zeros that nobody looks at. `mixed`: 127 decodes, and
the rows that are left of 512 for a chunk of the last one's prompt.
"""

import argparse
import resource
import sys
import time
from typing import NamedTuple

import jax
import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.parallel import Topology, make_mesh
from longctx.serving import EngineConfig, Metrics, ParallelPlan, Request, SamplingParams
from longctx.serving.engine.core import Core
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.executor.interface import Results
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import roofline
from longctx.serving.request.completion import Completion, Detokenizer
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

RUNNING, BUDGET, PAGE = 128, 512, 64
STEPS = 50  # of a round
CONTEXTS = 1_000, 100_000, 1_000_000, 10_000_000
MODEL = Llama(LlamaConfig(256, 16, 16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, max_positions=2**31 - 1))


class Parts(NamedTuple):
    """Microseconds of one step, of the thread's own time, since other processes run beside it."""

    schedule: float
    assemble: float
    results: float


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
        sizes = 1, PAGE, RUNNING, -(-longest // PAGE), config.step_rows(ParallelPlan()).largest
        runner = ModelRunner(MODEL, params, make_mesh(), *sizes)
        self.executor = DeviceExecutor(MODEL.config, config, ParallelPlan(), pages, longest, runner)
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


def _chunker(budget: int) -> Chunker:
    predictor = Corrected(roofline(MODEL.config, Topology.preset("cpu"), budget))
    return Chunker(make_policy("ilrs", 0.5), predictor, Chunking(False, budget), page_size=PAGE)


def measure(name: str, mixed: bool, rounds: int) -> None:
    """Print the lines of a row."""
    cases = {context: RunningHost(context, (rounds + 1) * STEPS, mixed) for context in CONTEXTS}
    times: dict[int, list[Parts]] = {context: [] for context in CONTEXTS}
    for index in range(rounds + 1):
        for context, case in cases.items():
            parts = [case.step() for _ in range(STEPS)]
            times[context] += parts if index else []  # the first warms up
    for context, parts in times.items():
        schedule, assemble, results = (f"{x:,.0f}" for x in np.median(parts, 0))
        low, middle, high = np.percentile([part.schedule + part.assemble for part in parts], (10, 50, 99))
        planning, sent = f"{middle:,.0f} | {low:,.0f} | {high:,.0f}", f"{max(cases[context].bytes_sent):,}"
        print(f"| {name} | {context:,} | {schedule} | {assemble} | {planning} | {results} | {sent} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help=f"of {STEPS} steps, of each case")
    options = parser.parse_args()
    print("| step | tokens | scheduler | assembly | both, median | p10 | p99 | results | bytes sent |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, mixed in (("decode", False), ("mixed", True)):
        measure(name, mixed, options.rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{options.rounds} rounds, peak memory {peak:.1f} GiB", file=sys.stderr)


if __name__ == "__main__":
    main()
