"""A server under load, recorded and then simulated: `python -m benchmarks.recorded_incident`, a table in markdown.

`longctx serve --record` serves the built-in model, by each of several policies; requests of a seeded workload are sent
when they are due, prompts as token ids. Then `longctx replay --accuracy` simulates what was recorded from its first
step on: with the speed that the device had at every moment, and with predicted step times.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server_process import COMMAND, serve
from longctx.models.builtin import TINY
from longctx.simulation.workloads import Lengths, WorkloadRequest, arrive_at_rate, synthesize

ENGINE = ["--max-running", "16", "--max-length", "2048", "--num-pages", "512", "--token-budget", "256"]
ENGINE += ["--buckets", "8,32,128,256", "--no-prefix-cache"]
POLICIES = ("fcfs", "srpf", "ilrs")
VOCAB = 256


async def send(url: str, requests: Sequence[WorkloadRequest]) -> None:
    """Send each request when it is due, and wait for all answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        start = time.monotonic()

        async def ask(request: WorkloadRequest) -> None:
            await asyncio.sleep(request.arrival - (time.monotonic() - start))
            tokens = request.tokens(VOCAB).tolist()
            body = {"model": "tiny", "prompt": tokens, "max_tokens": request.output_tokens, "ignore_eos": True}
            (await client.post("/v1/completions", json=body | {"temperature": 0})).raise_for_status()

        await asyncio.gather(*map(ask, requests))


def simulate(policy: str, requests: Sequence[WorkloadRequest], profile: Path) -> dict[str, Any]:
    """Record a server, and what `longctx replay --accuracy` finds."""
    with tempfile.TemporaryDirectory() as folder:
        log, found = Path(folder) / "log", Path(folder) / "found.json"
        flags = ["--model", str(TINY), "--policy", policy, "--record", str(log), "--profile", str(profile)]
        with serve(*flags, *ENGINE) as server:
            asyncio.run(send(server.url, requests))
        subprocess.run(
            [*COMMAND, "replay", str(log), "--accuracy", "--json", str(found)], check=True, stdout=subprocess.DEVNULL
        )
        result: dict[str, Any] = json.loads(found.read_text())["accuracy"]
        return result


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| policy | | TTFT mean | p90 | TPOT mean | p90 | correlation TTFT, TPOT |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, found in results.items():
        real = [found[name]["recorded"][figure] for name in ("ttft", "tpot") for figure in ("mean", "p90")]
        told = " | ".join(f"{1e3 * x:.2f} ms" for x in real)
        lines.append(f"| {policy} | recorded, {found['completions']} requests | {told} | |")
        for side in ("measured", "predicted"):
            ours = [found[name][side][figure] for name in ("ttft", "tpot") for figure in ("mean", "p90")]
            told = " | ".join(f"{1e3 * x:.2f} ms ({x / y - 1:+.1%})" for x, y in zip(ours, real, strict=True))
            each = ", ".join(f"{found[name][side]['correlation']:.3f}" for name in ("ttft", "tpot"))
            lines.append(f"| | {side} step times | {told} | {each} |")
    errors = ", ".join(f"{policy} {found['step_time_error']:.1%}" for policy, found in results.items())
    return "\n".join([*lines, "", f"Predicted steps are off by, weighted by time: {errors}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    requests = arrive_at_rate(
        synthesize(options.requests, Lengths(32, 1500, True), Lengths(8, 64), seed=options.seed), options.rate
    )
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        measuring = ["profile", str(profile), "--model", str(TINY), "--repeats", "3", "--quiet", *ENGINE]
        subprocess.run([*COMMAND, *measuring], check=True, stdout=subprocess.DEVNULL)
        results = {}
        for policy in POLICIES:
            results[policy] = simulate(policy, requests, profile)
            print(f"{policy} is recorded and simulated", file=sys.stderr, flush=True)
    print(f"{options.requests} requests, {options.rate:g} a second\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
