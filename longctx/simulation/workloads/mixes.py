"""Workloads that need no file: mixes of short and long requests, and conversations."""

from dataclasses import dataclass

import numpy as np

from longctx.models.validation import MAX_INT32, check_integer
from longctx.simulation.workloads.lengths import Lengths, Quantiles
from longctx.simulation.workloads.request import TRACE_BLOCK, WorkloadRequest


@dataclass(frozen=True)
class Mix:
    """Lengths of short and long requests, and the share of long ones.

    Attributes:
      short_prompt, short_output, long_prompt, long_output: distributions of tokens.
      long_share: 0 to 1.

    Source:
      Medha, 5.1: conversations, with a few prompts of up to millions of tokens among them.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, Mix
      >>> chat, answer, book = Lengths(100, 1000), Lengths(10, 100), Lengths(1_000_000, 1_000_000)
      >>> mix = Mix(chat, answer, book, answer, long_share=0.05)
      >>> sum(request.prompt_tokens == 1_000_000 for request in mix.draw(1000))
      45
    """

    short_prompt: Lengths | Quantiles
    short_output: Lengths | Quantiles
    long_prompt: Lengths | Quantiles
    long_output: Lengths | Quantiles
    long_share: float

    def draw(self, num_requests: int, seed: int = 0) -> list[WorkloadRequest]:
        """Draw requests that all arrive at 0, numbered from 0."""
        rng = np.random.default_rng(seed)
        is_long = rng.uniform(size=num_requests) < self.long_share
        prompts = np.where(is_long, self.long_prompt.draw(rng, num_requests), self.short_prompt.draw(rng, num_requests))
        outputs = np.where(is_long, self.long_output.draw(rng, num_requests), self.short_output.draw(rng, num_requests))
        return [
            WorkloadRequest(0.0, prompt, output, number=number)
            for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
        ]


# Conversations of ShareGPT4, capped at 8K tokens (Medha, 5.1). The paper has no other statistics of them: quantiles are
# those of a public set of the same conversations, prompt and answer up to 8K.
_SHORT = (
    Quantiles((0, 8), (0.1, 73), (0.5, 1_713), (0.9, 5_683), (1, 8_000)),
    Quantiles((0, 4), (0.1, 86), (0.5, 415), (0.9, 837), (1, 1_000)),
)
# Code review and pull requests over whole repositories, Medha-SWE: prompts of 393K (P50) and 839K (P90) tokens, between
# 100K and 1M; outputs of 518 (P50) and 808 (P90) (Medha, 5.1).
_LONG = (
    Quantiles((0, 100_000), (0.5, 393_000), (0.9, 839_000), (1, 1_000_000)),
    Quantiles((0, 50), (0.5, 518), (0.9, 808), (1, 1_600)),
)
MIXES = {
    "sharegpt4": Mix(*_SHORT, *_LONG, 0.0),
    "sharegpt4-5-long": Mix(*_SHORT, *_LONG, 0.05),
    # Medha, 5.3: prompts of 2M tokens.
    "sharegpt4-5-2m": Mix(*_SHORT, Lengths(2_000_000, 2_000_000), _LONG[1], 0.05),
}
"""The workloads of Medha, by name: conversations, and conversations with long prompts among them.

Source:
  Medha, 5.1 and 5.3.

Examples:
  >>> from longctx.simulation.workloads import MIXES
  >>> sorted(MIXES)
  ['sharegpt4', 'sharegpt4-5-2m', 'sharegpt4-5-long']
  >>> MIXES["sharegpt4-5-long"].long_share
  0.05
"""


def make_mix(name: str, num_requests: int, seed: int = 0) -> list[WorkloadRequest]:
    """Draw requests of one of `MIXES`, which all arrive at 0.

    Args:
      name: of `MIXES`.
      num_requests: how many.
      seed: of what is drawn.

    Returns:
      The requests, numbered from 0.

    Raises:
      TypeError, ValueError: there is no mix of that name, or no request is asked for.

    Source:
      Medha, 5.1 and 5.3.

    Examples:
      >>> from longctx.simulation.workloads import arrive_at_rate, make_mix
      >>> requests = arrive_at_rate(make_mix("sharegpt4-5-2m", 200), rate=1.0)
      >>> max(request.prompt_tokens for request in requests)
      2000000
    """
    if name not in MIXES:
        raise ValueError(f"mix must be one of {', '.join(MIXES)}, got {name!r}")
    return MIXES[name].draw(check_integer("num_requests", num_requests, 1), seed)


def make_conversations(
    num_sessions: int,
    turns: Lengths,
    first_prompt: Lengths | Quantiles,
    next_prompt: Lengths | Quantiles,
    output: Lengths | Quantiles,
    delay: float = 0.0,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Conversations whose first turns arrive at 0, each later one `delay` seconds after the answer before it.

    A turn's prompt is all prompts and answers before it and new tokens. `arrive_at_rate` says when conversations begin.
    The blocks of a turn go on over its answer, so that engines in virtual time find that again too.

    Args:
      num_sessions: how many conversations.
      turns: of each conversation.
      first_prompt, next_prompt: tokens of a conversation's first prompt, and new tokens of each later one.
      output: tokens of each answer.
      delay: seconds from an answer's end to the next turn.
      shared_prefix: first tokens of all conversations, a system prompt. It counts in multiples of 512.
      seed: of what is drawn.

    Returns:
      The turns of the first conversation, then those of the next; each but the first follows the one before.

    Raises:
      TypeError, ValueError: a number is out of range, or a conversation gets longer than 2^31 - 1 tokens.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, arrive_at_rate, make_conversations
      >>> prompt, question, answer = Lengths(1000, 1000), Lengths(50, 50), Lengths(200, 200)
      >>> turns = make_conversations(1, Lengths(3, 3), prompt, question, answer, delay=10.0)
      >>> [(turn.prompt_tokens, turn.after, turn.delay) for turn in arrive_at_rate(turns, rate=0.5)]
      [(1000, None, 0.0), (1250, 0, 10.0), (1500, 1, 10.0)]
    """
    check_integer("num_sessions", num_sessions, 1)
    check_integer("shared_prefix", shared_prefix, 0)
    rng = np.random.default_rng(seed)
    common = shared_prefix // TRACE_BLOCK
    requests: list[WorkloadRequest] = []
    next_block = common
    for session, count in enumerate(turns.draw(rng, num_sessions).tolist()):
        new = [*first_prompt.draw(rng, 1).tolist(), *next_prompt.draw(rng, count - 1).tolist()]
        outputs = output.draw(rng, count).tolist()
        length, begin = common * TRACE_BLOCK, next_block
        for turn, (prompt, answer) in enumerate(zip(new, outputs, strict=True)):
            length += prompt
            check_integer("tokens of a conversation", length, 1, MAX_INT32)
            number, blocks = len(requests), -(-(length + answer) // TRACE_BLOCK)
            chain = (*range(min(common, blocks)), *range(begin, begin + max(0, blocks - common)))
            next_block = max(next_block, begin + blocks - common)
            follows = {"after": number - 1, "delay": delay} if turn else {}
            requests.append(
                WorkloadRequest(0.0, length, answer, chain, number=number, session=f"session-{session}", **follows)  # type: ignore[arg-type]
            )
            length += answer
    return requests
