"""Sequences without tokens: lengths, and keys of pages that stand for contents that are never made.

The core that serves decides by lengths and by the keys of pages alone. So here a key is made of the ids of a trace's
blocks instead of tokens: a page is found by it if all blocks up to the page's end are equal.
"""

import hashlib
from functools import cache

import numpy as np

from longctx.serving.kv_cache.page_pool import Key
from longctx.serving.kv_cache.prefix import KEY_BYTES, PageHash
from longctx.serving.request.completion import Completion, Detokenizer
from longctx.serving.request.output import Event, FinishReason, Metrics, Output, TokenLogprob
from longctx.serving.request.request import Request
from longctx.serving.request.sampling_params import SamplingParams
from longctx.serving.scheduler.sequence import Sequence
from longctx.simulation.workloads import WorkloadRequest

_A_TOKEN = Event("", 0, (0,), "")
_PAGE_BYTES = 4  # of a key, for the number of a page of its own


class PageKeys:
    """Maker of the keys of a request's pages, page by page.

    Tokens of the prompt that no block has, and those of the output, are the request's own: of its number. Blocks that
    go on beyond the prompt's last one are of the output, so that a later turn of a conversation can begin with it.

    Args:
      seed: of the workload: requests under different seeds share nothing.
    """

    def __init__(self, request: WorkloadRequest, page_size: int, seed: int) -> None:
        self._page_size, self._number = page_size, request.number
        self._blocks, self._block_size, self._prompt = request.blocks, request.block_size, request.prompt_tokens
        named = len(self._blocks) * self._block_size
        is_prompt_alone = named - self._block_size < self._prompt
        self._named = min(named, self._prompt) if is_prompt_alone else named  # tokens that blocks have
        self._root = _hash(b"", (seed, self._block_size))
        self._own: bytes | None = None  # of pages of its own, within the prompt
        self._generated: bytes | None = None  # of those with tokens of its own that it generates

    def extend(self, keys: list[Key], length: int) -> None:
        """Append the keys of the full pages of the first `length` tokens that `keys` does not have yet."""
        size = self._page_size
        for page in range(len(keys), length // size):
            start, end = page * size, (page + 1) * size
            if end <= self._named:
                parent = keys[-1] if keys else self._root
                blocks = self._blocks[start // self._block_size : -(-end // self._block_size)]
                keys.append(_hash(parent, blocks))
                continue
            if self._own is None:
                # Of a block that it does not fill, the page has the beginning.
                parent = keys[-1] if keys else self._root
                blocks = self._blocks[start // self._block_size :] if self._block_size else ()
                self._own = _hash(parent, (*blocks, self._number, self._named))[:-_PAGE_BYTES]
            if end <= self._prompt:
                keys.append(self._own + page.to_bytes(_PAGE_BYTES, "little"))
                continue
            if self._generated is None:
                self._generated = _hash(self._own, (self._prompt,))[:-_PAGE_BYTES]
            keys.append(self._generated + page.to_bytes(_PAGE_BYTES, "little"))


class TokenlessCompletion(Completion):
    """A completion of which only the length is known: it ends after `max_tokens`, as greedy benchmarks do."""

    def __init__(
        self, source: WorkloadRequest, request_id: str, arrival: float, prompt: int, max_tokens: int, keys: PageKeys
    ) -> None:
        super().__init__(
            request=_request(),
            request_id=request_id,
            index=0,
            num_prompt=prompt,
            known=_no_tokens(),
            seed=0,
            stop_ids=frozenset(),
            detokenizer=_detokenizer(),
            metrics=Metrics(arrival, prompt),
            prompt_logprobs=None,
        )
        self.source, self._last, self._keys = source, prompt + max_tokens, keys
        self.times: list[float | np.ndarray] | None = None  # of its tokens, by runs of them, if they are kept

    @property
    def tokens(self) -> np.ndarray:
        """Zeros, int32 `[T]`, without memory of their own."""
        return np.broadcast_to(np.int32(0), self.num_known)

    def extend_keys(self, keys: list[Key], page_hash: PageHash) -> None:
        self._keys.extend(keys, self.num_known)

    def keys_after(self, keys: list[Key], page_hash: PageHash, tokens: int) -> None:
        self._keys.extend(keys, self.num_known + tokens)

    def push(self, token: int, logprob: TokenLogprob | None, now: float) -> tuple[str, FinishReason | None]:
        self.num_known += 1
        self.metrics.note_token(now)
        if self.times is not None:
            self.times.append(now)
        return "", "length" if self.num_known == self._last else None

    def advance(self, times: np.ndarray, longest: float) -> None:
        super().advance(times, longest)
        if self.times is not None:
            self.times.append(times)  # the same array for all sequences of a batch

    def event(self, text: str = "", token: int | None = None, reason: FinishReason | None = None) -> Event:
        """Return a shared event for every token but the last one, as their events are not read."""
        return _A_TOKEN if reason is None else super().event(text, token, reason)

    def interrupt(self) -> str:
        return ""

    def output(self, reason: FinishReason, error: str | None = None) -> Output:
        return Output(self.request_id, 0, [], "", reason, self.metrics, error=error, lease=self.lease)


def make_sequence(
    source: WorkloadRequest,
    request_id: str,
    order: int,
    arrival: float,
    page_size: int,
    seed: int,
    has_keys: bool,
    known: int = 0,
    max_tokens: int | None = None,
) -> Sequence:
    """Make the sequence of a request, without tokens.

    Args:
      order: of its arrival, a number that no other sequence of its engine has.
      has_keys: whether it shares pages with others.
      known: tokens of its output that are known, and belong to the prompt here.
      max_tokens: that are generated here; None: all.
    """
    page_keys = PageKeys(source, page_size, seed)
    prompt = source.prompt_tokens + known
    max_tokens = source.output_tokens - known if max_tokens is None else max_tokens
    keys: list[Key] = []
    if has_keys:
        page_keys.extend(keys, prompt)
    return Sequence(
        name=f"{request_id}/0",
        order=order,
        prompt_length=prompt,
        max_tokens=max_tokens,
        arrival=arrival,
        keys=keys,
        completion=TokenlessCompletion(source, request_id, arrival, prompt, max_tokens, page_keys),
    )


def _hash(parent: bytes, numbers: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(parent + repr(numbers).encode(), digest_size=KEY_BYTES, person=b"tokenless").digest()


@cache
def _request() -> Request:
    return Request([0], SamplingParams(max_tokens=1, ignore_eos=True))


@cache
def _detokenizer() -> Detokenizer:
    return Detokenizer(None, ())


@cache
def _no_tokens() -> np.ndarray:
    return np.zeros(0, np.int32)
