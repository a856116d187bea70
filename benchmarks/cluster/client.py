"""Clients that send a workload's requests when they arrive, and note when which token came."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from longctx.simulation.workloads import WorkloadRequest

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
"""Of which prompts are: a token each of the built-in model."""
TIMEOUT = httpx.Timeout(120.0, connect=2.0)
PAUSE = 0.25  # seconds before a client tries again


@dataclass
class Answer:
    """What came of one request.

    Attributes:
      sent: seconds from the beginning of the run to its first attempt; `late`: after its arrival.
      times: when each event with tokens came, of the attempt that was answered.
      failures: why earlier attempts were not.
      tokens, finish: of the one whole answer. `repeated`: tokens that came after the answer's end.
    """

    number: int
    prompt_tokens: int
    sent: float = 0.0
    late: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    cached: int = 0
    repeated: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds from the first attempt to the first token that was kept."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        return None if len(self.tokens) < 2 else (self.times[-1] - self.times[0]) / (len(self.tokens) - 1)


def body_of(request: WorkloadRequest, seed: int, **fields: Any) -> dict[str, Any]:
    """A request's body; its prompt is text, as routers of others look at text alone."""
    return {
        "prompt": "".join(LETTERS[token] for token in request.tokens(len(LETTERS), seed).tolist()),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    } | fields


async def send(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], answer: Answer, begin: float) -> None:
    """One attempt; an exception says why it was not answered."""
    answer.times, answer.tokens, answer.text, answer.finish = [], [], "", None
    is_done = False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200].decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if is_done:
                answer.repeated += 1
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            event = _decoder.decode(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream ended with {event['error']}")
            for choice in event["choices"]:
                tokens = choice.get("token_ids") or []
                if tokens or choice["text"]:
                    answer.times.append(time.perf_counter() - begin)
                if answer.finish is not None:
                    answer.repeated += len(tokens)
                answer.tokens += tokens
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            if event.get("usage"):
                answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if not is_done or answer.finish is None:
        raise RuntimeError(f"the stream ended with finish_reason {answer.finish}, [DONE]: {is_done}")


_decoder = msgspec.json.Decoder()


async def run_clients(
    url: str,
    requests: Sequence[WorkloadRequest],
    seed: int,
    model: str,
    retries: int = 0,
    at: Mapping[float, Callable[[], Any]] | None = None,
    **fields: Any,
) -> list[Answer]:
    """Send all requests, each when it arrives, whether earlier ones are answered or not; follow-ups after an answer.

    Args:
      seed: of the prompts' tokens: runs with other seeds share nothing.
      retries: how often a client tries again, after a pause, when its stream breaks or nobody is there.
      at: what else happens after so many seconds, in a thread.
      fields: of every request's body.
    """
    bodies = [body_of(request, seed, model=model, **fields) for request in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    async with httpx.AsyncClient(timeout=TIMEOUT, limits=limits) as client:
        begin = time.perf_counter()

        async def one(request: WorkloadRequest, body: dict[str, Any]) -> Answer:
            due = request.arrival
            if request.after is not None:
                await asyncio.wait([tasks[request.after]])
                due = max(due, time.perf_counter() - begin + request.delay)
            await asyncio.sleep(begin + due - time.perf_counter())
            answer = Answer(request.number, request.prompt_tokens, time.perf_counter() - begin)
            answer.late = answer.sent - due
            while True:
                try:
                    await send(client, url, body, answer, begin)
                    return answer
                except (httpx.HTTPError, RuntimeError) as error:
                    answer.failures.append(f"{type(error).__name__}: {error}")
                    if len(answer.failures) > retries:
                        answer.finish = None
                        return answer
                    await asyncio.sleep(PAUSE)

        async def event(seconds: float, happens: Callable[[], Any]) -> None:
            await asyncio.sleep(begin + seconds - time.perf_counter())
            await asyncio.to_thread(happens)

        events = [asyncio.create_task(event(*each)) for each in (at or {}).items()]
        tasks = {
            request.number: asyncio.create_task(one(request, body))
            for request, body in zip(requests, bodies, strict=True)
        }
        answers = await asyncio.gather(*tasks.values())
        await asyncio.gather(*events)
        return list(answers)


def figures(answers: Sequence[Answer]) -> dict[str, float]:
    """TTFT and TPOT in seconds, of the answered requests."""
    answered = [answer for answer in answers if answer.finish is not None]
    ttft = [answer.ttft for answer in answered]
    tpot = [answer.tpot for answer in answered if answer.tpot is not None]
    p50, p90, p99 = np.percentile(ttft, (50, 90, 99)).tolist()
    found = {"answered": len(answered), "ttft": float(np.mean(ttft)), "ttft_p50": p50, "ttft_p90": p90, "ttft_p99": p99}
    found |= {"tpot": float(np.mean(tpot)), "tpot_p90": float(np.percentile(tpot, 90))}
    found["seconds"] = max(answer.times[-1] for answer in answered)
    found["late"] = max(answer.late for answer in answers)
    return found
