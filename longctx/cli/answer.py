"""What the commands share: reading with a progress bar, answering as a stream, and the figures of both."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from longctx.models import StreamDecoder, Tokenizer
from longctx.models.generate import Context
from longctx.models.sampling import Sampling


@dataclass
class Figures:
    """Times of reading and writing, in seconds, and the tokens that each covers."""

    prompt_tokens: int = 0
    read_seconds: float = 0.0
    ttft: float | None = None
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def report(self) -> str:
        decode = "-" if not self.decode_tokens else f"{self.decode_tokens / self.decode_seconds:,.1f} tokens/s"
        ttft = "-" if self.ttft is None else f"{self.ttft:.2f} s (compilation included)"
        return (
            f"prompt   {self.prompt_tokens:,} tokens\n"
            f"TTFT     {ttft}\n"
            f"prefill  {self.prompt_tokens / max(self.read_seconds, 1e-9):,.0f} tokens/s\n"
            f"decode   {decode}"
        )


def read(context: Context, tokens: Sequence[int], figures: Figures, show: bool = True) -> None:
    """Read tokens into the context, with a progress bar on standard error if `show`."""
    start = time.perf_counter()
    with tqdm(total=len(tokens), desc="reading", unit="tok", disable=not show, leave=True) as bar:
        context.read(tokens, progress=bar.update)
    figures.prompt_tokens += len(tokens)
    figures.read_seconds += time.perf_counter() - start


def write(
    context: Context,
    tokenizer: Tokenizer,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: Sequence[int],
    figures: Figures,
) -> str:
    """Continue the context on standard output as the text comes; returns the text."""
    decoder, pieces = StreamDecoder(tokenizer), []

    def emit(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    last = None
    for token in context.write(max_tokens, sampling, stop_ids):
        now = time.perf_counter()
        if figures.ttft is None:
            figures.ttft = now - figures.started
        if last is not None:  # the first token belongs to the prefill
            figures.decode_tokens += 1
            figures.decode_seconds += now - last
        last = now
        emit(decoder.push(token))
    emit(decoder.finish())
    sys.stdout.write("\n")
    return "".join(pieces)
