"""What many processes cost an engine in every step: `python -m benchmarks.step_channel`.

Two processes of this machine run one engine (a random Llama, `tensor=2`, one CPU device each) over loopback. Prompts of
several lengths, one after another, are read and continued by 8 requests at a time; the next step is always in flight.
Told are:

- one way: from when process 0 sends a step's message to when the other has it; counted from when that one began to wait
  for it, if that was later. 10th percentile, median, 99th. First of some messages while no step is in flight.
- the size of messages, but of those that bring a prompt.
- what the host does besides, in each step: process 0 notes decisions and sends, the other one reads a message and notes
  decisions.

The limit: over loopback, a hundred bytes take some 30 us to a receiver that spins, 90 to one that has to be woken.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.server_process import free_port
from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, ParallelPlan, Request, SamplingParams
from longctx.serving.distributed import ProcessGroup, initialize
from longctx.serving.distributed.orders import Order, decode_order, encode_order

LENGTHS, RUNNING = (128, 2048, 8192), 8


class Probe:
    """Times of one process: seconds of each call of what has been wrapped, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)
        seconds = self.seconds.setdefault(name, [])

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = inner(*arguments)
            seconds.append(time.perf_counter() - start)
            return result

        setattr(owner, method, timed)

    def per_step(self, *names: str) -> float:
        """Microseconds, in the middle of steps: each name's median, times how often it is called a step."""
        steps = max(1, max(len(self.seconds[name]) for name in names))
        return sum(1e6 * float(np.median(s)) * round(len(s) / steps) for s in map(self.seconds.get, names) if s)


PINGS = 500


def ping(group: ProcessGroup) -> list[float]:
    """Messages while nothing else happens: microseconds one way, in the process that hears them."""
    delays = []
    for _ in range(PINGS):
        if group.is_first:
            group.broadcast(struct.pack("<d", time.perf_counter()))
            time.sleep(0.002)
        else:
            (at,) = struct.unpack("<d", group.receive())
            delays.append(1e6 * (time.perf_counter() - at))
    return delays


def lead(engine: Engine, group: ProcessGroup, tokens: int) -> dict[str, Any]:
    channel, probe = group._channel, Probe()
    send, sizes = channel.send, []

    def stamped(data: bytes) -> None:
        send(data + struct.pack("<d", time.perf_counter()) if data else data)
        if data and not decode_order(data).updates:
            sizes.append(len(data))

    channel.send = stamped
    engine.warm_up()
    lockstep = engine._lockstep
    for owner, method in (
        (lockstep, "note_step"),
        (lockstep.decisions, "add_plan"),
        (lockstep.decisions, "add_tokens"),
    ):
        probe.wrap(owner, method, method)
    found: dict[str, Any] = {"sizes": {}}
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        sizes.clear()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.generate([Request(rng.integers(0, 256, length).tolist(), params) for _ in range(RUNNING)])
        found["sizes"][length] = [float(np.median(sizes)), max(sizes)]
    steps = engine.stats().steps
    found |= {"steps": steps, "added": probe.per_step("note_step", "add_plan", "add_tokens")}
    return found


def follow(engine: Engine, group: ProcessGroup) -> dict[str, Any]:
    channel, probe, delays = group._channel, Probe(), []
    receive = channel.receive

    def waited() -> bytes:
        asked = time.perf_counter()
        data = receive()
        now = time.perf_counter()  # the same clock in all processes of a host
        if data:
            (at,) = struct.unpack("<d", data[-8:])
            delays.append((now - max(at, asked), at > asked))
        return data[:-8]

    channel.receive = waited
    for method in ("add_plan", "add_tokens"):
        probe.wrap(engine._lockstep.decisions, method, method)
    engine.follow()
    data = encode_order(Order("step", 12345.678901234, 0.012345678))
    start = time.perf_counter()
    for _ in range(1000):
        decode_order(data)
    reading = (time.perf_counter() - start) * 1000
    both = [1e6 * seconds for seconds, _ in delays]
    woken = [1e6 * seconds for seconds, was_waiting in delays if was_waiting]
    return {
        "all": np.percentile(both, (10, 50, 99)).tolist(),
        "woken": np.percentile(woken, (10, 50, 99)).tolist() if woken else None,
        "num_woken": len(woken),
        "num": len(both),
        "added": probe.per_step("add_plan", "add_tokens") + reading,
    }


def run(process: int, coordinator: str, tokens: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    with initialize(coordinator, 2, process) as group:
        pings = ping(group)
        config = LlamaConfig(256, 256, 512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, max_positions=16384)
        model = Llama(config)
        engine_config = EngineConfig(
            max_running=RUNNING,
            max_length=max(LENGTHS) + tokens,
            token_budget=512,
            buckets=(8, 512),
            prefix_cache=False,
        )
        params = model.init(jax.random.key(0))
        engine = Engine(model, params, engine_config, plan=ParallelPlan(tensor=2), process_group=group)
        found = lead(engine, group, tokens) if group.is_first else follow(engine, group)
    if pings:
        found["pings"] = np.percentile(pings, (10, 50, 99)).tolist()
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100, help="that each request writes")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        run(options.process, options.coordinator, options.tokens)
        return
    coordinator = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "benchmarks.step_channel", "--coordinator", coordinator]
    load = os.getloadavg()[0]
    # One thread each: on a host with GPUs no step takes the cores from who listens.
    environment = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    running = [
        subprocess.Popen(
            [*command, "--tokens", str(options.tokens), "--process", str(i)], stdout=subprocess.PIPE, env=environment
        )
        for i in (0, 1)
    ]
    first, other = (json.loads(process.communicate()[0].splitlines()[-1]) for process in running)
    print(f"{first['steps']} steps, {os.cpu_count()} cores, load {load:.1f} before, jax {jax.__version__}\n")
    print("Aims: one way below 1,000 us; below 200 us added in each step.\n")
    print("| one way, us | messages | 10 % | median | 99 % |\n|---|---|---|---|---|")
    rows = (
        ("no step in flight", other["pings"], PINGS),
        ("a step in flight", other["all"], other["num"]),
        ("of these, already waited for", other["woken"], other["num_woken"]),
    )
    for name, figures, count in rows:
        print(f"| {name} | {count} | " + " | ".join(f"{x:.0f}" for x in figures or ()) + " |")
    print("\n| tokens before | bytes of a message, median | most |\n|---|---|---|")
    for length, (median, most) in first["sizes"].items():
        print(f"| {int(length):,} | {median:.0f} | {most} |")
    print(f"\nAdded in each step: {first['added']:.0f} us in process 0, {other['added']:.0f} in the other.")


if __name__ == "__main__":
    main()
