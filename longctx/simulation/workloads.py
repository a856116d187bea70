"""Workloads as plain data: read from traces or made up, the tokens of a prompt only where they are asked for.

A trace tells lengths, and which prompts begin alike (Mooncake, section 4: an id for each block of 512 tokens, which
stands for all before it too). Tokens are made up from these ids, so that what was shared is shared again.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TRACE_BLOCK = 512  # tokens that one of a trace's hash ids stands for


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
      arrival: seconds from the beginning.
      prompt_tokens: length of the prompt.
      output_tokens: tokens to generate.
      blocks: ids of the prompt's first blocks: where they are equal, so are the tokens. The rest is its own.
      block_size: tokens of a block.
      number: of the request in its workload; what its own tokens are drawn from.
      prompt: the prompt itself, where the workload has it: text, or token ids.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_size: int = TRACE_BLOCK
    number: int = 0
    prompt: str | tuple[int, ...] | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens

    def tokens(self, vocab_size: int, seed: int = 0) -> np.ndarray:
        """The prompt, int32 `[prompt_tokens]`."""
        if self.prompt is not None:
            if isinstance(self.prompt, str):
                raise TypeError("prompt is text: encode it first")
            return np.array(self.prompt, np.int32)
        parts, missing = [], self.prompt_tokens
        for block in self.blocks:
            parts.append(_draw((seed, 0, block), vocab_size, min(self.block_size, missing)))
            missing -= len(parts[-1])
        parts.append(_draw((seed, 1, self.number), vocab_size, missing))
        return np.concatenate(parts)


class Lengths(NamedTuple):
    """A distribution of lengths: low to high, both included, uniform or (`log`) log-uniform."""

    low: int
    high: int
    log: bool = False

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From `N`, `LOW:HIGH` or `LOW:HIGH:log`.

        Raises:
          ValueError: it is none of these, or not 1 <= LOW <= HIGH.
        """
        numbers, log = (text[:-4], True) if text.endswith(":log") else (text, False)
        low, colon, high = numbers.partition(":")
        try:
            lengths = cls(int(low), int(high if colon else low), log)
        except ValueError:
            raise ValueError(f"must be N, LOW:HIGH or LOW:HIGH:log, got {text!r}") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"must have 1 <= LOW <= HIGH, got {text!r}")
        return lengths

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Integers `[count]`."""
        if not self.log:
            return rng.integers(self.low, self.high + 1, count)
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), count))
        return np.clip(drawn.astype(int), self.low, self.high)


def synthesize(
    num_requests: int, prompt_tokens: Lengths, output_tokens: Lengths, shared_prefix: int = 0, seed: int = 0
) -> list[WorkloadRequest]:
    """Requests that arrive at once. All prompts begin with the same `shared_prefix` tokens, before their own."""
    rng = np.random.default_rng(seed)
    prompts = prompt_tokens.draw(rng, num_requests) + shared_prefix
    outputs = output_tokens.draw(rng, num_requests)
    blocks = (0,) if shared_prefix else ()
    return [
        WorkloadRequest(0.0, prompt, output, blocks, shared_prefix, number)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]


def read_workload(path: Path, limit: int | None = None) -> list[WorkloadRequest]:
    """The first `limit` requests of a file, in order of arrival.

    A file named `.csv` has columns `num_prefill_tokens` and `num_decode_tokens`, perhaps `arrived_at` (seconds). Any
    other has a JSON object on each line: `input_length`, `output_length`, perhaps `hash_ids`; or `prompt` (text or
    token ids) and `max_tokens`; either perhaps with `timestamp` (milliseconds). Without times all arrive at once.

    Raises:
      OSError: it can't be read.
      ValueError: a row is something else; the message names file and line. Or there is none.
    """
    requests: list[WorkloadRequest] = []
    with path.open(encoding="utf-8", newline="") as file:
        rows: Iterator[tuple[int, Any]]
        parse: Callable[[Any, int], WorkloadRequest]
        if path.suffix.lower() == ".csv":
            rows = enumerate(csv.DictReader(file), 2)
            parse = _from_csv
        else:
            rows = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            parse = _from_json
        for number, row in islice(rows, limit):
            try:
                request = parse(row, len(requests))
                _check(request)
            except KeyError as error:
                raise ValueError(f"{path}:{number}: there is no {error}") from None
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None
            requests.append(request)
    if not requests:
        raise ValueError(f"{path}: there is no request in it")
    return sorted(requests, key=lambda request: request.arrival)


def scale_lengths(requests: List[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """All lengths times `factor`, those of shared blocks too; at least one token each."""

    def scaled(length: int) -> int:
        return max(1, round(length * factor))

    if any(request.prompt is not None for request in requests):
        raise ValueError("prompts that are given can't be scaled, only lengths")
    return [
        dataclasses.replace(
            request,
            prompt_tokens=scaled(request.prompt_tokens),
            output_tokens=scaled(request.output_tokens),
            block_size=scaled(request.block_size),
        )
        for request in requests
    ]


def arrive_at_rate(requests: List[WorkloadRequest], rate: float, seed: int = 0) -> list[WorkloadRequest]:
    """The same requests as a Poisson process of `rate` a second from 0 on; infinite: all at once."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(requests)) if math.isfinite(rate) else [0.0]
    times = np.broadcast_to(np.cumsum(gaps), len(requests)).tolist()
    return [dataclasses.replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]


def _from_csv(row: dict[str, str], number: int) -> WorkloadRequest:
    arrival = float(row.get("arrived_at") or 0)
    return WorkloadRequest(arrival, int(row["num_prefill_tokens"]), int(row["num_decode_tokens"]), number=number)


def _from_json(line: str, number: int) -> WorkloadRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got {line.strip()[:40]}")
    arrival = row.get("timestamp", 0) / 1000
    if "prompt" in row:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else tuple(map(int, row["prompt"]))
        return WorkloadRequest(arrival, len(prompt), row["max_tokens"], number=number, prompt=prompt)
    blocks = tuple(map(int, row.get("hash_ids", ())))
    return WorkloadRequest(arrival, row["input_length"], row["output_length"], blocks, number=number)


def _check(request: WorkloadRequest) -> None:
    for name, count in (("prompt", request.prompt_tokens), ("output", request.output_tokens)):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"the {name} must have at least one token, got {count!r}")
    if not 0 <= request.arrival < math.inf:
        raise ValueError(f"it must arrive at a time of at least 0, got {request.arrival}")
    if any(block < 0 for block in request.blocks):
        raise ValueError("hash_ids must not be negative")


def _draw(seed: tuple[int, ...], vocab_size: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count, dtype=np.int32)
