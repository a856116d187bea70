"""One continuation of a request, as the engine keeps it: tokens, text, and what ends them."""

from dataclasses import dataclass, field

import numpy as np

from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.request.detokenizer import Detokenizer
from longctx.serving.request.output import Event, FinishReason, Metrics, Output, TokenLogprob
from longctx.serving.request.request import Request, SamplingParams
from longctx.serving.scheduler.sequence import Sequence


@dataclass(eq=False)
class Completion:
    """The `data` of a `Sequence`. `known` holds prompt and output, with room for max_tokens."""

    request: Request
    request_id: str
    index: int
    num_prompt: int
    known: np.ndarray  # int32 [prompt + max_tokens]
    seed: int
    stop_ids: frozenset[int]  # end the sequence
    text_stream: Detokenizer
    metrics: Metrics
    prompt_logprobs: list[TokenLogprob] | None  # shared by all samples of the request
    num_known: int = 0
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_known = self.num_prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and output so far, `[T]`."""
        return self.known[: self.num_known]

    def push(self, token: int, logprob: TokenLogprob | None, now: float) -> tuple[str, FinishReason | None]:
        """Take a token; the text that became certain, and why the sequence ends here, if it does."""
        self.known[self.num_known] = token
        self.num_known += 1
        metrics = self.metrics
        metrics.output_tokens += 1
        if metrics.first_token is None:
            metrics.first_token = now
        elif metrics.last_token is not None:
            metrics.longest_gap = max(metrics.longest_gap, now - metrics.last_token)
        metrics.last_token = now
        if logprob is not None:
            self.logprobs.append(logprob)
        reason: FinishReason | None = None
        if token in self.stop_ids:
            piece, reason = self.text_stream.finish(), "stop"
        else:
            piece = self.text_stream.push(token)
            if self.text_stream.stopped:
                reason = "stop"
            elif metrics.output_tokens == self.params.max_tokens:
                piece, reason = piece + self.text_stream.finish(), "length"
                if self.text_stream.stopped:
                    reason = "stop"
        self.text += piece
        return piece, reason

    def cut(self) -> str:
        """End here: the text that was held back, which is text after all."""
        piece = self.text_stream.finish()
        self.text += piece
        return piece

    def extend_keys(self, sequence: Sequence, page_hash: PageHash) -> None:
        """The key of the page that the last token has filled, if it has."""
        if self.num_known % page_hash.page_size == 0:
            page_hash.extend(sequence.keys, self.tokens, page_hash.root(self.request.tenant))

    def output(self, reason: FinishReason) -> Output:
        return Output(
            self.request_id,
            self.index,
            self.known[self.num_prompt : self.num_known].tolist(),
            self.text,
            reason,
            self.metrics,
            None if self.params.logprobs is None else self.logprobs,
            None if self.prompt_logprobs is None else list(self.prompt_logprobs),
        )

    def event(self, text: str = "", token: int | None = None, reason: FinishReason | None = None) -> Event:
        return Event(
            self.request_id,
            self.index,
            () if token is None else (token,),
            text,
            () if token is None or self.params.logprobs is None else (self.logprobs[-1],),
            None if reason is None else self.output(reason),
        )
