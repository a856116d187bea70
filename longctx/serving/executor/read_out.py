"""Reads a batch's results from the devices: tokens, and log probabilities where they are asked for."""

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longctx.serving.executor.interface import Results
from longctx.serving.executor.row_layout import RowLayout
from longctx.serving.request.output import TokenLogprob
from longctx.serving.runner.model_runner import ModelRunner
from longctx.serving.runner.sampler import SampledTokens
from longctx.serving.runner.step_inputs import Shape
from longctx.serving.scheduler.batch import Chunk
from longctx.serving.scheduler.sequence import completion_of

Place = tuple[int, int, int]
"""Rank, row and position of a token."""


@dataclass
class ReadOut:
    """What a batch in the last stage has made, on its way to the host."""

    drawn: SampledTokens
    num_samples: int  # of a rank, in the arrays of `drawn`
    prompts: list[tuple[Chunk, list[Place], Any]] = field(default_factory=list)  # where logprobs were asked for

    @classmethod
    def begin(
        cls, runner: ModelRunner, layout: RowLayout, drawn: SampledTokens, hidden: Any, shape: Shape
    ) -> "ReadOut":
        """Ask for what the host wants to know besides the tokens."""
        asked: list[tuple[Chunk, list[Place]]] = []
        targets = np.zeros((shape.ranks, shape.rows), np.int32)
        for chunk in layout.batch.chunks:
            completion = completion_of(chunk.sequence)
            if completion.num_prompt_logprobs is not None and chunk.start < completion.num_prompt - 1:
                rows = layout.rows_of(chunk, shape)
                for rank, row, position in rows:
                    if position < completion.num_prompt - 1:
                        targets[rank, row] = completion.tokens[position + 1]
                asked.append((chunk, rows))
        if not asked:
            return cls(drawn, shape.samples)
        results = runner.prompt_logprobs(hidden, targets, shape)
        return cls(drawn, shape.samples, [(chunk, rows, results) for chunk, rows in asked])

    def results(self, layout: RowLayout) -> Results:
        """Wait for it."""
        sampled, drawn = layout.sampled, self.drawn
        at = [place.rank * self.num_samples + place.number for place in sampled]
        tokens = np.asarray(drawn.tokens)[at].tolist()
        logprobs: list[TokenLogprob | None] = [None] * len(sampled)
        wanted = [completion_of(place.chunk.sequence).params.logprobs for place in sampled]
        if any(count is not None for count in wanted):
            arrays = [np.asarray(x) for x in drawn[1:]]
            logprobs = [None if n is None else _logprob(arrays, i, n) for i, n in zip(at, wanted, strict=True)]
        return Results(tokens, logprobs, [self._of_prompt(layout, *prompt) for prompt in self.prompts])

    @staticmethod
    def _of_prompt(layout: RowLayout, chunk: Chunk, rows: list[Place], results: Any) -> Any:
        completion = completion_of(chunk.sequence)
        arrays = [np.asarray(x) for x in results]
        each = arrays[0].shape[0] // layout.num_ranks
        told = [
            _logprob(arrays, rank * each + row, completion.num_prompt_logprobs or 0)
            for rank, row, position in rows
            if position < completion.num_prompt - 1
        ]
        return chunk.sequence, chunk.start + 1, told


def _logprob(arrays: List[np.ndarray], row: int, count: int) -> TokenLogprob:
    logprobs, top_tokens, top_logprobs = (x[row] for x in arrays)
    return TokenLogprob(
        float(logprobs), tuple(zip(top_tokens[:count].tolist(), top_logprobs[:count].tolist(), strict=True))
    )
