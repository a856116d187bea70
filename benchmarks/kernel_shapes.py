"""Named attention shapes of real models, for tests and benchmarks.

A name is `model/tp/case`: `llama3-70b/tp8/chunk64@1m` is a chunk of 64 tokens of a sequence of 1,048,576, on one of 8
tensor-parallel devices; `llama3-8b/tp1/decode@128k/b32` decodes 32 sequences of 131,072 tokens.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

# The largest cache of one layer in a decode case: half of an 80 GB device.
MAX_CACHE_BYTES = 40 * 10**9
ITEM_SIZE = 2  # bf16


@dataclass(frozen=True)
class AttentionShape:
    """One call of causal attention on one device, in bf16. The queries are the last tokens of each sequence."""

    name: str
    model: str
    tp: int
    kind: str  # "prefill", "chunk" or "decode"
    batch: int
    q_length: int
    kv_length: int  # all keys, including the queries' own
    heads: int
    kv_heads: int
    head_size: int

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_length, self.heads, self.head_size

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_length, self.kv_heads, self.head_size

    @property
    def pairs(self) -> int:
        """Number of (query, visible key) pairs of one sequence and head."""
        cached = self.kv_length - self.q_length
        return self.q_length * cached + self.q_length * (self.q_length + 1) // 2

    @property
    def flops(self) -> int:
        """FLOP of both products over visible pairs, counting a multiplication and an addition each."""
        return 4 * self.head_size * self.heads * self.batch * self.pairs

    @property
    def cache_bytes(self) -> int:
        return 2 * ITEM_SIZE * self.batch * self.kv_length * self.kv_heads * self.head_size

    @property
    def bytes(self) -> int:
        """Bytes moved if q, k and v are read once and out is written once."""
        return self.cache_bytes + 2 * ITEM_SIZE * self.batch * self.q_length * self.heads * self.head_size


_LENGTHS = {"8k": 8192, "16k": 16384, "128k": 131072, "1m": 1048576}
_MODELS = {"llama3-8b": (32, 8), "llama3-70b": (64, 8), "llama3-405b": (128, 8)}  # N, K; H is 128
_TENSOR_PARALLEL = (1, 4, 8)
_PREFILLS = ("8k", "16k", "128k")
_CHUNKS = (64, 512, 2048)
_CHUNKS_AT = ("128k", "1m")
_DECODES_AT = ("8k", "128k", "1m")
_BATCHES = (1, 8, 32, 64)


def _model_shapes(model: str, tp: int, heads: int, kv_heads: int) -> Iterator[AttentionShape]:
    def shape(kind: str, case: str, batch: int, q_length: int, kv_length: int) -> AttentionShape:
        name = f"{model}/tp{tp}/{case}"
        return AttentionShape(name, model, tp, kind, batch, q_length, kv_length, heads, kv_heads, 128)

    for at in _PREFILLS:
        yield shape("prefill", f"prefill@{at}", 1, _LENGTHS[at], _LENGTHS[at])
    for at in _CHUNKS_AT:
        for chunk in _CHUNKS:
            yield shape("chunk", f"chunk{chunk}@{at}", 1, chunk, _LENGTHS[at])
    for at in _DECODES_AT:
        for batch in _BATCHES:
            decode = shape("decode", f"decode@{at}/b{batch}", batch, 1, _LENGTHS[at])
            if decode.cache_bytes <= MAX_CACHE_BYTES:
                yield decode


def _all_shapes() -> Iterator[AttentionShape]:
    # FlashAttention-3's published case without grouped heads: 16,384 tokens, N * H = 2048.
    yield AttentionShape("mha/tp1/prefill@16k", "mha", 1, "prefill", 1, 16384, 16384, 16, 16, 128)
    for model, (heads, kv_heads) in _MODELS.items():
        for tp in _TENSOR_PARALLEL:
            yield from _model_shapes(model, tp, heads // tp, max(1, kv_heads // tp))


SHAPES: dict[str, AttentionShape] = {shape.name: shape for shape in _all_shapes()}


def select(pattern: str = "*") -> list[AttentionShape]:
    """The shapes whose names match, as file names match in a shell."""
    return [shape for name, shape in SHAPES.items() if fnmatch.fnmatchcase(name, pattern)]
