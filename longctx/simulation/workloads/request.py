"""One request of a workload, and what is done with lists of them."""

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from longctx.models.validation import MAX_INT32, check_integer, check_real
from longctx.serving.validation import check_text

TRACE_BLOCK = 512
"""Tokens of a trace's block, for which it has one hash id.

Source:
  Mooncake's open traces (1.2, and their repository): blocks of 512 tokens.

Examples:
  >>> from longctx.simulation.workloads import TRACE_BLOCK, WorkloadRequest
  >>> WorkloadRequest(0.0, 2000, 10, blocks=(7, 8)).block_size == TRACE_BLOCK
  True
"""
MAX_ARRIVAL = 1e9  # seconds, which a clock can wait for
MAX_FACTOR = 1e6


@dataclass(frozen=True)
class WorkloadRequest:
    """One request of a workload.

    A request with `after` is a follow-up, of a conversation or of a user who waits for an answer: it arrives `delay`
    seconds after request number `after` has ended, but not before `arrival`. So multi-turn sessions and closed loops
    are data like any other.

    Attributes:
      arrival: seconds from the beginning of the workload.
      prompt_tokens: tokens of the prompt.
      output_tokens: tokens to generate.
      blocks: ids of the prompt's first blocks; blocks with one id have the same tokens. Tokens after them are unique.
      block_size: tokens of a block.
      number: number of the request in its workload, the seed of its unique tokens.
      prompt: the prompt itself, text or token ids, if the workload has it.
      after: number of the request that it follows, which is less than its own; None: it follows none.
      delay: seconds from that one's end to its arrival.
      session: name of the conversation or user that it belongs to; None: of none.

    Raises:
      TypeError, ValueError: a number is no integer, or out of range.

    Source:
      Mooncake's open traces (1.2, and their repository): lengths and ids of blocks, and no contents.

    Examples:
      >>> from longctx.simulation.workloads import WorkloadRequest
      >>> first = WorkloadRequest(0.0, prompt_tokens=1500, output_tokens=100, blocks=(0, 1))
      >>> turn = WorkloadRequest(0.0, 1700, 100, blocks=(0, 1, 2), number=1, after=0, delay=5.0)
      >>> bool((first.tokens(128_256)[:1024] == turn.tokens(128_256)[:1024]).all())  # two blocks of 512
      True
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
    session: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            check_integer(name, getattr(self, name), 1, MAX_INT32)
        check_integer("block_size", self.block_size, 0)
        check_integer("number", self.number, 0)
        check_real("arrival", self.arrival, 0, MAX_ARRIVAL)
        check_real("delay", self.delay, 0, MAX_ARRIVAL)
        for block in self.blocks:
            if type(block) is not int or block < 0:  # the common case, for traces of millions of blocks
                check_integer("blocks", block, 0)
        if self.after is not None:
            check_integer("after", self.after, 0)
            if self.after >= self.number:
                raise ValueError(f"after must be the number of an earlier request than {self.number}, got {self.after}")
        elif self.delay:
            raise ValueError(f"delay is of a request that follows another: after must be given, got delay={self.delay}")
        if self.session is not None:
            check_text("session", self.session)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens

    def tokens(self, vocab_size: int, seed: int = 0) -> np.ndarray:
        """The tokens of the prompt, int32 `[prompt_tokens]`, made up below `vocab_size` unless the workload has them.

        What is shared is shared whatever the seed.

        Raises:
          TypeError: the prompt is text.
        """
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


def check_arrivals(requests: List[WorkloadRequest]) -> None:
    """ValueError if requests are not in order of arrival, or follow others that don't stand before them."""
    before, numbers = 0.0, set[int]()
    follows = any(request.after is not None for request in requests)
    for order, request in enumerate(requests):
        if request.after is None:
            if not before <= request.arrival < math.inf:
                raise ValueError(f"requests[{order}] must arrive at {before} or later, got {request.arrival}")
            before = request.arrival
        elif request.after not in numbers:
            raise ValueError(f"requests[{order}] must follow one that stands before it, got after={request.after}")
        if follows and request.number in numbers:
            raise ValueError(f"requests[{order}] must have a number of its own, got {request.number} again")
        numbers.add(request.number)


def keep_requests(requests: List[WorkloadRequest], keep: Callable[[WorkloadRequest], bool]) -> list[WorkloadRequest]:
    """The requests for which `keep` is true; who followed one that is left out follows whom that one followed.

    Args:
      requests: to choose from.
      keep: whether a request stays.

    Returns:
      What stays, sorted by `arrival`.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, keep_requests, make_conversations
      >>> turns = make_conversations(1, Lengths(3, 3), Lengths(100, 100), Lengths(50, 50), Lengths(10, 10), delay=2.0)
      >>> [(turn.number, turn.after, turn.delay) for turn in turns]
      [(0, None, 0.0), (1, 0, 2.0), (2, 1, 2.0)]
      >>> [(turn.number, turn.after, turn.delay) for turn in keep_requests(turns, lambda turn: turn.number != 1)]
      [(0, None, 0.0), (2, 0, 4.0)]
    """
    followed: dict[int, WorkloadRequest] = {}
    kept = []
    for request in sorted(requests, key=lambda request: request.number):
        if request.after in followed:
            before = followed[request.after]
            delay = before.delay + request.delay if before.after is not None else 0.0
            arrival = max(request.arrival, before.arrival)
            request = dataclasses.replace(request, after=before.after, delay=delay, arrival=arrival)
        if keep(request):
            kept.append(request)
        else:
            followed[request.number] = request
    order = {request.number: position for position, request in enumerate(requests)}
    return sorted(kept, key=lambda request: (request.arrival, order[request.number]))


def scale_lengths(requests: List[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """Multiply all lengths by `factor`, those of blocks too; none becomes less than one token.

    Args:
      requests: whose lengths are known, and not their prompts.
      factor: above 0, at most 1e6.

    Returns:
      The requests, with other lengths.

    Raises:
      TypeError, ValueError: the factor is out of range, or a request has a prompt.

    Examples:
      >>> from longctx.simulation.workloads import make_mix, scale_lengths
      >>> requests = make_mix("sharegpt4", 3)
      >>> [request.prompt_tokens for request in requests]
      [2358, 3409, 1952]
      >>> [request.prompt_tokens for request in scale_lengths(requests, 0.01)]  # for a small model
      [24, 34, 20]
    """
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


def _draw(seed: tuple[int, ...], vocab_size: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count, dtype=np.int32)
