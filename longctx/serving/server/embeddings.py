"""Bodies and answers of `/v1/embeddings`: hidden states of prompts after the last norm, pooled by the engine."""

import base64
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from pydantic import Field, model_validator

from longctx.serving.request.output import Output
from longctx.serving.request.sampling_params import Pooling, SamplingParams
from longctx.serving.server.schemas import GenerationBody, Prompt

_FIELDS = frozenset({"model", "user", "priority", "cache_salt", "ttft_ms"})  # of all fields of generations


class EmbeddingBody(GenerationBody):
    """`input`: a text, token ids, or a list of either.

    `pooling`: of the prompt's rows, their `"mean"` or the `"last"` one. `normalize`: to a length of 1. `dimensions`:
    fewer than the model's need `truncate_dimensions`, as few models are trained for it: the first ones are kept, and
    normalised again.
    """

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    truncate_dimensions: bool | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _generates_nothing(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in sorted(GenerationBody.model_fields.keys() - _FIELDS):
                if values.get(name) not in (None, False, [], {}):
                    raise ValueError(f"{name} must not be there: an embedding generates no tokens")
        return values

    def check_dimensions(self, size: int) -> None:
        """Raise ValueError unless a model with `size` dimensions has an embedding of as many as are asked for."""
        wanted = size if self.dimensions is None else self.dimensions
        if wanted > size:
            raise ValueError(f"dimensions must be at most {size}, those of the model, got {wanted}")
        if wanted < size and not self.truncate_dimensions:
            raise ValueError(
                f"dimensions must be {size}, those of the model, got {wanted}: truncate_dimensions: true keeps the "
                "first ones, for a model that is trained for it"
            )

    def pooling_params(self) -> SamplingParams:
        """Return the parameters of the engine's request, whose one token is not used."""
        return SamplingParams(max_tokens=1, ignore_eos=True, pooling=self.pooling or "last")


class Embedding(Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    """Answer, in the order of the inputs."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


def embedding_list(body: EmbeddingBody, outputs: Mapping[tuple[int, int], Output], model: str) -> EmbeddingList:
    """Return the answer of all outputs, by the number of the input and an index of 0."""
    data, tokens = [], 0
    for (number, _), output in sorted(outputs.items()):
        assert output.embedding is not None, "an engine has ended a request with pooling and without its embedding"
        values = np.array(output.embedding, np.float32)[: body.dimensions]
        if body.normalize is not False:
            values /= max(float(np.linalg.norm(values.astype(np.float64))), 1e-12)
        tokens += output.metrics.prompt_tokens
        as_text = body.encoding_format == "base64"
        shown = base64.b64encode(values.astype("<f4").tobytes()).decode() if as_text else values.tolist()
        data.append(Embedding(number, shown))
    return EmbeddingList(data, model, EmbeddingUsage(tokens, tokens))
