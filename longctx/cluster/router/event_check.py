"""Checks of events that an instance sends: those of a request that asked for them, and that can be."""

import math

from longctx.serving.request.output import TokenLogprob
from longctx.serving.request.request import PreparedRequest
from longctx.serving.server.relay import EventLine, RelayBroken, RelayedOutputs


class EventCheck:
    """Of the events of one request."""

    def __init__(self, prepared: PreparedRequest, vocab_size: int) -> None:
        self._sampling, self._num_prompt, self._vocab_size = prepared.request.sampling, len(prepared.tokens), vocab_size

    def check(self, entry: EventLine, relayed: RelayedOutputs) -> None:
        """RelayBroken, unless an event can be the next one."""
        sampling, tokens, end = self._sampling, entry.token_ids, entry.end
        if not all(0 <= token < self._vocab_size for token in tokens):
            raise RelayBroken(f"it sends tokens that are not in the vocabulary of {self._vocab_size}")
        if sampling.logprobs is not None and len(entry.logprobs) != len(tokens):
            raise RelayBroken("it sends tokens without their log probabilities")
        self._check_logprobs(entry.logprobs, sampling.logprobs)
        if entry.text and not tokens and end is None:
            raise RelayBroken("it sends text without tokens")
        had = relayed.num_tokens_of(entry.index) + len(tokens) - (1 if tokens and relayed.repeats(entry.index) else 0)
        if had > sampling.max_tokens:
            raise RelayBroken(f"it sends more than the {sampling.max_tokens} tokens that were asked for")
        if end is None or end.reason not in ("stop", "length") or relayed.repeats(entry.index):
            return
        if end.reason == "length" and had != sampling.max_tokens:
            raise RelayBroken(f"it ends after {had} tokens of {sampling.max_tokens}, by length")
        if not 0 <= end.cached_tokens <= self._num_prompt + had:
            raise RelayBroken(f"it says that {end.cached_tokens} tokens of {self._num_prompt + had} were cached")
        if had == 0:
            raise RelayBroken("it ends a completion without a token")
        if sampling.prompt_logprobs is not None and entry.index == 0:
            if end.prompt_logprobs is None or len(end.prompt_logprobs) != self._num_prompt - 1:
                raise RelayBroken("it sends no log probabilities of the prompt")
            self._check_logprobs(tuple(end.prompt_logprobs), sampling.prompt_logprobs)

    def _check_logprobs(self, logprobs: tuple[TokenLogprob, ...], num_top: int | None) -> None:
        for each in logprobs:
            values = (each.logprob, *(value for _, value in each.top))
            if len(each.top) > (num_top or 0) or not all(value <= 1e-3 and not math.isnan(value) for value in values):
                raise RelayBroken("it sends log probabilities that can't be")
            if not all(0 <= token < self._vocab_size for token, _ in each.top):
                raise RelayBroken("it sends log probabilities of tokens that are not in the vocabulary")
