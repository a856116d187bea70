"""The body of `/v1/completions`."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from longctx.serving.server.schemas.base import TokenIds, refuse
from longctx.serving.server.schemas.generation import GenerationBody

Prompt = Annotated[
    str
    | TokenIds
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
]


class CompletionBody(GenerationBody):
    """`prompt`: a text, token ids, or a list of either. With `echo`, `max_tokens` may be 0: the prompt's own
    log probabilities are what is asked for then."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=2**31 - 1)
    add_special_tokens: bool | None = None
    best_of: Annotated[Any, refuse("best_of is not there: ask for n choices, and take the best")] = None
    suffix: Annotated[Any, refuse("suffix is not there: models continue a text")] = None

    @model_validator(mode="before")
    @classmethod
    def _trivial(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = values | {name: None for name, trivial in _TRIVIAL.items() if values.get(name) == trivial}
        return values

    @model_validator(mode="after")
    def _some_tokens(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or echo true")
        return self


_TRIVIAL = {"best_of": 1, "suffix": ""}
