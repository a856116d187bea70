"""What a step's decisions cost the host, under every policy: `python -m benchmarks.scheduling`.

128 requests run, half of them decoding, half reading prompts of a million tokens, and 1,000 of all lengths wait. Either
all slots are taken, so that nobody can be admitted, or some are free and pages are not, so that in every step all who
wait are ranked to find that out.
"""

import argparse
import time

import numpy as np

from longctx.serving import Slo
from longctx.serving.kv_cache.page_pool import PagePool
from longctx.serving.predictor import Corrected, RuntimePredictor
from longctx.serving.predictor.runtime import Program
from longctx.serving.scheduler.chunking import Chunker, Chunking
from longctx.serving.scheduler.policy import POLICIES, make_policy
from longctx.serving.scheduler.scheduler import Scheduler
from longctx.serving.scheduler.sequence import Sequence

RUNNING, WAITING, PAGE, BUDGET = 128, 1000, 64, 512
SHORT, LONG, OUTPUT = 64, 10**6, 4000
PREDICTOR = RuntimePredictor(
    tuple(Program(rows, 1e-2 + 1e-4 * rows, (1, 8), (1e-8, 1e-7), 1e-5) for rows in (8, 16, 32, 64, 128, 256, 512))
)
STEP = 0.05  # seconds


def make_scheduler(policy: str, chunking: str, free_slots: int) -> Scheduler:
    lengths = [SHORT, LONG] * (RUNNING // 2)
    pages = sum(-(-(length + OUTPUT - 1) // PAGE) for length in lengths)
    chunker = Chunker(make_policy(policy, 0.5), Corrected(PREDICTOR), Chunking.parse(chunking, BUDGET, RUNNING))
    scheduler = Scheduler(chunker, PagePool(pages), PAGE, RUNNING + free_slots, slo=Slo(tpot=STEP))
    for order, length in enumerate(lengths):
        # Whatever the policy, short prompts are read first.
        priority = 1 if length == SHORT else 0
        scheduler.add(Sequence(f"running-{order}", order, length, OUTPUT, 1e-3 * order, priority))
    while len(scheduler.running.decoding) < RUNNING // 2:
        scheduler.schedule(0.0)
    for sequence in scheduler.running.prefilling:
        sequence.priority = 0
    rng = np.random.default_rng(0)
    for order in range(RUNNING, RUNNING + WAITING):
        length = int(np.exp(rng.uniform(np.log(16), np.log(LONG))))
        scheduler.add(Sequence(f"waiting-{order}", order, length, 100, 1e-3 * order))
    return scheduler


def measure(scheduler: Scheduler, steps: int) -> list[float]:
    """Milliseconds of each step."""
    times = []
    for number in range(steps):
        begin = time.perf_counter()
        batch = scheduler.schedule(2.0 + STEP * number)
        times.append(1e3 * (time.perf_counter() - begin))
        assert batch is not None
        assert len(batch.chunks) > RUNNING // 2
        for sequence in batch.sampled:
            scheduler.receive(sequence)
    assert len(scheduler.running.decoding) == len(scheduler.running.prefilling) == RUNNING // 2
    assert len(scheduler.waiting) == WAITING
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    print(f"{RUNNING} running, {WAITING} waiting; milliseconds a step, of {options.steps} steps\n")
    print("| policy | chunking | who waits is ranked | median | p99 |")
    print("|---|---|---|---|---|")
    for policy in POLICIES:
        for chunking in ("static", "adaptive"):
            for free_slots in (0, 8):
                times = measure(make_scheduler(policy, chunking, free_slots), options.steps)
                told = " | ".join(f"{np.percentile(times, p):.2f}" for p in (50, 99))
                print(f"| {policy} | {chunking} | {'yes' if free_slots else 'no'} | {told} |")


if __name__ == "__main__":
    main()
