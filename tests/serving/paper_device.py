"""A device on paper: pages hold tokens, and what is sampled depends on every token that a row sees through its table.

So a page that is lost, doubled, overwritten or read too early changes the tokens of some request, as on a real device,
at the price of a few list operations.
"""

import zlib

import numpy as np

from longctx.models import Llama, LlamaConfig
from longctx.serving import Engine, EngineConfig, SamplingParams
from longctx.serving.batch import Batch
from longctx.simulation import VirtualExecutor

VOCAB, EOS = 50, 7
MODEL = Llama(LlamaConfig(VOCAB, 8, 8, 1, 1, 1, 8, max_positions=256, eos_ids=(EOS,)))


def next_token(tokens: np.ndarray, seed: int, sample: int) -> int:
    """What the paper device samples after tokens `[T]`."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed * 8 + sample) % VOCAB


def continuation(prompt: list[int], params: SamplingParams, sample: int = 0, eos: int | None = None) -> list[int]:
    """The answer to a prompt: the oracle."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        tokens.append(next_token(np.array(tokens), params.seed or 0, sample))
        if tokens[-1] == eos and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class PaperDevice(VirtualExecutor):
    def __init__(self, num_pages: int, page_size: int, slots: int, entries: int, seconds: float = 1e-3) -> None:
        super().__init__(lambda batch: seconds * (1 + batch.num_tokens / 64), VOCAB)
        self.pages = np.full((num_pages, page_size), -1)
        self.table = np.full((slots, entries), -1)
        self.last = np.full(slots, -1)
        self.page_size = page_size
        self.num_rows = 0

    def run(self, batch: Batch) -> list[int]:
        assert all(sequence.slot is not None for sequence in batch.admitted)
        entries = [(slot, first + i) for slot, first, pages in batch.tables for i in range(len(pages))]
        assert len(entries) == len(set(entries)), "an entry of a page table is set twice, in no order"
        for source, target in batch.copies:
            self.pages[target] = self.pages[source]
        for slot, first, pages in batch.tables:
            self.table[slot, first : first + len(pages)] = pages
        self.num_rows += batch.num_tokens
        # As on a device, all rows are written before any is read.
        for sequence, slot, start, count, _, decodes in batch.chunks:
            tokens = [self.last[slot]] if decodes else sequence.data.tokens[start : start + count]
            at = np.arange(start, start + count)
            self.pages[self.table[slot, at // self.page_size], at % self.page_size] = tokens
        sampled = []
        for sequence, slot, start, count, samples, _ in batch.chunks:
            if samples:
                at = np.arange(start + count)
                seen = self.pages[self.table[slot, at // self.page_size], at % self.page_size]
                sample = sequence.data
                self.last[slot] = next_token(seen, sample.params.seed or 0, sample.index)
                sampled.append(int(self.last[slot]))
        return sampled


def make_engine(num_pages: int = 24, page_size: int = 4, **options: object) -> Engine:
    options = {"max_running": 6, "token_budget": 16, "hash_key": bytes(16)} | options
    config = EngineConfig(page_size=page_size, num_pages=num_pages, **options)
    device = PaperDevice(num_pages, page_size, config.max_running, -(-256 // page_size))
    return Engine(MODEL, None, config, executor=device, clock=device.clock)
