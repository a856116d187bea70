"""Distributions of lengths, and requests that are drawn from them."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from longctx.annotations import Real
from longctx.models.validation import MAX_INT32, check_integer, check_real
from longctx.simulation.workloads.request import WorkloadRequest


class Lengths(NamedTuple):
    """A distribution of lengths from low to high, both included: uniform, or log-uniform with `log`.

    Attributes:
      low, high: the least and the largest length, in tokens.
      log: whether lengths are log-uniform: as many between 100 and 1,000 as between 1,000 and 10,000.

    Examples:
      >>> import numpy as np
      >>> from longctx.simulation.workloads import Lengths
      >>> Lengths.parse("100:10000:log")
      Lengths(low=100, high=10000, log=True)
      >>> drawn = Lengths(100, 10_000, log=True).draw(np.random.default_rng(0), 1000)
      >>> bool(800 < np.median(drawn) < 1200)  # as many below 1,000 as above
      True
    """

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
        """Draw `count` lengths, int64 `[count]`, in tokens."""
        if not self.log:
            return rng.integers(self.low, self.high + 1, count)
        drawn = np.exp(rng.uniform(math.log(self.low), math.log(self.high + 1), count))
        return np.clip(drawn.astype(int), self.low, self.high)


class Quantiles:
    """A distribution of lengths that is known by some of its quantiles, and log-uniform between each two of them.

    Args:
      *points: pairs of a share and the length that this share is below: shares rise from 0 to 1, lengths from 1.

    Raises:
      TypeError, ValueError: shares or lengths don't rise so.

    Source:
      Medha, 5.1, has its workloads as quantiles, and gives no other statistics of them.

    Examples:
      >>> import numpy as np
      >>> from longctx.simulation.workloads import Quantiles
      >>> prompts = Quantiles((0, 100_000), (0.5, 393_000), (0.9, 839_000), (1, 1_000_000))  # Medha-SWE
      >>> drawn = prompts.draw(np.random.default_rng(0), 10_000)
      >>> [round(int(np.quantile(drawn, share)), -4) for share in (0.5, 0.9)]
      [390000, 830000]
    """

    def __init__(self, *points: tuple[Real, int]) -> None:
        shares = [check_real("share", share, 0, 1) for share, _ in points]
        lengths = [check_integer("length", length, 1, MAX_INT32) for _, length in points]
        rises = all(a < b for a, b in itertools.pairwise(shares)) and lengths == sorted(lengths)
        if len(points) < 2 or shares[0] != 0 or shares[-1] != 1 or not rises:
            raise ValueError(f"points must rise from a share of 0 to one of 1, got {points}")
        self._shares, self._logs = np.array(shares), np.log(lengths)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw `count` lengths, int64 `[count]`, in tokens."""
        return np.rint(np.exp(np.interp(rng.uniform(size=count), self._shares, self._logs))).astype(int)


def synthesize(
    num_requests: int,
    prompt_tokens: Lengths | Quantiles,
    output_tokens: Lengths | Quantiles,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Generate requests that all arrive at 0; each prompt is `shared_prefix` common tokens and a unique rest.

    Args:
      num_requests: how many.
      prompt_tokens, output_tokens: distributions of lengths, in tokens; those of prompts are without the common ones.
      shared_prefix: tokens with which all prompts begin, such as a system prompt.
      seed: of what is drawn.

    Returns:
      The requests, numbered from 0.

    Raises:
      TypeError, ValueError: a number is out of range.

    Examples:
      >>> from longctx.simulation.workloads import Lengths, synthesize
      >>> requests = synthesize(3, Lengths(1000, 2000), Lengths(10, 20), shared_prefix=4096)
      >>> [(request.prompt_tokens, request.output_tokens) for request in requests]
      [(5947, 12), (5733, 13), (5607, 10)]
      >>> first, second = (request.tokens(vocab_size=128_256) for request in requests[:2])
      >>> bool((first[:4096] == second[:4096]).all()), bool((first[4096:5000] == second[4096:5000]).any())
      (True, False)
    """
    check_integer("shared_prefix", shared_prefix, 0)
    rng = np.random.default_rng(seed)
    prompts = prompt_tokens.draw(rng, num_requests) + shared_prefix
    outputs = output_tokens.draw(rng, num_requests)
    blocks = (0,) if shared_prefix else ()
    return [
        WorkloadRequest(0.0, prompt, output, blocks, shared_prefix, number)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
