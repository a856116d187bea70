"""One completion of a request: its tokens, its text, and the stop strings and limits that end it."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from longctx.serving.request.output import Event, FinishReason, Lease, Logprobs, Metrics, Output, TokenLogprob
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.request.token_mask import TokenMask

if TYPE_CHECKING:
    from longctx.serving.kv_cache.page_pool import Key
    from longctx.serving.kv_cache.prefix import PageHash
from longctx.models.tokenizer import StreamDecoder, Tokenizer


class Detokenizer:
    """Pieces of text that join to the whole, no part of a stop string among them.

    `push` holds back what may begin a stop string; once a stop string is complete, `stopped` is true. Without a
    tokenizer there is no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop: tuple[str, ...], include_stop: bool = False, skip_special: bool = True
    ) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, skip_special)
        self._stop, self._include_stop = stop, include_stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain."""
        return "" if self._decoder is None or self.stopped else self._emit(self._decoder.push(token))

    def finish(self) -> str:
        """The text that was held back; a stop string may complete here."""
        if self._decoder is None or self.stopped:
            return ""
        piece = self._emit(self._decoder.finish())
        rest, self._held = self._held, ""
        return piece + rest

    def _emit(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = min(((at, stop) for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped, self._held = True, ""
            at, stop = found
            return text[: at + len(stop)] if self._include_stop else text[:at]
        certain = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`, but is not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(eq=False)
class Completion:
    """One of the n completions of a request. `known` holds prompt and output, with room for max_tokens."""

    request: Request
    request_id: str
    index: int
    num_prompt: int
    known: np.ndarray  # int32 [prompt + max_tokens]
    seed: int
    stop_ids: frozenset[int]  # end the sequence
    detokenizer: Detokenizer
    metrics: Metrics
    prompt_logprobs: Logprobs | None  # of the first completion of a request that asks for them
    mask: TokenMask | None = None  # of the tokens that may come; None: all
    num_known: int = 0
    text: str = ""
    logprobs: Logprobs = field(default_factory=Logprobs)
    lease: Lease | None = None  # of its pages, once it has ended
    hidden: np.ndarray | None = None  # sum of the pooled rows so far, float64 [D]; of the "last" row alone

    def __post_init__(self) -> None:
        self.num_known = self.num_prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output so far, int32 `[T]`."""
        return self.known[: self.num_known]

    @property
    def problem(self) -> str | None:
        """Reason why it can't go on; None: there is none."""
        return None if self.mask is None else self.mask.problem

    def fill_mask(self, row: np.ndarray, position: int) -> bool:
        """Write which tokens may come at a position into a mask, int32 `[words]`; False: all, and nothing is written.

        One whose tokens before it are not known has ended, and what is drawn is dropped.
        """
        mask = self.mask
        if mask is None or (mask.needs_tokens and position != self.num_known):
            return False
        mask.fill(row, position - self.num_prompt)
        return True

    def waits_for_tokens(self, position: int) -> bool:
        """Return whether the mask of a position needs tokens before it that are not known yet."""
        return self.mask is not None and self.mask.needs_tokens and position > self.num_known

    @property
    def lease_id(self) -> str | None:
        """Under which its pages are kept for another engine; None: they are not."""
        name = self.request.lease
        return name if name is None or self.params.n == 1 else f"{name}/{self.index}"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens asked for at the prompt's positions; None: no logprobs are asked for there."""
        return self.params.prompt_logprobs if self.index == 0 else None

    def push(self, token: int, logprob: TokenLogprob | None, now: float) -> tuple[str, FinishReason | None]:
        """Take a token; returns the text that became certain, and why the sequence ends here, if it does."""
        self.known[self.num_known] = token
        self.num_known += 1
        self.metrics.note_token(now)
        if logprob is not None:
            self.logprobs.append(logprob)
        reason: FinishReason | None = None
        detokenizer = self.detokenizer
        if self.mask is not None:
            self.mask.push(token)
        if token in self.stop_ids:
            piece, reason = detokenizer.finish(), "stop"
        else:
            piece = detokenizer.push(token)
            if detokenizer.stopped:
                reason = "stop"
            elif self.mask is not None and self.mask.is_complete:
                piece, reason = piece + detokenizer.finish(), "stop"
            elif self.num_known == len(self.known):
                piece, reason = piece + detokenizer.finish(), "length"
                if detokenizer.stopped:
                    reason = "stop"
        if piece:
            self.text += piece
        return piece, reason

    def advance(self, times: np.ndarray, longest: float) -> None:
        """Count tokens that don't end it and whose values are not needed, see `Metrics.note_tokens`."""
        self.num_known += len(times)
        self.metrics.note_tokens(len(times), float(times[0]), float(times[-1]), longest)

    def extend_keys(self, keys: "list[Key]", page_hash: "PageHash") -> None:
        """Append the keys of its full pages that `keys` does not have yet."""
        page_hash.extend(keys, self.tokens, page_hash.root(self.request.tenant, self.request.cache_salt))

    def keys_after(self, keys: "list[Key]", page_hash: "PageHash", tokens: int) -> None:
        """Append the keys of the full pages that it will have after more tokens; only where no token is needed."""
        raise NotImplementedError("tokens that are not known have no keys")

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprob]) -> None:
        """Add log probabilities of the prompt's tokens from `start` on; after preemption some of them are known."""
        known = self.prompt_logprobs
        assert known is not None
        assert start <= len(known) + 1
        known.extend(logprobs[len(known) + 1 - start :])

    def add_hidden(self, start: int, rows: np.ndarray) -> None:
        """Add the sum of the pooled rows of a chunk; one from 0 on is the first, after preemption once more."""
        is_first = start == 0 or self.params.pooling == "last"
        before: Any = 0 if is_first else self.hidden
        self.hidden = before + rows.astype(np.float64)

    @property
    def embedding(self) -> "array[float] | None":
        """The pooled hidden states of its prompt, float32 `[D]`, all of which has been computed."""
        if self.hidden is None:
            return None
        return array("f", (self.hidden / self.num_pooled).tolist())

    @property
    def num_pooled(self) -> int:
        """Rows of the prompt that its embedding is the mean of."""
        return self.num_prompt if self.params.pooling == "mean" else 1

    def interrupt(self) -> str:
        """End here; returns the text that was held back, which turns out to be text."""
        piece = self.detokenizer.finish()
        self.text += piece
        return piece

    def output(self, reason: FinishReason, error: str | None = None) -> Output:
        return Output(
            self.request_id,
            self.index,
            self.known[self.num_prompt : self.num_known].tolist(),
            self.text,
            reason,
            self.metrics,
            None if self.params.logprobs is None else self.logprobs,
            None if self.num_prompt_logprobs is None else self.prompt_logprobs,
            error,
            self.seed,
            self.lease,
            self.embedding if reason in ("stop", "length") else None,
        )

    def fail(self, error: str) -> Event:
        """The last event after an error, a sentence; without text that was held back."""
        return Event(self.request_id, self.index, (), "", (), self.output("error", error))

    def event(self, text: str = "", token: int | None = None, reason: FinishReason | None = None) -> Event:
        tokens = () if token is None else (token,)
        logprobs = (self.logprobs[-1],) if self.logprobs and token is not None else ()
        return Event(
            self.request_id, self.index, tokens, text, logprobs, None if reason is None else self.output(reason)
        )
