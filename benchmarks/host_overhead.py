"""What the host does in a step, for 128 running requests of any context: `python -m benchmarks.host_overhead`.

The scheduler, the executor's batch assembly and the handling of results are the ones that serve; only the device's
step is left out. Every request really has its pages (of 64 tokens: 156,250 entries at 10M tokens), their keys and
reference counts, distinct from those of all others; prompts are zeros that nobody looks at. Lengths are staggered, so
that in every step two of the 128 begin a page. All contexts take turns, in rounds of 50 steps.

`decode`: 128 decodes. `mixed`: 127 decodes, and the rows that are left of 512 for a chunk of the last one's prompt.
"""

import argparse
import functools
import resource
import time
from typing import NamedTuple

import jax
import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.parallel import make_mesh
from longctx.serving import EngineConfig, Metrics, ParallelPlan, Request, SamplingParams
from longctx.serving.executor.executor import DeviceExecutor
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash
from longctx.serving.predictor.correction import Corrected
from longctx.serving.predictor.roofline import CPU, roofline
from longctx.serving.request.completion import Completion
from longctx.serving.request.detokenizer import Detokenizer
from longctx.serving.runner.model_runner import MeshModelRunner
from longctx.serving.scheduler.batch import Batch
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

RUNNING, BUDGET, PAGE = 128, 512, 64
MODEL = Llama(LlamaConfig(256, 16, 16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, max_positions=2**31 - 1))
STEPS_OF_A_ROUND = 50


class Parts(NamedTuple):
    """Microseconds of one step."""

    schedule: float
    assemble: float
    results: float

    @property
    def planning(self) -> float:
        return self.schedule + self.assemble


class Host:
    """128 requests of `context` tokens each, all of which count as computed."""

    def __init__(self, context: int, steps: int, mixed: bool) -> None:
        chunks = steps * (BUDGET - RUNNING + 1) if mixed else 0  # tokens that the last one has yet to read
        lengths = [context + i % PAGE for i in range(RUNNING)]
        pages = sum(-(-(length + steps + 1) // PAGE) for length in lengths) + -(-chunks // PAGE)
        config = EngineConfig(page_size=PAGE, max_running=RUNNING, token_budget=BUDGET)
        params = MODEL.init(jax.random.key(0))
        # Only the device has a cache of one page.
        longest = max(lengths) + steps + 1 + chunks
        make = functools.partial(MeshModelRunner, MODEL, params, make_mesh(), 1, PAGE)
        self.executor = DeviceExecutor(MODEL.config, config, ParallelPlan(), pages, longest, make)
        self.hash = PageHash(bytes(32), PAGE)
        self.scheduler = Scheduler(_chunker(sum(lengths)), PagePool(pages), PAGE, RUNNING)
        num_keys = 0
        for order, length in enumerate(lengths):
            prompt_length = length + chunks if order == RUNNING - 1 else length
            keys = [(num_keys + i).to_bytes(KEY_BYTES) for i in range(prompt_length // PAGE)]
            num_keys += len(keys)
            self.scheduler.add(_sequence(order, prompt_length, steps + 1, keys))
        batch = self.scheduler.schedule(0.0)  # all prompts in one huge step, which is not run
        assert batch is not None
        assert batch.num_tokens == sum(lengths)
        for sequence in batch.admitted:
            self.executor._on_board(sequence)
        self.scheduler.chunker = _chunker(BUDGET)
        self.bytes_sent: set[int] = set()
        self._before = batch

    def step(self) -> Parts:
        """Plan and assemble one step, and take the results of the one before."""
        device = self.executor.device
        assert isinstance(device, MeshModelRunner)
        state = device.state
        begin = time.perf_counter_ns()
        batch = self.scheduler.schedule(0.0)
        assert batch is not None
        scheduled = time.perf_counter_ns()
        rows, samples, _ = self.executor.assemble(batch)
        assembled = time.perf_counter_ns()
        self._receive(self._before)
        received = time.perf_counter_ns()
        self._before = batch
        assert device.state is state, "something was sent ahead of the step"
        self.bytes_sent.add(rows.nbytes + samples.nbytes)
        return Parts(*(ns / 1e3 for ns in (scheduled - begin, assembled - scheduled, received - assembled)))

    def _receive(self, batch: Batch) -> None:
        """As the engine does."""
        for sequence in batch.sampled:
            sample: Completion = sequence.completion
            text, _ = sample.push(7, None, 0.0)
            sample.extend_keys(sequence, self.hash)
            self.scheduler.receive(sequence)
            sample.event(text, 7)


def _chunker(budget: int) -> Chunker:
    predictor = Corrected(roofline(MODEL.config, CPU, budget))
    return Chunker(make_policy("ilrs", 0.5), predictor, Chunking(False, budget))


def _sequence(order: int, prompt_length: int, max_tokens: int, keys: list[bytes]) -> Sequence:
    request = Request((0,), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    sample = Completion(
        request=request,
        request_id=str(order),
        index=0,
        num_prompt=prompt_length,
        known=np.zeros(prompt_length + max_tokens, np.int32),
        seed=0,
        stop_ids=frozenset(),
        text_stream=Detokenizer(None, ()),
        metrics=Metrics(0.0, prompt_length),
        prompt_logprobs=None,
    )
    return Sequence(str(order), order, prompt_length, max_tokens, keys=keys, completion=sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help=f"of {STEPS_OF_A_ROUND} steps, of each context")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1_000, 100_000, 1_000_000, 10_000_000])
    options = parser.parse_args()
    print(f"{RUNNING} running requests, pages of {PAGE} tokens; microseconds a step, {options.rounds} rounds\n")
    print("| step | context | scheduler | assembly | both, median | p99 | most | ratio | results | bytes sent |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, mixed in (("decode", False), ("mixed", True)):
        steps = (options.rounds + 1) * STEPS_OF_A_ROUND
        hosts = {context: Host(context, steps, mixed) for context in options.contexts}
        times: dict[int, list[Parts]] = {context: [] for context in hosts}
        for index in range(options.rounds + 1):
            for context, host in hosts.items():
                parts = [host.step() for _ in range(STEPS_OF_A_ROUND)]
                times[context] += parts if index else []  # the first warms up
        first = np.median([part.planning for part in times[options.contexts[0]]])
        for context, parts in times.items():
            schedule, assemble, results = np.median(parts, 0)
            both = [part.planning for part in parts]
            sent = max(hosts[context].bytes_sent)
            print(
                f"| {name} | {context:,} | {schedule:.0f} | {assemble:.0f} | {np.median(both):.0f} "
                f"| {np.percentile(both, 99):.0f} | {max(both):.0f} | {np.median(both) / first:.2f}x "
                f"| {results:.0f} | {sent:,} |"
            )
        del hosts
    print(f"\npeak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
