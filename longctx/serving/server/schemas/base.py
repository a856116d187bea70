"""Bodies of requests: JSON of strict types, whose unknown fields are ignored, as routers add fields of their own."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

MAX_INT64 = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """Of strict types: `"5"` is no number, and NaN is none either."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route whose body the route reads by itself: `openapi_extra`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def components(models: list[type[BaseModel]]) -> dict[str, Any]:
    """The schemas of such bodies, for OpenAPI's `components`."""
    schemas: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    return schemas


def refuse(why: str) -> BeforeValidator:
    """Refuse a field that would change the answer, and that is not there; null, false and [] mean nothing."""

    def check(value: Any) -> Any:
        if value is None or value is False or value == [] or value == {}:
            return None
        raise ValueError(why)

    return BeforeValidator(check)
