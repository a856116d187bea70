"""`InputProcessor` checks, tokenises and hashes requests; `SequenceMaker` makes sequences of them."""

from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import numpy as np

from longctx.models.config import LlamaConfig
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.prefix import PageHash, Sessions
from longctx.serving.request.completion import Completion, Detokenizer
from longctx.serving.request.grammar import Grammars
from longctx.serving.request.handoff import Handoff
from longctx.serving.request.output import Logprobs, Metrics
from longctx.serving.request.request import PreparedRequest, Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.request.token_mask import TokenMask
from longctx.serving.scheduler.sequence import Sequence
from longctx.serving.validation import check_text

if TYPE_CHECKING:
    from longctx.models.tokenizer import Tokenizer


class InputProcessor:
    """Preparation of requests for an engine. It has no state, so any thread or process may do it.

    Args:
      model: its vocabulary is what token ids are checked against.
      config: its limits are what requests are checked against.
      max_length: tokens of the longest sequence, prompt and output.
      tokenizer: of prompts that are text; None: there are only token ids.
      page_hash: makes the keys of pages.

    Attributes:
      grammars: that requests ask for, compiled.
      fingerprint: bytes, equal for processors whose prepared requests are interchangeable.

    Examples:
      >>> from longctx.models import LlamaConfig
      >>> from longctx.serving import EngineConfig, InputProcessor, Request
      >>> from longctx.serving.kv_cache.prefix import PageHash
      >>> config = EngineConfig(page_size=64)
      >>> page_hash = PageHash(b"a secret of 16 bytes or more", config.page_size)
      >>> processor = InputProcessor(LlamaConfig.preset("llama-3-8b"), config, 8192, None, page_hash)
      >>> prepared = processor.prepare(Request([7] * 200))
      >>> len(prepared.tokens), len(prepared.keys)
      (200, 3)
    """

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        max_length: int,
        tokenizer: "Tokenizer | None",
        page_hash: PageHash,
    ) -> None:
        self._model, self._config, self._max_length = model, config, max_length
        self._tokenizer, self._hash = tokenizer, page_hash
        self.grammars = Grammars(tokenizer, model.vocab_size, end_tokens(model, tokenizer))
        # All that `prepare` goes by, but for the tokenizer's vocabulary.
        sizes = (model.vocab_size, max_length, config.max_running, config.max_logprobs)
        limits = (*sizes, config.prefix_cache, tokenizer is None)
        self.fingerprint = page_hash.fingerprint(repr(limits))

    def prepare(self, request: Request) -> PreparedRequest:
        """Check a request, tokenise its prompt and hash its full pages.

        Returns:
          What `Engine.submit` takes.

        Raises:
          TypeError, ValueError: what it asks for can't be done; the message names the argument.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        tokens = self._tokenise(request.prompt)
        self.check_request(request, len(tokens))
        keys: list[bytes] = []
        if self._config.prefix_cache:
            self._hash.extend(keys, tokens, self._hash.root(request.tenant, request.cache_salt))
        return PreparedRequest(request, tokens, keys, self.fingerprint)

    def check(self, prepared: PreparedRequest, handoff: Handoff | None) -> None:
        """Check that a request, `prepared`, is for this engine, and that the `handoff` of another engine fits it.

        Raises:
          ValueError: it is not, or does not.
        """
        if prepared.prepared_for != self.fingerprint:
            raise ValueError("request must be prepared for this engine, and was for another: see Engine.prepare")
        if (grammar := prepared.request.sampling.grammar) is not None:
            self.grammars.matcher(grammar)  # here, rather than in the engine's loop
        if handoff is not None:
            handoff.check(len(prepared.tokens), prepared.request.sampling, self._model.vocab_size)

    def check_choices(self, n: int) -> None:
        """Check how many answers to one prompt a request asks for.

        Raises:
          ValueError: `n` is more than the engine's `max_running`.
        """
        if n > self._config.max_running:
            raise ValueError(f"n must be at most max_running={self._config.max_running}, got {n}")

    def _tokenise(self, prompt: str | List[int]) -> np.ndarray:
        """The prompt as int32 `[T]`."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("prompt is text, but the engine has no tokenizer: give token ids")
            prompt = self._tokenizer.encode(check_text("prompt", prompt))
        try:
            ids = np.asarray(prompt)
        except ValueError as error:
            raise ValueError("prompt must be one sequence of token ids") from error
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"prompt must be one sequence of at least one token, got shape {ids.shape}")
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"prompt must be text or integers, got {ids.dtype}")
        low, high = ids.min(), ids.max()
        if low < 0 or high >= self._model.vocab_size:
            raise ValueError(
                f"prompt has tokens from {low} to {high}; the vocabulary is 0 to {self._model.vocab_size - 1}"
            )
        return ids.astype(np.int32)

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        return self._model.hidden_size

    def check_request(self, request: Request, prompt_length: int) -> None:
        """Check that this engine can do what a request asks for.

        Args:
          request: to check.
          prompt_length: tokens of its prompt.

        Raises:
          ValueError: it can't; the message names the argument.
        """
        params, vocab = request.sampling, self._model.vocab_size
        self.check_choices(params.n)
        if prompt_length + params.max_tokens > self._max_length:
            raise ValueError(
                f"prompt and max_tokens make {prompt_length} + {params.max_tokens} tokens, more than the "
                f"{self._max_length} of the engine's longest sequence"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the engine has none: use stop_token_ids")
        for token in params.stop_token_ids:
            if token >= vocab:
                raise ValueError(f"stop_token_ids must be in the vocabulary, 0 to {vocab - 1}, got {token}")
        for token, _ in params.logit_bias:
            if token >= vocab:
                raise ValueError(f"logit_bias must be of tokens in the vocabulary, 0 to {vocab - 1}, got {token}")
        if params.grammar is not None:
            self.grammars.matcher(params.grammar)
        for token in params.allowed_token_ids or ():
            if token >= vocab:
                raise ValueError(f"allowed_token_ids must be in the vocabulary, 0 to {vocab - 1}, got {token}")
        if params.bad_words and self._tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and the engine has none")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._config.max_logprobs:
                raise ValueError(f"{name} must be at most max_logprobs={self._config.max_logprobs}, got {count}")
        if request.session_id is not None and not self._config.prefix_cache:
            raise ValueError("session_id needs prefix_cache=True: its pages are kept there")


class SequenceMaker:
    """Factory of the sequences of prepared requests, in the order of arrival: an engine has one."""

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        tokenizer: "Tokenizer | None",
        page_hash: PageHash,
        sessions: Sessions,
        grammars: Grammars | None = None,
    ) -> None:
        self._eos_ids = end_tokens(model, tokenizer)
        self._grammars = grammars or Grammars(tokenizer, model.vocab_size, self._eos_ids)
        self._tokenizer, self._sessions = tokenizer, sessions
        self._hash, self._prefix_cache = page_hash, config.prefix_cache
        self._rng = np.random.default_rng(config.seed)
        self._count = 0

    def next_order(self) -> int:
        """Take the number of a sequence that is made elsewhere."""
        self._count += 1
        return self._count - 1

    def make(
        self, prepared: PreparedRequest, request_id: str, arrival: float, seed: int | None = None
    ) -> list[Sequence]:
        """Make a sequence for each of the request's n completions; `seed`: drawn by another engine for it."""
        request, tokens, keys, _ = prepared
        params = request.sampling
        if seed is None:
            seed = params.seed if params.seed is not None else int(self._rng.integers(2**31))
        stop_ids = frozenset({*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)})
        prompt_logprobs = None if params.prompt_logprobs is None else Logprobs()
        if params.n > 1 and not self._prefix_cache:
            # The completions share the prompt's pages with each other alone.
            keys = []
            self._hash.extend(keys, tokens, self._hash.root_of_request(self._count))
        root = self._hash.root(request.tenant, request.cache_salt)
        partial_page = self._sessions.find(root, request.session_id, keys, tokens)
        sequences = []
        for index in range(params.n):
            known = np.zeros(len(tokens) + params.max_tokens, np.int32)
            known[: len(tokens)] = tokens
            completion = Completion(
                request=request,
                request_id=request_id,
                index=index,
                num_prompt=len(tokens),
                known=known,
                seed=seed,
                stop_ids=stop_ids,
                detokenizer=Detokenizer(self._tokenizer, params.stop, params.include_stop, params.skip_special_tokens),
                metrics=Metrics(arrival, len(tokens)),
                prompt_logprobs=prompt_logprobs,
                mask=self._mask(params, stop_ids) if params.has_mask else None,
            )
            sequence = as_sequence(prepared, f"{request_id}/{index}", self._count, arrival)
            sequence.keys, sequence.partial_page = list(keys), partial_page
            sequence.may_share = completion.num_prompt_logprobs is None and params.pooling != "mean"
            sequence.completion = completion
            sequences.append(sequence)
            self._count += 1
        return sequences

    def _mask(self, params: SamplingParams, stop_ids: frozenset[int]) -> TokenMask:
        matcher = None if params.grammar is None else self._grammars.matcher(params.grammar)
        words = []
        for word in params.bad_words:  # within a text a word begins with a space in most vocabularies
            assert self._tokenizer is not None
            forms = [self._tokenizer.encode(text, add_special_tokens=False) for text in (word, f" {word.lstrip()}")]
            words += [form for form in forms if form]
        return TokenMask(params, self._grammars.vocab_size, stop_ids, matcher, words)


def end_tokens(model: LlamaConfig, tokenizer: "Tokenizer | None") -> set[int]:
    """Return the tokens that end a text, by the model and by its tokenizer."""
    return {*model.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}


def as_sequence(prepared: PreparedRequest, name: str, order: int, arrival: float) -> Sequence:
    """Make the sequence of a completion of a request, as it is before anything is computed."""
    request = prepared.request
    return Sequence(
        name,
        order,
        prompt_length=len(prepared.tokens),
        max_tokens=request.sampling.max_tokens,
        arrival=arrival,
        priority=request.priority,
        tenant=request.tenant,
        ttft_deadline=request.ttft_deadline,
        tpot_target=request.tpot_target,
        keys=list(prepared.keys),
        needs_tokens=request.sampling.needs_tokens,
        may_share=prepared.may_share,
    )
