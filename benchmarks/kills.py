"""Kills processes of an engine at random moments: `python -m benchmarks.kills --processes 2 --kills 12`.

Each time it starts the processes of one engine, which generate without end, sends one of them SIGKILL, SIGSTOP, SIGTERM
or SIGINT (Ctrl-C) at a random moment while they start, load and compile, or serve, and waits for the others. It prints
a line each: what was sent to whom in which phase, how long the others took to end, and with which exit statuses. Its
own exit status is 1 if one of them ended otherwise than with status 70, by the watchdog, or 1, by an error that it was
told, if it said nothing of ours on standard error, or if it took longer than the failure timeout and two seconds. A
process that was gone before it had asked to join is missed by the others when the join timeout has passed.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
from tqdm import tqdm

from benchmarks.server_process import free_port

SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
FAILURE_TIMEOUT, JOIN_TIMEOUT = 6.0, 60.0
PHASES = ("starts", "joined", "serves")
"""What the last word that process 0 printed says that it does; in "joined" it loads and compiles."""


class Kill(NamedTuple):
    """What became of the others. `seconds` is None if one of them hung."""

    sign: str
    victim: int
    phase: str
    seconds: float | None
    statuses: list[int]
    is_silent: bool  # one of them printed no sentence of ours

    @property
    def is_wrong(self) -> bool:
        longest = JOIN_TIMEOUT if self.phase == PHASES[0] else FAILURE_TIMEOUT
        is_late = self.seconds is None or self.seconds > longest + 2
        return is_late or self.is_silent or not {*self.statuses} <= {1, 70}


def work(coordinator: str, processes: int, process: int) -> None:
    """Be one of the processes."""
    from longctx.models import load_checkpoint
    from longctx.models.builtin import TINY
    from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
    from longctx.serving.distributed import initialize, make_process_mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    timeouts = {"failure_timeout": FAILURE_TIMEOUT, "join_timeout": JOIN_TIMEOUT}
    with initialize(coordinator, processes, process, **timeouts) as group:
        print("joined", flush=True)
        mesh = make_process_mesh(group, context=processes)
        model, params = load_checkpoint(TINY, mesh)
        config = EngineConfig(token_budget=16, buckets=(16,), max_running=4, num_pages=16, max_length=256)
        plan = ParallelPlan(context=processes)
        engine = Engine(model, params, config, mesh, plan=plan, process_group=group)
        if not group.is_first:
            engine.follow()
        while group.is_first:
            engine.generate(Request(list(range(40)), SamplingParams(max_tokens=20, ignore_eos=True)))
            print("serves", flush=True)


def kill(processes: int, rng: random.Random, folder: Path) -> Kill:
    """Start the processes, kill one in a random phase, and wait for the others."""
    coordinator = f"127.0.0.1:{free_port()}"
    sign, victim, wanted = rng.choice(SIGNALS), rng.randrange(processes), rng.choice(PHASES)
    running = []
    for process in range(processes):
        command = [sys.executable, "-m", "benchmarks.kills", "--work", coordinator, str(processes), str(process)]
        with (folder / f"{process}.out").open("wb") as out, (folder / f"{process}.err").open("wb") as err:
            running.append(subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    others = [x for i, x in enumerate(running) if i != victim]
    try:
        deadline = time.monotonic() + 200
        while wanted != PHASES[0] and wanted not in (folder / "0.out").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(rng.uniform(0, 3))
        printed = (folder / "0.out").read_text()
        phase = next((phase for phase in reversed(PHASES) if phase in printed), PHASES[0])
        running[victim].send_signal(sign)
        began = time.monotonic()
        seconds: float | None = None
        try:
            for other in others:
                other.wait(max(0.1, began + JOIN_TIMEOUT + 20 - time.monotonic()))
            seconds = time.monotonic() - began
        except subprocess.TimeoutExpired:
            pass
        statuses = [other.returncode for other in others if other.returncode is not None]
        texts = [(folder / f"{i}.err").read_text(errors="replace") for i in range(processes) if i != victim]
        # A process that has not joined raises what it knows; one that has says what ends it.
        silent = not all("longctx: process" in text or "TimeoutError: " in text for text in texts)
        return Kill(sign.name, victim, phase, seconds, statuses, silent)
    finally:
        for each in running:
            each.kill()
            each.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], int(options.work[1]), int(options.work[2]))
        return 0
    rng, kills = random.Random(options.seed), []
    for _ in tqdm(range(options.kills), disable=None):
        with tempfile.TemporaryDirectory() as folder:
            kills.append(kill(options.processes, rng, Path(folder)))
        print(("WRONG: " if kills[-1].is_wrong else "") + str(kills[-1]), flush=True)
    for phase in PHASES:
        for sign in SIGNALS:
            taken = [x.seconds for x in kills if x.phase == phase and x.sign == sign.name and x.seconds is not None]
            if taken:
                print(
                    f"{phase} {sign.name}: {len(taken)}, median {statistics.median(taken):.1f} s, most {max(taken):.1f}"
                )
    return 1 if any(x.is_wrong for x in kills) else 0


if __name__ == "__main__":
    sys.exit(main())
