"""`TokenMask`: the tokens that may come next in a completion."""

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from longctx.serving.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Return how many numbers of 32 bits have a bit for each token."""
    return -(-vocab_size // _BITS)


class TokenMask:
    """Tokens that may come next in a completion, by its grammar, `allowed_token_ids`, `bad_words` and `min_tokens`.

    Args:
      vocab_size: of the model.
      stop_ids: tokens that end the completion.
      matcher: of its grammar, at the beginning; None: there is none.
      bad_words: tokens of each.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: Collection[int],
        matcher: "LLMatcher | None" = None,
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self._matcher, self._bad_words = matcher, [tuple(word) for word in bad_words]
        self._min_tokens, self._vocab_size = params.min_tokens, vocab_size
        self._stops = _bits(tuple(token for token in stop_ids if token < vocab_size), vocab_size)
        self._allowed = _bits(params.allowed_token_ids, vocab_size)
        self._longest = max(map(len, self._bad_words), default=1) - 1
        self._recent: list[int] = []  # the last ones, as many as a bad word may begin with
        self._count = 0

    @property
    def needs_tokens(self) -> bool:
        """Whether the mask depends on the tokens before it."""
        return self._matcher is not None or bool(self._bad_words)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Reason why no token can follow; None: there is none."""
        if self._matcher is None or not self._matcher.is_error():
            return None
        text = self._matcher.get_error().strip() or "a token that it does not allow"
        return f"the text can't follow its grammar: {text.splitlines()[0][:200]}"

    def push(self, token: int) -> None:
        """Note the next token."""
        self._count += 1
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
        if self._longest:
            self._recent = [*self._recent, token][-self._longest :]

    def fill(self, row: np.ndarray, count: int) -> None:
        """Write the mask of the token after `count` tokens of output into `row`, int32 `[words]`; 1: it may come.

        Where `min_tokens` or a bad word forbids all that is left, the other rules hold.
        """
        row[:] = self._allowed
        if self._matcher is not None:
            assert self._count == count, "the tokens before are known"
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        kept = row.copy()
        for *before, last in self._bad_words:
            if not before or self._recent[-len(before) :] == before:
                row.view(np.uint32)[last // _BITS] &= ~np.uint32(1 << last % _BITS)
        if count < self._min_tokens:
            row &= ~self._stops
        if not row.any():
            row[:] = kept


@functools.lru_cache(16)
def _bits(tokens: tuple[int, ...] | None, vocab_size: int) -> np.ndarray:
    """Return numbers with the bits of tokens, or of all, int32 `[words]`, which must not be changed."""
    bits = np.zeros(mask_words(vocab_size) * _BITS, bool)
    bits[slice(vocab_size) if tokens is None else list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
