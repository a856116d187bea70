"""Prefill and decode apart against two replicas, on the same two devices: `python -m benchmarks.disaggregated`.

Clients stream short answers without a pause while prompts of 30,000 tokens arrive, one after another. Each server is a
process that is pinned to one core of a CPU, its device:

- apart: one server reads the long prompts (`--role prefill`), the other one does all else (`--role decode`). All
  requests go to the second one; long ones by `/resume`, as a cluster's router sends them.
- replicas: two servers that do everything; each gets half of the short ones' clients and every other long prompt.
  That is what the same two devices are used for without transfers: both have a whole model either way.

With `--tpot` the replicas, and the decoding server, shrink their chunks to keep that target (adaptive chunks), in
further rounds. Told are, of all rounds:

- seconds between two tokens of the short answers, while a long prompt is read (from its arrival to its first token);
  and what share of this time lies between tokens that are more than 0.1 s apart.
- TTFT of the long prompts, and how long it takes until all have ended.
- tokens per second in that time: of long prompts, and of short answers.

Arms take turns. The clients share the cores with the servers.

Source: Mooncake, section 8.1 (figures 11 and 12: TBT and TTFT of disaggregation against vLLM).
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.server_process import serve

LONG, SHORT, ANSWER, LONG_ANSWER = 30_000, 60, 200, 16
SIZES = ["--max-length", "31000", "--num-pages", "1200", "--token-budget", "512", "--buckets", "8,64,512"]
TIMEOUT = httpx.Timeout(600.0)


@dataclass
class Round:
    """What one round of an arm brought.

    Attributes:
      gaps: seconds between tokens of short answers, and when each ended. ttft: of long prompts. windows: when these
        were read. seconds: until the last one had ended. short_tokens: in that time.
    """

    gaps: list[tuple[float, float]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    short_tokens: int = 0

    def gaps_while_reading(self) -> list[float]:
        return [gap for gap, at in self.gaps if any(begin <= at <= end + gap for begin, end in self.windows)]


def body(tokens: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


async def stream(client: httpx.AsyncClient, url: str, sent: dict[str, Any]) -> list[float]:
    """When each token came."""
    times = []
    async with client.stream("POST", f"{url}/v1/completions", json=sent) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for data in answer.aiter_raw():  # with no more work than it takes: the clients share the cores
            times += [time.perf_counter()] * data.count(b"data: {")
    return times


async def resume(client: httpx.AsyncClient, url: str, reader: str, tokens: list[int]) -> list[float]:
    """When lines of events came of a request whose prompt another server reads."""
    sampling = {"max_tokens": LONG_ANSWER, "temperature": 0, "ignore_eos": True}
    sent = {"request": {"prompt": tokens, "sampling": sampling}, "prefill": {"url": reader, "seconds": TIMEOUT.read}}
    times = []
    async with client.stream("POST", f"{url}/resume", json=sent) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            times += [time.perf_counter()] * bool(line.strip(" []"))
    return times


async def run_round(
    urls: list[str], reader: str | None, num_clients: int, num_long: int, gap: float, seed: int
) -> Round:
    found, ended = Round(), asyncio.Event()
    random = np.random.default_rng(seed)
    prompts = itertools.count()

    async def chat(client: httpx.AsyncClient, url: str) -> None:
        while not ended.is_set():
            times = await stream(client, url, body(random.integers(0, 256, SHORT).tolist(), ANSWER))
            found.gaps += [(b - a, b) for a, b in itertools.pairwise(times)]

    async def read(client: httpx.AsyncClient, url: str) -> None:
        start = time.perf_counter()
        prompt = random.integers(0, 256, LONG).tolist()
        if reader is None:
            times = await stream(client, url, body(prompt, LONG_ANSWER))
        else:
            times = await resume(client, url, reader, prompt)
        found.ttft.append(times[0] - start)
        found.windows.append((start, times[0]))

    async with httpx.AsyncClient(timeout=TIMEOUT, limits=httpx.Limits(max_connections=None)) as client:
        chats = [asyncio.create_task(chat(client, urls[i % len(urls)])) for i in range(num_clients)]
        await asyncio.sleep(2.0)
        begun = time.perf_counter()
        reads = []
        for _ in range(num_long):
            reads.append(asyncio.create_task(read(client, urls[next(prompts) % len(urls)])))
            await asyncio.sleep(gap)
        await asyncio.gather(*reads)
        over = time.perf_counter()
        ended.set()
        await asyncio.gather(*chats)
    found.seconds = over - begun
    found.short_tokens = sum(begun <= at <= over for _, at in found.gaps)
    return found


@contextlib.contextmanager
def servers(arm: str, folder: Path, tpot: float | None) -> Iterator[tuple[list[str], str | None]]:
    """The servers of an arm: the URLs that clients ask, and that of the server that reads long prompts for them."""
    sizes = [*SIZES]
    adaptive = [] if tpot is None or not arm.endswith("adaptive") else ["--chunking", "adaptive", "--tpot", str(tpot)]
    if arm.startswith("replicas"):
        with serve(*sizes, *adaptive, core=0) as one, serve(*sizes, *adaptive, core=1) as other:
            yield [one.url, other.url], None
        return
    secret = folder / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    apart = ["--kv-secret-file", str(secret), "--kv-plain"]
    with (
        serve(*sizes, *apart, "--role", "prefill", core=0) as prefill,
        serve(*sizes, *apart, *adaptive, "--role", "decode", core=1) as decode,
    ):
        yield [decode.url], prefill.url
        metrics = httpx.get(f"{decode.url}/metrics", timeout=10).text.splitlines()
        lost = [line.split()[-1] for line in metrics if line.startswith("longctx:kv_recomputed_pages_total")]
        answers = httpx.get(f"{decode.url}/server_info", timeout=10).json()["kv_transfer"]["answers"]
        print(f"{answers}, pages that did not come: {lost}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="of 30,000 tokens in each round")
    parser.add_argument("--clients", type=int, default=4, help="that stream short answers")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between their arrivals")
    parser.add_argument("--tpot", type=float, help="seconds: a target for further rounds with adaptive chunks")
    options = parser.parse_args()
    load, load_of = os.getloadavg()[0], (options.clients, options.prompts, options.gap)
    arms = ["apart", "replicas"] + (["replicas, adaptive"] if options.tpot else [])
    found: dict[str, list[Round]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for arm in arms:
                with servers(arm, Path(folder), options.tpot) as (urls, reader):
                    found[arm].append(asyncio.run(run_round(urls, reader, *load_of, number)))
    print(f"{options.rounds} rounds of {options.prompts} prompts, {os.cpu_count()} cores, load {load:.1f} before\n")
    heads = (
        "arm",
        "TBT P50, ms",
        "P90",
        "P99",
        "longest",
        "in gaps over 0.1 s",
        "TTFT of long prompts, s",
        "all ended after, s",
    )
    heads += ("long prompts' tokens/s", "short answers' tokens/s")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for arm, rounds in found.items():
        gaps = [1000 * gap for each in rounds for gap in each.gaps_while_reading()] or [0.0]
        percentiles = [*np.percentile(gaps, (50, 90, 99)).tolist(), max(gaps)]
        stalled = sum(gap for gap in gaps if gap > 100) / max(sum(gaps), 1e-9)
        ttft = statistics.median(seconds for each in rounds for seconds in each.ttft)
        seconds = statistics.median(each.seconds for each in rounds)
        prompts = statistics.median(LONG * options.prompts / each.seconds for each in rounds)
        short = statistics.median(each.short_tokens / each.seconds for each in rounds)
        figures = [*(f"{each:.1f}" for each in percentiles), f"{stalled:.0%}", f"{ttft:.1f}", f"{seconds:.1f}"]
        print("| " + " | ".join([arm, *figures, f"{prompts:,.0f}", f"{short:,.0f}"]) + " |")


if __name__ == "__main__":
    main()
