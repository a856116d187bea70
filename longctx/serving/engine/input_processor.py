"""From a `Request` to the sequences that the scheduler knows, or to an error that says what is wrong with it."""

from collections import OrderedDict
from collections.abc import Sequence as List
from typing import NamedTuple

import numpy as np

from longctx.models import LlamaConfig, Tokenizer
from longctx.serving.config import EngineConfig
from longctx.serving.kv_cache.prefix import PageHash
from longctx.serving.request.completion import Completion
from longctx.serving.request.detokenizer import Detokenizer
from longctx.serving.request.output import Metrics, TokenLogprob
from longctx.serving.request.request import Request
from longctx.serving.scheduler.sequence import Sequence, Tail
from longctx.serving.validation import check_text


class Prompt(NamedTuple):
    """A request's tokens `[T]` int32 and the keys of its full pages."""

    tokens: np.ndarray
    keys: list[bytes]


class SessionEnd(NamedTuple):
    """Where a session's last turn stopped: the key before its partial page, and that page's key, number and tokens."""

    parent: bytes
    key: bytes
    number: int
    tokens: np.ndarray


class InputProcessor:
    """Checks requests and makes sequences of them. Knows the conversations, not what runs."""

    def __init__(
        self,
        model: LlamaConfig,
        config: EngineConfig,
        max_length: int,
        tokenizer: Tokenizer | None,
        page_hash: PageHash,
        num_pages: int,
    ) -> None:
        self._model, self._config, self._max_length, self._num_pages = model, config, max_length, num_pages
        self._tokenizer, self._hash = tokenizer, page_hash
        self._sessions: OrderedDict[tuple[str, str], SessionEnd] = OrderedDict()
        self._rng = np.random.default_rng(config.seed)
        self._count = 0

    def read(self, request: Request) -> Prompt:
        """Check a request, tokenise and hash its prompt. Changes nothing, so it needs no lock.

        Raises:
          TypeError, ValueError: what it asks for can't be done; the message names the argument.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        tokens = self._tokens(request.prompt)
        self._check(request, len(tokens))
        keys: list[bytes] = []
        if self._config.prefix_cache:
            self._hash.extend(keys, tokens, self._hash.root(request.tenant))
        return Prompt(tokens, keys)

    def enter(self, request: Request, prompt: Prompt, request_id: str, now: float) -> list[Sequence]:
        """The sequences of a request, the first with the others as its followers."""
        params, tokens = request.sampling, prompt.tokens
        seed = params.seed if params.seed is not None else int(self._rng.integers(2**31))
        stop_ids = {*params.stop_token_ids}
        if not params.ignore_eos:
            stop_ids |= {*self._model.eos_ids, *(self._tokenizer.eos_ids if self._tokenizer else ())}
        prompt_logprobs: list[TokenLogprob] | None = None if params.prompt_logprobs is None else []

        sequences = []
        for index in range(params.n):
            known = np.zeros(len(tokens) + params.max_tokens, np.int32)
            known[: len(tokens)] = tokens
            text = Detokenizer(self._tokenizer, params.stop)
            metrics = Metrics(now, len(tokens))
            sample = Completion(
                request,
                request_id,
                index,
                len(tokens),
                known,
                seed,
                frozenset(stop_ids),
                text,
                metrics,
                prompt_logprobs,
            )
            sequences.append(
                Sequence(
                    name=f"{request_id}/{index}",
                    order=self._count,
                    prompt_length=len(tokens),
                    max_tokens=params.max_tokens,
                    arrival=now,
                    priority=request.priority,
                    ttft_deadline=request.ttft_deadline,
                    tpot_target=request.tpot_target,
                    keys=list(prompt.keys),
                    tail=self._find_tail(request, prompt),
                    may_share=params.prompt_logprobs is None,
                    completion=sample,
                )
            )
            self._count += 1
        sequences[0].followers = sequences[1:]
        return sequences

    def leave(self, sequence: Sequence) -> Tail | None:
        """Remember where a session's turn ends; what the next one will look for."""
        sample: Completion = sequence.completion
        session = sample.request.session_id
        if session is None or sample.index > 0 or not sequence.is_running:
            return None
        size = self._config.page_size
        valid = min(sequence.computed, sample.num_known)
        number = valid // size
        if number > len(sequence.keys) or valid == number * size:
            return None
        tenant = sample.request.tenant
        parent = sequence.keys[number - 1] if number else self._hash.root(tenant)
        tokens = sample.tokens[number * size : valid].copy()
        key = self._hash.tail(parent, session, tokens)
        self._sessions[tenant, session] = SessionEnd(parent, key, number, tokens)
        self._sessions.move_to_end((tenant, session))
        if len(self._sessions) > self._num_pages:  # the oldest has no page any more
            self._sessions.popitem(last=False)
        return Tail(key, number, len(tokens))

    def _find_tail(self, request: Request, prompt: Prompt) -> Tail | None:
        """The page where its session stopped, as far as the prompt goes on like it."""
        end = self._sessions.get((request.tenant, request.session_id)) if request.session_id is not None else None
        if end is None or end.number > len(prompt.keys):
            return None
        if end.parent != (prompt.keys[end.number - 1] if end.number else self._hash.root(request.tenant)):
            return None
        own = prompt.tokens[end.number * self._config.page_size :][: len(end.tokens)]
        differs = np.flatnonzero(own != end.tokens[: len(own)])
        common = int(differs[0]) if len(differs) else len(own)
        return Tail(end.key, end.number, common) if common else None

    def _tokens(self, prompt: str | List[int]) -> np.ndarray:
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

    def _check(self, request: Request, prompt_length: int) -> None:
        params, vocab = request.sampling, self._model.vocab_size
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
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._config.max_logprobs:
                raise ValueError(f"{name} must be at most max_logprobs={self._config.max_logprobs}, got {count}")
        if request.session_id is not None and not self._config.prefix_cache:
            raise ValueError("session_id needs prefix_cache=True: its pages are kept there")
