"""`Handoff`: what one engine has computed of a request that another one goes on with. Plain data.

The pages with its keys and values are apart: the first engine keeps them under leases, one of each completion, until
the second one has them. If it gets none, or not all, it computes what is missing from the tokens.

Source: Mooncake, section 3 (steps 3 and 4: a request joins the decoding side when its last page is there).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from longctx.models.validation import MAX_INT32
from longctx.serving.request.output import Output, TokenLogprob
from longctx.serving.request.sampling_params import SamplingParams

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT32)]


@dataclass(frozen=True)
class Progress:
    """Progress of a completion.

    Attributes:
      lease: under which its pages are kept; None: nowhere, all of it is computed again.
      length: tokens of prompt and output whose keys and values the pages have.
      tokens: its output so far.
      logprobs: of these, if the request asks for them.
    """

    lease: str | None
    length: _Count
    tokens: tuple[_Count, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Handoff:
    """Results that another engine has computed of a request.

    Attributes:
      seed: that its tokens are drawn with, also where the engine drew it.
      completions: of each of its n completions, in order.
      prompt_logprobs: of the prompt's tokens but the first, as far as it has been read, if the request asks for them.
      embedding: of the prompt, with the token after it, if the request asks for it.
    """

    seed: _Count
    completions: tuple[Progress, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    embedding: tuple[float, ...] | None = None

    @classmethod
    def of(cls, outputs: Sequence[Output]) -> "Handoff":
        """Make the handoff of a request with `lease` from its outputs."""
        completions = tuple(
            Progress(
                None if each.lease is None else each.lease.lease_id,
                0 if each.lease is None else each.lease.length,
                tuple(each.token_ids),
                tuple(each.logprobs or ()),
            )
            for each in outputs
        )
        prompt = outputs[0].prompt_logprobs
        if prompt is not None and len(prompt) < outputs[0].metrics.prompt_tokens - 1:
            prompt = None  # the other engine computes the whole prompt
        embedding = outputs[0].embedding
        return cls(
            outputs[0].seed,
            completions,
            None if prompt is None else tuple(prompt),
            None if embedding is None else tuple(embedding),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    @classmethod
    def from_dict(cls, fields: Any) -> "Handoff":
        """The handoff of such fields, which anybody may have sent; ValueError if they are none."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"handoff is none that an engine makes: {error}") from None

    def check(self, num_prompt: int, sampling: SamplingParams, vocab_size: int) -> None:
        """ValueError, unless it can be of a request with such a prompt and sampling parameters."""
        if len(self.completions) != sampling.n:
            raise ValueError(f"handoff must have n={sampling.n} completions, got {len(self.completions)}")
        for each in self.completions:
            if len(each.tokens) > sampling.max_tokens:
                raise ValueError(
                    f"handoff must have up to max_tokens={sampling.max_tokens} tokens, got {len(each.tokens)}"
                )
            if not all(0 <= token < vocab_size for token in each.tokens):
                raise ValueError(f"handoff must have tokens in the vocabulary, 0 to {vocab_size - 1}")
            if not 0 <= each.length < num_prompt + len(each.tokens):
                raise ValueError(
                    f"handoff must have pages of fewer than the {num_prompt} + {len(each.tokens)} tokens that there "
                    f"are, got {each.length}"
                )
            wanted = 0 if sampling.logprobs is None else len(each.tokens)
            if len(each.logprobs) != wanted:
                raise ValueError(f"handoff must have logprobs of {wanted} tokens, got {len(each.logprobs)}")
            _check_logprobs("logprobs", each.logprobs, sampling.logprobs, vocab_size)
        prompt = self.prompt_logprobs or ()
        wanted = 0 if sampling.prompt_logprobs is None else num_prompt - 1
        if len(prompt) > wanted:
            raise ValueError(f"handoff must have prompt_logprobs of up to {wanted} tokens, got {len(prompt)}")
        _check_logprobs("prompt_logprobs", prompt, sampling.prompt_logprobs, vocab_size)
        has_embedding = sampling.pooling is not None and bool(self.completions[0].tokens)
        if (self.embedding is not None) != has_embedding:
            raise ValueError("handoff must have an embedding with the token of a request that asks for one, else none")
        if not all(map(math.isfinite, self.embedding or ())):
            raise ValueError("handoff must have an embedding of finite numbers")


def _check_logprobs(name: str, given: tuple[TokenLogprob, ...], num_top: int | None, vocab_size: int) -> None:
    for each in given:
        if len(each.top) > (num_top or 0):
            raise ValueError(f"handoff must have {name} of up to {num_top or 0} tokens each, got {len(each.top)}")
        if not all(math.isfinite(x) for x in (each.logprob, *(logprob for _, logprob in each.top))):
            raise ValueError(f"handoff must have {name} that are finite numbers")
        if not all(0 <= token < vocab_size for token, _ in each.top):
            raise ValueError(f"handoff must have {name} of tokens in the vocabulary, 0 to {vocab_size - 1}")
