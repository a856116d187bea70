"""A server under load, with clients that behave badly: `python -m benchmarks.server_load --minutes M`.

64 clients stream answers, one after another with pauses; some disconnect, cancel, read slowly, or send what is
malformed or too long. A prompt of 30,000 tokens comes every three times as long as it takes alone. It is run with and
without the long prompts, and, for comparison, with policy fcfs and static chunks. It checks, and exits with status 1 if
something is wrong, that

- every request is answered once: a stream ends with its finish reason and `[DONE]`, and an error has OpenAI's form;
- every whole answer is the one that its prompt gets from an idle server;
- all pages are back at the end, and nothing runs or waits;
- memory is flat: at most 5 % more at the end than after the first minute (a fifth of the time, if that is less).
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.server_process import COMMAND, Process, serve
from longctx.models import passkey

CLIENTS, PAUSE, LONG_TOKENS = 64, 4.0, 30_000  # PAUSE: seconds between a client's requests, in the mean
ENGINE = ["--max-running", "32", "--token-budget", "256", "--num-pages", "1400", "--max-length", "32768"]
SLO = ["--tpot", "0.03"]
POLICIES = {
    "ilrs": ["--policy", "ilrs", "--chunking", "adaptive"],
    "fcfs": ["--policy", "fcfs", "--chunking", "static"],
}
MALFORMED: list[dict[str, Any]] = [
    {"prompt": 7, "max_tokens": 5},
    {"prompt": "x", "max_tokens": "many"},
    {"prompt": "x", "max_tokens": 5, "temperature": -1},
    {"prompt": [1, 2, 10**9], "max_tokens": 5},
    {"prompt": "x" * 40_000, "max_tokens": 5},
    {"prompt": "x", "max_tokens": 2**40},
]


@dataclass
class Figures:
    """What came of one load."""

    ttfts: list[float] = field(default_factory=list)  # seconds, of short requests
    long_ttfts: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)  # MiB, once a second

    def percentile(self, share: float) -> float:
        return statistics.quantiles(self.ttfts, n=1000)[round(1000 * share) - 1]


class Load:
    """One load on one server."""

    def __init__(self, server: Process, seed: int) -> None:
        self.server, self.figures = server, Figures()
        self.client = httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None))
        self.rng = random.Random(seed)
        self.prompts = []
        for i in range(24):
            note = passkey.make_document(self.rng.randrange(128, 700), 2, seed * 100 + i)
            self.prompts.append(passkey.prompt(note.text, passkey.question(next(iter(note.facts)))))
        self.answers: dict[str, str] = {}
        self.solo, self.model = 0.0, ""

    async def run(self, seconds: float, with_long: bool) -> Figures:
        async with self.client:
            self.model = (await self.client.get("/v1/models")).json()["data"][0]["id"]
            for prompt in self.prompts:
                self.answers[prompt] = await self._stream(prompt, note=False)
            begun = time.monotonic()
            await self._long(0)
            self.solo = time.monotonic() - begun
            self.figures.long_ttfts.clear()
            deadline = time.monotonic() + seconds
            tasks = [self._client(i, deadline) for i in range(CLIENTS)]
            tasks += [self._watch_memory(deadline), *([self._long_prompts(deadline)] if with_long else [])]
            await asyncio.gather(*tasks)
            await self._check_idle()
        return self.figures

    async def _client(self, number: int, deadline: float) -> None:
        rng = random.Random(f"{number}")
        ways = [*[self._stream] * 8, self._whole, self._disconnect, self._leave_queue, self._slow, self._malformed]
        await asyncio.sleep(rng.random() * PAUSE)
        while time.monotonic() < deadline:
            way = rng.choice(ways)
            try:
                await way(rng.choice(self.prompts))
            except Exception as error:
                self.figures.wrong.append(f"{way.__name__}: {type(error).__name__}: {error}")
            await asyncio.sleep(rng.expovariate(1 / PAUSE))

    def _body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True} | fields

    async def _stream(self, prompt: str, note: bool = True, pause: float = 0.0) -> str:
        """Stream an answer to its end; a slow reader pauses after each event."""
        begun, text, reasons, is_done = time.monotonic(), "", [], False
        async with self.client.stream("POST", "/v1/completions", json=self._body(prompt)) as response:
            if response.status_code != 200:
                return await self._refused(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if is_done:
                    self.figures.wrong.append(f"an event after [DONE]: {line}")
                if line == "data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.figures.wrong.append(f"a stream ended with {event}")
                    continue
                if note and not text and not reasons and not pause:
                    self.figures.ttfts.append(time.monotonic() - begun)
                text += event["choices"][0]["text"]
                reasons += [event["choices"][0]["finish_reason"]] * (event["choices"][0]["finish_reason"] is not None)
                await asyncio.sleep(pause)
        if not is_done or len(reasons) != 1:
            self.figures.wrong.append(f"a stream ended with {reasons}, [DONE]: {is_done}")
        self._check(prompt, text)
        self.figures.counts["streamed"] += note
        return text

    async def _refused(self, response: httpx.Response) -> str:
        body = json.loads(await response.aread())
        if response.status_code != 429 or body["error"]["code"] != "slow_down" or "retry-after" not in response.headers:
            self.figures.wrong.append(f"status {response.status_code}: {body}")
        self.figures.counts["refused"] += 1
        return ""

    def _check(self, prompt: str, text: str) -> None:
        if prompt in self.answers and text != self.answers[prompt]:
            self.figures.wrong.append(f"answer {text!r} instead of {self.answers[prompt]!r}")

    async def _slow(self, prompt: str) -> None:
        await self._stream(prompt, pause=0.3)
        self.figures.counts["slow"] += 1

    async def _whole(self, prompt: str) -> None:
        response = await self.client.post("/v1/completions", json=self._body(prompt, stream=False))
        if response.status_code != 200:
            await self._refused(response)
            return
        self._check(prompt, response.json()["choices"][0]["text"])
        self.figures.counts["whole"] += 1

    async def _disconnect(self, prompt: str) -> None:
        """Leave after some events."""
        body = self._body(prompt, max_tokens=200, ignore_eos=True)
        after = self.rng.randrange(1, 9)
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                after -= bool(line)
                if not after:
                    break
        self.figures.counts["disconnected"] += 1

    async def _leave_queue(self, prompt: str) -> None:
        """Leave before an answer has come."""
        request = self.client.post("/v1/completions", json=self._body(prompt, stream=False, max_tokens=200))
        try:
            await asyncio.wait_for(request, self.rng.random() * 0.05)
        except TimeoutError:
            self.figures.counts["left"] += 1

    async def _malformed(self, prompt: str) -> None:
        response = await self.client.post("/v1/completions", json={"model": self.model} | self.rng.choice(MALFORMED))
        if response.status_code not in (400, 413, 422) or "message" not in response.json()["error"]:
            self.figures.wrong.append(f"malformed: status {response.status_code}: {response.text[:200]}")
        self.figures.counts["malformed"] += 1

    async def _long_prompts(self, deadline: float) -> None:
        seed = 1
        while time.monotonic() < deadline:
            begun = time.monotonic()
            await self._long(seed)
            seed += 1
            await asyncio.sleep(max(0.0, min(begun + 3 * self.solo, deadline) - time.monotonic()))

    async def _long(self, seed: int) -> None:
        document = passkey.make_document(LONG_TOKENS, 8, 10**6 + seed)
        name, key = list(document.facts.items())[3]
        prompt = passkey.prompt(document.text, passkey.question(name))
        begun = time.monotonic()
        text = await self._stream(prompt, note=False)
        self.figures.long_ttfts.append(time.monotonic() - begun)
        self.figures.counts["long"] += 1
        self.figures.counts["long, right"] += text.strip().startswith(key)

    async def _watch_memory(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.figures.memory.append(self.server.memory)
            await asyncio.sleep(1)

    async def _check_idle(self) -> None:
        for _ in range(100):
            load = (await self.client.get("/load")).json()
            if not any(load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")):
                return
            await asyncio.sleep(0.2)
        self.figures.wrong.append(f"the idle server holds something: {load}")


def run(arguments: list[str], seconds: float, with_long: bool, seed: int = 0) -> Figures:
    with serve(*ENGINE, *SLO, *arguments) as server:
        figures = asyncio.run(Load(server, seed).run(seconds, with_long))
    early = figures.memory[min(60, len(figures.memory) // 5)]
    if figures.memory[-1] > 1.05 * early:
        figures.wrong.append(f"memory grew from {early:.0f} to {figures.memory[-1]:.0f} MiB")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each load")
    parser.add_argument("--loads", nargs="+", default=["ilrs", "fcfs"], choices=POLICIES)
    parser.add_argument(
        "--profile", help="profile of this engine, from `longctx profile FILE` with the flags of ENGINE"
    )
    parser.add_argument("--record", help="folder in which the last load is recorded, and then replayed")
    options = parser.parse_args()
    wrong: list[str] = []
    print(f"{'load':<22}{'TTFT p50':>10}{'p99':>9}{'long':>9}   answers")
    for policy in options.loads:
        p99s = []
        for with_long in (False, True):
            more = [] if options.profile is None else ["--profile", options.profile]
            if options.record is not None and policy == options.loads[-1] and with_long:
                more += ["--record", options.record]
            figures = run([*POLICIES[policy], *more], 60 * options.minutes, with_long)
            p99s.append(figures.percentile(0.99))
            long = f"{statistics.median(figures.long_ttfts):.1f} s" if figures.long_ttfts else "-"
            name = f"{policy}, {'with' if with_long else 'no'} long"
            print(f"{name:<22}{figures.percentile(0.5):>8.3f} s{p99s[-1]:>7.3f} s{long:>9}   {dict(figures.counts)}")
            print(f"  memory {figures.memory[0]:.0f} to {figures.memory[-1]:.0f} MiB", flush=True)
            wrong += figures.wrong
        print(f"{policy}: long prompts make the 99th percentile {p99s[1] / p99s[0]:.2f} times as long")
    if options.record is not None and subprocess.run([*COMMAND, "replay", options.record]).returncode:
        wrong.append("the recorded load does not replay")
    for sentence in wrong[:20]:
        print("WRONG:", sentence)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
