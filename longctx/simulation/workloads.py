"""Workloads as plain data: read from traces, or synthetic.

A trace has the lengths of prompts and, for each block of 512 tokens, an id of all tokens up to its end (Mooncake,
section 4). Tokens are generated from these ids when they are asked for, so prompts share the prefixes that they shared
in the trace.
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

from longctx.serving.validation import check_integer, check_real, check_text, shown

TRACE_BLOCK = 512  # tokens of a trace's block, for which it has one hash id
MAX_ARRIVAL = 1e9  # seconds, which a clock can wait for
MAX_FACTOR = 1e6


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    Attributes:
      arrival: seconds from the beginning of the workload.
      prompt_tokens: tokens of the prompt.
      output_tokens: tokens to generate.
      blocks: ids of the prompt's first blocks; blocks with one id have the same tokens. Tokens after them are unique.
      block_size: tokens of a block.
      number: number of the request in its workload, the seed of its unique tokens.
      prompt: the prompt itself, text or token ids, if the workload has it.
      after: the `number` of the request that it follows: it arrives `delay` seconds after that one's end, and `arrival`
        does not count. None: it follows none.

    Raises:
      TypeError, ValueError: a number is no integer, or out of range.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_size: int = TRACE_BLOCK
    number: int = 0
    prompt: str | tuple[int, ...] | None = None
    after: int | None = None
    delay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            check_integer(name, getattr(self, name), 1)
        check_integer("block_size", self.block_size, 0)
        check_real("arrival", self.arrival, 0, MAX_ARRIVAL)
        check_real("delay", self.delay, 0, MAX_ARRIVAL)
        if self.after is not None:
            check_integer("after", self.after, 0)
        for block in self.blocks:
            check_integer("blocks", block, 0)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens

    def tokens(self, vocab_size: int, seed: int = 0) -> np.ndarray:
        """The tokens of the prompt, int32 `[prompt_tokens]`; TypeError if it is text."""
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
    """A distribution of lengths from low to high, both included: uniform, or log-uniform with `log`."""

    low: int
    high: int
    log: bool = False

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse `N`, `LOW:HIGH` or `LOW:HIGH:log`.

        Raises:
          ValueError: the text has another form, or not 1 <= LOW <= HIGH.
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
        """Draw integers `[count]`."""
        if not self.log:
            return rng.integers(self.low, self.high + 1, count)
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), count))
        return np.clip(drawn.astype(int), self.low, self.high)


def synthesize(
    num_requests: int, prompt_tokens: Lengths, output_tokens: Lengths, shared_prefix: int = 0, seed: int = 0
) -> list[WorkloadRequest]:
    """Generate requests that all arrive at 0; each prompt is `shared_prefix` common tokens and a unique rest."""
    check_integer("shared_prefix", shared_prefix, 0)
    rng = np.random.default_rng(seed)
    prompts = prompt_tokens.draw(rng, num_requests) + shared_prefix
    outputs = output_tokens.draw(rng, num_requests)
    blocks = (0,) if shared_prefix else ()
    return [
        WorkloadRequest(0.0, prompt, output, blocks, shared_prefix, number)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]


def read_workload(path: Path, limit: int | None = None) -> list[WorkloadRequest]:
    """Read the first `limit` requests of a file, and sort them by arrival.

    A `.csv` file has columns `num_prefill_tokens` and `num_decode_tokens`, and optionally `arrived_at` (seconds). Any
    other file has a JSON object on each line, with `input_length`, `output_length` and optionally `hash_ids`, or with
    `prompt` (text or token ids) and `max_tokens`; both optionally with `timestamp` (milliseconds). A request without a
    time arrives at 0.

    Raises:
      OSError: the file can't be read.
      ValueError: a row has another form, and the message names file and line; or the file has no rows.
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
        at = 0
        try:
            for at, row in islice(rows, limit):  # noqa: B007
                requests.append(parse(row, len(requests)))
        except KeyError as error:
            raise ValueError(f"{path}:{at}: {error} is missing") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}:{at + 1}: it is not UTF-8: {error.reason}") from None
        except (TypeError, ValueError, csv.Error, RecursionError) as error:
            raise ValueError(f"{path}:{at}: {error}") from None
    if not requests:
        raise ValueError(f"{path}: it has no requests")
    return sorted(requests, key=lambda request: request.arrival)


def scale_lengths(requests: List[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Multiply all lengths by `factor`, those of blocks too; none becomes less than one token."""

    check_real("factor", factor, 0, MAX_FACTOR)

    def scaled(length: int) -> int:
        return max(1, round(length * factor))

    if any(request.prompt is not None for request in requests):
        raise ValueError("only lengths can be scaled, not given prompts")
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
    """Give requests the arrival times of a Poisson process of `rate` a second; with an infinite rate all are 0."""
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
        prompt = row["prompt"]
        if not isinstance(prompt, str | list):
            raise TypeError(f"prompt must be text or a list of token ids, got {shown(prompt)}")
        if isinstance(prompt, list):
            prompt = tuple(check_integer("prompt", token, 0) for token in prompt)
        else:
            check_text("prompt", prompt)
        return WorkloadRequest(arrival, len(prompt), row["max_tokens"], number=number, prompt=prompt)
    blocks = row.get("hash_ids", [])
    if not isinstance(blocks, list):
        raise TypeError(f"hash_ids must be a list of integers, got {shown(blocks)}")
    blocks = tuple(blocks)
    return WorkloadRequest(arrival, row["input_length"], row["output_length"], blocks, number=number)


def _draw(seed: tuple[int, ...], vocab_size: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count, dtype=np.int32)
