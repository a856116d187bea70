"""What recording costs: `python -m benchmarks.recording`, as a table in markdown.

An engine in virtual time, whose device takes no time: core, locks and journals are the ones that serve. 128 requests
decode in every step, or 127 and a chunk of 385 tokens of another's prompt (`mixed`). Engines without a recorder and
with one take turns, a round of steps each. Times are of the thread's own, in microseconds a
step, medians and p10 (the least disturbed): of the whole step, and of the recorder's part of it; `writer`: of the
thread that writes, in the mean. Bytes are of a step's record, in the mean.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, Request, SamplingParams
from longctx.serving.recording.recorder import Recorder, open_recorder
from longctx.simulation import VirtualExecutor

RUNNING, BUDGET, PAGE, CONTEXT = 128, 512, 64, 1000
STEPS = 50
MODEL = Llama(LlamaConfig(128256, 16, 16, 1, 1, 1, 16, max_positions=2**31 - 1))
NOTES = ("note_step", "note_plan", "note_draw", "note_end")


class Recorded:
    """An engine with 128 requests that decode, one of them not yet in the mixed case."""

    def __init__(self, directory: Path, kind: str, steps: int, mixed: bool) -> None:
        self.recorder = None if kind == "none" else open_recorder(directory / kind)
        executor = VirtualExecutor(lambda batch: 1e-3, 128256)
        reading = steps * (BUDGET - RUNNING + 1)
        pages = RUNNING * (CONTEXT + steps + 2 * PAGE) // PAGE + reading // PAGE + RUNNING
        config = EngineConfig(page_size=PAGE, num_pages=pages, max_running=RUNNING, token_budget=BUDGET, run_ahead=1)
        self.engine = Engine(MODEL, None, config, executor=executor, clock=executor.clock, recorder=self.recorder)
        self.in_notes, self.bytes = 0.0, 0
        if self.recorder is not None:
            for name in NOTES:
                self._time(name)
        rng = np.random.default_rng(0)
        sampling = SamplingParams(max_tokens=steps + 2 * RUNNING, ignore_eos=True)
        for _ in range(RUNNING - mixed):
            self.engine.submit(Request(rng.integers(0, 128256, CONTEXT).tolist(), sampling))
        while len(self.engine.scheduler.running.decoding) < RUNNING - mixed:
            self.engine.step()
        if mixed:
            self.engine.submit(Request(rng.integers(0, 128256, reading).tolist(), SamplingParams(max_tokens=1)))

    def step(self) -> tuple[float, float]:
        """Run a step: microseconds of all of it, and of the recorder's part."""
        self.in_notes = 0.0
        begin = time.thread_time_ns()
        self.engine.step()
        return (time.thread_time_ns() - begin) / 1e3, self.in_notes

    def _time(self, name: str) -> None:
        note: Callable[..., None] = getattr(self.recorder, name)

        def timed(*arguments: Any) -> None:
            begin = time.perf_counter_ns()
            note(*arguments)
            self.in_notes += (time.perf_counter_ns() - begin) / 1e3

        setattr(self.recorder, name, timed)


def measure(mixed: bool, rounds: int) -> None:
    """Prints the lines of a case."""
    with tempfile.TemporaryDirectory() as directory:
        hosts = {kind: Recorded(Path(directory), kind, (rounds + 1) * STEPS, mixed) for kind in ("none", "recorded")}
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in hosts}
        sizes, writing = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0.0)
        for index in range(rounds + 1):
            for kind, host in hosts.items():
                before = _size(host.recorder)
                others = time.process_time() - time.thread_time()
                parts = [host.step() for _ in range(STEPS)]
                time.sleep(0.25)  # until all of it is written
                if index:  # the first warms up
                    times[kind] += parts
                    sizes[kind] += _size(host.recorder) - before
                    writing[kind] += time.process_time() - time.thread_time() - others
        idle = writing["none"]  # what the writer's waking up costs
        for kind, parts in times.items():
            (step, notes), (p10, notes_p10) = np.median(parts, 0), np.percentile(parts, 10, 0)
            writer = 1e6 * (writing[kind] - idle) / len(parts)
            row = f"{step:,.0f} | {p10:,.0f} | {notes:,.0f} | {notes_p10:,.0f} | {writer:,.1f}"
            print(
                f"| {'mixed' if mixed else 'decode'} | {kind} | {row} | {sizes[kind] / len(parts):,.0f} |", flush=True
            )
        for host in hosts.values():
            if host.recorder is not None:
                host.recorder.close()


def _size(recorder: Recorder | None) -> int:
    return 0 if recorder is None else recorder.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of 50 steps, of each case")
    options = parser.parse_args()
    print("| step | log | step, median | p10 | recorder, median | p10 | writer | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    for mixed in (False, True):
        measure(mixed, options.rounds)


if __name__ == "__main__":
    main()
